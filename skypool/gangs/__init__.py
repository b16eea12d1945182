"""Gangs: calls that run as processes on all their nodes, and that start, fail and run again as a whole.

- `lifecycle`: a pure state machine, which returns the next state and the actions that follow from an event.
- `states`: the values of the state machine: events, actions and the state in between.
- `agreement`: the rules by which all ranks hear a notice at one agreed step.
- `probe`: the function that nodes run for the network check; `network_report`: its report and
  its error.
- `all_reduce`: measures an all-reduce among all GPUs of a gang, for `check="nccl"`.
- `ports`: finds free ports of a node.
- `environment`: the environment variables by which the processes of a gang find each other.

A node is a machine that runs calls, and the client is the user's process. A rank is the number of a process in its
gang, from 0; "a rank ends" means that this process ends. A node runs the processes of at most one gang at a time. A
gang may run several times; each run is an attempt, with a number from 1. A gang that waits for its next run holds
nodes: these get no other calls. Before each run, every held node must answer an empty call. A verdict says how a gang
has ended.

Elsewhere: `skypool.calls.gangs` performs the actions on the client and words the errors; `skypool.pool.network` runs
the network check; `skypool.agent.worker_processes` starts the processes on a node, sets their variables, and kills
them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skypool.gangs.lifecycle import step
    from skypool.gangs.states import Gangs, Order, Verdict

__all__ = ["Gangs", "Order", "Verdict", "step"]


def __getattr__(name: str) -> object:
    """Return a name of `__all__`. It is imported at its first use, because nodes need only other modules."""
    if name not in __all__:
        raise AttributeError(f"module 'skypool.gangs' has no attribute {name!r}")
    from skypool.gangs import lifecycle, states

    value: object = getattr(lifecycle if name == "step" else states, name)
    globals()[name] = value
    return value
