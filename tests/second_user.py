"""Programs that run as another user of this computer, to try what such a user could do to ours. Only root can do so."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

OTHER = 64321
"""The id of the other user and of his group. The system need not know him."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a program as a second user")
_BECOME = """
import contextlib, fcntl, json, os, resource, selectors, shutil, signal, socket, stat, struct, subprocess, sys
import threading, time
import encodings.idna  # this Python may be in a folder that the other user cannot enter
os.setgroups([])
os.setresgid({other}, {other}, {other})
os.setresuid({other}, {other}, {other})
os.umask(0)
"""


def other(program: str, *args: object, stdin: str = "", check: bool = True) -> str:
    """Run a Python program as the other user, without our environment, and return what it printed.

    Args:
        program: the text of the program. The modules that it may need are imported already.
        args: its arguments.
        stdin: what it reads.
        check: True if the program must succeed.
    """
    done = subprocess.run(
        argv(program, *args), input=stdin, capture_output=True, text=True, timeout=60, cwd="/", env=EMPTY
    )
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


def argv(program: str, *args: object) -> list[str]:
    """Return the command that runs a Python program as the other user."""
    text = _BECOME.format(other=OTHER) + textwrap.dedent(program)
    return [sys.executable, "-I", "-c", text, *map(str, args)]


EMPTY = {"PATH": os.defpath}
"""The environment of such a command."""


@contextmanager
def open_place() -> Iterator[Path]:
    """Yield a folder like /tmp, in which every user may make files, and nobody may remove those of others."""
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as place:
        os.chmod(place, 0o1777)
        yield Path(place)
