"""`FolderSaver`: keeps what a program writes into one folder in a bucket, file by file."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from skypool.buckets.store import UNREACHED, trouble
from skypool.data import objects
from skypool.data.half_files import HalfFiles
from skypool.data.local_files import OWN, State, Writers, journal_lines, listed, state_of
from skypool.data.progress import Pause, Rate, Waiting
from skypool.data.wholeness import SHARDS_LAST, Checkpoint, checkpoints, is_temporary, shards

if TYPE_CHECKING:
    from obstore.store import ObjectStore

UNFINISHED = f"{OWN}/unfinished"
"""Objects below this name say which checkpoints are not whole in the bucket."""
_OWNERS = f"{OWN}/nodes"
"""Objects below this name say of a file which node has given it its plain name."""
_ALONE = b"0"
"""The number of a node that saves to a place alone."""
QUIET = 5.0
"""Seconds for which a file must not change before it counts as finished, if nothing else tells that it is."""
LONG = 60.0
"""Seconds after which a file that stays open is saved as a snapshot, and one that is never quiet as it is."""
PART = 8 << 20
"""The size in bytes of the parts of large files. Smaller files are sent at once."""
_PARTS = 4
"""The most parts of a large file that are sent at the same time."""
_PAUSES = 1.0, 60.0
"""The first and the longest pause in seconds after an attempt that has failed."""
_ENOUGH = 0.5
"""What has been deleted is deleted in the bucket, too, when newer files there have so many times its bytes."""
OF_A_NODE = re.compile(r"node-(\d+)/(.+)")
"""Matches the names of objects of files of which another node has saved one with the same path."""
_NAMED = 5
"""The most files that are named in one account."""


class Object(NamedTuple):
    """An object of a bucket: its name, its size in bytes, and what identifies its version; None for unknown."""

    name: str
    size: int
    version: str | None


class Changed(OSError):
    """A file has changed while it was read."""


class Saved(NamedTuple):
    """A file that was saved: its state then, the name of its object, and what identifies the version of that."""

    state: State
    name: str
    version: str | None


@dataclass
class Account:
    """An account of what was saved of a folder, and of what was not.

    Attributes:
        files: the number of files that were saved.
        bytes: the bytes of these.
        unsaved: the number of files that are not saved as they are now.
        unsaved_bytes: the bytes of these.
        trouble: why the last attempt has failed; "" if it has not.
        names: some of the files that are not saved.
        refused: why a file cannot be saved, by its path.
        kept: the number of files in the bucket that were deleted here.
    """

    files: int = 0
    bytes: int = 0
    unsaved: int = 0
    unsaved_bytes: int = 0
    trouble: str = ""
    names: Sequence[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    kept: int = 0


@dataclass
class FolderSaver:
    """Saves one folder. `turn` is called again and again, by one thread.

    Args:
        store: the bucket, opened at the prefix to which the folder is saved.
        folder: the folder.
        journal: the file in which it is noted what was saved.
        executor: sends small files side by side.
        node: the number of the node, and `nodes` how many save the same folder to the same prefix.
        patterns: what is written last into a checkpoint, as `checkpoints` takes it.
        clock: the time in seconds, which only goes forward.
        joins: True if a node has saved to the prefix alone before. Its files are not those of this node.
        account: what was saved. That of a former saver goes on.
        large: the same bucket for large files, with more patience. Default None: `store`.

    Attributes:
        rate: how fast files are sent.
        waiting: the files that are not saved as they are now.
        halves: files whose programs were stopped while they wrote. They are saved as snapshots only.
        pause: nothing is sent in this time after an error.
    """

    store: ObjectStore
    folder: str
    journal: str
    executor: Executor
    node: int = 0
    nodes: int = 1
    patterns: Sequence[str] = ()
    clock: Callable[[], float] = time.monotonic
    joins: bool = False
    account: Account = field(default_factory=Account)
    large: ObjectStore | None = None
    rate: Rate = field(init=False)
    waiting: Waiting = field(init=False)
    halves: HalfFiles = field(init=False)
    pause: Pause = field(init=False)
    _saved: dict[str, Saved] = field(default_factory=dict[str, Saved], init=False)
    _seen: dict[str, tuple[State, float]] = field(default_factory=dict[str, "tuple[State, float]"], init=False)
    _open_since: dict[str, float] = field(default_factory=dict[str, float], init=False)
    _closed: dict[str, float] = field(default_factory=dict[str, float], init=False)  # since when no writer was found
    _snapshots: dict[str, tuple[str, State, float]] = field(
        default_factory=dict[str, "tuple[str, State, float]"], init=False
    )
    _begun: set[str] = field(default_factory=set[str], init=False)
    _left: set[str] = field(default_factory=set[str], init=False)
    _gone: dict[str, float] = field(default_factory=dict[str, float], init=False)
    _came_at: dict[str, tuple[float, int]] = field(default_factory=dict[str, "tuple[float, int]"], init=False)
    _names: dict[str, str] = field(default_factory=dict[str, str], init=False)
    _refused: dict[str, str] = field(default_factory=dict[str, str], init=False)
    _goes_on: bool = field(default=False, init=False)  # where a mover of this machine has stopped
    _halves: set[str] = field(default_factory=set[str], init=False)
    _calm: bool = field(default=False, init=False)
    _awaits_quiet: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)  # for those who send small files

    def __post_init__(self) -> None:
        self.rate, self.waiting, self.pause = Rate(self.clock), Waiting(self.clock), Pause(*_PAUSES, self.clock)
        self.halves = HalfFiles(self.folder, f"{self.journal}.halves")
        self._goes_on = os.path.exists(self.journal)
        for line in journal_lines(self.journal):
            match line:
                case [str(path), [int(inode), int(size), int(changed)], str(name), str() | None as version]:
                    self._saved[path] = Saved(State(inode, size, changed), name, version)
                case [str(path)]:
                    self._saved.pop(path, None)
                case [str(path), None, str(name), [int(inode), int(size), int(changed)]]:
                    self._snapshots[path] = name, State(inode, size, changed), -math.inf
                case [str(path), None]:
                    self._snapshots.pop(path, None)
        with suppress(OSError):  # without a journal, everything is sent again when the mover begins again
            new = f"{self.journal}.new"
            with open(new, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.writelines(f"{json.dumps([path, *each])}\n" for path, each in self._saved.items())
                file.writelines(f"{json.dumps([path, None, *each[:2]])}\n" for path, each in self._snapshots.items())
            os.replace(new, self.journal)

    def begin(self) -> None:
        """Find out which checkpoints a former mover of this node has left unfinished in the bucket."""
        import obstore

        for page in obstore.list(self.store, UNFINISHED):
            for each in page:
                folder, _, node = each["path"].removeprefix(f"{UNFINISHED}/").rpartition("/")
                if node == str(self.node):
                    self._begun.add(folder)
        self._left = {*self._begun}
        for folder in self._left if self._goes_on and self.nodes == 1 else ():
            if not any(obstore.list(self.store, folder)):  # it was killed after the last deletion
                self._unmark(folder)

    def share(self, nodes: int) -> None:
        """Give each new file an owner from now on, as other nodes will save to the prefix, too. Any thread may call it.

        Raises what a store raises. Then repeat it, as the names of files that are just being sent are not noted yet.
        """
        with self._lock:
            self.nodes = max(self.nodes, nodes)
            new = [path for path, name in self._names.items() if path == name and path not in self._saved]
        for path in new if self.nodes > 1 else ():
            objects.create(self.store, f"{_OWNERS}/{path}", str(self.node).encode())

    # --- one turn --------------------------------------------------------------------------------------------

    def turn(self, last: bool = False, calm: bool = False) -> bool:
        """Save what is finished. Return True if nothing is left to save.

        Args:
            last: save all files as they are now: those that are open as snapshots, and checkpoints that are not whole.
                These stay marked as unfinished.
            calm: what writes the files has ended by itself, so that it left no checkpoint unfinished.
        """
        self._calm, self._awaits_quiet = calm, False
        now = self.clock()
        found = listed(self.folder)
        files = {path: each for path, each in found.files.items() if not is_temporary(path)}
        self._refused = dict(found.refused)
        for path in [path for path in files if self.nodes > 1 and OF_A_NODE.match(path)]:
            del files[path]
            self._refused[path] = "its name begins with that of a node, as files of other nodes do in the bucket"
        self._look(files, now)
        groups = checkpoints(files, self.patterns)
        changed = self._changed(files)
        self._note(files, changed)
        if not (last or self.pause.is_over):
            return False
        self._halves = self.halves.among(files)
        is_open = self._open(changed, now)
        in_group = {path: folder for folder, each in groups.items() for path in each.paths}
        for path, (name, _, _) in [*self._snapshots.items()]:
            if name.removeprefix(f"node-{self.node}/") in files:  # a program has taken the name for a file of its own
                self._drop_snapshot(path)
        single = [path for path in changed if path not in in_group and path not in is_open]
        self._closed = {path: self._closed.get(path, now) for path in single}

        def waits_long(path: str) -> bool:
            """Return True for a file that is written again and again, so that it is never quiet."""
            return now - max(self._closed[path], self.waiting.since(path)) >= LONG

        long = {each for each in single if not (last or self._is_quiet(each, now)) and waits_long(each)}
        is_open |= {each for each in long if self._seen[each][0].size > PART}  # it would change while it is sent
        steps: list[Callable[[], object]] = [
            lambda: self._save(each for each in single if last or self._is_quiet(each, now) or each in long - is_open),
            *(partial(self._save_checkpoint, *each, files, is_open, now, last) for each in groups.items()),
            lambda: self._snapshot([each for each in is_open if each in files], now, last),
            lambda: self._delete(files, groups, now),
        ]
        error = None
        for step in steps:
            try:
                step()
            except Exception as e:  # noqa: BLE001 - what a store may answer must not end the mover; it is told and repeated
                error = error or e
                if trouble(e).text == UNREACHED:  # the others would wait as long
                    break
        if error is not None:
            self.failed(error)
        else:
            self.account.trouble = ""
            self.pause.end()
        changed = self._changed(files)
        self._note(files, changed)
        return not (self._awaits_quiet or {*changed} - _covered(self._snapshots, files))

    def _changed(self, files: Mapping[str, State]) -> list[str]:
        """Return the files that are not saved as they are now."""
        return [path for path, each in files.items() if self.saved_state(path) != each]

    def _look(self, files: Mapping[str, State], now: float) -> None:
        """Note since when each file is as it is."""
        for path, state in files.items():
            before = self._seen.get(path)
            if before is None or before[0] != state:
                self._seen[path] = state, now
        for path in self._seen.keys() - files.keys():
            del self._seen[path]
            self._open_since.pop(path, None)

    def _is_quiet(self, path: str, now: float) -> bool:
        return now - self._seen[path][1] >= QUIET

    def _open(self, changed: Collection[str], now: float) -> set[str]:
        """Return those of the files that a program may write to."""
        writers, found = Writers(), set[str]()
        for path in changed:
            try:
                if writers.inode_of(os.path.join(self.folder, path)) is not None:
                    found.add(path)
            except OSError as e:  # it is gone again, or may not be read
                if not isinstance(e, FileNotFoundError):
                    self._refused[path] = f"it cannot be read: {e.strerror}"
        found |= self._halves & {*changed}
        for path in self._open_since.keys() - found:
            del self._open_since[path]
        for path in found:
            self._open_since.setdefault(path, now)
        return found

    # --- checkpoints -----------------------------------------------------------------------------------------

    def _save_checkpoint(
        self, folder: str, group: Checkpoint, files: Mapping[str, State], is_open: set[str], now: float, last: bool
    ) -> None:
        """Save the files of a checkpoint when it is whole. Until all are there, an object says that it is not."""
        inside = group.paths
        unsaved = [path for path in inside if self.saved_state(path) != files[path] and path not in self._refused]
        if not unsaved and folder not in self._begun:
            return
        self._mark(folder)  # at once, as other nodes may be done with their part
        has_half = not (is_open | self._halves).isdisjoint(inside)
        is_whole = not has_half and self._is_complete(group, files, now)
        if not (is_whole or last):
            return
        self._save(path for path in unsaved if path != group.last and path not in is_open)
        if group.last in unsaved:
            self._save([group.last])
        if last and not is_whole and not has_half:
            self._awaits_quiet |= not group.last or group.last in files
        is_there = all(self.saved_state(path) == files[path] for path in inside)
        is_there = is_there and not any(path.startswith(f"{folder}/") for path in self._refused)
        if is_whole and is_there and self.nodes > 1:
            is_there = self._others_are_there(folder, group)
        if is_whole and is_there and self._clear(folder, group, files):
            self._unmark(folder)

    def _clear(self, folder: str, group: Checkpoint, files: Mapping[str, State]) -> bool:
        """Remove objects of a checkpoint that has been written anew without their files. Return True if none are left.

        They stay if they are much larger than the new checkpoint. That is not whole then, as it is mixed with them.
        """
        gone = [each for each in self._saved if each.startswith(f"{folder}/") and each not in files]
        gone = [each for each in gone if not self._is_refused(each)]
        states = [files[path] for path in group.paths if self.saved_state(path) == files[path]]
        if gone and not self._is_replaced([self._saved[each].state for each in gone], states):
            return False
        self._forget(gone)
        self._remove_strays(folder, {self._saved[path].name for path in group.paths if path in self._saved})
        return True

    def _forget(self, paths: Iterable[str]) -> None:
        """Remove the objects of files that are gone here."""
        for path in paths:
            if self._name_of(path) == self._saved[path].name:  # else it came from another node
                objects.remove(self.store, self._saved[path].name)
            del self._saved[path]
            self._names.pop(path, None)  # another node may have it next
            self._write(path)

    def _remove_strays(self, folder: str, names: Collection[str]) -> None:
        """Remove what a former mover has sent of a checkpoint before it was killed, so that no journal has it."""
        import obstore

        if folder in self._left and self.nodes == 1:
            kept = {*names, *(name for name, _, _ in self._snapshots.values())}
            for page in obstore.list(self.store, folder):
                for each in page:
                    if each["path"] not in kept:
                        objects.remove(self.store, each["path"])
        self._left.discard(folder)

    def _mark(self, folder: str) -> None:
        """Say in the bucket that a checkpoint is not whole there."""
        if folder not in self._begun:
            objects.put(self.store, f"{UNFINISHED}/{folder}/{self.node}", b"")
            self._begun.add(folder)

    def _unmark(self, folder: str) -> None:
        """Say that a checkpoint is whole. A node that is alone also speaks for those of former runs."""
        import obstore

        marks = f"{UNFINISHED}/{folder}"
        objects.remove(self.store, f"{marks}/{self.node}")
        if self.nodes == 1:
            for page in obstore.list(self.store, marks):
                for each in page:
                    if each["path"].rpartition("/")[0] == marks:
                        objects.remove(self.store, each["path"])
        self._begun.discard(folder)

    def _is_complete(self, group: Checkpoint, files: Mapping[str, State], now: float) -> bool:
        """Return True if the program writes nothing more into a checkpoint that has these files."""
        if group.last and group.last not in files and self.node == 0:
            return False
        if group.last not in files:  # it is not known, or the first node writes it
            return self._calm or all(self._is_quiet(path, now) for path in group.paths)
        # not by the time of its last change, which a copy may have from the original
        came = {path: self._came(path) for path in group.paths}
        if came[group.last] == max(came.values()):
            return True
        return self._calm or all(now - self._seen[path][1] >= LONG for path in group.paths)

    def _came(self, path: str) -> int:
        """Return when a file was last changed, renamed or the like, in nanoseconds since 1970; 0 if it is gone."""
        try:
            return os.stat(os.path.join(self.folder, path)).st_ctime_ns
        except OSError:
            return 0

    def _others_are_there(self, folder: str, group: Checkpoint) -> bool:
        """Return True if the files are in the bucket that other nodes write into a checkpoint, if these are known."""
        import obstore

        named = set[str]()
        for path in group.paths:
            if path.rpartition("/")[2] == SHARDS_LAST:
                with suppress(FileNotFoundError):
                    named |= shards(path, Path(self.folder, path).read_bytes())
        named -= {*group.paths}
        return not named or named <= {each["path"] for page in obstore.list(self.store, folder) for each in page}

    # --- files -----------------------------------------------------------------------------------------------

    def _save(self, paths: Iterable[str]) -> None:
        """Save files, small ones side by side. Raises the first error after all were tried."""
        small: list[str] = []
        errors: list[Exception] = []
        for path in paths:
            if path in self._refused:
                continue
            if self._seen[path][0].size <= PART:
                small.append(path)
                continue
            try:
                self._save_one(path)
            except Exception as e:  # noqa: BLE001 - the others are tried, too
                errors.append(e)
        for future in [self.executor.submit(self._save_one, path) for path in small]:
            if error := future.exception():
                errors.append(error if isinstance(error, Exception) else OSError(str(error)))
        if errors:
            raise errors[0]

    def _save_one(self, path: str) -> None:
        """Save a file as it is now. If it changes meanwhile, or is gone, nothing happens."""
        name = self._name_of(path)
        with suppress(Changed):
            state, version = self._send(path, name)
            with self._lock:
                self._saved[path] = Saved(state, name, version)
                self.account.files += 1
                self.account.bytes += state.size
                self._came_at[path] = self.clock(), state.size
                self._write(path)
            if path in self._snapshots:
                self._forget_snapshot(path)

    def _send(self, path: str, name: str, may_change: bool = False) -> tuple[State, str | None]:
        """Send a file to an object. Return the state of the file, and what identifies the version of the object.

        Raises Changed if the file has changed meanwhile, or is gone.
        """
        import obstore

        try:
            opened = open(os.path.join(self.folder, path), "rb", buffering=0)  # noqa: SIM115 - it is closed below
        except FileNotFoundError as e:  # not one of the store, which says so of a bucket that is gone
            raise Changed(path) from e
        with opened as file, self.rate.sending():
            state = state_of(file.fileno())
            if not may_change and state != self._seen[path][0]:  # a program has begun to write it since the last look
                raise Changed(path)
            left = state.size

            def checked(data: bytes) -> bytes:
                nonlocal left
                left -= len(data)
                if not may_change and (left < 0 or (not left and state_of(file.fileno()) != state)):
                    raise Changed(path)
                return data

            def parts() -> Iterator[bytes]:
                while left > 0:
                    data = file.read(min(PART, left))
                    if not data:
                        raise Changed(path)
                    self.rate.add(len(data))
                    yield checked(data)

            how = {"attributes": attributes_of(state)} if takes_attributes(self.store) else {}
            if state.size <= PART:
                data = b"".join(parts()) if state.size else checked(b"")
                done = obstore.put(self.store, name, data, use_multipart=False, **how)  # type: ignore[arg-type]
            else:
                place = self.large or self.store
                done = obstore.put(place, name, parts(), chunk_size=PART, max_concurrency=_PARTS, **how)  # type: ignore[arg-type]
        return state, done["e_tag"] if how else self._timed(name, state)

    def _timed(self, name: str, state: State) -> str | None:
        """Give an object of a folder, which is a file, the time of the file that was saved. Return its version."""
        import obstore

        os.utime(os.path.join(cast(Any, self.store).prefix, name), ns=(state.changed, state.changed))
        return obstore.head(self.store, name)["e_tag"]

    def _name_of(self, path: str) -> str:
        """Return the name of a file's object. If another node has saved a file of this path, it begins with "node-"."""
        own = f"node-{self.node}/{path}"
        with self._lock:
            if self.nodes == 1 and path not in self._names:  # a run with more nodes may have been before
                is_own = path in self._saved and self._saved[path].name == own
                self._names[path] = own if is_own else path
        if path not in self._names:
            mine = str(self.node).encode()
            is_taken = (self.joins or path not in self._saved) and objects.exists(self.store, path)
            owner = _ALONE if is_taken else mine
            if not objects.create(self.store, f"{_OWNERS}/{path}", owner):
                owner = objects.read(self.store, f"{_OWNERS}/{path}")
            self._names[path] = path if owner == mine else own
        return self._names[path]

    # --- files that stay open --------------------------------------------------------------------------------

    def _snapshot(self, paths: Iterable[str], now: float, last: bool) -> None:
        """Save what is there of files that stay open, each under a name of its own."""
        for path in paths:
            made = self._snapshots.get(path)
            if made is not None and made[1] == self._seen[path][0]:
                continue
            if not last and now - (self._open_since.get(path, -math.inf) if made is None else made[2]) < LONG:
                continue
            name = self._snapshot_name(path) if made is None else made[0]
            if made is None:
                self._note_snapshot(path, name, State(0, 0, 0), -math.inf)  # before the object is there
            with suppress(Changed):
                self._note_snapshot(path, name, self._send(path, name, may_change=True)[0], now)
                self.waiting.begin_again(path)

    def _note_snapshot(self, path: str, name: str, state: State, now: float) -> None:
        with self._lock:
            self._snapshots[path] = name, state, now
            self._append([path, None, name, state])

    def _forget_snapshot(self, path: str) -> None:
        """Remove the snapshot of a file."""
        objects.remove(self.store, self._snapshots[path][0])
        self._drop_snapshot(path)

    def _drop_snapshot(self, path: str) -> None:
        with self._lock:
            del self._snapshots[path]
            self._append([path, None])

    def _snapshot_name(self, path: str) -> str:
        """Return a name for the snapshots of a file that no file has."""
        first = f"{path}.snapshot"
        names = (first, *(f"{first}-{number}" for number in range(2, 1000)))
        taken = {*self._saved, *self._seen}
        return self._name_of(next(each for each in names if each not in taken))

    # --- what is deleted here --------------------------------------------------------------------------------

    def _delete(self, files: Mapping[str, State], groups: Mapping[str, Checkpoint], now: float) -> None:
        """Delete objects of files that are gone here, if newer files of like size are there in their place.

        So a program that empties its folder when it begins deletes nothing of what it had saved.
        """
        whole = self._whole(files, groups)
        for path in self._snapshots.keys() - files.keys():
            if self._is_replaced([self._snapshots[path][1]], whole):
                self._forget_snapshot(path)
        gone = [path for path in self._saved if path not in files and not self._is_refused(path)]
        self._gone = {path: self._gone.get(path, now) for path in gone}
        if not gone:
            self.account.kept = 0
            return
        was = checkpoints(gone, self.patterns)
        in_group = {path for each in was.values() for path in each.paths}
        lots = [*((folder, each.paths) for folder, each in was.items())]
        lots += [("", [path]) for path in gone if path not in in_group]
        replaced = self._replaced_together(gone, whole)
        for folder, paths in lots:
            states = [self._saved[path].state for path in paths]
            if not ({*states} <= {*whole} or (self._is_replaced(states, whole) and replaced.issuperset(paths))):
                continue
            if folder and any(now - self._gone[path] < QUIET for path in paths):  # it may be half removed here
                continue
            if folder:
                self._mark(folder)
            self._forget(paths)
            if folder and folder not in groups:
                self._remove_strays(folder, ())
                self._unmark(folder)
        self.account.kept = sum(path not in files for path in self._saved)

    def _is_refused(self, path: str) -> bool:
        """Return True if a file, or a folder that it is in, cannot be read, so that it may not be gone."""
        above = (path[:at] for at, each in enumerate(path) if each == "/")
        return bool(self._refused) and not {"", path, *above}.isdisjoint(self._refused)

    def _whole(self, files: Mapping[str, State], groups: Mapping[str, Checkpoint]) -> list[State]:
        """Return the states of the files that are in the bucket as they are here, without unfinished checkpoints."""
        found = {path: state for path, state in files.items() if self.saved_state(path) == state}
        for folder, group in groups.items():
            if folder in self._begun or not all(path in found for path in group.paths):
                for path in group.paths:
                    found.pop(path, None)
        return [*found.values()]

    def _replaced_together(self, gone: Sequence[str], whole: Sequence[State]) -> set[str]:
        """Return those of the files that were deleted at one time, for which as much has been saved in their place."""
        found = set[str]()
        for at in {self._gone[path] for path in gone}:
            paths = [path for path in gone if self._gone[path] == at]
            states = [self._saved[path].state for path in paths]
            # a file that is written again and again counts once
            since = sum(size for came, size in self._came_at.values() if came > at)
            if max(_newer(states, whole), since) >= _enough(states):
                found |= {*paths}
        return found

    def _is_replaced(self, gone: Sequence[State], whole: Sequence[State]) -> bool:
        """Return True if newer files of like size are in the bucket, or the same ones under other names."""
        return {*gone} <= {*whole} or _newer(gone, whole) >= max(1, _enough(gone))

    # --- requests and notes ----------------------------------------------------------------------------------

    def failed(self, error: Exception) -> None:
        """Note an error, and pause before the next attempt."""
        self.account.trouble = trouble(error).words
        self.pause.begin()

    def _note(self, files: Mapping[str, State], changed: Sequence[str]) -> None:
        """Bring the account up to date."""
        self.waiting.note(changed, _covered(self._snapshots, files))
        account = self.account
        account.unsaved = len(changed)
        account.unsaved_bytes = sum(files[path].size for path in changed)
        account.names = sorted(changed, key=lambda path: -files[path].size)[:_NAMED]
        account.refused = dict(sorted(self._refused.items())[:_NAMED])

    def has(self, path: str, object_: Object, state: State | None) -> bool:
        """Return True if a file is here as it is in the bucket."""
        saved = self._saved.get(path)
        return saved is not None and saved == (state, object_.name, object_.version) and object_.version is not None

    def restored(self, path: str, state: State, object_: Object) -> None:
        """Note that a file is here as it is in the bucket. Any thread may call this."""
        with self._lock:
            self._saved[path] = Saved(state, object_.name, object_.version)
            self._write(path)

    def saved_state(self, path: str) -> State | None:
        """Return the state in which a file was saved; None if it was not."""
        saved = self._saved.get(path)
        return None if saved is None else saved.state

    def _write(self, path: str) -> None:
        """Note in the journal how a file is saved, or that it is not any more."""
        self._append([path, *self._saved.get(path, ())])

    def _append(self, line: Sequence[object]) -> None:
        """Add a line to the journal."""
        with suppress(OSError), open(self.journal, "a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"{json.dumps(line)}\n")


def _covered(snapshots: Mapping[str, tuple[str, State, float]], files: Mapping[str, State]) -> set[str]:
    """Return the files that are as their snapshots are."""
    return {path for path, (_, state, _) in snapshots.items() if files.get(path) == state}


def _newer(gone: Iterable[State], whole: Iterable[State]) -> int:
    """Return the bytes of the files that are newer than all that are gone."""
    newest = max(each.changed for each in gone)
    return sum(each.size for each in whole if each.changed > newest)


def _enough(gone: Iterable[State]) -> float:
    """Return the bytes that must be there in the place of files that are gone."""
    return _ENOUGH * sum(each.size for each in gone)


def attributes_of(state: State) -> dict[str, str]:
    """Return the attributes of an object: the time of its file's last change, as rclone and others write it."""
    return {"mtime": f"{state.changed // 10**9}.{state.changed % 10**9:09}"}


def takes_attributes(store: object) -> bool:
    return type(store).__name__ != "LocalStore"
