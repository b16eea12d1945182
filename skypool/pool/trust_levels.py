"""Decides for each node whether its results may be unpickled or are read as data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from skypool.drivers.contract import Driver, abilities
from skypool.errors import ProviderError
from skypool.model import Instance, Need, Trust
from skypool.trust import Reader


@dataclass(frozen=True, slots=True)
class Word:
    """How far one node is believed, and who says so."""

    trust: Trust
    why: str


def trust_word(asked: Trust | None, instance: Instance, driver: Driver) -> Word:
    """The pool's own word, else its offer's, else what its driver says of all its machines; else the strict one.

    Without an offer, as after an attach, the driver may be asked for some: this may block.
    """
    if asked is not None:
        return Word(asked, f'the pool says trust="{asked}"')
    if instance.offer is not None:
        return Word(instance.offer.trust, "it rents out strangers' machines")
    declared = abilities(driver).trust
    if declared is None:
        try:
            said = {each.trust for each in driver.offers(Need())}
        except (ProviderError, OSError):
            said = set()
        if not said:
            return Word("data", "it did not say whose machines these are")
        declared = "data" if "data" in said else "full"
    return Word(declared, "it rents out strangers' machines")


@dataclass
class TrustLevels:
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

    def judge(self, instance: Instance, driver: Driver) -> Trust:
        """A node is to be reached: how far it is believed from now on. See `trust_word`: this may block."""
        said = trust_word(self.asked, instance, driver)
        self._words[instance.node] = (instance.provider, said)
        self._readers[instance.node] = None
        if said.trust == "data":
            from skypool.trust.reader import DataReader  # not before it is needed: its tables take a moment

            self._readers[instance.node] = DataReader(instance.node, self.allowed)
        return said.trust

    def reader(self, node: int) -> Reader | None:
        """Reads what a node sends; None where it is believed."""
        return self._readers[node]

    def is_stranger(self, node: int) -> bool:
        """Whether a node is not believed as it says."""
        return self._readers[node] is not None

    def announce(self) -> None:
        """Say of which providers results are read as data only, once of each."""
        for about in dict.fromkeys(self._words.values()):
            provider, said = about
            if said.trust == "data" and about not in self._told:
                self._told.add(about)
                count = sum(other == about for other in self._words.values())
                nodes = "1 node" if count == 1 else f"{count} nodes"
                self.tell(f"results of {nodes} of {provider} are read as data only: {said.why}")
