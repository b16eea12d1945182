"""Builds boot scripts for rented machines. They start the guard that ends the machine, and set up host key and login.

The scripts are the same for all clouds, except for the command that ends the machine.

The guard (`scripts/guard.sh`) is a process of root on the machine. It ends the machine when the granted time is over,
so a machine without its client does not cost money for ever. At boot the guard grants `order.lease` seconds. The user
who is logged in postpones the end by overwriting the file `GUARD` with "SERIAL SECONDS". Each time the content changes,
the guard grants that many seconds from then. One grant is at most the lease, and none goes beyond `order.lifetime`.
skypool's programs on the machine, the bootstrap and the agent, write the file when they hear from the client.
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
"""The file that postpones a machine's end. It is in memory, so a full or slow disk does not matter."""

OFF = "shutdown -P now"
"""Shell command that switches a machine off, for clouds where a machine that is off costs nothing."""

UNPACK = 's=$(printf %s "$SKYPOOL_START" | base64 -d | gzip -d); unset SKYPOOL_START; eval "$s"'
"""Shell code that runs the script that `packed` put into the environment variable SKYPOOL_START.

The script goes there because it would be too long for an argument.
"""

_POWER = ("shutdown", "poweroff", "halt")
"""Commands that switch a machine off.

If the command that ends the machine is one of them, the guard may try stronger ones.
"""

_POLL = 5
"""Longest pause in seconds between two looks of the guard at its file."""


def cloud_config(order: Order, *, user: str, end: str = OFF, label: str = "") -> str:
    """Return user data for cloud-init that starts the guard, sets the host key, and lets the pool's key log in.

    The guard is the process that ends the machine when its lease is over. The text begins with "#cloud-config". It
    contains the private host key, which is created on this computer if it does not exist yet.

    Args:
        order: order that the machine belongs to.
        user: user that logs in: the image's own user, or "root".
        end: shell command that ends the machine and its cost. It is repeated until the machine ends. If it switches the
            machine off, stronger ways to do so follow.
        label: label of the host key (see `Keys.host`); "" takes `order.token`.

    Raises:
        UsageError: a key must be created, and ssh-keygen is not installed on this computer.
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
    """Return the start command of a container: POSIX shell, run by root, that starts the guard and then runs sshd.

    The guard is the process that ends the container when its lease is over. The text contains the private host key,
    which is created on this computer if it does not exist yet.

    Args:
        order: order that the container belongs to.
        end: shell command that ends the container and its cost. It is repeated until the container ends.
        label: label of the host key (see `Keys.host`); "" takes `order.token`.
        port: port on which sshd listens.

    Raises:
        UsageError: a key must be created, and ssh-keygen is not installed on this computer.
    """
    private, public, client = _keys(order, label)
    told = {"private": private.strip(), "public": public, "client": client, "port": port}
    return f"{_armed(order, 'root', end)}{_settings(told)}{_script('sshd')}"


def packed(script: str) -> str:
    """Return a script compressed by gzip and in base64, as the value of the variable SKYPOOL_START for `UNPACK`.

    The same script gives the same text each time. The machine needs the programs base64 and gzip to unpack it.
    """
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def boot_script(order: Order, *, user: str = "root", end: str = OFF, label: str = "") -> str:
    """Return the script that a machine runs as root at its first boot, after its sshd has started.

    The script starts the guard, the process that ends the machine when its lease is over. It gives sshd the host key,
    and lets the pool's key log in as root. Until it has run, sshd has another host key. The text contains the private
    host key, which is created on this computer if it does not exist yet.

    Args:
        order: order that the machine belongs to.
        user: user that logs in. A user other than root must be let in by other means.
        end: shell command that ends the machine and its cost, as in `cloud_config`.
        label: label of the host key, as in `cloud_config`.

    Raises:
        UsageError: a key must be created, and ssh-keygen is not installed on this computer.
    """
    private, public, client = _keys(order, label)
    client = client if user == "root" else ""
    told: dict[str, object] = {"private": private.strip(), "public": public, "client": client}
    return f"#!/bin/sh\n{_armed(order, user, end)}{_script('login')}{_settings(told)}{_script('rekey')}"


def _keys(order: Order, label: str) -> tuple[str, str, str]:
    """Return three keys as text: private host key, public host key, and the public key with which the pool logs in.

    Keys that do not exist yet are created. An empty `label` takes the token of the order.

    Raises:
        UsageError: a key must be created, and ssh-keygen is not installed on this computer.
    """
    private, public = order.keys.host(label or order.token)
    return private, public, order.keys.public


def _armed(order: Order, user: str, end: str) -> str:
    """Return shell code that starts the guard, the process that ends the machine when its time is over.

    Args:
        order: its lease (rounded up to whole seconds) and lifetime (rounded down) limit the machine's time.
        user: user that may ask the guard for more time.
        end: shell command that ends the machine and its cost.
    """
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
    """Return shell code that sets variables, one "NAME=value" line each, with the values quoted for the shell.

    Values that are no strings are converted by `str`. No values give "".
    """
    return "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())


def _script(name: str) -> str:
    """Return the text of the shell script `scripts/NAME.sh` beside this module, by its name without ".sh".

    An unknown name raises FileNotFoundError.
    """
    return (files("skypool.drivers") / "scripts" / f"{name}.sh").read_text("utf-8")
