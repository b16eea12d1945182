"""Finds the known names nearest to a misspelt one, in bounded time.

Names are first compared by the pairs of adjacent letters that they share with the misspelt word. An index makes this
quick. Only the best few candidates, and all registered names, are then compared in full.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from functools import cache

from skypool.accelerators import registry, tables
from skypool.accelerators.tpu_slices import squashed

_SHORT_LIST = 8


def nearest(word: str) -> tuple[str, ...]:
    """Return the three known names most similar to `word`, the most similar first.

    Known names are those of the catalogue and those that were added with `register`. Case, spaces, dashes, underscores
    and dots do not matter. The result has fewer names if too few resemble the word at all.
    """
    asked = squashed(word)[:40]
    candidates = {squashed(name): name for name in registry.names()} | _short_list(asked)
    matcher = SequenceMatcher(None, "", asked, autojunk=False)

    def likeness(key: str) -> tuple[float, int, str]:
        matcher.set_seq1(key)
        return -matcher.ratio(), len(key), key

    return tuple(candidates[key] for key in sorted(candidates, key=likeness)[:3])


def _short_list(asked: str) -> dict[str, str]:
    shared: dict[str, int] = {}
    for pair in _pairs(asked):
        for key in _index().get(pair, ()):
            shared[key] = shared.get(key, 0) + 1
    score = {key: 2 * n / (len(key) + len(asked)) for key, n in shared.items()}
    best = sorted(score, key=lambda key: (-score[key], key))[:_SHORT_LIST]
    return {key: _names()[key] for key in best}


def _pairs(key: str) -> set[str]:
    padded = f"^{key}$"
    return {padded[i : i + 2] for i in range(len(padded) - 1)}


@cache
def _names() -> dict[str, str]:
    """Return a dict from squashed name to name, for all models, with and without memory sizes, and all TPU slices."""
    found = {squashed(name): name for name in tables.rows_by_name()}
    for name, group in tables.rows_by_name().items():
        sizes = dict.fromkeys(row["memory_gb"] for row in group)
        if len(sizes) > 1:
            found |= {squashed(f"{name}-{size}GB"): f"{name}-{size}GB" for size in sizes}
    return found | {squashed(type): type for type in tables.slices()}


@cache
def _index() -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for key in _names():
        for pair in _pairs(key):
            found.setdefault(pair, []).append(key)
    return {pair: tuple(keys) for pair, keys in found.items()}
