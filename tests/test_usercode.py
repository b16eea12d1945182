"""Which modules are the user's own, and their source when a node asks for it. Nothing is run to find out."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import py_compile
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skypool as sky
from skypool.errors import ProtocolError
from skypool.shipping import user_modules
from tests.conftest import ROOT

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


def test_what_another_environment_has_installed_is_not_the_users(project: Path) -> None:
    for name in ("site-packages", "dist-packages"):
        assert not user_modules.is_users(str(project / "other" / "lib" / name / "torch" / "__init__.py"))
        assert user_modules.is_users(str(project / f"{name}-mine" / "train.py"))
    assert user_modules.is_users(str(project / "site-packages"))


# --- what is loaded ------------------------------------------------------------------------------------------


def names_of(name: str, version: str = "") -> list[str]:
    """The paths of the files of a package, as a node hears of them."""
    header, body = user_modules.Lender().find(name, version)
    return [path for path, _, _ in json.loads(body.partition(b"\n")[0])] if header["found"] else []


def text_of(name: str, path: str, version: str = "") -> str:
    """The contents of a file of a package."""
    lender = user_modules.Lender()
    header, body = lender.find(name, version)
    size = {each: size for each, _, size in json.loads(body.partition(b"\n")[0])}[path]
    return lender.file(name, header["hash"], path)[1][:size].decode()


def test_the_manifest_has_what_is_loaded_of_the_users_own_and_nothing_else(project: Path) -> None:
    write(project / "mine.py")
    write(project / "pack" / "__init__.py")
    write(project / "pack" / "inner.py")
    write(project / "never_loaded.py")
    load("mine")
    load("pack.inner")
    manifest = user_modules.manifest()
    assert {"mine", "pack"} <= manifest.keys()
    assert not manifest.keys() & {"never_loaded", "pack.inner", "os", "numpy", "pytest", "__main__"}
    assert not manifest.keys() & {"skypool", "skypool_images", "cloudpickle"}


def test_what_is_loaded_stays_as_it_was_until_it_is_reloaded(project: Path) -> None:
    path = write(project / "mine.py", "x = 1\n")
    module = load("mine")
    before, number = user_modules.manifest()["mine"], user_modules.generation()
    assert text_of("mine", "mine.py") == "x = 1\n"
    write(path, "x = 2\n")
    assert user_modules.manifest()["mine"] == before
    assert text_of("mine", "mine.py") == "x = 1\n"
    importlib.reload(module)
    assert user_modules.manifest()["mine"] != before
    assert user_modules.generation() > number
    assert text_of("mine", "mine.py") == "x = 2\n"
    assert text_of("mine", "mine.py", before) == "x = 1\n"  # for calls that were sent before


def test_a_reload_of_one_module_of_a_package_leaves_the_others_as_they_were(project: Path) -> None:
    write(project / "pack" / "__init__.py", "")
    write(project / "pack" / "a.py", "x = 1\n")
    write(project / "pack" / "b.py", "x = 1\n")
    a, _ = load("pack.a"), load("pack.b")
    user_modules.manifest()
    write(project / "pack" / "a.py", "x = 2\n")
    write(project / "pack" / "b.py", "x = 2\n")
    importlib.reload(a)
    version = user_modules.manifest()["pack"]
    assert [text_of("pack", f"pack/{name}.py", version) for name in "ab"] == ["x = 2\n", "x = 1\n"]


def test_a_module_whose_saving_is_not_done_is_read_when_it_is(project: Path) -> None:
    path = write(project / "mine.py", "x = 1\n")
    module = load("mine")
    path.write_text("x = (1,\n")  # as an editor leaves it for a moment
    saver = threading.Timer(0.3, path.write_text, ["x = (1,\n     2)\n"])
    saver.start()
    try:
        module.__spec__ = importlib.util.find_spec("json")  # as after a reload, which would fail now
        user_modules._watcher.is_dirty = True
        user_modules.manifest()
    finally:
        saver.join()
    assert text_of("mine", "mine.py") == "x = (1,\n     2)\n"


def test_nothing_new_is_no_new_generation(project: Path) -> None:
    write(project / "mine.py")
    load("mine")
    number = user_modules.generation()
    load("wsgiref")  # another import
    assert user_modules.generation() == number


# --- what a node gets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [True, False])
def test_a_module_is_found_with_its_source(project: Path, loaded: bool) -> None:
    write(project / "mine.py", "x = 1\n" if loaded else BOOM)
    if loaded:
        load("mine")
    assert names_of("mine") == ["mine.py"]
    assert text_of("mine", "mine.py") == (project / "mine.py").read_text()
    assert ("mine" in sys.modules) == loaded


@pytest.mark.parametrize("loaded", [True, False])
def test_a_package_is_found_whole_without_being_run(project: Path, loaded: bool) -> None:
    write(project / "pack" / "__init__.py", "" if loaded else BOOM)
    write(project / "pack" / "inner.py", BOOM)
    write(project / "pack" / "deep" / "__init__.py", BOOM)
    write(project / "pack" / "deep" / "leaf.py", BOOM)
    write(project / "pack" / "data" / "table.csv", "1,2\n")
    write(project / "pack" / "__pycache__" / "inner.pyc", "")
    write(project / "pack" / ".git" / "config", "")
    write(project / "pack" / "env" / "pyvenv.cfg", "")
    if loaded:
        load("pack")
    assert sorted(names_of("pack")) == [
        "pack/__init__.py",
        "pack/data/table.csv",
        "pack/deep/__init__.py",
        "pack/deep/leaf.py",
        "pack/inner.py",
    ]
    assert "pack.inner" not in sys.modules


def test_files_that_are_too_large_are_left_out_and_named(project: Path) -> None:
    write(project / "pack" / "__init__.py", "")
    (project / "pack" / "small.bin").write_bytes(b"x" * 1000)
    with open(project / "pack" / "large.bin", "wb") as file:
        file.truncate(user_modules.LARGEST_FILE + 1)
    header, _ = user_modules.Lender().find("pack")
    assert list(header["left_out"]) == ["pack/large.bin"]
    assert "pack/small.bin" in names_of("pack")


def test_files_that_may_hold_secrets_are_left_out_and_named(project: Path) -> None:
    write(project / "pack" / "__init__.py", "")
    write(project / "pack" / ".env", "TOKEN=t0k3n-of-mine\n")
    write(project / "pack" / "deep" / "server.pem", "anything")
    write(project / "pack" / "deep" / "deploy.txt", "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n")
    write(project / "pack" / "credentials.py", "NAME = 'a module'\n")
    header, _ = user_modules.Lender().find("pack")
    left_out = ["pack/.env", "pack/deep/deploy.txt", "pack/deep/server.pem"]
    assert sorted(header["left_out"]) == left_out
    assert sorted(names_of("pack")) == ["pack/__init__.py", "pack/credentials.py"]


def test_a_pool_may_send_only_what_its_program_has_loaded(project: Path) -> None:
    write(project / "pack" / "__init__.py", "")
    write(project / "other" / "__init__.py", "")
    load("pack")
    user_modules.manifest()
    lender = user_modules.Lender(loaded_only=True)
    assert [lender.find(name)[0]["found"] for name in ("pack", "other")] == [True, False]


@pytest.mark.parametrize("loaded", [True, False])
def test_a_namespace_package_is_found_with_its_modules(project: Path, loaded: bool) -> None:
    write(project / "space" / "inner.py", "x = 1\n" if loaded else BOOM)
    write(project / "space" / "deeper" / "leaf.py", BOOM)
    write(project / "space" / "weights.bin", "no module")
    if loaded:
        load("space.inner")
    assert sorted(names_of("space")) == ["space/deeper/leaf.py", "space/inner.py"]


def test_a_module_that_was_loaded_from_elsewhere_has_the_name_by_which_it_is_imported(project: Path) -> None:
    path = write(project / "other" / "implementation.py", "x = 1\n")
    spec = importlib.util.spec_from_file_location("renamed", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["renamed"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    user_modules._watcher.is_dirty = True
    user_modules.manifest()
    assert names_of("renamed") == ["renamed.py"]


@pytest.mark.parametrize("name", ["os", "sys", "math", "json", "numpy", "pytest", "xml"])
def test_what_is_installed_is_not_sent(name: str) -> None:
    assert names_of(name) == []


@pytest.mark.parametrize(
    "name", ["skypool", "skypool.compute_pool.compute_pool", "skypool_images", "cloudpickle", "__main__"]
)
def test_skypool_itself_and_the_script_are_not_sent(name: str) -> None:
    assert names_of(name) == []


@pytest.mark.parametrize("name", ["sitecustomize", "usercustomize"])
def test_what_each_machine_has_of_its_own_is_not_sent(
    project: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    write(project / f"{name}.py")
    load(name)
    assert names_of(name) == []
    assert name not in user_modules.manifest()


def test_a_compiled_module_is_sent_as_the_bytes_it_is(project: Path) -> None:
    path = write(project / "quick.py")
    py_compile.compile(str(path), str(project / "quick.pyc"))
    path.unlink()
    importlib.invalidate_caches()
    lender = user_modules.Lender()
    header, _ = lender.find("quick")
    assert lender.file("quick", header["hash"], "quick.pyc")[1] == (project / "quick.pyc").read_bytes()


def test_a_module_made_in_memory_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_here", ModuleType("made_here"))
    header, _ = user_modules.Lender().find("made_here")
    assert (header["found"], header["why"]) == (False, "made")
    assert "made_here" not in user_modules.manifest()


def test_what_installs_a_module_is_told() -> None:
    header, _ = user_modules.Lender().find("yaml")
    assert header["why"].startswith("installed PyYAML==")


def test_what_replaced_a_module_in_sys_modules_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "odd_one", None)  # as `import` itself does for what must not be imported
    user_modules._watcher.is_dirty = True
    assert names_of("odd_one") == []
    assert "odd_one" not in user_modules.manifest()


@given(st.text(".ab_é/\0 ", max_size=12))
def test_no_name_however_odd_raises(name: str) -> None:
    header, body = user_modules.Lender().find(name)
    assert header["name"] == name
    assert header["found"] is False
    assert body == b""


def test_a_file_that_was_not_offered_is_refused(project: Path) -> None:
    write(project / "pack" / "__init__.py", "")
    lender = user_modules.Lender()
    header, _ = lender.find("pack")
    for name, version, path in (
        ("pack", header["hash"], "pack/../../secret"),
        ("pack", "0" * 16, "pack/__init__.py"),
        ("other", header["hash"], "pack/__init__.py"),
    ):
        with pytest.raises(ProtocolError, match="not offered"):
            lender.file(name, version, path)


# --- from a zip ----------------------------------------------------------------------------------------------


def test_modules_in_a_zip_are_the_users_and_are_sent(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = project / "app.zip"
    with zipfile.ZipFile(archive, "w") as made:
        for name in ("zipped/__init__.py", "zipped/inner.py", "zipped/unloaded.py", "zipped/table.csv", "other.py"):
            made.writestr(name, f"name = {name!r}\n")
    monkeypatch.syspath_prepend(archive)
    load("zipped.inner")
    assert "zipped" in user_modules.manifest()
    assert sorted(names_of("zipped")) == [
        "zipped/__init__.py",
        "zipped/inner.py",
        "zipped/table.csv",
        "zipped/unloaded.py",
    ]
    assert text_of("zipped", "zipped/inner.py") == "name = 'zipped/inner.py'\n"


# --- on a node -----------------------------------------------------------------------------------------------

SCRIPT = """
import importlib, json, multiprocessing, os, subprocess, sys, time
from pathlib import Path
import skypool as sky

