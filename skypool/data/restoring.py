"""Brings a folder back from a bucket before a program begins: its files as they were saved last."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from skypool.data.checkpoint_saver import OBJECTS
from skypool.data.fetching import Fetcher, above, check_room, is_plain
from skypool.data.folder_saver import OF_A_NODE, UNFINISHED, FolderSaver, Object
from skypool.data.local_files import OURS, OWN, aside_of, listed

_NAMED = 20
"""The most names in one account."""


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


def restore(saver: FolderSaver, done: Restored | None = None) -> Restored:
    """Make the folder of a saver as the bucket has it. What the bucket does not have is moved aside.

    If the bucket has nothing, the folder stays as it is. After an error, this can be done again. `done` is filled while
    files come, and returned.

    Raises:
        UsageError: the disk has no room for it.
        obstore.exceptions.BaseError, OSError: a file could not be fetched or written.
    """
    done = Restored() if done is None else done
    wanted = _wanted(saver, done)
    os.makedirs(saver.folder, exist_ok=True)
    if not wanted:
        return done
    here = listed(saver.folder).files
    same = {path for path, each in wanted.items() if saver.has(path, each, here.get(path))}
    _move_aside(saver, (here.keys() - same) | in_the_way(saver.folder, wanted), done)

    def came(count: int) -> None:
        done.received += count

    def arrived(each: Object) -> None:
        done.files, done.bytes = done.files + 1, done.bytes + each.size

    missing = {path: each for path, each in wanted.items() if path not in same}
    check_room(saver.folder, missing.values())
    fetcher = Fetcher(saver.store, saver.folder, saver.executor, saver.restored, came=came)
    fetcher.fetch(missing, arrived)
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
        if parts := above([path]) & unfinished:
            torn |= parts
            del found[path]
        elif not is_plain(path):
            del found[path]
            done.refused[path] = "no file can have this name"
    for path in above(found) & found.keys():  # a mark for a folder as many programs make it, or a file that became one
        if found.pop(path).size:
            done.refused[path] = "a folder has its name"
    done.unfinished = sorted(torn)[:_NAMED]
    done.refused = dict(sorted(done.refused.items())[:_NAMED])
    return found


def in_the_way(folder: str, wanted: Collection[str]) -> set[str]:
    """Return what is here in the place of folders of wanted files, and folders that are in the place of a file."""
    parents = above(wanted)
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
    if paths:
        done.aside = aside_of(saver.folder)
        move_aside(saver.folder, paths, done.aside)
        done.moved += len(paths)


def move_aside(folder: str, paths: Iterable[str], aside: str) -> None:
    """Move files and folders out of a folder to a new one."""
    for path in sorted(paths, reverse=True):  # what is in a folder before the folder
        there = os.path.join(aside, path)
        os.makedirs(os.path.dirname(there), exist_ok=True)
        if os.path.isdir(there) and not os.path.islink(there):  # the files of a folder are there, and it is next
            os.rename(os.path.join(folder, path), os.path.join(aside, f"{OURS}{secrets.token_hex(6)}"))
        else:
            os.rename(os.path.join(folder, path), there)
