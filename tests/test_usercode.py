"""Which modules are the user's own, and their source when a node asks for it. Nothing is run to find out."""

from __future__ import annotations

import hashlib
import importlib
import os
import py_compile
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skypool as sky
from skypool.shipping import user_modules

BOOM = "raise AssertionError('it was run')\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's own on sys.path; what is imported from it is forgotten afterwards."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]
    importlib.invalidate_caches()


def write(path: Path, text: str = "x = 1\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    importlib.invalidate_caches()
    return path


def load(name: str) -> ModuleType:
    importlib.invalidate_caches()
    return importlib.import_module(name)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- whose is it ---------------------------------------------------------------------------------------------


def test_a_file_outside_of_what_is_installed_is_the_users(project: Path) -> None:
    assert user_modules.is_users(str(project / "train.py"))
    assert user_modules.is_users("/nowhere/at/all.py")


@pytest.mark.parametrize("path", [os.__file__, numpy.__file__, pytest.__file__, "", None, "train.py", "<string>"])
def test_what_is_installed_or_no_file_is_not_the_users(path: str | None) -> None:
    assert not user_modules.is_users(path)


def test_a_link_into_what_is_installed_is_not_the_users(project: Path) -> None:
    link = project / "os.py"
    link.symlink_to(os.__file__)
    assert not user_modules.is_users(str(link))


def test_a_folder_whose_name_begins_like_an_installed_one_is_the_users() -> None:
    stdlib = os.path.dirname(os.__file__)
    assert user_modules.is_users(stdlib + "-mine/train.py")


# --- the manifest --------------------------------------------------------------------------------------------


def test_the_manifest_has_what_is_loaded_of_the_users_own_and_nothing_else(project: Path) -> None:
    write(project / "mine.py")
    write(project / "pack" / "__init__.py")
    write(project / "pack" / "inner.py")
    write(project / "never_loaded.py")
    load("mine")
    load("pack.inner")
    manifest = user_modules.manifest()
    assert {name: manifest.get(name) for name in ("mine", "pack", "pack.inner")} == dict.fromkeys(
        ("mine", "pack", "pack.inner"), digest("x = 1\n")
    )
    assert not manifest.keys() & {"never_loaded", "os", "numpy", "pytest", "__main__"}
    assert not any(name.partition(".")[0] in ("skypool", "skypool_images", "cloudpickle") for name in manifest)


def test_a_changed_file_has_another_hash(project: Path) -> None:
    path = write(project / "mine.py")
    load("mine")
    before = user_modules.manifest()["mine"]
    write(path, "x = 2  # longer\n")
    assert user_modules.manifest()["mine"] == digest("x = 2  # longer\n") != before


def test_a_file_changed_without_changing_its_length_has_another_hash(project: Path) -> None:
    path = write(project / "mine.py", "x = 1\n")
    load("mine")
    before = user_modules.manifest()["mine"]
    write(path, "x = 2\n")
    os.utime(path, ns=(1, 1))
    assert user_modules.manifest()["mine"] != before


def test_a_file_that_is_gone_is_not_in_the_manifest(project: Path) -> None:
    path = write(project / "mine.py")
    load("mine")
    path.unlink()
    assert "mine" not in user_modules.manifest()


# --- what a node gets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [True, False])
def test_a_module_is_found_with_its_source_and_hash(project: Path, loaded: bool) -> None:
    write(project / "mine.py", "x = 1\n" if loaded else BOOM)
    if loaded:
        load("mine")
    header, source = user_modules.find("mine")
    text = (project / "mine.py").read_text()
    assert source.decode() == text
    assert header == {"name": "mine", "found": True, "package": False, "file": "mine.py", "hash": digest(text)}
    assert ("mine" in sys.modules) == loaded


@pytest.mark.parametrize("loaded", [True, False])
def test_a_package_and_its_submodules_are_found_without_being_run(project: Path, loaded: bool) -> None:
    write(project / "pack" / "__init__.py", "" if loaded else BOOM)
    write(project / "pack" / "inner.py", BOOM)
    write(project / "pack" / "deep" / "__init__.py", BOOM)
    write(project / "pack" / "deep" / "leaf.py", BOOM)
    if loaded:
        load("pack")
    found = {name: user_modules.find(name)[0] for name in ("pack", "pack.inner", "pack.deep", "pack.deep.leaf")}
    assert [header["found"] for header in found.values()] == [True] * 4
    assert [header["package"] for header in found.values()] == [True, False, True, False]
    assert found["pack.deep.leaf"]["file"] == "leaf.py"
    assert user_modules.find("pack.missing")[0]["found"] is False
    assert "pack.inner" not in sys.modules


@pytest.mark.parametrize("loaded", [True, False])
def test_a_namespace_package_is_found_and_what_is_in_it(project: Path, loaded: bool) -> None:
    write(project / "space" / "inner.py", "x = 1\n" if loaded else BOOM)
    write(project / "space" / "deeper" / "leaf.py", BOOM)
    if loaded:
        load("space.inner")
    header, source = user_modules.find("space")
    assert (header["found"], header["package"], source) == (True, True, b"")
    assert "file" not in header
    assert user_modules.find("space.inner")[0]["file"] == "inner.py"
    assert user_modules.find("space.deeper")[0] == {
        "name": "space.deeper",
        "found": True,
        "package": True,
        "hash": "namespace",
    }
    assert user_modules.find("space.deeper.leaf")[1].decode() == BOOM


def test_a_namespace_package_inside_a_package_is_found(project: Path) -> None:
    write(project / "pack" / "__init__.py", BOOM)
    write(project / "pack" / "space" / "leaf.py", BOOM)
    assert user_modules.find("pack.space")[0]["package"] is True
    assert user_modules.find("pack.space.leaf")[1].decode() == BOOM


@pytest.mark.parametrize(
    "name",
    ["os", "os.path", "sys", "math", "json.decoder", "numpy", "numpy.linalg", "pytest", "xml.dom.minidom"],
)
def test_what_is_installed_is_not_sent(name: str) -> None:
    assert user_modules.find(name) == ({"name": name, "found": False}, b"")


@pytest.mark.parametrize("name", ["skypool", "skypool.pool.pool", "skypool_images", "cloudpickle", "__main__"])
def test_skypool_itself_and_the_script_are_not_sent(name: str) -> None:
    assert user_modules.find(name) == ({"name": name, "found": False}, b"")


def test_a_compiled_module_is_sent_as_the_bytes_it_is(project: Path) -> None:
    path = write(project / "quick.py")
    py_compile.compile(str(path), str(project / "quick.pyc"))
    path.unlink()
    importlib.invalidate_caches()
    header, data = user_modules.find("quick")
    assert header["file"] == "quick.pyc"
    assert data == (project / "quick.pyc").read_bytes()


def test_a_module_made_in_memory_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_here", ModuleType("made_here"))
    assert user_modules.find("made_here")[0]["found"] is False
    assert "made_here" not in user_modules.manifest()


def test_a_module_whose_file_is_gone_is_not_found(project: Path) -> None:
    path = write(project / "mine.py")
    load("mine")
    path.unlink()
    assert user_modules.find("mine")[0]["found"] is False


def test_what_replaced_a_module_in_sys_modules_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "odd_one", None)  # as `import` itself does for what must not be imported
    assert user_modules.find("odd_one")[0]["found"] is False
    assert "odd_one" not in user_modules.manifest()


