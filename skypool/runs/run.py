"""Runs a program with its project on the nodes of a pool."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from skypool.calls.call import compute
from skypool.calls.futures import CallFuture
from skypool.compute_pool.compute_pool import ComputePool
from skypool.errors import SkypoolError, UsageError
from skypool.files import transfer
from skypool.files.entries import walk
from skypool.files.project import unsent_of
from skypool.runs import environment, node_folders, node_program
from skypool.runs.follow import Follower
from skypool.runs.target import Target

T = TypeVar("T")
_AFTER = 30.0
"""Seconds in which the output of a program must come after its end."""
_AFTER_AN_ERROR = 8.0
"""The same if its call was stopped or has failed: its grace, and a little more."""


@dataclass
class ProgramRun:
    """A run of a program on a pool that has started.

    Args:
        pool: the pool.
        target: the program.
        packages: packages besides those of the project.
        env: variables of the program's environment.
        include: paths of the project that are sent in any case.
        procs: the number of processes on each node; None for one program on the only node.
        write: called with each piece of output: the rank, the number of the stream, and the bytes.
    """

    pool: ComputePool
    target: Target
    write: Callable[[int, int, bytes], None]
    packages: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    include: Sequence[str] = ()
    procs: int | None = None
    copy: str = ""
    _home: str = ""
    unsent: Mapping[str, str] = field(default_factory=dict[str, str])

    def send(self) -> transfer.Transferred:
        """Send the project to all nodes."""
        project = self.target.project
        homes = set(compute(node_folders.home)() @ self.pool)
        if len(homes) > 1:
            raise UsageError(f"the nodes have different home folders: {', '.join(sorted(homes))}; use one node")
        self._home = homes.pop()
        self.copy = os.path.join(self._home, "projects", f"{project.root.name or 'project'}-{project.key}")
        unsent = unsent_of(project, self.include)
        with self.pool._sender.transfer(f"send {project.root}", None) as ends:
            sent = transfer.push(
                ends, str(project.root), self.copy, patience=self.pool._sender.patience, leaves_out=unsent
            )
        files = [each.path for each in walk(str(project.root), unsent) if each.kind != "d"]
        compute(node_folders.note_sent)(self.copy, files) @ self.pool
        self.unsent = unsent.told
        return sent

    def prepare(self) -> tuple[str, bool]:
        """Make the project's environment on all nodes. Return the folder of its programs, and whether it was made."""
        project = self.target.project
        packages = [*project.packages, *self.packages]
        asked = compute(environment.prepared)(self.copy, project.source, project.python, packages, project.versions)
        made = asked @ self.pool
        return made[0][0], any(new for _, new in made)

    def run(self, programs: str) -> int:
        """Run the program, and return its exit status as a shell tells it: 128 + n after signal n.

        Raises:
            OSError: `write` has raised it. The program was stopped.
            CommandFailed: the program cannot be started.
        """
        words = list(self.target.words)
        if words[0] == "python" and not programs:
            words[0] = "python3"
        output = os.path.join(self._home, "output", f"{self.pool.name}-{time.time_ns():x}")
        folder = os.path.join(self.copy, self.target.folder)
        call = compute(node_program.run)(words, folder, programs, dict(self.env), output)
        several = len(self.pool.nodes) > 1 or self.procs is not None
        try:
            if several:
                statuses = self._followed(self.pool.send(call.with_options(procs=self.procs or 1), node="all"), output)
            else:
                statuses = [self._followed(self.pool.send(call), output)]
        finally:
            with contextlib.suppress(SkypoolError):  # the nodes may have ended, with all that is there
                compute(shutil.rmtree)(output, True) @ self.pool
        status = next((each for each in statuses if each), 0)
        return status if status >= 0 else 128 - status

    def fetch(self, folder: str, local: Path) -> int:
        """Fetch a folder that the program writes from all nodes; what is there is not fetched again. Return how many
        files came. A node that has no such folder is left out."""
        there = os.path.join(self.copy, self.target.folder, folder)
        return sum(
            self.pool.pull(there, local, node=number).files
            for number, exists in enumerate(compute(os.path.isdir)(there) @ self.pool)
            if exists
        )

    def _followed(self, future: CallFuture[T], output: str) -> T:
        """Pass on the output of the program until its end, and return the value of its call."""
        procs = self.procs or 1
        failures: list[OSError] = []

        def write(rank: int, stream: int, data: bytes) -> None:
            try:
                self.write(rank, stream, data)
            except OSError as e:  # such as a closed pipe: nobody sees what the program prints
                failures.append(e)
                future.cancel()
                raise

        with self.pool._sender.transfer("the output of a program", None) as ends:
            followers = [
                Follower(end, os.path.join(output, str(rank)), partial(write, rank))
                for number, end in enumerate(ends)
                for rank in range(number * procs, (number + 1) * procs)
            ]
            for each in followers:
                each.start()
            patience = _AFTER_AN_ERROR
            try:
                value = future.result()
                patience = _AFTER
            except BaseException as e:
                future.cancel()  # after Ctrl-C the program is interrupted, and its last output is awaited
                if failures:
                    raise failures[0] from e
                raise
            finally:
                until = time.monotonic() + patience
                for each in followers:
                    each.stop(max(0.0, until - time.monotonic()))
        return value
