"""Names and network interfaces of this host: their addresses, and which of them the job's variables select."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import psutil

# Variables that select the network of a job. All but NCCL's contain names or subnets ("eth0,10.0.0.0/24").
_VARIABLES = ("HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include", "HOROVOD_IFACE")
_NCCL = "NCCL_SOCKET_IFNAME"
# Loopback, and bridges that have the same address on every host: a rank that uses one would connect to itself.
_BRIDGES = re.compile(r"(lo|docker|br-|virbr|veth|cni|flannel|cali|vmnet|vboxnet|podman|lxc|lxd|dummy|tunl)")


class Address(NamedTuple):
    """An address of an interface that is up.

    Attributes:
        interface: the interface's name.
        address: IPv4 or IPv6 address.
        megabits: the interface's speed in Mbit/s; 0 if unknown.
    """

    interface: str
    address: str
    megabits: int = 0

    @property
    def is_routable(self) -> bool:
        """True if it is neither a loopback nor a link-local address."""
        address = ipaddress.ip_address(self.address)
        return not address.is_loopback and not address.is_link_local

    @property
    def is_local(self) -> bool:
        """True if other hosts probably cannot reach it, judging by the interface's name.

        Example:
            >>> Address("docker0", "172.17.0.1").is_local
            True
        """
        return bool(_BRIDGES.match(self.interface)) or ipaddress.ip_address(self.address).is_loopback


class NetworkChoice(NamedTuple):
    """The networks that the user has selected with variables.

    Attributes:
        named: names of interfaces and subnets to use; a name with a trailing ``*`` is a prefix.
        excluded: names and subnets not to use; applies without ``named``.
        source: the variables and their values, for messages.
    """

    named: tuple[str, ...]
    excluded: tuple[str, ...]
    source: str

    def allows(self, one: Address) -> bool:
        """Return True if ``one`` may be used. An address that is not routable must be named explicitly."""
        if self.named:
            return any(_matches(word, one) for word in self.named)
        return one.is_routable and not any(_matches(word, one) for word in self.excluded)


def choice(environment: Mapping[str, str]) -> NetworkChoice:
    """Return the networks selected by the job's variables.

    Args:
        environment: variables by name, like ``os.environ``.

    Example:
        >>> choice({"HOROVOD_GLOO_IFACE": "eth0"}).named, choice({"NCCL_SOCKET_IFNAME": "^docker,=lo"}).excluded
        (('eth0',), ('docker*', 'lo'))
    """
    found = {variable: environment.get(variable, "").split(",") for variable in _VARIABLES}
    text = environment.get(_NCCL, "")
    # NCCL matches prefixes. "=" requires the whole name; a leading "^" excludes the whole list.
    prefixes = [word[1:] if word[0] == "=" else f"{word}*" for word in _words(text.removeprefix("^").split(","))]
    excluded = tuple(prefixes) if text.startswith("^") else ()
    found[_NCCL] = [] if excluded else prefixes
    named = tuple(word for words in found.values() for word in _words(words))
    source = ", ".join(f"{name}={environment[name]}" for name in (*_VARIABLES, _NCCL) if environment.get(name))
    return NetworkChoice(named, excluded, source)


def own_addresses(*families: socket.AddressFamily) -> list[Address]:
    """Return the addresses of this host's interfaces that are up, including loopback, fastest interface first.

    Link-local IPv6 addresses are omitted, because they are meaningless without the interface.

    Args:
        families: ``socket.AF_INET``, ``socket.AF_INET6``; default: both.
    """
    states = psutil.net_if_stats()
    found = [
        Address(interface, entry.address, states[interface].speed)
        for interface, entries in psutil.net_if_addrs().items()
        if interface in states and states[interface].isup  # others come and go with containers
        for entry in entries
        if entry.family in (families or (socket.AF_INET, socket.AF_INET6))
        and (entry.family == socket.AF_INET or not ipaddress.ip_address(entry.address.partition("%")[0]).is_link_local)
    ]
    return sorted(found, key=lambda one: -one.megabits)


def chosen_addresses() -> tuple[list[str], str | None]:
    """Return the addresses to listen on, and a warning or None.

    The list is empty for all interfaces: no variable selects one, or the selected ones do not exist on this host.
    """
    wanted = choice(os.environ)
    if not wanted.named and not wanted.excluded:
        return [], None
    every = own_addresses()
    found = [one.address for one in every if wanted.allows(one)]
    if found:
        return found, None
    names = ", ".join(dict.fromkeys(one.interface for one in every if one.is_routable)) or "none"
    return [], f"{wanted.source}: this host has no such interface with an address, only {names}; it listens on all"


def reachable_addresses() -> list[str]:
    """Return the addresses by which other hosts may reach this one."""
    return [one.address for one in own_addresses() if one.is_routable]


@cache
def host_names() -> frozenset[str]:
    """Return the names and IPv4 addresses that refer to this host."""
    whole = socket.gethostname()
    addresses = {one.address for one in own_addresses(socket.AF_INET)}
    return frozenset({"localhost", "127.0.0.1", whole, whole.partition(".")[0]} | addresses)


def _words(parts: list[str]) -> list[str]:
    return [part.strip() for part in parts if part.strip()]


def _matches(word: str, one: Address) -> bool:
    if word.endswith("*"):
        return one.interface.startswith(word[:-1])
    with contextlib.suppress(ValueError):  # a name
        if "/" in word:
            return ipaddress.ip_address(one.address) in ipaddress.ip_network(word, strict=False)
    return one.interface == word
