"""`Image`: packages, files, variables and commands that the user wants on a node."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

from skypool_images import bootstrap, document, payload, spec
from skypool_images.errors import ImageError, nearest
from skypool_images.payload import Packed, Progress
from skypool_images.spec import Spec
from skypool_images.steps import Step, assemble

_OTHER_WORDS = {"environment": "env", "packages": "pip", "dependencies": "pip", "commands": "run", "docker": "base"}
"""Names that other tools use for a field, for suggestions."""

PathLike = str | os.PathLike[str]
Texts = str | Iterable[str]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Image:
    """Contents of a node beside its base image: packages, files, variables, commands.

        Image(pip=["torch>=2.5"], apt=["git"], env={"SEED": "1"})
        Image().pip("torch>=2.5").apt("git").env(SEED="1")

    Each keyword is also a method, which returns a new image. Lists are extended, mappings are merged, other values are
    replaced. The checked fields are in `spec`. Images with equal fields are equal.

    Args:
        python: minor version of Python. "auto" is this client's version, and no other is accepted, because functions
            travel as bytecode.
        pip: requirements such as "torch>=2.5".
        requirements: path of a requirements.txt, which is read when the script is made.
        pyproject: path of a pyproject.toml, or its folder. Its dependencies are installed, in the versions of uv.lock
            if there is one.
        lock: path of that project's uv.lock if it is in another folder.
        pip_indexes: for the URL of a package index, the requirements that are installed only from it.
        apt: Debian packages, as NAME or NAME=VERSION.
        env: environment variables for all calls and commands.
        secrets: environment variables whose values appear in no script, text or hash. Names are read from this
            process's environment when a pool starts; a mapping gives values directly.
        files: for a place on the node, a local path (a file or a folder) or bytes. Relative places are in the folder
            where calls run.
        include: globs of files in the project's folder to send. The files keep their relative paths.
        exclude: globs of files that `include` matches and that are not sent.
        run: shell commands to run in the folder where calls run. Each is a step of its own.
        base: the base image, or a mapping of provider to base image.
        cuda: version of CUDA's toolkit to install.
        neuron: version of the Neuron SDK to install.
        rocm: version of ROCm to install.
        mirror_local: install the packages of this machine's environment in the same versions.
        folder: the project's folder. Relative local paths start from it.

    Raises:
        ImageError: a field is not valid. The message suggests the nearest valid spelling.
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
        """Return a new image with this minor version of Python, or "auto"."""
        return self._with(python=version)

    def pip(self, *requirements: str) -> Image:
        """Return a new image with these requirements added."""
        return self._with(pip=(*self.spec.pip, *spec.texts("pip", requirements, "'torch>=2.5'")))

    def requirements(self, path: PathLike) -> Image:
        """Return a new image with this requirements.txt."""
        return self._with(requirements=path)

    def pyproject(self, path: PathLike = ".", *, lock: PathLike | None = None) -> Image:
        """Return a new image with this pyproject.toml, and with this uv.lock or the one beside it."""
        return self._with(pyproject=path, lock=lock)

    def lock(self, path: PathLike) -> Image:
        """Return a new image with this uv.lock."""
        return self._with(lock=path)

    def pip_indexes(self, indexes: Mapping[str, Texts]) -> Image:
        """Return a new image with these package indexes added."""
        return self._with(pip_indexes={**dict(self.spec.pip_indexes), **indexes})

    def apt(self, *packages: str) -> Image:
        """Return a new image with these Debian packages added."""
        return self._with(apt=(*self.spec.apt, *spec.texts("apt", packages, "'git'")))

    def env(self, variables: Mapping[str, str] | None = None, **more: str) -> Image:
        """Return a new image with these environment variables added. Variables of the same name are replaced."""
        return self._with(env={**dict(self.spec.env), **(variables or {}), **more})

    def secrets(self, *names: str, **values: str) -> Image:
        """Return a new image with these secrets added.

        Args:
            names: variables to read from this process's environment when a pool starts.
            values: variables with their values.
        """
        asked, _ = spec.secrets_asked(names)
        more, given = spec.secrets_asked(values)
        merged = dataclasses.replace(
            self.spec,
            secrets=tuple(sorted({*self.spec.secrets, *asked, *more})),
            given=tuple(sorted({**dict(self.spec.given), **dict(given)}.items())),
        )
        return _of(merged)

    def files(self, files: Mapping[str, PathLike | bytes]) -> Image:
        """Return a new image with these files added. A file at the same place is replaced."""
        return self._with(files={**dict(self.spec.files), **files})

    def include(self, *globs: str) -> Image:
        """Return a new image with these globs of files to send added."""
        return self._with(include=(*self.spec.include, *globs))

    def exclude(self, *globs: str) -> Image:
        """Return a new image with these globs of files not to send added."""
        return self._with(exclude=(*self.spec.exclude, *globs))

    def run(self, *commands: str) -> Image:
        """Return a new image with these shell commands added at the end."""
        return self._with(run=(*self.spec.run, *commands))

    def base(self, image: str | Mapping[str, str]) -> Image:
        """Return a new image with this base image, or with a mapping of provider to base image."""
        return self._with(base=image)

    def cuda(self, version: str) -> Image:
        """Return a new image with this version of CUDA's toolkit."""
        return self._with(cuda=version)

    def neuron(self, version: str) -> Image:
        """Return a new image with this version of the Neuron SDK."""
        return self._with(neuron=version)

    def rocm(self, version: str) -> Image:
        """Return a new image with this version of ROCm."""
        return self._with(rocm=version)

    def mirror_local(self, on: bool = True) -> Image:
        """Return a new image that installs the packages of this machine's environment, or does not if `on` is False."""
        return self._with(mirror_local=on)

    def folder(self, path: PathLike) -> Image:
        """Return a new image with this folder of the project, from which local paths start."""
        return self._with(folder=path)

    @property
    def hash(self) -> str:
        """Return a hash of the image's fields. Contents of local files and values of secrets do not change it."""
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
        """Return the steps that set up a machine, in order. Local files are read now.

        Args:
            runtime: software family of the node's accelerator, such as "cuda".
            python: minor version that "auto" stands for, such as (3, 11). None stands for this client's version.
            mig: partitions of every card. None leaves the cards as they are.
            count: number of accelerators that must be present.
            packed: result of `pack`, so that files are not read and compressed again.

        Raises:
            ImageError: a local file cannot be used, or the node's Python is not the image's.
        """
        name = None if packed is None else packed.name
        return bootstrap.steps(self.spec, bootstrap.Target(runtime, python, mig, count, name))

    def bare(self, runtime: str = "none", packed: Packed | None = None) -> bool:
        """Return True if the image needs only a Python of the right minor version."""
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
        """Return the shell script that sets up a node, for people to read. It runs the same steps as `steps`.

        Args:
            runtime: see `steps`.
            python: see `steps`.
            mig: see `steps`.
            count: see `steps`.
            title: comment in the script's second line. By default the image's hash.
            packed: see `steps`.
        """
        made = self.steps(runtime, python=python, mig=mig, count=count, packed=packed)
        return assemble(made, (title or f"skypool: image {self.hash}").replace("\n", " "))

    def payload(self) -> bytes:
        """Return `files` and `include` as a tar.gz archive; b"" if there is nothing to send.

        The script expects it at $SKYPOOL_HOME/payload/`payload_name()`. Equal contents give equal bytes.
        """
        packed = self.pack()
        return b"" if packed is None else bytes(packed)

    def pack(self, progress: Progress | None = None) -> Packed | None:
        """Return the archive of `payload` in a temporary file, or None if there is nothing to send.

        Large files need little memory.

        Args:
            progress: function to call with the bytes read so far and their total.

        Raises:
            ImageError: a local file cannot be read, or a glob matches no file.
        """
        return payload.pack(self.spec, progress)

    def payload_name(self) -> str:
        """Return the archive's file name on a node, "" if there is nothing to send. It depends only on the contents."""
        packed = self.pack()
        return "" if packed is None else packed.name

    def secret_values(self) -> dict[str, str]:
        """Return the current values of all secrets by name. Never log them.

        Raises:
            ImageError: a variable is not set in this process's environment.
        """
        given = dict(self.spec.given)
        missing = [name for name in self.spec.secrets if name not in given and name not in os.environ]
        if missing:
            raise ImageError(
                f"secrets asks for {' and '.join('$' + name for name in missing)}, which is not set in this process; "
                f"export it, or give its value: secrets={{{missing[0]!r}: …}}"
            )
        return {name: given[name] if name in given else os.environ[name] for name in self.spec.secrets}

    def base_for(self, provider: str) -> str | None:
        """Return the base image for a provider, or None if the provider may choose one."""
        base = self.spec.base
        return dict(base).get(provider) if isinstance(base, tuple) else base

    def to_toml(self) -> str:
        """Return the image as TOML. Values of secrets are left out."""
        return document.to_toml(document.json_fields(self.spec))

    def to_json(self) -> str:
        """Return the image as JSON. Values of secrets are left out."""
        return json.dumps(document.json_fields(self.spec), indent=2, ensure_ascii=False)

    @classmethod
    def from_toml(cls, source: PathLike) -> Image:
        """Return an image from TOML text or from a TOML file.

        Local paths in a file are relative to the file's folder.

        Args:
            source: a path or the text itself. A string of one line that ends with ".toml" is a path.

        Raises:
            ImageError: the file cannot be read, the text is not TOML, or a field is not valid.
        """
        if isinstance(source, str) and ("\n" in source or not source.endswith(".toml")):
            return _from(document.from_toml(source))
        fields = document.from_toml(document.read_file(Path(source)))
        folder = Path(source).parent / str(fields.get("folder", "."))
        return _from({**fields, "folder": str(folder)})

    @classmethod
    def from_json(cls, text: str) -> Image:
        """Return an image from JSON text.

        Raises:
            ImageError: the text is not a JSON object, or a field is not valid.
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
    """Return the fields of a spec as arguments of `Image`."""
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
    """Return a spec of these fields.

    Raises:
        ImageError: a field is not valid. The first such field is reported.
    """
    known = [each.name for each in dataclasses.fields(Spec) if each.name != "given"]
    for name in fields:
        if name not in known:
            words = {**dict(zip(known, known, strict=True)), **_OTHER_WORDS}
            raise ImageError(f"Image has no field {name!r}{nearest(name, words)} (it has {', '.join(known)})")
    get = fields.get
    names, given = spec.secrets_asked(get("secrets", ()))
    mirror = get("mirror_local", False)
    if not isinstance(mirror, bool):
        raise ImageError(f"mirror_local must be True or False, not {mirror!r}")
    lock, pyproject = (spec.path(name, get(name), such) for name, such in (("lock", "'uv.lock'"), ("pyproject", "'.'")))
    if lock is not None and pyproject is None:
        pyproject = os.path.dirname(lock) or "."
    listed = spec.once("pip", get("pip", ()), "'torch>=2.5', 'numpy'")
    return Spec(
        python=spec.python_asked(get("python", "auto")),
        pip=tuple(spec.requirement("pip", each) for each in listed),
        requirements=spec.path("requirements", get("requirements"), "'requirements.txt'"),
        pyproject=pyproject,
        lock=lock,
        pip_indexes=spec.indexes_asked(get("pip_indexes") or {}),
        apt=spec.packages_asked(get("apt", ())),
        env=spec.variables("env", get("env") or {}),
        secrets=names,
        files=spec.files_asked(get("files") or {}),
        include=spec.globs("include", get("include", ())),
        exclude=spec.globs("exclude", get("exclude", ())),
        run=spec.texts("run", get("run", ()), "'make -C src'"),
        base=spec.base_asked(get("base")),
        cuda=spec.version("cuda", get("cuda"), "12.8"),
        neuron=spec.version("neuron", get("neuron"), "2.21"),
        rocm=spec.version("rocm", get("rocm"), "6.3"),
        mirror_local=mirror,
        folder=spec.path("folder", get("folder", "."), "'.'") or ".",
        given=given,
    )
