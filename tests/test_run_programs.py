"""Three of the programs of others that `make soak` runs, whose packages are built in three ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.programs import PROGRAMS, Program


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("words", ["docs/examples/code/carwash.py", "-m rich", "tabulate --header README"])
def test_a_program_of_others_runs_as_it_is(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program: Program = next(each for each in PROGRAMS if " ".join(each.words) == words)
    source = program.source.unpacked_or_skip(tmp_path)
    assert program.run_here(source) == ""
