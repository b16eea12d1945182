"""Gangs of four processes on two machines keep checkpoints of torch in a bucket, with `sky.Checkpoints`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.lab import stores
from tests.soak import trainers

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(500)]
SCRIPT = Path(__file__).parent / "scripts" / "gang_checkpoints.py"


def run(cwd: Path, *words: str) -> str:
    """Run a program that uses skypool and torch. Return what it prints."""
    path = os.pathsep.join(each for each in sys.path if each and Path(each).is_dir())  # skypool and what it needs
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SAVE_ID": "run"}
    env["SAVE_SECRET"] = stores.secret_of("run")
    argv = [str(trainers.environment()), *words]
    done = subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_gang_computes_the_same_after_three_interruptions(tmp_path: Path) -> None:
    """A rank is killed, a machine is killed, and a machine is taken back: torch.save, safetensors and DCP come back."""
    if why := stores.missing_s3():
        pytest.skip(why)
    (tmp_path / "store").mkdir()
    with stores.seaweedfs(tmp_path / "store") as store:
        said = json.loads(run(tmp_path, str(SCRIPT), str(tmp_path), store.endpoint))
    assert said["problems"] == []
    assert said["cut"] == pytest.approx(said["alone"], abs=1e-6)
    firsts = said["firsts"]
    assert firsts[0] == 0
    assert len(firsts) == 4
    assert firsts == sorted({*firsts})  # each attempt went on from a newer checkpoint


def test_the_examples_with_checkpoints_go_on(tmp_path: Path) -> None:
    plain = run(tmp_path, str(ROOT / "examples/18_checkpoints.py"))
    assert re.fullmatch(r"from step 0: loss \d+\.\d+\nfrom step 100: loss \d+\.\d+\n", plain)
    sharded = run(tmp_path, str(ROOT / "examples/19_sharded.py"))
    assert sharded == "began at [0, 0, 0, 0], and then at [20, 20, 20, 20]\n"
