"""Decides which SSH host keys are trusted.

With its host key, a machine proves to ssh which machine it is. If a key was declared in advance, only that key is
trusted. Otherwise the keys in the user's own known_hosts files are trusted. If these files have no key of the machine,
the first key that the machine shows is trusted.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

from skypool.errors import HostKeyMismatch, UsageError
from skypool.safety import private, user_folders
from skypool.wire.transport import SSH


def declared(ssh: SSH, label: str, key: str) -> SSH:
    """Return a copy of `ssh` that trusts only the public host key `key`, "ssh-ed25519 AAAA…".

    The key is written into a known_hosts file in skypool's own folder. `label` names the machine and the file. In the
    file's name, characters other than letters, digits, "." and "-" become "-". An older file of the same label is
    replaced.
    """
    alias = f"skypool-{re.sub(r'[^A-Za-z0-9.-]', '-', label)}"
    file = folder() / f"{alias}.declared"
    # replaced in one step, because another thread may be reading it
    part = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    part.write_text(f"{alias} {key}\n")
    part.replace(file)
    return replace(ssh, alias=alias, known_hosts=(str(file),))


def believed(ssh: SSH, label: str, strict: bool) -> tuple[SSH, str]:
    """Return a copy of `ssh` that trusts the machine's host keys in the user's own known_hosts files, and a notice.

    If these files have no key of the machine, the copy trusts the first key that the machine shows. From then on, only
    that key is trusted. The notice tells the user so; it is "" if the files have a key. Does not connect.

    Args:
        ssh: the transport that reaches the machine.
        label: names the machine in the notice and in messages.
        strict: True to raise an error if the user's own files have no key of the machine.

    Raises:
        HostKeyMismatch: the user's known_hosts files have no key of the host, and `strict` is True.
        UsageError: the user's ssh configuration cannot be read, or ssh or ssh-keygen is not installed.
    """
    name, theirs = _where(ssh)
    if any(fingerprint(name, file) for file in theirs):
        return ssh, ""
    if strict:
        raise HostKeyMismatch(
            f"the host key of {label} is unknown, and strict=True accepts known keys only, so nothing was sent to "
            f"{label}; log in once with `ssh` to store the key, or pass the key as host_key="
        )
    ours = str(folder() / "known_hosts")
    private.check_file(ours)
    # pin only while no key is known: otherwise accept-new would add a key of another type
    seen = fingerprint(name, ours)
    notice = f"the host key of {label} was unknown; skypool trusts the first one seen"
    notice += f": {seen}, stored in {ours}" if seen else f", and stores that key in {ours}"
    return replace(ssh, known_hosts=(ours,), pin=not seen), notice


def folder() -> Path:
    """Return the folder of skypool's known_hosts files in the user's state folder. It is made with mode 0700.

    Raises NotPrivate if another user can change the folder.
    """
    return private.folder(user_folders.state() / "ssh", private.STATE)


def fingerprint(name: str, file: str) -> str:
    """Return the fingerprints of the host keys that a known_hosts file has for a name, such as "SHA256:… (ED25519)".

    The name is a host name, address, "[host]:port" or alias, as in the file. Several fingerprints are joined with ", ".
    Returns "" if the file has no key for the name, or does not exist. Raises UsageError without ssh-keygen.
    """
    if not os.path.exists(file):
        return ""
    found = _run(["ssh-keygen", "-l", "-F", name, "-f", file])
    keys = [line.split() for line in found.stdout.splitlines() if not line.startswith("#")]
    return ", ".join(f"{line[2]} ({line[1]})" for line in keys if len(line) > 2)


def _where(ssh: SSH) -> tuple[str, list[str]]:
    """Return the name under which ssh looks up a host key, and the known_hosts files that it reads. Runs `ssh -G`."""
    done = _run(["ssh", "-G", *ssh.argv([])[1:-1]])
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    if done.returncode or "hostname" not in said:
        raise UsageError(
            f"ssh cannot read your configuration for {ssh.host}: {done.stderr.strip()}; correct the configuration "
            f"until `ssh -G {ssh.host}` succeeds"
        )
    name = said["hostname"].lower() if said["port"] == "22" else f"[{said['hostname'].lower()}]:{said['port']}"
    known = f"{said.get('userknownhostsfile', '')} {said.get('globalknownhostsfile', '')}"
    return said.get("hostkeyalias", name), [os.path.expanduser(file) for file in shlex.split(known)]


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command with empty stdin, and wait for it. Raises UsageError if the program is not installed."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as e:
        raise UsageError(f"the program {argv[0]} is not installed on this computer: install openssh-client") from e
