"""Tells what happens in `skypool run`: lines for a person on stderr, or JSON objects for a program on stdout."""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from skypool.cli import output
from skypool.compute_pool.compute_pool import ComputePool
from skypool.files.project import Survey
from skypool.offers.ranking import Plan
from skypool.pool import interpreter_exit
from skypool.runs.output_spool import OutputSpool
from skypool.runs.program_run import exit_status
from skypool.runs.target import Target
from skypool.runs.teller import Teller, bounds
from skypool.text import plain, printable

_NOTE, _ERROR, _LINE = 3, 4, 5
"""What a piece of a spool is besides stdout (1) and stderr (2): a note, an error, a line of JSON."""
_NAMES = {1: "stdout", 2: "stderr"}
_FULL = 1.0
"""Seconds between two attempts to write to a full disk."""
_OPTIONS = {
    "max_usd_per_hour": "--max-price", "secrets": "--secret", "keys": "--bucket-keys", "role": "--bucket-role",
    "identity": "--bucket-identity",
}  # fmt: skip
"""The options that have other names than the parameters."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SIGNALLED = 0.5
"""Seconds after which a signal is heard that ended also who reads the output."""


def _open_if_closed(fd: int) -> None:
    """Let stdout or stderr lead to nothing if it was closed, so that no other file gets its number."""
    try:
        os.fstat(fd)
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        if null != fd:
            os.dup2(null, fd)
            os.close(null)


class Lines(Teller):
    """Tells a person what happens: on stderr, as stdout is the program's.

    Threads write it, so no method waits for who reads it, but for `output` while 1 GB of output waits. If stdout and
    stderr lead to different places, each has a thread of its own, so that what is told does not wait for who reads
    stdout.

    Attributes:
        on_failure: called, in such a thread, when stdout cannot be written any more, as after `| head`.
        has_signalled: True if this process has ended `watching` for that by a signal of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_failure: Callable[[], object] = lambda: None
        self.has_signalled = False
        self._is_closing = False
        for fd in _NAMES:
            _open_if_closed(fd)
        self._decoders = {each: codecs.getincrementaldecoder("utf-8")("replace") for each in _NAMES}
        self._out = OutputSpool(self._show, lambda _: self.on_failure(), output.check_reader)
        self._err = self._out if self._is_one() else OutputSpool(self._show, lambda _: None)

    def _is_one(self) -> bool:
        """Return True if stdout and stderr lead to the same place, so that their order matters."""
        try:
            return os.path.sameopenfile(1, 2)
        except OSError:
            return False

    @property
    def failure(self) -> OSError | None:
        """Why stdout cannot be written any more; None if it can."""
        return self._out.failure

    @property
    def is_unread(self) -> bool:
        return self.failure is not None

    def output(self, rank: int, stream: int, data: bytes) -> None:
        (self._out if stream == 1 else self._err).put(rank, stream, data, wait=True)

    def note(self, text: str) -> None:
        self._put(_NOTE, text)

    def error(self, text: str) -> None:
        self._put(_ERROR, text)

    def option(self, name: str, value: object = None) -> str:
        words = _OPTIONS.get(name) or f"--{name.replace('_', '-')}"
        return words if value is None else f"{words} {value}"

    def ask(self, question: str) -> bool | None:
        """Ask the user in the terminal of stdin. Return True for a yes, and None if stdin is no terminal."""
        if not sys.stdin.isatty():
            return None
        self._err.settle()
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().casefold() in ("y", "yes")

    def hurry(self) -> None:
        self._out.hurry()
        self._err.hurry()

    @contextlib.contextmanager
    def watching(self, pool: ComputePool) -> Iterator[Callable[[], None]]:
        """End the block as after a signal when stdout cannot be written any more, as after `| head`.

        Yields a function to call when the program has ended. From then on, nobody is needed who reads.
        """

        is_over = False

        def end() -> None:
            time.sleep(_SIGNALLED)  # a signal ends the reader, too, and is heard first
            engine = pool._engine
            if not is_over and (engine is None or not engine.life.is_ending):
                number = next((each for each in _SIGNALS if signal.getsignal(each) not in (signal.SIG_IGN, None)), None)
                if number is not None:
                    self.has_signalled = True
                    os.kill(os.getpid(), number)

        def on_end() -> None:
            nonlocal is_over
            is_over = True
            self.hurry()

        interpreter_exit.exit_on_signals()
        self.on_failure = end
        try:
            if self.failure is not None:  # nobody would read what the program prints
                raise self.failure
            yield on_end
        finally:
            is_over = True

    def close(self) -> None:
        """Wait until all is written. Call this when nothing costs money any more: who reads may take long."""
        self.end_output()
        self._is_closing = True
        lost = self._out.lost + (0 if self._err is self._out else self._err.lost)
        if lost:
            why = self._out.why_lost or self._err.why_lost
            self.error(f"{lost:,} bytes of output are not shown, as they could not be kept here: {why}")
        for spool in (self._err, self._out):
            spool.drain()
        self._flush()

    def _put(self, kind: int, text: str) -> None:
        self._keep(kind, self._text_masker.mask(text).encode("utf-8", "surrogateescape"))

    def _keep(self, kind: int, data: bytes) -> None:
        self._err.put(0, kind, data, always=True)

    def _show(self, rank: int, kind: int, data: bytes) -> None:
        if kind in _NAMES:
            self._write(kind, self._harmless(kind, data))
        elif kind == _LINE:
            self._write(1, data)
        else:
            text = plain(data.decode("utf-8", "surrogateescape"))
            self._write(2, f"{'error: ' if kind == _ERROR else ''}{text}\n".encode("utf-8", "backslashreplace"))

    def _harmless(self, stream: int, data: bytes, final: bool = False) -> bytes:
        """Return output without what changes a terminal, if a stranger's machine has sent it and no file keeps it."""
        if not self.is_stranger or stat.S_ISREG(os.fstat(stream).st_mode):
            return data
        return printable(self._decoders[stream].decode(data, final)).encode()

    def _flush(self) -> None:
        """Write what is left of characters that were cut off."""
        for stream in _NAMES:
            with contextlib.suppress(OSError):
                if data := self._harmless(stream, b"", final=True):
                    self._write(stream, data)

    def _write(self, fd: int, data: bytes) -> None:
        """Write to stdout (1) or stderr (2), also if another process has made it non-blocking.

        Wait while the disk is full, but not at the end.
        """
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                ready = select.poll()
                ready.register(fd, select.POLLOUT)
                ready.poll()
            except OSError as e:
                if e.errno not in (errno.ENOSPC, errno.EDQUOT) or self._is_closing:
                    raise
                time.sleep(_FULL)


