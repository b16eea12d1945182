"""The scripts of images, run by real shells on this machine, in folders of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from skypool.provision.bootstrap import SetupBundle
from skypool.provision.image_project import sent_project
from skypool_images import Image, ImageError, Step, assemble
from skypool_images.script import shell
from tests.conftest import served
from tests.needs import SHELLCHECK

MINOR = "{}.{}".format(*sys.version_info)
SHELLS = [["dash"], ["bash"], pytest.param(["busybox", "sh"], marks=pytest.mark.needs("busybox"))]
PYTHON = Step("python", f"keep SKYPOOL_PYTHON {sys.executable}")


@dataclass(frozen=True)
class Ran:
    """What a script said, and the seconds that it took, by the clock and of a CPU."""

    status: int
    text: str
    seconds: float
    cpu: float

    def lines(self, word: str) -> list[str]:
        return [line[len(word) + 2 :] for line in self.text.splitlines() if line.startswith(f"@{word} ")]

    @property
    def steps(self) -> list[str]:
        """How each step ended."""
        words = ("@done ", "@skip ", "@fail ")
        return [" ".join(line[1:].split(" ")[:2]) for line in self.text.splitlines() if line.startswith(words)]

    @property
    def python(self) -> Path:
        return Path(self.lines("python")[0])


class Machine:
    """A home of skypool's, and what runs there."""

    def __init__(self, home: Path, tools: Path) -> None:
        self.home, self.env = home, {**os.environ, "SKYPOOL_HOME": str(home), "SKYPOOL_CHANGES": "no"}
        self.env["PATH"] = f"{tools}:{os.environ['PATH']}"
        self.env.pop("SKYPOOL_PYTHON", None)
        self.sh = ["sh"]

    def __call__(self, image: Image | list[Step], /, **env: str) -> Ran:
        if isinstance(image, Image):
            packed = image.pack(project=sent_project(image))
            script = image.script(packed=packed)
            if packed:
                (self.home / "payload").mkdir(parents=True, exist_ok=True)
                (self.home / "payload" / packed.name).write_bytes(bytes(packed))
        else:
            script = assemble(image, "a test")
        began, used = time.monotonic(), sum(os.times()[2:4])
        ran = subprocess.run(
            self.sh, input=script, text=True, stdout=-1, stderr=-2, env={**self.env, **env}, cwd=self.home.parent
        )
        return Ran(ran.returncode, ran.stdout, time.monotonic() - began, sum(os.times()[2:4]) - used)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, Ran]:
    """A machine that had no uv, after its first image."""
    folder = tmp_path_factory.mktemp("first")
    machine = Machine(folder / "home", folder / "none")
    machine.env["PATH"] = os.pathsep.join(
        each for each in os.environ["PATH"].split(os.pathsep) if not Path(each, "uv").exists()
    )
    machine.env["HOME"] = str(folder)
    return machine, machine(Image(pip="six==1.16.0", run="python -c 'import six; print(six.__file__)'"))


