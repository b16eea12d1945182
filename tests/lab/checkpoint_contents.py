"""What the checkpoints of the soak test `tests.soak.checkpoints` contain. It follows from who wrote them and when."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

LARGE = (9 << 20) + 17
"""The bytes of a large file, which takes several parts of an upload."""
_EVERY = 30
"""One in so many steps has a large file."""


def _bytes(size: int, *words: object) -> bytes:
    return hashlib.shake_256(repr(words).encode()).digest(size)


def about(rank: int) -> str:
    """The name of the file in which a rank says whose checkpoint this is."""
    return f"about-{rank}.json"


def files_of(start: str, step: int, rank: int, world: int) -> dict[str, bytes]:
    """Return the files of a rank in the checkpoint of a step, of the start of the program with this name."""
    head = json.dumps({"start": start, "step": step, "rank": rank, "world": world}).encode()
    sizes = {"model": 2000 + step % 7, "optim/state": 5000 * (step % 3), f"only/{rank}": 100}
    if step % _EVERY == 7 and step // _EVERY % world == rank:
        sizes["large"] = LARGE
    return {about(rank): head, **{name: _bytes(size, start, step, rank, name) for name, size in sizes.items()}}


def seen_by(start: str, step: int, rank: int, world: int) -> dict[str, bytes]:
    """Return the files that a rank gets: its own, and those of others under other names, the lowest rank first."""
    found: dict[str, bytes] = {}
    for each in sorted(range(world), key=lambda other: (other != rank, other)):
        found = {**files_of(start, step, each, world), **found}
    return found


def trouble_of(found: Mapping[str, bytes], step: int, rank: int, world: int) -> tuple[str, str]:
    """Return the start of the program that has written what a rank got, and what is wrong with it; "" if nothing is."""
    if about(rank) not in found:
        return "", f"there is no {about(rank)}, but {sorted(found)}"
    said = json.loads(found[about(rank)])
    start = str(said["start"])
    if (said["step"], said["rank"], said["world"]) != (step, rank, world):
        return start, f"step {step} of rank {rank} has the files of {said}"
    wanted = seen_by(start, step, rank, world)
    if found.keys() != wanted.keys():
        return start, f"there is {sorted(found)}, and not {sorted(wanted)}"
    wrong = [name for name, data in wanted.items() if found[name] != data]
    return start, f"the contents of {wrong} are not those of {start} at step {step}" if wrong else ""
