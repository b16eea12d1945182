"""A pool whose machines come and go, and which writes down what happens to it."""

from __future__ import annotations

import time
from typing import Any, ClassVar, Self

import skypool as sky
from skypool import events
from skypool.model import Instance
from skypool.testing import FakeCloud
from tests.conftest import eventually


class Watched(sky.ComputePool):
    """Of machines of a fake cloud; a subclass adds `settings` to those that it has."""

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, cloud: FakeCloud, **options: Any) -> None:
        merged: dict[str, Any] = {"slots": 1, "console": "off", **self.settings, **options}
        super().__init__(cloud, **merged)
        self.cloud = cloud
        self.told: list[events.Event] = []
        self.events.listen(self.told.append)

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    # --- what was heard --------------------------------------------------------------------------------------

    def heard(self, kind: type[Any]) -> list[Any]:
        return [event for event in list(self.told) if type(event) is kind]

    @property
    def printed(self) -> str:
        return "".join(event.text for event in self.heard(events.Output))

    # --- its machines ----------------------------------------------------------------------------------------

    def machines(self) -> dict[int, Instance]:
        return {each.node: each for each in self.cloud.instances(pool=self.name)}

    def notify(self, node: int, seconds: float = 60.0) -> float:
        """The provider says that it takes a node back in so many seconds; about when that is."""
        self.cloud.control.interrupt(self.machines()[node], seconds)
        return time.time() + seconds

    def take(self, node: int) -> None:
        """The machine goes: all at once, and without a word."""
        self.cloud.control.kill(self.machines()[node])

    # --- waiting ---------------------------------------------------------------------------------------------

    def ready(self) -> list[int]:
        return [node for node, phase in self.nodes.items() if phase == "ready"]

    def until_ready(self, *nodes: int) -> None:
        eventually(lambda: self.ready() == [*nodes], what=f"{nodes} ready, and nothing else")

    def until_busy(self, *nodes: int, calls: int = 1) -> None:
        """So many calls run on each of these nodes, or have run; on any node if none is named."""

        def busy() -> set[int]:
            return {each.node for each in self.heard(events.NodeStatus) if each.busy >= calls}

        eventually(lambda: busy() >= {*nodes} if nodes else busy(), what=f"calls on {nodes or 'a node'}")


class OnSpot(Watched):
    """A pool of spot machines."""

    settings: ClassVar[dict[str, Any]] = {"market": "spot"}
