"""The runner: a process on the machine of a run, which owns the run there. It has no account of a provider.

The agent starts it, and starts it again when it ends. `head.messages` says what they write to each other, and
`head.steps` decides what the runner does. It reaches the agent as each client does, over the agent's local socket.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from skypool import clock
from skypool.calls.futures import CallFuture
from skypool.compute_pool.compute_pool import ComputePool
from skypool.errors import CommandFailed, NodeInterrupted, SkypoolError, TakenOver
from skypool.event_loop import Loop
from skypool.head import messages, steps
from skypool.head.states import (
    AgentSaid,
    Drops,
    Expired,
    Expires,
    FromRunner,
    GotNeeds,
    NotStored,
    Outcome,
    Program,
    ProgramOver,
    Runner,
    RunnerAction,
    RunnerEvent,
    RunnerPhase,
    RunOver,
    Say,
    StandsBy,
    Starts,
    Stops,
    Store,
    Stored,
    Takes,
    Welcome,
)
from skypool.logs.masking import Masker
from skypool.pool.engine import PoolEngine
from skypool.pool.states import Phase
from skypool.runs import call_program, end_hook, stored
from skypool.runs.needs import Needs
from skypool.runs.own_thread import in_thread
from skypool.runs.program_run import exit_status
from skypool.runs.stored import About, KeptFolder, KeptResult, RunStatus
from skypool.safety import private, removal, user_folders
from skypool.shipping import pure_packages
from skypool.text import one_line
from skypool.wire.save_orders import FolderState

_TURN = 1.0
"""The most seconds of a turn of the loop."""
_TO_END = 10.0
"""Seconds before the end by budget or lifetime at which the program is stopped, so that its end is stored before."""
_TO_TELL = 10.0
"""Seconds before that end in which it is stored what was saved to buckets. The program is stopped so much earlier."""
_TO_NOTE = 5.0
"""The most seconds in which the end of the run is kept in the buckets of its folders, after it was stored here."""
_TO_KEEP = 120.0
"""The most seconds in which the result of a call is kept there, before that."""
_TO_POST = 2.0
"""Seconds before the written end in which the end of the run is not posted any more."""
_TO_HEAR_OF = 20.0
"""Seconds in which the agent has told a new runner of the folders that it saves."""
_TO_CLOSE = 8.0
"""Seconds in which the pool is closed after the end."""
_TO_HEAR = 5.0
"""Seconds in which the call's own error has come after the agent has said that the program is over."""
_TO_STORE = 0.0, 2.0, 5.0
"""The pauses in seconds before each try to store how the run has ended. Others may free what is missing meanwhile."""
_STUCK = 60.0
"""Seconds after which a work that has not ended counts as stuck: no work takes so long on a machine that is well."""
_TAKEN = "its provider has taken its machine back"
"""The reason of a run that was interrupted for that."""
_UNSAID = 10.0
"""Seconds after the failure of a call in which the agent says that its attempt is over, if it was ever begun."""


def start() -> NoReturn:
    """Be the runner of a run, until that is over or the agent has ended. The agent calls this in a new process."""
    out = os.dup(1)
    os.dup2(2, 1)  # whatever prints must not disturb the messages
    try:
        needs = Needs.unpacked(messages.read_needs(sys.stdin.buffer.read))
        pure_packages.admit(needs.packages)
        RunnerProcess(needs, out).run()
    except BaseException:  # noqa: BLE001 - the agent reads it in its log, and starts another runner
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # the machine must not be ended as when a client exits


