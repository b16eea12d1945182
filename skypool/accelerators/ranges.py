"""`any`, which returns the accelerators within bounds such as memory=">=40GB", and `catalog`, which returns all."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable

from skypool.accelerators import tables
from skypool.accelerators.accelerator import Accelerator, build
from skypool.errors import UsageError, nearest

_OPERATORS: dict[str, Callable[[tuple[float, ...], tuple[float, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
    "": operator.eq,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(GB|GiB|G|TB|TiB|T)?\s*", re.IGNORECASE)
_BOUND = re.compile(r"\s*(>=|<=|==|!=|>|<|=|)\s*(\S.*)", re.DOTALL)
_VERSION = re.compile(r"\s*(\d+)(?:\.(\d+))?\s*")


def gigabytes(text: str) -> float | None:
    """Return a memory size in GB as a float: 80.0 for "80GB", "80 GB" or "80", 1000.0 for "1TB".

    GiB and TiB are read as GB and TB. Case does not matter. Returns None for any other text.
    """
    if not (found := _SIZE.fullmatch(text)):
        return None
    unit = (found[2] or "").upper()
    return float(found[1]) * (1000 if unit.startswith("T") else 1)


def memory_bound(text: str) -> Callable[[float], bool]:
    """Return a function that returns True for a number of GB within a bound such as ">=80GB", "<24GB" or "80GB".

    The operators are >=, <=, ==, =, !=, > and <. A bound without an operator accepts only an equal size. UsageError is
    raised for a bound that cannot be read.
    """
    found = _BOUND.fullmatch(text) if isinstance(text, str) else None
    size = gigabytes(found[2]) if found else None
    if found is None or size is None:
        raise UsageError(f'memory must be spelled like ">=40GB" or "80GB", not {text!r}')
    compare, limit = _OPERATORS[found[1]], (size,)
    return lambda memory: compare((memory,), limit)


def capability_bound(text: str) -> Callable[[str | None], bool]:
    """Return a function that returns True for a compute capability within a bound such as ">=8.0" or "9.0".

    The operators are >=, <=, ==, =, !=, > and <. A bound without an operator accepts only an equal capability.
    Capabilities are compared as versions, so "10.3" is above "9.0". The returned function returns False for None and
    for text that is no version. UsageError is raised for a bound that cannot be read.
    """
    found = _BOUND.fullmatch(text) if isinstance(text, str) else None
    limit = _version(found[2]) if found else None
    if found is None or limit is None:
        raise UsageError(f'capability must be spelled like ">=8.0" or "9.0", not {text!r}')
    compare = _OPERATORS[found[1]]
    return lambda capability: (version := _version(capability or "")) is not None and compare(version, limit)


def _version(text: str) -> tuple[float, ...] | None:
    found = _VERSION.fullmatch(text)
    return (int(found[1]), int(found[2] or 0)) if found else None


def catalog() -> tuple[Accelerator, ...]:
    """Return every model in every memory size and form factor, one device each, in the catalogue's order.

    TPU slices and names that were added with `register` are not included.
    """
    return tuple(
        build(variant.name, variant.memory_gb, variant.form_factor or None)
        for name in tables.rows_by_name()
        for variant in tables.variants(name)
    )


def sizes() -> tuple[Accelerator, ...]:
    """Return every model in every memory size, one device each, in the catalogue's order.

    The form factor is None if the model has several with that memory size. TPU slices and registered names are not
    included.
    """
    return tuple(dict.fromkeys(build(each.name, each.memory_gb) for each in catalog()))


def any(  # hides the built-in function here, but reads well in use: accelerators.any(memory=">=40GB")
    *,
    memory: str | None = None,
    vendor: str | None = None,
    kind: str | None = None,
    capability: str | None = None,
    architecture: str | None = None,
    runtime: str | None = None,
    count: int = 1,
) -> tuple[Accelerator, ...]:
    """Return all accelerators that satisfy every given bound, in rising order of memory.

    A pool that is given this tuple takes any one of these accelerators. Without any bound, the whole catalogue is
    returned. Case does not matter in names.

    Args:
        memory: memory of one device: ">=40GB", "<24GB", "80GB".
        vendor: vendor, such as "nvidia".
        kind: kind of device, such as "gpu" or "tpu". "gpu" includes APUs (GPU and processor in one chip).
        capability: NVIDIA's compute capability: ">=8.0". If given, hardware without a compute capability is left out.
        architecture: architecture, such as "Hopper".
        runtime: software that the devices need, such as "cuda".
        count: number of devices in one node, at least 1.

    Raises:
        UsageError: a bound cannot be read, no accelerator satisfies all bounds, or the count is below 1.
    """
    found = select(sizes(), memory=memory, vendor=vendor, kind=kind, runtime=runtime)
    if capability is not None:
        within = capability_bound(capability)
        found = [each for each in found if within(each.compute_capability)]
    if architecture is not None:
        if not isinstance(architecture, str):
            raise UsageError(f"architecture must be a string such as 'Hopper', not {architecture!r}")
        wanted = architecture.casefold()  # "hopper" is also "Hopper (Grace Hopper)"
        found = [each for each in found if each.architecture.casefold().split(" (")[0] == wanted]
    if not found:
        bounds = {
            "memory": memory, "vendor": vendor, "kind": kind, "capability": capability, "architecture": architecture,
            "runtime": runtime,
        }  # fmt: skip
        asked = ", ".join(f"{name}={bound!r}" for name, bound in bounds.items() if bound is not None)
        raise UsageError(
            f"no accelerator in skypool's catalogue has {asked}; leave out or change one of these arguments"
        )
    return tuple(sorted(each.with_count(count) for each in found))


def select(
    among: Iterable[Accelerator],
    *,
    memory: str | None = None,
    vendor: str | None = None,
    kind: str | None = None,
    runtime: str | None = None,
) -> list[Accelerator]:
    """Return the accelerators of `among` that satisfy all given conditions, in the same order.

    A condition that is None is not checked. Case does not matter in names. The kind "gpu" includes APUs (GPU and
    processor in one chip). `memory` is a bound on the memory of one device, such as ">=40GB".

    Raises:
        UsageError: the bound on memory cannot be read, a name is no string, or no accelerator of `among` has that
            vendor, kind or runtime. The names "cpu" and "none" are always accepted, and any name if `among` is empty.
    """
    for name, word in (("vendor", vendor), ("kind", kind), ("runtime", runtime)):
        if word is not None and not isinstance(word, str):
            example = {"vendor": "nvidia", "kind": "gpu", "runtime": "cuda"}[name]
            raise UsageError(f"{name} must be a string such as {name}={example!r}, not {word!r}")
    among = tuple(among)
    for name, word in (("vendor", vendor), ("kind", kind), ("runtime", runtime)):
        known = {getattr(each, name) for each in among}
        if word is not None and among and word.casefold() not in known | {"cpu", "none"}:
            near = nearest(word, sorted(filter(None, known)), 1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(sorted(filter(None, known)))}"
            raise UsageError(f"no accelerator has {name} {word!r}; {hint}")
    within = memory_bound(memory) if memory is not None else lambda _: True
    kinds = None if kind is None else {kind.casefold()} | ({"apu"} if kind.casefold() == "gpu" else set())
    return [
        each
        for each in among
        if within(each.memory_gb)
        and (vendor is None or each.vendor == vendor.casefold())
        and (kinds is None or each.kind in kinds)
        and (runtime is None or each.runtime == runtime.casefold())
    ]
