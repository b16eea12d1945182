"""Parses all spellings of accelerator names, including the clouds' own machine and GPU types.

The format is `[count x] name [memory] [form] [@memory] [/partition] [:count]`, such as "8x H100 SXM" or
"A100/2g.10gb:3". Case, spaces, dashes, underscores and dots do not matter. The name may also be any name that a cloud
or a tool uses for an accelerator, or for a machine type with accelerators.

The same word can mean different cards. For skypool, an A100 without a size has 80 GB, and a V100 has 16 GB. The
argument `dialect` names a source of names, such as a cloud or a tool. A word is then read as that source uses the word:
`parse("A100", dialect="skypilot")` has 40 GB.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache

from skypool.accelerators import tables
from skypool.accelerators.accelerator import Accelerator, build, build_slice
from skypool.accelerators.factories import Model, SliceModel
from skypool.accelerators.ranges import gigabytes
from skypool.accelerators.tpu_slices import CPU, spellings, squashed
from skypool.errors import UnknownAccelerator, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Never, TypeAlias

    Spelling: TypeAlias = str | Accelerator | Model[Never, Never] | SliceModel

_SXM = {f"sxm{generation}" for generation in range(2, 7)}
LONGEST = 120
"""Largest length, in characters, of a text that is looked up in the catalogue. A longer text names nothing there."""

_PREFIXES = (
    "nvidia", "tesla", "geforce", "amd", "instinct", "radeon",
    "aws", "google", "cloud", "intel", "habana", "standard", "grid", "ml",
)  # fmt: skip
"""Words before a name that do not change its meaning. "standard" comes from Azure, and "ml" from SageMaker."""
_NOISE = ("blackwell", "generation", "edition", "gpu", "server", "workstation")
"""Words that NVIDIA's software adds to a card's name. They are removed one after the other until the name is known."""
_LEADING_COUNT = re.compile(r"(\d{1,4})\s*[x×*]\s*(?=\D)", re.IGNORECASE)
_TRAILING_COUNT = re.compile(r"\s*:\s*(\d{1,4})(?=\s*(?:$|@))|\s+[x×]\s*(\d{1,4})$", re.IGNORECASE)
_ATTACHED_COUNT = re.compile(r"(.+?)[x×](\d{1,4})", re.IGNORECASE)
"""Matches a name with a count attached, such as "H100x8"."""
_SLURM = re.compile(r"(?:gres[:/])?gpu:", re.IGNORECASE)
"""Matches the prefix in Slurm's notation: "gpu:" in "gpu:a100:4", "gres/gpu:" in "gres/gpu:a100:4"."""
_LABEL = re.compile(r"(.+?)(?:[- ]MIG[- ](\d+g\.\d+gb[\w.+]*))?(?:-SHARED)?", re.IGNORECASE)
"""Matches a product label of Kubernetes, such as "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb" or "Tesla-T4-SHARED".

It also matches the name of a partition in CUDA and at RunPod, such as "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
"""
_MEMORY = re.compile(r"\s*@\s*([\d.]{1,9}\s*[GT]i?B?)\s*", re.IGNORECASE)


