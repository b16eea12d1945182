"""Remembers what the client needs to know of calls until it has acknowledged their outcomes."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class NamedCalls:
    """Calls without an acknowledged outcome, by the name of their function.

    `names` has the names by id. `generators` and `services` have the ids of these kinds of calls, also of ended ones.
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
        """Forget calls whose outcomes the client has. Return the ids of the generators among them."""
        self.forget(ids)
        ended = self.generators.intersection(ids)
        self.generators -= ended
        self.services.difference_update(ids)
        return ended

    def keep_only(self, ids: Iterable[int]) -> None:
        """Forget all calls but these."""
        self.names = {id_: self.names[id_] for id_ in ids if id_ in self.names}
        self.generators &= self.names.keys()
        self.services &= self.names.keys()

    def by_name(self) -> dict[str, list[int]]:
        """Return the ids by the name of the function."""
        found: dict[str, list[int]] = {}
        for id_, name in self.names.items():
            found.setdefault(name, []).append(id_)
        return found