class RunnerProcess:
    """The runner in this process: it drives the state machine, and performs its actions.

    Args:
        needs: what it needs.
        out: the file descriptor to which it writes messages for the agent.
    """

    def __init__(self, needs: Needs, out: int) -> None:
        self._needs, self._out = needs, out
        self._folder = private.folder(os.path.expanduser(needs.folder))
        # its ledger, logs and samples are its own, as on another computer, also where a client has the same home folder
        os.environ["XDG_STATE_HOME"] = str(self._folder / "state")
        self._state = Runner(needs.retries)
        self._events: queue.SimpleQueue[RunnerEvent | BaseException | None] = queue.SimpleQueue()
        self._works: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pool: ComputePool | None = None
        self._running: CallFuture[Any] | None = None
        self._failed: tuple[float, int] | None = None  # when the call of which attempt has failed
        self._heir = self._seal_key = ""
        self._until = math.inf  # the written end, by `clock.elapsed`, which steps of this machine's clock do not change
        self._taken = math.inf  # when the provider takes the machine back, by the same clock
        self._stops = math.inf  # when the program is stopped for that
        self._moves = 0
        self._stuck_at = math.inf  # when the present work counts as stuck
        self._alive_at = 0.0

    def run(self) -> None:
        """Own the run until it is over. Raises what keeps this process from that: then another one may try it."""
        for work in (self._hear, self._work):
            threading.Thread(target=work, name=f"skypool-runner-{work.__name__}", daemon=True).start()
        self._step(GotNeeds())
        while self._state.phase is not RunnerPhase.OVER:
            self._tell_alive()
            self._look()
            try:
                event = self._events.get(timeout=_TURN)
            except queue.Empty:
                continue
            if event is None:  # the agent has ended, and so does all that it has started
                return
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, AgentSaid) and isinstance(event.message, Welcome) and event.message.left is not None:
                self._until = clock.elapsed() + event.message.left
                self._works.put(self._limit_pool)
            self._step(event)
        self._close()

    def _step(self, event: RunnerEvent) -> None:
        self._state, actions = steps.runner(self._state, event)
        for action in actions:
            self._perform(action)

    def _perform(self, action: RunnerAction) -> None:
        """Perform an action, or have a thread perform it, in their order."""
        match action:
            case Say(StandsBy() | Expires() | RunOver() as message):
                self._write(message)
            case Say(Takes(heir)):
                self._works.put(partial(self._take, heir))
            case Say(Starts(attempt)):
                self._works.put(partial(self._start, attempt))
            case Say(Stops()):
                self._works.put(self._stop)
            case Say(Drops() as message):
                self._works.put(partial(self._write, message))
            case Store(outcome):
                self._works.put(partial(self._store, outcome, self._state.attempt))

    # --- the agent -------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Read what the agent says, until its end."""
        try:
            while said := sys.stdin.buffer.readline(messages.MOST_LINE):
                self._events.put(AgentSaid(messages.to_runner(said)))
            self._events.put(None)
        except Exception as e:  # noqa: BLE001 - it ends this process
            self._events.put(e)

    def _write(self, message: FromRunner | messages.Alive) -> None:
        data = messages.line(message)
        while data:
            data = data[os.write(self._out, data) :]

    def _tell_alive(self) -> None:
        """Tell the agent that this process lives, and how often the loops have turned that own the run.

        The pool's loop counts its own turns when this one asks it to. So the number stands still if either hangs, and
        so it does while a work is stuck.
        """
        if time.monotonic() < self._alive_at:
            return
        self._alive_at = time.monotonic() + messages.ALIVE_EVERY / 2
        if time.monotonic() > self._stuck_at:
            print("a work of the runner is stuck", file=sys.stderr, flush=True)
        elif self._pool is None:
            self._moved()
        else:
            Loop.shared().loop.call_soon_threadsafe(self._moved)
        self._write(messages.Alive(self._moves))

    def _moved(self) -> None:
        self._moves += 1

    # --- works, one after the other --------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while True:
                work = self._works.get()
                self._stuck_at = time.monotonic() + _STUCK
                work()
                self._stuck_at = math.inf
        except Exception as e:  # noqa: BLE001 - it ends this process
            self._events.put(e)

    def _take(self, heir: str) -> None:
        """Take the machine over as its owner."""
        self._heir, self._seal_key = messages.heir_digest(heir), messages.seal_key(heir)
        with contextlib.suppress(OSError):  # a full disk; its end may leave some room
            stored.reserve(self._folder)
            stored.describe(self._folder, self._about)
        # the ledger of a former runner, which may say that the pool has ended; all that counts is in the needs
        removal.remove(user_folders.state() / "ledger")
        self._pool = pool = ComputePool._held(replace(self._needs.handover, heir=heir), console="off")
        told = _TO_TELL if self._needs.folders else 0.0
        pool._sender.working().limits.for_programs = _TO_END + self._needs.keep + told

    @property
    def _about(self) -> About:
        call = self._needs.call
        copy, programs = next(iter(call.places.values()))
        folder = os.path.normpath(os.path.join(copy, call.folder))
        return About(call.procs, folder, programs, posts=bool(self._needs.on_end))

    def _limit_pool(self) -> None:
        """End the pool at the written end. The clocks of this machine and of the client may differ.

        If it is time to save the last files, stop the program instead: the pool must not end meanwhile.
        """
        assert self._pool is not None
        engine, left = self._pool._sender.working(), self._until - clock.elapsed()
        self._hear_of_folders()
        if self._needs.folders and left <= engine.saving.reserve + engine.limits.for_programs:
            self._events.put(Expired())
            return
        limits = engine.rental.limits
        limits.billed_since = clock.now()
        limits.lifetime = self._until - clock.elapsed()

    @property
    def _node(self) -> int:
        """The number of the machine's node."""
        [held] = self._needs.handover.nodes
        return held.instance.node

    @property
    def _end(self) -> float:
        """The time by `clock.elapsed` at which the machine ends in any case."""
        return min(self._until, self._taken)

    @property
    def _now(self) -> float:
        """The present time in seconds since 1970, by the clock of the client."""
        return self._needs.ends - (self._until - clock.elapsed())

    def _start(self, attempt: int) -> None:
        """Start an attempt. What its agent has started before is not started again there."""
        assert self._pool is not None
        output = self._output(attempt)
        private.folder(output)
        self._running = running = replace(self._needs.call, output=str(output)).sent(self._pool, attempt)
        running.add_done_callback(partial(self._on_call_end, attempt))

    def _output(self, attempt: int) -> Path:
        return self._folder / stored.OUTPUT / str(attempt)

    def _result(self, attempt: int) -> Path:
        """Return the file with the result of a call. It is never unpickled here."""
        return self._output(attempt) / "0" / call_program.RESULT

    def _on_call_end(self, attempt: int, call: Future[Any]) -> None:
        if not call.cancelled() and call.exception() is not None:
            self._failed = time.monotonic(), attempt

    def _stop(self) -> None:
        """Stop the program, also if a former runner has started it."""
        assert self._pool is not None
        for each in (self._running, *self._pool.inherited):
            if each is not None:
                each.cancel()

    def _store(self, outcome: Outcome, attempts: int) -> None:
        """Have the last files saved, and store how the run has ended, unless a former runner has done that."""
        needs = self._needs
        found = stored.statuses(self._output(attempts), range(needs.call.procs or 1))
        status = None if None in found else next(filter(None, found), 0)
        folders = self._save_rest(calm=outcome is Outcome.ENDED and status == 0)
        digest = None if status is None else call_program.digest_of(self._result(attempts))
        is_taken = self._is_taken(outcome)
        is_limit = self._state.is_expired and outcome is not Outcome.ENDED  # else it has ended by itself meanwhile
        now = self._now
        ended = RunStatus(
            claim=needs.claim,
            outcome=Outcome.INTERRUPTED if is_taken else outcome,
            returncode=None if status is None else exit_status(status),
            attempts=attempts,
            ended=now,
            usd=sum(each.at(now).usd for each in needs.handover.record.lines),
            limit=needs.limit if is_limit and not is_taken else "",
            why=_TAKEN if is_taken else self._why(),
            saved=needs.saved,
            folders=folders,
            result=None if digest is None else KeptResult(*digest),
        )
        done = self._stored(ended)
        self._post(replace(ended, outcome=done.outcome), done.why if isinstance(done, NotStored) else "")
        if needs.call.is_call:
            call_program.clean(Path(self._about.folder))
        self._events.put(done)

    def _is_taken(self, outcome: Outcome) -> bool:
        """Return True if a run has such an outcome because the provider takes the machine back."""
        if self._state.is_cancelled:
            return False
        if outcome is Outcome.ENDED:  # the program may have ended by the signal that told it
            return self._running is not None and isinstance(self._error_of(self._running), NodeInterrupted)
        return self._taken < math.inf

    def _save_rest(self, calm: bool) -> tuple[KeptFolder, ...]:
        """Have what is left of the folders saved, and return what is. `calm`: the program has ended by itself, well."""
        folders, pool = self._needs.folders, self._pool
        if not folders:
            return ()
        assert pool is not None
        engine, node = pool._sender.working(), self._node
        engine.rental.limits.lifetime = None  # from now on, the written end alone ends the machine
        known = self._hear_of_folders()
        self._stuck_at += max((each.drain for (_, id_), each in known.items() if id_ in folders), default=0.0)
        engine.saving.end([node], max(0.0, self._end - clock.elapsed() - _TO_TELL / 2), calm=calm, fits=True)
        known = engine.saving.states()
        return tuple(KeptFolder.of(each, known.get((node, each))) for each in folders)

    def _hear_of_folders(self) -> Mapping[tuple[int, str], FolderState]:
        """Return the states of the folders that the machine saves, when it has told all of them to this runner."""
        assert self._pool is not None
        saving, node = self._pool._sender.working().saving, self._node
        until = time.monotonic() + _TO_HEAR_OF
        wanted = {(node, each) for each in self._needs.folders}
        while not wanted <= (known := saving.states()).keys() and time.monotonic() < until:
            time.sleep(_TURN / 10)
        return known

    def _stored(self, ended: RunStatus) -> Stored | NotStored:
        """Store an end in several tries: another runner would fail in the same way, as on a full disk."""
        why = ""
        if ended.result is not None:  # who hears of the end may end the machine at once
            self._note(ended)
        for pause in _TO_STORE:
            time.sleep(pause)
            try:
                found = stored.store(self._folder, ended)
            except (OSError, SkypoolError) as e:
                why = one_line(f"{_status_of(ended)}how it has ended could not be stored: {e}", 1000)
                print(why, file=sys.stderr, flush=True)
            else:
                self._note(found)
                return Stored(found.outcome)
        self._note(replace(ended, why="; ".join(filter(None, [ended.why, why]))))  # the buckets may take it
        return NotStored(ended.outcome, why)

    def _post(self, status: RunStatus, why: str) -> None:
        """Post how the run has ended, unless a former runner has. `why` says why it is not stored; "" if it is."""
        url = self._needs.on_end
        if not url or (self._folder / stored.POSTED).exists():
            return
        with contextlib.suppress(OSError, SkypoolError):  # what a former runner has stored counts
            status = stored.stored(self._folder) or status
        limit = min(end_hook.LIMIT, self._end - clock.elapsed() - _TO_POST)
        self._stuck_at += max(0.0, limit)
        end = replace(status.end, why="; ".join(filter(None, [status.why, why])))
        began = self._needs.handover.record.started
        failed = end_hook.post(url, end_hook.Posted(status.claim.run, end, status.usd, status.ended - began), limit)
        if failed:
            print(f"how the run has ended was not posted: {failed}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # nobody needs it but who looks in
            stored.note_post(self._folder, failed)

    def _note(self, status: RunStatus) -> None:
        """Keep the end of the run in the buckets of its folders, too, which outlive the machine."""
        pool = self._pool
        if not self._needs.folders or pool is None or pool._begun is None:
            return
        name, text = stored.note_name(status.claim, self._heir), stored.note_of(status, self._heir, self._seal_key)
        left = self._end - clock.elapsed() - _TO_NOTE / 2
        if status.result is not None:
            kept, seconds = stored.result_name(status.claim, self._heir), min(_TO_KEEP, left - _TO_NOTE)
            self._stuck_at += max(0.0, seconds)
            file = str(self._result(status.attempts))
            if not pool._begun.saving.note(self._node, kept, "", seconds, file):
                print("the result of the call is not in all buckets of its folders", file=sys.stderr, flush=True)
        seconds = min(_TO_NOTE, left)
        if not pool._begun.saving.note(self._node, name, text, seconds):
            print("how the run has ended is not in all buckets of its folders", file=sys.stderr, flush=True)

    def _why(self) -> str:
        """Return why the program was not started, or was lost; "" if it was not, or nobody knows."""
        error = None if self._running is None else self._error_of(self._running)
        if error is None or (isinstance(error, CommandFailed) and error.returncode is not None):
            return ""
        return one_line(Masker(self._needs.call.secrets).mask(str(error)), 1000)

    def _error_of(self, call: CallFuture[Any]) -> BaseException | None:
        """Return the error of the call of a program that is over; None for none that comes soon."""
        try:
            return call.exception(_TO_HEAR)
        except (TimeoutError, CancelledError):
            return None

    # --- what nobody says ------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Stop the program before budget or lifetime end the machine. End this process if it has lost the machine."""
        pool = self._pool
        if pool is None:
            return
        if pool.phase not in ("planned", Phase.READY.value):
            raise SkypoolError("the runner has lost its machine")
        engine = pool._begun
        if engine is None or self._state.phase is not RunnerPhase.OWNER:
            return
        self._hear_of_notice(engine)
        if engine.limits.until_stop() <= 0 or self._stops <= clock.elapsed():
            engine.rental.limits.lifetime = None  # the pool must not end while the last files are saved
            self._step(Expired())
        if self._failed is not None:
            at, attempt = self._failed
            if attempt == self._state.attempt and time.monotonic() > at + _UNSAID:  # it has never reached the agent
                self._failed = None
                self._step(AgentSaid(ProgramOver(attempt, Program.LOST)))

    def _hear_of_notice(self, engine: PoolEngine) -> None:
        """Note when the provider takes the machine back, and when the program is stopped so that its end is stored."""
        at = engine.departures.taken
        if at is None or self._taken < math.inf:
            return
        now, left = clock.elapsed(), at - time.time()
        to_save = _TO_TELL + engine.saving.reserve if self._needs.folders else 0.0
        self._taken, self._stops = now + left, now + max(left / 2, left - _TO_END - to_save)

    def _close(self) -> None:
        """Close the pool, whose machine the agent ends, within some seconds."""
        pool = self._pool
        if pool is None or pool._begun is None:
            return
        takeover = pool._begun.takeover

        def close() -> None:
            Loop.shared().run(takeover.hand_over(TakenOver("the run is over")))
            pool.stop()

        with contextlib.suppress(TimeoutError, SkypoolError):
            in_thread(close, "skypool-runner-close").result(_TO_CLOSE)


def _status_of(ended: RunStatus) -> str:
    """Return the exit status of a program as the beginning of a sentence; "" if it is not known."""
    return "" if ended.returncode is None else f"the exit status of its program is {ended.returncode}; "
