"""`Accelerator`: the value that stands for one kind of hardware, its memory, form factor and count."""

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
    """The devices of one node: what they are, how many, and which part of them.

    Equal when it is the same hardware. Ordered by memory in all, then by memory of one device. `str()` gives
    the canonical spelling, which `parse` reads back to an equal value.

    Attributes:
        name: the model, as the factory is called: "A100".
        memory_gb: of one device (of one partition, if it is one), nominal GB as the vendor prints it.
        count: devices in all: cards, partitions, or the chips of a slice. 0 for `CPU()`.
        form_factor: "SXM", "PCIe", "NVL"…; None where any will do.
        vendor: "nvidia", "amd", "aws", "google", "intel"…, lower case.
        kind: "gpu", "apu", "trainium", "inferentia", "tpu", "gaudi", "cpu", "fpga", "media" or "other".
        runtime: the software family that drives it.
        compute_capability: NVIDIA's, "9.0"; None for others.
        part: the partition of a card that each device is; slice: the TPU slice they are. None if whole.
        card_memory_gb: of the whole card, where `part` is one.
        metadata: further facts. For an open form factor, those of the form the bare name means.
        label: the spelling without partition and count.
        origin: "catalog" as asked, "default" if the memory was not asked for, "custom" outside the catalogue.
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
            raise _refused(f"not an accelerator: {self.name!r}, {self.memory_gb} GB, count {self.count}")
        if not self.card_memory_gb:
            object.__setattr__(self, "card_memory_gb", self.memory_gb)
        if not self.label:
            object.__setattr__(self, "label", self.name)

    @property
    def memory(self) -> str:
        """Memory of one device as the factories take it: "80GB"."""
        return f"{self.memory_gb:g}GB"

    @property
    def total_memory_gb(self) -> float:
        """Memory of all devices together, nominal GB."""
        return self.memory_gb * self.count

    @property
    def profile(self) -> str | None:
        """The partition's profile, "2g.10gb"; None for whole cards."""
        return self.part.profile if self.part else None

    @property
    def profiles(self) -> tuple[str, ...]:
        """The partitions this card can be cut into; empty if none is on record."""
        return tuple(tables.profiles(self.name, self.card_memory_gb))

    @property
    def cards(self) -> int:
        """Whole cards (or chips) that hold it: seven 1g.10gb of an H100 need one."""
        return -(-self.count // self.part.max_per_card) if self.part else self.count

    @property
    def hosts(self) -> int:
        """Virtual machines that hold it: several for most TPU slices."""
        return self.slice.vms if self.slice else 1

    def with_count(self, count: int) -> Accelerator:
        """The same hardware, `count` devices of it.

        Raises:
            UsageError: fewer than one, or a TPU slice, whose type fixes its chips.
        """
        if count == self.count:
            return self
        if self.slice is not None:
            raise _refused(f"{self.label} is {self.count} chips; ask for another slice instead of a count")
        if not isinstance(count, int) or count < 1 or self.kind == "cpu":
            raise _refused(f"count of {self.label} must be a whole number above 0, not {count!r}")
        return _changed(self, count=count)

    def partition(self, profile: str, count: int = 1) -> Accelerator:
        """`count` partitions of this card, each a device of its own.

        A bare `A100()`, whose memory was not asked for, becomes the 40 GB card for a profile only that has.

        Args:
            profile: such as "2g.10gb"; `profiles` lists them.
            count: partitions in all; at most what these cards hold.
        Raises:
            UsageError: the card lacks the profile (the message lists what it has) or cannot hold so many.
        """
        from skypool.accelerators import partitions  # only who asks for a part needs it

        if self.part is not None:
            raise _refused(f"{self} is a partition already")
        sizes: tuple[float, ...] = (self.card_memory_gb,)
        if self.origin == "default":
            sizes = tuple(dict.fromkeys(sizes + partitions.memories(self.name)))
        memory, part = partitions.find(self.name, sizes, profile)
        if not 1 <= count <= part.max_per_card * self.count:
            holds = f"{self.name} {memory:g}GB holds at most {part.max_per_card} of {part.profile}"
            raise _refused(f"{holds}, and this is {self.count} of them: not {count}")
        card = self if memory == self.memory_gb else build(self.name, memory, self.form_factor)
        return _changed(card, part=part, memory_gb=part.memory_gb, count=count)

    def fits(self, profiles: Iterable[str]) -> bool:
        """Whether one such card can hold all of these at once: `["3g.40gb", "2g.20gb", "2g.20gb"]`."""
        from skypool.accelerators import partitions

        return partitions.fits(self.name, self.card_memory_gb, profiles)

    def accepts(self, offered: Accelerator) -> bool:
        """Whether `offered` is what was asked for: the same, where an open form factor takes any."""
        return self._identity(offered.form_factor) == offered._identity(offered.form_factor)

    def could_be(self, other: Accelerator) -> bool:
        """Whether both may be the same kind of device, counts aside, an open form factor fitting any.

        For comparing what was bought with what a node's own tools report, which is often less exact.
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
        """Pickle a value of the catalogue as its name; one of the user's own as its fields."""
        if self.origin == "custom":
            return Accelerator, tuple(getattr(self, name) for name in Accelerator.__slots__)
        return _revive, (self.label, self.profile, self.count, self.origin)

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
        """Every fact as one JSON object, whose "spelling" is what `parse` reads."""
        import json  # neither is needed to ask for hardware
        from dataclasses import asdict

        return json.dumps({"spelling": str(self), **asdict(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Accelerator:
        """The value that `to_json` wrote.

        Raises:
            UsageError: not JSON, or not of this shape.
        """
        import json

        try:
            return _from_fields(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _refused(f"not an accelerator in JSON: {error}") from error


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
    """A model out of the catalogue, in the first of its variants that agrees with what is given.

    Raises:
        UsageError: no variant agrees; the message says which there are.
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
    return f"there is no {name} with {asked.strip()}; {hint}there is {', '.join(sold)}"


def as_reported(card: Accelerator, memory_mib: float) -> Accelerator | None:
    """Return the size of a card's model that fits the memory a tool reports, None if it is clearly less than any.

    Tools report less than the nominal size: ECC takes 6 %, firmware some more (GB300: 250.7 of 288 GB). More than the
    nominal size is accepted, as third parties solder it on.
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
"""The share of the nominal memory that a tool reports at least; the lowest seen is 0.87, of a GB300."""
_DIES = {"MI250": 2, "MI250X": 2}
"""Cards of which ROCm shows each die as a device, with its share of the memory."""


def build_slice(kind: Slice) -> Accelerator:
    """The chips of one TPU slice."""
    chip = build(tables.tpu_names()[kind.generation])
    return _changed(chip, count=kind.chips, slice=kind, label=kind.type)


def _revive(label: str, profile: str | None, count: int, origin: Origin) -> Accelerator:
    """What a pickled value of the catalogue becomes again: its facts do not travel, its name does."""
    if made := tables.slices().get(label):
        return build_slice(made)
    name, memory, form = _split(label)
    made_card = _changed(build(name, memory, form), origin=origin)
    if profile is None:
        return made_card.with_count(count)
    from skypool.accelerators import partitions

    _, part = partitions.find(name, [made_card.memory_gb], profile)
    return _changed(made_card, part=part, memory_gb=part.memory_gb, count=count)


def _split(label: str) -> tuple[str, float | None, str | None]:
    name, _, rest = label.partition("-")
    size, _, form = rest.partition("GB-") if "GB-" in rest else (rest.removesuffix("GB"), "", "")
    if rest and not rest[0].isdigit():
        return name, None, rest
    return name, float(size) if size else None, form or None


def canonical(spelling: str) -> Accelerator | None:
    """Return what `str` of a card of the catalogue, or its bare name, is read back to; None for other spellings."""
    label, colon, count = spelling.partition(":")
    if colon and not (count.isascii() and count.isdecimal() and 0 < int(count) < 10_000 and not count.startswith("0")):
        return None
    if not label.isascii() or "," in label or not tables.rows_of(label.partition("-")[0]):
        return None
    try:
        name, memory, form = _split(label)
        found = _one(name, memory, form)
    except ValueError:  # UsageError is one: no such variant
        return None
    if label not in (found.label, name):
        return None
    return found.with_count(int(count)) if count else found
