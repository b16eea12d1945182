"""The pools of this user for `skypool top`: what the ledger has, and what the owners of running pools answer.

Each owner is asked in a thread of its own, so that a stopped or slow one delays no other. What the ledger has of a pool
is shown until its owner answers, and after the owner is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skypool.cli.owner import source_of
from skypool.cli.ps import explanations, is_over
from skypool.console.board import Figures, Picture, Row, health_of
from skypool.console.gauges import usd
from skypool.console.whole_lines import bare
from skypool.devices.sample import CallSample, NodeSample, node_sample
from skypool.errors import SkypoolError
from skypool.observers import client
from skypool.rental.ledger import Ledger
from skypool.rental.records import Record, newest
from skypool.rental.run_state import state_of

EVERY = 1.0
"""Seconds between two rounds in which the ledger is read and owners are asked."""
_PATIENCE = 5.0
"""Seconds in which an owner must answer."""
_OLD = 3.0
"""Seconds after which an owner's answer is shown as old."""
TO_REACH = 8.0
"""Seconds in which the machine of a run must answer."""
_PAUSE = 5.0
"""Seconds until a machine that did not answer is asked again."""
_MOST_ASKED = 64
"""The most owners that are asked at the same time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The last answer of a pool's owner.

    Attributes:
        said: fields of the answer, as `skypool.observers.observed` makes them; None if the owner has not answered yet.
        at: when the answer came, in seconds since 1970.
        trouble: why the owner did not answer the newest question; "" if it did.
    """

    said: Mapping[str, Any] | None = None
    at: float = 0.0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool as `skypool top` shows it. A number is None if it is not known. Money is in US dollars.

    Attributes:
        state: phase of the pool's life as its owner says it; or "no answer"; or the ledger's word for it: "live",
            "ending", "left" (without an owner) or "ended".
        left: seconds until the lease of a pool without owner is over; None for a pool with an owner.
        usd, usd_per_hour, idle_usd: cost so far, current rate, and cost of the time in which no call ran.
        nodes: number of nodes that have not ended.
        busy, waiting, done: numbers of calls that run, wait for a free slot, or have completed.
        said: fields of the owner's answer, from which the others were taken; None if the ledger gave them.
        notes: lines that say what is wrong, and what can be done.
    """

    record: Record
    state: str
    left: float | None
    usd: float | None
    usd_per_hour: float | None
    idle_usd: float | None
    nodes: int
    busy: int | None
    waiting: int | None
    done: int | None
    said: Mapping[str, Any] | None
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the pool."""
        return self.record.pool

    @property
    def session(self) -> str:
        """The id of this run of the pool."""
        return self.record.session


def view_of(record: Record, answer: Answer, now: float) -> PoolView:
    """Return what to show of a pool, from its record in the ledger and the last answer of its owner.

    `now` is in seconds since 1970.
    """
    is_run = record.state(now) in ("live", "ending")
    receipt, run = record.receipt(now), state_of(record, now)
    from_ledger = PoolView(
        record=record,
        state=record.state(now) if run is None else run.word,
        left=max(0.0, record.lasts - now) if record.state(now) == "left" else None,
        usd=receipt.usd,
        usd_per_hour=receipt.usd_per_hour,
        idle_usd=receipt.idle_usd,
        nodes=len(record.running),
        busy=None,
        waiting=None,
        done=None,
        said=None,
        notes=(*(() if run is None else (run.why,)), *explanations(record, now)),
    )
    said = answer.said
    if record.state(now) == "detached" and (said is not None or answer.trouble):
        return _of_machine(from_ledger, answer, now)
    if not is_run or (said is None and not answer.trouble):
        return from_ledger
    if said is None:
        return replace(from_ledger, state="no answer", notes=(answer.trouble, *from_ledger.notes))
    age = now - answer.at
    is_old = age > _OLD
    old = f"the calls and measurements are {age:.0f} s old: {answer.trouble or 'the owner has not answered yet'}"
    nodes = _nodes(said)
    return replace(
        from_ledger,
        state="no answer" if is_old else str(said["phase"]),
        usd=receipt.usd if is_old else _number(said["usd"]),
        usd_per_hour=receipt.usd_per_hour if is_old else _number(said["usd_per_hour"]),
        idle_usd=receipt.idle_usd if is_old else _number(said.get("idle_usd")),
        nodes=len(nodes),
        busy=int(said.get("running", sum(each["busy"] for each in nodes))),  # an older owner counts by node
        waiting=int(said.get("waiting", sum(each["waiting"] for each in nodes))),
        done=int(said.get("done", sum(each["done"] for each in said["nodes"]))),
        said=said,
        notes=(old, *from_ledger.notes) if is_old else from_ledger.notes,
    )


