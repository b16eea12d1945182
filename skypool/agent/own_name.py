"""Makes a node's own host name resolve to the address at which other nodes reach it.

Debian and the images of many clouds map a machine's name to 127.0.1.1. Gloo, JAX and torchrun look up their own name
and send the result to other nodes, which cannot reach that address.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Collection, Mapping

from skypool.devices.network import found, interface

HOSTS = "/etc/hosts"
MARK = "# skypool:"
"""The text that marks lines added to the hosts file, and with which commented-out lines begin."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Environment variables that name the network interface for Gloo, NCCL and TensorPipe.

With such a variable, these libraries do not look up the machine's own name.
"""

_CLONE_NEWNS = 0x20000
"""The flag of unshare(2) for a mount namespace of one's own."""
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_SLAVE = 0x80000
"""Flags of mount(2): show a file at another place, include what is mounted below, and keep changes from the parent."""


def prepare(address: str, rented: bool, env: Mapping[str, str]) -> dict[str, str]:
    """Map this machine's name to `address` in the hosts file, or return variables that name its network interface.

    Libraries then find the address at which other nodes reach this one. Nothing is done if the name already resolves to
    `address` and to no other. The hosts file is changed only on a rented machine, which only this pool uses. Variables
    are returned for the user's own machine, or if the name still does not resolve to `address`. Variables that the user
    has set, in `env` or in this process, are left out.

    Returns variables to add to `env`; {} if none are needed, if `address` is "" (unknown), or if no interface has it.
    """
    if not address or found(socket.gethostname()) == {address}:
        return {}
    if rented and _mend(address):
        return {}
    name = interface(address)
    if not name:
        return {}
    return {each: name for each in INTERFACE_VARIABLES if each not in os.environ and each not in env}


def _mend(address: str) -> bool:
    """Map this machine's name to `address` in the hosts file. Return True if it then resolves to that address."""
    import subprocess  # imports in functions of this module are there because few nodes need them at their start

    name = socket.gethostname()
    try:
        text = _read()
        _write(mended(text, address, name))
    except (OSError, subprocess.SubprocessError) as e:
        print(f"{HOSTS} cannot be written, so {name} keeps its present address there: {e}", file=sys.stderr, flush=True)
        return False
    return address in found(name)


def shadow(address: str, peers: Mapping[str, str]) -> bool:
    """Give this process a hosts file of its own, with `address` for this machine's name, and the addresses of `peers`.

    Nothing on the machine changes. The process gets a mount namespace of its own, in which another file lies over the
    hosts file. Its child processes share the namespace. Later mounts of the machine still appear in it. This serves
    libraries that look up their own name and have no setting for it, such as JAX's collectives on CPUs. It also serves
    libraries that announce their own name to other machines, such as torchrun's rendezvous.

    Only root may do this, so for other users nothing is done. Call this before the process starts a thread. Returns
    True if the name then resolves to `address`, and to no other.

    Args:
        address: the address at which other nodes reach this machine; "" if unknown, and then nothing is done.
        peers: the addresses of other machines by their names. This machine's own names, and names that its hosts file
            has already, are ignored. Upper and lower case are the same.
    """
    name = socket.gethostname()
    if not address:
        return False
    try:
        text = _read()
    except OSError:
        return found(name) == {address}
    known = {word for line in text.splitlines() for word in line.partition("#")[0].lower().split()[1:]}
    known |= {name.lower(), name.lower().partition(".")[0]}
    new = {peer: there for peer, there in peers.items() if peer.lower() not in known}
    is_found = found(name) == {address}
    if is_found and not new:
        return True
    import ctypes
    import tempfile

    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(_CLONE_NEWNS) != 0:
        return False
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile() as own:
        others = "".join(f"{there} {peer} {MARK} another node\n" for peer, there in new.items())
        own.write(_encoded(others + (text if is_found else mended(text, address, name))))
        own.flush()
        os.fchmod(own.fileno(), 0o644)
        if libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None) == 0:  # no mount of this process is seen outside
            libc.mount(os.fsencode(own.name), HOSTS.encode(), None, _MS_BIND, None)
    return found(name) == {address}


def mended(text: str, address: str, name: str) -> str:
    """Return the text of a hosts file in which `name` has `address` and no loopback address. No file is written.

    Lines that give the name a loopback address become comments. Their other names keep the loopback address, except
    those that begin with the name and a dot. These names, and the part of `name` before its first dot, get `address`,
    too.
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
    """Return True if the first word of a line in the hosts file is a loopback address."""
    import ipaddress

    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(next(iter(words), "")).is_loopback
    return False


def _read() -> str:
    """Return the text of the hosts file. Bytes that are not UTF-8, as in old comments, become lone surrogates."""
    with open(HOSTS, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _encoded(text: str) -> bytes:
    """Return the bytes of a text that `_read` has returned."""
    return text.encode("utf-8", "surrogateescape")


def _write(text: str) -> None:
    """Overwrite the hosts file with `text`, by sudo if not root. Raises OSError or SubprocessError if that fails."""
    if os.geteuid() == 0:
        # in place, because in a container the file is a mount and cannot be replaced
        with open(HOSTS, "r+b") as file:
            file.write(_encoded(text))
            file.truncate()
        return
    import subprocess

    argv = ["sudo", "-n", "sh", "-c", f"cat > {HOSTS}"]
    subprocess.run(argv, input=_encoded(text), check=True, capture_output=True, timeout=20)
