"""Trainers that know nothing of skypool go on from a whole checkpoint after their machines were lost."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.lab import stores
from tests.soak import trainers

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(500)]


def test_trainers_go_on_after_their_machine_was_lost(tmp_path: Path) -> None:
    if why := stores.missing_s3():
        pytest.skip(why)
    python = trainers.environment()
    (tmp_path / "store").mkdir()
    with stores.seaweedfs(tmp_path / "store") as store, ThreadPoolExecutor(len(trainers.KINDS)) as threads:

        def wrong(kind: str) -> str:
            return trainers.lived(kind, tmp_path / kind, store, python, random.Random(f"7 {kind}"), is_soak=False)[1]

        found = dict(zip(trainers.KINDS, threads.map(wrong, trainers.KINDS), strict=True))
    assert found == dict.fromkeys(trainers.KINDS, "")


def test_the_example_with_a_trainer_goes_on(tmp_path: Path) -> None:
    python, example = trainers.environment(), shutil.copy(ROOT / "examples/17_trainer.py", tmp_path)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads wait for each other where others compute, too
    done = subprocess.run([python, example], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("begins\n")
    assert re.search(r"^loss \d\.\d+ after 104 steps$", done.stdout, re.MULTILINE), done.stdout
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"checkpoint-100", "checkpoint-104"}
