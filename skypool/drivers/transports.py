"""Transports that run commands on a machine, for drivers that do not use `ssh_machine.access`.

`Transport` is the protocol of `Access.transport`. `SSH`, `Exec` and `Subprocess` implement it. `Trouble` classifies why
a transport could not run a command.
"""

from skypool.wire.transport import SSH, Exec, Subprocess, Transport, Trouble

__all__ = ["SSH", "Exec", "Subprocess", "Transport", "Trouble"]