def _of_machine(from_ledger: PoolView, answer: Answer, now: float) -> PoolView:
    """Return what to show of a run by the last answer of its machine. Costs and state are those of the ledger."""
    said, is_old = answer.said, answer.trouble and now - answer.at > _OLD
    if said is None:
        return replace(from_ledger, notes=(answer.trouble, *from_ledger.notes))
    old = f"the calls and measurements are {now - answer.at:.0f} s old: {answer.trouble}"
    source = source_of(from_ledger.record)
    return replace(
        from_ledger,
        nodes=len(_nodes(said)),
        busy=int(said["running"]),
        waiting=int(said["waiting"]),
        done=int(said["done"]),
        said=said,
        notes=(*([old] if is_old else []), source, *from_ledger.notes),
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _nodes(said: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [each for each in said["nodes"] if each["state"] != "ended"]


# --- one pool in detail --------------------------------------------------------------------------------------


def picture_of(view: PoolView) -> Picture:
    """Return the nodes and costs of a pool whose owner has answered, for `skypool.console.layout`."""
    rows = tuple(_row(each) for each in _nodes(view.said or {"nodes": []}))
    figures = Figures(view.usd, view.usd_per_hour, view.idle_usd)
    failed = int(view.said.get("failed", 0)) if view.said else 0
    return Picture(
        view.name, view.state, view.record.started, failed=failed, done=view.done or 0, rows=rows, figures=figures
    )


def _row(node: Mapping[str, Any]) -> Row:
    word = str(node["state"])
    on_cpu = int(node.get("cpu_busy", 0))
    rate = _number(node.get("usd_per_hour"))
    price = f"{usd(rate)} USD/h" if rate else ""
    machine = tuple(filter(None, (price, str(node["type"]), str(node["place"]), str(node["hardware"]))))
    found = node.get("health") or {}
    health, why = health_of(found.get("state"), found.get("reasons", ()))
    return Row(
        node=int(node["node"]),
        phase=word.partition(" ")[0].rstrip(":,"),
        detail=bare(word) if " " in word else "",
        slots=int(node["slots"]),
        busy=int(node["busy"]) - on_cpu,
        cpu_slots=int(node["cpu_slots"]),
        cpu_busy=on_cpu,
        waiting=int(node["waiting"]),
        done=int(node["done"]),
        running=tuple(str(each) for each in node["running"]),
        machine=tuple(map(bare, machine)),
        sample=_sample(node.get("sample")),
        health=health,
        why=why,
    )


def _sample(said: object) -> NodeSample | None:
    """Return the sample in an answer; None if there is none, or if another version of skypool wrote it."""
    try:
        return None if said is None else node_sample(said, bare)
    except ValueError:
        return None


def calls_of(picture: Picture) -> list[tuple[int, CallSample]]:
    """Return the running calls of a pool with the numbers of their nodes, ordered by node and slot."""
    found = [(row.node, call) for row in picture.rows if row.sample for call in row.sample.calls]
    return sorted(found, key=lambda each: (each[0], each[1].slot, each[1].id))


@dataclass(frozen=True, slots=True)
class FolderView:
    """A folder that a node keeps in a bucket, as `skypool.wire.save_orders.FolderState` describes it."""

    folder: str
    node: int
    phase: str
    files: int
    bytes: int
    unsaved: int
    unsaved_bytes: int
    oldest: float
    rate: float
    trouble: str


def folders_of(view: PoolView) -> list[FolderView]:
    """Return the folders that the nodes of a pool keep in buckets, ordered by name and node. Older owners tell none."""
    found = [
        FolderView(
            bare(str(each["id"])), int(node["node"]), str(each["phase"]), int(each["files"]), int(each["bytes"]),
            int(each["unsaved"]), int(each["unsaved_bytes"]), float(each["oldest"]), float(each["rate"]),
            bare(str(each["trouble"])),
        )
        for node in _nodes(view.said or {"nodes": []})
        for each in node.get("folders", ())
    ]  # fmt: skip
    return sorted(found, key=lambda each: (each.folder, each.node))


# --- all pools -----------------------------------------------------------------------------------------------


class Survey:
    """A repeated look at the pools of this user that run or have left machines. Any thread may use it.

    Args:
        pool: the name of the only pool to look at; None for all.
        patience: seconds in which the owner of a pool must answer.
    """

    def __init__(self, pool: str | None = None, patience: float = _PATIENCE) -> None:
        self._pool = pool
        self._patience = patience
        self._lock = threading.Lock()  # guards the four below
        self._records: list[Record] = []
        self._answers: dict[str, Answer] = {}
        self._asked: dict[str, threading.Thread] = {}
        self._trouble = ""
        self._warning = ""
        self._ledger = Ledger.here(self._warn)
        self._ended = threading.Event()
        self._goes_on = False
        self.is_read = threading.Event()
        """Set when the ledger has been read for the first time."""

    def start(self) -> None:
        """Start to look at the pools once a second, in a thread of its own, until `stop`."""
        self._goes_on = True
        threading.Thread(target=self._go_on, name="skypool top", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread of `start`. Does not wait for owners that have not answered yet."""
        self._ended.set()

    def _warn(self, text: str) -> None:
        self._warning = text

    def _go_on(self) -> None:
        while not self._ended.is_set():
            self.refresh()
            self._ended.wait(EVERY)

    def refresh(self) -> None:
        """Read the ledger, and ask the owners that are not being asked already. Does not wait for their answers."""
        now = time.time()
        try:
            records = self._read(now)
        except SkypoolError as e:  # shown in the first line; it is read again in the next round
            with self._lock:
                self._trouble = str(e)
            self.is_read.set()
            return
        with self._lock:
            self._records, self._trouble = records, ""
            sessions = {each.session for each in records}
            self._answers = {session: each for session, each in self._answers.items() if session in sessions}
            free = [
                each
                for each in records
                if each.state(now) in ("live", "ending", "detached") and each.session not in self._asked
            ]
            for each in free[: max(0, _MOST_ASKED - len(self._asked))]:
                ask = self._ask_machine if each.state(now) == "detached" else self._ask
                thread = threading.Thread(target=ask, args=(each,), name=f"skypool asks {each.pool}", daemon=True)
                self._asked[each.session] = thread
                thread.start()
        self.is_read.set()

    def _read(self, now: float) -> list[Record]:
        if self._pool is not None:
            record = newest(self._ledger.pools(self._pool))
            return [] if record is None else [record]
        return [each for each in self._ledger.open_pools() if each.state(now) != "ended" and not is_over(each, now)]

    def _ask(self, record: Record) -> None:
        try:
            said = client.info(record.pool, self._patience)
            if said.get("session") != record.session:
                raise client.NoOwner(f"another run of pool {record.pool!r} answered")
        except SkypoolError as e:
            with self._lock:
                before = self._answers.get(record.session, Answer())
                self._answers[record.session] = replace(before, trouble=str(e))
        else:
            with self._lock:
                self._answers[record.session] = Answer(said, time.time())
        finally:
            with self._lock:
                self._asked.pop(record.session, None)

    def _ask_machine(self, record: Record) -> None:
        """Ask the machine of a run, again and again over one connection, until `stop`. Without `start`, ask once."""
        from skypool.runs import observing  # imported here, as most pools are asked in another way

        every = EVERY if self._goes_on else ""
        try:
            for said in observing.infos(record, every, TO_REACH):
                with self._lock:
                    self._answers[record.session] = Answer(said, time.time())
                if not every or self._ended.is_set():
                    return
        except Exception as e:  # noqa: BLE001 - a driver may raise whatever it wants; the view shows it
            with self._lock:
                before = self._answers.get(record.session, Answer())
                self._answers[record.session] = replace(before, trouble=str(e) or type(e).__name__)
            if self._goes_on:
                self._ended.wait(_PAUSE)
        finally:
            with self._lock:
                self._asked.pop(record.session, None)

    def wait(self) -> None:
        """Wait until the owners and machines that `refresh` has asked have answered, or their time is over."""
        with self._lock:
            asked = list(self._asked.values())
            is_machine = any(each.state(time.time()) == "detached" for each in self._records)
        until = time.monotonic() + (TO_REACH if is_machine else 2 * self._patience)
        for each in asked:
            each.join(max(0.0, until - time.monotonic()))

    @property
    def trouble(self) -> str:
        """Why the ledger cannot be read, or what is wrong with its file; "" if all is well."""
        with self._lock:
            return self._trouble or self._warning

    def views(self) -> list[PoolView]:
        """Return the pools as they are known now, the oldest first."""
        now = time.time()
        with self._lock:
            return [view_of(each, self._answers.get(each.session, Answer()), now) for each in self._records]