def parse(spelling: Spelling, *, dialect: str | None = None) -> Accelerator:
    """Return the accelerator that a spelling names.

    An `Accelerator` is returned unchanged. A factory such as `accelerators.H100` is called without arguments. Case,
    spaces, dashes, underscores and dots do not matter.

    Args:
        spelling: "H100:8", "8x H100", "A100-80GB", "A100:4@40GB", "A100/2g.10gb", "nvidia-tesla-a100", "p5.48xlarge",
            "v5p-8" and so on.
        dialect: source whose names are tried first: "aws", "aws-type", "azure", "flyte", "gcp", "runpod", "skypilot",
            "skypilot-runpod", "skyward", "vastai", "verda" and others. By default no source is preferred.

    Raises:
        UnknownAccelerator: no accelerator has this name, or the accelerator does not exist with this count, memory or
            partition. The error lists the nearest names.
        UsageError: there is no such dialect.
    """
    if dialect is not None and dialect not in dialects():
        raise UsageError(
            f"dialect={dialect!r} is not a known way of writing accelerators; choose from {', '.join(dialects())}"
        )
    if isinstance(spelling, Accelerator):
        return spelling
    if isinstance(spelling, (Model, SliceModel)):
        return spelling()
    if not isinstance(spelling, str):
        raise UnknownAccelerator(repr(spelling)[:LONGEST])
    if (found := _in_catalogue(spelling, dialect) or _registered(spelling)) is None:
        raise UnknownAccelerator(spelling[:LONGEST], _nearest(spelling[:LONGEST]))
    return found


def _registered(spelling: str) -> Accelerator | None:
    from skypool.accelerators import registry  # imported late: few names are not in the catalogue

    return registry.look_up(spelling)


def _nearest(text: str) -> tuple[str, ...]:
    """Return up to three names similar to an unknown one: partitions of its card if that is known, else any names."""
    from difflib import get_close_matches  # both are imported late: they load large modules

    from skypool.accelerators import similarity

    card, slash, rest = text.partition("/")
    known = _in_catalogue(card, None) if slash else None
    if known and known.profiles:
        near = get_close_matches(rest.partition(":")[0], known.profiles, 3, 0)
        return tuple(f"{known.label}/{profile}" for profile in near)
    return similarity.nearest(_TRAILING_COUNT.sub("", card))


def parse_all(spellings: Spelling | Iterable[Spelling]) -> tuple[Accelerator, ...]:
    """Return the accelerators that one or several spellings name, without duplicates and in the given order.

    Args:
        spellings: a list of values that `parse` reads, a single such value, or one string with commas. Empty parts
            between commas are ignored.

    Raises:
        UnknownAccelerator: one of the names is unknown, or `spellings` is something else, for example None or bytes.
        UsageError: the list is empty.
    """
    each: Iterable[Spelling]
    if isinstance(spellings, str):
        each = [word for word in spellings.split(",") if word.strip()]
    elif isinstance(spellings, (Accelerator, Model, SliceModel)):
        each = [spellings]
    elif isinstance(spellings, bytes) or not hasattr(spellings, "__iter__"):
        raise UnknownAccelerator(repr(spellings)[:LONGEST])
    else:
        each = spellings
    found = tuple(dict.fromkeys(map(parse, each)))
    if not found:
        raise UsageError("the list of accelerators is empty; for a machine without an accelerator, use CPU()")
    return found


@lru_cache(maxsize=4096)
def _in_catalogue(spelling: str, dialect: str | None) -> Accelerator | None:
    """Return the accelerator that a spelling names; None if the name, or its memory, count or partition, is unknown."""
    if len(spelling) > LONGEST:
        return None
    text = spelling.strip()
    if (plain := _relabelled(_SLURM.sub("", text, count=1) if _SLURM.match(text) else text)) != text:
        return _in_catalogue(plain, dialect)
    memory, text = _taken(_MEMORY, text)
    count, text = _taken(_TRAILING_COUNT, text)
    if count is None:
        count, text = _leading(text)
    card, _, profile = text.partition("/")
    if (found := _named(card.strip(), dialect)) is None and count is None:
        count, card = _attached(card.strip(), dialect)
        found = _named(card, dialect)
    if found is None:
        return None
    try:
        return _finish(found, memory, profile.strip() if "/" in text else None, count)
    except UsageError:
        return None


def _taken(pattern: re.Pattern[str], text: str) -> tuple[str | None, str]:
    """Cut the first match of `pattern` from a text. Return its non-empty group, None for no match, and what is left."""
    if not (found := pattern.search(text)):
        return None, text
    return next(group for group in found.groups() if group), text[: found.start()] + text[found.end() :]


