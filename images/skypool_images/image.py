"""`Image`: the packages, files, variables and commands that the user wants on a node (a rented machine of a pool)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

from skypool_images import document, field_checks, file_archive, steps
from skypool_images.errors import ImageError, nearest
from skypool_images.field_checks import Spec
from skypool_images.file_archive import Packed, Progress
from skypool_images.script import Step, assemble
from skypool_images.sent_project import SentProject

_OTHER_WORDS = {"environment": "env", "packages": "pip", "dependencies": "pip", "commands": "run", "docker": "base"}
"""A dict from a field name that other tools use, such as "packages", to the field that an error message suggests."""

PathLike = str | os.PathLike[str]
Texts = str | Iterable[str]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Image:
    """The contents of a node beside its base image: packages, files, variables and commands.

        Image(pip=["torch>=2.5"], apt=["git"], env={"SEED": "1"})
        Image().pip("torch>=2.5").apt("git").env(SEED="1")

    Each keyword is also a method. An image never changes: the methods return a new image, in which lists are extended,
    mappings are merged, and other values are replaced. The checked fields are in the attribute `spec`. Images with
    equal fields are equal. The methods raise ImageError for values that are not valid.

    Args:
        python: minor version of Python. "auto" means the client's version. No other version is accepted, because
            functions are sent as bytecode.
        pip: requirements such as "torch>=2.5".
        requirements: path of a requirements.txt, which is read when the setup script is made.
        pyproject: path of a pyproject.toml, or its folder. The project's dependencies are installed, in the versions of
            uv.lock if there is such a file.
        lock: path of the project's uv.lock. None means the uv.lock beside the pyproject.toml, if there is one.
        project: a folder or script of a project. Its files are sent to the folder where calls run, except secrets,
            caches and what git ignores, and its packages are installed from there: those of the script's header, else
            of uv.lock, pyproject.toml, requirements.txt or setup.py.
        pip_indexes: the requirements that are installed only from a package index, by the index's URL.
        apt: Debian packages, as NAME or NAME=VERSION.
        env: environment variables for all calls and commands.
        secrets: environment variables whose values appear in no script, text or hash. For a list of names, the values
            are read from the client's environment when a pool starts. A mapping of name to value gives values directly.
        files: a local path (of a file or a folder) or bytes by place on the node. Relative places are in the folder
            where calls run.
        include: globs such as "src/**" of files in the project's folder to send. The files keep their relative paths.
        exclude: globs of files that are not sent, although `include` matches them.
        run: shell commands that set up the node. They run in the folder where calls run. Each one is a step of its own.
        base: the base image, or a mapping of provider to base image. None leaves the choice to skypool's code for the
            provider (the driver).
        cuda: version of CUDA's toolkit to install. None installs no toolkit.
        neuron: version of the Neuron SDK to install. None takes the newest packages.
        rocm: version of ROCm to install. None installs only the parts that Python packages need.
        mirror_local: True installs the Python packages of the client's environment, in the same versions.
        folder: the project's folder, from which relative local paths start.

    Raises:
        ImageError: a field is unknown or not valid. The message suggests the nearest valid spelling.
    """

    spec: Spec

    def __init__(
        self,
        *,
        python: str = "auto",
        pip: Texts = (),
        requirements: PathLike | None = None,
        pyproject: PathLike | None = None,
        lock: PathLike | None = None,
        project: PathLike | None = None,
        pip_indexes: Mapping[str, Texts] | None = None,
        apt: Texts = (),
        env: Mapping[str, str] | None = None,
        secrets: Texts | Mapping[str, str] = (),
        files: Mapping[str, PathLike | bytes] | None = None,
        include: Texts = (),
        exclude: Texts = (),
        run: Texts = (),
        base: str | Mapping[str, str] | None = None,
        cuda: str | None = None,
        neuron: str | None = None,
        rocm: str | None = None,
        mirror_local: bool = False,
        folder: PathLike = ".",
        **unknown: Never,
    ) -> None:
        fields = {k: v for k, v in locals().items() if k not in ("self", "unknown", "__class__")}
        object.__setattr__(self, "spec", _checked({**fields, **unknown}))

    def python(self, version: str) -> Image:
        """Return a new image with this minor version of Python.

        `version` is "auto", or the client's own minor version such as "3.11". Other versions are refused.
        """
        return self._with(python=version)

    def pip(self, *requirements: str) -> Image:
        """Return a new image with these requirements added. Duplicates are dropped."""
        return self._with(pip=(*self.spec.pip, *field_checks.texts("pip", requirements, "'torch>=2.5'")))

    def requirements(self, path: PathLike) -> Image:
        """Return a new image with this requirements.txt in place of an earlier one.

        A relative path starts from the project's folder. The file need not exist yet.
        """
        return self._with(requirements=path)

    def pyproject(self, path: PathLike = ".", *, lock: PathLike | None = None) -> Image:
        """Return a new image with this pyproject.toml in place of an earlier one. The file is not read yet.

        Args:
            path: the file, or the folder that contains the file.
            lock: path of the uv.lock; None takes the uv.lock beside the pyproject.toml, if there is one.
        """
        return self._with(pyproject=path, lock=lock)

    def lock(self, path: PathLike) -> Image:
        """Return a new image with this uv.lock in place of an earlier one.

        If the image has no pyproject.toml, the pyproject.toml in the lock file's folder is used. No file is read yet.
        """
        return self._with(lock=path)

    def project(self, path: PathLike = ".") -> Image:
        """Return a new image with this project in place of an earlier one: a folder, or a script in it.

        Nothing is read yet. A pool looks at the project when it starts.
        """
        return self._with(project=path)

    def pip_indexes(self, indexes: Mapping[str, Texts]) -> Image:
        """Return a new image with these package indexes added.

        `indexes` is a dict from the URL of an index to the requirements that are installed only from this index.
        Earlier requirements for the same URL are replaced. A package must not come from two indexes.
        """
        return self._with(pip_indexes={**dict(self.spec.pip_indexes), **indexes})

    def apt(self, *packages: str) -> Image:
        """Return a new image with these Debian packages added, each NAME or NAME=VERSION. Duplicates are dropped."""
        return self._with(apt=(*self.spec.apt, *field_checks.texts("apt", packages, "'git'")))

    def env(self, variables: Mapping[str, str] | None = None, **more: str) -> Image:
        """Return a new image with these environment variables added. Variables of the same name are replaced.

        Keyword arguments take precedence over `variables`. Names that begin with "SKYPOOL_" are refused.
        """
        return self._with(env={**dict(self.spec.env), **(variables or {}), **more})

    def secrets(self, *names: str, **values: str) -> Image:
        """Return a new image with these secrets added.

        Args:
            names: names of variables that are read from the client's environment when a pool starts. They need not be
                set yet.
            values: variables with their values, as keyword arguments. Earlier values of the same names are replaced.
        """
        asked, _ = field_checks.secrets_asked(names)
        more, given = field_checks.secrets_asked(values)
        merged = dataclasses.replace(
            self.spec,
            secrets=tuple(sorted({*self.spec.secrets, *asked, *more})),
            given=tuple(sorted({**dict(self.spec.given), **dict(given)}.items())),
        )
        return _of(merged)

    def files(self, files: Mapping[str, PathLike | bytes]) -> Image:
        """Return a new image with these files added. A file at the same place is replaced.

        `files` is a dict from the place on the node to a local path (of a file or a folder), or to the contents as
        bytes. Local files are not read yet.
        """
        return self._with(files={**dict(self.spec.files), **files})

    def include(self, *globs: str) -> Image:
        """Return a new image that also sends the files in the project's folder that match these globs."""
        return self._with(include=(*self.spec.include, *globs))

    def exclude(self, *globs: str) -> Image:
        """Return a new image that does not send files that match these globs, such as "*.log".

        They are not sent even if `include` matches them. Files that are given by `files` are sent in any case.
        """
        return self._with(exclude=(*self.spec.exclude, *globs))

    def run(self, *commands: str) -> Image:
        """Return a new image with these shell commands added after the earlier commands.

        Nothing runs now. The commands run on the node, each as a step of its own, in the folder where calls run.
        """
        return self._with(run=(*self.spec.run, *commands))

    def base(self, image: str | Mapping[str, str]) -> Image:
        """Return a new image with this base image in place of an earlier one.

        `image` is one base image for all providers, or a mapping of provider to base image.
        """
        return self._with(base=image)

    def cuda(self, version: str) -> Image:
        """Return a new image with this version of CUDA's toolkit, such as "12.8", in place of an earlier one."""
        return self._with(cuda=version)

    def neuron(self, version: str) -> Image:
        """Return a new image with this version of the Neuron SDK, such as "2.29", in place of an earlier one.

        Whether the version exists is checked when the steps are made.
        """
        return self._with(neuron=version)

    def rocm(self, version: str) -> Image:
        """Return a new image with this version of ROCm, such as "7.2", in place of an earlier one."""
        return self._with(rocm=version)

    def mirror_local(self, on: bool = True) -> Image:
        """Return a new image that installs the Python packages of the client's environment, in the same versions.

        With `on` = False, the new image does not install them.
        """
        return self._with(mirror_local=on)

    def folder(self, path: PathLike) -> Image:
        """Return a new image with this folder of the project, from which relative local paths and globs start.

        The folder need not exist yet. Relative paths that the image already has start from the new folder, too.
        """
        return self._with(folder=path)

    @property
    def hash(self) -> str:
        """Return a hash of the image's fields, as 16 hexadecimal digits.

        Bytes that are given in `files` change the hash. Contents of local files and values of secrets do not.
        """
        return hashlib.sha256(json.dumps(document.json_fields(self.spec), sort_keys=True).encode()).hexdigest()[:16]

    def steps(
        self,
        runtime: str = "none",
        *,
        python: tuple[int, int] | None = None,
        mig: Texts | None = None,
        count: int = 1,
        packed: Packed | None = None,
    ) -> list[Step]:
        """Return the steps that set up a machine, in the order in which they run.

        Nothing runs, but local files are read.

        Args:
            runtime: software family of the node's accelerator, such as "cuda".
            python: minor version of Python to use on the node, such as (3, 11). None means the client's version.
            mig: profiles of the MIG partitions of every NVIDIA card, such as "3g.40gb". None leaves the cards as they
                are.
            count: number of accelerators that must be present.
            packed: the archive that `pack` returned, so that the files are not packed again. None packs them now.

        Raises:
            ImageError: a local file cannot be used, the node's Python is not the image's, or an argument or a version
                is not valid.
        """
        return steps.steps(self.spec, steps.Target(runtime, python, mig, count, packed))

    def bare(self, runtime: str = "none", packed: Packed | None = None) -> bool:
        """Return True if the image needs only a Python of the right minor version on a machine of this runtime.

        All runtimes but "none" need further steps, so that the result is False.

        Args:
            runtime: software family of the node's accelerator, such as "cuda".
            packed: the archive that `pack` returned, so that the files are not packed again. None packs them now.

        Raises:
            ImageError: a local file cannot be used, the runtime is unknown, or a version is not valid.
        """
        return [each.name for each in self.steps(runtime, packed=packed)] == ["python"]

    def script(
        self,
        runtime: str = "none",
        *,
        python: tuple[int, int] | None = None,
        mig: Texts | None = None,
        count: int = 1,
        title: str | None = None,
        packed: Packed | None = None,
    ) -> str:
        """Return the shell script that sets up a node, for people to read. Nothing runs here.

        Args:
            runtime: software family of the node's accelerator, such as "cuda".
            python: minor version of Python to use on the node, such as (3, 11). None means the client's version.
            mig: profiles of the MIG partitions of every NVIDIA card, such as "3g.40gb". None leaves the cards as they
                are.
            count: number of accelerators that must be present.
            title: comment in the script's second line, where line breaks become spaces. None means a comment with the
                image's hash.
            packed: the archive that `pack` returned, so that the files are not packed again. None packs them now.

        Raises:
            ImageError: a local file cannot be used, the node's Python is not the image's, or an argument or a version
                is not valid.
        """
        made = self.steps(runtime, python=python, mig=mig, count=count, packed=packed)
        return assemble(made, (title or f"skypool: image {self.hash}").replace("\n", " "))

    def payload(self) -> bytes:
        """Return the files to send as the bytes of a tar.gz archive; b"" if there are none.

        The setup script expects the archive in the folder $SKYPOOL_HOME/payload on the node, with the name that
        `payload_name` returns. Equal contents give equal bytes.

        Raises:
            ImageError: a local file cannot be read, or a glob matches no file.
        """
        packed = self.pack()
        return b"" if packed is None else bytes(packed)

    def pack(self, progress: Progress | None = None, project: SentProject | None = None) -> Packed | None:
        """Return the files to send as a tar.gz archive in a temporary file; None if there are none.

        Needs little memory, even for large files. The temporary file is deleted with the returned object.

        Args:
            progress: called with the number of bytes read so far and the total number.
            project: what a pool has found of the image's `project`.

        Raises:
            ImageError: a local file cannot be read, a glob matches no file, or `project` is missing.
        """
        return file_archive.pack(self.spec, progress, project)

    def payload_name(self) -> str:
        """Return the name that the archive of the image's files gets on a node; "" if there is nothing to send.

        The name depends only on the contents. The files are read and compressed at each call.

        Raises:
            ImageError: a local file cannot be read, or a glob matches no file.
        """
        packed = self.pack()
        return "" if packed is None else packed.name

    def secret_values(self) -> dict[str, str]:
        """Return the current values of all secrets by name. Never log them.

        A value that was given to the image takes precedence over the environment variable of the same name.

        Raises:
            ImageError: the variable of a secret is not set in the client's environment, or is too long. The message
                names all variables that are not set.
        """
        given = dict(self.spec.given)
        missing = [name for name in self.spec.secrets if name not in given and name not in os.environ]
        if missing:
            raise ImageError(
                f"secrets asks for {' and '.join('$' + name for name in missing)}, which this process does "
                f"not have in its environment; export each variable, or give its value directly: "
                f"secrets={{{missing[0]!r}: …}}"
            )
        found = {name: given[name] if name in given else os.environ[name] for name in self.spec.secrets}
        for name, value in found.items():
            field_checks.check_size("secrets", name, value)
        return found

    def base_for(self, provider: str) -> str | None:
        """Return the base image for a provider, such as "aws"; None if the driver may choose one.

        If `base` is a string, it is for all providers. If it is a mapping that lacks the provider, None is returned.
        """
        base = self.spec.base
        return dict(base).get(provider) if isinstance(base, tuple) else base

    def to_toml(self) -> str:
        """Return the image as TOML text: the fields that differ from the defaults, without values of secrets."""
        return document.to_toml(document.json_fields(self.spec))

    def to_json(self) -> str:
        """Return the image as JSON text: the fields that differ from the defaults, without values of secrets."""
        return json.dumps(document.json_fields(self.spec), indent=2, ensure_ascii=False)

    @classmethod
    def from_toml(cls, source: PathLike) -> Image:
        """Return an image from TOML text or from a TOML file.

        A string of one line that ends with ".toml" is a path, and so is any path object. Other strings are text.
        Relative local paths start from the folder of the TOML file, or for text from the current folder.

        Raises:
            ImageError: the file cannot be read, the text is not TOML, or a field is unknown or not valid.
        """
        if isinstance(source, str) and ("\n" in source or not source.endswith(".toml")):
            return _from(document.from_toml(source))
        fields = document.from_toml(document.read_file(Path(source)))
        folder = Path(source).parent / str(fields.get("folder", "."))
        return _from({**fields, "folder": str(folder)})

    @classmethod
    def from_json(cls, text: str) -> Image:
        """Return an image from JSON text, as `to_json` writes it.

        Raises:
            ImageError: the text is not a JSON object, or a field is unknown or not valid.
        """
        return _from(document.from_json(text))

    def __repr__(self) -> str:
        parts = (f"{name}={value!r}" for name, value in document.given_fields(self.spec).items())
        return f"Image({', '.join(parts)})"

    def _with(self, **changed: Any) -> Image:
        fields = _fields(self.spec)
        secrets = {name: fields.pop(name) for name in ("secrets", "given")}
        return _of(dataclasses.replace(_checked({**fields, **changed}), **secrets))


