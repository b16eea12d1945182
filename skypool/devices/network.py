"""Finds network interfaces of this machine by their address, their MTU, and the addresses of a host name.

The MTU of an interface is the size in bytes of the largest packet that it sends.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
"""The ioctl request for the address of a network interface."""
_SIOCGIFMTU = 0x8921
"""The ioctl request for the MTU of a network interface."""


def found(name: str) -> set[str]:
    """Return the IP addresses that a host name resolves to, as texts; an empty set if it does not resolve."""
    try:
        return {str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def interface(address: str) -> str:
    """Return the name of the network interface that has this IPv4 or IPv6 address; "" if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                told = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(told[20:24]) == address:
                    return name
    import ipaddress  # here, as few nodes need it at their start

    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, *_, name = line.split()
            if str(ipaddress.ip_address(int(digits, 16))) == address:
                return name
    return ""


def mtu(name: str) -> int | None:
    """Return the MTU of a network interface in bytes; None if there is no such interface, or on macOS."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        told = fcntl.ioctl(probe, _SIOCGIFMTU, struct.pack("256s", name.encode()[:15]))
        return int(struct.unpack_from("i", told, 16)[0])
    return None
