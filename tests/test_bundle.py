"""The zip for nodes is made once, and made again whenever one of its files has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

SHOW = "from skypool.shipping import package_zip; b = package_zip.bundle(); print(b.hash, b.size)"
UNREAD = f"from skypool.shipping import package_zip; package_zip._made = None; {SHOW}"
"""Fails if the files have to be read."""


class Installed:
    """A copy of what goes into the zip, and a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.cache = folder / "cache"
        for package in ("cloudpickle", "skypool", "skypool_images"):
            spec = find_spec(package)
            assert spec is not None
            assert spec.submodule_search_locations
            source = spec.submodule_search_locations[0]
            shutil.copytree(source, self.site / package, ignore=shutil.ignore_patterns("__pycache__"))
        for driver in Path(__file__).parent.parent.glob("providers/skypool_*"):
            shutil.copytree(driver, self.site / driver.name, ignore=shutil.ignore_patterns("__pycache__"))

    def run(self, code: str = SHOW) -> str:
        env = {**os.environ, "PYTHONPATH": str(self.site), "XDG_CACHE_HOME": str(self.cache), "HOME": str(self.cache)}
        done = subprocess.run(
            [sys.executable, "-B", "-c", code], env=env, capture_output=True, text=True, cwd=self.site
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def record(self) -> Path:
        (found,) = self.cache.rglob("bundle-of-*.json")
        return found


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    made = Installed(tmp_path)
    made.run()
    return made


def test_a_later_process_reads_no_file_that_has_not_changed(installed: Installed) -> None:
    assert installed.run(UNREAD) == installed.run()


def edited(site: Path) -> None:
    """Of the same size, and with the old time of change."""
    file = site / "skypool" / "clock.py"
    about = file.stat()
    file.write_text(file.read_text().replace("a", "b", 1))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert file.stat().st_size == about.st_size


def added(site: Path) -> None:
    (site / "skypool_local" / "more.py").write_text("")


def removed(site: Path) -> None:
    (site / "skypool" / "testing" / "contract_slices.py").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("change", [edited, added, removed])
def test_a_change_of_a_file_makes_another_zip(installed: Installed, change: Callable[[Path], None]) -> None:
    before = installed.run()
    change(installed.site)
    after = installed.run()
    assert after != before
    assert installed.run(UNREAD) == after


def test_a_damaged_record_is_made_again(installed: Installed) -> None:
    before = installed.run()
    for text in ("", "null", "[]", "{}", '["skypool"]', "[1, 2, 3]", '[["nothing_of_this_name"], "", ""]'):
        installed.record.write_text(text)
        assert installed.run() == before, text
        assert installed.run(UNREAD) == before, text


@pytest.mark.slow
def test_a_zip_that_was_deleted_is_made_again(installed: Installed) -> None:
    before = installed.run()
    (zip_,) = installed.cache.rglob("bundle-*.zip")
    zip_.unlink()
    assert installed.run() == before


@pytest.mark.slow
def test_the_cache_keeps_a_few_zips_and_nothing_unfinished(installed: Installed) -> None:
    installed.run()
    folder = installed.record.parent
    for number in range(20):
        for name in (f"bundle-{number:016}.zip", f"tmp{number}"):
            (folder / name).touch()
            os.utime(folder / name, (number, number))
    (folder / "tmpnew").touch()  # another process may be writing it
    (installed.site / "skypool/errors.py").open("a").write("# changed\n")
    after = installed.run()
    kept = {each.name for each in folder.iterdir()}
    assert len([each for each in kept if each.endswith(".zip")]) == 16
    assert {each for each in kept if each.startswith("tmp")} == {"tmpnew"}
    assert installed.run(UNREAD) == after


def test_a_cache_that_cannot_be_written_does_no_harm(installed: Installed) -> None:
    before = installed.run()
    shutil.rmtree(installed.cache)
    installed.cache.write_text("a file, not a folder")
    assert installed.run() == before
