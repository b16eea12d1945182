"""Brings a folder back from a bucket before a program begins: its files as they were saved last."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from skypool.data.checkpoint_saver import OBJECTS
from skypool.data.folder_saver import OF_A_NODE, PART, UNFINISHED, FolderSaver, Object, attributes_of, takes_attributes
from skypool.data.local_files import OURS, OWN, aside_of, listed, state_of

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult

_LONGEST = 255
"""The most bytes of the name of a file."""
_NAMED = 20
"""The most names in one account."""
_CHUNK = 1 << 20
"""The bytes after which what comes of a file is counted."""


@dataclass
class Restored:
    """An account of what was brought back.

    Attributes:
        files: the number of files that were fetched.
        bytes: the bytes of these.
        received: the bytes that came from the bucket, also of files that have not come to their end.
        aside: the folder to which files were moved that were here and are not in the bucket; "" if there were none.
        moved: the number of files that were moved.
        unfinished: checkpoints that are not whole in the bucket, and were left there.
        refused: why an object cannot be a file here, by its name.
    """

    files: int = 0
    bytes: int = 0
    received: int = 0
    aside: str = ""
    moved: int = 0
    unfinished: list[str] = field(default_factory=list[str])
    refused: dict[str, str] = field(default_factory=dict[str, str])


class _Arrivals:
    """Counts the bytes that come from the bucket, in several threads."""

    def __init__(self, done: Restored) -> None:
        self._done = done
        self._lock = threading.Lock()

    def of(self, got: GetResult) -> Iterator[memoryview]:
        """Yield what comes of an object, and count it."""
        for data in got.stream(min_chunk_size=_CHUNK):
            with self._lock:
                self._done.received += len(data)
            yield memoryview(data)


def restore(saver: FolderSaver, done: Restored | None = None) -> Restored:
    """Make the folder of a saver as the bucket has it. What the bucket does not have is moved aside.

    If the bucket has nothing, the folder stays as it is. After an error, this can be done again. `done` is filled while
    files come, and returned.

    Raises:
        obstore.exceptions.BaseError, OSError: a file could not be fetched or written.
    """
    done = Restored() if done is None else done
    wanted = _wanted(saver, done)
    os.makedirs(saver.folder, exist_ok=True)
    if not wanted:
        return done
    here = listed(saver.folder).files
    same = {path for path, each in wanted.items() if saver.has(path, each, here.get(path))}
    _move_aside(saver, (here.keys() - same) | _in_the_way(saver.folder, wanted), done)
    missing = {path: each for path, each in wanted.items() if path not in same}
    small = {path: each for path, each in missing.items() if each.size <= PART}
    arrivals = _Arrivals(done)
    fetched = {saver.executor.submit(_fetch, saver, path, each, arrivals): each for path, each in small.items()}
    errors: list[BaseException] = []
    for future in as_completed(fetched):
        if error := future.exception():
            errors.append(error)
        else:
            done.files, done.bytes = done.files + 1, done.bytes + fetched[future].size
    if errors:
        raise errors[0]
    for path, each in missing.items():
        if path not in small:
            _fetch_large(saver, path, each, arrivals)
            done.files, done.bytes = done.files + 1, done.bytes + each.size
    return done


def _wanted(saver: FolderSaver, done: Restored) -> dict[str, Object]:
    """Return the objects that this node's folder has, by their paths in the folder."""
    import obstore

    objects = [
        Object(each["path"], each["size"], each.get("e_tag")) for page in obstore.list(saver.store) for each in page
    ]
    unfinished = {
        each.name.removeprefix(f"{UNFINISHED}/").rpartition("/")[0]
        for each in objects
        if each.name.startswith(f"{UNFINISHED}/")
    }
    claimed = {each.name.removeprefix(f"{OWN}/nodes/") for each in objects if each.name.startswith(f"{OWN}/nodes/")}
    found: dict[str, Object] = {}
    own: dict[str, Object] = {}
    for each in objects:
        of_node = OF_A_NODE.fullmatch(each.name)
        if each.name.startswith(f"{OWN}/") or OBJECTS.fullmatch(each.name):
            continue
        if of_node and of_node[2] in claimed:
            if int(of_node[1]) == saver.node:
                own[of_node[2]] = each
            continue
        found[each.name] = each
    found |= own
    torn = set[str]()
    for path in [*found]:
        if above := {path[:at] for at, each in enumerate(path) if each == "/"} & unfinished:
            torn |= above
            del found[path]
        elif not _is_plain(path):
            del found[path]
            done.refused[path] = "no file can have this name"
    folders = {path[:at] for path in found for at, each in enumerate(path) if each == "/"}
    for path in folders & found.keys():  # a mark for a folder as many programs make it, or a file that became a folder
        if found.pop(path).size:
            done.refused[path] = "a folder has its name"
    done.unfinished = sorted(torn)[:_NAMED]
    done.refused = dict(sorted(done.refused.items())[:_NAMED])
    return found


def _is_plain(path: str) -> bool:
    """Return True if an object can be a file below the folder."""
    parts = path.split("/")
    return path.isprintable() and not any(
        each in ("", ".", "..") or each.startswith(OURS) or len(each.encode()) > _LONGEST for each in parts
    )