class Json(Lines):
    """Tells a program what happens: one JSON object a line, on stdout."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[tuple[int, int], codecs.IncrementalDecoder] = {}

    def _is_one(self) -> bool:
        return True  # all is on stdout

    def _pass_on(self, rank: int, stream: int, data: bytes) -> None:
        self.output(rank, stream, data)  # the rank has a field of its own

    def _tell(self, event: str, **fields: object) -> None:
        self._keep(
            _LINE,
            (json.dumps({"event": event, **{each: self._masked(fields[each]) for each in fields}}) + "\n").encode(),
        )

    def _masked(self, said: Any) -> Any:
        """Mask the texts of a message, before quotes and escapes are added to them."""
        match said:
            case str():
                return self._text_masker.mask(said)
            case dict():
                return {self._masked(name): self._masked(value) for name, value in said.items()}
            case list() | tuple():
                return [self._masked(each) for each in said]
            case _:
                return said

    def project(self, target: Target, survey: Survey) -> None:
        project = target.project
        self._tell(
            "project", root=str(project.root), source=project.source, python=project.python, files=len(survey.paths),
            bytes=survey.bytes, not_sent=dict(survey.unsent), links_out=dict(survey.links_out), words=target.words,
            folder=target.folder,
        )  # fmt: skip

    def rents(
        self,
        plan: Plan,
        budget: float | None,
        lifetime: float | None,
        pool: str,
        spot_price: float | None = None,
        attached: str = "",
    ) -> None:
        best = plan.offers[0]
        usd, ends = bounds(plan, budget, lifetime, spot_price)
        accelerator = None if best.accelerator is None else str(best.accelerator)
        self._tell(
            "plan", pool=pool, provider=best.provider, type=best.instance_type, accelerator=accelerator,
            market=best.market, region=best.region, zone=best.zone, nodes=plan.nodes[0],
            usd_per_hour=plan.usd_per_hour, most_usd=usd,
            ends_by=None if ends is None else ends.isoformat(timespec="seconds"), attached=attached or None,
        )  # fmt: skip

    def uses(self, pool: str, seconds: float | None, usd_per_hour: float) -> None:
        left = None if seconds is None else round(seconds, 3)
        self._tell("uses", pool=pool, seconds=left, usd_per_hour=usd_per_hour)

    def stays(self, pool: str, seconds: float, usd_per_hour: float) -> None:
        self._tell("stays", pool=pool, seconds=round(seconds, 3), usd_per_hour=usd_per_hour)

    def detached(self, pool: str, seconds: float, worst_usd: float, folder: str, is_kept: bool = True) -> None:
        self._tell("detached", pool=pool, seconds=round(seconds, 3), worst_usd=worst_usd, folder=folder)

    def watches(self, pool: str, seconds: float, worst_usd: float, stay: float) -> None:
        self._tell("watches", pool=pool, seconds=round(seconds, 3), worst_usd=worst_usd, stay=round(stay, 3))

    def starts(self, pool: str, boot: float, environment: float, usd: float | None) -> None:
        boot, environment = round(boot, 3), round(environment, 3)
        self._tell("start", pool=pool, boot_seconds=boot, environment_seconds=environment, usd=usd)

    def waits(self, text: str) -> None:
        self._tell("waits", text=text)

    def saved(self, folder: str, files: int) -> None:
        self._tell("saved", folder=folder, files=files)

    def unsaved(self, files: Sequence[tuple[str, int]]) -> None:
        if files:
            self._tell("unsaved", files=dict(files))

    def ends(self, status: int, usd: float | None, seconds: float, program: int | None, limit: str) -> None:
        own = None if program is None else exit_status(program)
        self._tell("end", status=status, program=own, limit=limit or None, usd=usd, seconds=round(seconds, 3))

    def note(self, text: str) -> None:
        self._tell("note", text=text)

    def error(self, text: str) -> None:
        self._tell("error", text=text)

    def _show(self, rank: int, kind: int, data: bytes) -> None:
        if kind not in _NAMES:
            self._write(1, data)
            return
        new = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._say(rank, kind, self._texts.setdefault((rank, kind), new).decode(data))

    def _say(self, rank: int, stream: int, text: str) -> None:
        if text:
            said = {"event": "output", "rank": rank, "stream": _NAMES[stream], "text": text}
            self._write(1, json.dumps(said).encode() + b"\n")

    def _flush(self) -> None:
        for (rank, stream), decoder in self._texts.items():
            self._say(rank, stream, decoder.decode(b"", True))
