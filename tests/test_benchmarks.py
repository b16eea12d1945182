"""The table of `make bench`: a peer that could not be measured has its row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import core, peers


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that this process and its children find first."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def row(name: str) -> tuple[str, str]:
    what, figure, baseline, ratio = core._beside("map", 1000.0, name, "")
    assert (what, figure) == ("map", "1,000 calls/s")
    return baseline, ratio


def test_a_peer_that_is_not_installed_has_a_row_that_says_so() -> None:
    assert row("not_a_peer") == (
        "not_a_peer could not be measured: not installed (make bench installs it)",
        "–",
    )


def test_a_peer_that_cannot_start_has_a_row_with_its_last_words_and_those_after_it_have_theirs(installed: Path) -> None:
    (installed / "ray.py").write_text("def init(**_): raise RuntimeError('no token')\n")
    (installed / "distributed.py").write_text("import os\nos._exit(3)\n")
    assert row("distributed")[0] == "distributed could not be measured: ended with exit status 3 and said nothing"
    assert row("ray")[0] == "ray could not be measured: RuntimeError: no token"


def test_a_peer_that_fails_at_its_end_was_measured(installed: Path) -> None:
    (installed / "ray.py").write_text(
        "init = get = lambda *a, **k: None\n"
        "class remote:\n"
        "    def __init__(self, f): self.remote = f\n"
        "def shutdown(): raise OSError('at its end')\n"
    )
    assert peers.rate("ray") > 0


def test_a_peer_that_hangs_is_ended_with_what_it_started(installed: Path) -> None:
    (installed / "ray.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(peers.Unmeasured, match="did not end within 3 s"):
        peers.rate("ray", patience=3)