HERE = Path(__file__).parent
sys.path.append(str(HERE / "site-packages"))
from tests.conftest import ROOT
import whole, google.mine.known, versioned
import fake_installed


@sky.compute
def data():
    import importlib.resources, pkgutil
    return {
        "file": Path(whole.__file__).with_name("table.csv").read_text(),
        "resource": importlib.resources.files("whole").joinpath("deep/note.txt").read_text(),
        "modules": sorted(each.name for each in pkgutil.iter_modules(whole.__path__)),
        "late": importlib.import_module("whole.late").name,
    }


@sky.compute
def metadata():
    import importlib.metadata as metadata
    (point,) = metadata.entry_points(group="of.mine")
    return metadata.version("whole-thing"), metadata.version("editable-thing"), point.load()()


@sky.compute
def namespaces():
    import google.mine.known, google.mine.late
    try:
        import google.unknown
    except ModuleNotFoundError as e:
        unknown = str(e)
    import google.auth  # of the distribution google-auth
    return google.mine.known.name, google.mine.late.name, google.auth.__name__, unknown


@sky.compute
def local_statistics():
    import statistics
    return statistics.mean([1, 3])


@sky.compute
def large():
    return whole.large()


@sky.compute
def missing(name):
    importlib.import_module(name)


@sky.compute
def in_pool(method):
    import work_of_mine
    with multiprocessing.get_context(method).Pool(2) as pool:
        return pool.map(work_of_mine.work, [1, 2])


