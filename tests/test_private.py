"""Folders and files that only this user can change: which ones are made, which are used, and which are refused."""

from __future__ import annotations

import json
import os
import pickle
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from skypool.errors import NotPrivate, UsageError
from skypool.safety import private, user_folders
from skypool.shipping import package_zip
from tests.second_user import OTHER, needs_root, open_place, other


@pytest.fixture
def tmp() -> Iterator[Path]:
    with open_place() as place:
        yield place


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_a_folder_is_made_with_all_above_it_for_this_user_alone(tmp: Path) -> None:
    old = os.umask(0)
    try:
        made = private.folder(tmp / "a" / "b" / "c")
    finally:
        os.umask(old)
    assert [mode(each) for each in (made, made.parent, made.parent.parent)] == [0o700] * 3
    assert private.folder(made) == made


def test_a_folder_that_others_can_read_is_closed_to_them(tmp: Path) -> None:
    (tmp / "a").mkdir()
    (tmp / "a").chmod(0o755)
    private.folder(tmp / "a")
    assert mode(tmp / "a") == 0o700


def test_a_folder_that_others_can_read_is_refused_where_nothing_is_mended(tmp: Path) -> None:
    (tmp / "a").mkdir()
    (tmp / "a").chmod(0o755)
    with pytest.raises(NotPrivate, match=r"mode 0755.*chmod go-rwx"):
        private.folder(tmp / "a", mend=False)
    assert mode(tmp / "a") == 0o755


@pytest.mark.parametrize("bits", [0o777, 0o1777, 0o702, 0o733])
def test_a_folder_that_others_can_change_is_refused_and_left_alone(tmp: Path, bits: int) -> None:
    (tmp / "a").mkdir()
    (tmp / "a").chmod(bits)
    with pytest.raises(NotPrivate) as raised:
        private.folder(tmp / "a", "set HERE to a folder of your own")
    assert f"{tmp}/a (owner you, mode {bits:04o})" in str(raised.value)
    assert "set HERE to a folder of your own" in str(raised.value)
    assert (raised.value.path, raised.value.owner, raised.value.mode) == (f"{tmp}/a", os.geteuid(), bits)
    assert mode(tmp / "a") == bits


def test_the_error_survives_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(NotPrivate("why", path="/a", owner=3, mode=0o777)))
    assert (str(error), error.path, error.owner, error.mode) == ("why", "/a", 3, 0o777)
    assert isinstance(error, PermissionError)


def test_a_link_at_the_end_is_not_followed_even_if_it_is_ours(tmp: Path) -> None:
    (tmp / "there").mkdir(mode=0o755)
    (tmp / "link").symlink_to(tmp / "there")
    with pytest.raises(NotPrivate, match="symbolic link"):
        private.folder(tmp / "link")
    assert mode(tmp / "there") == 0o755


def test_links_of_this_user_on_the_way_are_followed(tmp: Path) -> None:
    private.folder(tmp / "disk" / "cache")
    (tmp / "disk" / "up").symlink_to("../disk/./cache")
    (tmp / "cache").symlink_to(tmp / "disk" / "up")
    private.folder(tmp / "cache" / "skypool")
    assert (tmp / "disk" / "cache" / "skypool").is_dir()


def test_links_that_lead_nowhere_end(tmp: Path) -> None:
    (tmp / "a").symlink_to("b")
    (tmp / "b").symlink_to("a")
    with pytest.raises(NotPrivate):
        private.folder(tmp / "a" / "skypool")


def test_a_folder_below_one_that_others_can_change_is_refused_unless_it_is_sticky(tmp: Path) -> None:
    (tmp / "open").mkdir()
    (tmp / "open").chmod(0o777)
    with pytest.raises(NotPrivate, match="could replace"):
        private.folder(tmp / "open" / "a")
    assert not (tmp / "open" / "a").exists()
    (tmp / "open").chmod(0o1777)
    private.folder(tmp / "open" / "a")


def test_a_relative_path_is_looked_at_from_the_root(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp / "open").mkdir()
    (tmp / "open").chmod(0o777)
    monkeypatch.chdir(tmp / "open")
    with pytest.raises(NotPrivate, match="could replace"):
        private.folder("a")
    (tmp / "open").chmod(0o755)
    private.folder("../b")
    assert mode(tmp / "b") == 0o700


def test_a_file_in_the_place_of_a_folder_is_refused(tmp: Path) -> None:
    (tmp / "a").write_text("")
    with pytest.raises(NotADirectoryError):
        private.folder(tmp / "a")


def test_a_folder_that_does_not_exist_is_not_made_by_a_check(tmp: Path) -> None:
    with pytest.raises(FileNotFoundError):
        private.check(tmp / "a" / "b")
    assert not (tmp / "a").exists()


def test_a_file_is_opened_for_this_user_alone(tmp: Path) -> None:
    place = private.folder(tmp / "a")
    old = os.umask(0)
    try:
        os.close(private.opened(place / "f", os.O_CREAT | os.O_WRONLY))
    finally:
        os.umask(old)
    assert mode(place / "f") == 0o600
    assert private.read(place / "f") == b""


@pytest.mark.parametrize("what", ["link", "pipe", "open"])
def test_what_is_no_file_of_this_user_alone_is_not_opened(tmp: Path, what: str) -> None:
    place = private.folder(tmp / "a") / "f"
    if what == "link":
        (tmp / "there").write_text("")
        place.symlink_to(tmp / "there")
    elif what == "pipe":
        os.mkfifo(place)
    else:
        place.write_text("")
        place.chmod(0o666)
    for use in (private.read, private.check_file):
        with pytest.raises(NotPrivate):
            use(place)


@needs_root
@pytest.mark.parametrize("what", ["folder", "link", "above", "file"])
def test_what_another_user_has_made_is_refused(tmp: Path, what: str) -> None:
    mine = private.folder(tmp / "mine")
    made = {
        "folder": "os.mkdir('a', 0o700)",
        "link": f"os.symlink({str(mine)!r}, 'a')",
        "above": "os.mkdir('a', 0o755); os.mkdir('a/b', 0o755)",
        "file": "open('a', 'w')",
    }
    other(f"import os, sys; os.chdir(sys.argv[1]); {made[what]}", tmp)
    path = tmp / "a" / "b" / "c" if what == "above" else tmp / "a" / "b" if what == "link" else tmp / "a"
    with pytest.raises(NotPrivate, match=f"{OTHER}"):
        private.read(path) if what == "file" else private.folder(path)
    assert list(mine.iterdir()) == []


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME")
    for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    for folder in (user_folders.state, user_folders.cache):
        with pytest.raises(UsageError, match="set HOME, or XDG_STATE_HOME and XDG_CACHE_HOME"):
            folder()


def test_the_folders_above_that_of_a_node_are_private_too(tmp_path: Path) -> None:
    """A node that ends removes the folder of all nodes if it is the last, and another one may begin just then."""
    folders = {name: str(tmp_path / "user" / "pools" / name) for name in ("folder", "spool", "cwd")}
    prelude = json.dumps({"config": folders, "start": True, "hash": "x", "python": [2, 7], "size": 0}).encode()
    done = subprocess.run(
        ["sh", "-c", package_zip.program(package_zip.LOADER, sys.executable, "")],
        input=b"%8d%s" % (len(prelude), prelude),
        umask=0o022,
        timeout=30,
    )
    assert done.returncode == 4  # another version of Python
    assert {mode(each) for each in (tmp_path / "user").rglob("*")} == {0o700}
    assert mode(tmp_path / "user") == 0o700
