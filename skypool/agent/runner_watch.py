"""`RunnerWatch`: starts the runner, the process that owns a run on its own machine, watches it, and kills it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import subprocess
import sys
from collections.abc import Callable

from skypool.agent.processes import kill_group, mib_of, plain_environment
from skypool.errors import ProtocolError
from skypool.head import messages
from skypool.head.states import (
    AgentEvent,
    Go,
    Heard,
    Party,
    RunnerEnded,
    RunnerLate,
    RunnerSaid,
    RunnerSilent,
    ToRunner,
    Welcome,
)

_SILENT = 60.0
"""Seconds after which a runner that has said nothing counts as silent, or one whose loop stands still as stuck."""
_TO_TAKE = 60.0
"""Seconds after which a runner that was told of the commit, and has not taken the machine, counts as late."""
_PAUSE = 1.0, 30.0
"""The second and the longest pause in seconds before the next runner is started; the first one is 0."""
_LIVES = 120.0
"""Seconds after which the runner that follows one that has ended is started at once again."""
_MOST_MIB = 400
"""The most memory of a runner. One that takes more is killed, and another one is started."""
_IMPORTANT = "-900"
"""How much later than others the kernel kills the runner if memory runs out, where this process may say so."""
_PROGRAM = "import sys; sys.path[:0] = sys.argv[1:]; from skypool.runs.runner import start; start()"
_READ = 1 << 16
_LAST = 64
"""The most reads for what a runner has said before its end. A pipe holds less."""


class RunnerWatch:
    """The process of the runner, of which there is one at a time. They are told apart by their numbers, from 1.

    Args:
        watch: has the agent's loop call a function when there is something to read.
        hear: called with what a runner says, and with its silence and its end.
        clock: the agent's clock, which leaves out pauses of the whole machine.
        argv: what is started; "" in it stands for the file with skypool's code. Default None: the runner.
    """

    def __init__(
        self,
        watch: Callable[[int, int, Callable[[], None]], None],
        hear: Callable[[AgentEvent], None],
        clock: Callable[[], float],
        argv: list[str] | None = None,
    ) -> None:
        self._watch, self._hear, self._clock = watch, hear, clock
        self._argv = argv or [sys.executable, "-I", "-S", "-c", _PROGRAM, ""]
        self._needs = b""
        self._number = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._unsent = bytearray()
        self._said = b""
        self._start_at = math.inf
        self._pause = 0.0
        self._heard = self._started = self._moved = 0.0
        self._moves = -1
        self._is_silent = False
        self._late_at = math.inf

    @property
    def pid(self) -> int:
        """The process id of the runner; 0 if none runs."""
        return 0 if self._child is None else self._child.pid

    def give(self, needs: bytes) -> None:
        """Keep what each runner needs. It is in memory only."""
        self._needs = needs

    def start(self, number: int) -> None:
        """Start a runner, now or after a pause if others have ended soon before."""
        self._number = number
        pause, self._pause = self._pause, min(2 * self._pause or _PAUSE[0], _PAUSE[1])
        if pause:
            self._start_at = self._clock() + pause
        else:
            self._start()

    def kill(self, number: int) -> None:
        """Kill a runner, with all processes of its group. One that is not started yet ends, too."""
        if number != self._number:
            return
        if self._child is not None:
            kill_group(self._child.pid)
            self._child.kill()  # it may not have had the time to make the group
        elif self._start_at < math.inf:
            self._start_at = math.inf
            self._hear(RunnerEnded(number))

    def tell(self, number: int, message: ToRunner) -> None:
        """Send a message to a runner, or drop it if that one has ended."""
        if number != self._number or self._child is None:
            return
        match message:
            case Go():
                self._late_at = self._clock() + _TO_TAKE
            case Welcome():
                self._late_at = math.inf
        self._send(messages.line(message))

    def tick(self, now: float) -> None:
        """Start a runner whose pause is over, and tell of a silent or late one. `now` is by the agent's clock."""
        if self._child is None and now >= self._start_at:
            self._start()
        elif self._child is not None and not self._is_silent and now - self._heard > _SILENT:
            self._is_silent = True
            print(f"runner {self._number} has said nothing for {_SILENT:g} s", file=sys.stderr, flush=True)
            self._hear(RunnerSilent(self._number))
        elif self._child is not None and now > self._late_at:
            self._late_at = math.inf
            late = f"runner {self._number} has not taken its machine {_TO_TAKE:g} s after the commit"
            print(late, file=sys.stderr, flush=True)
            self._hear(RunnerLate(self._number))

    # --- the process -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._start_at = math.inf
        self._heard = self._started = self._moved = self._clock()
        self._moves, self._is_silent, self._late_at = -1, False, math.inf
        self._said = b""
        self._unsent.clear()
        argv = [each or sys.path[0] for each in self._argv]
        try:
            self._child = child = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=plain_environment(),
                bufsize=0,
                process_group=0,
            )
        except OSError as e:
            print(f"runner {self._number} cannot be started: {e}", file=sys.stderr, flush=True)
            self._hear(RunnerEnded(self._number))
            return
        with contextlib.suppress(OSError), open(f"/proc/{child.pid}/oom_score_adj", "w") as file:  # only root may
            file.write(_IMPORTANT)
        assert child.stdin is not None
        assert child.stdout is not None
        for each in (child.stdin, child.stdout):
            os.set_blocking(each.fileno(), False)
        self._pidfd = os.pidfd_open(child.pid)
        self._watch(child.stdout.fileno(), select.EPOLLIN, self._on_lines)
        self._watch(self._pidfd, select.EPOLLIN, self._on_end)
        self._send(messages.packed_needs(self._needs))

    def _on_end(self) -> None:
        """Hear what the runner has said before its end, and tell of the end."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        kill_group(child.pid)  # what it has started
        for _ in range(_LAST):
            if not self._read():
                break
        for fd in (child.stdin.fileno(), child.stdout.fileno(), self._pidfd):
            self._watch(fd, 0, lambda: None)
        child.stdin.close()
        child.stdout.close()
        os.close(self._pidfd)
        status = child.wait()
        self._child = None
        if self._clock() - self._started > _LIVES:
            self._pause = 0.0
        print(f"runner {self._number} has ended with status {status}", file=sys.stderr, flush=True)
        self._hear(RunnerEnded(self._number))

    # --- what is said ----------------------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        """Send bytes to the runner. What its pipe has no room for is sent later."""
        self._unsent += data
        self._write()

    def _write(self) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        pipe = self._child.stdin.fileno()
        try:
            while self._unsent:
                del self._unsent[: os.write(pipe, self._unsent[:_READ])]
        except BlockingIOError:
            self._watch(pipe, select.EPOLLOUT, self._write)
            return
        except OSError:  # it is about to end
            self._unsent.clear()
        self._watch(pipe, 0, lambda: None)

    def _on_lines(self) -> None:
        self._read()

    def _read(self) -> bool:
        """Hear the lines that have come. Return True if there may be more."""
        assert self._child is not None
        assert self._child.stdout is not None
        pipe = self._child.stdout.fileno()
        try:
            data = os.read(pipe, _READ)
        except BlockingIOError:
            return False
        if not data:
            self._watch(pipe, 0, lambda: None)  # it is about to end, or else it will be silent
            return False
        *lines, self._said = (self._said + data).split(b"\n")
        try:
            for line in lines:
                self._take(messages.from_runner(line))
            if len(self._said) > messages.MOST_LINE:
                raise ProtocolError(f"a line has more than {messages.MOST_LINE} bytes")
        except ProtocolError as e:
            print(f"runner {self._number} is killed: {e}", file=sys.stderr, flush=True)
            self.kill(self._number)
            return False
        if lines and mib_of(self._child.pid) > _MOST_MIB:
            print(f"runner {self._number} takes more than {_MOST_MIB} MiB of memory", file=sys.stderr, flush=True)
            self.kill(self._number)
        return True

    def _take(self, message: object) -> None:
        self._heard = self._clock()
        if not isinstance(message, messages.Alive):
            self._hear(RunnerSaid(self._number, message))  # type: ignore[arg-type]  # all others are of `FromRunner`
            return
        if message.moves > self._moves:
            self._moves, self._moved = message.moves, self._heard
        moves = self._heard - self._moved <= _SILENT
        if not moves:
            print(f"the loop of runner {self._number} stands still", file=sys.stderr, flush=True)
        self._hear(Heard(Party.RUNNER, self._number, moves))
