"""`TrustLevels`: decides for each node if its results may be unpickled, or are read as plain data only.

Unpickling can run code of the sender. So results from machines that belong to strangers are read as data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from skypool.drivers.contract import Driver, abilities
from skypool.errors import ProviderError
from skypool.model import Instance, Need, Trust
from skypool.trust import Reader


@dataclass(frozen=True, slots=True)
class Word:
    """A decision about the results of one node: `trust` is "full" to unpickle them, or "data" not to.

    `why` is the reason, in words for the user.
    """

    trust: Trust
    why: str


def trust_word(asked: Trust | None, instance: Instance, driver: Driver) -> Word:
    """Decide if the results of a machine may be unpickled, or are read as plain data only.

    The pool's `trust` setting (`asked`) decides. If it is None, the machine's offer decides. If the offer is not known,
    because the pool was taken over, the machine's driver decides. A driver that has no general answer is asked for its
    offers, which may block. If one of its offers says "data", if there are no offers, or if the request fails, the
    decision is "data".
    """
    if asked is not None:
        return Word(asked, f'the pool has trust="{asked}"')
    if instance.offer is not None:
        return Word(instance.offer.trust, "the provider rents out machines of strangers")
    declared = abilities(driver).trust
    if declared is None:
        try:
            said = {each.trust for each in driver.offers(Need())}
        except (ProviderError, OSError):
            said = set()
        if not said:
            return Word("data", "the provider did not say who owns these machines")
        declared = "data" if "data" in said else "full"
    return Word(declared, "the provider rents out machines of strangers")


@dataclass
class TrustLevels:
    """The decisions about the results of all nodes of a pool: they are unpickled, or read as plain data only.

    Args:
        asked: the `trust` setting of the pool; None if the user left it out.
        allowed: the names of the classes that results may contain besides plain data, such as "mypkg.Point".
        tell: called with a message for the user, once for each provider whose results are read as data.
    """

    asked: Trust | None
    allowed: frozenset[str]
    tell: Callable[[str], None]
    _words: dict[int, tuple[str, Word]] = field(default_factory=dict)
    _readers: dict[int, Reader | None] = field(default_factory=dict)
    _told: set[tuple[str, Word]] = field(default_factory=set)

    def judge(self, instance: Instance, driver: Driver) -> Trust:
        """Decide how the results of a machine are read from now on, and remember the decision for the machine's node.

        Return "full" if the results may be unpickled, and "data" if they are read as plain data only. This may block,
        because the driver may have to request its offers. A later decision for the same node replaces the earlier one.
        """
        said = trust_word(self.asked, instance, driver)
        self._remember(instance, said)
        return said.trust

    def _remember(self, instance: Instance, said: Word) -> None:
        self._words[instance.node] = (instance.provider, said)
        self._readers[instance.node] = None
        if said.trust == "data":
            from skypool.trust.reader import DataReader  # not before it is needed: its tables take a moment

            self._readers[instance.node] = DataReader(instance.node, self.allowed)

    def note(self, instance: Instance, trust: Trust) -> None:
        """Remember the decision that a former process of the pool made for the machine's node.

        `trust` is "full" if the results are unpickled, and "data" if they are read as plain data only.
        """
        self._remember(instance, Word(trust, "its former owner reads them so"))

    def of(self, node: int) -> Trust:
        """Return the last decision for a node: "full" or "data". Call `judge` or `note` for the node first."""
        return self._words[node][1].trust

    def reader(self, node: int) -> Reader | None:
        """Return the object that reads a node's results as plain data; None if they are unpickled.

        Call `judge` or `note` for the node first.
        """
        return self._readers[node]

    def is_stranger(self, node: int) -> bool:
        """Return True if the results of a node are read as plain data only. Call `judge` or `note` for it first."""
        return self._readers[node] is not None

    def is_known_stranger(self, node: int) -> bool:
        """Return True if the results of a node are read as plain data only. Without a decision yet, return False."""
        return self._readers.get(node) is not None

    def trusts(self) -> set[Trust]:
        """Return the levels of trust that some node has, without repetition. Any thread may call this."""
        return {said.trust for _, said in list(self._words.values())}

    def announce(self) -> None:
        """Tell the user for which providers results are read as plain data only, and why. No message is repeated.

        Each message has the number of nodes, so call this after `judge` was called for all new nodes.
        """
        for about in dict.fromkeys(self._words.values()):
            provider, said = about
            if said.trust == "data" and about not in self._told:
                self._told.add(about)
                count = sum(other == about for other in self._words.values())
                nodes = "1 node" if count == 1 else f"{count} nodes"
                self.tell(
                    f"results of {nodes} of {provider} may contain plain data only, because {said.why}; allow_results= "
                    "permits further classes"
                )
