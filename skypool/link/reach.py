"""The local command that runs a shell script on a node."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from skypool.errors import UsageError
from skypool.model import Access
from skypool.shipping.package_zip import shell_path
from skypool.wire.transport import SSH


def local_command(
    access: Access, python: str, script: str, terminal: bool = False, ports: Sequence[tuple[int, str, int]] = ()
) -> list[str]:
    """Return a local command that runs a shell script on a machine.

    Args:
        access: how the machine is reached.
        python: the path of Python there; "" if the setup of the machine wrote the path to a file.
        script: the script. It can use the variables `folder` (folder of the node's agent), `cwd` (that of calls),
            `programs` (what `Access` says of it) and `python`.
        terminal: True if the command is to run in a terminal.
        ports: triples (port of this computer, host, port) to forward while the command runs.

    Raises:
        UsageError: there are ports, and the machine is not reached by ssh.
    """
    transport = access.transport
    script = script_on(access, python, script)
    if ports:
        if not isinstance(transport, SSH):
            raise UsageError(
                "--forward needs a node that is reached over ssh, but the chosen node is reached in another way; leave "
                "--forward out, and run `skypool forward` in another terminal"
            )
        transport = replace(transport, forwards=tuple(ports))
    return transport.argv(["sh", "-c", script], terminal=terminal)


def script_on(access: Access, python: str, script: str) -> str:
    """Return a shell script for a machine with the variables that `local_command` promises."""
    word = shlex.quote(python) if python else f'"$(cat {shell_path(access.home)}/boot/python 2> /dev/null)"'
    told = f"folder={shell_path(access.folder)}\ncwd={shell_path(access.cwd or access.folder)}\npython={word}\n"
    return f"{told}programs={shell_path(access.programs)}\n{script}"
