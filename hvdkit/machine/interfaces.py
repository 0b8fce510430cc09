"""The addresses of this host at which rank 0 listens: those of the networks that the job names, if it names some."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

import psutil

# The variables that choose the network of a job. Each holds names or subnets ("eth0,10.0.0.0/24"), but for NCCL's.
_VARIABLES = ("HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include", "HOROVOD_IFACE")
_NCCL = "NCCL_SOCKET_IFNAME"


class Address(NamedTuple):
    """An address of an interface that is up."""

    interface: str
    address: str

    @property
    def is_local(self) -> bool:
        """True if other hosts cannot reach it."""
        return ipaddress.ip_address(self.address).is_loopback


class Choice(NamedTuple):
    """What the job's variables say about networks.

    Attributes:
        named: names of interfaces and subnets to use; a name may end with ``*`` for all that begin with it.
        excluded: those not to use, if ``named`` is empty.
        source: the variables that say so, for messages.
    """

    named: tuple[str, ...]
    excluded: tuple[str, ...]
    source: str

    def allows(self, one: Address) -> bool:
        """Return True if ``one`` may be used; an address that other hosts cannot reach, only if it is named."""
        if self.named:
            return any(_matches(word, one) for word in self.named)
        return not one.is_local and not any(_matches(word, one) for word in self.excluded)


def choice(environment: Mapping[str, str]) -> Choice:
    """Return what the job's variables say about networks.

    Args:
        environment: names to values, as ``os.environ``.

    Example:
        >>> choice({"HOROVOD_GLOO_IFACE": "eth0"}).named, choice({"NCCL_SOCKET_IFNAME": "^docker,=lo"}).excluded
        (('eth0',), ('docker*', 'lo'))
    """
    found = {variable: environment.get(variable, "").split(",") for variable in _VARIABLES}
    text = environment.get(_NCCL, "")
    # NCCL takes prefixes; "=" asks for the whole name, and "^" before all of them excludes.
    prefixes = [word[1:] if word[0] == "=" else f"{word}*" for word in _words(text.removeprefix("^").split(","))]
    excluded = tuple(prefixes) if text.startswith("^") else ()
    found[_NCCL] = [] if excluded else prefixes
    named = tuple(word for words in found.values() for word in _words(words))
    source = ", ".join(f"{name}={environment[name]}" for name in (*_VARIABLES, _NCCL) if environment.get(name))
    return Choice(named, excluded, source)


def own_addresses() -> list[Address]:
    """Return this host's addresses, loopback included, of interfaces that are up."""
    states = psutil.net_if_stats()
    return [
        Address(interface, entry.address)
        for interface, entries in psutil.net_if_addrs().items()
        if interface in states and states[interface].isup  # others come and go with containers
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
        and not ipaddress.ip_address(entry.address.partition("%")[0]).is_link_local
    ]


def chosen_addresses() -> tuple[list[str], str | None]:
    """Return the addresses to listen at, and a warning, or None.

    The list is empty if every interface is to serve: no variable names one, or those named are not on this host.
    """
    wanted = choice(os.environ)
    if not wanted.named and not wanted.excluded:
        return [], None
    every = own_addresses()
    found = [one.address for one in every if wanted.allows(one)]
    if found:
        return found, None
    names = ", ".join(dict.fromkeys(one.interface for one in every if not one.is_local)) or "none"
    return [], f"{wanted.source}: this host has no such interface with an address, only {names}; it listens on all"


def reachable_addresses() -> list[str]:
    """Return this host's addresses that other hosts may reach."""
    return [one.address for one in own_addresses() if not one.is_local]


def _words(parts: list[str]) -> list[str]:
    return [part.strip() for part in parts if part.strip()]


def _matches(word: str, one: Address) -> bool:
    if word.endswith("*"):
        return one.interface.startswith(word[:-1])
    with contextlib.suppress(ValueError):  # a name
        if "/" in word:
            return ipaddress.ip_address(one.address) in ipaddress.ip_network(word, strict=False)
    return one.interface == word
