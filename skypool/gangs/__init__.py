"""Gangs: calls that run as processes on all their nodes, and that start, fail and run again as a whole.

`states` has the values of a pure state machine: events, actions and the state in between. `decisions` has the machine:
a function from a state and an event to the next state and the actions that follow.
`network` has the report of the network check among nodes, and `probe` the function that nodes run for it.
"""

from __future__ import annotations

from skypool.gangs.decisions import step
from skypool.gangs.states import Gangs, Order, Verdict

__all__ = ["Gangs", "Order", "Verdict", "step"]
