"""How much memory a model takes, and what is suggested for it."""

from __future__ import annotations

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
    assert needs(13e9, "inference").total_gb == pytest.approx(1.2 * 26)
    assert needs(13e9, "inference", "int4").total_gb == pytest.approx(1.2 * 6.5)


def test_adapters_leave_the_frozen_weights_alone() -> None:
    it = needs(7e9, "lora", "int4")
    assert it.weights_gb == pytest.approx(3.5 + 0.14)
    assert it.gradients_gb + it.optimizer_gb == pytest.approx(0.98)


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
    assert (first.precision, second.precision) == ("int4", "int8")


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


def test_the_guide_covers_every_size() -> None:
    assert GUIDE[-1][0] == float("inf")
    assert [row[0] for row in GUIDE] == sorted(row[0] for row in GUIDE)
