"""`MoverWatch`: runs the mover, the process that saves folders of the node to buckets, and fills folders from them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skypool.agent.processes import CLEAN, mib_of, plain_environment
from skypool.agent.shared_page import SharedPage
from skypool.wire.save_orders import TO_LOOK, seconds_needed

_SILENT = 20.0
"""Seconds without an account after which the mover counts as hung, and is killed."""
_STOP = 5.0
"""Seconds in which calls have ended that are stopped, so that what they have written can be saved."""
_OVERS = 256
"""The most ends of stopped calls that are told to the next mover."""
_PAUSE = 1.0, 30.0
"""The second and the longest pause in seconds before a mover that has ended is started again; the first one is 0.

While somebody waits for the mover, no pause is longer than the second one.
"""
_TO_READ = 2.0
"""Seconds in which the mover has read its orders when the agent ends."""
_LIVES = 60.0
"""Seconds after which a mover that ends is started again at once."""
_LINE = 1 << 20
"""The most bytes of an account. A longer one counts as a failure."""
_MOST_MIB = 600
"""The most memory of the mover. One that takes more is killed, and begins again."""
_PROGRAM = (
    "import sys; sys.path[:0] = sys.argv[2:]; from skypool.agent.processes import wait_for_writer; "
    "wait_for_writer(float(sys.argv[1])); from skypool.data.mover import start; start(3)"
)
_PIPE = 1 << 20
"""The bytes of orders that the pipe of a mover has room for, if this user may have such a pipe."""


class MoverWatch:
    """Starts the mover when there is something to save, watches it, and starts it again if it ends.

    The next mover is a process at once, with all orders. It begins its work after a pause, or when the agent ends, even
    if that is killed. Only if this process ends before it begins, the one after it is started after the pause.

    Args:
        watch: has the agent's loop call a function when there is something to read.
        tell: called with each account for the client.
        page: tells the keeper of the mover.
    """

    def __init__(
        self,
        watch: Callable[[int, int, Callable[[], None]], None],
        tell: Callable[[list[dict[str, Any]]], None],
        page: SharedPage,
    ) -> None:
        self._watch, self._tell, self._page = watch, tell, page
        self._orders: dict[str, dict[str, Any]] = {}
        self._ends: dict[str, dict[str, Any]] = {}
        self._looking: dict[str, Callable[[float], bool]] = {}  # ends that wait until the mover has looked
        self._look = self._end_look = 0
        self._looks: dict[int, tuple[float, dict[str, Any]]] = {}  # until when each is awaited, and its order
        self._overs: dict[int, dict[str, Any]] = {}
        self._held: dict[str, float] = {}
        self._told: dict[str, dict[str, Any]] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._unsent = bytearray()  # orders for which the pipe has no room yet
        self._said = b""
        self._error = ""
        self._heard = self._now = self._started = 0.0
        self._start_at = 0.0
        self._pause = 0.0

    @property
    def pid(self) -> int:
        """The process id of the mover; 0 if none runs, or nothing is to be saved any more."""
        return self._child.pid if self._child is not None and self._orders else 0

    @property
    def saves(self) -> bool:
        """True if folders are to be saved, whether a mover runs or waits."""
        return bool(self._saved())

    def order(self, said: Mapping[str, Any], stop_calls: Callable[[float], bool]) -> None:
        """Obey an order of the owner: to save or fill a folder, share its place, log in anew, keep a note, or save what
        is left.

        An order may come twice.

        Args:
            stop_calls: gives the calls so many seconds to end, and returns False if there are none.
        """
        id_ = said["id"]
        if said["do"] == "end":
            if id_ in self._orders and id_ not in self._ends:
                self._hasten()  # before the end is known, as the next mover would be sent it at once
                self._ends[id_] = dict(said)
                if not said.get("stops"):
                    self._send(said)
                else:
                    if not self._looking:
                        self._end_look = self.look()
                    self._looking[id_] = stop_calls
        elif said["do"] == "share":
            if id_ in self._orders:
                self._orders[id_]["nodes"] = said["nodes"]
                self._send(said)
        elif said["do"] == "note":
            if self._orders.get(id_, {}).get("serial") == said["serial"]:
                self._send(said)  # again and again, until it is told
        elif said["do"] == "values":
            order = self._orders.get(id_)
            if order and order["serial"] == said["serial"] and order["credentials"] < said["credentials"]:
                order |= {"values": said["values"], "credentials": said["credentials"]}  # for the next mover, too
                self._send(said)
        elif id_ not in self._orders or self._orders[id_]["serial"] != said["serial"]:
            self._orders[id_] = dict(said)
            self._ends.pop(id_, None)
            self._looking.pop(id_, None)
            self._held.pop(id_, None)
            self._told.pop(id_, None)
            self._send(said)
        self.tell_again()

    def _saved(self) -> list[str]:
        """Return the ids of the folders that are saved, and neither only filled nor at their end."""
        return [id_ for id_, order in self._orders.items() if order["do"] == "save" and not self._has_ended(id_)]

    def _has_ended(self, id_: str) -> bool:
        return self._told.get(id_, {}).get("phase") == "ended"

    def look(self, pids: Sequence[int] | None = None) -> int:
        """Have the mover note which files are being written by processes that are stopped next. Return a number.

        Args:
            pids: the processes. Default None: all.

        Returns:
            What `has_looked` takes; 0 if nothing is saved.
        """
        if not self._saved():
            return 0
        self._hasten()
        self._look += 1
        self._looks[self._look] = self._now + TO_LOOK, {"do": "look", "number": self._look, "pids": pids}
        self._send_to_saved(self._looks[self._look][1])
        return self._look

    def over(self, number: int, at: int) -> None:
        """Tell the mover when the processes of a look had ended, in nanoseconds since 1970."""
        self._overs[number] = {"do": "over", "number": number, "at": at}
        if len(self._overs) > _OVERS:
            del self._overs[next(iter(self._overs))]
        self._send_to_saved(self._overs[number])

    def _send_to_saved(self, said: Mapping[str, Any]) -> None:
        for each in self._saved():  # all of them, as calls may write to all
            self._send({**said, "id": each})

    def has_looked(self, number: int) -> bool:
        """Return True if the mover has done a look, or would take too long."""
        told = (self._told.get(id_, {}) for id_ in self._saved())
        return number not in self._looks or all(number in each.get("looked", ()) for each in told)

    def _stop_calls(self) -> None:
        """Stop the calls, when the mover knows what they are writing. Then have saved what is left."""
        if not self.has_looked(self._end_look):
            return
        looking, self._looking = self._looking, {}
        for id_, stop_calls in looking.items():
            if stop_calls(_STOP):
                self._ends[id_]["calm"] = False  # what they were writing is perhaps not whole
                self._held[id_] = self._now + _STOP + TO_LOOK
            else:
                self._send_end(id_)

    def _send_end(self, id_: str) -> None:
        """Have saved what is left, as no call writes any more. What others finish from now on is whole."""
        if self._ends[id_].get("stops"):
            self.over(self._end_look, time.time_ns())
        self._send(self._ends[id_])

    def tell_again(self) -> None:
        """Tell the client the state of all folders."""
        if self._orders:
            self._tell([self._told.get(id_, _untold(order)) for id_, order in self._orders.items()])

    def reserve(self, lease: float) -> float:
        """Return the seconds that the node needs to save what is left before it ends, of a lease of so many seconds.

        A folder needs none whose owner has ordered an end that fits into the life of the node.
        """
        open_ = {id_: each for id_, each in self._orders.items() if not self._ends.get(id_, {}).get("fits")}
        told = ((order, self._told.get(id_, {})) for id_, order in open_.items())
        needed = (
            seconds_needed(order["drain"], said.get("phase", ""), said.get("unsaved_bytes", 0), said.get("rate", 0.0))
            for order, said in told
        )
        return min(max(needed, default=0.0), lease / 2)

    @property
    def drain(self) -> float:
        """The most seconds that any folder may take at its end; 0 if none is saved."""
        return max((order["drain"] for order in self._orders.values()), default=0.0)

    def tick(self, now: float, is_idle: bool) -> None:
        """Start the mover if it should run, and kill it if it hangs or takes too much memory.

        Args:
            now: the time of the agent's clock, which does not count pauses of the whole node.
            is_idle: True if no call is there.
        """
        self._now = now
        self._note()
        self._looks = {number: (until, said) for number, (until, said) in self._looks.items() if now < until}
        if self._looking:
            self._stop_calls()
        for id_ in [id_ for id_, until in self._held.items() if is_idle or now >= until]:
            del self._held[id_]
            self._send_end(id_)
        if not self._orders:
            return
        if self._child is None:
            if now >= self._start_at:
                self._start()
        elif now - self._heard > _SILENT:
            self._give_up("the mover hangs")

    def _note(self) -> None:
        """Tell the keeper which process it must let save what is left, and for how long."""
        self._page.mover, self._page.drain = self.pid, self.drain

    def kill(self) -> None:
        """Kill the mover, as nothing is to be saved any more."""
        self._orders.clear()
        self._note()
        if self._child is not None:
            self._child.kill()

    def end(self) -> None:
        """Let the mover save what is left, as the agent ends. If it could not be started, try that once more."""
        if not self._saved():
            return
        if self._child is not None and (self._child.poll() is not None or not self._has_sent_all()):
            self._drop()
        if self._child is None:
            self._start()
            self._has_sent_all()

    def _has_sent_all(self) -> bool:
        """Send what is left of the orders. Return False if the mover does not read them in time, or waits."""
        seconds = _TO_READ if self._now >= self._started else 0.0
        until = time.monotonic() + seconds
        while self._unsent and self._child is not None and self._child.stdin is not None and seconds > 0:
            poll = select.poll()
            poll.register(self._child.stdin, select.POLLOUT)
            poll.poll(1000 * seconds)
            self._write()
            seconds = until - time.monotonic()
        return not self._unsent

    def _hasten(self) -> None:
        """Have the next mover begin its work if it waits for the end of a pause, as somebody waits for it now."""
        if self._child is None or self._now < self._started:
            if self._child is not None:
                self._drop()
            self._start()

    def _start(self, pause: float = 0.0) -> None:
        """Start a mover, which begins its work after a pause."""
        parts = next(iter(self._orders.values()))["parts"]
        paths = [sys.path[0], os.path.expanduser(parts)]
        argv = ["sh", "-c", CLEAN, "sh", sys.executable, "-P", "-c", _PROGRAM, f"{pause}", *paths]
        self._heard = self._started = self._now + pause
        self._said, self._error = b"", ""
        self._unsent.clear()
        # when the agent has ended, the keeper sends SIGTERM, which must not end a mover that is only starting
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            self._child = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=plain_environment(), bufsize=0
            )
        except OSError as e:
            self._start_at = self._now + self._fail(f"the mover cannot be started: {e}")
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(OSError):  # this user has too many pipes; a smaller one is enough for a few folders
            fcntl.fcntl(self._child.stdin, fcntl.F_SETPIPE_SZ, _PIPE)
        for each in (self._child.stdin, self._child.stdout):
            os.set_blocking(each.fileno(), False)
        self._watch(self._child.stdout.fileno(), select.EPOLLIN, self._read)
        self._note()
        for id_, order in self._orders.items():
            if self._has_ended(id_):
                continue
            before = self._told.get(id_, {})
            is_back = before.get("phase") in ("saving", "ending", "there")
            self._send({**order, "restores": order["restores"] and not is_back, "before": before})
            if id_ in self._ends and id_ not in self._held and id_ not in self._looking:
                self._send(self._ends[id_])
        for _, said in self._looks.values():
            self._send_to_saved(said)
        for said in self._overs.values():
            self._send_to_saved(said)

    def _send(self, said: Mapping[str, Any]) -> None:
        """Send an order to the mover if it runs. What its pipe has no room for is sent later."""
        if self._child is not None:
            self._unsent += json.dumps(said).encode() + b"\n"
            self._write()

    def _write(self) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        pipe = self._child.stdin.fileno()
        try:
            while self._unsent:
                del self._unsent[: os.write(pipe, self._unsent)]
        except BlockingIOError:
            self._watch(pipe, select.EPOLLOUT, self._write)
            return
        except OSError:  # it has ended, and the next one gets all orders
            self._unsent.clear()
        self._watch(pipe, 0, lambda: None)

    def _read(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        try:
            data = os.read(self._child.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        self._said += data
        *lines, self._said = self._said.split(b"\n")
        try:
            for line in lines:
                said = json.loads(line)
                if "error" in said:
                    self._error = f": {said['error']}"
                else:
                    self._take(said["folders"])
        except (ValueError, KeyError, TypeError) as e:
            self._give_up(f"the mover printed something that is no account: {e}")
            return
        if not data or len(self._said) > _LINE:
            self._give_up(f"the mover ended{self._error}")
        elif lines and mib_of(self._child.pid) > _MOST_MIB:
            self._give_up(f"the mover takes more than {_MOST_MIB} MiB of memory")

    def _take(self, folders: list[dict[str, Any]]) -> None:
        self._heard = self._now
        if self._now - self._started > _LIVES:
            self._pause = 0.0
        for each in folders:
            order = self._orders.get(each["id"])
            if order is not None and order["serial"] == each["serial"]:
                self._told[each["id"]] = each
        self.tell_again()
        if self._looking:
            self._stop_calls()

    def _give_up(self, why: str) -> None:
        """Kill the mover, if it has not ended, and start the next one."""
        has_begun = self._now >= self._started
        self._drop()
        pause = self._fail(why)
        if has_begun and self._orders:
            self._start(pause)
        else:
            self._start_at = self._now + pause

    def _drop(self) -> None:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        child.kill()  # its end is not awaited, as a disk may hold it up
        for each in (child.stdin, child.stdout):
            self._watch(each.fileno(), 0, lambda: None)
            each.close()
        self._child = None

    def _fail(self, why: str) -> float:
        """Tell why the mover has ended. Return the seconds until the next one begins."""
        print(why, file=sys.stderr, flush=True)
        is_awaited = bool(self._looks) or any(not self._has_ended(id_) for id_ in self._ends)
        pause = min(self._pause, _PAUSE[0]) if is_awaited else self._pause
        self._pause = min(2 * self._pause or _PAUSE[0], _PAUSE[1])
        for id_, order in self._orders.items():
            self._told[id_] = {**self._told.get(id_, _untold(order)), "trouble": why}
        self.tell_again()
        return pause


def _untold(order: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a folder of which the mover has told nothing yet."""
    same = {name: order[name] for name in ("id", "url", "serial", "drain", "credentials")}
    is_data = order["do"] == "fill"
    return {**same, "is_data": is_data, "phase": "fetching" if is_data else "restoring", "nodes": 1}
