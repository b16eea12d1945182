"""What the agent keeps for its workers and their children."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skypool.agent.packages import Packages
from skypool.errors import ProtocolError
from skypool.wire.frames import Frame, Kind, encode, parse_frame

SOURCE = b"x = 1\n" * 50_000
VERSION = "0123456789abcdef"


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.fixture
def asked() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def packages(tmp_path: Path, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("skypool.agent.packages._SHARE", math.inf)  # all at once, however busy this machine is
    kept = Packages(str(tmp_path), lambda _kind, header: asked.append(dict(header)), lambda *_: None)
    yield kept
    if kept._listener is not None:
        kept._listener.close()


def answer(files: dict[str, bytes], inline: int, path: str = "", *more: str, **changes: Any) -> Frame:
    """What the client says about a package, or files of it."""
    head: dict[str, Any]
    if path:
        head = {"name": "mine", "hash": VERSION, "file": path, "files": [path, *more]}
        body = b"".join(files[each] for each in head["files"])
    else:
        listing = [(name, hash_of(data), len(data)) for name, data in files.items()]
        head = {"name": "mine", "version": "", "found": True, "hash": VERSION, "inline": inline, "left_out": []}
        body = json.dumps(listing).encode() + b"\n" + b"".join(list(files.values())[:inline])
    return parse_frame(memoryview(encode(Kind.MODULE, {**head, **changes}, len(body)) + body))


def test_a_package_comes_whole_with_its_large_files_one_after_the_other(
    packages: Packages, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    files = {"mine/__init__.py": b"", "mine/a.py": SOURCE, "mine/large.bin": SOURCE[1:], "mine/larger.bin": SOURCE[2:]}
    told: list[dict[str, Any]] = []
    packages.want("mine", "", told.append)
    packages.on_module(answer(files, 2))
    for path in ("mine/large.bin", "mine/larger.bin"):
        assert told == []
        assert asked[-1] == {"name": "mine", "version": VERSION, "file": path}
        packages.on_module(answer(files, 2, path))
    folder = tmp_path / "modules" / VERSION
    assert told == [{"found": True, "folder": str(folder), "hash": VERSION, "left_out": []}]
    assert {str(each.relative_to(folder)): each.read_bytes() for each in folder.glob("mine/*")} == files
    assert {oct(each.stat().st_mode & 0o777) for each in (folder, folder / "mine")} == {"0o700"}


def test_a_package_with_many_files_is_written_in_shares(
    packages: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the agent answers its client meanwhile."""
    monkeypatch.setattr("skypool.agent.packages._SHARE", 0.0)
    files = {f"mine/m{number}.py": b"x = %d" % number for number in range(50)}
    told: list[dict[str, Any]] = []
    packages.want("mine", "", told.append)
    packages.on_module(answer(files, 50))
    shares = 1
    while packages.is_behind:
        assert told == []
        packages.proceed()
        shares += 1
    assert shares == 51  # another file has the names of those that were left out
    folder = tmp_path / "modules" / VERSION
    assert [each["folder"] for each in told] == [str(folder)]
    assert {str(each.relative_to(folder)): each.read_bytes() for each in folder.glob("mine/*")} == files


