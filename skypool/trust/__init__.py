"""How far what a node sends is believed.

A result is a pickle, and a pickle is a program: whoever wrote it runs code where it is read. On a machine of one's own,
or of a cloud, that is nobody else. On a machine that a marketplace rents out it is a stranger, and what that one sends
is read as data: by `reader`, which calls nothing that a pickle names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skypool.model import Instance, Trust
from skypool.trust.text import plain as plain
from skypool.wire import Buffer


class Reader(Protocol):
    """Reads what one node sends that may run nothing here."""

    def value(self, buffers: Sequence[Buffer], what: str) -> Any:
        """A value, which messages call `what`.

        Raises:
            UntrustedResult: it is no data.
        """

    def error(self, buffers: Sequence[Buffer], call: str) -> BaseException:
        """What a call raised, or the refusal of it."""


@dataclass(frozen=True, slots=True)
class Word:
    """How far one node is believed, and who says so."""

    trust: Trust
    why: str


def word(asked: Trust | None, instance: Instance, driver: object) -> Word:
    """The pool's own word, else its offer's, else what its driver says of all its machines; else the strict one."""
    if asked is not None:
        return Word(asked, f'trust="{asked}"')
    if instance.offer is not None:
        offers = "whose machines are not the provider's own" if instance.offer.trust == "data" else "as it says"
        return Word(instance.offer.trust, offers)
    declared = getattr(driver, "trust", None)
    if declared in ("full", "data"):
        return Word(declared, "as its driver says")
    return Word("data", "which does not say whose machines these are")


@dataclass
class Verdicts:
    """How far each node of a pool is believed.

    Args:
        asked: the pool's own word; allowed: classes that may be made of what a node sends, see `classes.Allowed`.
        tell: told once of each provider whose nodes are not believed as they say.
    """

    asked: Trust | None
    allowed: frozenset[str]
    tell: Callable[[str], None]
    _words: dict[int, tuple[str, Word]] = field(default_factory=dict)
    _readers: dict[int, Reader | None] = field(default_factory=dict)
    _told: set[tuple[str, Word]] = field(default_factory=set)

    def judge(self, instance: Instance, driver: object) -> Trust:
        """A node is to be reached: how far it is believed from now on."""
        said = word(self.asked, instance, driver)
        self._words[instance.rank] = (instance.provider, said)
        self._readers[instance.rank] = None
        if said.trust == "data":
            from skypool.trust.reader import DataReader  # not before it is needed: its tables take a moment

            self._readers[instance.rank] = DataReader(instance.rank, self.allowed)
        return said.trust

    def reader(self, rank: int) -> Reader | None:
        """Reads what a node sends; None where it is believed."""
        return self._readers[rank]

    def announce(self) -> None:
        """Say of which providers results are read as data only, once of each."""
        for about in dict.fromkeys(self._words.values()):
            provider, said = about
            if said.trust == "data" and about not in self._told:
                self._told.add(about)
                ranks = [rank for rank, other in self._words.items() if other == about]
                nodes = "1 node" if len(ranks) == 1 else f"{len(ranks)} nodes"
                self.tell(f"results of {nodes} of {provider} are read as data only: {said.why}")