def _in_the_way(folder: str, wanted: Mapping[str, Object]) -> set[str]:
    """Return what is here in the place of folders of wanted files, and folders that are in the place of a file."""
    parents = {path[:at] for path in wanted for at, each in enumerate(path) if each == "/"}
    found = {each for each in parents if _is_no_folder(os.path.join(folder, each))}
    found = {each for each in found if not any(each.startswith(f"{other}/") for other in found)}
    beyond = tuple(f"{each}/" for each in found)  # what is there may be reached through a link
    return found | {
        each for each in wanted if os.path.isdir(os.path.join(folder, each)) and not each.startswith(beyond)
    }


def _is_no_folder(path: str) -> bool:
    return os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path))


def _move_aside(saver: FolderSaver, paths: set[str], done: Restored) -> None:
    """Move files that are not as in the bucket out of the folder, to one beside it."""
    if not paths:
        return
    done.aside = aside_of(saver.folder)
    for path in sorted(paths, reverse=True):  # what is in a folder before the folder
        there = os.path.join(done.aside, path)
        os.makedirs(os.path.dirname(there), exist_ok=True)
        if os.path.isdir(there) and not os.path.islink(there):  # the files of a folder are there, and it is next
            os.rename(os.path.join(saver.folder, path), os.path.join(done.aside, f"{OURS}{secrets.token_hex(6)}"))
        else:
            os.rename(os.path.join(saver.folder, path), there)
    done.moved += len(paths)


def _fetch(saver: FolderSaver, path: str, wanted: Object, arrivals: _Arrivals) -> None:
    """Fetch a small file."""
    import obstore

    got = obstore.get(saver.store, wanted.name)
    data = b"".join(arrivals.of(got))
    if len(data) != got.meta["size"]:
        raise OSError(f"{wanted.name} has {len(data)} of {got.meta['size']} bytes")
    part = _part_of(saver, path)
    try:
        with open(part, "wb") as file:
            file.write(data)
        _finish(saver, path, part, wanted._replace(version=got.meta["e_tag"]), _attributes_of(saver, got, wanted.name))
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)


def _fetch_large(saver: FolderSaver, path: str, wanted: Object, arrivals: _Arrivals) -> None:
    """Fetch a large file in parts, side by side, all of one version. A part that breaks off goes on where it was."""
    import obstore
    from obstore.exceptions import BaseError

    head = obstore.get(saver.store, wanted.name, options={"range": (0, 1)})
    size, version = head.meta["size"], head.meta["e_tag"]
    attributes = _attributes_of(saver, head, wanted.name)
    part = _part_of(saver, path)
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def fetch(at: int) -> None:
        end = min(at + PART, size)
        while at < end:
            began = at
            options: GetOptions = {"range": (at, end)}
            if version is not None:
                options["if_match"] = version
            got = obstore.get(saver.store, wanted.name, options=options)
            try:
                for data in arrivals.of(got):
                    if len(data) > end - at:
                        raise OSError(f"{wanted.name} has more bytes from {began} on than {end - began}")
                    while data:
                        count = os.pwrite(file, data, at)
                        data, at = data[count:], at + count
            except BaseError:
                if at == began:
                    raise
            if at == began:
                raise OSError(f"{wanted.name} has no bytes from {began} on, but should end at {end}")

    try:
        try:
            fetched = [saver.executor.submit(fetch, at) for at in range(0, size, PART)]
            errors = [each.exception() for each in fetched]
        finally:
            os.close(file)  # when no thread writes to it any more, as its number will be that of another file
        if error := next(filter(None, errors), None):
            raise error
        _finish(saver, path, part, wanted._replace(version=version), attributes)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)


def _attributes_of(saver: FolderSaver, got: GetResult, name: str) -> dict[str, str]:
    """Return the attributes of an object; for a file of a folder, those that tell the same."""
    if takes_attributes(saver.store):
        return dict(got.attributes)
    with open(os.path.join(cast(Any, saver.store).prefix, name), "rb") as file:
        return attributes_of(state_of(file.fileno()))


def _part_of(saver: FolderSaver, path: str) -> str:
    """Return the path of a new file beside that of `path`. Its folder is made."""
    folder = os.path.dirname(os.path.join(saver.folder, path))
    os.makedirs(folder, exist_ok=True)
    return os.path.join(folder, f"{OURS}{secrets.token_hex(6)}")


def _finish(saver: FolderSaver, path: str, part: str, wanted: Object, attributes: Mapping[str, str]) -> None:
    """Give a file that has come its name and its time, and note that it is as in the bucket."""
    seconds, _, rest = attributes.get("mtime", "").partition(".")
    if seconds.isdecimal() and rest.isdecimal():
        at = int(seconds) * 10**9 + int(rest[:9].ljust(9, "0"))
        os.utime(part, ns=(at, at))
    os.rename(part, os.path.join(saver.folder, path))
    with open(os.path.join(saver.folder, path), "rb") as file:
        saver.restored(path, state_of(file.fileno()), wanted)
