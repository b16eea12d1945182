"""What the agent keeps for its workers."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest

from skypool.agent.store import Store
from skypool.agent.value_storage import SpareMemory
from skypool.errors import ProtocolError
from skypool.wire.frames import Frame, Kind, encode, parse_frame

SOURCE = b"x = 1\n" * 50_000
HASH = hashlib.sha256(SOURCE).hexdigest()[:16]


def store(folder: Path) -> Store:
    nobody: Any = None
    return Store(str(folder), nobody, nobody, lambda kind, header: None, SpareMemory())


def module(source: bytes, hash_: str = HASH) -> Frame:
    head = {"name": "mine", "found": True, "package": False, "file": "mine.py", "hash": hash_}
    return parse_frame(memoryview(encode(Kind.MODULE, head, len(source)) + source))


def test_a_module_that_comes_again_is_whole_for_whoever_reads_it_just_then(tmp_path: Path) -> None:
    kept, file = store(tmp_path), tmp_path / "modules" / HASH / "mine.py"
    kept.on_module(module(SOURCE))
    first = file.stat().st_ino
    seen: set[int] = set()
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.add(len(file.read_bytes()))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(300):
        kept.on_module(module(SOURCE))
    over.set()
    reader.join()
    assert seen == {len(SOURCE)}
    assert file.stat().st_ino == first
    assert [path.name for path in file.parent.iterdir()] == ["mine.py"]


def test_a_module_that_is_not_what_its_hash_says_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="module mine with source that does not match the module's hash"):
        store(tmp_path).on_module(module(SOURCE[:-1]))