@pytest.fixture(scope="module")
def tools(first: tuple[Machine, Ran], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but uv in it."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "uv").symlink_to(shutil.which("uv", path=first[0].home / "uv/bin") or shutil.which("uv") or "uv")
    return folder


@pytest.fixture
def machine(tmp_path: Path, tools: Path) -> Machine:
    return Machine(tmp_path / "home", tools)


# --- the environment -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_machine_without_uv_gets_one_and_an_environment(first: tuple[Machine, Ran]) -> None:
    machine, ran = first
    assert (ran.status, ran.steps) == (0, ["done python", "done env", "done run-1"]), ran.text
    assert ran.text.splitlines()[0] == "@boot 1"
    assert ran.text.splitlines()[-1] == "@ready"
    assert ran.python.is_relative_to(machine.home / "envs")
    assert f"| {ran.python.parent.parent}/lib" in ran.text
    assert (machine.home / "boot/python").read_text() == str(ran.python)


def test_a_second_start_skips_everything_in_no_time(first: tuple[Machine, Ran]) -> None:
    machine, ran = first
    again = [machine(Image(pip="six==1.16.0", run="python -c 'import six; print(six.__file__)'")) for _ in range(3)]
    assert [each.steps for each in again] == [["skip python", "skip env", "skip run-1"]] * 3
    assert {each.python for each in again} == {ran.python}
    assert min(each.cpu for each in again) < 0.3  # by the clock as well, where nothing else runs


def test_commands_of_the_user_have_the_umask_of_calls(machine: Machine) -> None:
    said = [machine(Image(run="umask; : " + mask), SKYPOOL_UMASK=mask).text for mask in ("0077", "0002")]
    assert ["| 0077\n" in said[0], "| 0002\n" in said[1]] == [True, True], said


def test_texts_that_are_not_utf8_reach_the_machine_as_bytes(machine: Machine) -> None:
    word = os.fsdecode(b"caf\xe9")
    image = Image(run=[f"printf %s {word} > $SKYPOOL_HOME/said"], env={"WORD": word})
    ran = subprocess.run(
        ["sh"], input=image.script().encode("utf-8", "surrogateescape"), env=machine.env, capture_output=True
    )
    assert ran.returncode == 0, ran.stderr
    assert (machine.home / "said").read_bytes() == b"caf\xe9"
    bundle = SetupBundle(image.script(), settings={"WORD": word}, secrets={"KEY": word})
    assert b"caf\xe9" in bundle.stage()
    assert b"export KEY='caf\xe9'" in bundle.words


@pytest.mark.parametrize("field", [{"run": ["echo \ud800"]}, {"env": {"A": "\ud800"}}, {"secrets": {"A": "\ud800"}}])
def test_other_surrogates_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ImageError, match=r"contains the surrogate '\\ud800', which no file can hold"):
        Image(**field)


def test_an_image_without_packages_fetches_nothing(machine: Machine) -> None:
    ran = machine(Image(env={"A": "1"}), PATH=os.environ["PATH"])
    assert ran.steps == ["done python"]
    assert sorted(each.name for each in machine.home.iterdir()) == ["boot", "stamps", "work"]
    version = subprocess.run([ran.python, "-V"], capture_output=True, text=True, check=True).stdout
    assert version.startswith(f"Python {MINOR}.")


def test_an_environment_that_was_half_made_is_made_again(machine: Machine) -> None:
    image = Image(pip="six==1.16.0", run="echo ran")
    ran = machine(image)
    env = ran.python.parent.parent
    shutil.rmtree(next(env.glob("lib/*/site-packages/six-1.16.0.dist-info")))
    assert machine(image).steps == ["skip python", "done env", "done run-1"]
    (env / ".whole").unlink()
    (env / "rubbish").touch()
    assert machine(image).steps == ["skip python", "done env", "done run-1"]
    assert not (env / "rubbish").exists()


def test_another_images_environment_stays(machine: Machine) -> None:
    one = machine(Image(pip="six==1.16.0")).python
    two = machine(Image(pip="six==1.17.0")).python
    assert one != two
    assert machine(Image(pip="six==1.16.0")).steps == ["skip python", "skip env"]


def test_a_name_that_no_index_knows_fails_at_once_and_says_what_to_do(machine: Machine) -> None:
    ran = machine(Image(pip="six-of-no-such-name-zz"))
    assert ran.status == 1
    assert ran.lines("fail")[0].startswith("env ")
    assert "uv pip install" in ran.lines("fail")[0]
    assert ran.lines("retry") == []
    assert any("six-of-no-such-name-zz was not found" in each and "spelling" in each for each in ran.lines("advice"))


@pytest.mark.parametrize(
    ("pip", "says"),
    [(["six==1.16.0", "six<1"], "contradict each other"), (["six==99.1"], "see which versions its index has")],
)
def test_what_cannot_be_solved_is_not_tried_again(machine: Machine, pip: list[str], says: str) -> None:
    ran = machine(Image(pip=pip))
    assert ran.lines("retry") == []
    assert says in ran.lines("advice")[0]
    assert "unsatisfiable" in ran.text