def test_files_that_were_missing_come_together(packages: Packages, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    files = {"mine/__init__.py": b"", "mine/a": SOURCE, "mine/b": b"", "mine/c": SOURCE[1:], "mine/d": SOURCE[2:]}
    told: list[dict[str, Any]] = []
    packages.want("mine", "", told.append)
    packages.on_module(answer(files, 1))
    packages.on_module(answer(files, 1, "mine/a", "mine/b", "mine/c"))
    packages.on_module(answer(files, 1, "mine/a", "mine/b", "mine/c"))  # once more, as after a reconnection
    packages.on_module(answer(files, 1, "mine/d"))
    assert [each["file"] for each in asked] == ["", "mine/a", "mine/d"]
    folder = tmp_path / "modules" / VERSION
    assert [each["folder"] for each in told] == [str(folder)]
    assert {str(each.relative_to(folder)): each.read_bytes() for each in folder.glob("mine/*")} == files


def test_a_package_under_two_names_of_its_version_is_stored_once(
    packages: Packages, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    files = {"mine/__init__.py": b"", "mine/large.bin": SOURCE, "mine/larger.bin": SOURCE[1:]}
    told: list[dict[str, Any]] = []
    packages.want("mine", "", told.append)
    packages.want("mine", VERSION, told.append)
    packages.on_module(answer(files, 1))
    packages.on_module(answer(files, 1, "mine/large.bin"))
    packages.on_module(answer(files, 1, version=VERSION))
    packages.on_module(answer(files, 1, "mine/larger.bin"))
    folder = tmp_path / "modules" / VERSION
    assert [each["folder"] for each in told] == [str(folder)] * 2
    assert [each["file"] for each in asked if each["file"]] == ["mine/large.bin", "mine/larger.bin"]
    assert {str(each.relative_to(folder)): each.read_bytes() for each in folder.glob("mine/*")} == files


def test_a_package_that_is_here_is_not_asked_for_again(packages: Packages, asked: list[dict[str, Any]]) -> None:
    told: list[dict[str, Any]] = []
    packages.want("mine", "", told.append)
    packages.want("mine", "", told.append)
    packages.on_module(answer({"mine.py": SOURCE}, 1))
    packages.want("mine", VERSION, told.append)
    assert len(asked) == 1
    assert [each["hash"] for each in told] == [VERSION] * 3


def test_the_client_is_told_which_versions_are_here_and_sends_no_files_of_these(
    packages: Packages, asked: list[dict[str, Any]]
) -> None:
    told: list[dict[str, Any]] = []
    packages.want("mine", "", told.append)
    packages.on_module(answer({"mine.py": SOURCE}, 1))
    packages.want("mine", "", told.append)
    assert [each["has"] for each in asked] == [[], [VERSION]]
    packages.on_module(answer({}, 0))
    assert [each["folder"] for each in told] == [told[0]["folder"]] * 2
    assert Path(told[0]["folder"], "mine.py").read_bytes() == SOURCE


def test_a_package_that_comes_again_is_whole_for_whoever_reads_it_just_then(packages: Packages, tmp_path: Path) -> None:
    packages.on_module(answer({"mine.py": SOURCE}, 1))
    file = tmp_path / "modules" / VERSION / "mine.py"
    first = file.stat().st_ino
    seen: set[int] = set()
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.add(len(file.read_bytes()))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(100):
        packages.on_module(answer({"mine.py": SOURCE}, 1))
    over.set()
    reader.join()
    assert seen == {len(SOURCE)}
    assert file.stat().st_ino == first


@pytest.mark.parametrize(
    ("files", "changes"),
    [
        ({"mine.py": b"x"}, {"hash": "../../x"}),
        ({"/tmp/mine.py": b"x"}, {}),
        ({"../mine.py": b"x"}, {}),
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(
    packages: Packages, files: dict[str, bytes], changes: dict[str, str]
) -> None:
    with pytest.raises(ProtocolError, match=r"does not match its hash|no hash"):
        packages.on_module(answer(files, 1, **changes))


def test_a_file_that_is_not_what_its_hash_says_is_refused(packages: Packages) -> None:
    good = answer({"mine.py": SOURCE}, 1)
    bad = good._replace(body=memoryview(bytes(good.body)[:-1] + b"?"))
    with pytest.raises(ProtocolError, match="does not match its hash"):
        packages.on_module(bad)


def test_a_disk_without_room_is_told_to_who_waits(packages: Packages, tmp_path: Path) -> None:
    (tmp_path / "modules").write_text("a file where the folder should be")
    told: list[dict[str, Any]] = []
    packages.want("mine", "", told.append)
    packages.on_module(answer({"mine.py": SOURCE}, 1))
    assert told[0]["found"] is False
    assert told[0]["why"].startswith("full ")


def test_the_socket_for_children_is_this_users_only(packages: Packages, tmp_path: Path) -> None:
    assert os.stat(tmp_path / "modules.sock").st_mode & 0o777 == 0o600
    assert os.stat(tmp_path / "children").st_mode & 0o777 == 0o700
