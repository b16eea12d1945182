"""The folders that nodes kept in buckets: what was saved of them, what was not, and what interruptions cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.filesize import decimal

from skypool.report import words
from skypool.report.elements import Element
from skypool.report.facts import PoolFacts
from skypool.report.page_parts import long_table, note, section
from skypool.samples.journal import JournalEvent

_HEADINGS = (
    "folder", "node", "kept in", "files", "bytes", "last saved", "brought back", "back after", "not saved", "trouble",
)  # fmt: skip
_NUMBERS = {"node", "files", "bytes", "back after"}
_BACK_AFTER = (
    "“Back after” is the time from the loss of a machine, or the beginning of its end, until its folder was back on "
    "the machine in its place."
)


@dataclass(frozen=True, slots=True)
class KeptFolder:
    """A folder that a node saved. Times are in seconds since 1970.

    Attributes:
        events: its `FolderSaved` events, in order of time.
        back_after: the seconds from the loss of the machine before until the folder was back here; None if there was
            none, or that is not known.
    """

    node: int
    events: Sequence[JournalEvent]
    back_after: float | None = None

    @property
    def back_at(self) -> float | None:
        """The time when the folder was back, and calls could begin; None if that is not known."""
        return next((each.time for each in self.events if each.data["phase"] == "saving"), None)

    @property
    def saved_at(self) -> float | None:
        """The time when a file was saved last, to ten seconds; None if none was."""
        first = self.events[0]
        grown = [each for one, each in pairwise(self.events) if each.data["files"] > one.data["files"]]
        if grown:
            return grown[-1].time
        return first.time if first.data["files"] else None


def kept_folders(facts: PoolFacts) -> list[KeptFolder]:
    """Return the folders of all nodes, those with one place after each other."""
    found: dict[tuple[str, str, int], dict[int, list[JournalEvent]]] = {}
    for event in facts.journal.events:
        if event.kind == "FolderSaved":
            said = event.data
            key = str(said["url"]), str(said["folder"]), int(said.get("place", event.node))
            found.setdefault(key, {}).setdefault(event.node, []).append(event)
    made = []
    for nodes in found.values():
        before: KeptFolder | None = None
        for node, events in nodes.items():
            now = KeptFolder(node, events)
            if before is not None and (lost := _lost_at(facts, before.node)) is not None and now.back_at is not None:
                now = KeptFolder(node, events, max(0.0, now.back_at - lost))
            made.append(now)
            before = now
    return made


def _lost_at(facts: PoolFacts, node: int) -> float | None:
    """Return when a node was lost, or its end began; None if neither is known."""
    for event in facts.journal.events:
        if event.node == node and event.kind == "NodePhase" and event.data["phase"] in ("draining", "ended"):
            break
    else:
        return None
    lost = event.time
    for each in facts.journal.events:  # it may have been silent before
        if each.node == node and each.time <= event.time:
            if each.kind == "LinkDown":
                lost = min(lost, each.time)
            elif each.kind == "LinkUp":
                lost = event.time
    return lost


def folders(facts: PoolFacts) -> Element | None:
    """Return the section with the folders that nodes kept in buckets; None if there were none."""
    found = kept_folders(facts)
    if not found:
        return None
    cost = [each.back_after for each in found if each.back_after is not None]
    return section(
        "folders",
        "Folders",
        *long_table("Folders that are kept in buckets", _HEADINGS, [*map(_row, found)], _NUMBERS),
        note(f"{words.several(len(cost), 'interruption')} took {words.duration(sum(cost))} in all. {_BACK_AFTER}")
        if cost
        else None,
    )


def _row(kept: KeptFolder) -> list[str]:
    last = kept.events[-1].data
    back = f"{words.several(int(last['restored']), 'file')}, {decimal(int(last['restored_bytes']))}"
    return [
        str(last["folder"]),
        f"{kept.node}",
        str(last["url"]),
        words.count(last["files"]),
        decimal(int(last["bytes"])),
        "nothing was" if kept.saved_at is None else words.clock(kept.saved_at),
        back if last["restored"] else "nothing",
        "" if kept.back_after is None else words.duration(kept.back_after),
        "; ".join(_unsaved(kept.events[-1])) or ("nothing" if last["phase"] == "ended" else words.UNKNOWN),
        "; ".join(dict.fromkeys(str(each.data["trouble"]) for each in kept.events if each.data["trouble"])) or "none",
    ]


def _unsaved(event: JournalEvent) -> Iterator[str]:
    """Yield what was not saved by the last event of a folder."""
    said = event.data
    if said["unsaved"]:
        size = decimal(int(said["unsaved_bytes"]))
        yield f"{words.several(int(said['unsaved']), 'file')}, {size}: {', '.join(map(str, said['names']))}"
    for path, why in said["refused"]:
        yield f"{path}: {why}"
