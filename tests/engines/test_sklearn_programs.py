"""Examples of scikit-learn run unchanged with a pool as joblib's backend. They come from its source distribution."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients import venvs
from tests.distributions import Source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
HERE = Path(__file__).parent
SOURCE = Source(
    "d2/eb/eaf5e07fcc0da7149b0e084f24e54edd7441b9a89ce7e034032ae97fe3a0/scikit_learn-1.9.1.tar.gz",
    "629cada3e33e2b9bf376cdc7614a47a4140b8aedc1d836579e359736fbd82977",
)
PROGRAMS = {
    "760498b95b2679dc28c6dcfff0501158b9e2436054844e9f43cee619f484f47d": (
        "model_selection/plot_multi_metric_evaluation.py"
    ),
    "7d9b78b8fab4a76776590db08bb0976d604ec324d33d54d8b0d829d123a3e512": (
        "feature_selection/plot_rfe_with_cross_validation.py"
    ),
    "6143e0e588f5e57d1809220592d8f81e6365b34fda34bbab7490ed7055cf73d6": "ensemble/plot_forest_importances.py",
}
"""Programs in the folder `examples` of scikit-learn 1.9.1, by their SHA-256."""


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """The folder `examples`, from the package index."""
    return SOURCE.unpacked_or_skip(tmp_path, [f"examples/{each}" for each in PROGRAMS.values()]) / "examples"


def test_examples_of_scikit_learn_run_unchanged_in_a_pool(examples: Path, tmp_path: Path) -> None:
    for sha256, file in PROGRAMS.items():
        assert hashlib.sha256((examples / file).read_bytes()).hexdigest() == sha256
    python = venvs.with_skypool(venvs.environment("sklearn", HERE / "requirements")) / "bin" / "python"
    env = {
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    files = [str(examples / each) for each in PROGRAMS.values()]
    argv = [str(python), "-W", "ignore", str(HERE / "scripts" / "sklearn_own.py"), *files]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    batches = json.loads(done.stdout.splitlines()[-1])
    assert len(batches) == len(PROGRAMS)
    assert all(count > 1 for count in batches.values()), batches
