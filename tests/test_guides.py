"""docs/getting-started.md, docs/guides, docs/coming-from and docs/not.md: sound programs.

What can run here runs: on this machine, or on the fake cloud in the place of a real one. test_docs.py checks links
and types on all pages.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skypool.accelerators import parse
from skypool.model import Need
from skypool.offers.ranking import rank_offers
from tests.lab.prices import snapshot

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDES = sorted((DOCS / "guides").glob("*.md"))
PAGES = [DOCS / "getting-started.md", DOCS / "not.md", *GUIDES, *sorted((DOCS / "coming-from").glob("*.md"))]
PYTHON = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNS = [
    ("getting-started.md", 0, "CPUs"),
    ("getting-started.md", 1, "H100-80GB on "),
    ("guides/many-inputs.md", 1, "a 2"),
    ("guides/many-inputs.md", 2, "[1, 0]"),
    ("guides/scikit-learn.md", 0, "{'C': 1, 'gamma': 0.001}"),
]
"""Programs that run as they stand but for their provider: page, number of the block, what they print."""


def name(path: Path) -> str:
    return str(path.relative_to(DOCS))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_program_is_sound_python(page: Path) -> None:
    for block in PYTHON.findall(page.read_text()):
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_a_guide_is_short_and_begins_with_a_program(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert len(lines) <= 120
    language = "console" if page.stem == "first-account" else "python"  # that one is about a command
    assert any(line.startswith(f"```{language}") for line in lines[:15])


def test_the_guide_to_a_first_account_names_a_gpu_of_each_cloud_and_what_it_costs() -> None:
    page = (DOCS / "guides" / "first-account.md").read_text()
    pattern = r"^\$ skypool prove (\w+) --level cents --accelerator (\S+) +# about (\d\.\d\d) USD"
    told = re.findall(pattern, page, re.MULTILINE)
    assert [name for name, _, _ in told] == ["aws", "gcp", "runpod", "vastai", "verda"]
    for provider, accelerator, usd in told:
        offers = rank_offers(snapshot(provider), Need(accelerators=(parse(accelerator),))).offers
        machines = 2 if provider == "verda" else 3
        assert float(usd) == pytest.approx(machines * offers[0].usd_per_hour * 5 / 60, abs=0.005), provider


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number", "prints"), RUNS)
def test_a_program_of_a_page_runs(page: str, number: int, prints: str, tmp_path: Path) -> None:
    program = PYTHON.findall((DOCS / page).read_text())[number]
    program = program.replace("sky.AWS()", '"fake"').replace('"L4"', '"H100"')
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={**os.environ, "SKYPOOL_FAKE_CLOUD": str(tmp_path / "cloud")},
    )
    assert done.returncode == 0, done.stderr
    assert prints in done.stdout


@pytest.mark.parametrize("command", ["ps", "gc --provider fake"])
def test_getting_started_prints_what_a_command_prints(command: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "skypool", *command.split()]
    env = {**os.environ, "SKYPOOL_FAKE_CLOUD": str(tmp_path / "cloud"), "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    assert f"$ skypool {command}\n{done.stdout}" in (DOCS / "getting-started.md").read_text()


@pytest.mark.slow
def test_the_guide_on_tests_passes(tmp_path: Path) -> None:
    (block,) = PYTHON.findall((DOCS / "guides" / "testing-your-code.md").read_text())
    (tmp_path / "test_mine.py").write_text(block)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert "3 passed" in done.stdout, done.stdout