def _leading(text: str) -> tuple[str | None, str]:
    found = _LEADING_COUNT.match(text)
    return (found[1], text[found.end() :]) if found else (None, text)


def _relabelled(text: str) -> str:
    label = _LABEL.fullmatch(text)
    if label is None:
        return text
    return label[1] + (f"/{label[2]}" if label[2] else "")


def _attached(text: str, dialect: str | None) -> tuple[str | None, str]:
    """Return ("8", "H100") for "H100x8"; (None, text) without a count, or if "x" may belong to the name: "MI250x4"."""
    found = _ATTACHED_COUNT.fullmatch(text)
    if found is None or _named(f"{found[1]}x", dialect):  # "MI250x4" may mean MI250 or MI250X
        return None, text
    return found[2], found[1]


def _finish(found: Accelerator, memory: str | None, profile: str | None, count: str | None) -> Accelerator:
    if memory is not None and (size := gigabytes(memory)) != found.memory_gb:
        if found.slice or found.origin == "catalog":
            raise UsageError(f"{found} has {found.memory}")
        found = build(found.name, size, found.form_factor, found.count)
    number = int(count) if count else None
    if number == 0:
        raise UsageError("a count of 0")
    if profile is not None:
        return found.partition(profile, number or 1) if not number else _many(found, profile, number)
    return found if number is None else found.with_count(number)


def _many(found: Accelerator, profile: str, number: int) -> Accelerator:
    """Return `number` partitions of a card with this profile, on as many cards as they need."""
    one = found.partition(profile)
    assert one.part is not None
    return found.with_count(-(-number // one.part.max_per_card)).partition(profile, number)


def _named(text: str, dialect: str | None) -> Accelerator | None:
    if dialect is None and (found := _labelled(text)):
        return found
    key = squashed(text)
    if found := _of_family(text):
        return found
    if dialect is not None and (means := _dialects().get((dialect, key))):
        return _in_catalogue(means, None)
    return _by_key(key)


def _labelled(label: str) -> Accelerator | None:
    """Return the card with this name or label, such as "A100" or "A100-40GB-SXM"; None for any other text."""
    # only the model's own rows are read, as loading the table of all names takes some 30 ms
    name, _, rest = label.partition("-")
    if name not in tables.names():
        return None
    size, gb, form = rest.partition("GB")
    try:
        memory, form = (float(size), form[1:]) if gb else (None, rest)
        found = build(name, memory, form or None)
    except ValueError:  # no size, or a UsageError: there is no such variant
        return None
    return found if label in (name, found.label) else None


def _of_family(text: str) -> Accelerator | None:
    """Return the accelerators of a cloud's machine type; None if no pattern in families.csv matches the type's name."""
    name = text.strip().removeprefix("Standard_").removeprefix("standard_")
    if name[:1].casefold() not in "ngtlza":  # the first letters of all patterns
        return None
    for pattern, per, means in _patterns():
        if found := pattern.fullmatch(name):
            number = int(found[1]) if pattern.groups and found[1] else 1
            count = number // per if per else 1
            return _in_catalogue(means, None).with_count(max(1, count))  # type: ignore[union-attr] # a test reads them all
    return None


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], int, str], ...]:
    rows = tables.rows("families.csv")
    return tuple((re.compile(row["pattern"], re.IGNORECASE), int(row["per"]), row["means"]) for row in rows)


def _by_key(key: str) -> Accelerator | None:
    if found := _prefixed(key):
        return found
    for word in _NOISE:
        if word in key and (found := _prefixed(key := key.replace(word, ""))):
            return found
    return None


def _prefixed(key: str) -> Accelerator | None:
    for _ in range(4):
        if found := _direct(key):
            return found
        before = next((word for word in _PREFIXES if key.startswith(word) and len(key) > len(word)), None)
        if before is None:
            return None
        key = key[len(before) :]
    return None


