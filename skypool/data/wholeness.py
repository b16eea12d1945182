"""Knows which folders are checkpoints of several files, and when such a folder is whole."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import filterfalse
from typing import NamedTuple

_NUMBERED = re.compile(r"(checkpoint|ckpt|step|global_step|epoch|iter|iteration|model)s?[-_=.]?\d+", re.IGNORECASE)
"""Matches the names that programs give to folders of checkpoints."""
_TEMPORARY = re.compile(r"(^|/)[^/]*(\.orbax-checkpoint-tmp|tmp-checkpoint-\d)[^/]*/")
"""Matches what is in a folder that gets its name when it is whole: one of orbax, or of old versions of Trainer."""
_TRAINER = "training_args.bin"
"""A file that only Hugging Face's Trainer writes."""
_TRAINER_LAST = "trainer_state.json"
"""The last file of its checkpoints."""
_SHARD = ".distcp"
"""The end of the names of files of torch.distributed.checkpoint."""
SHARDS_LAST = ".metadata"
"""The file that it writes last. It names the others."""
_LIGHTNING = ".ckpt"
"""The end of the name of a folder of shards that Lightning writes."""
_LIGHTNING_LAST = "meta.pt"
"""The file that it adds at the end."""
_ORBAX = "_CHECKPOINT_METADATA"
"""A file that only orbax writes: last, before its version 0.12."""
_ORBAX_LAST = "commit_success.txt"
"""The file that it writes last from then on."""

_LOG = re.compile(r"(\.log|\.out|\.err|\.jsonl)$|(^|\.)tfevents\.")
"""Matches the names of files to which programs write for as long as they run."""
_SHARD_NAMES = re.compile(rb"__\d+_\d+\.distcp")


class Checkpoint(NamedTuple):
    """A folder of a checkpoint.

    Attributes:
        paths: its files, and those in folders below it.
        last: the file that its program writes last; "" if that is not known.
    """

    paths: list[str]
    last: str


def is_log(path: str) -> bool:
    """Return True if a file is no part of a checkpoint, whose folder it may be in."""
    return _LOG.search(path.rpartition("/")[2]) is not None


def shards(path: str, data: bytes) -> set[str]:
    """Return the files that torch.distributed.checkpoint has written according to its last file.

    Args:
        path: of this file, whose name is `SHARDS_LAST`.
        data: what it contains.
    """
    folder = path.rpartition("/")[0]
    return {f"{folder}/{each.decode()}".lstrip("/") for each in _SHARD_NAMES.findall(data)}


def is_temporary(path: str) -> bool:
    """Return True if a file is in a folder that its program renames when it is whole."""
    return _TEMPORARY.search(path) is not None


def checkpoints(paths: Collection[str], patterns: Sequence[str] = ()) -> dict[str, Checkpoint]:
    """Return the checkpoints among files, by their folders.

    Args:
        paths: all files below the folder that is saved.
        patterns: what is written last into a checkpoint, as paths with `*`, such as "step-*/done".
    """
    marks = {path.rpartition("/")[0]: path for path in paths if any(fnmatchcase(path, each) for each in patterns)}
    folders = {each for each in map(_folder_of, paths) if each} | {each for each in marks if each}
    found: dict[str, list[str]] = {}
    for path in filterfalse(is_log, paths):
        folder = next((each for each in _above(path) if each in folders), None)
        if folder is not None:
            found.setdefault(folder, []).append(path)
    return {
        folder: Checkpoint(inside, marks.get(folder) or _last(folder, inside, patterns))
        for folder, inside in found.items()
    }


def _above(path: str) -> Iterable[str]:
    """Yield the folders that a file is in, the outermost first."""
    at = path.find("/")
    while at >= 0:
        yield path[:at]
        at = path.find("/", at + 1)


def _folder_of(path: str) -> str:
    """Return the folder of a checkpoint that a file shows to be one; "" for none."""
    for each in _above(path):
        if _NUMBERED.fullmatch(each.rpartition("/")[2]):
            return each
    folder, _, name = path.rpartition("/")
    return folder if name == _ORBAX or name.endswith(_SHARD) else ""


def _last(folder: str, inside: Sequence[str], patterns: Sequence[str]) -> str:
    """Return the file that a program writes last into a folder with these files; "" if that is not known."""
    for each in patterns:
        parent, _, name = each.rpartition("/")
        if parent and "*" not in name and fnmatchcase(folder, parent):
            return f"{folder}/{name}"
    names = {path.rpartition("/")[2] for path in inside if path.rpartition("/")[0] == folder}
    if names & {_TRAINER, _TRAINER_LAST}:
        return f"{folder}/{_TRAINER_LAST}"
    if _ORBAX in names:
        return f"{folder}/{_ORBAX_LAST if _ORBAX_LAST in names else _ORBAX}"
    if _LIGHTNING_LAST in names and SHARDS_LAST in names:
        return f"{folder}/{_LIGHTNING_LAST}"
    if SHARDS_LAST in names and folder.endswith(_LIGHTNING):
        return ""  # the last one may still come
    if any(name.endswith(_SHARD) for name in names):
        return f"{folder}/{SHARDS_LAST}"
    return ""
