"""MIG partitions of each GPU, and the check that a set of them fits on one card.

MIG cuts a card into compute slices and memory slices, and a profile takes some of each. A profile may start
only at certain memory slices, but on an empty card that never matters: for every card on record, each set whose
sums fit has a place for all of its members (a test tries them all). NVIDIA MIG User Guide, "Supported MIG
Profiles".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from skypool.accelerators.facts import Partition
from skypool.accelerators.tables import profiles, variants
from skypool.errors import UsageError


def find(name: str, memories: Sequence[float], profile: str) -> tuple[float, Partition]:
    """The profile on the first of a model's cards (by memory) that has it, and that card's memory.

    Raises:
        UsageError: none has it; the message lists what they have.
    """
    for memory in memories:
        if partition := profiles(name, memory).get(profile.strip().lower()):
            return memory, partition
    raise UsageError(_refusal(name, memories[0], profile))


def memories(name: str) -> tuple[float, ...]:
    """The memory sizes a model comes in, the one its bare name means first."""
    return tuple(dict.fromkeys(variant.memory_gb for variant in variants(name)))


def _refusal(name: str, memory: float, profile: str) -> str:
    card = f"{name} {memory:g}GB"
    if have := profiles(name, memory):
        return f"{card} has no partition {profile!r}; it has {', '.join(have)}"
    return f"{card} has no partitions on record, so none called {profile!r}"


def fits(name: str, memory: float, wanted: Iterable[str]) -> bool:
    """Whether one card can hold all of `wanted` (profiles, repeated as often as needed) at the same time.

    Raises:
        UsageError: the card lacks one of the profiles.
    """
    parts = [find(name, [memory], profile)[1] for profile in wanted]
    return not parts or _sums_fit(parts)


def _sums_fit(parts: Sequence[Partition]) -> bool:
    card = parts[0]
    return (
        len({part.compute_slices_of for part in parts}) == 1
        and sum(part.compute_slices for part in parts) <= card.compute_slices_of
        and sum(part.memory_slices for part in parts) <= card.memory_slices_of
        and sum(part.media for part in parts) <= 1
        and all(parts.count(part) <= part.max_per_card for part in parts)
    )
