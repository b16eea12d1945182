"""Verification of SSH host keys: the declared key, else the keys the user knows, else the first one seen."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

from skypool.errors import HostKeyMismatch, UsageError
from skypool.wire.transport import SSH


def declared(ssh: SSH, label: str, key: str) -> SSH:
    """The transport that believes this key only, "ssh-ed25519 AAAA…"; `label` names the machine."""
    alias = f"skypool-{re.sub(r'[^A-Za-z0-9.-]', '-', label)}"
    file = folder() / f"{alias}.declared"
    part = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")  # another thread may be about to read it
    part.write_text(f"{alias} {key}\n")
    part.replace(file)
    return replace(ssh, alias=alias, known_hosts=(str(file),))


def believed(ssh: SSH, label: str, strict: bool) -> tuple[SSH, str]:
    """The transport that believes the keys the user knows, or if there are none, the first one seen.

    Args:
        strict: never the first one seen.

    Returns:
        it, and what the user should know of that, "" for nothing.

    Raises:
        HostKeyMismatch: nobody knows its key, and `strict`.
    """
    name, theirs = _where(ssh)
    if any(fingerprint(name, file) for file in theirs):
        return ssh, ""
    if strict:
        raise HostKeyMismatch(
            f"nobody knows the host key of {label}, and strict=True: log in there by hand once, or say what it is "
            f"(host_key=); nothing was sent to it"
        )
    ours = str(folder() / "known_hosts")
    seen = fingerprint(name, ours)  # only one key is ever pinned: with accept-new another kind of key would be added
    notice = f"the host key of {label} is not known otherwise, and is the first one seen: {seen} in {ours}"
    return replace(ssh, known_hosts=(ours,), pin=not seen), notice


def folder() -> Path:
    """Where our own keys and files of known hosts are."""
    import platformdirs  # not on a node, where the driver may be imported too

    found = Path(platformdirs.user_state_dir("skypool")) / "ssh"
    found.mkdir(parents=True, exist_ok=True, mode=0o700)
    return found


def fingerprint(name: str, file: str) -> str:
    """Of the keys that a known_hosts file has for a name, "" if it has none."""
    if not os.path.exists(file):
        return ""
    found = _run(["ssh-keygen", "-l", "-F", name, "-f", file])
    keys = [line.split() for line in found.stdout.splitlines() if not line.startswith("#")]
    return ", ".join(f"{line[2]} ({line[1]})" for line in keys if len(line) > 2)


def _where(ssh: SSH) -> tuple[str, list[str]]:
    """Under what name ssh looks for this host's key, and in which files of the user's."""
    done = _run(["ssh", "-G", *ssh.argv([])[1:-1]])
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    if done.returncode or "hostname" not in said:
        raise UsageError(f"your ssh configuration cannot be used for {ssh.host}: {done.stderr.strip()}")
    name = said["hostname"].lower() if said["port"] == "22" else f"[{said['hostname'].lower()}]:{said['port']}"
    known = f"{said.get('userknownhostsfile', '')} {said.get('globalknownhostsfile', '')}"
    return said.get("hostkeyalias", name), [os.path.expanduser(file) for file in shlex.split(known)]


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as e:
        raise UsageError(f"there is no {argv[0]} program here: install openssh-client") from e
