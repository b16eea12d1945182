"""The public API is what tests/samples/public_api.txt says, so that a change of it is seen.

After a change that is meant, `python -m tests.test_public_api` writes the file anew (`make public-api` does, too).
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "tests" / "samples" / "public_api.txt"
PAGE = (ROOT / "docs" / "stability.md").read_text()
PUBLIC = ("skypool", "skypool.model", "skypool.errors", "skypool.drivers", "skypool.testing", "skypool.devices")
"""Modules whose `__all__` is public; of skypool it is `dir()`, as its drivers are found by their packages.

Of skypool.accelerators the factories are left out: they follow from its data.
"""
OURS = ("skypool", "skypool_")
LONGEST = 60
"""A constant whose repr is longer is told by its type alone."""


def public_api() -> list[str]:
    """Return a line for each public name, and for each public method and attribute of public classes."""
    lines: list[str] = []
    for module in PUBLIC:
        found = importlib.import_module(module)
        for name in dir(found) if found is skypool else found.__all__:
            lines += described(f"{module}.{name}", getattr(found, name))
    accelerators = importlib.import_module("skypool.accelerators")
    for name in sorted(accelerators._WHERE):
        lines += described(f"skypool.accelerators.{name}", getattr(accelerators, name))
    return lines


def described(name: str, value: Any) -> Iterator[str]:
    """Yield the lines of one name; of a class with all that its users see."""
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        yield f"class {name}({bases})"
        if not issubclass(value, BaseException) or "__init__" in vars(value):
            yield f"{name}{signature(value)}"
        yield from members(name, value)
    elif inspect.ismodule(value):
        if name in ("skypool.accelerators", "skypool.devices"):  # these have lists of their own
            yield f"module {name}"
            return
        listed = getattr(value, "__all__", None) or [
            each
            for each, one in vars(value).items()
            if not each.startswith("_")
            and not isinstance(one, (types.ModuleType, typing.TypeVar))
            and (getattr(one, "__module__", value.__name__) == value.__name__ or isinstance(one, (str, float)))
            and not (each == "TYPE_CHECKING" or each == "annotations")
        ]
        yield f"module {name}"
        for each in sorted(listed):
            yield from described(f"{name}.{each}", getattr(value, each))
    elif inspect.isroutine(value):
        kind = "async " if inspect.iscoroutinefunction(value) else ""
        yield f"{kind}{name}{signature(value)}"
    else:
        text = repr(value)
        yield f"{name} = {text}" if len(text) <= LONGEST else f"{name}: {type(value).__name__}"


def members(name: str, kind: type) -> Iterator[str]:
    """Yield what instances of a class have, also by base classes of ours."""
    fields = {each.name for each in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    of_ours = [base for base in kind.__mro__ if base.__module__.startswith(OURS)]
    names = {each for base in of_ours for each in vars(base)}
    for each in sorted(names):
        is_operator = each in OPERATORS
        if (each.startswith("_") and not is_operator) or each in fields:
            continue
        value = next(vars(base)[each] for base in of_ours if each in vars(base))
        if isinstance(value, property):
            returns = inspect.signature(value.fget).return_annotation if value.fget else "?"
            yield f"{name}.{each}: {shown(returns)}"
        elif isinstance(value, (classmethod, staticmethod)):
            yield f"{type(value).__name__} {name}.{each}{signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield from described(f"{name}.{each}", value)
        elif isinstance(value, (str, int, float, bool, type(None))):
            yield f"{name}.{each} = {value!r}"
    annotated = {
        key: value for base in reversed(of_ours) for key, value in vars(base).get("__annotations__", {}).items()
    }
    for each in sorted(annotated):
        if not each.startswith("_") and each not in names - fields:
            yield f"{name}.{each}: {shown(annotated[each])}"


OPERATORS = {
    "__aenter__",
    "__aexit__",
    "__and__",
    "__await__",
    "__call__",
    "__enter__",
    "__exit__",
    "__getitem__",
    "__gt__",
    "__iter__",
    "__len__",
    "__lt__",
    "__matmul__",
    "__next__",
    "__rshift__",
}
"""Special methods that users call by an operator or a statement."""


class Annotation:
    """An annotation as it is written: signatures show strings with quotation marks, and this without."""

    def __init__(self, annotation: object) -> None:
        self._text = shown(annotation)

    def __repr__(self) -> str:
        return self._text


def shown(annotation: object) -> str:
    """Return an annotation as it is written in the source."""
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, typing.ForwardRef):
        return annotation.__forward_arg__
    return getattr(annotation, "__name__", str(annotation))


def signature(value: Any) -> str:
    """Return the signature of a function or class, with its annotations as they are written."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    written = [
        each if each.annotation is each.empty else each.replace(annotation=Annotation(each.annotation))
        for each in found.parameters.values()
    ]
    returns = found.return_annotation
    if returns is not found.empty and returns is not None:
        returns = Annotation(returns)
    return re.sub(r" at 0x[0-9a-f]+", "", str(found.replace(parameters=written, return_annotation=returns)))


