"""What an image is as a value: what it holds, refuses, hides, and sends."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skypool_images import Image, ImageError, file_archive, mirror, recipes, requirements
from skypool_images.field_checks import Spec

MINE = "{}.{}".format(*sys.version_info)
OTHER = "3.12" if MINE == "3.11" else "3.11"


def everything() -> Image:
    return Image(
        python=MINE,
        pip=["torch>=2.5", "numpy"],
        pip_indexes={"https://download.pytorch.org/whl/cu128": ["torch"]},
        apt=["git", "ffmpeg=7:5.1.6-0+deb12u1"],
        env={"SEED": "1"},
        secrets=["HF_TOKEN"],
        files={"~/.netrc": b"\x00\xff", "words.txt": "words.txt"},
        include=["src"],
        exclude=["*.bin"],
        run=["echo hi", "echo hi"],
        base={"aws": "ami-0abc"},
        cuda="12.8",
        mirror_local=True,
    )


# --- values --------------------------------------------------------------------------------------------------


def test_written_at_once_and_piece_by_piece_are_the_same_image() -> None:
    chained = (
        Image()
        .python(MINE)
        .pip("torch>=2.5")
        .pip("numpy")
        .pip_indexes({"https://download.pytorch.org/whl/cu128": "torch"})
        .apt("git", "ffmpeg=7:5.1.6-0+deb12u1")
        .env(SEED="1")
        .secrets("HF_TOKEN")
        .files({"~/.netrc": b"\x00\xff"})
        .files({"words.txt": Path("words.txt")})
        .include("src")
        .exclude("*.bin")
        .run("echo hi", "echo hi")
        .base({"aws": "ami-0abc"})
        .cuda("12.8")
        .mirror_local()
    )
    assert chained == everything()
    assert hash(chained) == hash(everything())
    assert chained.hash == everything().hash


def test_a_chain_leaves_what_it_began_with_alone() -> None:
    first = Image(pip="numpy")
    assert first.pip("torch").spec.pip == ("numpy", "torch")
    assert first.spec.pip == ("numpy",)
    with pytest.raises(AttributeError):
        first.spec = Spec()  # type: ignore[misc]  # what this test is about


def test_one_string_is_one_requirement() -> None:
    assert Image(pip="six==1.16.0") == Image(pip=["six==1.16.0"])


def test_variables_are_merged_and_the_later_wins() -> None:
    image = Image(env={"A": "1", "B": "1"}).env({"B": "2"}, C="3")
    assert dict(image.spec.env) == {"A": "1", "B": "2", "C": "3"}


def test_the_order_of_a_mapping_means_nothing_and_that_of_a_list_does() -> None:
    assert Image(env={"A": "1", "B": "2"}).hash == Image(env={"B": "2", "A": "1"}).hash
    assert Image(run=["a", "b"]).hash != Image(run=["b", "a"]).hash
    one = Image(pip_indexes={"https://a": "six", "https://b": "idna"})
    assert one.script() == Image(pip_indexes={"https://b": "idna", "https://a": "six"}).script()


@pytest.mark.parametrize("field", ["pip", "apt", "env", "run", "cuda", "files", "secrets", "base", "mirror_local"])
def test_every_field_changes_the_hash(field: str) -> None:
    value = {"env": {"A": "1"}, "files": {"a": b"1"}, "cuda": "12.8", "mirror_local": True}.get(field, "one")
    assert Image(**{field: value}).hash != Image().hash  # type: ignore[arg-type]  # each of its own type


def test_an_image_goes_through_pickle_and_repr_shows_what_was_written() -> None:
    assert pickle.loads(pickle.dumps(everything())) == everything()
    assert repr(Image(pip="six", env={"A": "1"})) == "Image(pip=['six'], env={'A': '1'})"
    assert eval(repr(everything()), {"Image": Image}) == everything()


def test_a_base_is_one_for_all_or_one_for_each_provider() -> None:
    assert Image(base="ubuntu-24.04").base_for("aws") == "ubuntu-24.04"
    assert Image(base={"aws": "ami-0abc"}).base_for("aws") == "ami-0abc"
    assert Image(base={"aws": "ami-0abc"}).base_for("gcp") is None
    assert Image().base_for("aws") is None


# --- text ----------------------------------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not name.startswith("SKYPOOL_")
)
words = st.text(min_size=1, max_size=20).map(str.strip).filter(lambda text: bool(text) and "\0" not in text)
places = st.from_regex(r"(~/|/)?[a-zA-Z0-9 _é]{1,8}(/[a-z\"\\']{1,5}){0,2}", fullmatch=True).filter(
    lambda place: place.strip() == place
)
images = st.builds(
    Image,
    pip=st.lists(st.sampled_from(["six", "torch>=2.5", 'tomli; python_version < "3.11"', "jax[tpu]"])),
    requirements=st.none() | words,
    pyproject=st.none() | words,
    apt=st.lists(st.sampled_from(["git", "g++", "libc6:amd64", "curl=7.88.1-10+deb12u8"])),
    pip_indexes=st.dictionaries(st.sampled_from(["https://a/x", "https://b"]), st.just(["six"]), max_size=1),
    env=st.dictionaries(names, st.text().filter(lambda text: "\0" not in text)),
    secrets=st.lists(names),
    files=st.dictionaries(places, st.binary(max_size=20) | words.filter(lambda text: not text.endswith("/"))),
    include=st.lists(st.sampled_from(["src", "**/*.py"])),
    run=st.lists(words),
    base=st.none() | words | st.dictionaries(words, words, min_size=1),
    cuda=st.none() | st.just("12.8"),
    mirror_local=st.booleans(),
)


@given(images)
def test_toml_and_json_bring_back_what_they_were_made_of(image: Image) -> None:
    assert Image.from_toml(image.to_toml() + "\n") == image
    assert Image.from_json(image.to_json()) == image


def test_toml_is_what_a_person_would_write() -> None:
    image = Image(pip=["torch>=2.5", "numpy"], env={"SEED": "1"}, files={"a b": b"hi"}, secrets="HF_TOKEN")
    assert image.to_toml() == (
        'pip = ["torch>=2.5", "numpy"]\n'
        'secrets = ["HF_TOKEN"]\n\n'
        '[env]\nSEED = "1"\n\n'
        '[files]\n"a b" = { base64 = "aGk=" }\n'
    )


def test_a_toml_file_speaks_of_the_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("hello")
    (tmp_path / "image.toml").write_text('[files]\n"words.txt" = "words.txt"\n')
    for source in (tmp_path / "image.toml", str(tmp_path / "image.toml")):
        assert unpacked(Image.from_toml(source)) == {"work/words.txt": b"hello"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pips = ['torch']\n", "no field 'pips'; did you mean pip"),
        ("pip = [\n", "this image is not valid TOML: "),
        ("pip = [3]\n", r"pip\[0\] must be text such as 'torch>=2.5'"),
        ("[files]\na = {base65 = 'x'}\n", "must be a local path or {base64 = '…'}"),
        ("[files]\na = {base64 = 'x'}\n", "must be a local path or {base64 = '…'}"),
        ("/there/is/none.toml", "the image file /there/is/none.toml cannot be read: .*No such file"),
    ],
)
def test_toml_that_cannot_be_meant_is_refused(text: str, says: str) -> None:
    with pytest.raises(ImageError, match=says):
        Image.from_toml(text)


@pytest.mark.parametrize(
    ("text", "says"), [("{", "not valid JSON"), ("[]", "must be an object such as"), ('{"env": 3}', "env must map")]
)
def test_json_that_cannot_be_meant_is_refused(text: str, says: str) -> None:
    with pytest.raises(ImageError, match=says):
        Image.from_json(text)


# --- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"pips": ["torch"]}, "no field 'pips'; did you mean pip"),
        ({"enviroment": {}}, r"no field 'enviroment'; did you mean env\? \(the fields are python, pip, "),
        ({"python": "3.99"}, f"Python 3.99 is not available; python='auto' takes this client's version, {MINE}"),
        ({"python": "abc"}, "'auto' or a minor version such as"),
        ({"python": 3.11}, "'auto' or a minor version such as"),
        ({"python": OTHER}, f"they travel as bytecode, and bytecode of {MINE} does not run on {OTHER}"),
        ({"pip": 3}, r"pip must be a list such as \['torch>=2.5', 'numpy'\], not 3"),
        ({"pip": {"torch": "2"}}, "pip must be a list"),
        ({"pip": ["torch", ""]}, r"pip\[1\] must be text"),
        ({"pip": "torch numpy"}, r"is not a requirement such as 'torch>=2.5'; did you mean \['torch', 'numpy'\]"),
        ({"pip": "torch=2.5"}, "'torch=2.5' is not a requirement"),
        ({"pip": "--pre"}, "not options of pip"),
        ({"pip": "./mine"}, "exists only on this machine; send it with files= and install it with run="),
        ({"pip": "mine @ file:///x"}, "exists only on this machine"),
        ({"pip": "mine-1.0-py3-none-any.whl"}, "exists only on this machine"),
        ({"pip": "git+https://me:pw@x.org/y"}, "the URL of x.org contains a password"),
        ({"pip_indexes": ["https://x"]}, "pip_indexes must map the URL of an index"),
        ({"pip_indexes": {"pytorch": ["torch"]}}, "not 'pytorch'"),
        ({"pip_indexes": {"https://a": "six", "https://b": "six"}}, "takes six from two indexes: https://a and"),
        ({"pip_indexes": {"https://me:pw@x.org/y": "six"}}, "the URL of x.org contains a password"),
        ({"apt": "git curl"}, r"not a Debian package such as .*; did you mean \['git', 'curl'\]"),
        ({"apt": ["git; rm -rf /"]}, "not a Debian package"),
        ({"apt": "git-"}, "not a Debian package such as .*; apt would remove a package"),
        ({"env": {"SEED": 1}}, r"env\['SEED'\] must be text such as '1', not 1 of type int"),
        ({"env": {"A-B": "1"}}, "env must name variables such as 'HF_TOKEN', not 'A-B'"),
        ({"env": {"SKYPOOL_HOME": "/"}}, "one of skypool's own variables"),
        ({"env": ["A=1"]}, "env must map variables to their values"),
        ({"secrets": {"TOKEN": 7}}, r"secrets\['TOKEN'\] must be text such as '1', not a value of type int"),
        ({"files": ["a"]}, "files must map places on the node"),
        ({"files": {"../a": b""}}, "leads out of its folder"),
        ({"files": {"~joe/a": b""}}, "another user's home"),
        ({"files": {"/": "a"}}, "not a place for a file"),
        ({"files": {"a/": b"x"}}, "to write bytes, add a file name to it"),
        ({"files": {"a": None}}, "a local path or bytes, not None"),
        ({"include": "/etc"}, "include takes paths in the project's folder"),
        ({"include": ["../x"]}, "include takes paths in the project's folder"),
        ({"include": "**.py"}, r"include: \*\* must stand alone between slashes"),
        ({"base": 3}, "base must be text"),
        ({"cuda": "twelve"}, "cuda must be a version such as '12.8', not 'twelve'"),
        ({"rocm": 6.3}, "rocm must be a version such as '6.3', not 6.3"),
        ({"mirror_local": "yes"}, "mirror_local must be True or False"),
    ],
)
def test_what_cannot_be_meant_is_refused_where_it_is_written(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ImageError, match=says):
        Image(**wrong)


@pytest.mark.parametrize(
    "line",
    [
        "six",
        "six == 1.16.0",
        "a.b_c-d[x,y]>=1,<2 ; python_version < '4'",
        "six (>=1)",
        "x~=1.4.2,!=1.4.5",
        "x @ https://x.org/x.whl",
        "git+https://github.com/a/b@v1",
        "torch==2.9.0+cpu",
        "https://me:${TOKEN}@x.org/x.whl",
    ],
)
def test_requirements_of_every_form_are_taken(line: str) -> None:
    assert Image(pip=line).spec.pip == (line,)


@pytest.mark.parametrize("text", ["echo SKYPOOL_END", "a\nSKYPOOL_TEXT\nb"])
def test_a_command_that_would_end_its_own_text_is_refused(text: str) -> None:
    with pytest.raises(ImageError, match="which skypool uses to mark the end of"):
        Image(run=text).script()


def test_a_client_of_another_python_cannot_be_served() -> None:
    with pytest.raises(ImageError, match=f"asks for Python {MINE}, and the client has 3.99"):
        Image(python=MINE).script(python=(3, 99))
    assert "choose_python 3.99" in Image().script(python=(3, 99))


# --- secrets -------------------------------------------------------------------------------------------------


def test_a_secret_is_in_nothing_that_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "hunter2")
    image = Image(secrets={"GIVEN": "hunter2"}, files={"a": b"x"}, run="echo $GIVEN", pip="six").secrets("FROM_HERE")
    assert image.secret_values() == {"GIVEN": "hunter2", "FROM_HERE": "hunter2"}
    shown = [repr(image), repr(image.spec), image.to_toml(), image.to_json(), image.script(), str(image.steps())]
    assert not [each for each in shown if "hunter2" in each]
    assert b"hunter2" not in b"".join(unpacked(image).values())
    assert "GIVEN" in repr(image)


def test_the_value_of_a_secret_changes_no_hash() -> None:
    one, two = Image(secrets={"A": "1"}), Image(secrets={"A": "2"})
    assert one.hash == two.hash == Image(secrets="A").hash
    assert hash(one) == hash(two)


def test_a_chain_keeps_the_values_of_secrets() -> None:
    image = Image(secrets={"A": "1"}).pip("six").secrets(B="2").env(C="3")
    assert image.secret_values() == {"A": "1", "B": "2"}


def test_a_secret_that_is_not_there_is_named_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    image = Image(secrets=["NOT_THERE"])
    with pytest.raises(ImageError, match=r"\$NOT_THERE, which this process does not have in its environment; export"):
        image.secret_values()
    monkeypatch.setenv("NOT_THERE", "")
    assert image.secret_values() == {"NOT_THERE": ""}


# --- payload -------------------------------------------------------------------------------------------------


def unpacked(image: Image) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(image.payload())) as archive:
        return {each.name: archive.extractfile(each).read() for each in archive}  # type: ignore[union-attr]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("src/a.py", "src/deep/b.py", "src/__pycache__/a.pyc", "data/big.bin", "run.sh", ".git/config"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "run.sh").chmod(0o755)
    return tmp_path


@pytest.mark.slow
def test_large_files_are_packed_piece_by_piece_and_said(tmp_path: Path) -> None:
    """A process of its own, as its largest memory is measured: files of 96 MB may cost it a tenth of that."""
    for n in range(3):
        (tmp_path / f"{n}.bin").write_bytes(os.urandom(1 << 20) * 32)
    code = """
        import resource, sys
        from skypool_images import Image
        image, said = Image(files={"data": sys.argv[1]}), []
        Image(files={"a": b"a"}).pack()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        packed = image.pack(lambda done, total: said.append((done, total)))
        image.script(packed=packed)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, packed.size)
        print(said[-1] == (96 << 20,) * 2, len(said), said == sorted(said))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    kib, size, is_whole, steps, is_sorted = done.stdout.split() or [done.stderr]
    assert (is_whole, is_sorted) == ("True", "True")
    assert int(steps) > 90
    assert int(size) > 1 << 20
    assert int(kib) < 10_000


