"""Converts an image's fields into the steps that set up a machine."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from skypool_images import file_archive, recipes, requirements
from skypool_images.errors import ImageError
from skypool_images.field_checks import Pairs, Spec, distribution
from skypool_images.file_archive import Packed
from skypool_images.requirements import TORCH, WantedPackages
from skypool_images.script import Step, program, shell
from skypool_images.sent_project import SentProject

_TEXT = "SKYPOOL_TEXT"
"""The line that marks the end of a file's text in the setup script."""
_HALF_AN_HOUR = 1800
_AN_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Target:
    """The facts about a machine that decide which steps set up an image on it.

    Attributes:
        runtime: software family of the accelerator, such as "cuda".
        python: minor version of Python to use, such as (3, 11). None means the client's version.
        mig: MIG profiles of every NVIDIA card; None leaves the cards as they are.
        count: number of accelerators that must be present.
        payload: the archive with the image's files. None if they are not packed yet: `steps` then packs them, because
            their contents decide its name.
    """

    runtime: str = "none"
    python: tuple[int, int] | None = None
    mig: str | Iterable[str] | None = None
    count: int = 1
    payload: Packed | None = None


def steps(spec: Spec, node: Target) -> list[Step]:
    """Return the steps that set up an image on a machine, in the order in which they run.

    The order is: Debian packages, the accelerator's software, Python, Python packages, files, and the user's commands.
    The files come before the Python packages if a project is among them. Steps that the image does not need are left
    out, except "python". Local files are read; nothing runs.

    Raises:
        ImageError: the image needs another Python than the client's, or a local file or a version cannot be used.
    """
    client = "{}.{}".format(*(node.python or sys.version_info))
    minor = client if spec.python == "auto" else spec.python
    if minor != client:
        raise ImageError(
            f"this image asks for Python {minor}, and the client has {client}, but both must be the same: use "
            f"python='auto', or run the client with Python {minor}"
        )
    accelerator, packages = _accelerator(spec, node, minor)
    wanted = requirements.wanted(spec, packages, minor)
    made = [*_apt(spec), *accelerator, _python(minor)]
    before = [minor]
    archive = node.payload or file_archive.pack(spec)
    project = archive.project if archive else None
    if archive and project:
        made.append(_files(archive.name, file_archive.roots(spec)))
    if wanted or (project and (project.install or project.packages)):
        key = wanted.key(minor, node.runtime, spec.cuda, spec.rocm, spec.neuron, *([project.key] if project else []))
        made.append(_env(wanted, minor, key, project))
        before.append(key)
    if archive:
        before.append(archive.name)
        if not project:
            made.append(_files(archive.name, file_archive.roots(spec)))
    return [*made, *_runs(spec, before)]


def _accelerator(spec: Spec, node: Target, minor: str) -> tuple[list[Step], recipes.Packages]:
    mig = node.mig if node.mig is None or isinstance(node.mig, str) else list(node.mig)
    try:
        made = recipes.recipe(
            node.runtime,
            cuda=spec.cuda,
            neuron=spec.neuron,
            rocm=spec.rocm,
            mig=mig,
            count=node.count,
            python=minor,
        )
        return made, recipes.packages(node.runtime, cuda=spec.cuda, rocm=spec.rocm)
    except ImageError:
        raise
    except ValueError as error:
        raise ImageError(str(error)) from error


def _apt(spec: Spec) -> list[Step]:
    if not spec.apt:
        return []
    names = " ".join(map(shlex.quote, spec.apt))
    return [Step("apt", f"apt_install {names}", f"at_hand {names}", retries=3)]


def _python(minor: str) -> Step:
    check = (
        'echo "$SKYPOOL_PYTHON" > "$B/command"\n'
        '[ "${SKYPOOL_CHOSEN:-}" = "${SKYPOOL_PRESET:-}" ]\n'
        f'"$SKYPOOL_PYTHON" -I -S -c \'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "{minor}")\''
    )
    return Step("python", f"choose_python {minor}", check, retries=3)


def _env(wanted: WantedPackages, minor: str, key: str, project: SentProject | None) -> Step:
    folder = f"E=$SKYPOOL_HOME/envs/{key}\n"
    parts = [shell("env"), folder + "R=$B/env", 'rm -rf "$R"\nmkdir -p "$R/project" "$R/scoped"']
    parts += [f"echo {shlex.quote(note)}" for note in wanted.notes]
    parts += _exports(wanted.build_env)
    parts += _exports(project.env) if project else []
    for name, text in {**_texts(wanted, minor), **_sent(project)}.items():
        if text:
            parts.append(_file(f'"$R/{name}"', text))
    parts.append(f"begin_env {minor}\nfill_env\nend_env")
    installed = shlex.quote(program("installed.py"))
    check = [
        f'{folder}echo "check that $E is complete" > "$B/command"',
        '[ -e "$E/.whole" ]',
        " ".join(['"$E/bin/python" -I -c', installed, *wanted.distributions]),
    ]
    if project and project.install:  # it refers to the files there
        check.append('[ "$(cat "$E/.sent_to")" = "$SKYPOOL_WORK" ]')
    return Step("env", "\n".join(parts), "\n".join(check), limit=_HALF_AN_HOUR, retries=3)


