"""A project is found from any of its files, and its secrets stay on this computer."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from skypool.errors import UsageError
from skypool.files.entries import walk
from skypool.files.project import Project, Unsent, surveyed

SECRETS = {
    ".env": "A=1", "sub/.env.local": "A=1", "prod.env": "A=1", ".netrc": "machine x", "home/.aws/credentials": "[a]",
    "key.pem": "x", "deploy/tls.key": "x", "id_rsa": "x", "sub/id_ed25519": "x", "terraform.tfstate": "{}",
    "infra/terraform.tfstate.backup": "{}", "my-service-account.json": "{}", ".git-credentials": "x", ".pypirc": "x",
    ".kube/config": "x", ".docker/config.json": "{}", ".ssh/config": "x", "secrets.toml": "a=1", "store.p12": "x",
    "deploy_key": "-----BEGIN OPENSSH PRIVATE KEY-----\nx", "gcp.json": json.dumps({"type": "service_account"}),
    "hf/token": f"hf_{'a' * 34}\n",
    ".config/gh/hosts.yml": "x", ".runpod/config.toml": "x", ".vast_api_key": "x", "home/.kaggle/kaggle.json": "{}",
    "putty": "PuTTY-User-Key-File-3: x", "adc.json": '{\n "type": "authorized_user"}',
    "bom.json": '\ufeff{"type": "service_account"}', ".secrets": "x", "kubeconfig.yaml": "x",
    "tls.yaml": "key: |\n  -----BEGIN RSA PRIVATE KEY-----\n  x", "registry.json": '{"auths": {"x.io": {"auth": "x"}}}',
    "user.conf": f"users:\n- user:\n    client-key-data: {'x' * 50}", "keys.txt": f"# made\nAGE-SECRET-KEY-1{'Q' * 58}",
    "profile": f"[default]\naws_secret_access_key = {'x' * 40}",
}  # fmt: skip
OURS = {
    "train.py": "1", "secrets.py": "import secrets", "environment.yml": "x", "keys.py": "-----x", "id_rsa.pub": "x",
    "login.py": "aws_secret_access_key = os.environ['AWS_SECRET_ACCESS_KEY']", "kubeconfig.py": "x",
    "blank": "\n" * 65536, "test_keys.py": 'KEY = "-----BEGIN PRIVATE KEY-----"',
    "data.json": '{"type": "table", "auths": {}}', "src/p/__init__.py": "",
}  # fmt: skip


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)


def put(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def sent(root: Path, unsent: Unsent) -> set[str]:
    return {each.path for each in walk(str(root), unsent) if each.kind == "f"}


@pytest.mark.parametrize("with_git", [True, False])
def test_secrets_and_caches_are_not_sent(with_git: bool, tmp_path: Path) -> None:
    put(tmp_path, {**SECRETS, **OURS, "__pycache__/a.pyc": "x", "env/pyvenv.cfg": "x", "env/bin/python": "x"})
    if with_git:
        git(tmp_path, "init")
        git(tmp_path, "add", "-f", ".")  # also if they are tracked
    unsent = Unsent(tmp_path)
    assert sent(tmp_path, unsent) == {*OURS}
    for path in SECRETS:
        parts = path.split("/")
        assert any("/".join(parts[: n + 1]) in unsent.told for n in range(len(parts)))


@pytest.mark.parametrize("path", SECRETS)
def test_a_secret_that_is_named_is_sent_alone(path: str, tmp_path: Path) -> None:
    put(tmp_path, {**SECRETS, **OURS})
    assert sent(tmp_path, Unsent(tmp_path, include=[path])) == {*OURS, path}


def test_an_included_folder_sends_what_is_ignored_there_and_no_secrets(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            ".gitignore": "data\n",
            "data/a.csv": "x",
            "data/.env": "x",
            "data/deep/key": "-----BEGIN PRIVATE KEY-----\nx",
        },
    )
    put(tmp_path, {"home/.aws/config": "x", "home/.aws/credentials": "x"})
    unsent = Unsent(tmp_path, include=["data", "home/.aws/config"])
    assert sent(tmp_path, unsent) == {".gitignore", "data/a.csv", "home/.aws/config"}
    assert {"data/.env", "data/deep/key", "home/.aws/credentials"} <= unsent.told.keys()
    assert "home/.aws/credentials" in sent(tmp_path, Unsent(tmp_path, include=["home/.aws"]))


def test_what_git_tracks_is_sent_though_a_pattern_matches_and_what_it_ignores_is_not(tmp_path: Path) -> None:
    put(tmp_path, {".gitignore": "*.log\n/data\n", "kept.log": "x", "new.log": "x", "data/big": "x", "new.py": "x"})
    put(tmp_path, {"sub/.gitignore": "*.py\n", "sub/a.py": "x", "sub/b.txt": "x", ".git/info/exclude": "private\n"})
    git(tmp_path, "init")
    put(tmp_path, {".git/info/exclude": "private\n", "private": "x", "gone": "x"})
    git(tmp_path, "add", "-f", "kept.log", "gone")
    (tmp_path / "gone").unlink()
    unsent = Unsent(tmp_path)
    assert sent(tmp_path, unsent) == {".gitignore", "kept.log", "new.py", "sub/.gitignore", "sub/b.txt"}
    assert {path for path, why in unsent.told.items() if why == "it is ignored"} == {
        "new.log", "data", "sub/a.py", "private",
    }  # fmt: skip
    assert "data/big" in sent(tmp_path, Unsent(tmp_path, include=["data"]))


def test_submodules_and_checkouts_inside_are_sent(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for each in (inner, outer, outer / "nested"):
        each.mkdir(parents=True)
        git(each, "init")
        put(each, {".gitignore": "*.log\n", "a.py": "x", "a.log": "x"})
    git(inner, "add", ".")
    git(inner, "commit", "-m", "a")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "add", str(inner), "sub")
    put(outer, {"sub/new.py": "x", "sub/new.log": "x"})
    names = {".gitignore", "a.py"}
    expected = names | {f"nested/{each}" for each in names} | {f"sub/{each}" for each in names}
    assert sent(outer, Unsent(outer)) == expected | {".gitmodules", "sub/new.py"}
    git(outer, "add", ".gitmodules", "sub")
    git(outer, "commit", "-m", "a")
    cloned = tmp_path / "cloned"
    git(tmp_path, "clone", str(outer), str(cloned))
    assert (cloned / "sub").is_dir()  # and empty, as its files are fetched by another command
    assert sent(cloned, Unsent(cloned)) == {".gitmodules"}


def test_git_starts_no_program_that_a_checkout_names(tmp_path: Path) -> None:
    put(tmp_path, {"a": "x", "out/b": "x"})
    for each in (tmp_path, tmp_path / "out"):
        git(each, "init")
        git(each, "config", "core.fsmonitor", f"touch {tmp_path / 'started'}; false")
    assert sent(tmp_path, Unsent(tmp_path)) == {"a", "out/b"}
    assert not (tmp_path / "started").exists()


def test_a_project_that_an_outer_checkout_ignores_is_sent(tmp_path: Path) -> None:
    put(tmp_path, {".gitignore": "scratch\n", "scratch/p/pyproject.toml": "", "scratch/p/a": "x"})
    git(tmp_path, "init")
    assert sent(tmp_path / "scratch" / "p", Unsent(tmp_path / "scratch" / "p")) == {"a", "pyproject.toml"}


def test_what_skypoolignore_names_is_not_sent_in_a_checkout_either(tmp_path: Path) -> None:
    put(tmp_path, {".gitignore": "*.log\n", ".skypoolignore": "data\n", "data/a": "x", "b": "x", "c.log": "x"})
    git(tmp_path, "init")
    git(tmp_path, "add", "-f", "c.log", "data")
    assert sent(tmp_path, Unsent(tmp_path)) == {".gitignore", ".skypoolignore", "b", "c.log"}


def test_a_member_of_a_workspace_has_its_root(tmp_path: Path) -> None:
    put(tmp_path, {"w/pyproject.toml": "[tool.uv.workspace]\nmembers=['p']", "w/uv.lock": "", "w/p/pyproject.toml": ""})
    assert Project.of(tmp_path / "w" / "p").root == tmp_path / "w"


def test_what_a_workspace_does_not_name_is_a_project_of_its_own(tmp_path: Path) -> None:
    said = "[tool.uv.workspace]\nmembers=['packages/*', 3, '/etc']\nexclude=['packages/old']"
    names = ("packages/a", "packages/old", "examples")
    put(tmp_path, {"w/pyproject.toml": said, **{f"w/{each}/pyproject.toml": "" for each in names}})
    roots = [Project.of(tmp_path / "w" / each).root for each in names]
    assert roots == [tmp_path / "w", tmp_path / "w" / "packages/old", tmp_path / "w" / "examples"]
    put(tmp_path, {"w/packages/a/src/train.py": ""})
    assert Project.of(tmp_path / "w/packages/a/src/train.py").root == tmp_path / "w"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("uv.lock", "[[package]]\nname = 'lib'\nsource = { editable = '../lib' }"),
        ("pyproject.toml", "[project]\nname='a'\n[tool.uv.sources]\nlib = [{ path = '../lib', editable = true }]"),
        ("requirements.txt", "six\n-e ../lib\n"),
        ("requirements.txt", "-r../lib/x.txt\n"),
        ("requirements.txt", "./../lib[extra] ; python_version > '3'\n"),
    ],
)
def test_a_package_outside_of_the_project_is_refused(name: str, text: str, tmp_path: Path) -> None:
    put(tmp_path, {f"p/{name}": text, "lib/x.txt": ""})
    with pytest.raises(UsageError, match=rf"p/{name} takes .* from {tmp_path}/lib.*, which is not in the project"):
        Project.of(tmp_path / "p").check_paths()
    put(tmp_path, {f"p/{name}": text.replace("../lib", "lib").replace("./lib[", "./lib["), "p/lib/x.txt": ""})
    Project.of(tmp_path / "p").check_paths()


@pytest.mark.parametrize("path", [".", "..", "../x", "/etc"])
def test_an_include_outside_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a path that is included must lie below"):
        Unsent(tmp_path, include=[path])


@pytest.mark.parametrize("text", ["[build-system]\nrequires='x'", "[build-system]\nrequires=[1]"])
def test_what_is_no_list_of_texts_is_refused(text: str, tmp_path: Path) -> None:
    put(tmp_path, {"pyproject.toml": text})
    with pytest.raises(UsageError, match="requires must be a list of texts"):
        _ = Project.of(tmp_path).versions


def test_the_state_of_skypool_is_not_sent(tmp_path: Path) -> None:
    put(tmp_path, {"a": "x", "state/skypool/ledger": "x"})
    assert sent(tmp_path, Unsent(tmp_path, state=[tmp_path / "state" / "skypool"])) == {"a"}


def test_an_include_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no 'x' in the project"):
        Unsent(tmp_path, include=["x"])


@pytest.mark.parametrize(
    ("files", "root", "source", "python"),
    [
        ({"p/pyproject.toml": "[project]\nname='p'\nrequires-python='>=3.12'"}, "p", "pyproject.toml", ">=3.12"),
        ({"p/pyproject.toml": "[project]\nname='p'", "p/uv.lock": ""}, "p", "uv.lock", ""),
        ({"p/pyproject.toml": "[tool.ruff]", "p/requirements.txt": "six"}, "p", "requirements.txt", ""),
        ({"p/requirements.txt": "six", "p/.python-version": "3.12\n"}, "p", "requirements.txt", "==3.12.*"),
        ({"p/.python-version": "3.12.1"}, "p/sub/deep", "", ""),
        (
            {"p/requirements.txt": "", "p/.python-version": "# ours\n3.12.1\n3.11\n"},
            "p",
            "requirements.txt",
            "==3.12.1",
        ),
        ({"p/requirements.txt": "", "p/.python-version": "cpython-3.11"}, "p", "requirements.txt", "==3.11.*"),
        ({"p/requirements.txt": "", "p/.python-version": "my-environment"}, "p", "requirements.txt", ""),
        ({"p/pyproject.toml": "[project]\nname='p'", "p/sub/requirements.txt": ""}, "p/sub", "requirements.txt", ""),
        ({}, "p/sub/deep", "", ""),
    ],
)
def test_a_project_is_found_from_a_script(
    files: dict[str, str], root: str, source: str, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    put(tmp_path, {"p/sub/deep/train.py": "print()", **files})
    for target in ("p/sub/deep/train.py", "p/sub/deep"):
        found = Project.of(tmp_path / target)
        assert (found.root, found.source, found.python) == (tmp_path / root, source, python)


def test_a_home_folder_that_is_a_checkout_is_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    put(tmp_path, {".git/HEAD": "", "scripts/train.py": ""})
    assert Project.of(tmp_path / "scripts" / "train.py").root == tmp_path / "scripts"


def test_a_home_folder_itself_is_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    put(tmp_path / "home", {"train.py": "", ".git/HEAD": ""})
    for each in (tmp_path / "home" / "train.py", tmp_path / "home", tmp_path):
        with pytest.raises(UsageError, match="put what you run into a folder of its own"):
            Project.of(each)


def test_the_header_of_a_script_comes_before_the_project(tmp_path: Path) -> None:
    header = '# /// script\n# requires-python = ">=3.13"\n# dependencies = ["six"]\n# ///\n'
    put(tmp_path, {"pyproject.toml": "[project]\nname='p'", "a.py": f"#!/usr/bin/env python\n{header}import six\n"})
    found = Project.of(tmp_path / "a.py")
    assert (found.root, found.source, found.python) == (tmp_path, "script", ">=3.13")
    put(tmp_path, {"b.py": header + "\n" + header, "c.py": "# /// script\n# x = \n# ///\n"})
    with pytest.raises(UsageError, match="has 2 blocks"):
        Project.of(tmp_path / "b.py")
    with pytest.raises(UsageError, match=r"c\.py is not valid"):
        Project.of(tmp_path / "c.py")


@pytest.mark.parametrize(
    ("tag", "commits", "dirty", "version"),
    [
        ("v1.2.3", 0, False, r"1\.2\.3"),
        ("pkg-2.0", 2, False, r"2\.1\.dev2\+g\w+"),
        ("1.0", 0, True, r"1\.1\.dev0\+g\w+"),
    ],
)
def test_a_version_that_git_tells_travels_as_a_variable(
    tag: str, commits: int, dirty: bool, version: str, tmp_path: Path
) -> None:
    build = "[build-system]\nrequires = ['hatchling', 'hatch-vcs>=0.4']\n[project]\nname='p'\ndynamic=['version']\n"
    put(tmp_path, {"pyproject.toml": build})
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "a")
    git(tmp_path, "tag", tag)
    for _ in range(commits):
        git(tmp_path, "commit", "--allow-empty", "-m", "b")
    if dirty:
        put(tmp_path, {"pyproject.toml": build + "# changed\n"})
    ((name, value),) = Project.of(tmp_path).versions.items()
    assert name == "SETUPTOOLS_SCM_PRETEND_VERSION"
    assert re.fullmatch(version, value), value


def test_a_version_is_told_of_this_project_alone(tmp_path: Path) -> None:
    put(tmp_path, {"pyproject.toml": "[build-system]\nrequires=['setuptools-scm>=8']\n[project]\nname='My.pkg-a'\n"})
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "a")
    git(tmp_path, "tag", "v3.1")
    assert Project.of(tmp_path).versions == {"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_MY_PKG_A": "3.1"}


def test_a_version_that_is_written_down_needs_no_variable(tmp_path: Path) -> None:
    put(tmp_path, {"pyproject.toml": "[build-system]\nrequires=['setuptools-scm']\n[project]\nname='p'\nversion='1'"})
    assert Project.of(tmp_path).versions == {}


def test_links_that_lead_out_of_a_project_are_told(tmp_path: Path) -> None:
    put(tmp_path, {"data/big.csv": "x", "project/sub/a.py": "1"})
    root = tmp_path / "project"
    out = {"data": "../data", "all": "..", "whole": str(root / "sub")}
    for name, target in {**out, "sub/b.py": "a.py", "here": ".", "gone": "nothing"}.items():
        (root / name).symlink_to(target)
    survey = surveyed(Project(root, "", ""))
    assert survey.links_out == out
    assert survey.paths == {*out, "sub/a.py", "sub/b.py", "here", "gone"}
