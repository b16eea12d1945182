"""Commands that reach a machine (`SSH`, `Exec`, `Subprocess`), for drivers that do not use `ssh_machine.access`.

`Transport` is what a driver gives in `Access.transport`. `SSH`, `Exec` and `Subprocess` are such transports. `Trouble`
is what a transport says of a command that could not be run.
"""

from skypool.wire.transport import SSH, Exec, Subprocess, Transport, Trouble

__all__ = ["SSH", "Exec", "Subprocess", "Transport", "Trouble"]
