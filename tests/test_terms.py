"""What a pool refuses at construction, on the line that wrote it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import skypool as sky
from skypool.terms import seconds


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"nodes": 0}, "nodes is how many nodes: at least 1, not 0"),
        ({"nodes": -3}, "at least 1, not -3"),
        ({"nodes": 1.5}, "a whole number, not 1.5"),
        ({"nodes": True}, "a whole number, not True"),
        ({"nodes": (4, 2)}, r"fewest above its most; did you mean \(2, 4\)"),
        ({"nodes": (1, 2, 3)}, r"\(fewest, most\)"),
        ({"slots": 0}, "slots is calls a node runs at once: at least 1"),
        ({"lease": -1}, "lease is a duration in seconds: more than 0, not -1"),
        ({"lease": "10 lightyears"}, "such as 90, '90s', '10m' or '1h30m', not '10 lightyears'"),
        ({"liveness": 0}, "liveness is a duration in seconds: more than 0"),
        ({"max_lifetime": "soon"}, "max_lifetime is a duration"),
        ({"grace": float("nan")}, "a number, not nan"),
        ({"name": "My Pool"}, "a pool's name has 1 to 40 of a-z"),
        ({"console": "loud"}, "console must be 'auto', 'live', 'plain' or 'off', not 'loud'"),
        ({"provider": "locla"}, "no provider is called 'locla'; did you mean local"),
        ({"provider": sky.Local}, r"did you forget the parentheses: Local\(\)"),
        ({"provider": 7}, "provider takes a driver"),
        ({"provider": []}, "provider is an empty list"),
        ({"accelerator": []}, "accelerator is an empty list"),
        ({"image": "ubuntu"}, "image takes an Image"),
        ({"acelerator": "H100"}, "no argument 'acelerator'; did you mean accelerator"),
        ({"max_life_time": "1h"}, "no argument 'max_life_time'; did you mean max_lifetime"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_nearest_right_spelling(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(sky.UsageError, match=says):
        sky.ComputePool(**wrong)


def test_a_string_that_is_no_accelerator_is_refused_at_construction() -> None:
    with pytest.raises(sky.UnknownAccelerator, match="did you mean H100"):
        sky.ComputePool(accelerator="H1OO")
    with pytest.raises(sky.UnknownAccelerator):
        sky.ComputePool(accelerator=["H100", "no such thing"])


@pytest.mark.parametrize(
    ("given", "means"),
    [(90, 90.0), ("90s", 90.0), ("10m", 600.0), ("1h30m", 5400.0), ("250ms", 0.25), (timedelta(hours=2), 7200.0)],
)
def test_durations_are_numbers_words_or_timedeltas(given: Any, means: float) -> None:
    assert seconds("lease", given) == means


def test_an_accelerator_this_machine_lacks_is_told_when_the_pool_starts() -> None:
    with pytest.raises(sky.SkypoolError, match=r"it has no accelerator, and .* is asked for"):
        sky.ComputePool(accelerator="v5p-8", console="off").start()
