"""Every example runs, on its real input, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


def run(path: Path, *, within: float = 100) -> str:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=within, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_examples_are_there() -> None:
    assert [path.name for path in EXAMPLES][:5] == [
        "01_hello.py",
        "02_map.py",
        "03_stream.py",
        "04_errors.py",
        "05_grid_search.py",
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_it_needs(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 40
    assert re.search("[Nn]eeds .* costs? (nothing|.* USD an hour)", text.splitlines()[0])


def test_hello_is_said_by_both_nodes() -> None:
    out = run(ROOT / "examples/01_hello.py")
    assert "hello world, from node" in out
    assert "['hello everyone, from node 0', 'hello everyone, from node 1']" in out


@pytest.mark.slow  # `make demo` runs it, too
def test_the_map_of_the_standard_library_agrees_with_the_plain_loop() -> None:
    out = run(ROOT / "examples/02_map.py")
    assert re.search(r"\d+ modules, [\d,]+ functions", out)
    assert "times as fast" in out


def test_the_streams_find_the_primes() -> None:
    out = run(ROOT / "examples/03_stream.py")
    assert "prime number 15,000 is 163,841" in out
    assert "longest gap up to 10,000, and where: (36, 9551)" in out


def test_each_failure_says_what_it_is_and_the_pool_goes_on() -> None:
    out = run(ROOT / "examples/04_errors.py")
    for said in (
        "raise -> KeyError 'no such key'",
        "exit -> WorkerDied the worker running <lambda> on node 0 exited with code 3",
        "crash -> WorkerDied the worker running <lambda> on node 0 was killed by SIGSEGV",
        "hang -> CallTimeout <lambda> ran longer than its timeout of 0.5 s",
        "return a file -> PickleError the result of <lambda>['log'] cannot be sent",
        "capture a lock -> PickleError <lambda>.<globals>.lock cannot be sent",
        "do nothing wrong -> fine",
        "mistype -> no accelerator is called 'H1OO'; did you mean H100",
    ):
        assert said in out, out


@pytest.mark.slow
def test_the_grid_search_finds_the_known_best() -> None:
    pytest.importorskip("sklearn")
    out = run(ROOT / "examples/05_grid_search.py")
    assert "best: C=10.0, gamma=0.001" in out or "best: C=1.0, gamma=0.001" in out


def test_training_on_spot_machines_does_every_step() -> None:
    assert run(ROOT / "examples/06_spot.py") == "300 steps, weight 3.000\n"


def test_the_service_answers_through_the_forwarded_port() -> None:
    assert "this page is on node 0\nits processes are gone: True\n" in run(ROOT / "examples/09_service.py")


def test_an_example_that_prints_into_a_pipe_keeps_status_lines_out_of_it() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/01_hello.py")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert "ready" in done.stderr
    assert "ready" not in done.stdout