def test_a_preset_python_is_taken_and_one_that_does_not_fit_is_not(machine: Machine, tmp_path: Path) -> None:
    assert machine(Image(), SKYPOOL_PYTHON=sys.executable).python == Path(sys.executable)
    wrong = tmp_path / "wrong"
    wrong.write_text("#!/bin/sh\nexit 1\n")
    wrong.chmod(0o755)
    ran = machine(Image(), SKYPOOL_PYTHON=str(wrong))
    assert ran.steps == ["done python"]
    assert ran.python != wrong
    assert machine(Image(), SKYPOOL_PYTHON=str(wrong)).steps == ["skip python"]


def test_a_python_that_cannot_be_had_is_told_with_what_to_do(machine: Machine) -> None:
    steps = Image().steps(python=(3, 7))
    script = [Step(each.name, each.script, each.check) for each in steps]
    plain = {"PATH": "/usr/bin:/bin", "HOME": str(machine.home), "UV_PYTHON_DOWNLOADS": "never", "PYENV_ROOT": "/none"}
    ran = machine(script, **plain, PIP_NO_INDEX="1", PIP_FIND_LINKS="/none", http_proxy="http://127.0.0.1:9")
    if ran.status == 0:
        pytest.skip("this machine has Python 3.7 in /usr/bin, or uv")
    assert ran.lines("fail")[0].startswith("python ")


