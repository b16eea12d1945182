"""Which checkpoints of trainers are in a bucket, by its objects and the trainers' own rules. Knows no skypool."""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.soak._bucket_check import Reader

_FOLDERS = {"hf": r"checkpoint-(\d+)/", "dcp": r"step-(\d+)/", "orbax": r"(\d+)/"}
_LAST = {"hf": "trainer_state.json", "dcp": ".metadata", "orbax": "commit_success.txt"}
_ONE_FILE = re.compile(r"epoch=\d+-step=(\d+)(-v\d+)?\.ckpt")
_MARK = re.compile(r"\.skypool/unfinished/([^/]+)/\d+")


def programs_files(reader: Reader) -> list[str]:
    """Return the files that are brought back: without those of checkpoints that are marked as unfinished."""
    names = reader.names()
    torn = {found[1] for each in names if (found := _MARK.fullmatch(each))}
    return [each for each in names if not each.startswith(".skypool/") and each.partition("/")[0] not in torn]


def steps(kind: str, names: list[str]) -> dict[int, list[str]]:
    """Return the files of each checkpoint that a trainer of this kind would find, by its step."""
    if kind == "lightning":
        return {int(found[1]): [each] for each in names if (found := _ONE_FILE.fullmatch(each))}
    there: dict[int, list[str]] = {}
    for each in names:
        if found := re.match(_FOLDERS[kind], each):
            there.setdefault(int(found[1]), []).append(each)
    return there


def global_step(checkpoint: bytes) -> int:
    """Return the step of a checkpoint of Lightning. It is read from the pickle, which is not run."""
    with zipfile.ZipFile(io.BytesIO(checkpoint)) as whole:
        name = next(each for each in whole.namelist() if each.endswith("/data.pkl"))
        words = [(code.name, value) for code, value, _ in pickletools.genops(whole.read(name))]
    at = next(number for number, (_, value) in enumerate(words) if value == "global_step")
    return next(value for code, value in words[at:] if code.startswith("BININT") and isinstance(value, int))


def without_last(kind: str, there: Mapping[int, list[str]]) -> Iterator[str]:
    """Yield what is wrong with checkpoints that lack the file that their trainer writes last."""
    for step, names in there.items():
        if kind in _LAST and not any(each.count("/") == 1 and each.endswith(f"/{_LAST[kind]}") for each in names):
            yield f"the checkpoint of step {step} has no {_LAST[kind]}: {names}"


def fetched(reader: Reader, folder: Path) -> Path:
    """Fetch what is brought back, into a new folder `out` in this one."""
    for name in programs_files(reader):
        path = folder / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(reader.get(name))
    return folder


def said(lines: list[str]) -> tuple[dict[int, float], float | None]:
    """Return the loss of each step that a program has printed, and the final one."""
    found = {int(words[1]): float(words[3]) for each in lines if (words := each.split())[:1] == ["step"]}
    final = [float(each.split()[1]) for each in lines if each.startswith("final ")]
    return found, final[-1] if final else None


def differences(mine: Mapping[int, float], alone: Mapping[int, float]) -> list[Any]:
    """Return the steps whose loss is not that of a training that nothing has interrupted."""
    return [
        (step, loss, alone.get(step))
        for step, loss in mine.items()
        if step not in alone or abs(loss - alone[step]) > 1e-6 * max(1, abs(alone[step]))
    ]
