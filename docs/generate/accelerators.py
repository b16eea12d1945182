"""Generates the type stubs of the accelerator factories, and the tables in docs/accelerators.md.

    python -m docs.generate.accelerators

A test fails if a file is not up to date.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from docs.generate.accelerator_tables import family, page
from skypool.accelerators import partitions, tables
from skypool.accelerators.factories import FLYTE, attribute_of

ROOT = Path(__file__).parents[2]
STUBS = ROOT / "skypool" / "accelerators"
PAGE = ROOT / "docs" / "accelerators.md"
HEADING = """# {what}
#
# For type checkers and editors: at run time `skypool.accelerators` makes each factory when its name is first used.
# Written by `python -m docs.generate.accelerators` from accelerators.csv; change that instead.

from typing import Literal, Never

{more}from skypool.accelerators.factories import {imports}

"""
VALUE = "from skypool.accelerators.accelerator import Accelerator\n"


MODULES = {
    "datacenter": "NVIDIA's cards for data centers.",
    "desktop": "NVIDIA's cards for desktops and workstations.",
    "others": "Accelerators of AMD, AWS, Intel and others.",
    "tpu": "Google's TPUs, as chips and as slices.",
}


def factories() -> dict[Path, str]:
    """Return the text of every generated type stub (a `.pyi` file) by its path. No file is written."""
    return {STUBS / f"{module}.pyi": _module(module, what) for module, what in MODULES.items()}


def _module(module: str, what: str) -> str:
    names = [name for name in tables.rows_by_name() if family(name) == module]
    cut = [name for name in names if _profiles(name)]
    slices = list(tables.slice_types()) if module == "tpu" else []
    flyte = [alias for alias, (model, _) in FLYTE.items() if model in names]
    exported = [*names, *slices, *flyte]
    text = HEADING.format(what=what, imports="Model, SliceModel" if slices else "Model", more=VALUE if cut else "")
    parts = [text, _all(exported), *("\n" + _class(name) for name in cut), "\n\n" * bool(cut)]
    parts += [_factory(name, name in cut) for name in names]
    parts += [f"{name}: SliceModel\n" for name in slices]
    for alias in flyte:
        model = FLYTE[alias][0]
        parts.append(_factory(model, model in cut).replace(f"{model}:", f"{alias}:", 1))
    return "".join(parts).replace("Literal, Never", "Literal" if "Never]" not in "".join(parts) else "Literal, Never")


def _all(names: Iterable[str]) -> str:
    lines, line = [], "   "
    for name in names:
        if len(line) + len(name) + 4 > 120:
            lines.append(line)
            line = "   "
        line += f' "{name}",'
    return "# fmt: off\n__all__ = [  # noqa: RUF022 - in the catalogue's order\n" + "\n".join([*lines, line]) + "\n]\n"


def _profiles(name: str) -> list[str]:
    every = (profile for memory in partitions.memories(name) for profile in tables.profiles(name, memory))
    return list(dict.fromkeys(every))


def _class(name: str) -> str:
    attributes = "".join(f"    {attribute_of(profile)}: Accelerator\n" for profile in _profiles(name))
    memory, form = _parameters(name)
    return f'\nclass _{name}(Model["{memory}", "{form}"]):\n{attributes}'


def _factory(name: str, has_class: bool) -> str:
    if has_class:
        return f"{name}: _{name}\n"
    memory, form = (each.replace("'", '"') for each in _parameters(name))
    return f"{name}: Model[{memory}, {form}]\n"


def _parameters(name: str) -> tuple[str, str]:
    variants = tables.variants(name)
    memory = (f"{v.memory_gb:g}GB" for v in variants)
    return _literal(memory), _literal(v.form_factor for v in variants if v.form_factor)


def _literal(words: Iterable[str]) -> str:
    listed = ", ".join(f"'{word}'" for word in dict.fromkeys(words))
    return f"Literal[{listed}]" if listed else "Never"


def written() -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of every generated file."""
    yield from factories().items()
    yield PAGE, page(PAGE.read_text())


def main() -> None:
    for path, text in written():
        path.write_text(text)


if __name__ == "__main__":
    main()
