"""Pages of nodes in Chromium, through a forward: Python's http.server, and TensorBoard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import skypool as sky
from tests.clients import venvs
from tests.conftest import ROOT, eventually
from tests.test_forward import fetched

pytestmark = pytest.mark.slow


def shown(chromium: str, url: str, profile: Path, patience: int = 20) -> str:
    """Return the page as Chromium has it after its scripts have run for `patience` seconds of its own clock."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    budget = f"--virtual-time-budget={patience * 1000}"
    argv = [chromium, *options, f"--user-data-dir={profile}", budget, "--dump-dom", url]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout


def answers(url: str) -> bool:
    try:
        return bool(fetched(url))
    except OSError:
        return False


@sky.compute
def run(argv: list[str]) -> int:
    return subprocess.run(argv).returncode


def test_a_page_of_http_server_is_seen_in_chromium(chromium: str, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "index.html").write_text(
        "<p id=told>not yet</p><script>fetch('data.txt').then(r => r.text())"
        ".then(t => { document.getElementById('told').textContent = t })</script>"
    )
    (folder / "data.txt").write_text("read by a script")
    with sky.ComputePool(console="off", slots=1) as pool:
        argv = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(folder)]
        serving = run([*argv, "18765"]) > pool
        with pool.forward(18765) as forward:
            eventually(lambda: answers(forward.url), 60, "the page")
            assert '<p id="told">read by a script</p>' in shown(chromium, forward.url, tmp_path / "profile")
        serving.cancel()


def test_tensorboard_is_seen_in_chromium(chromium: str, tmp_path: Path) -> None:
    program = str(venvs.environment("tensorboard", ROOT / "tests" / "engines" / "requirements") / "bin" / "python")
    writing = """
import sys
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
writer = EventFileWriter(sys.argv[1])
for step in range(10):
    value = Summary.Value(tag="loss_of_a_test", simple_value=1 / (step + 1))
    writer.add_event(Event(step=step, summary=Summary(value=[value])))
writer.close()
"""
    logs = tmp_path / "logs" / "a-run"
    subprocess.run([program, "-c", writing, str(logs)], check=True, timeout=120)
    with sky.ComputePool(console="off", slots=1) as pool:
        argv = [program, "-m", "tensorboard.main", "--logdir", str(logs.parent), "--port", "18766", "--bind_all"]
        serving = run(argv) > pool
        with pool.forward(18766) as forward:
            eventually(lambda: answers(forward.url), 120, "TensorBoard")
            eventually(lambda: b"a-run" in fetched(f"{forward.url}/data/runs"), 60, "the run")
            page = shown(chromium, f"{forward.url}/#timeseries", tmp_path / "profile")
            assert "loss_of_a_test" in page
            assert "a-run" in page
        serving.cancel()
