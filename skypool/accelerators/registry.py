"""Hardware that is not in the catalogue: `Custom` values, `register`, and names that other packages bring.

A package brings names by the entry-point group `skypool.accelerators`: the entry point's name is the
accelerator's, and it loads whatever `register` takes. The group is read once, when a name is unknown or all
names are listed, so nobody pays for it before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from skypool.accelerators import tables
from skypool.accelerators.facts import Metadata
from skypool.accelerators.ranges import gigabytes
from skypool.accelerators.slicing import spellings, squashed
from skypool.accelerators.value import Accelerator
from skypool.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skypool.accelerators.value import Runtime

GROUP = "skypool.accelerators"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    make: Callable[[], Accelerator]
    devices: type | None


_entries: dict[str, _Entry] = {}
_loaded = False


def Custom(
    name: str,
    *,
    memory: str | None = None,
    count: int = 1,
    vendor: str = "",
    kind: str | None = None,
    runtime: Runtime | None = None,
    form_factor: str | None = None,
    architecture: str = "",
    compute_capability: str | None = None,
    cuda_min: str | None = None,
    cuda_max: str | None = None,
    driver_min: int | None = None,
) -> Accelerator:
    """Hardware that the catalogue does not know, or knows differently.

    `parse` knows its name only once it is registered.

    Args:
        memory: of one device, "48GB"; left out, unknown.
        runtime: left out, "cuda" if any CUDA fact is given, otherwise "none".
        kind: left out, "gpu" for cuda and rocm, otherwise "other".
        cuda_min, cuda_max, driver_min: as on `Metadata`.
    Raises:
        UsageError: no name, a memory that cannot be read, or a count below one.
    """
    size = 0.0 if memory is None else gigabytes(memory) if isinstance(memory, str) else None
    if size is None or not isinstance(name, str) or not name.strip() or type(count) is not int or count < 1:
        raise UsageError(
            f"not an accelerator: name {name!r}, memory {memory!r}, count {count!r}; "
            f"it is like Custom('My-GPU', memory='48GB', count=2)"
        )
    if runtime is None:
        runtime = "cuda" if cuda_min or cuda_max or driver_min or compute_capability else "none"
    return Accelerator(
        name=name,
        memory_gb=size,
        count=count,
        form_factor=form_factor,
        vendor=vendor,
        kind=kind or ("gpu" if runtime in ("cuda", "rocm") else "other"),
        runtime=runtime,
        architecture=architecture,
        compute_capability=compute_capability,
        metadata=Metadata(cuda_min=cuda_min, cuda_max=cuda_max, driver_min=driver_min),
    )


def register(
    name: str, *, memory: str | None = None, runtime: Runtime | None = None, kind: str | None = None
) -> Callable[[T], T]:
    """Make a name usable wherever an accelerator is written: in strings, configuration, on the command line.

    Decorates either a function that returns an `Accelerator` (called without arguments, whenever the name is
    used), or a class of devices as in `skypool.devices`, which then answers for this hardware at run time.

        @accelerators.register("xpu", memory="48GB")
        class XPU(devices.Family): ...

    Args:
        memory, runtime, kind: of the accelerator, where a class is registered; as for `Custom`.
    Raises:
        UsageError: the name is taken, by the catalogue or by another registration.
    """

    def remember(made: T) -> T:
        _add(name, made, memory, runtime, kind)
        return made

    return remember


def unregister(name: str) -> None:
    """Forget a registered name; quiet if it is not there."""
    _entries.pop(squashed(name), None)


def _add(name: str, made: object, memory: str | None, runtime: Runtime | None, kind: str | None) -> None:
    key = squashed(name) if isinstance(name, str) else ""
    if not key or ":" in name or "@" in name or "/" in name:
        raise UsageError(f"{name!r} cannot be written as an accelerator's name")
    if key in _entries or key in {squashed(known) for known in tables.rows_by_name()} or key in spellings():
        raise UsageError(f"the accelerator name {name!r} is taken")
    if isinstance(made, type):
        plain = Custom(name, memory=memory, runtime=runtime, kind=kind)
        _entries[key] = _Entry(name, lambda: plain, made)
    elif isinstance(made, Accelerator):
        _entries[key] = _Entry(name, lambda: made, None)
    elif callable(made):
        _entries[key] = _Entry(name, lambda: _called(made), None)
    else:
        raise UsageError(f"register takes a function, a class or an Accelerator, not {made!r}")


def _called(make: Callable[[], object]) -> Accelerator:
    if isinstance(made := make(), Accelerator):
        return made
    raise UsageError(f"{make!r} was registered as an accelerator and returned {made!r}")


def look_up(spelling: str) -> Accelerator | None:
    """The registered accelerator that a spelling means, if any: "xpu", "xpu:4", "4x xpu"."""
    text, _, count = spelling.strip().partition(":")
    if not count and (words := text.split("x", 1)) and words[0].strip().isdigit() and len(words) == 2:
        count, text = words[0], words[1]
    if not (entry := _entry(text)) or (count and not (count.strip().isdecimal() and 0 < int(count) < 10_000)):
        return None
    made = replace(entry.make(), label=entry.name)
    return made.with_count(int(count)) if count else made


def _entry(name: str) -> _Entry | None:
    key = squashed(name)
    if key not in _entries:
        _load_packages()
    return _entries.get(key)


def names() -> tuple[str, ...]:
    """Every registered name, those of installed packages included."""
    _load_packages()
    return tuple(entry.name for entry in _entries.values())


def device_classes() -> dict[str, type]:
    """The device classes that were registered, by name."""
    return {entry.name: entry.devices for entry in _entries.values() if entry.devices is not None}


def _load_packages() -> None:
    """Read the entry-point group, once. A package that fails to load is told of and left out."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    from importlib.metadata import entry_points  # costs more than all of this package

    for point in entry_points(group=GROUP):
        try:
            _add(point.name, point.load(), None, None, None)
        except Exception as error:  # noqa: BLE001 - whatever a stranger's package raises on import
            warnings.warn(f"accelerator {point.name!r} ({point.value}) was left out: {error}", stacklevel=2)
