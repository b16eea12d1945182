"""Converts a pool's events into the lines of text that the plain console and `skypool logs` show.

The times in the lines are those of the events.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from skypool import events

WIDEST = 160
"""Maximum number of characters that are shown of a text within a line. A longer text is cut."""
_BRISK = 1.0
"""Seconds after a node's launch in which no lines about its setup are shown, so that fast nodes get no such lines."""
_FILES_EVERY = 5.0
"""Seconds between two lines about files that are packed or sent."""
_BURST = 5
"""Maximum number of lines of one kind in one period of `_WINDOW` seconds. Further lines are only counted."""
_WINDOW = 10.0
"""Length in seconds of a period in which at most `_BURST` lines of one kind are shown."""


@dataclass(slots=True)
class _Limit:
    """Limit on lines of one kind: at most 5 in a period of 10 seconds are shown, and further ones are only counted."""

    rest: str
    """What the lines that are not shown say, for their number: "calls failed" gives "… and 12 more calls failed"."""
    since: float = 0.0  # when the period began, in seconds since 1970
    told: int = 0  # lines shown in the period
    held: int = 0  # lines that were held back, and are not yet in a summary

    def admits(self, now: float) -> bool:
        """Return True if a line may be shown now. Otherwise count it. Call `summary` first: it can end the period."""
        if now - self.since >= _WINDOW and not self.held:
            self.since = now
            self.told = 0
        if self.told < _BURST:
            self.told += 1
            return True
        self.held += 1
        return False

    def summary(self, now: float) -> str:
        """After a period, return the number of lines not shown: "… and 12 more calls failed". Otherwise return ""."""
        if not self.held or now - self.since < _WINDOW:
            return ""
        held = self.held
        self.held = 0
        return f"… and {held:,} more {self.rest}"


