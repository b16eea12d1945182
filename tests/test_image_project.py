"""An image with a project has its files and packages on the nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import skypool as sky
from skypool.errors import UsageError
from skypool.provision.image_project import sent_project
from skypool.testing import FakeCloud, Stock
from skypool_images import Image, ImageError
from skypool_images.sent_project import SentProject
from tests.lab.work import files_here, imported, link_here, words_of
from tests.test_project import put

TABLE = '[project]\nname = "mine"\nversion = "1"\n'
BUILT = '[build-system]\nrequires = ["setuptools>=64"]\nbuild-backend = "setuptools.build_meta"\n'
PATH_SOURCE = "[tool.uv.sources]\nlib = { path = 'libs/lib'@ }\n"
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


def looked_at(root: Path, path: str = ".") -> SentProject:
    found = sent_project(Image(folder=root, project=path))
    assert found is not None
    return found


def rehearsal(folder: Path) -> FakeCloud:
    return FakeCloud(folder / "cloud", [Stock()])


# --- what is found -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "install", "packages", "only_uv"),
    [
        ({"uv.lock": "version = 1\n", "pyproject.toml": TABLE}, ["sync", "--frozen"], (), "uv.lock"),
        (
            {"uv.lock": "version = 1\n", "pyproject.toml": f"{TABLE}[tool.uv.workspace]\nmembers = ['a']\n"},
            ["sync", "--frozen", "--all-packages"],
            (),
            "uv.lock",
        ),
        ({"pyproject.toml": f"{TABLE}dependencies = ['six', 'idna>=3']\n"}, [], ("six", "idna>=3"), ""),
        ({"pyproject.toml": TABLE + BUILT}, ["pip", "install", "-e", "."], (), ""),
        (
            {"pyproject.toml": f"{TABLE}dependencies = ['lib']\n{PATH_SOURCE.replace('@', '')}", "libs/lib/lib.py": ""},
            ["pip", "install", "-r", "pyproject.toml"],
            (),
            "[tool.uv] sources",
        ),
        ({"requirements.txt": "six\n"}, ["pip", "install", "-r", "requirements.txt"], (), ""),
        (
            {"requirements.txt": "six\n", "setup.py": ""},
            ["pip", "install", "-r", "requirements.txt", "-e", "."],
            (),
            "",
        ),
        ({"setup.py": ""}, ["pip", "install", "-e", "."], (), ""),
        ({"train.py": ""}, [], (), ""),
    ],
    ids=["lock", "workspace", "no build", "build", "sources", "requirements", "both", "setup.py", "none"],
)
def test_what_a_project_names_is_installed(
    files: dict[str, str], install: list[str], packages: tuple[str, ...], only_uv: str, tmp_path: Path
) -> None:
    put(tmp_path, files)
    found = looked_at(tmp_path)
    assert (list(found.install), found.packages, found.only_uv) == (install, packages, only_uv)
    assert found.paths == tuple(sorted(files))


def test_the_header_of_a_script_comes_first(tmp_path: Path) -> None:
    header = "# /// script\n# requires-python = '>=3.11'\n# dependencies = ['six']\n# ///\n"
    put(tmp_path, {"train.py": header, "requirements.txt": "idna\n"})
    found = looked_at(tmp_path, "train.py")
    assert (found.install, found.packages) == ((), ("six",))
    assert found.paths == ("requirements.txt", "train.py")


@pytest.mark.parametrize(
    ("files", "path", "says"),
    [
        ({"pyproject.toml": f"{TABLE}requires-python = '<3.9'\n"}, ".", f"requires Python <3.9, but .* {MINOR}"),
        ({"train.py": "# /// script\n# requires-python = '<3.9'\n# ///\n"}, "train.py", "requires Python <3.9"),
        ({"pyproject.toml": "["}, ".", "pyproject.toml is not valid"),
        ({"requirements.txt": "-e ../other\n"}, ".", "is not in the project"),
        ({".env": "A=1"}, ".", "has no file to send"),
        ({}, "none", "none does not exist"),
    ],
)
def test_a_project_that_nodes_cannot_use_is_refused(
    files: dict[str, str], path: str, says: str, tmp_path: Path
) -> None:
    put(tmp_path, files)
    with pytest.raises(UsageError, match=says):
        looked_at(tmp_path, path)


def test_a_project_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skypool.files.project._MOST_FILES", 2)
    put(tmp_path, {"a": "", "data/b": "", "data/c": "1"})
    with pytest.raises(UsageError, match=r"3 files.*largest folders: data .*\.skypoolignore"):
        looked_at(tmp_path)


def test_another_environment_is_made_if_what_it_is_made_from_changes(tmp_path: Path) -> None:
    copied = f"{TABLE}dependencies = ['lib']\n{PATH_SOURCE.replace('@', '')}"
    put(tmp_path, {"pyproject.toml": copied, "libs/lib/lib.py": "", "mine.py": "", "dev-requirements.txt": ""})
    seen = [looked_at(tmp_path).key]
    put(tmp_path, {"mine.py": "changed"})
    assert looked_at(tmp_path).key == seen[0]
    for path, text in {
        "libs/lib/lib.py": "changed", "dev-requirements.txt": "six", "pyproject.toml": copied.replace("'1'", "'2'")
    }.items():  # fmt: skip
        put(tmp_path, {path: text + "\n"})
        seen.append(looked_at(tmp_path).key)
    assert len({*seen}) == 4
    put(tmp_path, {"pyproject.toml": copied.replace("libs/lib'", "libs/lib', editable = true")})
    seen = [looked_at(tmp_path).key]
    put(tmp_path, {"libs/lib/lib.py": "again"})
    assert looked_at(tmp_path).key == seen[0]


def test_a_project_excludes_a_pyproject_and_has_no_script_before_a_pool_starts(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"leave out pyproject="):
        Image(project=".", pyproject=".")
    with pytest.raises(ImageError, match=r"leave out lock="):
        Image(project=".").lock("uv.lock")
    with pytest.raises(ImageError, match=r"found out when a pool starts"):
        Image(project=".").script()
    assert Image.from_toml(Image().project("a").to_toml()) == Image(project="a")
    assert sent_project(Image()) is None


def test_nothing_is_rented_for_a_project_that_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none does not exist"):
        sky.ComputePool("fake", image=Image(folder=tmp_path, project="none"), console="off").start()


# --- on nodes ------------------------------------------------------------------------------------------------


def test_files_of_a_project_are_where_calls_run(tmp_path: Path) -> None:
    root = tmp_path / "project"
    put(root, {"data/words.txt": "a b c", ".env": "A=1", "big/x.bin": "0", ".skypoolignore": "big\n"})
    (root / "link").symlink_to("data/words.txt")
    (root / "astray").symlink_to("nowhere")
    image = Image(folder=tmp_path / "project", project=".", files={"more.txt": b"1"})
    with sky.ComputePool(rehearsal(tmp_path), image=image, console="off") as pool:
        assert words_of("data/words.txt") >> pool == 3
        assert files_here() >> pool == [".skypoolignore", "data/words.txt", "link", "more.txt"]
        assert link_here("link") >> pool == "data/words.txt"
        assert link_here("astray") >> pool == "nowhere"


@pytest.mark.slow
def test_a_locked_project_is_installed_with_its_packages_in_folders(tmp_path: Path) -> None:
    lib = f"{TABLE.replace('mine', 'lib')}dependencies = ['six']\n{BUILT}"
    root = tmp_path / "project"
    put(root, {
        "pyproject.toml": f"{TABLE}requires-python = '>=3.11'\ndependencies = ['lib']\n{BUILT}"
        f"{PATH_SOURCE.replace('@', ', editable = true')}",
        "src/mine_of_a_project/__init__.py": "WORD = 'mine'\n",
        "libs/lib/pyproject.toml": lib, "libs/lib/src/lib_of_a_project/__init__.py": "WORD = 'first'\n",
        "data/words.txt": "a b",
    })  # fmt: skip
    subprocess.run([sys.executable, "-m", "uv", "lock", "-q", "--python", sys.executable], cwd=root, check=True)
    image = Image(folder=root, project=".", pip="idna")
    names = ("mine_of_a_project", "lib_of_a_project", "six", "idna")
    for word in ("first", "second"):  # an editable package is as it is now
        put(root, {"libs/lib/src/lib_of_a_project/__init__.py": f"WORD = {word!r}\n"})
        with sky.ComputePool(rehearsal(tmp_path), image=image, console="off") as pool:
            assert imported(*names) >> pool == ["mine", word, "six", "idna"]
            assert words_of("data/words.txt") >> pool == 2