def test_the_public_api_is_the_one_on_file() -> None:
    kept, now = SAMPLE.read_text().splitlines(), public_api()
    changes = "\n".join(difflib.unified_diff(kept, now, "on file", "now", lineterm="", n=0))
    assert kept == now, (
        f"if this is meant, run `python -m tests.test_public_api`, and say it in CHANGELOG.md:\n{changes}"
    )


def test_a_changed_signature_and_a_new_method_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import skypool

    def run(self: object, call: object, more: int = 1) -> None: ...

    kept = public_api()
    monkeypatch.setattr(skypool.ComputePool, "run", run)
    monkeypatch.setattr(skypool.ComputePool, "another", run, raising=False)
    changed = set(public_api()) - set(kept)
    assert changed == {
        "skypool.ComputePool.run(self: object, call: object, more: int = 1) -> None",
        "skypool.ComputePool.another(self: object, call: object, more: int = 1) -> None",
    }


def test_nothing_on_file_depends_on_this_machine() -> None:
    text = SAMPLE.read_text()
    assert str(ROOT) not in text
    assert "0x" not in text


def test_the_page_names_the_public_modules_and_all_names_for_drivers() -> None:
    import skypool.drivers
    import skypool.testing

    for module in (*PUBLIC, "skypool.accelerators"):
        assert f"`{module}`" in PAGE, module
    for name in (*skypool.drivers.__all__, *skypool.testing.__all__):
        assert re.search(rf"`(skypool\.drivers\.|skypool\.testing\.)?{name}`", PAGE), name


# --- every package -------------------------------------------------------------------------------------------

EXTRAS = ("dask", "distributed")
"""Libraries that engines need and that this environment need not have."""
PACKAGES = sorted(path.parent.name for path in (ROOT / "skypool").glob("*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_in_the_list_of_a_package_is_there(package: str) -> None:
    found = importlib.import_module(f"skypool.{package}")
    assert found.__all__
    assert len(set(found.__all__)) == len(found.__all__)
    for name in found.__all__:
        if (ROOT / "skypool" / package / f"{name}.py").exists() and not hasattr(found, name):
            try:
                importlib.import_module(f"skypool.{package}.{name}")
            except ModuleNotFoundError as e:
                if e.name not in EXTRAS:
                    raise
                continue
        assert hasattr(found, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_list_of_modules_is_whole(package: str) -> None:
    """A package without names of its own lists its modules; one that has names lists these."""
    modules = {path.stem for path in (ROOT / "skypool" / package).glob("*.py")} - {"__init__"}
    listed = set(importlib.import_module(f"skypool.{package}").__all__)
    if listed & modules and listed <= modules:
        assert listed == modules


def test_names_for_drivers_cost_nothing_until_they_are_used() -> None:
    code = "import sys, skypool.drivers; print(*[name for name in sys.modules if name.startswith('skypool')])"
    got = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert got.stdout.split() == ["skypool", "skypool.drivers"]


def test_what_writes_recordings_is_not_loaded_before_something_is_recorded() -> None:
    code = (
        "import sys; from skypool.drivers import Rest, recording; recording.Private(), recording.current()\n"
        "print(*[name for name in sys.modules if name.startswith(('skypool.proof', 'requests'))])\n"
        "print(recording.to.__module__)"
    )
    got = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert got.stdout.splitlines() == ["", "skypool.proof.recording"]


def test_the_list_of_names_for_drivers_agrees_with_their_homes() -> None:
    from skypool import drivers

    assert sorted(drivers.__all__) == sorted({*drivers._HOME, *drivers._MODULES})
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        drivers.nothing


if __name__ == "__main__":
    SAMPLE.write_text("\n".join(public_api()) + "\n")
    print(f"{SAMPLE.relative_to(ROOT)}: {len(public_api())} lines")