def _texts(wanted: WantedPackages, minor: str) -> dict[str, str]:
    """Return a dict from file name to text, "" for no file: lists of packages for uv, and for pip if uv is missing."""
    torch = [f"{TORCH}{wanted.torch}"] if wanted.torch else []
    toml = [_head(minor, wanted.named)]
    if wanted.indexes or wanted.links:
        toml.append(f"\n[tool.uv]\nfind-links = {_list(wanted.links)}")
    if wanted.indexes:  # like pip, take the newest version of all indexes
        toml.append('index-strategy = "unsafe-best-match"')
        toml += [f"\n[[tool.uv.index]]\nurl = {json.dumps(url)}" for url in wanted.indexes]
    sources = _sources(wanted)
    chosen = [(url, each) for name, url in wanted.sources for each in wanted.named if _is(each, name)]
    return {
        "pyproject.toml": "\n".join([*toml, *sources]),
        "scoped/pyproject.toml": "\n".join([_head(minor, [each for _, each in chosen]), *sources] if chosen else []),
        "named.txt": "\n".join([*wanted.named, *wanted.dependencies]),
        "sources.txt": "\n".join(f"{url} {each}" for url, each in chosen),
        "requirements.txt": "\n".join(wanted.lines),
        "pip.txt": "\n".join(
            [f"--extra-index-url {url}" for url in (*wanted.indexes, *torch)]
            + [f"--find-links {u}" for u in wanted.links]
        ),
        "torch.txt": "\n".join(torch),
        "constraints.txt": "\n".join(wanted.constraints),
        "project/pyproject.toml": wanted.project,
        "project/uv.lock": wanted.lock,
    }


def _sent(project: SentProject | None) -> dict[str, str]:
    """Return a dict from file name to text, "" for no file: how the packages of a project are installed."""
    if project is None:
        return {}
    return {
        "sent.txt": shlex.join(project.install),
        "sent_packages.txt": "\n".join(project.packages),
        "only_uv.txt": project.only_uv,
    }


def _head(minor: str, dependencies: Iterable[str]) -> str:
    return (
        '[project]\nname = "skypool-environment"\nversion = "0"\n'
        f'requires-python = "=={minor}.*"\ndependencies = {_list(dependencies)}'
    )


def _sources(wanted: WantedPackages) -> list[str]:
    """Return the lines of a pyproject.toml that tell uv which index each package comes from."""
    if not wanted.sources:
        return []
    named = {url: _slug(url) for _, url in wanted.sources}
    toml = [
        f"\n[[tool.uv.index]]\nname = {json.dumps(name)}\nurl = {json.dumps(url)}\nexplicit = true"
        for url, name in named.items()
    ]
    return [
        *toml,
        "\n[tool.uv.sources]",
        *(f"{n} = {{ index = {json.dumps(named[url])} }}" for n, url in wanted.sources),
    ]


def _is(requirement: str, name: str) -> bool:
    return distribution(requirement) == name


def _list(texts: Iterable[str]) -> str:
    lines = "".join(f"\n    {json.dumps(each, ensure_ascii=False)}," for each in texts)
    return f"[{lines}\n]" if lines else "[]"


def _slug(url: str) -> str:
    """Return a name of a package index for uv, such as "a-org-whl" for "https://a.org/whl/"."""
    # uv derives its variables UV_INDEX_<NAME>_USERNAME and UV_INDEX_<NAME>_PASSWORD from this name
    return re.sub(r"[^a-z0-9]+", "-", url.partition("://")[2].lower()).strip("-")


def _file(path: str, text: str) -> str:
    if f"\n{_TEXT}\n" in f"\n{text}\n":
        raise ImageError(
            f"a text in the image contains the line {_TEXT}, which skypool uses to mark the end of texts; "
            "remove that line"
        )
    return f"cat > {path} <<'{_TEXT}'\n{text.rstrip()}\n{_TEXT}"


def _files(name: str, roots: Iterable[str]) -> Step:
    known = f"P=$SKYPOOL_HOME/payload/{name}\nU=$SKYPOOL_HOME/payload/unpacked\n"
    unpacks = "\n".join(f'unpack {root} "{place}"' for root, place in file_archive.PLACES.items() if root in roots)
    check = (
        f'{known}echo "check that all files are there" > "$B/command"\n'
        '[ "$(head -n 1 "$U")" = "$P $SKYPOOL_WORK" ]\nall_there < "$U"'
    )
    files = shell("files")
    return Step("files", f"{files}\n{known}ready_to_unpack\n{unpacks}\nunpacked", f"{files}\n{check}")


def _runs(spec: Spec, before: list[str]) -> list[Step]:
    """Return a step for each command of the user. If a text in `before` changes, a node runs all commands again."""
    made = []
    for number, command in enumerate(spec.run, 1):
        lines = [f"# after {' '.join(before)}", f"from_here {number}", 'cd "$SKYPOOL_WORK"', *_exports(spec.env)]
        lines += ['PATH=$(dirname "$SKYPOOL_PYTHON"):$PATH', "export PATH"]
        lines += [_file('"$B/command"', command), 'umask "${SKYPOOL_UMASK:-022}"  # as calls have it']
        lines += ['exec sh -c "$(cat "$B/command")"']
        made.append(Step(f"run-{number}", "\n".join(lines), limit=_AN_HOUR))
        before = [made[-1].hash]
    return made


def _exports(env: Pairs) -> list[str]:
    if not env:
        return []
    pairs = " \\\n    ".join(f"{name}={shlex.quote(value)}" for name, value in env)
    return [f"# shellcheck disable=SC2016\nexport {pairs}"]
