"""What clouds sell passes the health check: `samples/cards.csv` has what each card reports.

The set of what is sold is computed from the drivers' tables and the lab's offers: a card that a driver learns to sell
needs a row here.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skypool.accelerators import Accelerator, parse, tables
from skypool.accelerators.accelerator import build
from skypool.accelerators.spelling import meanings
from skypool.devices.device import Device
from skypool.provision import health_check
from skypool.wire.agent_config import NodeHealth
from skypool_gcp.catalog.facts import FACTS as GCP
from skypool_vastai._catalog import accelerator as vastai

HERE = Path(__file__).parent
NOW = 1_800_000_000.0
ROWS = list(csv.DictReader((HERE / "samples" / "cards.csv").read_text().splitlines()))
DIALECTS = ("aws", "aws-type", "gcp-type", "runpod", "vastai", "verda")


def device(row: dict[str, str]) -> Device:
    memory = int(row["memory_mib"]) if row["memory_mib"] else None
    return Device(row["kind"], 0, row["name"], memory, pci_id=row["pci_id"], profile=row["profile"])


def faults(bought: Accelerator, seen: Device) -> list[str]:
    report = NodeHealth(devices=(seen,), disk_free=2**40, time=NOW)
    return health_check.faults(bought, report, NOW)


def variants(sold: Accelerator, any_size: bool = False) -> Iterator[Accelerator]:
    """One device of each variant that a buyer of `sold` may get."""
    for each in tables.variants(sold.name):
        fits = any_size or each.memory_gb == sold.card_memory_gb
        if fits and sold.form_factor in (None, each.form_factor or None):
            card = build(each.name, each.memory_gb, each.form_factor or None)
            yield card.partition(sold.profile) if sold.profile else card


def sellable() -> set[Accelerator]:
    """Every accelerator that a driver can sell; Vast.ai tells sizes apart by the memory that its offers have."""
    found: set[Accelerator] = set()
    for dialect in DIALECTS:
        for sold in meanings(dialect).values():
            found.update(variants(sold, any_size=dialect == "vastai"))
    for name in [*GCP["attached"], *meanings("gcp")]:
        found.update(variants(parse(name, dialect="gcp")))
    for name in tables.tpu_names().values():
        found.update(variants(parse(name)))
    for path in (HERE / "lab" / "offers").glob("*.csv"):
        for row in csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")):
            found.update(variants(parse(row["accelerator"])))
    return {replace(each, count=1) for each in found if each.runtime != "none"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['name']} {row['pci_id']} {row['memory_mib']}")
def test_what_a_card_reports_passes_as_what_was_sold(row: dict[str, str]) -> None:
    assert faults(parse(row["sold"]), device(row)) == []


def test_every_accelerator_that_a_driver_sells_has_a_row() -> None:
    known = {parse(row["sold"]) for row in ROWS}
    assert sorted(map(str, sellable() - known)) == []


@pytest.mark.slow
def test_a_card_that_is_not_what_was_sold_is_refused_with_both_names() -> None:
    sold = {parse(row["sold"]) for row in ROWS}
    for row in ROWS:
        for other in sold - {parse(row["sold"])}:
            if row["pci_id"] == "0x0027" and other.name in ("TPUv2", "TPUv3"):
                continue  # one id for both: the reader of the device asks the metadata server for its name
            (said,) = faults(other, device(row))
            assert said.startswith(f"{other} was bought, and it has {row['name']}")


def test_the_pci_id_alone_names_a_card_whose_name_says_nothing() -> None:
    for row in ROWS:
        if row["kind"] == "cuda" and row["pci_id"] and "Q" not in row["name"].rpartition("-")[2]:
            shared = row["pci_id"] in ("0x25B6", "0x1E30", "0x1E78")  # A2 and A16, Quadro RTX 6000 and 8000
            seen = replace(device(row), name="NVIDIA Graphics Device")
            assert shared or faults(parse(row["sold"]), seen) == [], row


@pytest.mark.parametrize(
    ("name", "pci_id", "memory_mib"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "0x2717", 16376),
        ("NVIDIA GeForce RTX 3090", "0x2204", 12288),
        ("NVIDIA A10-4Q", "0x2236", 4096),
        ("Quadro K600", "0x0FFA", 1024),
    ],
)
def test_a_card_of_another_kind_or_with_less_memory_is_not_taken_for_one_that_is_sold(
    name: str, pci_id: str, memory_mib: int
) -> None:
    seen = Device("cuda", 0, name, memory_mib, pci_id=pci_id)
    assert all(faults(parse(row["sold"]), seen) for row in ROWS)


def test_hardware_that_no_tool_reports_is_not_refused_for_that() -> None:
    empty = NodeHealth(disk_free=2**40, time=NOW)
    for name in ("FPGA_VU9P", "FPGA_VU47P:2", "U30", "Qualcomm_AI100:8"):
        assert health_check.faults(parse(name), empty, NOW) == []
    assert health_check.faults(parse("H100"), empty, NOW) != []


def test_vastai_sells_the_size_that_the_health_check_will_see() -> None:
    for name, mib, sold in (
        ("RTX 4090", 49140, "RTX_4090-48GB:2"),
        ("RTX 4090", 24564, "RTX_4090-24GB:2"),
        ("RTX 2080 Ti", 22528, "RTX_2080_Ti-22GB:2"),
        ("RTX 3080", 12288, "RTX_3080-12GB:2"),
        ("RTX PRO 5000", 73415, "RTX_PRO_5000-72GB:2"),
    ):
        assert vastai(name, mib, 2) == parse(sold)
    assert vastai("A100X", 40960, 1) is None


def test_the_rows_without_a_source_are_counted_apart(record_property: Any) -> None:
    assumed = [row for row in ROWS if "assumed" in (row["listed"], row["seen"])]
    record_property("rows", len(ROWS))
    record_property("assumed", len(assumed))
    print(
        f"{len(ROWS) - len(assumed)} rows with a source for name, PCI id and memory; {len(assumed)} with a part assumed"
    )
    assert all(row["listed"] and row["seen"] for row in ROWS)
    assert len([row for row in ROWS if row["listed"] == "assumed"]) <= 1  # the name of the H100 with 96 GB
