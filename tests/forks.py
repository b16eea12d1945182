"""Programs that begin with their imports done: forks of one process that has imported skypool and the SDKs of clouds.

Importing an SDK, and making the zip for nodes, take longer than all else that a client of a crash matrix does, and a
matrix has dozens of clients. A fork is a process of its own: it can be killed, and it has an environment of its own.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

MODULES = [
    "skypool.cli",
    "skypool.compute_pool",
    "skypool.pool.engine",
    "skypool.testing",
    "boto3",
    "google.cloud.compute_v1",
    "google.cloud.tpu_v2",
    "tests.forks",
    "tests.packed",
]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["__main__", *MODULES])
LOCK = threading.Lock()
"""To start one process looks at the ends of all others, and an end can be read once."""


class Fork:
    """A program that runs in a fork.

    Args:
        program: its source.
        arguments: its `sys.argv[1:]`.
        environment: variables of its environment, besides those of this process.

    Attributes:
        stdout: what it prints.
    """

    def __init__(self, program: str, *arguments: str, environment: Mapping[str, str]) -> None:
        # bytes that are no text, as of a program's output, come as surrogates; line ends stay as they are
        as_is: dict[str, Any] = {"errors": "surrogateescape", "newline": ""}
        self._errors = tempfile.NamedTemporaryFile("r", **as_is)  # noqa: SIM115 - it is read when the program has ended
        self._reads, writes = CONTEXT.Pipe(duplex=False)
        self.stdout = open(self._reads.fileno(), closefd=False, **as_is)  # noqa: SIM115 - the connection owns it
        self._argv, variables = ["-c", *arguments], {**os.environ, **environment}
        self._process = CONTEXT.Process(target=_run, args=(program, self._argv, variables, writes, self._errors.name))
        with LOCK:
            self._process.start()
        writes.close()

    def kill(self) -> None:
        """End it with SIGKILL, if it runs."""
        self._process.kill()

    def end(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end. What it printed is what nobody has read yet."""
        with self._errors, self.stdout, self._reads:
            try:
                printed = self.stdout.read()
                wait([self._process.sentinel])
            except BaseException:  # a test that took too long
                self.kill()
                raise
            with LOCK:
                status = self._process.exitcode
            assert status is not None
            return subprocess.CompletedProcess(self._argv, status, printed, self._errors.read())


def _run(program: str, argv: list[str], environment: dict[str, str], out: Connection, errors: str) -> None:
    """Run a program in this fork as an interpreter runs it."""
    os.dup2(out.fileno(), 1)
    out.close()
    with Path(errors).open("w") as file:
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - open until the end
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 - the same
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = argv
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    try:
        exec(compile(program, "<program>", "exec"), module.__dict__)
    finally:
        threading._shutdown()  # type: ignore[attr-defined] # what follows the end of the main thread, in order
        atexit._run_exitfuncs()
