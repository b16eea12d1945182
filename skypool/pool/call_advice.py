"""`Advice`: advice to the user, given once per pool, about calls that could run better."""

from __future__ import annotations

from skypool.pool.life import Life
from skypool.rental.pool_terms import Terms

_CALLED = {"cuda": "GPUs", "rocm": "GPUs", "tpu": "TPU chips"}
"""The names of devices in messages, by the kind of the device."""


class Advice:
    """The advice of one pool. Any thread may call the methods."""

    def __init__(self, terms: Terms, life: Life) -> None:
        self._terms = terms
        self._life = life
        self._told_of_map = False
        self._told_of_stopped_parts = False

    def on_map(self, on_cpu: bool) -> None:
        """Tell the user, once per pool, that `slots="per-device"` would let `map` run more calls at once.

        Do nothing if the user set `slots`, if no node has several devices, for slices of several hosts, or if the
        mapped function needs no device (`on_cpu`).
        """
        if self._told_of_map or on_cpu or self._terms.need.slots is not None or self._life.state.hosts > 1:
            return
        most = max(list(self._life.connections.welcomes.values()), key=lambda each: each.devices, default=None)
        if most is not None and most.devices > 1:
            devices = most.devices
            kind = next((each.kind for each in most.health.devices), "")
            self._told_of_map = True
            self._life.notice(
                f"map runs one call at a time on each node, with all {devices} {_CALLED.get(kind, 'devices')}; "
                f'ComputePool(..., slots="per-device") runs {devices} at a time'
            )

    def on_stopped(self, text: str) -> None:
        """Tell the user, once per pool, that parts of a call were stopped because another part failed.

        The text says what was stopped and why, and how to let such parts go on.
        """
        if not self._told_of_stopped_parts:
            self._told_of_stopped_parts = True
            self._life.notice(text)