@sky.compute
def in_executor(method):
    import work_of_mine
    from concurrent.futures import ProcessPoolExecutor
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        return pool.submit(work_of_mine.work, 3).result()


@sky.compute
def in_loky():
    import joblib, work_of_mine
    return joblib.Parallel(n_jobs=2)(joblib.delayed(work_of_mine.work)(n) for n in range(2))


@sky.compute
def environment():
    path = os.environ["PYTHONPATH"] + ":" + str(HERE / "site")
    said = subprocess.run([sys.executable, "-c", "import sitecustomize; print(sitecustomize.name)"],
                          capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    return said.stdout.strip() or said.stderr


@sky.compute
def version(n):
    import versioned, late_versioned
    time.sleep(0.02)
    return versioned.value, late_versioned.value


def notes_of(call):
    try:
        call >> pool
    except (ModuleNotFoundError, FileNotFoundError) as e:
        return e.__notes__


results = {}
made = type(sys)("made_at_run_time")
sys.modules["made_at_run_time"] = made
with sky.ComputePool(slots=3, console="off") as pool:
    results["data"] = data() >> pool
    results["metadata"] = metadata() >> pool
    results["namespaces"] = namespaces() >> pool
    results["statistics"] = local_statistics() >> pool
    results["large"] = notes_of(large())
    results["missing"] = {name: notes_of(missing(name)) for name in ("nothing_of_that_name", "made_at_run_time")}
    results["installed"] = notes_of(missing("fake_installed"))
    results["compiled"] = notes_of(missing("built._core"))
    for method in ("fork", "spawn", "forkserver"):
        results[method] = [in_pool(method) >> pool, in_executor(method) >> pool]
    results["loky"] = in_loky() >> pool
    results["program"] = sky.cmd("python", "-m", "program_of_mine").with_options(output="capture") >> pool
    results["sitecustomize"] = environment() >> pool
    seen = []
    for n, value in enumerate(pool.map(version, range(60), chunksize=1)):
        seen.append(value)
        for name in ("versioned", "late_versioned"):  # an editor at work
            (HERE / f"{name}.py").write_text("value = (1," if n % 2 else f"value = {n}")
    results["versions"] = sorted(set(map(tuple, seen)))
    (HERE / "versioned.py").write_text("value = 'reloaded'")
    importlib.reload(versioned)
    results["reloaded"] = sorted({each[0] for each in pool.map(version, range(10))})
json.dump(results, sys.stdout)
"""
FILES = {
    "whole/__init__.py": "from pathlib import Path\n\ndef large():\n"
    "    return open(Path(__file__).with_name('large.bin')).read()\n\ndef point():\n    return 'pointed'\n",
    "whole/late.py": "name = 'late'\n",
    "whole/table.csv": "1,2\n",
    "whole/deep/__init__.py": "",
    "whole/deep/note.txt": "a note",
    "whole_thing.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: whole-thing\nVersion: 1.2\n",
    "whole_thing.egg-info/entry_points.txt": "[of.mine]\npoint = whole:point\n",
    "site-packages/editable_thing-3.4.dist-info/METADATA": "Metadata-Version: 2.1\n"
    "Name: editable-thing\nVersion: 3.4\n",
    "site-packages/editable_thing-3.4.dist-info/direct_url.json": '{"url": "file://HERE", '
    '"dir_info": {"editable": true}}',
    "site-packages/fake_installed.py": "name = 'installed here only'\n",
    "google/mine/__init__.py": "",
    "google/mine/known.py": "name = 'known'\n",
    "google/mine/late.py": "name = 'late'\n",
    "statistics.py": "def mean(values):\n    return 'mine'\n",
    "work_of_mine.py": "def work(n):\n    import helper_of_mine\n    return helper_of_mine.name, n\n",
    "helper_of_mine.py": "name = 'helper'\n",
    "program_of_mine.py": "import helper_of_mine\nprint('program', helper_of_mine.name)\n",
    "site/sitecustomize.py": "name = 'the one that is hidden'\n",
    "built/__init__.py": "",
    "versioned.py": "value = 'first'\n",
    "late_versioned.py": "value = 'first'\n",
}


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a script with modules and packages of its own finds on a node."""
    folder = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("HERE", str(folder)))
    for large in ("whole/large.bin", "built/_core.abi3.so"):
        with open(folder / large, "wb") as file:
            file.truncate(11 << 20)
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_package_comes_with_its_files_and_can_be_looked_through(there: dict[str, Any]) -> None:
    assert there["data"] == {"file": "1,2\n", "resource": "a note", "modules": ["deep", "late"], "late": "late"}


