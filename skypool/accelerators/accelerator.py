"""`Accelerator`: the value that stands for one kind of hardware: model, memory, form factor and number of devices."""

from __future__ import annotations

from skypool.accelerators import tables
from skypool.accelerators.facts import Metadata, Partition, Slice, Variant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from dataclasses import dataclass, field
    from functools import cache
    from typing import Any, Literal, TypeAlias

    from skypool.errors import UsageError

    Runtime: TypeAlias = Literal["cuda", "rocm", "neuron", "tpu", "hpu", "none"]
    Origin: TypeAlias = Literal["catalog", "default", "custom"]
else:
    from skypool.accelerators._record import dataclass, field
    from skypool.accelerators._record import memo as cache

_RUNTIMES: dict[tuple[str, str], Runtime] = {
    ("nvidia", "gpu"): "cuda",
    ("amd", "gpu"): "rocm",
    ("amd", "apu"): "rocm",
    ("aws", "trainium"): "neuron",
    ("aws", "inferentia"): "neuron",
    ("google", "tpu"): "tpu",
    ("intel", "gaudi"): "hpu",
}


@dataclass(frozen=True, slots=True, repr=False)
class Accelerator:
    """Devices of one node: their model and their number. Each device is a whole card, a partition of a card, or a chip.

    Values cannot be changed. Two values are equal if they stand for the same hardware. They are ordered by total
    memory, then by memory of one device, then by `str()`. `str()` returns the canonical spelling, such as "H100:8",
    which `parse` turns into an equal value. The constructor raises UsageError for an empty name, or a negative count or
    memory.

    Attributes:
        name: name of the model and of its factory: "A100".
        memory_gb: nominal memory of one device in GB. For a partition, the partition's memory.
        count: number of devices: cards, partitions, or the chips of a slice. 0 for `CPU()`.
        form_factor: "SXM", "PCIe", "NVL" and so on; None if any form factor is accepted.
        vendor: "nvidia", "amd", "aws", "google", "intel" and so on, in lower case.
        kind: "gpu", "apu", "trainium", "inferentia", "tpu", "gaudi", "cpu", "fpga", "media" or "other".
        runtime: software that the devices need: "cuda", "rocm", "neuron", "tpu", "hpu" or "none".
        architecture: the vendor's name of the architecture, such as "Hopper".
        compute_capability: NVIDIA's compute capability, such as "9.0"; None for other vendors.
        part: the kind of partition, if each device is a partition of a card; None for whole cards.
        card_memory_gb: nominal memory of the whole card in GB, also for a partition.
        slice: TPU slice (chips that are sold as one unit) that the devices form; None for other hardware.
        metadata: further facts, such as the memory bandwidth. If the form factor is None, these facts are about the
            form factor that the catalogue lists first for this memory.
        label: the canonical spelling without partition and count, such as "A100-40GB".
        origin: "default" if several memory sizes exist and none was given, "custom" for hardware outside the catalogue,
            otherwise "catalog".
    """

    name: str
    memory_gb: float
    count: int = 1
    form_factor: str | None = None
    vendor: str = ""
    kind: str = "other"
    runtime: Runtime = "none"
    architecture: str = ""
    compute_capability: str | None = None
    part: Partition | None = None
    card_memory_gb: float = 0
    slice: Slice | None = None
    metadata: Metadata = field(default_factory=Metadata)
    label: str = field(default="", compare=False)
    origin: Origin = field(default="custom", compare=False)

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.count, int) or self.count < 0 or self.memory_gb < 0:
            raise _refused(
                f"no accelerator can have name={self.name!r}, memory_gb={self.memory_gb!r} and count={self.count!r}: "
                "the name must not be empty, the memory must be at least 0, and the count a whole number of at "
                "least 0; Custom('My-GPU', memory='48GB') makes an accelerator"
            )
        if not self.card_memory_gb:
            object.__setattr__(self, "card_memory_gb", self.memory_gb)
        if not self.label:
            object.__setattr__(self, "label", self.name)

    @property
    def memory(self) -> str:
        """Return the nominal memory of one device as text, in the form that the factories accept: "80GB"."""
        return f"{self.memory_gb:g}GB"

    @property
    def total_memory_gb(self) -> float:
        """Return the nominal memory of all devices together, in GB."""
        return self.memory_gb * self.count

    @property
    def profile(self) -> str | None:
        """Return the profile (the kind of partition), such as "2g.10gb"; None for whole cards."""
        return self.part.profile if self.part else None

    @property
    def profiles(self) -> tuple[str, ...]:
        """Return the names of all partition profiles that this card supports, such as "2g.10gb".

        NVIDIA's profiles come first, from the smallest to the largest, and then fractions such as "1of4". The tuple is
        empty if none are on record. For a partition, the profiles are those of its card.
        """
        return tuple(tables.profiles(self.name, self.card_memory_gb))

    @property
    def cards(self) -> int:
        """Return the number of whole cards (or chips) that hold the devices, rounded up; 0 for `CPU()`.

        For example, seven partitions 1g.10gb of an H100 need one card.
        """
        return -(-self.count // self.part.max_per_card) if self.part else self.count

    @property
    def hosts(self) -> int:
        """Return the number of virtual machines that hold the devices: 1, or several for most TPU slices."""
        return self.slice.vms if self.slice else 1

    def with_count(self, count: int) -> Accelerator:
        """Return the same hardware with `count` devices.

        Raises:
            UsageError: the count is not a whole number above 0, or it differs from the fixed count of a TPU slice or
                `CPU()`.
        """
        if count == self.count:
            return self
        if self.slice is not None:
            raise _refused(
                f"the TPU slice {self.label} always has {self.count} chips, so it takes no count (got {count!r}); "
                "choose a slice with another number of chips instead"
            )
        if self.kind == "cpu":
            raise _refused(f"{self.label} takes no count (got {count!r}); ask for processor cores with vcpus= instead")
        if not isinstance(count, int) or count < 1:
            raise _refused(f"count of {self.label} must be a whole number above 0, not {count!r}")
        return _changed(self, count=count)

    def partition(self, profile: str, count: int = 1) -> Accelerator:
        """Return `count` partitions of this card, each of which is a device of its own.

        If the card was made without a memory size, another size is used if only that size has the profile. For example,
        `A100()`, which has 80 GB, becomes the 40 GB card if only that card has the profile.

        Args:
            profile: kind of partition, such as "2g.10gb". `profiles` lists all kinds. Case does not matter.
            count: total number of partitions. The cards of this accelerator must be able to hold all of them.

        Raises:
            UsageError: the card lacks the profile (the message lists the existing ones), the cards cannot hold so many
                partitions, the count is below 1, or this accelerator is a partition itself.
        """
        from skypool.accelerators import partitions  # imported late: only partitions need it

        if self.part is not None:
            raise _refused(
                f"{self} is already a partition and cannot be partitioned again; call partition() on the whole card"
            )
        sizes: tuple[float, ...] = (self.card_memory_gb,)
        if self.origin == "default":
            sizes = tuple(dict.fromkeys(sizes + partitions.memories(self.name)))
        memory, part = partitions.find(self.name, sizes, profile)
        if not 1 <= count <= part.max_per_card * self.count:
            raise _refused(
                f"cannot make {count} partitions {part.profile} of {self}: one {self.name} {memory:g}GB holds at "
                f"most {part.max_per_card}; ask for 1 to {part.max_per_card * self.count}"
            )
        card = self if memory == self.memory_gb else build(self.name, memory, self.form_factor)
        return _changed(card, part=part, memory_gb=part.memory_gb, count=count)

    def fits(self, profiles: Iterable[str]) -> bool:
        """Return True if one card can hold all these profiles at once: `["3g.40gb", "2g.20gb", "2g.20gb"]`.

        The count of this accelerator does not matter. An empty list always fits.

        Raises:
            UsageError: the card lacks one of the profiles.
        """
        from skypool.accelerators import partitions

        return partitions.fits(self.name, self.card_memory_gb, profiles)

    def accepts(self, offered: Accelerator) -> bool:
        """Return True if `offered` is the hardware that this accelerator asks for, with exactly the same count.

        If the form factor of this accelerator is None, any form factor is accepted. Otherwise `offered` must have the
        same form factor, not None.
        """
        return self._identity(offered.form_factor) == offered._identity(offered.form_factor)

    def could_be(self, other: Accelerator) -> bool:
        """Return True if both accelerators may be the same kind of device, whatever their counts.

        The model, the memory of the whole card and the partition must be the same. The form factors must be the same,
        too, unless one of them is None. Use this method to compare rented hardware with the reports of a node's own
        tools, which are often less exact.
        """
        forms = {self.form_factor, other.form_factor} - {None}
        mine, theirs = self._identity(None), other._identity(None)
        return len(forms) < 2 and mine[:2] + mine[3:4] == theirs[:2] + theirs[3:4]

    def _identity(self, form_factor: str | None) -> tuple[object, ...]:
        form = self.form_factor or form_factor
        return self.name, self.card_memory_gb, form, self.profile, self.slice, self.count

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Accelerator):
            return NotImplemented
        return self._order < other._order

    def __le__(self, other: object) -> bool:
        return self == other or self < other

    def __gt__(self, other: object) -> bool:
        if not isinstance(other, Accelerator):
            return NotImplemented
        return other._order < self._order

    def __ge__(self, other: object) -> bool:
        return self == other or self > other

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what `pickle` stores of this accelerator.

        For a custom accelerator, these are all fields. Otherwise they are those that name an entry of the catalogue,
        such as the model, the partition and the count. The process that unpickles takes all other facts from its own
        catalogue.
        """
        if self.origin == "custom":
            return Accelerator, tuple(getattr(self, name) for name in Accelerator.__slots__)
        of = self.slice.type if self.slice else (self.name, self.card_memory_gb, self.form_factor)
        return _revive, (of, self.profile, self.count, self.origin, self.label)

    @property
    def _order(self) -> tuple[float, float, str]:
        return self.total_memory_gb, self.memory_gb, str(self)

    def __str__(self) -> str:
        part = f"/{self.part.profile}" if self.part else ""
        count = "" if self.count == 1 or self.slice or self.kind == "cpu" else f":{self.count}"
        return f"{self.label}{part}{count}"

    def __repr__(self) -> str:
        if self.slice:
            return f"TPU({self.slice.type!r})"
        if self.kind == "cpu":
            return f"{self.name}()"
        words = [f"memory='{self.card_memory_gb:g}GB'"] if self.card_memory_gb else []
        words += [f"form_factor={self.form_factor!r}"] if self.form_factor else []
        words += [f"count={self.count}"] if self.count != 1 and not self.part else []
        made = f"{self.name}({', '.join(words)})"
        if self.origin == "custom":
            made = f"Custom({', '.join([repr(self.name), *words])})"
        count = f", count={self.count}" if self.count != 1 else ""
        return f"{made}.partition({self.part.profile!r}{count})" if self.part else made

    def to_json(self) -> str:
        """Return the text of a JSON object with all fields. Its entry "spelling" is the string that `str()` returns."""
        import json  # both are imported late, as few programs need them
        from dataclasses import asdict

        return json.dumps({"spelling": str(self), **asdict(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Accelerator:
        """Return the accelerator that `to_json` wrote. The facts come from the text, not from the catalogue.

        Raises:
            UsageError: the text is not JSON, or not the JSON of an accelerator.
        """
        import json

        try:
            return _from_fields(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _refused(
                f"this is not the JSON of an accelerator: {error}; pass a text that Accelerator.to_json() returned"
            ) from error


def _changed(value: Accelerator, **changes: Any) -> Accelerator:
    return Accelerator(**{name: getattr(value, name) for name in Accelerator.__slots__} | changes)


def _refused(text: str) -> UsageError:
    from skypool.errors import UsageError

    return UsageError(text)


def _from_fields(given: dict[str, Any]) -> Accelerator:
    known = {name: given[name] for name in Accelerator.__slots__ if name in given}
    facts = {**known["metadata"], "pci_ids": tuple(known["metadata"]["pci_ids"])}
    known["metadata"] = Metadata(**facts)
    if known["part"]:
        places = tuple((start, size) for start, size in known["part"]["placements"])
        known["part"] = Partition(**{**known["part"], "placements": places})
    if known["slice"]:
        known["slice"] = Slice(**known["slice"])
    return Accelerator(**known)


def build(name: str, memory_gb: float | None = None, form_factor: str | None = None, count: int = 1) -> Accelerator:
    """Return `count` devices of a catalogue model, in the first variant that has the given memory and form factor.

    None for `memory_gb` or `form_factor` accepts any. If no form factor is given, and the memory size exists in
    several, the form factor of the result is None.

    Raises:
        UsageError: no variant has this memory and form factor (the message lists those that exist), the name is
            unknown, or the count is below 1.
    """
    return _one(name, memory_gb, form_factor).with_count(count)


@cache
def _one(name: str, memory_gb: float | None, form_factor: str | None) -> Accelerator:
    every = tables.variants(name)
    agree = [v for v in every if memory_gb in (None, v.memory_gb) and form_factor in (None, v.form_factor)]
    if not agree:
        raise _refused(_no_variant(name, every, memory_gb, form_factor))
    first = agree[0]
    forms = {v.form_factor for v in every if v.memory_gb == first.memory_gb}
    form = first.form_factor if form_factor or len(forms) == 1 else None
    sizes = {v.memory_gb for v in every}
    label = name + (f"-{first.memory_gb:g}GB" if len(sizes) > 1 else "")
    return Accelerator(
        name=name,
        memory_gb=first.memory_gb,
        form_factor=form or None,
        vendor=first.vendor,
        kind=first.kind,
        runtime=_RUNTIMES.get((first.vendor, first.kind), "none"),
        architecture=first.architecture,
        compute_capability=first.compute_capability,
        metadata=first.metadata,
        label=label + (f"-{form}" if form and len(forms) > 1 else ""),
        origin="default" if memory_gb is None and len(sizes) > 1 else "catalog",
    )


def _no_variant(name: str, every: Iterable[Variant], memory: float | None, form: str | None) -> str:
    sold = dict.fromkeys(f"{v.memory_gb:g}GB {v.form_factor}".strip() for v in every)
    asked = " ".join([f"{memory:g}GB"] if memory is not None else []) + (f" {form}" if form else "")
    near = [v.form_factor for v in every if form and v.form_factor.casefold() == form.casefold()]
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"there is no {name} with {asked.strip()}; {hint}choose from {', '.join(sold)}"


def as_reported(card: Accelerator, memory_mib: float) -> Accelerator | None:
    """Return the variant of a card's model whose nominal memory is nearest to the memory that a tool reports.

    Tools usually report less than the nominal memory, because error correction and firmware take some of it. Returns
    None if the reported memory is below 80 % of the nearest nominal size. There is no upper limit. A card that is not
    in the catalogue is returned unchanged.

    Args:
        card: an accelerator of the model, in any variant.
        memory_mib: the memory that the tool reports, in MiB.
    """
    gib = memory_mib / 1024 * _DIES.get(card.name, 1)
    forms = (None, card.form_factor) if card.form_factor else ()
    sizes = [v.memory_gb for v in tables.variants(card.name) if not forms or v.form_factor in forms]
    if not sizes:
        return card
    nearest = min(sizes, key=lambda size: abs(size - gib))
    if gib < nearest * _LEAST_REPORTED:
        return None
    return card if nearest == card.memory_gb else build(card.name, nearest, card.form_factor, card.count)


_LEAST_REPORTED = 0.8
"""Smallest accepted share of the nominal memory that a tool reports. The lowest share seen is 0.87, of a GB300."""
_DIES = {"MI250": 2, "MI250X": 2}
"""A dict from card to the number of its dies (chips in one package), for cards whose dies ROCm reports as devices.

Each die is reported with its share of the card's memory.
"""


def build_slice(kind: Slice) -> Accelerator:
    """Return the accelerator that stands for all chips of the TPU slice `kind`.

    Its `count` is the number of chips, and its `memory_gb` the memory of one chip.
    """
    chip = build(tables.tpu_names()[kind.generation])
    return _changed(chip, count=kind.chips, slice=kind, label=kind.type)


def _revive(
    of: str | tuple[str, float, str | None], profile: str | None, count: int, origin: Origin, label: str
) -> Accelerator:
    """Return the catalogue's accelerator for the values that `__reduce__` stored. `pickle` calls this."""
    if isinstance(of, str):  # the type of a TPU slice
        return _changed(build_slice(tables.slices()[of]), label=label)
    card = _changed(build(*of), origin=origin, label=label)  # `of` is (model, memory in GB, form factor)
    if profile is None:
        return card.with_count(count)
    from skypool.accelerators import partitions

    _, part = partitions.find(card.name, [card.memory_gb], profile)
    return _changed(card, part=part, memory_gb=part.memory_gb, count=count)