def _fields(spec: Spec) -> dict[str, Any]:
    """Return a spec's fields by name, as `Image` takes them. The key "given" has the secrets with given values."""
    fields = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}
    for name in ("env", "files", "pip_indexes"):
        fields[name] = dict(fields[name])
    if isinstance(spec.base, tuple):
        fields["base"] = dict(spec.base)
    return fields


def _of(spec: Spec) -> Image:
    image = object.__new__(Image)
    object.__setattr__(image, "spec", spec)
    return image


def _from(fields: Mapping[str, Any]) -> Image:
    return _of(_checked(fields))


def _checked(fields: Mapping[str, Any]) -> Spec:
    """Return the checked fields of an image. Missing fields get their defaults. Raise ImageError for an invalid one."""
    known = [each.name for each in dataclasses.fields(Spec) if each.name != "given"]
    for name in fields:
        if name not in known:
            words = {**dict(zip(known, known, strict=True)), **_OTHER_WORDS}
            raise ImageError(f"Image has no field {name!r}{nearest(name, words)} (the fields are {', '.join(known)})")
    get = fields.get
    names, given = field_checks.secrets_asked(get("secrets", ()))
    mirror = get("mirror_local", False)
    if not isinstance(mirror, bool):
        raise ImageError(f"mirror_local must be True or False, not {mirror!r}")
    lock, pyproject = (
        field_checks.path(name, get(name), such) for name, such in (("lock", "'uv.lock'"), ("pyproject", "'.'"))
    )
    if lock is not None and pyproject is None:
        pyproject = os.path.dirname(lock) or "."
    project = field_checks.path("project", get("project"), "'.'")
    if project is not None and pyproject is not None:
        other = "pyproject" if lock is None else "lock"
        raise ImageError(f"project={project!r} installs what the files of the project name; leave out {other}=")
    listed = field_checks.once("pip", get("pip", ()), "'torch>=2.5', 'numpy'")
    return Spec(
        python=field_checks.python_asked(get("python", "auto")),
        pip=tuple(field_checks.requirement("pip", each) for each in listed),
        requirements=field_checks.path("requirements", get("requirements"), "'requirements.txt'"),
        pyproject=pyproject,
        lock=lock,
        project=project,
        pip_indexes=field_checks.indexes_asked(get("pip_indexes") or {}),
        apt=field_checks.packages_asked(get("apt", ())),
        env=field_checks.variables("env", get("env") or {}),
        secrets=names,
        files=field_checks.files_asked(get("files") or {}),
        include=field_checks.globs("include", get("include", ())),
        exclude=field_checks.globs("exclude", get("exclude", ())),
        run=field_checks.texts("run", get("run", ()), "'make -C src'"),
        base=field_checks.base_asked(get("base")),
        cuda=field_checks.version("cuda", get("cuda"), "12.8"),
        neuron=field_checks.version("neuron", get("neuron"), "2.21"),
        rocm=field_checks.version("rocm", get("rocm"), "6.3"),
        mirror_local=mirror,
        folder=field_checks.path("folder", get("folder", "."), "'.'") or ".",
        given=given,
    )