@given(st.text(".ab_é/\0 ", max_size=12))
def test_no_name_however_odd_raises(name: str) -> None:
    header, source = user_modules.find(name)
    assert header["name"] == name
    assert header["found"] is False
    assert source == b""


# --- from a zip ----------------------------------------------------------------------------------------------


def test_modules_in_a_zip_are_the_users_and_are_sent(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = project / "app.zip"
    with zipfile.ZipFile(archive, "w") as made:
        for name in ("zipped/__init__.py", "zipped/inner.py", "zipped/unloaded.py"):
            made.writestr(name, f"name = {name!r}\n")
    monkeypatch.syspath_prepend(archive)
    load("zipped.inner")
    assert user_modules.manifest()["zipped.inner"] == digest("name = 'zipped/inner.py'\n")
    for name, file in (("zipped", "__init__.py"), ("zipped.inner", "inner.py"), ("zipped.unloaded", "unloaded.py")):
        header, source = user_modules.find(name)
        assert header == {
            "name": name,
            "found": True,
            "package": name == "zipped",
            "file": file,
            "hash": digest(source.decode()),
        }
        assert source.decode() == f"name = 'zipped/{file}'\n"


# --- on a node -----------------------------------------------------------------------------------------------


def test_a_package_that_only_the_function_imports_brings_its_submodules(project: Path) -> None:
    write(project / "mine/__init__.py", "from . import a\nfrom .inner import b\n")
    write(project / "mine/a.py", "value = 1\n")
    write(project / "mine/inner/__init__.py", "")
    write(project / "mine/inner/b.py", "from ..a import value\n")

    def both() -> tuple[int, int]:
        import mine  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

        return mine.a.value, mine.b.value

    with sky.ComputePool(slots=1, console="off") as pool:
        assert pool.submit(both).result(60) == (1, 1)
    assert "mine" not in sys.modules
