"""Hardware that is not in the catalogue: `Custom` makes it, and `register` and other installed packages add its names.

A package adds names by the entry-point group `skypool.accelerators`. The entry point's name is the accelerator's name,
and it refers to an object of any kind that `register` accepts. The group is read once: when a name is unknown for the
first time, or when all names are listed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from skypool.accelerators import tables
from skypool.accelerators.accelerator import Accelerator
from skypool.accelerators.facts import Metadata
from skypool.accelerators.ranges import gigabytes
from skypool.accelerators.tpu_slices import spellings, squashed
from skypool.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skypool.accelerators.accelerator import Runtime

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
    """Return an accelerator that is not in the catalogue, or that differs from the catalogue's entry.

    It is not registered: `parse` does not know its name unless `register` adds the name.

    Args:
        name: the accelerator's name, not empty.
        memory: memory of one device, such as "48GB". By default unknown, which counts as 0 GB.
        count: number of devices in one node, at least 1.
        vendor: vendor's name in lower case, "" if unknown.
        kind: kind of device. By default "gpu" for the runtimes cuda and rocm, otherwise "other".
        runtime: software that the devices need, such as "rocm". By default "cuda" if one of the arguments
            `compute_capability`, `cuda_min`, `cuda_max` and `driver_min` is given, otherwise "none".
        form_factor: form factor such as "PCIe"; None if it does not matter.
        architecture: architecture's name, "" if unknown.
        compute_capability: NVIDIA's compute capability, such as "9.0".
        cuda_min: first CUDA release that supports the device, None if unknown.
        cuda_max: last CUDA release that supports the device, None if unknown or still supported.
        driver_min: oldest NVIDIA driver branch that supports the device (525 for R525), None if unknown.

    Raises:
        UsageError: the name is empty, the memory cannot be read, or the count is not a whole number above 0.
    """
    size = 0.0 if memory is None else gigabytes(memory) if isinstance(memory, str) else None
    if size is None or not isinstance(name, str) or not name.strip() or type(count) is not int or count < 1:
        raise UsageError(
            f"Custom() takes a name, a memory such as '48GB' and a count of at least 1, not name={name!r}, "
            f"memory={memory!r} and count={count!r}; write it like Custom('My-GPU', memory='48GB', count=2)"
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
    """Return a decorator that makes `name` usable wherever an accelerator is written.

    These places are strings, configuration and the command line. The decorator returns the decorated object unchanged.
    The object is one of:

    - a function without arguments that returns an `Accelerator`; the function is called whenever the name is used,
    - an `Accelerator`,
    - a class of devices as in `skypool.devices`; the class then describes this hardware at run time.

        @accelerators.register("xpu", memory="48GB")
        class XPU(devices.Family): ...

    Args:
        name: the new name, without ":", "@" and "/". Case, spaces, dashes, underscores and dots do not matter.
        memory: memory of one device, such as "48GB". This and the next arguments are used only for a class.
        runtime: software that the devices need, such as "cuda". By default "none".
        kind: kind of device, such as "gpu". By default "gpu" for the runtimes cuda and rocm, otherwise "other".

    Raises:
        UsageError: the name is already in use or not valid, the memory cannot be read, or the object is of another
            kind. The decorator raises this error, not `register` itself.
    """

    def remember(made: T) -> T:
        _add(name, made, memory, runtime, kind)
        return made

    return remember


def unregister(name: str) -> None:
    """Remove a name that `register` added. Does nothing if the name is not registered.

    Case, spaces, dashes, underscores and dots in the name do not matter.
    """
    _entries.pop(squashed(name), None)


def _add(name: str, made: object, memory: str | None, runtime: Runtime | None, kind: str | None) -> None:
    key = squashed(name) if isinstance(name, str) else ""
    if not key or ":" in name or "@" in name or "/" in name:
        raise UsageError(
            f"{name!r} is not a valid name of an accelerator: it must be a string such as 'My-GPU', without "
            "':', '@' and '/'"
        )
    if key in _entries or key in {squashed(known) for known in tables.rows_by_name()} or key in spellings():
        raise UsageError(
            f"the accelerator name {name!r} is already in skypool's catalogue or registered; choose another name"
        )
    if isinstance(made, type):
        plain = Custom(name, memory=memory, runtime=runtime, kind=kind)
        _entries[key] = _Entry(name, lambda: plain, made)
    elif isinstance(made, Accelerator):
        _entries[key] = _Entry(name, lambda: made, None)
    elif callable(made):
        _entries[key] = _Entry(name, lambda: _called(made), None)
    else:
        raise UsageError(
            f"register({name!r}) takes a function, a class or an Accelerator such as "
            f"Custom('My-GPU', memory='48GB'), not {made!r}"
        )


def _called(make: Callable[[], object]) -> Accelerator:
    if isinstance(made := make(), Accelerator):
        return made
    raise UsageError(
        f"{make!r} is registered as an accelerator, but returned {made!r}; make it return an Accelerator such "
        "as Custom('My-GPU', memory='48GB')"
    )


def look_up(spelling: str) -> Accelerator | None:
    """Return the registered accelerator that a spelling names: "xpu", "xpu:4" or "4x xpu".

    Returns None if no registered name matches, or if the count is not between 1 and 9999. The first call with an
    unknown name also registers the names that installed packages add. UsageError is raised if a registered function
    did not return an `Accelerator`, or if the accelerator takes no other count.
    """
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
    """Return every registered name, including the names from installed packages, in the order of registration."""
    _load_packages()
    return tuple(entry.name for entry in _entries.values())


def device_classes() -> dict[str, type]:
    """Return a dict from accelerator name to the class of devices that was registered with this name.

    Classes from installed packages are missing until a function such as `names` has loaded these packages.
    """
    return {entry.name: entry.devices for entry in _entries.values() if entry.devices is not None}


def _load_packages() -> None:
    """Register the names that installed packages add. Only the first call does so. Warn of a package that fails."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    from importlib.metadata import entry_points  # imported late: it takes longer than this whole package

    for point in entry_points(group=GROUP):
        try:
            _add(point.name, point.load(), None, None, None)
        except Exception as error:  # noqa: BLE001 - a foreign package may raise anything on import
            from skypool import tracebacks  # imported late, as it is seldom needed

            tracebacks.warn(
                f"accelerator {point.name!r} of an installed package ({point.value}) could not be loaded: {error}; "
                "update or uninstall that package",
                UserWarning,
            )