def test_what_cannot_become_smaller_is_not_compressed_and_gzip_reads_all(tmp_path: Path) -> None:
    contents = {"noise": os.urandom(3 << 20), "words": b"forty-two words of a text " * 100_000, "empty": b""}
    packed = Image(files=contents).pack()
    assert packed is not None
    assert packed.size < 1.03 * len(contents["noise"]), "the noise as it is, and the words in little"
    (tmp_path / "a.tar.gz").write_bytes(bytes(packed))
    subprocess.run(["gzip", "-t", tmp_path / "a.tar.gz"], check=True, timeout=60)
    subprocess.run(["tar", "-xzf", tmp_path / "a.tar.gz", "-C", tmp_path], check=True, timeout=60)
    assert {name: (tmp_path / "work" / name).read_bytes() for name in contents} == contents


def test_files_are_compressed_once_for_all_that_a_pool_asks_of_its_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, whole = [], file_archive.pack

    def counted(*args: Any) -> Any:
        count.append(args)
        return whole(*args)

    monkeypatch.setattr(file_archive, "pack", counted)
    (tmp_path / "a").write_text("a")
    image = Image(files={"a": str(tmp_path / "a")})
    packed = image.pack()
    assert image.script("cuda", packed=packed) == image.script("cuda")
    assert not image.bare(packed=packed)
    assert len(count) == 2


