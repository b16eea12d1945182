"""Builds boot scripts for rented machines. The scripts start the guard, and set up the host key and the login.

The guard (`scripts/guard.sh`) is a process of root on the machine. It ends the machine when the granted time is over,
so that a machine without its client does not cost money for ever. At boot, the guard grants `order.lease` seconds.

skypool postpones the end by overwriting the file `GUARD` on the machine with "SERIAL SECONDS". SERIAL is a whole number
that differs from the previous one. Each time the content of the file changes, the guard grants SECONDS seconds from
that moment. One grant is at most the lease, and no grant goes beyond `order.lifetime`. The file is written by skypool's
programs on the machine (the setup script and the agent) when they hear from the client.

A second file brings the end nearer: no grant goes beyond the earliest end that was written there. The guard keeps that
end on the disk, so that a reboot gives no more time. See `skypool.agent.guard`, which writes the file.

The scripts are the same for all clouds, except for the command that ends the machine. They contain the private host
key. Keys that do not exist yet are created on this computer.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import shlex
from importlib.resources import files

from skypool.model import Order

GUARD = "/run/skypool/lease"
"""Path of the file on a rented machine that skypool overwrites to postpone the machine's end.

The file is in a file system in RAM, so a full or slow disk does not matter.
"""

OFF = "shutdown -P now"
"""Shell command that switches a machine off, for clouds where a machine that is off costs nothing."""

UNPACK = 's=$(printf %s "$SKYPOOL_START" | base64 -d | gzip -d); unset SKYPOOL_START; eval "$s"'
"""Shell code that unpacks and runs the script in the environment variable SKYPOOL_START.

The value of the variable is what `packed` returned. The script is passed in a variable because it is too long for a
command-line argument.
"""

_POWER = ("shutdown", "poweroff", "halt")
"""Commands that switch a machine off. If one does not end the machine, the guard tries stronger commands."""

_POLL = 5
"""Longest pause in seconds after which the guard reads the file `GUARD` again. With a short lease, it is shorter."""


def cloud_config(order: Order, *, user: str, end: str = OFF, label: str = "") -> str:
    """Return user data for cloud-init that starts the guard, sets the host key, and lets the pool's key log in.

    The text begins with "#cloud-config". It contains the private host key.

    Args:
        order: order that the machine belongs to.
        user: user name with which the client logs in: the name of the image's own user, or "root".
        end: shell command that ends the machine and its cost. The guard repeats it until the machine ends. If it is
            shutdown, poweroff or halt, the guard later tries stronger commands.
        label: name under which the pool stores the host key; "" for `order.token`.

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
    """Return a POSIX shell script that a container runs as root at its start: it starts the guard, and then runs sshd.

    The text contains the private host key.

    Args:
        order: order that the container belongs to.
        end: shell command that ends the container and its cost. The guard repeats it until the container ends.
        label: name under which the pool stores the host key; "" for `order.token`.
        port: port on which sshd listens.

    Raises:
        UsageError: a key must be created, and ssh-keygen is not installed on this computer.
    """
    private, public, client = _keys(order, label)
    told = {"private": private.strip(), "public": public, "client": client, "port": port}
    return f"{_armed(order, 'root', end)}{_settings(told)}{_script('sshd')}"


def packed(script: str) -> str:
    """Return a script compressed by gzip and encoded in base64, as the value of the variable SKYPOOL_START.

    On the machine, the shell code `UNPACK` unpacks and runs the script, which needs the programs base64 and gzip there.
    The same script gives the same text each time.
    """
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def boot_script(order: Order, *, user: str = "root", end: str = OFF, label: str = "") -> str:
    """Return a shell script that a machine runs as root at its first boot, after its sshd has started.

    The script starts the guard, gives sshd the host key, and lets the pool's key log in if `user` is "root". Before the
    script has run, sshd has another host key. The text contains the private host key.

    Args:
        order: order that the machine belongs to.
        user: user name with which the client logs in. For a user other than "root", the driver must add the pool's key
            (`order.keys.public`) by other means.
        end: shell command that ends the machine and its cost. The guard repeats it until the machine ends. If it is
            shutdown, poweroff or halt, the guard later tries stronger commands.
        label: name under which the pool stores the host key; "" for `order.token`.

    Raises:
        UsageError: a key must be created, and ssh-keygen is not installed on this computer.
    """
    private, public, client = _keys(order, label)
    client = client if user == "root" else ""
    told: dict[str, object] = {"private": private.strip(), "public": public, "client": client}
    return f"#!/bin/sh\n{_armed(order, user, end)}{_script('login')}{_settings(told)}{_script('rekey')}"


def _keys(order: Order, label: str) -> tuple[str, str, str]:
    """Return the private and the public host key, and the public key with which the client logs in."""
    private, public = order.keys.host(label or order.token)
    return private, public, order.keys.public


def _armed(order: Order, user: str, end: str) -> str:
    """Return shell code that starts the guard, which runs the command `end` at the end. `user` may write `GUARD`."""
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
    """Return shell code that sets variables: a line "NAME=value" for each, with the value quoted for the shell."""
    return "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())


def _script(name: str) -> str:
    """Return a script without its lines of comment, as user data has little room. Directives of shellcheck are kept."""
    text = (files("skypool.drivers") / "scripts" / f"{name}.sh").read_text("utf-8")
    return re.sub(r"(?m)^ *# (?!shellcheck ).*\n", "", text)
