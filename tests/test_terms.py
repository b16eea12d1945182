"""What a pool refuses at construction, on the line that wrote it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import skypool as sky
from skypool.checks import gibibytes, seconds
from skypool.model import Need


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"nodes": 0}, r"nodes \(how many nodes\) must be at least 1, not 0"),
        ({"nodes": -3}, "at least 1, not -3"),
        ({"nodes": 1.5}, "a whole number, not 1.5"),
        ({"nodes": True}, "a whole number, not True"),
        ({"nodes": (4, 2)}, r"\(fewest, most\) in the wrong order; did you mean \(2, 4\)"),
        ({"nodes": (1, 2, 3)}, r"\(fewest, most\)"),
        ({"slots": 0}, r"slots \(calls a node runs at once\) must be at least 1"),
        ({"lease": -1}, r"lease \(a duration in seconds\) must be more than 0, not -1"),
        ({"lease": "10 lightyears"}, "such as 90, '90s', '10m' or '1h30m', not '10 lightyears'"),
        ({"liveness": 0}, r"liveness \(a duration in seconds\) must be more than 0"),
        ({"max_lifetime": "soon"}, "max_lifetime must be a duration"),
        ({"linger": "soon"}, "linger must be a duration such as 90, '90s', '10m' or '1h30m', not 'soon'"),
        ({"linger": 0}, "linger must be more than 0; leave it out to end the machines at once after the `with` block"),
        ({"linger": -1}, r"linger \(a duration in seconds\) must be more than 0, not -1"),
        ({"linger": timedelta(0)}, "linger .* must be more than 0"),
        ({"linger": True}, "linger .* must be a number"),
        ({"linger": float("inf")}, "linger must be a duration of at most a hundred years"),
        ({"grace": float("nan")}, "a number, not nan"),
        ({"name": "My Pool"}, "a pool's name must have 1 to 40 letters, digits, '-', '_' and '.'"),
        ({"name": "my_pool_"}, "with a letter or digit at either end, not 'my_pool_'"),
        ({"name": "größe"}, "a pool's name must have"),
        ({"console": "loud"}, "console must be 'auto', 'live', 'plain' or 'off', not 'loud'"),
        ({"provider": "locla"}, "no provider is called 'locla'; did you mean local"),
        ({"provider": sky.Local}, r"did you forget the parentheses: Local\(\)"),
        ({"provider": 7}, "provider takes a driver"),
        ({"provider": []}, "provider is an empty list"),
        ({"accelerator": []}, "accelerator is an empty list"),
        ({"image": "ubuntu"}, "image takes an Image"),
        ({"acelerator": "H100"}, "no argument 'acelerator'; did you mean accelerator"),
        ({"node": 3}, "no argument 'node'; did you mean nodes"),
        ({"markt": "spot"}, r"ComputePool has no argument 'markt'; did you mean market\? .*max_usd_per_hour"),
        ({"max_usd_per_hr": 3}, "did you mean max_usd_per_hour"),
        ({"market": "sopt"}, "market must be one of 'on-demand', .*, not 'sopt'; did you mean 'spot'"),
        ({"market": "ondemand"}, "did you mean 'on-demand'"),
        ({"market": True}, "market must be one of .*, not True"),
        ({"order_by": "cheap"}, "order_by must be one of 'cheapest', .*; did you mean 'cheapest'"),
        ({"order_by": ["cheapest"]}, "order_by must be one of"),
        ({"arch": "arm"}, "arch must be one of .*; did you mean 'arm64'"),
        ({"arch": ["arm64"]}, "arch must be one of"),
        ({"max_usd_per_hour": -1}, r"max_usd_per_hour \(what one node or slice may cost\) must be at least 0, not -1"),
        ({"max_usd_per_hour": "5"}, "a number, not '5'"),
        ({"max_usd_per_hour": float("inf")}, "max_usd_per_hour must be finite, not inf; leave max_usd_per_hour out"),
        ({"max_usd_per_hour": float("nan")}, "a number, not nan"),
        ({"vcpus": 0}, r"vcpus \(how many vCPUs a node has at least\) must be more than 0, not 0"),
        ({"vcpus": float("inf")}, "vcpus must be finite, not inf"),
        ({"memory": 0}, r"memory \(a size in GiB\) must be more than 0"),
        ({"memory": "much"}, "memory must be a size such as 64, '64GiB' or '1.5TB', not 'much'"),
        ({"memory": "64B"}, "memory must be a size in GiB such as 64, '64GiB' or '1.5TB', not '64B'"),
        ({"memory": [64]}, r"memory \(a size in GiB\) must be a number, not \[64\]"),
        ({"memory": float("inf")}, "memory must be finite"),
        ({"lease": float("inf")}, "lease must be a duration of at most a hundred years, not inf seconds"),
        ({"max_lifetime": "99999999h"}, "max_lifetime must be a duration of at most a hundred years"),
        ({"disk": "-5GB"}, "disk must be a size such as"),
        ({"disk": True}, "a number, not True"),
        ({"region": []}, "region is an empty list"),
        ({"region": 7}, "region must be a provider's region such as 'eu-west-1', or a pattern such as 'eu-\\*', not 7"),
        ({"region": ["eu-1", ""]}, "not ''"),
        ({"max_life_time": "1h"}, "no argument 'max_life_time'; did you mean max_lifetime"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_nearest_right_spelling(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(sky.UsageError, match=says):
        sky.ComputePool(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"markt": "spot"}, {"rank": "per-gb"}, {"market": "sopt"}, {"order_by": "cheap"}, {"nodes": 0}]
)
def test_a_plan_refuses_what_a_pool_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(sky.UsageError):
        sky.plan(**wrong)
    with pytest.raises(sky.UsageError, match="plan has no argument 'leese'"):
        sky.plan(leese="1h")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("given", "means"),
    [
        (64, 64.0),
        (0.5, 0.5),
        ("64", 64.0),
        ("64GiB", 64.0),
        ("64g", 64.0),
        ("64Gi", 64.0),
        (" 64 gib ", 64.0),
        ("64GB", 64e9 / 2**30),
        ("1.5TiB", 1536.0),
        ("2TB", 2e12 / 2**30),
        ("512MiB", 0.5),
        (None, 0.0),
    ],
)
def test_sizes_are_gib_or_say_their_unit(given: Any, means: float) -> None:
    assert gibibytes("memory", given) == pytest.approx(means)


def test_everything_asked_of_a_node_becomes_its_need() -> None:
    pool = sky.ComputePool(
        accelerator=["H100:8", "A100-80GB:8"],
        market="spot-if-available",
        max_usd_per_hour=30,
        region="eu-west-1",
        vcpus=96,
        memory="1TiB",
        disk=500,
        arch="amd64",
        slots=2,
        order_by="per-tflop",
    )
    assert pool._terms.need == Need(
        (sky.accelerators.parse("H100:8"), sky.accelerators.parse("A100-80GB:8")),
        2,
        {},
        96.0,
        1024.0,
        500.0,
        "x86_64",
        ("eu-west-1",),
        "spot-if-available",
        30.0,
    )
    assert pool._terms.order_by == "per-tflop"
    assert sky.ComputePool()._terms.need == Need()
    assert sky.ComputePool(region=["eu-*", "us-1"])._terms.need.regions == ("eu-*", "us-1")


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


@pytest.mark.parametrize("word", ["gpus", "gpu", "num_gpus"])
def test_a_number_of_gpus_is_told_how_accelerators_are_asked_for(word: str) -> None:
    with pytest.raises(sky.UsageError, match="did you mean accelerator='H100:8'"):
        sky.ComputePool(**{word: 1})  # type: ignore[arg-type] # the point