def test_a_file_that_becomes_shorter_while_it_is_packed_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1 << 20))

    def shorten(done: int, total: int) -> None:
        os.truncate(tmp_path / "a", 0)

    with pytest.raises(ImageError, match=r"files: .*/a cannot be read: it became shorter"):
        Image(files={"a": str(tmp_path / "a")}).pack(shorten)


def test_nothing_to_send_is_no_payload() -> None:
    assert Image(pip="six").payload() == b""
    assert Image(pip="six").payload_name() == ""


def test_the_same_files_give_the_same_bytes_whenever_they_were_written(project: Path) -> None:
    image = Image(folder=project, include=["src", "*.sh"], files={"x": b"1"})
    first = image.payload()
    for path in project.rglob("*"):
        os.utime(path, (1, 1))
    assert image.payload() == first
    (project / "src/a.py").write_text("changed")
    assert image.payload() != first


def test_globs_keep_their_relative_places_and_leave_out_what_nobody_wants(project: Path) -> None:
    image = Image(folder=project, include=["**/*"], exclude=["*.bin", "src/deep"])
    assert sorted(unpacked(image)) == ["work/run.sh", "work/src/a.py"]
    assert sorted(unpacked(Image(folder=project, include="src"))) == ["work/src/a.py", "work/src/deep/b.py"]


