"""What `check="nccl"` measures, with Gloo on CPUs where there are no GPUs."""

from __future__ import annotations

import sys

import pytest

import skypool as sky
from skypool.errors import BootstrapError, ProtocolError
from skypool.events import Notice
from skypool.gangs.all_reduce import Bandwidth, all_reduce, bandwidth_of
from tests import work


def test_the_bus_bandwidth_is_that_of_nccl_tests() -> None:
    measured = Bandwidth(processes=16, device="NVIDIA H100 80GB HBM3", size=64_000_000, seconds=0.0004)
    assert measured.algorithm == pytest.approx(160e9)
    assert measured.bus == pytest.approx(300e9)
    assert str(measured) == (
        "an all-reduce of 64 MB among 16 processes (NVIDIA H100 80GB HBM3) takes 0.4 ms: bus bandwidth 300 GB/s"
    )


def test_the_slowest_process_counts() -> None:
    answers = [{"seconds": each, "size": 8, "processes": 2, "device": "GPU"} for each in (0.1, 0.3)]
    assert bandwidth_of(answers) == Bandwidth(2, "GPU", 8, 0.3)


def test_a_single_process_measures_nothing() -> None:
    answer = {"seconds": 0.1, "size": 8, "processes": 1, "device": "GPU"}
    assert bandwidth_of([answer]) == "the gang has a single process"


def test_check_nccl_says_once_why_it_measured_nothing() -> None:
    with sky.ComputePool(nodes=2, check="nccl", console="off") as pool:
        notices: list[str] = []
        pool.events.listen(lambda event: notices.append(event.text) if isinstance(event, Notice) else None)
        for _ in range(2):
            assert work.add(1).with_options(procs=1) @ pool == [2, 2]
        (told,) = [each for each in notices if "nccl" in each]
        assert told.startswith('check="nccl" measured nothing: torch ')


def test_without_torch_the_reason_is_told() -> None:
    if "torch" in sys.modules:
        pytest.skip("torch is loaded here")
    answer = all_reduce()
    assert "torch" in str(answer["missing"])
    assert bandwidth_of([{"seconds": 0.1, "size": 8, "processes": 2, "device": "GPU"}, answer]) == answer["missing"]


@pytest.mark.parametrize("answer", [None, {}, [1], {"seconds": "x", "size": 8, "processes": 2, "device": "GPU"}])
def test_an_answer_of_another_form_breaks_the_protocol(answer: object) -> None:
    with pytest.raises(ProtocolError, match="a process of the all-reduce answers with"):
        bandwidth_of([answer])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_gang_measures_with_gloo() -> None:
    image = sky.Image(pip=["torch==2.13.0+cpu"])
    try:
        pool = sky.ComputePool(nodes=2, image=image, console="off").start()
    except BootstrapError as e:
        if "torch==2.13.0+cpu" not in str(e):
            raise
        pytest.skip("no index here has torch for CPUs")
    with pool:
        measured = bandwidth_of(sky.compute(procs=1)(all_reduce)("gloo", 4_000_000) @ pool)
    assert isinstance(measured, Bandwidth)
    assert (measured.processes, measured.device, measured.size) == (2, "CPU", 4_000_000)
    assert 1e6 < measured.bus < 1e12
