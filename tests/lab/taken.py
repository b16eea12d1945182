"""Machines that are taken back while calls run on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import skypool as sky
from skypool import events
from tests.conftest import eventually
from tests.lab import work


def where_two_calls_ended(
    pool: sky.ComputePool, seen: Sequence[events.Event], folder: Path, take: Callable[[], object]
) -> set[str]:
    """The hosts of two calls. `take` takes one back while both run; none ends before both run again."""

    def busy() -> set[int]:
        return {each.node for each in list(seen) if isinstance(each, events.NodeStatus) and each.busy == 1}

    running = [pool.submit(work.until_told) for _ in range(2)]
    eventually(lambda: len(busy()) == 2, 30, "the begin of both calls")
    take()
    # a node that replaces another has a number of its own
    eventually(lambda: len(busy()) == 3, 120, "the second run of one")
    (told := folder / "told").touch()
    pool.push(told)
    return {each.result(30) for each in running}
