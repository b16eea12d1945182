"""The local command by which an observer reaches a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from skypool.errors import UsageError
from skypool.model import Access
from skypool.shipping.bundle import shell_path
from skypool.wire.transport import SSH


def local_command(access: Access, script: str, terminal: bool, ports: Sequence[tuple[int, str, int]]) -> list[str]:
    """Return a local command that runs a shell script on a machine.

    Args:
        access: how the machine is reached.
        script: the script. It can use the variables `folder` (folder of the node's agent) and `cwd` (that of calls).
        terminal: True if the command is to run in a terminal.
        ports: triples (port of this computer, host, port) to forward while the command runs.

    Raises:
        UsageError: there are ports, and the machine is not reached by ssh.
    """
    transport = access.transport
    if ports:
        if not isinstance(transport, SSH):
            raise UsageError(
                "--forward needs a node that is reached over ssh, but the chosen node is reached in another way; leave "
                "--forward out, and run `skypool forward` in another terminal"
            )
        transport = replace(transport, forwards=tuple(ports))
    told = f"folder={shell_path(access.folder)}\ncwd={shell_path(access.cwd or access.folder)}\n"
    return transport.argv(["sh", "-c", told + script], terminal=terminal)
