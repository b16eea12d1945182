"""How much memory a model takes, and what is suggested for it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from skypool import accelerators
from skypool.accelerators.sizing import GUIDE, WORKLOADS, dimensions, needs, suggest
from skypool.errors import UsageError

TABLE = [
    (0.35e9, "T4", "T4"),
    (0.99e9, "T4", "T4"),
    (1e9, "A10G", "A100-40GB"),
    (3e9, "A10G", "A100-40GB"),
    (7e9, "A10G", "A100-40GB"),
    (8e9, "A100-40GB", "A100-80GB"),
    (13e9, "A100-40GB", "A100-80GB"),
    (14e9, "A100-80GB", "H100:2"),
    (34e9, "A100-80GB", "H100:2"),
    (70e9, "A100-80GB", "H100:2"),
    (72e9, "H100:4", "H100:8"),
    (180e9, "H100:4", "H100:8"),
    (405e9, "H100:4", "H100:8"),
]


@pytest.mark.parametrize("workload", ["inference", "lora"])
@pytest.mark.parametrize(("parameters", "least", "better"), TABLE)
def test_suggestions_agree_with_the_published_table(parameters: float, least: str, better: str, workload: str) -> None:
    first, *others = suggest(parameters, workload)  # type: ignore[arg-type] # one of two strings
    assert (first.accelerator, first.role) == (accelerators.parse(least), "minimum")
    if better != least:
        assert (others[0].accelerator, others[0].role) == (accelerators.parse(better), "better")


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("parameters", [row[0] for row in TABLE] + [2e12])
def test_no_suggestion_is_too_small_by_its_own_arithmetic(parameters: float, workload: str) -> None:
    found = suggest(parameters, workload)  # type: ignore[arg-type] # one of the four
    assert found
    for each in found:
        assert each.needs.total_gb <= each.accelerator.total_memory_gb * each.nodes
        assert each.free_gb >= 0
        assert f"= {each.needs.total_gb:.1f} GB" in each.why


def test_full_training_takes_sixteen_bytes_a_parameter_and_the_activations() -> None:
    it = needs(7e9, "full-finetune")
    assert (it.weights_gb, it.gradients_gb, it.optimizer_gb) == (14, 14, 84)
    assert 0.5 < it.activations_gb < 1.5


def test_inference_takes_a_fifth_more_than_the_weights() -> None:
    # a cache of one token is nothing
    assert needs(13e9, "inference", sequence=1).total_gb == pytest.approx(1.2 * 26, abs=1e-3)
    assert needs(13e9, "inference", "int4", sequence=1).total_gb == pytest.approx(1.2 * 6.5, abs=1e-3)


def test_adapters_leave_the_frozen_weights_alone() -> None:
    it = needs(7e9, "lora", "int4")
    assert it.weights_gb == pytest.approx(3.5 + 0.07)
    assert it.gradients_gb + it.optimizer_gb == pytest.approx(0.49)


def test_float32_training_takes_as_much_and_no_copy() -> None:
    it = needs(1e9, "full-finetune", "fp32")
    assert (it.weights_gb, it.gradients_gb, it.optimizer_gb) == (4, 4, 8)


@pytest.mark.parametrize(("parameters", "width", "depth"), [(7e9, 4096, 32), (70e9, 8192, 80), (175e9, 12288, 96)])
def test_the_assumed_shape_is_near_that_of_known_models(parameters: float, width: int, depth: int) -> None:
    assert list(dimensions(parameters)) == pytest.approx([width, depth], rel=0.15)


def test_longer_sequences_and_larger_batches_take_more() -> None:
    short, long = needs(7e9, "pretrain"), needs(7e9, "pretrain", sequence=8192, batch=2)
    assert long.activations_gb == pytest.approx(8 * short.activations_gb)


def test_a_precision_asked_for_is_kept_even_if_the_table_is_then_too_small() -> None:
    found = suggest(70e9, "inference", precision="bf16")
    assert {each.precision for each in found} == {"bf16"}
    assert all(each.accelerator.total_memory_gb >= 168 for each in found)


def test_a_smaller_precision_is_said_where_bf16_does_not_fit() -> None:
    first, second, *_ = suggest(70e9, "inference")
    assert (first.precision, second.precision) == ("int4", "fp8")


def test_pretraining_starts_at_eight_h100() -> None:
    assert str(suggest(1e9, "pretrain")[0].accelerator) == "H100-80GB:8"


def test_what_no_node_holds_is_spread_over_nodes() -> None:
    first = suggest(405e9, "full-finetune")[0]
    assert first.nodes > 1
    assert "nodes" in first.why


def test_turing_computes_in_fp16_for_it_has_no_bf16() -> None:
    assert suggest(0.5e9)[0].precision == "fp16"


def test_more_parameters_never_need_less() -> None:
    for workload in WORKLOADS:
        totals = [suggest(n * 1e9, workload)[0].needs.total_gb  # type: ignore[arg-type] # one of the four
                  for n in (8, 13)]  # fmt: skip
        assert totals == sorted(totals)


@pytest.mark.parametrize(
    "wrong",
    [
        {"parameters": 0},
        {"parameters": -1},
        {"parameters": float("nan")},
        {"parameters": 7e9, "workload": "lara"},
        {"parameters": 7e9, "precision": "bf8"},
        {"parameters": 7e9, "workload": "pretrain", "precision": "int4"},
        {"parameters": 7e9, "batch": 0},
    ],
)
def test_values_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        suggest(**wrong)  # type: ignore[arg-type] # the point


SIZES = (1e9, 3e9, 7e9, 8e9, 13e9, 14e9, 34e9, 65e9, 70e9, 72e9, 180e9, 405e9)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("workload", ["inference", "lora"])
@pytest.mark.parametrize("size", SIZES)
def test_a_precision_that_is_asked_for_gets_no_more_than_twice_what_it_needs(
    size: float, workload: Any, precision: Any
) -> None:
    first = suggest(size, workload, precision)[0]
    smallest = 24 if precision == "fp8" else 16  # of the cards that compute in fp8
    assert first.precision in (precision, "fp16")
    if first.nodes == 1:
        assert first.accelerator.total_memory_gb <= max(smallest, 2 * first.needs.total_gb)


def test_what_is_known_to_fit_a_card_is_suggested_for_it() -> None:
    named = [
        (8e9, "inference", "int4", "T4"),
        (72e9, "inference", "int4", "L40S"),
        (65e9, "lora", "int4", "L40S"),
        (70e9, "lora", "int4", "L40S"),
        (70e9, "inference", "fp8", "L40S:2"),
    ]
    for size, workload, precision, card in named:
        assert str(suggest(size, workload, precision)[0].accelerator) == card  # type: ignore[arg-type] # of the lists


def by_hand(size: float, workload: str, precision: str, sequence: int, batch: int, devices: int) -> float:
    """Bytes, written anew from the papers that the module names, and from nothing of the module."""
    depth = math.pow(size / 196608, 1 / 3)
    width = 128 * depth
    stored = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}[precision] * size
    if workload == "inference":
        return 1.2 * stored + 2 * 2 * sequence * batch * depth * min(width, 1024)
    token = sequence * batch * width
    kept = 34 * token * depth if workload == "pretrain" else 2 * token * depth + 34 * token
    if workload == "lora":
        return stored + 16 * 0.005 * size + devices * kept
    return 16 * size + devices * kept * (2 if precision == "fp32" else 1)


@pytest.mark.parametrize("cases", [200, pytest.param(1500, marks=pytest.mark.slow)])
def test_what_is_suggested_fits_by_an_independent_calculation(cases: int) -> None:
    rnd = random.Random(20261122)
    for _ in range(cases):
        size, workload = 10 ** rnd.uniform(8, 12), rnd.choice(WORKLOADS)
        choices = ["bf16", "fp8", "int8", "int4"] if workload in ("inference", "lora") else ["bf16", "fp32"]
        precision = rnd.choice([None, *choices])
        sequence, batch = rnd.choice([512, 2048, 8192, 32768]), rnd.choice([1, 2, 8])
        try:
            found = suggest(size, workload, precision, sequence=sequence, batch=batch)  # type: ignore[arg-type]
        except UsageError as error:
            assert "no accelerator has enough memory for the activations" in str(error)
            continue
        for each in found:
            devices = each.accelerator.count * each.nodes
            took = by_hand(size, workload, each.precision, sequence, batch, devices)
            has = each.accelerator.memory_gb * 1e9 * devices
            if took > has:  # the devices of a node share what is too much for one
                took = by_hand(size, workload, each.precision, sequence, batch, each.nodes)
            assert took <= has * (1 + 1e-9), (size, workload, precision, sequence, batch, str(each.accelerator))
            assert each.needs.total_gb * 1e9 == pytest.approx(took)
            assert precision in (None, each.precision) or (precision, each.precision) == ("bf16", "fp16")


def test_training_keeps_activations_on_every_device() -> None:
    one, eight = needs(7e9, "pretrain"), needs(7e9, "pretrain", devices=8)
    assert eight.activations_gb == pytest.approx(8 * one.activations_gb)
    assert eight.weights_gb == one.weights_gb


def test_longer_and_more_sequences_take_more_in_inference_too() -> None:
    short, long = needs(70e9, "inference"), needs(70e9, "inference", sequence=131072, batch=8)
    assert long.total_gb > short.total_gb + 200
    assert suggest(70e9, precision="int4", sequence=131072, batch=8)[0].accelerator.total_memory_gb > 300


def test_fp8_is_suggested_only_where_the_hardware_computes_in_it() -> None:
    for size in SIZES:
        for each in suggest(size, precision="fp8"):
            assert each.accelerator.architecture.split(" ")[0] in ("Ada", "Hopper", "Blackwell", "CDNA3")


@pytest.mark.parametrize(
    ("spelled", "meant"), [("7B", 7e9), ("350m", 350e6), ("1.5T", 1.5e12), ("7e9", 7e9), (7e9, 7e9)]
)
def test_parameters_are_spelled_as_people_do(spelled: str, meant: float) -> None:
    assert suggest(spelled) == suggest(meant)


@pytest.mark.parametrize("wrong", ["seven", "", "7BB", None, [7], True])
def test_parameters_that_cannot_be_read_are_refused_with_an_example(wrong: Any) -> None:
    with pytest.raises(UsageError, match='like "7B"'):
        suggest(wrong)


def test_the_guide_covers_every_size() -> None:
    assert GUIDE[-1][0] == float("inf")
    assert [row[0] for row in GUIDE] == sorted(row[0] for row in GUIDE)
