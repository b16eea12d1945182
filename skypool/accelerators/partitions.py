"""MIG partitions of each GPU, and the check that a set of them fits on one card.

MIG (NVIDIA's Multi-Instance GPU) divides a card into compute slices and memory slices. A profile says how many slices
of each sort a partition takes. NVIDIA lets a partition begin only at certain memory slices. The check ignores these
positions, because the card is empty at first: then the sums of the slices and the limit of each profile are enough. A
test proves that for all sets on every card on record.

Source: NVIDIA MIG User Guide, "Supported MIG Profiles".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from skypool.accelerators.facts import Partition
from skypool.accelerators.tables import profiles, variants
from skypool.errors import UsageError


def find(name: str, memories: Sequence[float], profile: str) -> tuple[float, Partition]:
    """Look for a partition profile on the cards of a model, and return (memory of the card in GB, `Partition`).

    Args:
        name: name of the model, such as "A100".
        memories: memory sizes of the model in GB, at least one. They are tried in this order, and the first one whose
            card has the profile is returned.
        profile: profile, such as "2g.10gb". Case and surrounding spaces do not matter.

    Raises:
        UsageError: no card has the profile. The message lists the profiles of the card with the first memory size.
    """
    for memory in memories:
        if partition := profiles(name, memory).get(profile.strip().lower()):
            return memory, partition
    raise UsageError(_refusal(name, memories[0], profile))


def memories(name: str) -> tuple[float, ...]:
    """Return the memory sizes of a model in GB. The first size is what the model's name alone stands for."""
    return tuple(dict.fromkeys(variant.memory_gb for variant in variants(name)))


def _refusal(name: str, memory: float, profile: str) -> str:
    card = f"{name} {memory:g}GB"
    if have := profiles(name, memory):
        return f"{card} has no partition {profile!r}; it has {', '.join(have)}"
    return f"{card} has no partitions in skypool's catalogue, so none called {profile!r}; use the whole card instead"


def fits(name: str, memory: float, wanted: Iterable[str]) -> bool:
    """Return True if one card can be divided into partitions with all the `wanted` profiles at the same time.

    `name` is the card's model, and `memory` the card's memory in GB. `wanted` has one profile for each partition.
    UsageError is raised if the card lacks one of the profiles.
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
