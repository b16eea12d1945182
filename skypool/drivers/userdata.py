"""Boot scripts for rented machines: arm the guard that ends the machine, set the host key, let the pool's key in.

The scripts name no cloud.

The guard (`scripts/guard.sh`, a root process) ends the machine when its grant is over. It begins with a grant of
`order.lease` seconds. Who logs in puts the end off by writing "SERIAL SECONDS" over what is in the file `GUARD`:
each time that changes the machine is granted so many seconds from then, at most a lease at once and never beyond
`order.lifetime`. The bootstrap and the agent do so when they hear from the client.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import shlex
from importlib.resources import files

from skypool.model import Order

GUARD = "/run/skypool/lease"
"""The file by which a machine's end is put off: in memory, so that neither a full disk nor a slow one hinders."""

OFF = "shutdown -P now"
"""Ends a machine where a machine that is switched off costs nothing."""

UNPACK = 's=$(printf %s "$SKYPOOL_START" | base64 -d | gzip -d); unset SKYPOOL_START; eval "$s"'
"""Shell that runs a script out of its environment, where `packed` put it: as an argument it would be too long."""

_POWER = ("shutdown", "poweroff", "halt")
"""Commands that switch a machine off: the guard follows them with harder ways."""

_POLL = 5
"""Most seconds between two looks of the guard at its file."""


def cloud_config(order: Order, *, user: str, end: str = OFF, label: str = "") -> str:
    """Return user data for cloud-init: it arms the guard, sets the host key and lets the pool's own key in.

    Args:
        user: who logs in: the image's own user, or "root".
        end: shell that ends the machine and its cost, run again and again. One that switches the machine off is
            followed by harder ways to do that.
        label: which host key; "" takes that of `order.token`.
    """
    private, public, client = _keys(order, label)
    config = {
        "bootcmd": [["sh", "-c", _armed(order, user, end)], ["sh", "-c", _script("login")]],
        "ssh_keys": {"ed25519_private": private, "ed25519_public": public},
        "ssh_deletekeys": True,
        "ssh_authorized_keys": [client],
        "disable_root": user != "root",
    }
    return f"#cloud-config\n{json.dumps(config, indent=1)}\n"


def start_script(order: Order, *, end: str, label: str = "", port: int = 22) -> str:
    """Return the start command of a container, POSIX shell run by root: it arms the guard, then becomes sshd.

    Args:
        end: shell that ends the container and its cost, run again and again.
        label: which host key; "" takes that of `order.token`.
        port: where sshd listens.
    """
    private, public, client = _keys(order, label)
    told = {"private": private.strip(), "public": public, "client": client, "port": port}
    return f"{_armed(order, 'root', end)}{_settings(told)}{_script('sshd')}"


def packed(script: str) -> str:
    """Return a script as the value of SKYPOOL_START, for `UNPACK`. The same script is the same text each time.

    The machine needs base64 and gzip to unpack it.
    """
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def boot_script(order: Order, *, user: str = "root", end: str = OFF, label: str = "") -> str:
    """Return the script that a machine runs as root at its first boot, after its sshd has started.

    It arms the guard, then gives that sshd the host key and lets the pool's own key in. Until then the machine has
    another host key.

    Args:
        user: who logs in; another one than root must be let in by other means.
        end, label: as `cloud_config` has them.
    """
    private, public, client = _keys(order, label)
    client = client if user == "root" else ""
    told: dict[str, object] = {"private": private.strip(), "public": public, "client": client}
    return f"#!/bin/sh\n{_armed(order, user, end)}{_script('login')}{_settings(told)}{_script('rekey')}"


def _keys(order: Order, label: str) -> tuple[str, str, str]:
    """Return the private and the public host key, and the public key of the pool, which logs in."""
    private, public = order.keys.host(label or order.token)
    return private, public, order.keys.public


def _armed(order: Order, user: str, end: str) -> str:
    """Return shell that arms the guard."""
    lease = max(1, math.ceil(order.lease))
    guard = {
        "TOKEN": order.token,
        "LEASE": lease,
        "LIFETIME": 0 if order.lifetime is None else max(1, math.floor(order.lifetime)),
        "POLL": min(_POLL, max(1, lease // 20)),
        "WHO": user,
        "END": end,
        "OFF": "yes" if end.split()[0] in _POWER else "no",
    }
    script = _settings(guard) + _script("guard")
    return _settings({"guard": script}) + _script("arm")


def _settings(values: dict[str, object]) -> str:
    """Return shell that sets variables."""
    return "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())


def _script(name: str) -> str:
    """Return the text of a file in `scripts`."""
    return (files("skypool.drivers") / "scripts" / f"{name}.sh").read_text("utf-8")
