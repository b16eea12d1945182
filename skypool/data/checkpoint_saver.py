"""`CheckpointSaver`: keeps the checkpoints of `skypool.Checkpoints` in a bucket, and decides from which one to go on.

Objects, below the place of the folder:

    .skypool/attempts/000003            attempt 3 has begun; has the token of its processes
    .skypool/attempts/000003.from       which checkpoint it goes on from
    step-200/attempt-000003/rank-1/…    files of rank 1
    step-200/attempt-000003/rank-1.json their sizes and SHA-256
    step-200/attempt-000003/COMMIT      the same of all ranks. With it, the checkpoint is whole

Nothing of this is ever overwritten. The objects of attempts and COMMIT are made only if they are not there. A
checkpoint counts as safe if, after its COMMIT, no later attempt had begun. A later one looks for COMMITs after it has
begun. So each attempt finds what was called safe before, however late the movers of former attempts wake up.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from skypool.data import objects
from skypool.data.folder_saver import PART
from skypool.data.local_files import OURS, OWN, aside_of
from skypool.data.progress import Rate, Waiting
from skypool.errors import SkypoolError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PLACE = f"{OURS}checkpoints"
"""The folder with checkpoints, below the one that is saved."""
RANK = f"{OURS}rank"
"""The file in the folder of a rank that says what it is."""
OBJECTS = re.compile(r"step-(\d+)/attempt-(\d+)/(.+)")
"""Matches the names of the objects of checkpoints."""
_ATTEMPTS = f"{OWN}/attempts"
_ORIGIN = "origin"
"""The file with the URL of the place to which checkpoints go, in their folder."""
_STORED_FOR = timedelta(hours=1)
"""How long files of a checkpoint stay that is not needed any more: others may just be reading them."""
_SMALL = 16 << 20
"""Files of other ranks of at most so many bytes are fetched in any case. They may describe the whole checkpoint."""


class Step(NamedTuple):
    """A checkpoint: the attempt that made it, and its step. A later attempt is newer, whatever the step."""

    attempt: int
    step: int

    @property
    def name(self) -> str:
        return f"step-{self.step}/attempt-{self.attempt:06}"


@dataclass
class CheckpointSaver:
    """The checkpoints of one folder. One thread calls `turn`, and others may ask meanwhile.

    Args:
        store: the bucket, opened at the prefix to which the folder is saved.
        folder: the folder that is saved.
        executor: sends and fetches files side by side.
        origin: the URL of the place, by which checkpoints of this folder that go to another place are told apart.
        rate: that of the folder's other files.
        large: the same bucket for large files, with more patience. Default None: `store`.

    Attributes:
        files, sent: the files that were saved, and their bytes.
        unsaved, unsaved_bytes: those that are not.
        waiting: the checkpoints that are not saved.
    """

    store: ObjectStore
    folder: str
    executor: Executor
    origin: str = ""
    files: int = field(default=0, init=False)
    sent: int = field(default=0, init=False)
    unsaved: int = field(default=0, init=False)
    unsaved_bytes: int = field(default=0, init=False)
    rate: Rate = field(default_factory=Rate)
    large: ObjectStore | None = None
    waiting: Waiting = field(default_factory=Waiting, init=False)
    _attempts: dict[str, tuple[int, Step | None]] = field(
        default_factory=dict[str, "tuple[int, Step | None]"], init=False
    )
    _safe: dict[int, Step] = field(default_factory=dict[int, Step], init=False)
    _sent: set[tuple[Step, int]] = field(default_factory=set["tuple[Step, int]"], init=False)
    _open: dict[Step, tuple[int, int]] = field(default_factory=dict[Step, "tuple[int, int]"], init=False)
    _is_tried: bool = field(default=False, init=False)

    def clear(self) -> str:
        """Move checkpoints aside that were made for another place. Return where they are; "" if there were none."""
        root = Path(self.folder, PLACE)
        note = root / _ORIGIN
        if root.is_dir() and (not note.is_file() or note.read_text() != self.origin):
            aside = aside_of(self.folder)
            root.rename(aside)
            return aside
        return ""

    # --- which one to go on from -----------------------------------------------------------------------------

    def attempt(self, token: str) -> tuple[int, Step | None]:
        """Return the number of an attempt, and the checkpoint that it goes on from; None for none.

        All processes of an attempt have one token. The first one that asks decides for all.

        Raises SkypoolError if the store replaces an object that was to be created.
        """
        if token not in self._attempts:
            number = self._number_of(token)
            name = f"{_ATTEMPTS}/{number:06}.from"
            objects.create(self.store, name, json.dumps(max(self._whole(), default=None)).encode())
            self._attempts[token] = number, self._first_of(number)
            root = Path(self.folder, PLACE)
            root.mkdir(parents=True, exist_ok=True)
            (root / _ORIGIN).write_text(self.origin)
        return self._attempts[token]

    def _number_of(self, token: str) -> int:
        """Return the number of an attempt. A new one gets the next number.

        A former one keeps its own, also if this mover is new, or this node asks late: it must not seem to be newer.
        """
        self._try_once()
        known: dict[int, str] = {}
        while True:
            begun = [each for each in self._begun() if each not in known]
            known |= zip(begun, self.executor.map(self._token_of, begun), strict=True)
            number = next((each for each, other in known.items() if other == token), 0)
            if number:
                return number
            objects.create(self.store, f"{_ATTEMPTS}/{max(known, default=0) + 1:06}", token.encode())

    def _first_of(self, number: int) -> Step | None:
        """Return the checkpoint that an attempt goes on from."""
        said = json.loads(objects.read(self.store, f"{_ATTEMPTS}/{number:06}.from"))
        return None if said is None else Step(*said)

    def _token_of(self, number: int) -> str:
        return objects.read(self.store, f"{_ATTEMPTS}/{number:06}").decode()

    def _begun(self) -> list[int]:
        """Return the numbers of all attempts that have begun."""
        names = (each.name.rpartition("/")[2] for each in self._objects(_ATTEMPTS))
        return [int(each) for each in names if each.isdecimal()]

    def _whole(self) -> list[Step]:
        """Return all checkpoints that are whole in the bucket."""
        found = (OBJECTS.fullmatch(each.name) for each in self._objects())
        return [Step(int(each[2]), int(each[1])) for each in found if each and each[3] == "COMMIT"]

    def _try_once(self) -> None:
        """Raise SkypoolError if the store does not refuse to create an object that exists."""
        if self._is_tried:
            return
        name = f"{OWN}/tries/{secrets.token_hex(6)}"
        objects.create(self.store, name, b"1")  # if it is there, this request came twice, as the first answer was lost
        is_good = not objects.create(self.store, name, b"2")
        objects.remove(self.store, name)
        if not is_good:
            raise SkypoolError(
                "checkpoints cannot be kept in this store: it replaces objects that were to be created; use another "
                "store, or plain files"
            )
        self._is_tried = True

    def safe(self, token: str) -> tuple[Step | None, bool]:
        """Return the newest checkpoint from which a later attempt would go on, and True if a later one has begun.

        Any thread may call this.
        """
        number, first = self.attempt(token)
        is_over = max(self._begun()) > number
        if not is_over and (number not in self._safe or not self._ours(number)):
            newest = max((each for each in self._whole() if each.attempt == number), default=None)
            if newest is not None and max(self._begun()) == number:
                self._safe[number] = max(newest, self._safe.get(number, newest))
        return self._safe.get(number, first), is_over

    def known(self, token: str) -> Step | None:
        """Return what `safe` has returned last, as the store cannot be asked. Raises OSError if it has not."""
        if token not in self._attempts:
            raise OSError("the store cannot be asked")
        number, first = self._attempts[token]
        return self._safe.get(number, first)

    def _ours(self, number: int) -> bool:
        """Return True if this node has the checkpoints of an attempt, so that it knows of each COMMIT."""
        return any(step.attempt == number for step, _ in self._sent)

    # --- saving ----------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Save what is whole here and not in the bucket. Return True if nothing is left."""
        waiting = [(step, rank, path) for step, rank, path in self._here() if (step, rank) not in self._sent]
        self._count(waiting)
        waiting.sort()
        for step, rank, path in waiting:
            said = json.loads((path / RANK).read_bytes())
            self._save_rank(step, rank, path)
            self._open[step] = said["world"], said["keep"]
            self._commit(step, said["world"], said["keep"])
            self._sent.add((step, rank))
        for step in sorted(self._open):  # other nodes may have been later
            if step in self._open:
                self._commit(step, *self._open[step])
        self._count([])
        return True

    def _here(self) -> Iterator[tuple[Step, int, Path]]:
        """Yield the checkpoints of this node: step, rank and folder."""
        for path in Path(self.folder, PLACE).glob("step-*/attempt-*/rank-*"):
            step, attempt, rank = (each.rpartition("-")[2] for each in path.parts[-3:])
            if (path / RANK).is_file():
                yield Step(int(attempt), int(step)), int(rank), path

    def _count(self, waiting: list[tuple[Step, int, Path]]) -> None:
        sizes = [file.stat().st_size for _, _, path in waiting for file in _files(path)]
        self.unsaved, self.unsaved_bytes = len(sizes), sum(sizes)
        self.waiting.note([f"{step.name}/{rank}" for step, rank, _ in waiting])

    def _save_rank(self, step: Step, rank: int, path: Path) -> None:
        """Save the files of a rank, and then the list of them."""
        there = f"{step.name}/rank-{rank}"
        if objects.exists(self.store, f"{there}.json"):
            return
        files = [*_files(path)]
        small = [each for each in files if each.stat().st_size <= PART]
        made = {each: self.executor.submit(self._send, each, f"{there}/{each.relative_to(path)}") for each in small}
        found = {}
        for each in files:
            future = made.get(each)
            name = str(each.relative_to(path))
            found[name] = self._send(each, f"{there}/{name}") if future is None else future.result()
            self.files, self.sent = self.files + 1, self.sent + found[name][0]
        objects.create(self.store, f"{there}.json", json.dumps(found).encode())

    def _send(self, path: Path, name: str) -> tuple[int, str]:
        """Send a file, and return its size and its SHA-256."""
        import obstore

        digest, size = hashlib.sha256(), 0

        def parts(file: Any) -> Iterator[bytes]:
            nonlocal size
            while data := file.read(PART):
                digest.update(data)
                size += len(data)
                self.rate.add(len(data))
                yield data

        with path.open("rb", buffering=0) as file, self.rate.sending():
            if os.fstat(file.fileno()).st_size <= PART:
                obstore.put(self.store, name, b"".join(parts(file)), use_multipart=False)
            else:
                obstore.put(self.large or self.store, name, parts(file), chunk_size=PART, max_concurrency=4)
        return size, digest.hexdigest()

    def _commit(self, step: Step, world: int, keep: int) -> None:
        """Make the COMMIT of a checkpoint, if all ranks are in the bucket. Then remove old ones."""
        ranks = {f"{step.name}/rank-{rank}.json" for rank in range(world)}
        there = {each.name for each in self._objects(step.name)}
        if not ranks <= there:
            return
        files = {rank: json.loads(objects.read(self.store, f"{step.name}/rank-{rank}.json")) for rank in range(world)}
        is_first = objects.create(
            self.store, f"{step.name}/COMMIT", json.dumps({"world": world, "files": files}).encode()
        )
        known = self._safe.get(step.attempt)
        if known is None:  # a former mover of this node may have told of a newer one
            known = max((each for each in self._whole() if each.attempt == step.attempt), default=None)
        if max(self._begun()) == step.attempt:  # otherwise a later attempt may not have seen it
            self._safe[step.attempt] = max(step, known or step)
            if is_first:
                self._prune(step, keep)
            self._prune_here(step, keep)
        self._open = {each: said for each, said in self._open.items() if each > step}  # older ones are not needed

    def _prune_here(self, newest: Step, keep: int) -> None:
        """Remove the folders of checkpoints of this node that are older than the newest ones."""
        here = {step for step, _, _ in self._here() if step <= newest}
        for step in sorted(here)[:-keep]:
            shutil.rmtree(Path(self.folder, PLACE, step.name), ignore_errors=True)

    def _prune(self, newest: Step, keep: int) -> None:
        """Remove the COMMITs of all but the newest checkpoints, and files without a COMMIT that are an hour old."""
        listed = [(each, found) for each in self._objects() if (found := OBJECTS.fullmatch(each.name))]
        commits = {Step(int(found[2]), int(found[1])) for _, found in listed if found[3] == "COMMIT"}
        needed = {*sorted(commits)[-keep:], self._first_of(newest.attempt)}
        now = max(each.at for each, _ in listed)
        for step in commits - needed:
            objects.remove(self.store, f"{step.name}/COMMIT")
        listed.sort(key=lambda each: not each[0].name.endswith(".json"))  # first the lists, without which is no COMMIT
        for each, found in listed:
            step = Step(int(found[2]), int(found[1]))
            is_old = step.attempt < newest.attempt or step < newest
            if step not in needed and is_old and now - each.at > _STORED_FOR:
                objects.remove(self.store, each.name)

    # --- bringing one back -----------------------------------------------------------------------------------

    def fetch(self, step: Step, rank: int, world: int) -> str:
        """Bring a checkpoint back for one rank, and return the folder with its files.

        It has the files of this rank, and those of others under names that this rank does not have. If the checkpoint
        is of as many ranks, large files of other ranks are left out.

        Raises:
            SkypoolError: a file is not as it was saved, or does not fit on the disk.
            obstore.exceptions.BaseError, OSError: it could not be fetched.
        """
        root = Path(self.folder, PLACE)
        said = json.loads(objects.read(self.store, f"{step.name}/COMMIT"))
        files = {int(number): found for number, found in said["files"].items()}
        is_alike = said["world"] == world
        wanted = [
            (number, name, size, digest)
            for number, found in files.items()
            for name, (size, digest) in found.items()
            if number == rank or not is_alike or size <= _SMALL
        ]
        missing = [each for each in wanted if not _is_whole(root / step.name / f"rank-{each[0]}" / each[1], each[2])]
        needed = sum(size for _, _, size, _ in missing)
        root.mkdir(parents=True, exist_ok=True)
        if needed > (free := shutil.disk_usage(root).free):
            raise SkypoolError(
                f"checkpoint {step.step} needs {needed:,} bytes, and {free:,} are free in {self.folder}; use a larger "
                "disk"
            )
        for future in [self.executor.submit(self._fetch, root, step, *each) for each in missing]:
            future.result()
        view = root / "views" / f"{_flat(step)}-rank-{rank}"
        links: dict[str, tuple[int, int]] = {}
        for number, name, size, _ in sorted(wanted, key=lambda each: each[0] != rank):
            links.setdefault(name, (number, size))
        if not view.exists() or not all(_is_whole(view / name, size) for name, (_, size) in links.items()):
            self._link(root / step.name, view, {name: number for name, (number, _) in links.items()})
        self._prune_fetched(step)
        return str(view)

    @staticmethod
    def _link(files: Path, view: Path, links: Mapping[str, int]) -> None:
        """Make the folder that a program gets, of the files of ranks. `links` has the rank of each file."""
        new = view.with_name(f".new-{secrets.token_hex(6)}")
        for name, rank in links.items():
            there = new / name
            there.parent.mkdir(parents=True, exist_ok=True)
            os.link(files / f"rank-{rank}" / name, there)
        new.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(view, ignore_errors=True)
        new.rename(view)

    def _prune_fetched(self, used: Step) -> None:
        """Remove what former attempts had brought here, an hour later, as their programs may just be reading it."""
        newest = max(self._attempts.values(), key=lambda each: each[0], default=(0, None))[1]
        needed = [each for each in (used, newest) if each is not None]
        root, old = Path(self.folder, PLACE), time.time() - _STORED_FOR.total_seconds()
        for path in root.glob("views/*"):
            if not path.name.startswith(tuple(f"{_flat(each)}-rank-" for each in needed)) and _changed_at(path) < old:
                shutil.rmtree(path, ignore_errors=True)
        names = {each.name for each in needed}
        for path in root.glob("step-*/attempt-*/rank-*"):
            is_needed = "/".join(path.parts[-3:-1]) in names or (path / RANK).exists()  # or it was made here
            if not is_needed and _changed_at(path) < old:
                shutil.rmtree(path, ignore_errors=True)

    def _fetch(self, root: Path, step: Step, rank: int, name: str, size: int, digest: str) -> None:
        """Fetch a file, and check it."""
        import obstore

        if any(each in ("", ".", "..") for each in name.split("/")):
            raise SkypoolError(f"checkpoint {step.step} has a file with the name {name!r}, which is none of skypool's")
        target = root / step.name / f"rank-{rank}" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{OURS}{secrets.token_hex(6)}")
        found = hashlib.sha256()
        try:
            with part.open("wb") as file:
                for data in obstore.get(self.store, f"{step.name}/rank-{rank}/{name}").stream(min_chunk_size=PART):
                    file.write(data)
                    found.update(data)
            if part.stat().st_size != size or found.hexdigest() != digest:
                raise SkypoolError(f"checkpoint {step.step}: {name} of rank {rank} is not as it was saved")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    # --- requests --------------------------------------------------------------------------------------------

    def _objects(self, below: str | None = None) -> Iterator[_Listed]:
        import obstore

        for page in obstore.list(self.store, below):
            for each in page:
                yield _Listed(each["path"], each["last_modified"])


class _Listed(NamedTuple):
    name: str
    at: datetime


def _files(path: Path) -> Iterator[Path]:
    """Yield the files of a rank."""
    for each in sorted(path.rglob("*")):
        if each.is_file() and not each.name.startswith(OURS):
            yield each


def _flat(step: Step) -> str:
    return step.name.replace("/", "-")


def _changed_at(path: Path) -> float:
    """Return when a folder was changed last, in seconds since 1970; now if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


def _is_whole(path: Path, size: int) -> bool:
    """Return True if a file is here. It got its name when it was whole."""
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def place_of(said: Mapping[str, Any]) -> Path:
    """Return the folder of a rank's checkpoint below that of all checkpoints."""
    return Path(Step(said["attempt"], said["step"]).name, f"rank-{said['rank']}")
