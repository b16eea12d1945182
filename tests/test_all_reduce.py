"""What `check="nccl"` measures, with Gloo on CPUs where there are no GPUs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from skypool.errors import ProtocolError
from skypool.gangs.all_reduce import Bandwidth, all_reduce, bandwidth_of

ROOT = Path(__file__).parent.parent
PROGRAM = "import json; from skypool.gangs.all_reduce import all_reduce; print(json.dumps(all_reduce('gloo', 4000000)))"


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
def test_two_processes_measure_with_gloo(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    got = subprocess.run([python, "-m", "pip", "install", "-q", "torch==2.13.0+cpu"], capture_output=True, text=True)
    if "No matching distribution" in got.stderr:
        pytest.skip("no index here has torch for CPUs")
    assert got.returncode == 0, got.stderr
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [python, "-c", PROGRAM],
            env={**os.environ, **meeting, "PYTHONPATH": str(ROOT), "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    ended = [each.communicate(timeout=120) for each in running]
    assert [each.returncode for each in running] == [0, 0], ended
    measured = bandwidth_of([json.loads(out) for out, _ in ended])
    assert isinstance(measured, Bandwidth)
    assert (measured.processes, measured.device, measured.size) == (2, "CPU", 4_000_000)
    assert 1e6 < measured.bus < 1e12
