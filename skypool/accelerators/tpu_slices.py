"""`TPU`, which returns a TPU slice, and `CPU`, the machine without an accelerator."""

from __future__ import annotations

from functools import cache

from skypool.accelerators import tables
from skypool.accelerators.accelerator import Accelerator, build, build_slice
from skypool.accelerators.facts import Slice
from skypool.errors import UsageError, nearest


def TPU(type: str, *, topology: str | None = None, chips: int | None = None) -> Accelerator:
    """Return a TPU slice by its type ("v5p-8"), or by a generation and a shape ("v5e", topology="4x4").

    A slice is a number of chips that are wired together and sold as one unit. A generation without a shape is one chip.

    Args:
        type: Google's name of a slice, or a generation: v2, v3, v4, v5e, v5p, v6e, tpu7x.
        topology: arrangement of the chips: "4x4", "2x2x4".
        chips: number of chips, if their arrangement does not matter. With a topology, the slice must agree with both.

    Raises:
        UsageError: no such slice is sold (the message lists similar ones), or the topology or chips contradict the
            type.
    """
    if not isinstance(type, str):
        raise UsageError(f"the type of a TPU must be a string such as 'v5p-8' or 'v5e', not {type!r}")
    if (of := _generation(type)) is None:
        return _named(type, topology, chips)
    if topology is None and chips is None:
        return build(tables.tpu_names()[of])
    for each in tables.slices().values():
        if each.generation == of and topology in (None, each.topology) and chips in (None, each.chips):
            return build_slice(each)
    sold = [each for each in tables.slices().values() if each.generation == of and (each.topology or topology is None)]
    shapes = [f"{each.topology or 'a slice'} ({each.chips} chip{'s' * (each.chips > 1)})" for each in sold]
    asked = topology or f"{chips} chips"
    raise UsageError(f"no TPU {of} slice has {asked}; choose from {', '.join(shapes[:12])}{', …' * (len(shapes) > 12)}")


def _named(type: str, topology: str | None, chips: int | None) -> Accelerator:
    found = spellings().get(squashed(type))
    if found is None:
        near = " or ".join(nearest(type, tables.slices())) or ", ".join(tables.tpu_names())
        raise UsageError(f"no TPU is called {type!r}; did you mean {near}?")
    if topology not in (None, found.topology) or chips not in (None, found.chips):
        raise UsageError(
            f"the TPU type {found.type} always has {found.chips} chips and topology {found.topology}, but another "
            "value was given: leave topology= and chips= out"
        )
    return build_slice(found)


def squashed(text: str) -> str:
    """Return a name in lower case without spaces, tabs, dashes, underscores and dots, for comparisons."""
    return text.casefold().translate(_SEPARATORS)


_SEPARATORS = str.maketrans("", "", " \t-_.")


def _generation(text: str) -> str | None:
    plain = squashed(text).removeprefix("tpu")
    names = {"v5litepod": "v5e", "v5lite": "v5e", "v6": "v6e", "7x": "tpu7x", "v7": "tpu7x", "v7x": "tpu7x"}
    plain = names.get(plain, plain)
    return plain if plain in tables.tpu_names() else None


@cache
def spellings() -> dict[str, Slice]:
    """Return a dict from each spelling of a TPU slice to the `Slice`. The spellings are squashed: "v5litepod16".

    A slice has several spellings, such as v5litepod-16, v5e-16, tpu-v5e-16 and TPUv5e_16. The dict is cached: callers
    must not change it.
    """
    found: dict[str, Slice] = {}
    names = tables.tpu_names()
    for each in tables.slices().values():
        prefix, _, size = each.type.partition("-")
        for start in {prefix, each.generation, names[each.generation], *_OTHER.get(each.generation, ())}:
            found[squashed(start + size)] = each
            found["tpu" + squashed(start + size).removeprefix("tpu")] = each
    return found


_OTHER = {"v5e": ("v5lite",), "v6e": ("v6",), "tpu7x": ("v7x", "v7")}


def CPU() -> Accelerator:
    """Return the value that stands for a machine without an accelerator. Its count and its memory are 0."""
    return Accelerator(name="CPU", memory_gb=0, count=0, kind="cpu", runtime="none")
