"""Factories of accelerators: `A100(memory="40GB", count=8)`, `A100.partition_2g_10gb`, `TPUv5p_8()`.

Each factory is one object of `Model` or `SliceModel`. The type parameters of `Model` are the memory sizes and form
factors that exist, so that type checkers and editors know the valid arguments. Importing this module is cheap: the
values and the catalogue are loaded at the first call.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Generic, TypeVar

    from skypool.accelerators.accelerator import Accelerator

    M = TypeVar("M", contravariant=True)
    F = TypeVar("F", contravariant=True)

    class _Typed(Generic[M, F]): ...
else:
    M = F = None

    class _Typed:
        """Base class that ignores its two type parameters. `typing.Generic` would double the time of the import."""

        __slots__ = ()

        def __class_getitem__(cls, _parameters: object) -> type:
            return cls


class Model(_Typed[M, F]):
    """The factory of one catalogue model, such as `A100`. Calling it returns an `Accelerator`.

    The attributes `partition_…`, such as `A100.partition_2g_10gb`, are accelerators: one partition of a card of the
    model. `size` is the memory of one device in GB if the factory's name fixes it (`A100_80GB`), else None.
    """

    __slots__ = ("name", "size")

    def __init__(self, name: str, size: float | None = None) -> None:
        self.name, self.size = name, size

    def __call__(self, *, memory: M | None = None, form_factor: F | None = None, count: int = 1) -> Accelerator:
        """Return an accelerator: `count` devices of this model. Arguments are given by name only.

        Args:
            memory: memory of one device, such as "80GB". By default the size that the model's name alone stands for.
            form_factor: form factor, such as "SXM". By default any in which this memory size is sold.
            count: number of devices in one node, at least 1.

        Raises:
            UsageError: the model does not exist with this memory and form factor, or an argument is unknown or given by
                position, or the count is below 1. For a missing variant, the message lists those that exist.
        """
        from skypool.accelerators.accelerator import build

        size = self.size if memory is None else _gigabytes(self.name, memory)
        form = None if form_factor is None else str(form_factor)
        return build(self.name, size, form, count)

    def partitioned(self, profile: str, count: int = 1) -> Accelerator:
        """Return `count` partitions of one card of this model, as in `A100.partitioned("2g.10gb")`.

        Raises:
            UsageError: the card lacks the profile, or cannot hold so many partitions, or the count is below 1.
        """
        return self().partition(profile, count)

    def __repr__(self) -> str:
        return f"<accelerator {self.name}: call it for a value>"

    if not TYPE_CHECKING:  # type checkers check the arguments themselves
        _make = __call__

        def __call__(self, *values: object, **named: object) -> Accelerator:
            if values or not named.keys() <= {"memory", "form_factor", "count"}:
                raise _wrong_call(self.name, values, named)
            return self._make(**named)

    if not TYPE_CHECKING:  # type checkers know the partitions from the stubs, and must reject other names

        def __getattr__(self, attribute: str) -> Accelerator:
            if attribute.startswith("partition_"):
                return _partition(self, attribute)
            raise AttributeError(
                f"an accelerator model has no attribute {attribute!r}; calling the model returns an "
                "Accelerator, which has attributes: write H100().memory_gb, not H100.memory_gb"
            )


class SliceModel:
    """The factory of one type of TPU slice, such as `TPUv5p_8`. Calling it returns an `Accelerator`."""

    __slots__ = ("type",)

    def __init__(self, type: str) -> None:
        self.type = type

    def __call__(self) -> Accelerator:
        """Return the accelerator for one TPU slice of this type. Raise UsageError if Google sells none."""
        from skypool.accelerators.tpu_slices import TPU

        return TPU(self.type)

    def __repr__(self) -> str:
        return f"<TPU slice {self.type}: call it for a value>"


def _wrong_call(name: str, values: tuple[object, ...], named: dict[str, object]) -> Exception:
    from skypool.errors import UsageError, nearest

    how = f'{name}(memory="80GB", form_factor="SXM", count=8)'
    if values:
        return UsageError(f"{name} takes its arguments by name, as in {how}, not {', '.join(map(repr, values))}")
    known = ("memory", "form_factor", "count")
    wrong = next(each for each in named if each not in known)
    near = nearest(wrong, known, 1)
    return UsageError(f"{name} takes no {wrong}={f'; did you mean {near[0]}=' if near else ''}: call it as {how}")


def _gigabytes(name: str, memory: object) -> float:
    from skypool.accelerators.ranges import gigabytes
    from skypool.errors import UsageError

    if isinstance(memory, str) and (size := gigabytes(memory)) is not None:
        return size
    raise UsageError(f'memory of {name} must be spelled like "80GB", not {memory!r}')


def attribute_of(profile: str) -> str:
    """Return the attribute name of a partition's profile: "1g.24gb+me.all" becomes `partition_1g_24gb_me_all`.

    A "-me" at the end becomes "_no_me": "1g.24gb-me" becomes `partition_1g_24gb_no_me`. The profile is not checked.
    """
    return "partition_" + profile.replace("-me", "_no_me").replace("+", "_").replace(".", "_")


def _partition(model: Model[str, str], attribute: str) -> Accelerator:
    from skypool.accelerators import partitions, tables
    from skypool.accelerators.accelerator import build

    sizes = partitions.memories(model.name) if model.size is None else (model.size,)
    for memory in sizes:
        for profile in tables.profiles(model.name, memory):
            if attribute_of(profile) == attribute:
                return build(model.name, memory).partition(profile)
    have = [p for memory in sizes for p in tables.profiles(model.name, memory)]
    listed = ", ".join(dict.fromkeys(attribute_of(profile) for profile in have)) or "none"
    raise AttributeError(f"accelerator {model.name} has no attribute {attribute!r}; its partitions are: {listed}")


FLYTE: dict[str, tuple[str, float | None]] = {
    "A100_80GB": ("A100", 80),
    "L4_VWS": ("L4", None),
    "V5E": ("TPUv5e", None),
    "V5P": ("TPUv5p", None),
    "V6E": ("TPUv6", None),
}
"""Names that the workflow tool Flyte uses and the catalogue does not have, each with its model and memory in GB.

A memory of None means that the name does not fix the memory size.
"""


def factory(name: str) -> Model[str, str] | SliceModel | None:
    """Return the factory with this name in `skypool.accelerators`, or None if there is none. Case matters.

    The name is that of a model ("A100"), a TPU slice ("TPUv5p_8"), or a constant of Flyte ("A100_80GB").
    """
    from skypool.accelerators import tables

    if name in FLYTE:
        return Model(*FLYTE[name])
    if "," not in name and tables.rows_of(name):
        return Model(name)
    if name.startswith("TPU") and (type := tables.slice_types().get(name)):
        return SliceModel(type)
    return None


def factories() -> tuple[str, ...]:
    """Return the names of all factories: first models, then TPU slices, then constants of Flyte.

    Names that were added with `register` are not included.
    """
    from skypool.accelerators import tables

    return *tables.rows_by_name(), *tables.slice_types(), *FLYTE