# --- where packages come from --------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"__version__ = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """An index of packages that has an odd six, and a package of its own."""
    wheel(tmp_path / "index/six", "six", "1.15.99")
    wheel(tmp_path / "index/skypool-odd", "skypool_odd", "1")
    with served(ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "index")))) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def version_of(python: Path, name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_package_comes_from_its_own_index_and_the_others_do_not(machine: Machine, index: str) -> None:
    ran = machine(Image(pip=["six", "idna"], pip_indexes={index: ["six"]}))
    assert version_of(ran.python, "six") == "1.15.99", ran.text
    assert version_of(ran.python, "idna")


def test_what_has_an_index_of_its_own_comes_from_there_for_a_project_too(
    machine: Machine, index: str, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "1"\ndependencies = ["six", "idna"]\n'
    )
    ran = machine(Image(folder=tmp_path, pyproject=".", pip_indexes={index: ["six"]}))
    assert version_of(ran.python, "six") == "1.15.99", ran.text
    assert version_of(ran.python, "idna")


def test_uv_obeys_what_the_machine_says_to_pip(machine: Machine, index: str, tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nindex-url = {index}\nextra-index-url =\n")
    env = {key: "" for key in os.environ if key.startswith(("PIP_", "UV_"))}
    ran = machine(Image(pip="skypool-odd"), **{**env, "PIP_CONFIG_FILE": str(config)})
    assert version_of(ran.python, "skypool-odd") == "1", ran.text
    assert "has no pip" in ran.text


@pytest.fixture
def no_uv(machine: Machine, tmp_path: Path) -> Machine:
    """A machine that cannot get uv: it has no downloader, and its index has no uv."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in ("/bin", "/usr/bin", "/sbin", "/usr/sbin"):
        for each in Path(folder).iterdir():
            if each.name not in ("uv", "curl", "wget") and not (tools / each.name).is_symlink():
                (tools / each.name).symlink_to(each)
    machine.env |= {"PATH": str(tools), "HOME": str(tmp_path), "SKYPOOL_PYTHON": sys.executable}
    machine.env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_EXTRA_INDEX_URL": ""}
    return machine


@pytest.mark.slow
def test_without_uv_pip_does_it(no_uv: Machine, tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "skypool_odd", "2")
    ran = no_uv(Image(pip="skypool-odd"))
    assert "uv cannot be had; going on with pip" in ran.text
    assert version_of(ran.python, "skypool-odd") == "2", ran.text
    assert no_uv(Image(pip="skypool-odd")).steps == ["skip python", "skip env"]
    (tmp_path / "requirements.txt").write_text("skypool-odd\n")
    ran = no_uv(Image(folder=tmp_path, requirements="requirements.txt"))
    assert version_of(ran.python, "skypool-odd") == "2", ran.text


@pytest.mark.slow
def test_without_uv_a_missing_package_is_told_too(no_uv: Machine) -> None:
    ran = no_uv(Image(pip="skypool-odd"))
    assert ran.lines("fail")[0].startswith("env 1 ")
    assert any("No matching distribution found for skypool-odd" in each for each in ran.lines("advice"))


@pytest.mark.slow
def test_an_environment_of_the_base_image_is_built_upon_and_left_alone(no_uv: Machine, tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "skypool_odd", "2")
    wheel(tmp_path / "wheels", "skypool_even", "2")
    below = tmp_path / "below"
    subprocess.run([sys.executable, "-m", "venv", below], check=True)
    pip = [str(below / "bin/python"), "-m", "pip", "install", "-q", "skypool-even"]
    subprocess.run(pip, check=True, env=no_uv.env)
    before = sorted(below.rglob("*.dist-info"))
    sdk = Step("sdk", f"keep SKYPOOL_VENV {below}")
    ran = no_uv([sdk, *Image(pip=["skypool-odd", "skypool-even"]).steps()], SKYPOOL_PYTHON="")
    assert version_of(ran.python, "skypool-odd") == "2", ran.text
    assert "Requirement already satisfied: skypool-even" in ran.text
    assert sorted(below.rglob("*.dist-info")) == before
    assert no_uv([sdk, *Image().steps()], SKYPOOL_PYTHON="").python.is_relative_to(below)


@pytest.mark.slow
def test_an_environment_of_the_base_image_with_another_python_is_not_built_upon(no_uv: Machine, tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "skypool_odd", "2")
    other = tmp_path / "other/bin/python"
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\nexit 1\n")  # as one of another version answers when it is asked for this one
    other.chmod(0o755)
    sdk = Step("sdk", f"keep SKYPOOL_VENV {tmp_path / 'other'}")
    ran = no_uv([sdk, *Image(pip="skypool-odd").steps()])
    assert f"| {tmp_path / 'other'} is not built upon: its Python is no {MINOR}" in ran.text
    assert version_of(ran.python, "skypool-odd") == "2", ran.text


@pytest.mark.slow
def test_a_project_is_installed_as_it_is_locked(machine: Machine, tools: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    text = f'[project]\nname = "mine"\nversion = "1"\nrequires-python = ">={MINOR}"\ndependencies = ["six{{}}"]\n'
    (project / "pyproject.toml").write_text(text.format("==1.16.0"))
    subprocess.run([tools / "uv", "lock", "-q"], cwd=project, check=True, env={**machine.env, "UV_INDEX": ""})
    (project / "pyproject.toml").write_text(text.format(""))
    ran = machine(Image(folder=project, pyproject=".", pip="idna"))
    assert version_of(ran.python, "six") == "1.16.0", ran.text
    assert version_of(ran.python, "idna")
    (project / "uv.lock").unlink()
    ran = machine(Image(folder=project, pyproject="."))
    assert version_of(ran.python, "six") != "1.16.0", ran.text


@pytest.mark.slow
def test_without_uv_pip_installs_what_the_files_of_a_project_name(no_uv: Machine, tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "skypool_odd", "2")
    project = tmp_path / "project"
    project.mkdir()
    (project / "requirements.txt").write_text("skypool-odd\n")
    image = Image(folder=project, project=".", run="test -e requirements.txt")
    ran = no_uv(image)
    assert ran.steps == ["done python", "done files", "done env", "done run-1"], ran.text
    assert version_of(ran.python, "skypool-odd") == "2"
    assert no_uv(image).steps == ["skip python", "skip files", "skip env", "skip run-1"]
    (project / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "1"\ndependencies = ["skypool-odd"]\n')
    ran = no_uv(image)
    assert version_of(ran.python, "skypool-odd") == "2", ran.text
    with open(project / "pyproject.toml", "a") as file:
        file.write("[tool.uv]\nno-index = true\n")
    ran = no_uv(image)
    assert ran.steps[-1] == "fail env"
    assert "only uv can install what [tool.uv] no-index of the project says" in ran.text


# --- commands, files and the runner --------------------------------------------------------------------------


def test_a_command_that_fails_is_told_with_its_status(machine: Machine) -> None:
    ran = machine(Image(run=["true", "echo 'so far'; exit 7", "touch never"]))
    assert ran.steps == ["done python", "done run-1", "fail run-2"]
    assert ran.lines("fail") == ["run-2 7 echo 'so far'; exit 7"]
    assert "| so far" in ran.text
    assert not (machine.home / "work/never").exists()


def test_a_command_is_run_again_after_another_images(machine: Machine) -> None:
    one, two = (Image(run=["touch first", f"echo {n} > which", "cat which >> all"]) for n in (1, 2))
    assert machine(one).steps == ["done python", "done run-1", "done run-2", "done run-3"]
    assert machine(two).steps == ["skip python", "skip run-1", "done run-2", "done run-3"]
    assert machine(Image(run="touch first")).steps == ["skip python", "skip run-1"]
    assert machine(one).steps == ["skip python", "skip run-1", "done run-2", "done run-3"]
    assert machine(one).steps == ["skip python", "skip run-1", "skip run-2", "skip run-3"]
    assert (machine.home / "work/which").read_text() == "1\n"


def test_commands_see_the_images_variables_and_files_word_for_word(machine: Machine) -> None:
    odd = "a 'b' \"c\" $HOME `d` \\e\nsecond ~%&"
    image = Image(env={"ODD": odd}, files={"in/put.txt": b"hello"}, run=['printf %s "$ODD" > out', "cat in/put.txt"])
    ran = machine(image)
    assert ran.status == 0, ran.text
    assert (machine.home / "work/out").read_text() == odd
    assert "| hello" in ran.text


def test_files_land_where_they_are_told_and_come_back_when_they_are_gone(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    away = tmp_path / "away/from/here.txt"
    image = Image(folder=tmp_path, include="*.sh", files={"a b.txt": b"1", "~/c/d": b"2", str(away): b"3"}, run="true")
    home = {"HOME": str(tmp_path / "home-of-user")}
    (tmp_path / "home-of-user").mkdir()
    assert machine(image, **home).steps == ["done python", "done files", "done run-1"]
    work = machine.home / "work"
    assert os.access(work / "run.sh", os.X_OK)
    assert (work / "a b.txt").read_bytes() + (tmp_path / "home-of-user/c/d").read_bytes() + away.read_bytes() == b"123"
    assert machine(image, **home).steps == ["skip python", "skip files", "skip run-1"]
    away.unlink()
    assert machine(image, **home).steps == ["skip python", "done files", "done run-1"]
    other = Image(files={"a b.txt": b"other"})
    assert machine(other).steps == ["skip python", "done files"]
    assert machine(image, **home).steps == ["skip python", "done files", "done run-1"]
    assert (work / "a b.txt").read_bytes() == b"1"


def test_names_of_files_mean_nothing_but_themselves(machine: Machine, tmp_path: Path) -> None:
    names = ["a b", "tab\there", "back\\slash", 'it\'s "it"', "é☃", " first", "last ", "$(x)", "-dash", "*", "%s", "|&"]
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in names:
        (tree / name).write_text(name)
    image = Image(folder=tree, include=".", files={"copy": "."})
    assert machine(image).steps == ["done python", "done files"]
    assert sorted(os.listdir(machine.home / "work")) == sorted([*names, "copy"])
    assert sorted(os.listdir(machine.home / "work/copy")) == sorted(names)
    assert machine(image).steps == ["skip python", "skip files"]
    (machine.home / "work/copy/last ").unlink()
    assert machine(image).steps == ["skip python", "done files"]
    (tree / "two\nlines").touch()
    with pytest.raises(ImageError, match=r"'two\\nlines' has a line break in its name"):
        image.script()


def test_files_that_did_not_arrive_are_told(machine: Machine) -> None:
    ran = machine(Image(files={"a": b"1"}).steps())
    assert ran.lines("fail")[0].startswith("files 1 ")
    assert "have not arrived" in ran.text


def test_a_step_that_takes_too_long_is_ended(machine: Machine) -> None:
    ran = machine([Step("slow", "sleep 60", limit=1)])
    assert ran.lines("fail")[0].startswith("slow 124")
    assert ran.lines("advice") == ["it ran longer than its limit of 1 s"]
    assert ran.seconds < 30


def test_a_failure_of_the_network_is_met_with_another_attempt(machine: Machine) -> None:
    flaky = 'if [ -e "$B/seen" ]; then echo fine; else : > "$B/seen"; echo "Connection reset by peer"; exit 3; fi'
    ran = machine([PYTHON, Step("flaky", flaky, retries=2)])
    assert ran.lines("retry") == ["flaky 1 2"]
    assert ran.steps == ["done python", "done flaky"]


PASSING = [
    "error: Failed to fetch: HTTP status server error (502 Bad Gateway) for url (https://pypi.org/simple/six/)",
    "ERROR: HTTP error 503 while getting https://pypi.org/six.whl",
    "pip._vendor.requests.exceptions.HTTPError: 504 Server Error: Gateway Time-out for url: https://pypi.org/six",
    "ResponseError('too many 429 error responses')",
    "E: Failed to fetch http://deb.example.org/jq.deb  502  Bad Gateway [IP: 10.0.0.1 80]",
    "curl: (22) The requested URL returned error: 503",
    "2026-01-01 12:00:00 ERROR 502: Bad Gateway.",
    "urllib3: status code 429",
    "curl: (56) Recv failure: Connection reset by peer",
]
LASTING = [
    "Fetched 1502 B in 1s (2502 kB/s)",
    "Fetched 502 B in 1s (503 kB/s)",
    "Need to get 500 kB of archives. After this operation, 429 MB of additional disk space will be used.",
    "Downloading six-1.16.0.whl (502 kB)",
    "collected 408 items, 500 passed",
    "HTTP status client error (404 Not Found) for url",
    "exit status 5021",
]


@pytest.mark.parametrize(("said", "passes"), [*((t, True) for t in PASSING), *((t, False) for t in LASTING)])
def test_only_what_may_pass_is_tried_again(said: str, passes: bool, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"{said}\n")
    function = shell("runner").partition("passing() {")[2].partition("\n}\n")[0]
    ran = subprocess.run(
        ["sh", "-c", f"{shell('advice')}\npassing() {{{function}\n}}\npassing"], env={**os.environ, "B": str(tmp_path)}
    )
    assert (ran.returncode == 0) is passes


TOOLS = 'apt=["build-essential", "cmake", "python3-dev"]'
MISSING = [
    "error: command 'gcc' failed: No such file or directory",
    "error: command '/usr/bin/x86_64-linux-gnu-gcc' failed with exit code 1",
    "unable to execute 'g++': No such file or directory",
    "six.c:1:10: fatal error: Python.h: No such file or directory",
    "FileNotFoundError: [Errno 2] No such file or directory: 'cmake'",
    "error: linker `cc` not found",
    "/bin/sh: 1: make: not found",
    "bash: line 1: gcc: command not found",
    "../meson.build:1:0: ERROR: Unknown compiler(s): [['cc'], ['gcc']]",
]
NOT_MISSING = [
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.",
    "it failed; make a copy first",
    "make: *** [Makefile:2: all] Error 1",
    "command failed: make love",
    "error in cc.txt",
]


@pytest.mark.parametrize(("said", "missing"), [*((t, True) for t in MISSING), *((t, False) for t in NOT_MISSING)])
def test_tools_are_missed_only_where_they_are_missing(said: str, missing: bool, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"{said}\n")
    ran = subprocess.run(
        ["sh", "-c", f"{shell('advice')}\nexplain"],
        env={**os.environ, "B": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (TOOLS in ran.stdout) is missing, ran.stdout


@pytest.mark.parametrize(
    "said",
    [
        "This error likely indicates that `flash-attn@2.8.3` depends on `torch`, but doesn't declare it as a build "
        "dependency.\nre-run with `--no-build-isolation`.",
        "      ModuleNotFoundError: No module named 'torch'",
    ],
)
def test_a_build_that_needs_an_installed_package_is_told_how_to_get_it(said: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"{said}\n")
    ran = subprocess.run(
        ["sh", "-c", f"{shell('advice')}\nexplain"],
        env={**os.environ, "B": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert 'run=["pip install --no-build-isolation NAME"]' in ran.stdout
    Image(pip=["torch", "setuptools", "wheel", "packaging", "ninja"], run=["pip install --no-build-isolation NAME"])


def test_what_a_command_leaves_running_does_not_hold_the_script_up(machine: Machine) -> None:
    ran = machine([PYTHON, Step("daemon", "sleep 30 > /dev/null 2>&1 & sleep 30 2> /dev/null & echo started")])
    assert ran.steps == ["done python", "done daemon"]
    assert ran.seconds < 30


def test_a_step_whose_check_does_not_hold_has_failed(machine: Machine) -> None:
    ran = machine([Step("lies", "echo done", check='echo "nvidia-smi -L" > "$B/command"; exit 9')])
    assert ran.lines("fail")[0] == "lies 9 its check: nvidia-smi -L"


@pytest.mark.parametrize("sh", SHELLS, ids=lambda sh: sh[0])
def test_every_shell_runs_it(machine: Machine, sh: list[str]) -> None:
    image = Image(pip="six==1.16.0", files={"a": b"1"}, run=["printf 'no newline'", "false || echo 'b\\c' $0"])
    machine.sh = sh
    ran = machine(image)
    assert ran.steps == ["done python", "done env", "done files", "done run-1", "done run-2"], ran.text
    assert "| no newline\n" in ran.text
    assert machine(image).steps == ["skip python", "skip env", "skip files", "skip run-1", "skip run-2"]


def test_an_apt_package_that_is_missing_on_ones_own_machine_is_only_told(machine: Machine) -> None:
    ran = machine(Image(apt="skypool-no-such-package"))
    assert ran.lines("fail") == ["apt 1 apt-get install skypool-no-such-package"]
    assert ran.lines("advice") == [
        "this machine is yours and is left as it is; install it yourself: sudo apt-get install skypool-no-such-package"
    ]


LINTED = [
    Image(),
    Image(apt=["git", "curl=1"], pip=["six", "x @ https://x.org/$x"], env={"A": "$HOME 'x'", "CC": "`gcc`"}),
    Image(pip="six", pip_indexes={"https://x.org/a": ["torch"]}, files={"~/a": b"", "/b": b"", "c": b""}),
    Image(run=["echo $A 'b' \"$(c)\"", "if true\nthen echo; fi", "rm -rf $x"], env={"A": "1", "B": "2"}),
]


@pytest.mark.parametrize("image", LINTED, ids=range(len(LINTED)))
def test_shellcheck_finds_nothing(image: Image, tmp_path: Path) -> None:
    head = f'#!/bin/sh\nset -eu\n: "${{B=}}"\n{shell("prelude")}{shell("python")}'
    texts = [image.script(), *(head + text for step in image.steps() for text in (step.script, step.check))]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.sh").write_text(text + "\n")
    found = subprocess.run(
        [SHELLCHECK, "-s", "sh", *(f"{number}.sh" for number in range(len(texts)))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert found.stdout == ""
