"""`interruption`: what a call, or a program that it has started, knows of the end of its machine.

It reads the page of memory that the agent shares with its workers. A program that a worker starts finds the page by an
environment variable.
"""

from __future__ import annotations

import operator
import os
import time

from skypool.agent.shared_page import NAME, SharedPage
from skypool.errors import UsageError
from skypool.gangs.agreement import MOST_STEP, PATIENCE, SETTLE, offer_of, turn
from skypool.runtime import Interruption

VARIABLE = "SKYPOOL_NOTICES"
"""The environment variable with the number of slots of the page, the own slot, the size of the gang, and the page."""
_LOOK = 1e-3
"""Seconds between two looks for the decision at a proposed step."""
_LONGEST = 0.02
"""The most seconds that count between two looks. A longer gap is a pause of the process, or of its whole node."""


class OwnNotices:
    """The notices for one process.

    Args:
        page: the page of the node.
        slot: the number of the process's slot.
        size: the number of processes of its gang; 1 for none.
    """

    def __init__(self, page: SharedPage, slot: int, size: int = 1) -> None:
        self._page, self._slot, self._size = page, slot, size
        self._before = -1
        self._agreed: Interruption | None = None
        self._is_checked = False

    def place(self, agent: int) -> str:
        """Return the value of `VARIABLE` for programs that this process starts.

        A worker has the page in its memory only: a call that writes to whatever file is open must not damage it. So
        programs open the file of the agent, of which `agent` is the process id.
        """
        return f"{self._page.slots} {self._slot} {self._size} /proc/{agent}/fd/{self._page.file}"

    def now(self) -> Interruption | None:
        """Return the notice, if there is one."""
        at = self._page.announced(self._slot)
        return Interruption(at, self._page.reason(self._slot)) if at else None

    def at_step(self, step: int) -> Interruption | None:
        """Return the notice if its step has come on which all ranks have agreed. Waits 2 s at most, and seldom."""
        if type(step) is not int:
            step = _whole(step)
        if not self._is_checked:
            self._check(step)
        if self._agreed is not None:
            return self._agreed
        if self._size == 1:
            return self.now()
        if step <= self._before:
            return None
        self._page.tell_step(self._slot, step)  # before the look at what is offered: see `skypool.agent.gang_steps`
        if self._page.offered(self._slot):
            return self._at_offer(step)
        self._before = step
        return None

    def _at_offer(self, step: int) -> Interruption | None:
        """Wait for the decision if this step, or one before it, is offered."""
        waited, last = 0.0, time.monotonic()
        has_given_up = False
        while True:
            now = time.monotonic()
            waited, last = waited + min(now - last, _LONGEST), now
            match turn(self._before, step, offer_of(self._page.offered(self._slot)), waited):
                case "act":
                    self._page.tell_step(self._slot, self._before)  # it has not gone past this step
                    # what was withdrawn meanwhile was a stop of this node
                    self._agreed = self.now() or Interruption(time.time(), self._page.stop_reason)
                    return self._agreed
                case "wait":
                    self._page.tell_step(self._slot, self._before)  # it has not gone on
                    time.sleep(_LOOK)
                case _:
                    self._page.tell_step(self._slot, step)
                    if has_given_up or waited < PATIENCE:
                        self._before = step
                        return None
                    has_given_up = True
                    time.sleep(SETTLE)  # an agent that has not seen that step has written its decision by then

    def _check(self, step: int) -> None:
        """Raise UsageError if the step is not valid, or if another launcher has started this process."""
        if not 0 <= step <= MOST_STEP:
            raise UsageError(f"step of interruption() must be from 0 to {MOST_STEP}, not {step}")
        world = os.environ.get("WORLD_SIZE", "")
        if world.isdecimal() and int(world) != self._size:
            raise UsageError(
                f"interruption(step) is for the processes that skypool starts, and WORLD_SIZE is {world}, not "
                f"{self._size}: start them by procs= or --procs, or use interruption() and agree among the processes"
            )
        self._is_checked = True


def _whole(step: object) -> int:
    try:
        if isinstance(step, bool):
            raise TypeError
        return operator.index(step)  # type: ignore[arg-type]  # what is no number raises TypeError
    except TypeError:
        raise UsageError(f"step of interruption() must be a whole number, not {step!r:.100}") from None


_own: OwnNotices | None = None
_is_sought = False


def set_own(notices: OwnNotices, agent: int) -> None:
    """Set the notices of this worker process. They are those of the programs that it starts, too."""
    global _own
    _own = notices
    os.environ[VARIABLE] = notices.place(agent)


def _found() -> OwnNotices | None:
    """Find the notices of the worker that has started this program."""
    global _own, _is_sought
    if not _is_sought:
        _is_sought = True
        try:
            slots, slot, size, path = os.environ.get(VARIABLE, "").split(maxsplit=3)
            if not os.readlink(path).startswith(f"/memfd:{NAME}"):  # another file has its number now
                return None
            _own = OwnNotices(SharedPage(int(slots), os.open(path, os.O_RDWR | os.O_CLOEXEC)), int(slot), int(size))
        except (OSError, ValueError):  # it is not on a node, or its worker has ended
            return None
    return _own


def interruption(step: int | None = None) -> Interruption | None:
    """Return the notice that this machine ends soon; None while there is none, and outside of a pool.

    It is fast: a loop may call it in every iteration. With `step`, all processes of a gang get the notice at the same
    step, so that they can save one checkpoint:

        if skypool.interruption(step) is not None:
            save(step)
            break

    Args:
        step: the number of the step that begins now, which all processes of the gang count in the same way. It must
            grow. At the agreed step, and from then on, the result is the notice. Shortly before, a process may wait up
            to 2 s for the others. A call without `procs=` gets the notice at once. Default None: get the notice as soon
            as this machine knows of it.

    Raises:
        UsageError: the step is not a whole number from 0, or this process was started by another launcher, such as
            torchrun, so that skypool does not know all processes.
    """
    notices = _own or _found()
    if notices is None:
        return None
    return notices.now() if step is None else notices.at_step(step)
