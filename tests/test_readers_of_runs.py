"""Readers of a run on its own machine that are slow, stopped, killed or many: none harms the run or another reader."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from skypool.agent.processes import mib_of
from tests.conftest import eventually
from tests.test_detached_run import Project, project, skypool

__all__ = ["project"]  # fixtures
LINES = 60_000
NOISY = f"""import os, time
for n in range({LINES}):
    print("line", n, "x" * 100)
open("printed", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
print("the end")
"""


def looks_of(project: Project) -> set[int]:
    """The processes on this computer as a machine that send what is there of a run."""
    found = set()
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = each.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if b"-c" in words and os.fsencode(project.place) in words:
            found.add(int(each.parent.name))
    return found


@pytest.mark.slow
def test_readers_that_are_many_or_slow_or_stopped_or_killed_harm_nobody(project: Project) -> None:
    project.run(NOISY, "--max-lifetime", "10m")
    logs = skypool("logs", "-f", project.name)

    head = subprocess.run(
        ["bash", "-c", '"$@" | head -1; exit ${PIPESTATUS[0]}', "bash", *logs],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert head.stdout.startswith("line 0 ")
    assert head.returncode == 1
    assert [each for each in head.stderr.splitlines() if each.strip()][1:] == [], "only the line with the source"

    eventually(lambda: (project.copy / "printed").exists(), 60, "the output")
    eventually(lambda: not looks_of(project), 30, "the end of what the first reader has started")
    stopped = subprocess.Popen(logs, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0)
    assert stopped.stdout is not None
    assert stopped.stdout.readline().startswith(b"line 0 ")
    os.kill(stopped.pid, signal.SIGSTOP)
    [of_stopped] = looks_of(project)
    first = mib_of(of_stopped)

    killed = subprocess.Popen(logs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    eventually(lambda: len(looks_of(project)) == 2, 60, "the look of another reader")
    killed.kill()
    killed.wait()
    eventually(lambda: looks_of(project) == {of_stopped}, 30, "the end of the look of a reader that was killed")

    readers = [subprocess.Popen(logs, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(10)]
    (project.copy / "go").touch()
    outputs = [each.communicate(timeout=240)[0] for each in readers]
    expected = "".join(f"line {n} {'x' * 100}\n" for n in range(LINES)) + "the end\n"
    assert {hashlib.sha256(each).hexdigest() for each in outputs} == {hashlib.sha256(expected.encode()).hexdigest()}
    assert [each.returncode for each in readers] == [0] * 10
    assert project.ends().returncode == 0, "the run has waited for nobody"

    assert looks_of(project) == {of_stopped}
    time.sleep(2)
    assert mib_of(of_stopped) <= first + 8, "what is not taken is not kept in memory"
    os.kill(stopped.pid, signal.SIGCONT)
    rest, _ = stopped.communicate(timeout=120)
    assert rest == expected.encode().split(b"\n", 1)[1]
    eventually(lambda: not looks_of(project), 30, "the end of the last look")
