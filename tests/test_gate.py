"""The health gate: what a node says of itself against what was bought."""

from __future__ import annotations

from typing import Any

import pytest

from skypool.accelerators import H100, parse
from skypool.devices.device import Device
from skypool.link import agent_messages
from skypool.provision import health_check
from skypool.wire.agent_config import NodeHealth

NOW = 1_800_000_000.0


def h100(index: int = 0, memory_mib: int = 81559, profile: str = "") -> Device:
    return Device("cuda", index, "NVIDIA H100 80GB HBM3", memory_mib, pin=str(index), profile=profile)


def report(*devices: Device, driver: str = "570.133.20", disk_gib: float = 50, time: float = NOW) -> NodeHealth:
    return NodeHealth(devices, driver, int(disk_gib * 2**30), time)


def test_what_was_bought_passes() -> None:
    assert health_check.faults(H100(count=2), report(h100(0), h100(1)), NOW) == []
    assert health_check.faults(None, report(), NOW) == []
    assert (
        health_check.faults(parse("H100/1g.10gb:2"), report(h100(profile="1g.10gb"), h100(profile="1g.10gb")), NOW)
        == []
    )


@pytest.mark.parametrize(
    ("bought", "seen", "says"),
    [
        (H100(count=2), report(h100()), "H100-80GB:2 was bought, and it has NVIDIA H100 80GB HBM3 (81559 MiB)"),
        (H100(), report(), "it has no device at all"),
        (parse("A100-80GB"), report(h100()), "A100-80GB was bought"),
        (parse("H100/1g.10gb"), report(h100(profile="2g.20gb")), "HBM3 2g.20gb"),
        (parse("A100-80GB"), report(Device("cuda", 0, "NVIDIA A100-SXM4-40GB", 40960)), "A100"),
        (
            H100(),
            report(h100(), driver="470.256.02"),
            "its NVIDIA driver is 470.256.02, and H100-80GB needs 525",
        ),
        (None, report(disk_gib=0.4), "0.4 GiB of its disk are free, and 1 GiB are needed"),
        (None, report(time=NOW - 3600), "its clock is 3600 s behind"),
        (None, report(time=NOW + 40), "its clock is 40 s ahead of this computer's"),
    ],
)
def test_each_fault_is_told_in_words(bought: Any, seen: NodeHealth, says: str) -> None:
    faults = health_check.faults(bought, seen, NOW)
    assert len(faults) == 1
    assert says in faults[0]


def test_every_fault_is_told_at_once() -> None:
    assert len(health_check.faults(H100(), report(disk_gib=0.1, time=NOW - 99), NOW)) == 3


def test_an_address_is_taken_only_if_it_is_one() -> None:
    assert agent_messages.address("10.0.0.4") == "10.0.0.4"
    assert agent_messages.address("2001:DB8::1") == "2001:db8::1"
    for none in ("", "10.0.0.4; reboot", "node-3", "None", "1" * 100_000):
        assert agent_messages.address(none) == ""
