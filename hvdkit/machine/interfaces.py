"""Host names and network interfaces of this host: their addresses, and which of them the job's variables select."""

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
        included: names of interfaces and subnets to use; a name with a trailing ``*`` is a prefix. Empty: all.
        excluded: names and subnets not to use, if ``included`` is empty.
        source: the variables and their values, for messages.
    """

    included: tuple[str, ...]
    excluded: tuple[str, ...]
    source: str

    def allows(self, address: Address) -> bool:
        """Return True if ``address`` may be used. One that is not routable must be included explicitly."""
        if self.included:
            return any(_matches(pattern, address) for pattern in self.included)
        return address.is_routable and not any(_matches(pattern, address) for pattern in self.excluded)


def network_choice(environment: Mapping[str, str]) -> NetworkChoice:
    """Return the networks that the job's variables select.

    Example:
        >>> network_choice({"HOROVOD_GLOO_IFACE": "eth0,10.0.0.0/24"}).included
        ('eth0', '10.0.0.0/24')
        >>> network_choice({"NCCL_SOCKET_IFNAME": "^docker,=lo"}).excluded
        ('docker*', 'lo')
    """
    included = [pattern for variable in _VARIABLES for pattern in _split(environment.get(variable, ""))]
    nccl = environment.get(_NCCL, "")
    # NCCL matches prefixes. "=" requires the whole name; a leading "^" excludes the whole list.
    patterns = [name[1:] if name[0] == "=" else f"{name}*" for name in _split(nccl.removeprefix("^"))]
    excluded = patterns if nccl.startswith("^") else []
    if not excluded:
        included += patterns
    source = ", ".join(f"{name}={environment[name]}" for name in (*_VARIABLES, _NCCL) if environment.get(name))
    return NetworkChoice(tuple(included), tuple(excluded), source)


def own_addresses(*families: socket.AddressFamily) -> list[Address]:
    """Return the addresses of this host's interfaces that are up, including loopback, fastest interface first.

    Link-local IPv6 addresses are omitted, because they are meaningless without the interface. Default: both families.
    """
    states = psutil.net_if_stats()
    addresses = [
        Address(interface, entry.address, states[interface].speed)
        for interface, entries in psutil.net_if_addrs().items()
        if interface in states and states[interface].isup  # others come and go with containers
        for entry in entries
        if entry.family in (families or (socket.AF_INET, socket.AF_INET6))
        and (entry.family == socket.AF_INET or not ipaddress.ip_address(entry.address.partition("%")[0]).is_link_local)
    ]
    return sorted(addresses, key=lambda address: -address.megabits)


def chosen_addresses() -> tuple[list[str], str | None]:
    """Return the addresses to listen on, and a warning or None.

    An empty list stands for all interfaces: no variable selects one, or this host has none of the selected ones.
    """
    choice = network_choice(os.environ)
    if not choice.included and not choice.excluded:
        return [], None
    addresses = own_addresses()
    if allowed := [each.address for each in addresses if choice.allows(each)]:
        return allowed, None
    names = ", ".join(dict.fromkeys(each.interface for each in addresses if each.is_routable)) or "none"
    return [], f"{choice.source}: this host has no such interface with an address, only {names}; it listens on all"


def reachable_addresses() -> list[str]:
    """Return the addresses by which other hosts may reach this one."""
    return [each.address for each in own_addresses() if each.is_routable]


@cache
def host_names() -> frozenset[str]:
    """Return the names and IPv4 addresses that refer to this host."""
    full_name = socket.gethostname()
    addresses = {each.address for each in own_addresses(socket.AF_INET)}
    return frozenset({"localhost", "127.0.0.1", full_name, full_name.partition(".")[0]} | addresses)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _matches(pattern: str, address: Address) -> bool:
    if pattern.endswith("*"):
        return address.interface.startswith(pattern[:-1])
    with contextlib.suppress(ValueError):  # not a subnet
        if "/" in pattern:
            return ipaddress.ip_address(address.address) in ipaddress.ip_network(pattern, strict=False)
    return address.interface == pattern
