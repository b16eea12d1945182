"""Transports: objects that build the commands which reach a machine, for drivers without `ssh_machine.access`.

`Transport` is the protocol of the objects in `Access.transport`. `SSH`, `Exec` and `Subprocess` implement this
protocol. `Trouble` lists the kinds of reasons why a command could not be run on a machine.
"""

from skypool.wire.transport import SSH, Exec, Subprocess, Transport, Trouble

__all__ = ["SSH", "Exec", "Subprocess", "Transport", "Trouble"]
