"""Loads the catalogue's data files (CSV). Each file is read at its first use and kept in memory.

The files may be in a directory or in a zip archive. Most results are cached and shared, so callers must not change
them.
"""

from __future__ import annotations

import os.path

from skypool.accelerators.facts import Metadata, Partition, Slice, Variant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from functools import cache
    from typing import Any, TypeAlias

    Row: TypeAlias = dict[str, str]
else:
    from skypool.accelerators._record import memo as cache


@cache
def _lines(file: str) -> list[str]:
    loader: Any = __spec__.loader
    text: str = loader.get_data(os.path.join(os.path.dirname(__file__), file)).decode()
    return text.splitlines()


@cache
def rows(file: str) -> tuple[Row, ...]:
    """Return every row of a CSV file of this package, as a dict of cells by column heading. An empty cell is ""."""
    return tuple(_row(file, line) for line in _lines(file)[1:])


def _row(file: str, line: str) -> Row:
    return dict(zip(_cells(_lines(file)[0]), _cells(line), strict=True))


def _cells(line: str) -> list[str]:
    """Return the cells of a line of CSV, without their quotes."""
    # The module `csv` is not used: it loads `re`, which takes longer than reading all the files.
    if '"' not in line:
        return line.split(",")
    parts = line.split('"')  # every second part is quoted; two quotes within a quoted part stand for one
    parts[1::2] = [part.replace(",", "\0") for part in parts[1::2]]
    last = len(parts) - 1
    text = "".join(
        '"' if not part and place % 2 == 0 and 0 < place < last else part for place, part in enumerate(parts)
    )
    return [cell.replace("\0", ",") for cell in text.split(",")]


@cache
def names() -> frozenset[str]:
    """Return the names of all models."""
    return frozenset(line.partition(",")[0] for line in _lines("accelerators.csv")[1:])


def rows_of(name: str) -> tuple[Row, ...]:
    """Return the catalogue's rows of one model; () for an unknown name. Only these rows are parsed, which is quick."""
    file = "accelerators.csv"
    return tuple(_row(file, line) for line in _lines(file)[1:] if line.startswith(f"{name},"))


def _integer(text: str) -> int | None:
    return int(text) if text else None


def _number(text: str) -> float | None:
    return float(text) if text else None


@cache
def rows_by_name() -> dict[str, tuple[Row, ...]]:
    """Return a dict from model name to the model's rows of the catalogue.

    The first row of a model is the variant that the name alone stands for.
    """
    found: dict[str, list[Row]] = {}
    for row in rows("accelerators.csv"):
        found.setdefault(row["name"], []).append(row)
    return {name: tuple(group) for name, group in found.items()}


@cache
def variants(name: str) -> tuple[Variant, ...]:
    """Return the variants of a model; () for an unknown name. The first is the one that the name alone stands for."""
    return tuple(_variant(row) for row in rows_of(name))


def _variant(row: Row) -> Variant:
    return Variant(
        name=row["name"],
        memory_gb=float(row["memory_gb"]),
        form_factor=row["form_factor"],
        vendor=row["vendor"],
        kind=row["kind"],
        architecture=row["architecture"],
        compute_capability=row["compute_capability"] or None,
        metadata=_metadata(row),
    )


def _metadata(row: Row) -> Metadata:
    return Metadata(
        cuda_min=row["cuda_min"] or None,
        cuda_max=row["cuda_max"] or None,
        driver_min=_integer(row["driver_min"]),
        driver_max=_integer(row["driver_max"]),
        gfx=row["gfx"],
        neuron_cores=_integer(row["neuron_cores"]),
        tensor_cores=_integer(row["tensor_cores"]),
        bf16_tflops=_number(row["bf16_tflops"]),
        bandwidth_gb_per_s=_number(row["bandwidth_gb_per_s"]),
        tdp_watts=_number(row["tdp_w"]),
        memory_type=row["memory_type"],
        socket=row["socket"],
        pci_ids=tuple(row["pci_ids"].split()),
        notes=row["notes"],
        sources=row["sources"],
    )


