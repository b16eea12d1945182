"""The strings by which the driver contract moves a cloud of the lab (`skypool.testing.trial.ABILITIES`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from skypool.errors import ProviderError
from skypool.model import Instance, Offer


class LabStrings:
    """What most of them have in common; a cloud's own subclass says what it calls things.

    Attributes:
        create: the call that makes a machine.
        refusals: what that is refused with, as the world's `refuse` takes it.
        boot: which of the world's delays is over before a machine is up.
    """

    create: ClassVar[str]
    refusals: ClassVar[Mapping[type[ProviderError], Any]]
    boot: ClassVar[str]

    def __init__(self, world: Any) -> None:
        self.world = world

    def count(self) -> int:
        return int(self.world.count()["instances"])

    def leftovers(self) -> int:
        return sum(number for name, number in self.world.count().items() if name != "instances")

    def stock_out(self, offer: Offer, left: int) -> None:
        self.world.capacity(left, offer.instance_type, offer.zone, offer.market)

    def refuse(self, kind: type[ProviderError]) -> bool:
        if kind in self.refusals:
            self.world.refuse(self.create, *self.refusals[kind])
        return kind in self.refusals

    def lose_reply(self) -> None:
        self.world.drop(self.create)

    def never_boot(self) -> None:
        setattr(self.world.delays, self.boot, 1e9)

    def kill(self, instance: Instance) -> None:
        self.world.vanish(instance.id)

    def undying(self, instance: Instance, times: int | None) -> None:
        self.world.undying(instance.id, times)

    def cut_short(self, on: bool) -> None:
        self.world.pages.cut = on


class PagedStrings(LabStrings):
    """Those of a cloud whose API lists things in pages."""

    def paged(self, size: int) -> None:
        self.world.pages.size = size