class Words:
    """Converter of one pool's events into lines of text.

    Args:
        routine: False describes only problems, notices and the pool's end, because a live view shows all else.
        limited: True describes at most 5 events of a frequent kind in 10 seconds.
        whole: False if the pool's first events are missing, so that times since the pool's start are not known.
    """

    def __init__(self, *, routine: bool = True, limited: bool = True, whole: bool = True) -> None:
        self._routine = routine
        self._whole = whole
        self._began: float | None = None
        self._launched: dict[int, float] = {}
        self._slots: dict[int, int] = {}
        self._cpu_slots: dict[int, int] = {}
        self._told: set[str] = set()
        self._folders: dict[tuple[int, str], tuple[str, str]] = {}
        self._files_told: dict[int, float] = {}
        self._gone: set[int] = set()
        self._failed = 0
        self._ending = False
        self._pool = ""
        self._coming = 0
        failures = _Limit("calls failed")
        retries = _Limit("calls ran again")
        links = _Limit("link changes")
        limits = {
            events.BootstrapStep: _Limit("steps"),
            events.CallFailed: failures,
            events.CallRetried: retries,
            events.GangFailed: failures,
            events.HealthChanged: _Limit("changes of health"),
            events.LinkDown: links,
            events.LinkUp: links,
            events.ServiceEnded: _Limit("services ended"),
        }
        self._limits = limits if limited else {}

    def tell(self, e: events.Event) -> list[str]:
        """Return the lines that describe an event, each with the time of day and a newline. Many events have none.

        If the object was made with `limited`, at most 5 events of a frequent kind, such as failed calls, are described
        in 10 seconds. A result after these 10 seconds begins with a line that says how many more there were.
        """
        self._pool = e.pool
        if self._began is None and self._whole:
            self._began = e.time
        said = [text for text in self._about(e) if text]
        limit = self._limits.get(type(e))
        if said and limit is not None and not limit.admits(e.time):
            said = []
        return self._dated(e.time, [*self._summaries(e.time), *said])

    def close(self, now: float) -> list[str]:
        """Return lines with the number of events that were left out, dated `now` (seconds since 1970)."""
        return self._dated(now, self._summaries(float("inf")))

    def _summaries(self, now: float) -> list[str]:
        limits = {id(limit): limit for limit in self._limits.values()}.values()
        return [text for limit in limits if (text := limit.summary(now))]

    def _dated(self, now: float, texts: list[str]) -> list[str]:
        if not texts:
            return []
        clock = time.strftime("%H:%M:%S", time.localtime(now))
        return [f"{clock} {self._pool}  {text}\n" for text in texts]

    def _about(self, e: events.Event) -> Iterator[str]:
        match e:
            case events.PoolPhase():
                yield from self._about_pool(e)
            case events.NodePhase():
                yield from self._about_node(e)
            case events.LinkDown():
                yield f"node {e.node} link down: {brief(e.reason)}"
            case events.LinkUp():
                yield f"node {e.node} link is back"
            case events.NodeInterruption():
                yield f"node {e.node} will be taken back by its provider in {span(e.at - e.time)}: it gets no new calls"
            case events.FolderSaved():
                yield from self._about_folder(e)
            case events.DataFetched():
                yield from self._about_data(e)
            case events.NodeIdle():
                price = f", at {e.usd_per_hour:.4f} USD/h" if e.usd_per_hour else ""
                yield (
                    f"hint: node {e.node} has been idle for {span(e.seconds)}{price}; "
                    f"pool.retire({e.node}) ends it, and linger= an idle pool"
                )
            case events.DevicesUnused():
                yield (
                    f"hint: {e.call}() uses 1 of {e.devices} devices of node {e.node} for {span(e.seconds)} now; "
                    'slots="per-device" runs a call on each, procs="per-device" a process'
                )
            case events.HealthChanged():
                yield from self._about_health(e)
            case events.NodeRetirement():
                yield f"node {e.node} is retired: it gets no new calls, and ends when those that run there have ended"
            case events.BootstrapStep(state="retried"):
                yield f"node {e.node} step {e.step}: {e.detail}"
            case events.BootstrapStep(state="started"):
                if self._routine and e.time - self._launched.get(e.node, e.time) >= _BRISK:
                    yield f"node {e.node} step {e.number} of {e.steps}: {e.step}"
            case events.FilesProgress():
                yield from self._about_files(e)
            case events.Notice():
                yield e.text
            case events.CallRetried():
                yield f"{e.call}() runs again (attempt {e.attempt}): {brief(e.reason)}"
            case events.CallFailed():
                self._failed += 1
                yield f"{e.call}() failed{_on(e.node)}: {brief(e.error)}"
            case events.GangFailed():
                self._failed += not e.again
                then = f", so the gang runs again (after run {e.attempt})" if e.again else ""
                yield f"{e.call}() failed first on rank {e.rank}, node {e.node}{then}: {brief(e.error)}"
            case events.ServiceEnded():
                yield f"service {e.service} ended{_on(e.node)}{_then(e)}: {brief(e.error or 'its function returned')}"
            case _:
                return

    def _about_folder(self, e: events.FolderSaved) -> Iterator[str]:
        from rich.filesize import decimal  # imported here, as nodes import this module and have no rich

        before = self._folders.get((e.node, e.folder), ("restoring", ""))
        self._folders[e.node, e.folder] = e.phase, e.trouble
        where = f"{e.folder} on node {e.node}"
        if before[0] == "restoring" and e.phase == "saving":
            if e.restored:
                yield f"{where} is back from {e.url}: {many(e.restored, 'file')}, {decimal(e.restored_bytes)}"
            if e.aside:
                what = many(e.moved, "file") if e.moved else "checkpoints"
                yield f"{where}: moved to {e.aside}, as the bucket does not have them: {what}"
            if e.unfinished:
                yield f"{where}: not whole in the bucket, and left there: {', '.join(e.unfinished)}"
            for name, why in e.not_restored:
                yield f"{where}: {name} is in the bucket and was not brought back: {why}"
        if e.trouble and e.trouble != before[1]:
            what = "brought back" if e.phase == "restoring" else "saved"
            waits = f"; {many(e.unsaved, 'file')}, {decimal(e.unsaved_bytes)}, wait" if e.unsaved else ""
            yield f"{where} cannot be {what} now: {brief(e.trouble)}{waits}"
        elif before[1] and not e.trouble:
            yield f"{where} is saved again"
        if e.phase == "ended" and before[0] != "ended":
            for path, why in e.refused:
                yield f"{where}: {path} is not saved: {why}"
            if e.unsaved:
                lost = f"{many(e.unsaved, 'file')}, {decimal(e.unsaved_bytes)}, of {where} are saved nowhere"
                yield f"{lost}: {', '.join(e.names)}"
            elif self._routine:
                yield f"{where} is saved to {e.url}: {many(e.files, 'file')}, {decimal(e.bytes)}"

    def _about_data(self, e: events.DataFetched) -> Iterator[str]:
        from rich.filesize import decimal  # imported here, as nodes import this module and have no rich

        before = self._folders.get((e.node, e.folder), ("", ""))
        self._folders[e.node, e.folder] = e.phase, e.trouble
        where = f"{e.folder} on node {e.node}"
        if e.phase == "there" and before[0] != "there":
            had = "" if e.wanted else ": it was there before"
            come = f": {many(e.wanted, 'file')}, {decimal(e.wanted_bytes)}" if e.wanted else had
            compared = f", {e.checked} compared with checksums" if e.checked else ""
            yield f"{where} is filled from {e.url}{come}{compared}"
            if e.aside:
                yield f"{where}: what was there and not in the bucket is in {e.aside} now"
        elif e.trouble and e.trouble != before[1]:
            yield f"{where} cannot be filled{'' if e.phase == 'ended' else ' now'}: {brief(e.trouble)}"
        elif e.phase == "fetching" and e.wanted_bytes and e.bytes:
            yield f"{where}: {decimal(e.bytes)} of {decimal(e.wanted_bytes)} have come from {e.url}"

    def _about_pool(self, e: events.PoolPhase) -> Iterator[str]:
        after = "" if self._began is None else f" after {span(e.time - self._began)}"
        self._ending = self._ending or e.phase in ("draining", "ended")
        if e.phase == "ended":
            yield from self._summaries(float("inf"))
            yield f"{'left' if e.staying else 'ended'}{after}{self._losses()}{_costs(e)}"
        elif e.phase == "draining":
            yield self._news(f"ends: {brief(e.detail)}", e.detail)
        elif self._routine and e.phase == "ready":
            nodes = len(self._slots)
            slots = sum(self._slots.values())
            more = beside(sum(self._cpu_slots.values()))
            yield f"ready{after}: {many(nodes, 'node')}, {many(slots, 'slot')}{more}"
        elif self._routine and e.phase == "launching":
            yield f"launching {many(self._coming or 1, 'node')}"
        elif self._routine:
            yield f"{e.phase} {brief(e.detail)}".rstrip()

    def _about_node(self, e: events.NodePhase) -> Iterator[str]:
        match e.phase:
            case "launching":
                self._launched[e.node] = e.time
                self._coming += e.hosts
                if self._routine and self._slots:
                    yield f"node {e.node} launching"
            case "ready":
                self._slots[e.node] = e.slots
                self._cpu_slots[e.node] = e.cpu_slots
                if self._routine:
                    yield f"node {e.node} ready ({split(e.slots, e.devices)}{beside(e.cpu_slots)})"
            case "draining" | "lost" | "ended":
                yield from self._about_loss(e)
            case _:
                if self._routine and e.time - self._launched.get(e.node, e.time) >= _BRISK:
                    yield f"node {e.node} {e.phase}{': ' if e.detail else ''}{brief(e.detail)}"

    def _about_health(self, e: events.HealthChanged) -> Iterator[str]:
        claimed = " (as its owner claims)" if e.claimed else ""
        reasons = brief("; ".join(e.reasons))
        if e.state == "unhealthy":
            yield f"node {e.node} is unhealthy{claimed}: it gets no new calls: {reasons}"
        elif e.state == "degraded" or (e.state == "unknown" and self._routine):
            yield f"node {e.node} health is {e.state}{claimed}: {reasons}"

    def _about_files(self, e: events.FilesProgress) -> Iterator[str]:
        """Yield progress of a transfer that takes over 5 seconds, at most every 5 seconds for each node."""
        since = self._files_told.setdefault(e.node, e.time)
        if self._routine and e.time - since >= _FILES_EVERY:
            self._files_told[e.node] = e.time
            doing = "packing files" if e.node < 0 else f"node {e.node} receives files"
            yield f"{doing}: {e.done / 1e6:,.0f} of {e.total / 1e6:,.0f} MB"

    def _about_loss(self, e: events.NodePhase) -> Iterator[str]:
        """Yield one line with the reason why a node ends, and another when it has ended, unless the pool ends."""
        ready = self._slots.pop(e.node, None) is not None
        self._cpu_slots.pop(e.node, None)
        if e.detail and e.node not in self._gone:
            self._gone.add(e.node)
            verb = "lost" if ready else "failed"
            yield self._news(f"node {e.node} {verb}: {brief(e.detail)}", e.detail, node=e.node)
        elif e.detail:
            yield self._news(f"node {e.node}: {brief(e.detail)}", e.detail, node=e.node)
        if e.phase == "ended" and self._routine and not self._ending:
            yield f"node {e.node} ended"

    def _news(self, text: str, detail: str, node: int | None = None) -> str:
        """Return `text`, and note that its reason `detail` is told. Return "" if that is empty or was told before."""
        key = detail if node is None else f"{node} {detail}"
        if not detail or key in self._told:
            return ""
        self._told |= {key, detail}
        return text

    def _losses(self) -> str:
        calls = f"{many(self._failed, 'call')} failed" if self._failed else ""
        nodes = f"{many(len(self._gone), 'node')} lost" if self._gone else ""
        return "".join(f"; {text}" for text in (calls, nodes) if text)


