"""Generates the tables of docs/accelerators.md. Each table stands between two markers in that page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from skypool.accelerators import sizing, tables
from skypool.accelerators.accelerator import build
from skypool.accelerators.facts import Variant
from skypool.accelerators.spelling import parse
from skypool.accelerators.tpu_slices import squashed

_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
DESKTOP = ("RTX_", "GTX_", "Quadro_", "Titan_", "CMP_", "GB10")
_CARD_HEADINGS = (
    "factory", "memory", "form", "architecture", "CC", "CUDA", "driver", "BF16 TFLOPS", "GB/s", "TDP W",
)  # fmt: skip


def family(name: str) -> str:
    """Return the name of the type stub (`.pyi`) that lists a model: "datacenter", "desktop", "tpu" or "others"."""
    vendor = tables.variants(name)[0].vendor
    if vendor == "nvidia":
        return "desktop" if name.startswith(DESKTOP) else "datacenter"
    return "tpu" if vendor == "google" else "others"


def page(text: str) -> str:
    """Return the text of the page docs/accelerators.md with new tables from the catalogue. No file is written.

    Each text between two table markers is replaced by the table that the first marker names. KeyError is raised if
    there is no such table.
    """
    return _MARKED.sub(lambda found: found[1] + _TABLES[found[2]]() + found[3], text)


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _variants(wanted: Callable[[Variant], bool]) -> list[Variant]:
    return [each for name in tables.rows_by_name() for each in tables.variants(name) if wanted(each)]


def _cards(wanted: Callable[[Variant], bool]) -> str:
    return _markdown(_CARD_HEADINGS, (_card(each) for each in _variants(wanted)))


def _card(each: Variant) -> list[str]:
    facts = each.metadata
    cuda = "" if facts.cuda_min is None else f"{facts.cuda_min} – {facts.cuda_max or ''}".strip()
    return [
        f"`{each.name}`",
        f"{each.memory_gb:g} GB {facts.memory_type}".strip(),
        each.form_factor,
        each.architecture,
        each.compute_capability or facts.gfx,
        cuda,
        f"R{facts.driver_min}" if facts.driver_min else "",
        *(_figure(value) for value in (facts.bf16_tflops, facts.bandwidth_gb_per_s, facts.tdp_watts)),
    ]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _partitions() -> str:
    rows = []
    for name, memory in tables.partition_cards():
        parts = tables.profiles(name, memory).values()
        if parts:
            listed = ", ".join(f"`{part.profile}` ×{part.max_per_card}" for part in parts)
            rows.append([f"`{name}` {memory:g} GB", listed])
    return _markdown(("card", "profile × how many fit"), rows)


def _generations() -> str:
    rows = []
    for row in tables.rows("tpu_generations.csv"):
        types = [each.type for each in tables.slices().values() if each.generation == row["generation"]]
        listed = ", ".join(f"`{type}`" for type in types[:12]) + (f" … `{types[-1]}`" if len(types) > 12 else "")
        chip = build(row["name"])
        rows.append(
            [f"`{row['name']}`", row["suffix_counts"], row["cores_per_chip"], chip.memory, listed,
             row["runtime_version"] or "not stated"]
        )  # fmt: skip
    return _markdown(("chip", "suffix counts", "cores in a chip", "memory", "slices", "runtime version"), rows)


def _slices() -> str:
    rows = (
        [f"`{each.type}`", each.chips, each.cores, each.hosts, each.vms, each.topology, each.machine_type]
        for each in tables.slices().values()
        if each.generation != "v5p" or each.chips <= 512
    )
    return _markdown(("slice", "chips", "cores", "hosts", "VMs", "topology", "machine type"), rows)


def _differing() -> str:
    """Return a Markdown table of the names that a source, such as a cloud, uses for another card than skypool."""
    rows = []
    for row in tables.rows("aliases.csv"):
        if row["source"] == "variant":
            continue
        plain, theirs = parse(row["alias"]), parse(row["alias"], dialect=row["source"])
        bare = squashed(row["alias"]) == squashed(plain.name) and theirs.form_factor != plain.form_factor
        if bare or not plain.could_be(theirs):
            rows.append([f"`{row['alias']}`", row["source"], f"`{theirs}`", f"`{plain}`"])
    return _markdown(("word", "used by", "means there", "means here"), rows)


def _sources() -> str:
    counts: dict[str, list[str]] = {}
    for row in tables.rows("aliases.csv"):
        counts.setdefault(row["source"], []).append(row["alias"])
    rows = [[source, len(names), ", ".join(f"`{n}`" for n in names[-3:])] for source, names in counts.items()]
    return _markdown(("dialect", "names", "such as"), rows)


def _notes() -> str:
    rows = [
        [f"`{each.name}` {each.memory_gb:g} GB {each.form_factor}".strip(), each.metadata.notes]
        for each in _variants(lambda each: bool(each.metadata.notes))
    ]
    rows += [
        [f"`{row['card']}` partitions", row["notes"]] for row in tables.rows("partition_cards.csv") if row["notes"]
    ]
    rows += [[f"`{each.type}`", each.notes] for each in tables.slices().values() if each.notes]
    return _markdown(("row", "note"), rows)


def _guide() -> str:
    words = ("< 1B", "1–7B", "7–13B", "13–70B", "70B +")
    rows = ([words[i], f"`{low}`", f"`{high}`"] for i, (_, low, high) in enumerate(sizing.GUIDE))
    return _markdown(("parameters", "minimum", "better"), rows)


def _is_desktop(each: Variant) -> bool:
    return family(each.name) == "desktop"


_TABLES: dict[str, Callable[[], str]] = {
    "datacenter": lambda: _cards(lambda each: each.vendor == "nvidia" and not _is_desktop(each)),
    "desktop": lambda: _cards(lambda each: each.vendor == "nvidia" and _is_desktop(each)),
    "amd": lambda: _cards(lambda each: each.vendor == "amd" and each.kind in ("gpu", "apu")),
    "others": lambda: _cards(lambda each: each.kind not in ("gpu", "apu")),
    "partitions": _partitions,
    "generations": _generations,
    "slices": _slices,
    "differing": _differing,
    "sources": _sources,
    "notes": _notes,
    "guide": _guide,
}
