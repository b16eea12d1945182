"""Gangs: calls that run as processes on all their nodes, and that start, fail and run again as a whole.

`states` has the values of a pure state machine: events, actions and the state in between. `decisions` has the machine:
a function from a state and an event to the next state and the actions that follow.
`network` has the report of the network check among nodes and the text of its error, `probe` the function that nodes run
for the check, and `all_reduce` the measurement of `check="nccl"`. `ports` finds free ports of a node.
`environment` has the environment variables by which the processes of a gang find each other.

Elsewhere: `skypool.calls.gangs` performs the actions on the client and words the errors; `skypool.pool.network` runs
the network check; `skypool.agent.slots` starts the processes on a node, sets their variables, and kills them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skypool.gangs.decisions import step
    from skypool.gangs.states import Gangs, Order, Verdict

__all__ = ["Gangs", "Order", "Verdict", "step"]


def __getattr__(name: str) -> object:
    """Return a name of `__all__`. It is imported at its first use, because nodes need other modules of this package."""
    if name not in __all__:
        raise AttributeError(f"module 'skypool.gangs' has no attribute {name!r}")
    from skypool.gangs import decisions, states

    value: object = getattr(decisions if name == "step" else states, name)
    globals()[name] = value
    return value