def brief(text: str) -> str:
    """Return the first line of a text without surrounding spaces, cut to 160 characters (`WIDEST`) with a final "…"."""
    line = text.strip().partition("\n")[0].rstrip()
    return line if len(line) <= WIDEST else f"{line[: WIDEST - 1]}…"


def span(seconds: float) -> str:
    """Return a duration in seconds as text: 0.3 s, 42 s, 3:07 min, 1:02 h. Negative durations count as 0."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole // 60 % 60:02} h"


def kept_in(path: str, place: object, drain: float, limit: str) -> str:
    """Return where a folder is kept, and how much of a limit is for it at the end: "out to s3://models; up to …".

    Args:
        drain: the most seconds for what is left at the end.
        limit: what ends the machines, such as "the budget"; "" for nothing.
    """
    return f"{path} to {place}" + (f"; up to {span(drain)} of {limit} are kept for its end" if limit else "")


def split(slots: int, devices: int) -> str:
    """Return slots and devices in words: "1 slot with 8 devices", "8 slots with 1 device each", "4 slots"."""
    if not devices or not slots:
        return many(slots, "slot")
    if slots == 1:
        return f"1 slot with {many(devices, 'device')}"
    if devices % slots == 0:
        return f"{many(slots, 'slot')} with {many(devices // slots, 'device')} each"
    return f"{many(slots, 'slot')} with {many(devices, 'device')} in all"


def beside(cpu_slots: int) -> str:
    """Return the number of CPU slots as text to append to other words: ", 4 CPU slots"; "" for 0."""
    return f", {many(cpu_slots, 'CPU slot')}" if cpu_slots else ""


def many(n: int, thing: str) -> str:
    """Return a number with its noun: "0 nodes", "1 node", "2 nodes", "1,000 nodes". The plural is made with "s"."""
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def _costs(e: events.PoolPhase) -> str:
    """Return in words what a pool has cost, with the idle share; "" if it cost nothing or that is not known."""
    if not e.usd:
        return ""
    idle = "unknown" if e.idle_usd is None else f"{e.idle_usd:.4f} USD"
    return f"; spent {e.usd:.4f} USD, idle {idle}"


def _then(e: events.ServiceEnded) -> str:
    if not e.restarts:
        return ""
    return ", and starts again when a node joins" if e.delay is None else f", and starts again in {span(e.delay)}"


def _on(node: int) -> str:
    return f" on node {node}" if node >= 0 else ""
