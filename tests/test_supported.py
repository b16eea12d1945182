"""On which systems skypool works, and what it says elsewhere. These run as if on another system, in a process of their
own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.conftest import ROOT

WINDOWS = """
import os, sys
sys.platform = "win32"
for name in ("fcntl", "pwd", "grp", "termios", "resource", "pty", "tty"):
    sys.modules[name] = None
del os.register_at_fork, os.fork, os.getuid, os.killpg, os.setsid
"""


def run(program: str, *argv: str) -> subprocess.CompletedProcess[str]:
    code = [sys.executable, "-c", textwrap.dedent(program), *argv]
    return subprocess.run(code, capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.mark.parametrize("name", ["ComputePool", "compute", "Local", "AWS", "plan", "Image"])
def test_windows_is_told_at_once_and_in_one_line(name: str) -> None:
    done = run(f"{WINDOWS}\nfrom skypool import {name}")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("skypool.errors.UsageError: skypool runs on Linux and macOS, and this is Windows"), (
        done.stderr
    )
    assert "WSL" in last


def test_the_command_line_says_so_on_windows() -> None:
    done = run(f"{WINDOWS}\nfrom skypool.cli import main\nmain()", "ps")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: skypool runs on Linux and macOS, and this is Windows")


def test_errors_and_hardware_can_be_named_on_windows() -> None:
    done = run(f"{WINDOWS}\nimport skypool as sky\nprint(sky.accelerators.H100(count=8), sky.UsageError.__name__)")
    assert done.stdout.split() == ["H100-80GB:8", "UsageError"], done.stderr
