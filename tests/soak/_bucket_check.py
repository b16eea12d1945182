"""What a bucket with checkpoints must be like, by its objects and the answers that programs had. Knows no skypool."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tests.lab.checkpoint_contents import about, files_of

KEEP = 3
_COMMIT = re.compile(r"step-(\d+)/attempt-(\d{6})/COMMIT")
Line = Mapping[str, Any]


class Key(NamedTuple):
    """A checkpoint. They are ordered from old to new."""

    attempt: int
    step: int


class Reader:
    """Reads the objects below a prefix of the bucket "models", with a client of boto3."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client, self._prefix = client, prefix

    def names(self, below: str = "") -> list[str]:
        return [*self.tags(below)]

    def tags(self, below: str = "") -> dict[str, str]:
        """Return the entity tag of each object."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket="models", Prefix=f"{self._prefix}{below}")
        listed = [each for page in pages for each in page.get("Contents", ())]
        return {each["Key"].removeprefix(self._prefix): each["ETag"] for each in listed}

    def get(self, name: str) -> bytes:
        data: bytes = self._client.get_object(Bucket="models", Key=f"{self._prefix}{name}")["Body"].read()
        return data

    def unfinished(self) -> list[str]:
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket="models", Prefix=self._prefix)
        return [each["Key"] for page in pages for each in page.get("Uploads", ())]


def commits(reader: Reader) -> dict[Key, dict[str, Any]]:
    """Return the content of each COMMIT."""
    found = (_COMMIT.fullmatch(each) for each in reader.names("step-"))
    return {Key(int(each[2]), int(each[1])): json.loads(reader.get(each[0])) for each in found if each}


def wholeness(reader: Reader, world: int, seen: dict[Key, str]) -> Iterator[str]:
    """Yield what is wrong with the checkpoints that have a COMMIT.

    Args:
        seen: gets the start of the program that has written each of them.
    """
    for key, said in commits(reader).items():
        where = f"step-{key.step}/attempt-{key.attempt:06}"
        if said["world"] != world or sorted(map(int, said["files"])) != [*range(world)]:
            yield f"{where} has {said['world']} ranks: {sorted(said['files'])}"
            continue
        starts = set[str]()
        for rank in range(world):
            listed = said["files"][str(rank)]
            found = {name: reader.get(f"{where}/rank-{rank}/{name}") for name in listed}
            for name, data in found.items():
                if [len(data), hashlib.sha256(data).hexdigest()] != listed[name]:
                    yield f"{where}: {name} of rank {rank} is not as its COMMIT says"
            start = str(json.loads(found[about(rank)])["start"])
            starts.add(start)
            if found != files_of(start, key.step, rank, world):
                yield f"{where}: rank {rank} has other files than it has written"
        if len(starts) != 1:
            yield f"{where} is of several starts: {starts}"
        seen[key] = starts.pop()


def answers(lines: Sequence[Line], world: int) -> Iterator[str]:
    """Yield what is wrong with what programs were told."""
    latest, safe = defaultdict[str, list[Line]](list), list[Line]()
    for each in lines:
        if each["what"] == "latest":
            latest[each["start"]].append(each)
            if each["wrong"]:
                yield f"latest: {each['wrong']}"
        elif each["what"] == "safe":
            safe.append(each)
    firsts = {start: min(found, key=lambda each: float(each["t0"])) for start, found in latest.items()}
    for start, found in latest.items():
        if len({(each["step"], each["by"]) for each in found}) != 1:
            yield f"{start} has had several answers: { {(each['rank'], each['step'], each['by']) for each in found} }"
        first = firsts[start]
        earlier = {each for each, line in firsts.items() if line["t1"] <= first["t0"]}  # whatever these are told later
        before = [each for each in safe if each["t1"] <= first["t0"] or each["start"] in earlier]
        newest = max((each for each in before if each["step"] is not None), key=lambda each: each["step"], default=None)
        if newest is not None and (first["step"] is None or first["step"] < newest["step"]):
            yield f"{start} goes on from {first['step']}, and {newest['step']} was safe before: {newest}"
    yield from _order(safe)


def _order(safe: Sequence[Line]) -> Iterator[str]:
    """Yield where a rank was told that less is safe than before."""
    told: dict[tuple[str, int], int] = {}
    for each in sorted(safe, key=lambda line: float(line["t1"])):
        key = (each["start"], each["rank"])
        now = -1 if each["step"] is None else int(each["step"])
        if now < told.get(key, -1):
            yield f"rank {each['rank']} of {each['start']} was told {told[key]}, and then {now}"
        told[key] = max(now, told.get(key, -1))


def end(reader: Reader, lines: Sequence[Line], last: int, starts: Mapping[Key, str]) -> Iterator[str]:
    """Yield what is wrong at the end, when the checkpoint of a step was awaited by all ranks."""
    there = sorted(starts)
    if not there or there[-1].step != last:
        yield f"the newest checkpoint is not of step {last}: {there}"
        return
    newest = there[-1].attempt
    safe = [each for each in lines if each["what"] == "safe" and each["step"] is not None]
    for each in safe:
        if each["step"] > last:
            yield f"{each['step']} was safe, and {last} is the newest"
    own = [key for key in there if key.attempt == newest]
    known = {each["step"] for each in safe if each["start"] == starts[there[-1]]} | {last}
    if len(there) < min(KEEP, len(known)):
        yield f"only {there} were kept"
    if len(own) > KEEP:
        yield f"too many were kept: {there}"
    if left := reader.unfinished():
        yield f"unfinished uploads are left: {left}"
