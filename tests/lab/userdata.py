"""What user data asks of a machine: a subset of cloud-config, or a script, made into the plan that boot.py follows."""

from __future__ import annotations

import base64
import gzip
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

KNOWN = {
    *("bootcmd", "ssh_keys", "ssh_authorized_keys", "write_files", "runcmd", "hostname"),
    *("disable_root", "ssh_deletekeys"),
}
FILE_KEYS = {"path", "content", "encoding", "permissions", "owner", "append"}
PACKED = {"", "text/plain", "b64", "base64", "gz+b64", "gz+base64", "gzip+base64"}


def plan(
    user_data: str, *, hostname: str, user: str, keys: Sequence[str], start: str, env: Mapping[str, str]
) -> dict[str, Any]:
    """The plan for one machine.

    Raises:
        ValueError: If user data is neither a script nor a cloud-config that the lab knows in full. A real cloud-init
            would only log that, and the test would wait for what never comes.
    """
    config: dict[str, Any] = {}
    script = ""
    if user_data.startswith("#!"):
        script = user_data
    elif user_data.startswith("#cloud-config"):
        config = yaml.safe_load(user_data) or {}
        script = _script(config.get("runcmd") or [])
    elif user_data.strip():
        raise ValueError(f"user data is neither '#!' nor '#cloud-config': {user_data[:60]!r}")
    if unknown := set(config) - KNOWN:
        raise ValueError(f"the lab's cloud-config does not know {', '.join(sorted(unknown))}")
    if start and user_data:
        raise ValueError("a container has a start command or user data, not both")
    return {
        "hostname": config.get("hostname", hostname),
        "user": user,
        "keys": [*keys, *(config.get("ssh_authorized_keys") or [])],
        "disable_root": config.get("disable_root", True),
        "host_keys": config.get("ssh_keys") or {},
        "write_files": [_file(each) for each in config.get("write_files") or []],
        "first": _script(config.get("bootcmd") or []),
        "script": script,
        "start": start,
        "env": dict(env),
    }


def _script(commands: Sequence[str | Sequence[str]]) -> str:
    """A string is a line of shell, a list is one command; a failure stops nothing, as in cloud-init."""
    if not commands:
        return ""
    lines = [each if isinstance(each, str) else shlex.join(map(str, each)) for each in commands]
    return "\n".join(["#!/bin/sh", *lines, ""])


def _file(entry: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := set(entry) - FILE_KEYS:
        raise ValueError(f"the lab's write_files does not know {', '.join(sorted(unknown))}")
    encoding = str(entry.get("encoding", ""))
    if encoding not in PACKED:
        raise ValueError(f"the lab's write_files does not know the encoding {encoding}")
    content = str(entry.get("content", "")).encode()
    if "b64" in encoding or "base64" in encoding:
        content = base64.b64decode(content)
    if encoding.startswith("gz"):
        content = gzip.decompress(content)
    permissions = entry.get("permissions", "0644")
    return {
        "path": entry["path"],
        "content": base64.b64encode(content).decode(),
        "permissions": f"{permissions:o}" if isinstance(permissions, int) else permissions,
        "owner": entry.get("owner", "root:root"),
        "append": bool(entry.get("append", False)),
    }
