"""`Saver`: fetches the folder that a program writes, while it runs and at its end."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from skypool import events
from skypool.errors import LedgerError, SkypoolError
from skypool.runs.program_run import ProgramRun
from skypool.runs.teller import Teller

_EVERY = 60.0
"""Seconds between two fetches of the folder that a program writes."""
_OFTEN = 5.0
"""The same when its machine ends soon."""
_LONGEST = 600.0
"""The most seconds of the last fetch from a machine of a stranger, who is paid for each of them."""
_TO_FETCH = 25.0
"""The most seconds before the planned end of the machines in which the program ends and its folder is fetched."""
_TO_END = 10.0
"""Seconds in which a program ends, before what it has written is saved to buckets."""
_LAST = 60.0
"""Seconds before the planned end of the machines from which the folder is fetched often."""


class Saver:
    """Fetches the folder that a program writes each minute, and at the end. A context manager.

    It also interrupts the program before budget or lifetime end the machines, so that its last files are saved.

    Args:
        run: the run.
        folder: the folder, below that in which the program starts; "" for none.
        target: the folder here.
        tell: what happens is told to it.

    Attributes:
        failure: why the last fetch has failed; "" if it has not.
    """

    def __init__(self, run: ProgramRun, folder: str, target: Path, tell: Teller) -> None:
        self.failure = ""
        self._run, self._folder, self._target, self._tell = run, folder, target, tell
        self._files = 0
        self._fetched = ""  # when the last one began, in words
        self._is_urgent = False
        self._wake = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name="skypool-save", daemon=True)

    def __enter__(self) -> None:
        early = _TO_END if self._run.buckets else 0.0
        if self._folder:
            with contextlib.suppress(SkypoolError):  # nobody knows when it ends
                early += min(_TO_FETCH, self._run.seconds_left() / 4)
        if early:
            self._run.end_earlier(early)
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        try:
            if self._folder:
                self._end()
            self._is_over = True
            self._wake.set()
        finally:
            if not self._run.is_hurried:
                self._tell.unsaved(self._run.unsaved())

    def _end(self) -> None:
        self._is_over = True
        self._wake.set()
        why = "a second signal came" if self._run.is_hurried else "it was interrupted"
        try:
            if not self._run.is_hurried:
                why = self._fetch_last()
        except BaseException:
            self._run.is_hurried = True
            raise
        finally:
            if why:
                self.failure = why
                since = f"since {self._fetched} " if self._fetched else ""
                self._tell.error(f"what the program wrote into {self._folder} {since}was not fetched: {why}")
        if self._files or not self.failure:
            self._tell.saved(self._folder, self._files)

    def _fetch_last(self) -> str:
        """Fetch for the last time. Another signal ends that. Return why it failed; "" if it did not."""
        if self._run.is_interrupted:
            self._tell.note(f"fetching {self._folder} before the machines end; another signal ends them at once")
        said: list[str] = []

        def work() -> None:
            self._thread.join()
            try:
                self._fetch(settled=False)
            except SkypoolError as e:
                said.append(str(e))
            else:
                said.append("")

        last = threading.Thread(target=work, name="skypool-save-last", daemon=True)
        last.start()
        last.join(_LONGEST if self._tell.is_stranger else None)
        return said[0] if said else f"it was not there after {_LONGEST:g} s"

    def hear(self, event: events.Event) -> None:
        """Fetch more often from now on if a provider has announced that it takes a node back."""
        if isinstance(event, events.NodeInterruption):
            self._is_urgent = True
            self._wake.set()

    def _fetch(self, settled: bool) -> None:
        began = time.strftime("%H:%M:%S")
        self._files = self._run.fetch(self._target, settled)
        self._fetched = began

    def _work(self) -> None:
        told = ""
        pause = _OFTEN
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            if self._is_over:
                return
            try:
                left, until_end = self._run.seconds_left(), self._run.until_end()
            except LedgerError:  # then nobody knows
                left = until_end = 0.0
            except SkypoolError:  # the pool has ended
                return
            try:
                if until_end <= 0 and not self._is_urgent:
                    self._tell.error(
                        f"the machines end in {left:.0f} s, as the budget or the lifetime is over: the program is "
                        "interrupted, so that what it has written can be saved"
                    )
                    self._run.end_by_limit()
                    return
                pause = _OFTEN if self._is_urgent or left < _LAST else min(_EVERY, left - _LAST + _OFTEN)
                pause = max(0.2, min(pause, until_end, _OFTEN if self._run.buckets else pause))
                if self._folder:
                    self._fetch(settled=True)
                    told = ""
            except SkypoolError as e:
                if str(e) != told:
                    told = str(e)
                    self._tell.note(f"{self._folder} cannot be fetched now: {e}")
