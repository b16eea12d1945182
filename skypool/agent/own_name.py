"""Makes this machine's host name resolve to the address at which other nodes reach it (the hosts file).

Debian and images of many clouds map a machine's name to 127.0.1.1. Gloo, JAX and torchrun look their own name up and
tell the result to their peers, which cannot reach it.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Collection, Mapping

HOSTS = "/etc/hosts"
MARK = "# skypool:"
"""Marks what was added to the hosts file, and begins what was commented out: removing these undoes it."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""By which Gloo, NCCL and TensorPipe are told the interface, so that they do not look up the own name."""
_SIOCGIFADDR = 0x8915
"""The request of the system for the address of an interface."""


def prepare(address: str, rented: bool, env: Mapping[str, str]) -> dict[str, str]:
    """Let libraries find the address at which this node's peers reach it.

    On a rented machine the hosts file is mended. On a machine of the user's own, or where the file cannot be written,
    the environment of the calls names the interface, unless the user has set that.

    Args:
        address: the one that the peers reach, "" if unknown.
        rented: whether the machine is the pool's alone.
        env: environment of the calls.

    Returns:
        what is to be added to that environment.
    """
    if not address or found(socket.gethostname()) == {address}:
        return {}
    if rented and _mend(address):
        return {}
    name = interface(address)
    if not name:
        return {}
    return {each: name for each in INTERFACE_VARIABLES if each not in os.environ and each not in env}


def found(name: str) -> set[str]:
    """Return the addresses that a name is resolved to; empty if there are none."""
    try:
        return {str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def _mend(address: str) -> bool:
    """Put this machine's address for its name into the hosts file; return True if its name leads there now."""
    name = socket.gethostname()
    try:
        with open(HOSTS) as file:
            text = file.read()
        _write(mended(text, address, name))
    except (OSError, subprocess.SubprocessError) as e:
        print(f"{HOSTS} cannot be written, and {name} stays what it is there: {e}", file=sys.stderr, flush=True)
        return False
    return address in found(name)


def mended(text: str, address: str, name: str) -> str:
    """Return a hosts file in which a name has this address and no loopback one.

    What was there before is kept, commented out.
    """
    names = {name, name.partition(".")[0]}
    lines: list[str] = []
    added = [address, *sorted(names, key=len, reverse=True)]
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not _is_loopback(words) or names.isdisjoint(words[1:]):
            lines.append(line)
            continue
        lines.append(f"{MARK} {line}")
        added += [word for word in words[1:] if word.startswith(f"{name}.") and word not in added]
        if left := [word for word in words if word not in {*names, *added}]:
            lines += [" ".join([*left, MARK, "without", name])] if len(left) > 1 else []
    return "\n".join([*lines, f"{' '.join(added)} {MARK} its own address", ""])


def _is_loopback(words: Collection[str]) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(next(iter(words), "")).is_loopback
    return False


def _write(text: str) -> None:
    """Write the hosts file in place: in a container it is mounted, and cannot be replaced."""
    if os.geteuid() == 0:
        with open(HOSTS, "r+") as file:
            file.write(text)
            file.truncate()
        return
    argv = ["sudo", "-n", "sh", "-c", f"cat > {HOSTS}"]
    subprocess.run(argv, input=text, text=True, check=True, capture_output=True, timeout=20)


def interface(address: str) -> str:
    """Return the name of the network interface that has this address, "" if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                told = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(told[20:24]) == address:
                    return name
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, *_, name = line.split()
            if str(ipaddress.ip_address(int(digits, 16))) == address:
                return name
    return ""
