"""`TPU`: slices by generation and topology; and `CPU`, the machine without an accelerator."""

from __future__ import annotations

from functools import cache

from skypool.accelerators import tables
from skypool.accelerators.facts import Slice
from skypool.accelerators.value import Accelerator, build, build_slice
from skypool.errors import UsageError, nearest


def TPU(type: str, *, topology: str | None = None, chips: int | None = None) -> Accelerator:
    """A TPU slice, by its type ("v5p-8") or by a generation with a shape ("v5e", topology="4x4").

    A generation alone is one chip.

    Args:
        type: Google's name of a slice, or a generation: v2, v3, v4, v5e, v5p, v6e, tpu7x.
        topology: how its chips lie: "4x4", "2x2x4".
        chips: how many there are, if their shape does not matter.
    Raises:
        UsageError: no such slice is sold; the message lists those near it.
    """
    if not isinstance(type, str):
        raise UsageError(f"a TPU is called 'v5p-8' or 'v5e', not {type!r}")
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
    raise UsageError(f"no {of} slice has {asked}; there is {', '.join(shapes[:12])}{', …' * (len(shapes) > 12)}")


def _named(type: str, topology: str | None, chips: int | None) -> Accelerator:
    found = spellings().get(squashed(type))
    if found is None:
        near = " or ".join(nearest(type, tables.slices())) or ", ".join(tables.tpu_names())
        raise UsageError(f"no TPU is called {type!r}; did you mean {near}?")
    if topology not in (None, found.topology) or chips not in (None, found.chips):
        raise UsageError(f"{found.type} is {found.chips} chips, {found.topology}: ask for one or the other")
    return build_slice(found)


def squashed(text: str) -> str:
    """Without what does not matter in a name: case, spaces, dashes, underscores, dots."""
    return text.casefold().translate(_SEPARATORS)


_SEPARATORS = str.maketrans("", "", " \t-_.")


def _generation(text: str) -> str | None:
    plain = squashed(text).removeprefix("tpu")
    names = {"v5litepod": "v5e", "v5lite": "v5e", "v6": "v6e", "7x": "tpu7x", "v7": "tpu7x", "v7x": "tpu7x"}
    plain = names.get(plain, plain)
    return plain if plain in tables.tpu_names() else None


@cache
def spellings() -> dict[str, Slice]:
    """Every slice by every way to write it: v5litepod-16, v5e-16, tpu-v5e-16, TPUv5e_16."""
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
    """A machine without an accelerator."""
    return Accelerator(name="CPU", memory_gb=0, count=0, kind="cpu", runtime="none")
