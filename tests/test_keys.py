"""`keys`: made once, readable by this user alone, the same for every process."""

from __future__ import annotations

import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skypool.errors import UsageError
from skypool.wire.keys import Keys

pytestmark = pytest.mark.needs("openssh")


def test_a_key_opens_what_its_public_part_locks(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "train" / "keys")
    told = subprocess.run(["ssh-keygen", "-y", "-f", keys.identity], capture_output=True, text=True, check=True).stdout
    assert told.split()[:2] == keys.public.split()[:2]
    assert keys.public.startswith("ssh-ed25519 ")


def test_each_label_has_a_host_key_of_its_own_that_stays_the_same(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    private, public = keys.host("a1-0-1")
    assert keys.host("a1-0-1") == Keys(tmp_path / "keys").host("a1-0-1") == (private, public)
    assert keys.host("a1-2") != (private, public)
    assert "OPENSSH PRIVATE KEY" in private
    assert "PRIVATE" not in public


def test_nobody_else_may_read_them(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    assert stat.S_IMODE(Path(keys.identity).stat().st_mode) == 0o600
    assert stat.S_IMODE(keys.folder.stat().st_mode) == 0o700


def test_those_who_ask_at_once_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        seen = set(threads.map(lambda _: Keys(tmp_path / "keys").public, range(16)))
    assert len(seen) == 1


def test_a_process_killed_while_it_made_one_hinders_nobody(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    keys.folder.mkdir()
    (keys.folder / "new-client").write_text("half a k")
    assert "OPENSSH PRIVATE KEY" in Path(keys.identity).read_text()


def test_forgotten_ones_are_gone(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    assert Path(keys.identity).exists()
    keys.forget()
    assert not keys.folder.exists()
    keys.forget()  # quiet for the gone


def test_without_openssh_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="install openssh-client"):
        _ = Keys(tmp_path / "keys").identity
