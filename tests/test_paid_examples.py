"""The examples for rented hardware run on a fake cloud, whose machines are processes of this one and cost nothing.

A fake machine finds the devices that were rented, but no driver could be installed for them. So its image is left out,
and it has what this environment has. Where torch or JAX is not installed here, an example ends at that import: the test
sees that error come back from the node, and is then skipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skypool.model import Need
from skypool.testing import FakeCloud, Stock

ROOT = Path(__file__).parent.parent
WITHOUT_IMAGE = """
import runpy, sys
import skypool as sky

made = sky.ComputePool.__init__
sky.ComputePool.__init__ = lambda self, *args, **terms: made(self, *args, **{**terms, "image": None})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
STOCK = [
    Stock("cpu", 0.1),
    Stock("one", 6.88, "H100"),
    Stock("eight", 55.06, "H100:8"),
    Stock("slice", 19.2, "v5e-16"),
    Stock("trn1", 1.34, "Trainium1"),
    Stock("small", 0.4, "L4", market="spot"),
    Stock("dear", 1.4, "A10G", market="spot"),
]
Rehearse = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud(tmp_path / "cloud", STOCK) as made:
        list(made.offers(Need()))  # from now on any process that names the folder sees this stock
        yield made
        assert made.count() == 0, made.control.alive()


@pytest.fixture
def rehearse(cloud: FakeCloud) -> Rehearse:
    """Run an example with `fake` as its argument."""

    def run(name: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", WITHOUT_IMAGE, f"examples/{name}.py", "fake"]
        env = {**os.environ, "SKYPOOL_FAKE_CLOUD": str(cloud.state)}
        return subprocess.run(argv, capture_output=True, text=True, timeout=200, cwd=ROOT, env=env)

    return run


def skip_without(module: str, done: subprocess.CompletedProcess[str]) -> None:
    """Skip the test if the module is not installed, having seen that the node said so."""
    if importlib.util.find_spec(module) is None:
        assert done.returncode == 1, done.stderr
        assert f"this node has no module '{module}'" in done.stderr
        pytest.skip(f"{module} is not installed here: the machines were rented, and the call ended at its import")
    assert done.returncode == 0, done.stdout + done.stderr


def test_fine_tuning_on_one_gpu_learns(rehearse: Rehearse) -> None:
    done = rehearse("07_fine_tune")
    skip_without("torch", done)
    found = re.search(r"on (?:cpu|cuda): (\d+)% .* before fine-tuning, (\d+)% after", done.stdout)
    assert found, done.stdout
    assert int(found[2]) > int(found[1])


def test_eight_gpus_train_with_one_process_each(rehearse: Rehearse) -> None:
    done = rehearse("08_eight_gpus")
    skip_without("torch", done)
    ranks = re.findall(r"process (\d) of 8 on \S+: loss \d", done.stdout)
    assert sorted(ranks) == list("01234567")


def test_a_slice_is_rented_whole_and_each_host_gets_the_call(rehearse: Rehearse) -> None:
    """With JAX only the function runs here: processes of one machine are no slice that JAX could find."""
    if importlib.util.find_spec("jax") is None:
        skip_without("jax", rehearse("11_tpu_slice"))
    multiply: Any = runpy.run_path(str(ROOT / "examples/11_tpu_slice.py"))["multiply"]
    own, chips, total = multiply.local(256)
    assert own == chips
    assert total == 256**3


def test_trainium_is_rented_and_gets_the_call(rehearse: Rehearse) -> None:
    """No fake machine has a Trainium: where PyTorch/XLA is installed, it trains on the device that XLA finds here."""
    done = rehearse("12_trainium")
    skip_without("torch", done)
    skip_without("torch_xla", done)
    assert re.search(r"loss \d+\.\d+ on xla", done.stdout)


def test_a_sweep_takes_spot_machines_below_its_price_and_runs_every_trial(rehearse: Rehearse) -> None:
    done = rehearse("13_spot_sweep")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^rate 0\.\d+: off by \S+$", done.stdout, re.MULTILINE)) == 12
    assert re.search(r"i-0001 +fake +small +north-a +spot", done.stdout)
    assert "dear" not in done.stdout


@pytest.mark.slow
def test_the_words_of_a_thousand_files_are_counted(rehearse: Rehearse) -> None:
    done = rehearse("14_many_files")
    assert done.returncode == 0, done.stderr
    assert re.match(r"[\d,]+ files, [\d,]+ words; most often: \w+, ", done.stdout)