def test_files_go_where_they_are_told_with_their_modes(project: Path) -> None:
    image = Image(folder=project, files={"/opt/run": "run.sh", "~/s": "src", "in/": "run.sh", "b": b"bytes"})
    assert sorted(unpacked(image)) == ["home/s/a.py", "home/s/deep/b.py", "root/opt/run", "work/b", "work/in/run.sh"]
    with tarfile.open(fileobj=io.BytesIO(image.payload())) as archive:
        modes = {each.name: each.mode for each in archive}
    assert (modes["root/opt/run"], modes["work/b"]) == (0o755, 0o644)


def test_a_link_that_goes_round_in_circles_is_followed_once(project: Path) -> None:
    (project / "src/loop").symlink_to(project / "src")
    assert sorted(unpacked(Image(folder=project, files={"s": "src"}))) == ["work/s/a.py", "work/s/deep/b.py"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"files": {"a": "none.txt"}}, "files: .*none.txt cannot be read: No such file"),
        ({"include": "*.none"}, r"include: '\*.none' matches no file to send in "),
    ],
)
def test_a_local_file_that_is_not_there_is_named(project: Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ImageError, match=says):
        Image(folder=project, **fields).payload()


# --- what is to be installed ---------------------------------------------------------------------------------


def wanted(image: Image, **known: Any) -> requirements.WantedPackages:
    return requirements.wanted(image.spec, recipes.Packages(**known), MINE)