def _direct(key: str) -> Accelerator | None:
    if variant := _names().get(key):
        return build(*variant)
    if kind := spellings().get(key):
        return build_slice(kind)
    if key in ("cpu", "cpuonly", "none"):
        return CPU()
    means = _aliases().get(key) or _family(key)
    return _in_catalogue(means, None) if means else None


@cache
def _names() -> dict[str, tuple[str, float | None, str | None]]:
    """Return a dict from each squashed spelling of a model to (name, memory in GB, form factor), None if not given."""
    found: dict[str, tuple[str, float | None, str | None]] = {}
    for name, group in tables.rows_by_name().items():
        plain = squashed(name)
        found.setdefault(plain, (name, None, None))
        if re.match(r"(RTX|GTX)_\d{4}", name):
            found.setdefault(plain[3:], (name, None, None))  # "4090"
        for row in group:
            size, form = float(row["memory_gb"]), row["form_factor"] or None
            words = {squashed(form or ""), squashed(row["socket"].split(" ")[0])} - {""}
            words |= _SXM if form == "SXM" else set()
            for gb in (f"{size:g}gb", f"{size:g}g"):
                found.setdefault(plain + squashed(gb), (name, size, None))
                found.setdefault(plain + squashed(gb) + squashed(row["memory_type"]), (name, size, None))
                for word in words:
                    found.setdefault(plain + squashed(gb) + word, (name, size, form))
                    found.setdefault(plain + word + squashed(gb), (name, size, form))
            for word in words:
                found.setdefault(plain + word, (name, None, form))
    return found


@cache
def dialects() -> tuple[str, ...]:
    """Return all values that the argument `dialect` of `parse` accepts."""
    return tuple(dict.fromkeys(row["source"] for row in tables.rows("aliases.csv")))


@cache
def meanings(dialect: str) -> dict[str, Accelerator]:
    """Return a dict from every name that one dialect defines to the accelerator. It is empty for an unknown dialect.

    The names of the dialect "aws-type", for example, are the machine types of AWS. The dict is cached: callers must not
    change it.
    """
    rows = [row for row in tables.rows("aliases.csv") if row["source"] == dialect]
    return {row["alias"]: parse(row["means"]) for row in rows}


def sold(provider: str, kind: str, devices: Iterable[tuple[str, int]]) -> Accelerator | None:
    """Return the accelerator of a provider's machine type, with its count; None if skypool knows none of the names.

    If the name of the machine type is known, it decides. Otherwise the first known name of a device decides.

    Args:
        provider: dialect of the provider, such as "aws".
        kind: the provider's name of the machine type.
        devices: pairs of the provider's name of a device and the number of such devices in the machine.
    """
    if found := meanings(f"{provider}-type").get(kind):
        return found
    for name, count in devices:
        try:
            return parse(name, dialect=provider).with_count(count)
        except UsageError:  # an unknown name: try the next device
            continue
    return None


@cache
def _dialects() -> dict[tuple[str, str], str]:
    return {(row["source"], squashed(row["alias"])): row["means"] for row in tables.rows("aliases.csv")}


@cache
def _aliases() -> dict[str, str]:
    """Return a dict from squashed alias to spelling. If dialects differ, the first one in aliases.csv decides."""
    found: dict[str, str] = {}
    for row in tables.rows("aliases.csv"):
        found.setdefault(squashed(row["alias"]), row["means"])
    return found


def _family(key: str) -> str | None:
    """Return the spelling for the name of a machine type that an alias with "*" matches; None if no such alias does."""
    for start, end, means in _families():
        if key.startswith(start) and key.endswith(end) and key[len(start) : -len(end)].isalnum():
            return means
    return None


@cache
def _families() -> tuple[tuple[str, str, str], ...]:
    found = []
    for key, means in _aliases().items():
        start, star, end = key.partition("*")
        if star:
            found.append((start, end, means))
    return tuple(found)
