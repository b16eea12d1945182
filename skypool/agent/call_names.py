"""Remembers the names and kinds of calls until the client has acknowledged their outcomes."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class NamedCalls:
    """Calls whose outcomes the client has not acknowledged, also those that have ended.

    Attributes:
        names: the name of each call's function, by the id of the call.
        generators: the ids of those calls that are generators.
        services: the ids of those calls that are services.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.generators: set[int] = set()
        self.services: set[int] = set()

    def add(self, ids: Iterable[int], name: str) -> None:
        self.names.update(dict.fromkeys(ids, name))

    def forget(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            self.names.pop(id_, None)

    def acknowledge(self, ids: list[int]) -> Collection[int]:
        """Forget the calls with these ids, as the client has their outcomes. Return the generators among the ids."""
        self.forget(ids)
        ended = self.generators.intersection(ids)
        self.generators -= ended
        self.services.difference_update(ids)
        return ended

    def keep_only(self, ids: Iterable[int]) -> None:
        """Keep only the calls with these ids, and forget all others."""
        self.names = {id_: self.names[id_] for id_ in ids if id_ in self.names}
        self.generators &= self.names.keys()
        self.services &= self.names.keys()

    def by_name(self) -> dict[str, list[int]]:
        """Return a dict from the name of a function to the ids of its calls."""
        found: dict[str, list[int]] = {}
        for id_, name in self.names.items():
            found.setdefault(name, []).append(id_)
        return found