def test_requirements_are_read_with_all_that_they_include(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        "# ours\n-r more.txt\n--extra-index-url https://x.org/simple\nsix==1.16.0 \\\n  --hash=sha256:ab  # why\n"
    )
    (tmp_path / "more.txt").write_text("numpy<3; sys_platform == 'win32'\n-c limits.txt\ngit+https://x.org/y\n")
    (tmp_path / "limits.txt").write_text("idna<4\n")
    got = wanted(Image(folder=tmp_path, requirements="requirements.txt"))
    assert got.lines == (
        "numpy<3; sys_platform == 'win32'",
        "git+https://x.org/y",
        "--extra-index-url https://x.org/simple",
        "six==1.16.0 --hash=sha256:ab",
    )
    assert got.constraints == ("idna<4",)
    assert got.distributions == ["six"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("six\n-e .\n", "requirements.txt, line 2: nodes do not support the option '-e .'"),
        ("./mine\n", "requirements.txt, line 1: './mine' exists only on this machine"),
        ("-r requirements.txt\n", "which in turn includes"),
        ("-r none.txt\n", "none.txt cannot be read: No such file"),
        ("--find-links wheels\n", "'wheels' exists only on this machine"),
        ("--index-url https://me:pw@x.org/\n", "the URL of x.org contains a password"),
        ("six 1.16\n", "'six 1.16' is not a requirement"),
    ],
)
def test_requirements_that_no_node_can_follow_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "requirements.txt").write_text(text)
    with pytest.raises(ImageError, match=says):
        Image(folder=tmp_path, requirements="requirements.txt").script()