@cache
def partition_cards() -> dict[tuple[str, float], tuple[str, ...]]:
    """Return a dict from (model, memory in GB) to the names of this card in partitions.csv.

    Only cards that can be partitioned are in the dict. Some have several names, each with further partitions.
    """
    found: dict[tuple[str, float], list[str]] = {}
    for row in rows("partition_cards.csv"):
        for model in row["models"].split():
            name, memory = model.split("@")
            found.setdefault((name, float(memory)), []).append(row["card"])
    return {model: tuple(cards) for model, cards in found.items()}


@cache
def profiles(name: str, memory_gb: float) -> dict[str, Partition]:
    """Return a dict from profile, such as "1g.10gb", to `Partition`, for one card. It is empty if none are on record.

    `name` is the card's model. NVIDIA's profiles come first, from the smallest to the largest, and then fractions such
    as "1of4".
    """
    cards = partition_cards().get((name, memory_gb), ())
    return {row["profile"]: _partition(row) for row in rows("partitions.csv") if row["card"] in cards}


def _partition(row: Row) -> Partition:
    return Partition(
        profile=row["profile"],
        memory_gb=float(row["memory_gb"]),
        compute_slices=int(row["compute_slices"]),
        compute_slices_of=int(row["compute_slices_total"]),
        memory_slices=int(row["memory_slices"]),
        memory_slices_of=int(row["memory_slices_total"]),
        max_per_card=int(row["max_instances"]),
        memory_gib_reported=_number(row["memory_gib_reported"]),
        sm_count=_integer(row["sm_count"]),
        nvidia_smi_id=_integer(row["nvidia_smi_id"]),
        placements=_placements(row["placements"]),
        media="media e" in row["attribute"] and not row["attribute"].startswith("no "),
        k8s_resource=row["k8s_resource"],
        driver_min=row["driver_min"],
    )


def _placements(text: str) -> tuple[tuple[int, int], ...]:
    """Return positions as (first memory slice, size): "0,2:1" gives (0, 1), (2, 1); "0-1:2" gives (0, 2), (1, 2)."""
    if not text:
        return ()
    starts, _, size = text.partition(":")
    first, dash, last = starts.partition("-")
    each = range(int(first), int(last) + 1) if dash else [int(start) for start in starts.split(",")]
    return tuple((start, int(size)) for start in each)


@cache
def slices() -> dict[str, Slice]:
    """Return a dict from Google's name of a TPU slice, such as "v5litepod-16", to the `Slice`, for every slice."""
    generations = {row["generation"]: row for row in rows("tpu_generations.csv")}
    return {row["type"]: _slice(row, generations[row["generation"]]) for row in rows("tpu_slices.csv")}


@cache
def slice_types() -> dict[str, str]:
    """Return a dict from this package's name of a TPU slice to Google's: {"TPUv5e_16": "v5litepod-16", …}."""
    names = tpu_names()
    return {
        f"{names[row['generation']]}_{row['type'].partition('-')[2]}": row["type"] for row in rows("tpu_slices.csv")
    }


def tpu_names() -> dict[str, str]:
    """Return a dict from TPU generation to the catalogue's name of the chip: {"v5e": "TPUv5e", …}."""
    return {row["generation"]: row["name"] for row in rows("tpu_generations.csv")}


def _slice(row: Row, generation: Row) -> Slice:
    return Slice(
        type=row["type"],
        generation=row["generation"],
        chips=int(row["chips"]),
        cores=int(row["cores"]),
        cores_per_chip=int(generation["cores_per_chip"]),
        hosts=int(row["hosts"]),
        vms=int(row["vms"]),
        chips_per_vm=int(row["chips_per_vm"]),
        topology=row["topology"],
        runtime_version=generation["runtime_version"],
        machine_type=row["machine_type"],
        gke_accelerator=generation["gke_accelerator"],
        vcpus_per_vm=_integer(row["vcpus_per_vm"]),
        ram_gb_per_vm=_integer(row["ram_gb_per_vm"]),
        zones=row["zones"] or generation["zones"],
        notes=row["notes"],
    )
