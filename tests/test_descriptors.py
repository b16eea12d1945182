"""The file descriptors in reserve for the end of machines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from skypool.testing import FakeCloud
from tests.conftest import ROOT

PROGRAM = """
import contextlib, os, sys
import skypool as sky
from skypool.testing import FakeCloud

null, found = os.stat(os.devnull), []
file = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
with sky.ComputePool(FakeCloud(sys.argv[1]), console="off") as pool:
    assert pool.submit(abs, -1).result(60) == 1
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(fd), null):
                found.append(fd)
    assert len(found) > 10
    for fd in found[::2]:
        os.close(fd)
    for fd in found[1::2]:
        os.dup2(file, fd)
for fd in found[1::2]:
    os.write(fd, b"x")
print(len(found[1::2]))
"""


def test_machines_end_though_the_program_has_closed_the_reserve(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PROGRAM, str(tmp_path / "cloud"), str(tmp_path / "file")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "x" * int(done.stdout)
    assert FakeCloud(tmp_path / "cloud").instances() == []
