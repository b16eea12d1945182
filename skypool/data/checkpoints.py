"""`Checkpoints` and `saved`, for programs that know of their saved folders. They talk to the mover of the node."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from skypool import runtime
from skypool.checks import Duration, seconds, whole
from skypool.data.checkpoint_saver import PLACE, RANK, Step, place_of
from skypool.errors import SkypoolError, UsageError
from skypool.wire.save_orders import SOCKET_VARIABLE

_ANSWER = 1 << 24
"""The most bytes of an answer."""
_LOOK = 0.2
"""Seconds between two questions whether a checkpoint is safe."""
_TO_RETURN = 60.0
"""Seconds in which a mover that has ended has begun again."""
_PAUSE = 0.2
"""Seconds between two attempts to reach it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        step: its step.
        path: the folder with its files: those of this process, and those of others under other names.
    """

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Flushed:
    """An account of what is saved of a folder.

    Attributes:
        whole: True if everything is.
        files: the number of files that were saved since the machine has the folder.
        bytes: the bytes of these.
        unsaved: some of the files that are not.
        trouble: why the last attempt has failed; "" if it has not.
    """

    whole: bool
    files: int
    bytes: int
    unsaved: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class SavedFolder:
    """A folder of this machine that is kept in a bucket, as `saved` returns it. `name` is what `save=` calls it."""

    name: str

    def flush(self, timeout: Duration = "2m") -> Flushed:
        """Save all files as they are now, and return what is saved.

        Args:
            timeout: the most time that this may take: seconds, or a text such as "2m".

        Raises:
            UsageError: the folder is not kept in a bucket.
            SkypoolError: nothing is saved on this machine, or the process that does it has ended.
        """
        said = _ask({"do": "flush", "id": self.name, "seconds": seconds("timeout", timeout)})
        return Flushed(said["whole"], said["files"], said["bytes"], tuple(said["names"]), said["trouble"])


def saved(folder: str) -> SavedFolder:
    """Return a folder of this machine that is kept in a bucket, by the name that `save=` or `--save` has for it."""
    return SavedFolder(os.path.normpath(folder))


class Checkpoints:
    """The checkpoints of a program, in a folder that is kept in a bucket: whole ones only, also after any crash.

        store = skypool.Checkpoints("ckpt", keep=3)
        last = store.latest()
        for step in range(last.step + 1 if last else 0, steps):
            ...
            with store.save(step) as folder:
                torch.save(model.state_dict(), folder / "model.pt")

    In a call with `procs=`, or a program with `RANK` and `WORLD_SIZE`, each process saves its own files, and a
    checkpoint is whole when all processes have saved theirs. All of them get the same one from `latest`.

    If the folder is not kept in a bucket, as on a laptop, checkpoints stay in it.

    Args:
        folder: the folder, as `save=` or `--save` names it.
        keep: the number of whole checkpoints that are kept. Default 3.

    Raises:
        UsageError: an argument is not valid.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        whole("keep", keep, "the number of checkpoints that are kept", least=1)
        self._folder = os.path.normpath(os.fspath(folder))
        self._keep = keep
        self._rank = int(os.environ.get("RANK", "0"))
        self._world = int(os.environ.get("WORLD_SIZE", "1"))
        run = os.environ.get("TORCHELASTIC_RUN_ID", "")
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        self._token = f"{run}.{count}" if self._world > 1 else _token(os.getpid(), runtime.calls_begun())
        self._is_saved = os.path.exists(os.environ.get(SOCKET_VARIABLE, ""))
        self._root = self._folder
        self._attempt: int | None = None

    def latest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint; None if there is none.

        It is brought to this machine first. In one attempt, which ends when the program is started again, all processes
        get the same answer, however often they ask.

        Raises:
            SkypoolError: it could not be brought here, or a file is not as it was saved.
        """
        if not self._is_saved:
            return self._latest_here()
        said = self._begin()
        return None if said["step"] is None else Checkpoint(said["step"], Path(said["path"]))

    @contextmanager
    def save(self, step: int, wait: bool = False) -> Iterator[Path]:
        """Save a checkpoint: yield an empty folder, into which the files of this process are written.

        After the `with` block, the checkpoint is whole on this machine's disk, and goes to the bucket from then on. If
        the block raises, nothing is saved.

        Args:
            step: the number of the step, 0 or more. It is saved once in an attempt.
            wait: True to wait until the checkpoint is in the bucket, which it is when all processes have saved theirs.

        Raises:
            UsageError: the step was saved before in this attempt.
            SkypoolError: with `wait`, a later attempt has begun.
        """
        whole("step", step, "the number of a step", least=0)
        if self._attempt is None:
            self._begin()
        root = Path(self._root, PLACE)
        root.mkdir(parents=True, exist_ok=True)
        said = {
            "attempt": self._attempt, "step": step, "rank": self._rank, "world": self._world, "keep": self._keep,
        }  # fmt: skip
        there = root / place_of(said)
        if there.exists():
            raise UsageError(f"step {step} was saved before in this attempt; number steps in ascending order")
        new = root / f".new-{secrets.token_hex(6)}"
        new.mkdir()
        try:
            yield new
            (new / RANK).write_text(json.dumps(said))
            for each in new.rglob("*"):
                _sync(each)
            there.parent.mkdir(parents=True, exist_ok=True)
            new.rename(there)
            _sync(there.parent)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        if not self._is_saved:
            self._prune_here()
        if wait and self._is_saved:
            self._await_safe(step)

    def safe(self) -> int | None:
        """Return the step of the newest checkpoint that is whole in the bucket; None for none.

        A program that starts again goes on from this one, or a newer one.

        Raises:
            SkypoolError: the bucket could not be asked.
        """
        if not self._is_saved:
            return None
        found = self._safe()[0]
        return None if found is None else found.step

    def _safe(self) -> tuple[Step | None, bool]:
        """Return the newest checkpoint that is safe, and True if a later attempt has begun."""
        said = self._ask_mover("safe")
        return None if said["safe"] is None else Step(*said["safe"]), said["over"]

    def _await_safe(self, step: int) -> None:
        """Wait until a step of this attempt is safe. Raises SkypoolError if it will never be."""
        while True:
            found, is_over = self._safe()
            if found is not None and found >= (self._attempt, step):
                return
            if is_over:
                raise SkypoolError(
                    f"step {step} will not be safe: a later attempt has begun, which goes on from an earlier checkpoint"
                )
            time.sleep(_LOOK)

    def _begin(self) -> dict[str, Any]:
        """Find out which attempt this is, and from which checkpoint it goes on."""
        if not self._is_saved:
            self._attempt = 1
            return {}
        said = self._ask_mover("latest")
        self._attempt, self._root = said["attempt"], said["folder"]
        return said

    def _ask_mover(self, what: str) -> dict[str, Any]:
        said = {
            "do": what, "id": self._folder, "token": self._token, "rank": self._rank, "world": self._world,
        }  # fmt: skip
        return _ask(said)

    def _steps_here(self) -> dict[Step, Path]:
        """Return the checkpoints in the folder of which this process has files."""
        found = {}
        for path in Path(self._folder, PLACE).glob(f"step-*/attempt-*/rank-{self._rank}"):
            step, attempt = (int(each.rpartition("-")[2]) for each in path.parts[-3:-1])
            found[Step(attempt, step)] = path
        return found

    def _latest_here(self) -> Checkpoint | None:
        found = self._steps_here()
        if not found:
            return None
        newest = max(found)
        return Checkpoint(newest.step, found[newest])

    def _prune_here(self) -> None:
        found = self._steps_here()
        for each in sorted(found)[: -self._keep]:
            shutil.rmtree(found[each], ignore_errors=True)


@cache
def _token(process: int, call: int) -> str:
    """Return what names the attempt of a process that is alone. A forked process, or the next call, is another one."""
    return secrets.token_hex(8)


def _sync(path: Path) -> None:
    """Have a file or folder written to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without this
            os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def _ask(said: dict[str, Any]) -> dict[str, Any]:
    """Ask the mover of this node, also one that has just begun again. Raises UsageError or SkypoolError."""
    path = os.environ.get(SOCKET_VARIABLE, "")
    if not os.path.exists(path):
        raise SkypoolError(f"{said['id']} is not saved here: this process does not run on a machine that saves folders")
    until = time.monotonic() + _TO_RETURN
    while True:
        try:
            answer = _answer(path, said)
            break
        except (OSError, ValueError) as e:  # it has ended, or ends while it answers
            if time.monotonic() >= until:
                raise SkypoolError(f"{said['id']}: the process that saves folders cannot be reached: {e}") from e
        time.sleep(_PAUSE)
    if "known" in answer:
        known = ", ".join(answer["known"]) or "none"
        raise UsageError(f"{said['id']} is not kept in a bucket on this machine; those that are: {known}")
    if "error" in answer:
        raise SkypoolError(f"{said['id']}: {answer['error']}")
    return answer


def _answer(path: str, said: dict[str, Any]) -> dict[str, Any]:
    """Send a question to the mover, and return its answer, which takes long if a large checkpoint is fetched."""
    with _opened(os.path.dirname(path)) as folder, socket.socket(socket.AF_UNIX) as peer:
        peer.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")  # the length of a path is limited
        peer.sendall(json.dumps(said).encode() + b"\n")
        with peer.makefile("rb") as file:
            answer = json.loads(file.readline(_ANSWER))
    return dict(answer)