@pytest.mark.parametrize(("text", "says"), [("[tool.x]\n", "has no table .project."), ("[", "is not valid TOML")])
def test_a_pyproject_that_says_nothing_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ImageError, match=r"pyproject: .*pyproject.toml cannot be read"):
        Image(folder=tmp_path, pyproject=".").script()
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ImageError, match=says):
        Image(folder=tmp_path, pyproject=".").script()


PROJECT = '[project]\nname = "mine"\nversion = "1"\n'
LOCK = 'version = 1\n[[package]]\nname = "six"\nversion = "1"\nsource = { registry = "https://pypi.org/simple" }\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('dynamic = ["dependencies"]\n', "the dependencies of .* are dynamic, .* lock them with `uv lock`"),
        ('requires-python = ">=3.99"\n', rf"requires Python >=3.99, but nodes run the client's Python {MINE}"),
        ('dependencies = ["six", "lib>=1"]\n[tool.uv.sources]\nLib = { path = "../lib" }\n', "takes lib from this"),
        ('dependencies = ["lib"]\n[tool.uv.sources]\nlib = { workspace = true }\n', "takes lib from this machine"),
    ],
)
def test_a_project_that_no_node_can_install_is_refused_before_there_is_one(
    tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT + text)
    with pytest.raises(ImageError, match=says):
        Image(folder=tmp_path, pyproject=".").script()