def test_the_metadata_of_editable_distributions_is_there(there: dict[str, Any]) -> None:
    assert there["metadata"] == ["1.2", "3.4", "pointed"]


def test_a_namespace_package_joins_what_is_installed(there: dict[str, Any]) -> None:
    assert there["namespaces"] == ["known", "late", "google.auth", "No module named 'google.unknown'"]


def test_a_module_beside_the_script_comes_before_an_installed_one_that_only_a_function_imports(
    there: dict[str, Any],
) -> None:
    assert there["statistics"] == "mine"


def test_a_file_that_is_too_large_is_named_with_what_to_do(there: dict[str, Any]) -> None:
    assert there["large"] == [
        "whole/large.bin of your package was not sent: files of more than 10 MB, more than 50 MB of files for a "
        "package, and files that may hold secrets are left out; send it with Image(files={…})"
    ]


def test_a_compiled_file_that_is_too_large_is_named_with_what_to_do(there: dict[str, Any]) -> None:
    assert there["compiled"] == [
        "built/_core.abi3.so of your package was not sent: files of more than 10 MB are left out; install the package "
        "with Image(pip=[…])"
    ]


def test_what_to_do_about_a_missing_module_depends_on_what_the_program_knows_of_it(there: dict[str, Any]) -> None:
    (nothing,), (made,) = there["missing"]["nothing_of_that_name"], there["missing"]["made_at_run_time"]
    assert "a module of your own is sent if the program itself can import it" in nothing
    assert "the program made it while it ran" in made
    assert "Image(pip" not in made
    assert there["installed"][0].startswith("this node has no module 'fake_installed': install it with")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_import_like_their_parent(there: dict[str, Any], method: str) -> None:
    assert there[method] == [[["helper", 1], ["helper", 2]], ["helper", 3]]


def test_children_of_loky_and_programs_import_like_their_parent(there: dict[str, Any]) -> None:
    assert there["loky"] == [["helper", 0], ["helper", 1]]
    assert there["program"] == [0, "program helper\n"]


def test_a_sitecustomize_of_the_user_runs_too(there: dict[str, Any]) -> None:
    assert there["sitecustomize"] == "the one that is hidden"


def test_all_calls_see_one_version_of_a_module_until_it_is_reloaded(there: dict[str, Any]) -> None:
    assert there["versions"] == [["first", "first"]]
    assert there["reloaded"] == ["reloaded"]


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
