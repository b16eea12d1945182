"""`Image`: what the user wants on a node beside its base image."""

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
"""What others call a field."""

PathLike = str | os.PathLike[str]
Texts = str | Iterable[str]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Image:
    """What is on a node beside its base image: written at once, or piece by piece.

        Image(pip=["torch>=2.5"], apt=["git"], env={"SEED": "1"})
        Image().pip("torch>=2.5").apt("git").env(SEED="1")

    Each keyword is a method, too, which returns a new image: lists grow, mappings are merged, the rest is replaced.
    What was asked stands in `spec`. Equal words make equal images.

    Args:
        python: "auto" is this client's minor version; another one is refused, as functions travel as bytecode.
        pip: requirements such as "torch>=2.5".
        requirements: a requirements.txt, read when the script is made.
        pyproject: a pyproject.toml or its folder, whose dependencies are installed; as locked, where a uv.lock is.
        lock: the uv.lock of that project, where it is elsewhere.
        pip_indexes: URL of an index -> what is installed from it, and from nowhere else.
        apt: Debian packages, also as NAME=VERSION.
        env: environment variables for every call and command.
        secrets: environment variables whose values are in no script, text or hash: names, taken from this process's
            environment when a pool starts, or a mapping to their values.
        files: place on the node -> local path (a file or a folder) or bytes. Relative places are where calls run.
        include: globs of the project's folder to send; they keep their relative places.
        exclude: globs of what is not sent of these.
        run: shell commands, one step each, in the folder where calls run.
        base: the base image, or provider -> its base image.
        cuda, neuron, rocm: the version of that SDK.
        mirror_local: install what is installed here, in the same versions.
        folder: the project's folder, from which local paths go.

    Raises:
        ImageError: a field that cannot be meant, with the nearest right spelling.
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
        return self._with(python=version)

    def pip(self, *requirements: str) -> Image:
        return self._with(pip=(*self.spec.pip, *spec.texts("pip", requirements, "'torch>=2.5'")))

    def requirements(self, path: PathLike) -> Image:
        return self._with(requirements=path)

    def pyproject(self, path: PathLike = ".", *, lock: PathLike | None = None) -> Image:
        return self._with(pyproject=path, lock=lock)

    def lock(self, path: PathLike) -> Image:
        return self._with(lock=path)

    def pip_indexes(self, indexes: Mapping[str, Texts]) -> Image:
        return self._with(pip_indexes={**dict(self.spec.pip_indexes), **indexes})

    def apt(self, *packages: str) -> Image:
        return self._with(apt=(*self.spec.apt, *spec.texts("apt", packages, "'git'")))

    def env(self, variables: Mapping[str, str] | None = None, **more: str) -> Image:
        return self._with(env={**dict(self.spec.env), **(variables or {}), **more})

    def secrets(self, *names: str, **values: str) -> Image:
        """Names taken from this process's environment, and values with their names."""
        asked, _ = spec.secrets_asked(names)
        more, given = spec.secrets_asked(values)
        merged = dataclasses.replace(
            self.spec,
            secrets=tuple(sorted({*self.spec.secrets, *asked, *more})),
            given=tuple(sorted({**dict(self.spec.given), **dict(given)}.items())),
        )
        return _of(merged)

    def files(self, files: Mapping[str, PathLike | bytes]) -> Image:
        return self._with(files={**dict(self.spec.files), **files})

    def include(self, *globs: str) -> Image:
        return self._with(include=(*self.spec.include, *globs))

    def exclude(self, *globs: str) -> Image:
        return self._with(exclude=(*self.spec.exclude, *globs))

    def run(self, *commands: str) -> Image:
        return self._with(run=(*self.spec.run, *commands))

    def base(self, image: str | Mapping[str, str]) -> Image:
        return self._with(base=image)

    def cuda(self, version: str) -> Image:
        return self._with(cuda=version)

    def neuron(self, version: str) -> Image:
        return self._with(neuron=version)

    def rocm(self, version: str) -> Image:
        return self._with(rocm=version)

    def mirror_local(self, on: bool = True) -> Image:
        return self._with(mirror_local=on)

    def folder(self, path: PathLike) -> Image:
        return self._with(folder=path)

    @property
    def hash(self) -> str:
        """Changes with whatever is written in the image; neither with local files nor with the values of secrets."""
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
        """What makes a machine this image, in order; local files are read now.

        Args:
            runtime: the software family of the node's accelerator, such as "cuda".
            python: the minor version that "auto" means; None is this client's.
            mig: partitions of every card; count: accelerators that there must be.
            packed: what `pack` returned, so that files are not read and compressed again.
        """
        name = None if packed is None else packed.name
        return bootstrap.steps(self.spec, bootstrap.Target(runtime, python, mig, count, name))

    def bare(self, runtime: str = "none", packed: Packed | None = None) -> bool:
        """Return True if a Python of the right minor version is all that it takes."""
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
        """Exactly what runs on a node, as shell that a person can read: `steps`, with `title` in its first line."""
        made = self.steps(runtime, python=python, mig=mig, count=count, packed=packed)
        return assemble(made, (title or f"skypool: image {self.hash}").replace("\n", " "))

    def payload(self) -> bytes:
        """`files` and `include` as a tar.gz, which the script expects as $SKYPOOL_HOME/payload/`payload_name()`.

        The same contents give the same bytes; b"" where there is nothing to send.
        """
        packed = self.pack()
        return b"" if packed is None else bytes(packed)

    def pack(self, progress: Progress | None = None) -> Packed | None:
        """Return the same in a temporary file, None where there is nothing to send: whatever its size, memory is not
        needed for it.

        Args:
            progress: called with the bytes that were read so far, and how many there are.
        """
        return payload.pack(self.spec, progress)

    def payload_name(self) -> str:
        """The payload's file name on a node, by its contents; "" where there is nothing to send."""
        packed = self.pack()
        return "" if packed is None else packed.name

    def secret_values(self) -> dict[str, str]:
        """The secrets by name, as they are now; never log this."""
        given = dict(self.spec.given)
        missing = [name for name in self.spec.secrets if name not in given and name not in os.environ]
        if missing:
            raise ImageError(
                f"secrets asks for {' and '.join('$' + name for name in missing)}, which this process does not have; "
                f"export it, or give its value: secrets={{{missing[0]!r}: …}}"
            )
        return {name: given[name] if name in given else os.environ[name] for name in self.spec.secrets}

    def base_for(self, provider: str) -> str | None:
        """The base image asked of a provider; None where it may choose."""
        base = self.spec.base
        return dict(base).get(provider) if isinstance(base, tuple) else base

    def to_toml(self) -> str:
        return document.to_toml(document.json_fields(self.spec))

    def to_json(self) -> str:
        return json.dumps(document.json_fields(self.spec), indent=2, ensure_ascii=False)

    @classmethod
    def from_toml(cls, source: PathLike) -> Image:
        """An image from TOML, or from a file of it, whose local paths then go from that file's folder.

        Args:
            source: a path, or text; a string of one line that ends with ".toml" is a path.
        """
        if isinstance(source, str) and ("\n" in source or not source.endswith(".toml")):
            return _from(document.from_toml(source))
        fields = document.from_toml(document.read_file(Path(source)))
        folder = Path(source).parent / str(fields.get("folder", "."))
        return _from({**fields, "folder": str(folder)})

    @classmethod
    def from_json(cls, text: str) -> Image:
        return _from(document.from_json(text))

    def __repr__(self) -> str:
        parts = (f"{name}={value!r}" for name, value in document.given_fields(self.spec).items())
        return f"Image({', '.join(parts)})"

    def _with(self, **changed: Any) -> Image:
        fields = _fields(self.spec)
        secrets = {name: fields.pop(name) for name in ("secrets", "given")}
        return _of(dataclasses.replace(_checked({**fields, **changed}), **secrets))


def _fields(spec: Spec) -> dict[str, Any]:
    """The fields of a spec as its constructor takes them."""
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
    """A spec of what was written, or ImageError for the first field that cannot be meant."""
    known = [each.name for each in dataclasses.fields(Spec) if each.name != "given"]
    for name in fields:
        if name not in known:
            words = {**dict(zip(known, known, strict=True)), **_OTHER_WORDS}
            raise ImageError(f"Image has no field {name!r}{nearest(name, words)} (it has {', '.join(known)})")
    get = fields.get
    names, given = spec.secrets_asked(get("secrets", ()))
    mirror = get("mirror_local", False)
    if not isinstance(mirror, bool):
        raise ImageError(f"mirror_local is True or False, not {mirror!r}")
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