def test_a_project_says_by_its_lock_what_it_depends_on_and_where_that_is(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(f'{PROJECT}dynamic = ["dependencies"]\n')
    (tmp_path / "uv.lock").write_text(LOCK)
    image = Image(folder=tmp_path, pyproject=".")
    assert image.script()
    assert image.pip_indexes({"https://pypi.org/simple/": "six", "https://x.org": "idna"}).script()
    with pytest.raises(ImageError, match=r"takes six from https://x.org, and uv.lock from https://pypi.org/simple: "):
        image.pip_indexes({"https://x.org": "six"}).script()


@pytest.mark.parametrize(
    ("asked", "admitted"),
    [
        ("", "3.8 3.11 3.12 3.14"),
        (">=3.11", "3.11 3.12 3.14"),
        (">=3.11,<3.13", "3.11 3.12"),
        (">=3.11.4, <3.12.0", "3.11"),
        ("<3.12.1", "3.8 3.11 3.12"),
        ("==3.12.*", "3.12"),
        ("~=3.11", "3.11 3.12 3.14"),
        ("~=3.11.2", "3.11"),
        (">3.8,!=3.12.*,!=3.11.1", "3.8 3.11 3.14"),
        (">=3", "3.8 3.11 3.12 3.14"),
    ],
)
def test_which_python_a_project_admits(asked: str, admitted: str) -> None:
    assert " ".join(m for m in ("3.8", "3.11", "3.12", "3.14") if requirements.admits(asked, m)) == admitted


def test_what_an_accelerator_has_instead_is_asked_for() -> None:
    got = wanted(Image(pip=["jax==0.5", "jax[cpu]", "jaxlib"]), instead={"jax": "jax[tpu]"})
    assert got.named == ("jax[tpu]==0.5", "jax[cpu]", "jaxlib")


def test_an_index_of_ones_own_is_stronger_than_that_of_the_accelerator() -> None:
    indexes = ("https://download.pytorch.org/whl/rocm6.4", "https://x.org")
    assert wanted(Image(pip="torch"), indexes=indexes).torch == "rocm6.4"
    mine = wanted(Image(pip_indexes={"https://y.org": "torch"}), indexes=indexes)
    assert (mine.torch, mine.indexes, mine.named, mine.sources) == (
        "",
        ("https://x.org",),
        ("torch",),
        (("torch", "https://y.org"),),
    )


def test_the_environment_here_is_made_again_but_for_what_is_only_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str, version: str, origin: dict[str, Any] | None = None) -> None:
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if origin:
            (info / "direct_url.json").write_text(json.dumps(origin))

    installed("torch", "2.9.0+cpu")
    installed("Zope_Thing", "1.0")
    installed("nvidia-cudnn-cu12", "9.1")
    installed("pip", "25.0")
    installed("mine", "0.1", {"url": "file:///home/me/mine", "dir_info": {"editable": True}})
    installed("other", "1", {"url": "https://x.org/o", "vcs_info": {"vcs": "git", "commit_id": "abc"}})
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert mirror.here({"numpy"}) == (
        ["other @ git+https://x.org/o@abc", "torch==2.9.0", "zope-thing==1.0"],
        ["mine 0.1 is editable here (file:///home/me/mine) and is left out"],
    )
    assert mirror.here({"torch"})[0] == ["other @ git+https://x.org/o@abc", "zope-thing==1.0"]


def test_an_image_that_only_needs_python_says_so() -> None:
    assert Image(env={"A": "1"}, secrets="B").bare()
    assert not Image(pip="six").bare()
    assert not Image(run="true").bare()


def test_a_variable_with_which_linux_starts_no_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = "x" * (131_071 - len("BIG="))
    subprocess.run(["true"], env={"BIG": Image(env={"BIG": fits}).spec.env[0][1]}, check=True)
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["true"], env={"BIG": fits + "x"}, check=False)
    for named in ("env", "secrets"):
        with pytest.raises(ImageError, match=rf"{named}\['BIG'\] has 131,072 bytes .*send it as a file"):
            Image(**{named: {"BIG": fits + "x"}})  # type: ignore[arg-type] # for both
    with pytest.raises(ImageError, match="env has more than 1,000,000 characters"):
        Image(env={f"V{n}": "x" * 100_000 for n in range(10)})
    monkeypatch.setenv("BIG", fits + "x")
    with pytest.raises(ImageError, match=r"secrets\['BIG'\] has 131,072 bytes"):
        Image(secrets=["BIG"]).secret_values()
