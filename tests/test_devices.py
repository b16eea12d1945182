"""Devices at run time. The tools are real programs on PATH that print the recordings in samples/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from skypool import devices
from skypool.accelerators import A100, H100, parse
from skypool.devices import Device, Stats, cuda, host, hpu, neuron, rocm, tools, tpu
from skypool.errors import UsageError
from tests.nvml import Library, fake_and_real

SAMPLES = Path(__file__).parent / "samples"
Tool = Callable[..., Path]

NVIDIA = 'case "$*" in -L) cat {0}/{1};; *pci.device_id*) cat {0}/{2};; *utilization*) cat {0}/{3};; esac'


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Puts a program on a PATH with nothing but two usual commands, and clears what pins devices."""
    place = tmp_path / "bin"
    place.mkdir()
    for name in ("cat", "sleep"):
        (place / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(place))
    for variable in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
                     "HABANA_VISIBLE_MODULES", "TPU_VISIBLE_CHIPS", "TPU_ACCELERATOR_TYPE"):  # fmt: skip
        monkeypatch.delenv(variable, raising=False)

    def make(name: str, script: str) -> Path:
        made = place / name
        made.write_text(f"#!/bin/sh\n{script}\n")
        made.chmod(0o755)
        return made

    return make


@pytest.fixture
def two_h100(tool: Tool) -> None:
    tool("nvidia-smi", NVIDIA.format(SAMPLES, "nvidia-smi-L-h100.txt", "nvidia-smi-facts-h100.csv",
                                     "nvidia-smi-stats-v100.csv"))  # fmt: skip


def test_a_machine_without_tools_has_no_accelerators_and_asks_nobody(tool: Tool) -> None:
    started = time.perf_counter()
    assert devices.detect() == ()
    assert devices.accelerators() == ()
    assert time.perf_counter() - started < 30  # a bound against hanging, not a measurement
    for kind in ("cuda", "rocm", "neuron", "tpu", "hpu"):
        family = devices.family(kind)
        assert not family.is_available()
        assert family.auto_device_count() == 0
        assert family.parse_devices("auto") == []
        assert family.get_device_stats(0) == Stats()
        with pytest.raises(UsageError, match=f"this machine has no {kind} devices"):
            family.parse_devices([0])


def test_whole_cards_are_seen_with_memory_and_pci_id(two_h100: None) -> None:
    first, second = devices.detect()
    assert (first.kind, first.index, first.name, first.memory_mib) == (
        "cuda",
        0,
        "NVIDIA H100 80GB HBM3",
        81559,
    )
    assert (first.pci_id, second.pin) == ("0x2330", "1")
    assert first.accelerator == H100(form_factor="SXM")


def test_what_is_seen_can_be_compared_with_what_was_bought(two_h100: None) -> None:
    (seen,) = devices.accelerators()
    assert seen == H100(form_factor="SXM", count=2)
    assert parse("H100:2").could_be(seen)
    assert H100(count=2).accepts(seen)
    assert not parse("H100:8").accepts(seen)


def test_a_card_cut_by_mig_is_its_partitions(tool: Tool) -> None:
    tool("nvidia-smi", NVIDIA.format(SAMPLES, "nvidia-smi-L-mig.txt", "none", "none"))
    found = devices.detect()
    assert [device.profile for device in found] == ["1g.10gb"] * 7
    assert found[0].pin == found[0].uuid == "MIG-feb88891-0321-5fef-9c87-d4af3b54259e"
    assert devices.accelerators() == (A100(memory="80GB", form_factor="SXM").partition("1g.10gb", count=7),)
    assert devices.pinned(found[:1])["CUDA_VISIBLE_DEVICES"] == found[0].uuid


def test_cut_and_whole_cards_stand_side_by_side(tool: Tool) -> None:
    tool("nvidia-smi", NVIDIA.format(SAMPLES, "nvidia-smi-L-some-mig.txt", "none", "none"))
    found = devices.family("cuda").detect()
    assert [(device.index, device.profile) for device in found] == [
        (0, "1g.20gb"), (0, "1g.20gb"), (0, "1g.20gb"), (0, "1g.20gb"), (1, ""), (2, ""), (3, ""),
    ]  # fmt: skip


def test_the_index_of_a_cut_card_stands_for_its_first_partition(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    tool("nvidia-smi", NVIDIA.format(SAMPLES, "nvidia-smi-L-some-mig.txt", "none", "none"))
    everything = devices.detect()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert devices.detect() == (everything[5], everything[0])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{everything[1].uuid},1")
    assert devices.detect() == (everything[1], everything[4])


def test_hip_counts_the_devices_that_rocr_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [Device("rocm", index, "MI300X", pin=str(index), uuid=f"GPU-{index:04}") for index in range(4)]
    for variable, told in (("ROCR_VISIBLE_DEVICES", "3,GPU-0001,0"), ("HIP_VISIBLE_DEVICES", "2,0,-1,1")):
        monkeypatch.setenv(variable, told)
    assert [card.index for card in rocm.shown_of(cards)] == [0, 3]


def test_devices_for_rehearsals_are_hidden_as_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [{"kind": "cuda", "index": index, "name": "H100", "pin": str(index)} for index in range(3)]
    monkeypatch.setenv(
        "SKYPOOL_DEVICES", json.dumps([*told, {"kind": "hpu", "index": 0, "name": "HL-225", "pin": "4"}])
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0,-1,1")
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "9,4")
    assert [(each.kind, each.index) for each in devices.detect()] == [("cuda", 2), ("cuda", 0), ("hpu", 0)]


@pytest.mark.parametrize(
    ("shown", "left"),
    [
        ("1", [1]),
        ("0,1", [0, 1]),
        ("", []),
        ("GPU-1111", [1]),
        ("GPU-11111111-1111-1111-1111-111111111111", [1]),
        ("7", []),
        ("1,0", [1, 0]),
        ("0,-1,1", [0]),
        ("-1,0", []),
        ("0,,1", [0]),
        ("1,7,0", [1]),
        (" 1 , 0 ", [1, 0]),
        ("0,0", []),
        ("GPU-", []),
        ("GPU-1111,0", [1, 0]),
        ("NoDevFiles", []),
    ],
)
def test_devices_hidden_by_the_environment_are_not_seen(
    two_h100: None, monkeypatch: pytest.MonkeyPatch, shown: str, left: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert [device.index for device in devices.detect()] == left


def test_the_state_of_a_card_is_read(two_h100: None) -> None:
    stats = devices.family("cuda").get_device_stats(1)
    assert stats == Stats(11149, 32500, 98, 62, 383.55)
    assert devices.family("cuda").get_device_stats(devices.detect()[0]) == stats


def test_a_sensor_that_is_missing_is_none_not_zero() -> None:
    assert cuda.read_stats(sample("nvidia-smi-stats-na.csv")) == Stats(300, 5062, None, 41, None)


@pytest.mark.parametrize(
    ("written", "meant"),
    [("auto", [0, 1]), (-1, [0, 1]), ("-1", [0, 1]), (None, [0, 1]), (1, [0]), (2, [0, 1]), ("1", [1]),
     ("0, 1", [0, 1]), ([1, 0], [1, 0])],
)  # fmt: skip
def test_devices_are_chosen_the_ways_people_write_them(two_h100: None, written: object, meant: list[int]) -> None:
    family = devices.family("cuda")
    assert family.parse_devices(written) == meant  # type: ignore[arg-type] # several types
    assert [device.index for device in family.get_parallel_devices(written)] == meant  # type: ignore[arg-type] # same


@pytest.mark.parametrize("written", [3, 0, "2", "x", [5], "0,,x"])
def test_devices_that_are_not_there_are_refused(two_h100: None, written: object) -> None:
    with pytest.raises(UsageError, match=r"this machine has the cuda devices with the indices \[0, 1\]"):
        devices.family("cuda").parse_devices(written)  # type: ignore[arg-type] # the point


@pytest.mark.parametrize("script", ["exit 9", "echo nonsense", "echo '{'", "kill -9 $$", "printf '\\377\\376'"])
def test_a_tool_that_fails_or_talks_nonsense_means_no_devices(tool: Tool, script: str) -> None:
    for name in ("nvidia-smi", "amd-smi", "rocm-smi", "neuron-ls", "neuron-monitor", "hl-smi"):
        tool(name, script)
    assert devices.detect() == ()
    for kind in ("cuda", "rocm", "neuron", "hpu"):
        assert devices.family(kind).get_device_stats(0) == Stats()


def test_what_a_failing_tool_printed_before_is_not_believed(tool: Tool) -> None:
    tool("nvidia-smi", f"cat {SAMPLES}/nvidia-smi-L-h100.txt; exit 9")
    assert devices.detect() == ()


def test_a_number_shows_no_other_that_begins_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    cards = [devices.Device("cuda", index, "H100", pin=str(index)) for index in (1, 10)]
    assert tools.shown("CUDA_VISIBLE_DEVICES", cards, lambda card: (card.pin,)) == (cards[0],)


def test_a_tool_that_hangs_means_no_devices(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "PATIENCE", 0.3)
    tool("nvidia-smi", "exec sleep 60")
    started = time.monotonic()
    assert devices.family("cuda").detect() == ()
    assert time.monotonic() - started < 30


def test_amd_smi_is_asked_first(tool: Tool) -> None:
    tool("amd-smi", f'case "$1" in static) cat {SAMPLES}/amd-smi-static-mi300x.json;;'
                    f" metric) cat {SAMPLES}/amd-smi-metric-w7700.json;; esac")  # fmt: skip
    (found,) = devices.detect()
    assert (found.kind, found.name, found.memory_mib, found.pci_id) == (
        "rocm",
        "AMD Instinct MI300X",
        196592,
        "0x74A1",
    )
    assert found.accelerator == parse("MI300X")
    assert devices.family("rocm").get_device_stats(0) == Stats(14569, 16368, 42, 45, 20)


def test_rocm_smi_is_asked_where_there_is_no_amd_smi(tool: Tool) -> None:
    tool("rocm-smi", f"cat {SAMPLES}/rocm-smi-mi210.json")
    first, second = devices.detect()
    assert (first.name, first.memory_mib, second.index) == ("Instinct MI210", 65520, 1)
    assert first.uuid == "GPU-18f68e602b8a790f"
    assert devices.accelerators() == (parse("MI210:2"),)
    stats = devices.family("rocm").get_device_stats(first)
    assert stats == Stats(10960896 / 2**20, 65520, 0, 44, 41)


def test_a_card_the_catalogue_does_not_know_is_still_a_device() -> None:
    (found,) = rocm.read_rocm(sample("rocm-smi-rx7900xt.json"))
    assert (found.name, found.pci_id, found.accelerator) == ("Radeon RX 7900 XT", "0x744C", None)
    (other,) = rocm.read_rocm(sample("rocm-smi-780m.json"))
    assert (other.name, other.memory_mib, other.uuid) == ("Phoenix3", None, "")
    assert rocm.read_rocm_state(sample("rocm-smi-780m.json"), 0) == Stats(None, None, 19, 31, 7.222)


def test_the_names_of_cards_lead_to_the_catalogue() -> None:
    named = {
        "Tesla V100-SXM3-32GB": "V100-32GB-SXM",
        "NVIDIA A100 80GB PCIe": "A100-80GB-PCIe",
        "NVIDIA GeForce RTX 4090": "RTX_4090-24GB",
        "Arcturus GL-XL [Instinct MI100]": "MI100",
        "AMD Instinct MI300X VF": "MI300X",
        "HL-325L": "Gaudi3",
        "HL-205": "Gaudi",
        "Inferentia2": "Inferentia2",
    }
    assert {name: str(Device("x", 0, name).accelerator) for name in named} == named


def test_memory_decides_where_a_name_means_several_cards() -> None:
    assert str(Device("cuda", 0, "NVIDIA GeForce RTX 3060", 8192).accelerator) == "RTX_3060-8GB"
    assert str(Device("cuda", 0, "NVIDIA GeForce RTX 3060", 12288).accelerator) == "RTX_3060-12GB"
    assert str(Device("cuda", 0, "Mystery", pci_id="0x2331").accelerator) == "H100-80GB-PCIe"
    assert Device("cuda", 0, "Mystery").accelerator is None


def test_neuron_devices_are_pinned_by_their_cores(tool: Tool) -> None:
    tool("neuron-ls", f"cat {SAMPLES}/neuron-ls-trn2.json")
    (found,) = devices.detect()
    assert (found.kind, found.name, found.memory_mib, found.pin) == ("neuron", "Trainium2", 98304, "0,1,2,3")
    assert devices.pinned([found]) == {"NEURON_RT_VISIBLE_CORES": "0,1,2,3"}
    assert found.accelerator == parse("Trainium2")


def test_neuron_cores_are_counted_where_the_tool_does_not_number_them() -> None:
    first, last = neuron.read_neuron_ls(sample("neuron-ls-docs.json"))
    assert (first.pin, last.index, last.pin) == ("0,1,2,3", 15, "60,61,62,63")
    assert last.name == "Trainium2"


def test_the_state_of_a_neuron_device_is_that_of_its_cores(tool: Tool) -> None:
    tool("neuron-ls", f"cat {SAMPLES}/neuron-ls-trn2.json")
    tool("neuron-monitor", f"cat {SAMPLES}/neuron-monitor-inf2.json; exec sleep 60")
    stats = devices.family("neuron").get_device_stats(0)
    assert stats.utilization_percent == pytest.approx(89.40087 / 4)
    assert (stats.memory_used_mib, stats.memory_total_mib) == (5, 98304)


def test_gaudi_is_pinned_by_module_not_by_index(tool: Tool) -> None:
    tool("hl-smi", f'case "$2" in *module_id*) cat {SAMPLES}/hl-smi-gaudi3.csv;;'
                   f" *) cat {SAMPLES}/hl-smi-stats-gaudi.csv;; esac")  # fmt: skip
    found = devices.detect()
    assert [device.pin for device in found] == ["1", "3", "2", "6", "0", "7", "5", "4"]
    assert devices.pinned(found[:2]) == {"HABANA_VISIBLE_MODULES": "1,3"}
    assert devices.accelerators() == (parse("Gaudi3:8"),)
    assert devices.family("hpu").get_device_stats(2) == Stats(512, 32768, 12, 33, 96)
    assert hpu.read_hl_smi("") == ()


@pytest.fixture
def four_chips(tmp_path: Path) -> Callable[[str], tpu.Tpu]:
    def make(device_id: str) -> tpu.Tpu:
        for at in range(4):
            place = tmp_path / f"sys/bus/pci/devices/0000:00:0{at + 4}.0"
            place.mkdir(parents=True)
            (place / "vendor").write_text("0x1ae0\n")
            (place / "device").write_text(f"{device_id}\n")
            (tmp_path / "dev/vfio").mkdir(parents=True, exist_ok=True)
            (tmp_path / f"dev/vfio/{at}").touch()
        for at, (vendor, other) in enumerate([("0x1ae0", "0x0042"), ("0x8086", device_id)]):
            card = tmp_path / f"sys/bus/pci/devices/0000:00:0{at}.0"  # Google's network card, another's same number
            card.mkdir()
            (card / "vendor").write_text(f"{vendor}\n")
            (card / "device").write_text(f"{other}\n")
            (tmp_path / f"dev/vfio/{at + 4}").touch()
        return tpu.Tpu(str(tmp_path))

    return make


def test_tpu_chips_are_seen_by_their_pci_ids(tool: Tool, four_chips: Callable[[str], tpu.Tpu]) -> None:
    family = four_chips("0x0063")
    assert [(device.name, device.pin) for device in family.detect()] == [("TPUv5e", str(n)) for n in range(4)]
    assert family.is_available()
    assert family.detect()[0].accelerator == parse("TPUv5e")


def test_an_old_tpu_is_named_by_its_slice(
    tool: Tool, four_chips: Callable[[str], tpu.Tpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v3-8")
    assert {device.name for device in four_chips("0x0027").detect()} == {"TPUv3"}


@pytest.mark.parametrize(
    ("kind", "indices", "env"),
    [
        ("cuda", [2, 3], {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ("cuda", [], {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ("cuda", ["MIG-1"], {"CUDA_VISIBLE_DEVICES": "MIG-1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ("rocm", [2, 3], {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0,1"}),
        ("neuron", [4, 5], {"NEURON_RT_VISIBLE_CORES": "4,5"}),
        ("neuron", [], {}),
        ("hpu", [5], {"HABANA_VISIBLE_MODULES": "5"}),
        ("mps", [0], {}),
        ("cpu", [0], {}),
        (
            "tpu",
            [1],
            {
                "TPU_VISIBLE_CHIPS": "1",
                "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
                "TPU_PROCESS_BOUNDS": "1,1,1",
            },
        ),
        (
            "tpu",
            [0, 1, 2, 3],
            {
                "TPU_VISIBLE_CHIPS": "0,1,2,3",
                "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
                "TPU_PROCESS_BOUNDS": "1,1,1",
            },
        ),
        ("tpu", [0, 1, 2], {"TPU_VISIBLE_CHIPS": "0,1,2"}),
    ],
)
def test_each_family_is_pinned_by_its_own_variables(kind: str, indices: list[int], env: dict[str, str]) -> None:
    assert devices.visible_env(kind, indices) == env


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="cuda, rocm, neuron, tpu, hpu, mps, cpu"):
        devices.family("gpu")


def test_the_processor_is_always_there() -> None:
    family = devices.family("cpu")
    assert family.is_available()
    assert family.auto_device_count() == 1
    stats = family.get_device_stats(0)
    assert stats.memory_total_mib == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    assert [device.index for device in family.get_parallel_devices(4)] == [0, 0, 0, 0]
    assert family.parse_devices("auto") == [0]
    assert 0 < host.cores() <= (os.cpu_count() or 1)


def test_importing_devices_does_not_load_the_catalogue() -> None:
    asked = "import sys; sys.path.insert(0, '.'); import skypool.devices; print(*sys.modules)"
    argv = [sys.executable, "-S", "-c", asked]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=SAMPLES.parents[1])
    assert not {"skypool.accelerators", "subprocess", "json", "shutil"} & set(done.stdout.split())


class NoMig(Exception):
    """NVML's error, here for what a card cannot do."""


def fake_nvml(*, mig: bool) -> SimpleNamespace:
    """The part of NVML's interface that is used; types as nvidia-ml-py returns them (old releases: bytes)."""

    def mode(handle: str) -> list[int]:
        if not mig:
            raise NoMig
        return [1, 1]

    def part(handle: str, slot: int) -> str:
        if slot > 1:
            raise NoMig
        return f"part{slot}"

    return SimpleNamespace(
        NVMLError=NoMig,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: "card",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=(9728 if "part" in handle else 81920) << 20),
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(pciDeviceId=0x20B210DE),
        nvmlDeviceGetName=lambda handle: f"NVIDIA A100-SXM4-80GB{' MIG 1g.10gb' if 'part' in handle else ''}",
        nvmlDeviceGetUUID=lambda handle: f"{handle}-uuid".encode(),
        nvmlDeviceGetMigMode=mode,
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=part,
    )


def test_nvml_gives_the_same_as_the_tool() -> None:
    (card,) = cuda.read_nvml(fake_nvml(mig=False))
    assert card == Device("cuda", 0, "NVIDIA A100-SXM4-80GB", 81920, "0", "card-uuid", "0x20B2")
    parts = cuda.read_nvml(fake_nvml(mig=True))
    assert [(part.profile, part.memory_mib, part.pin) for part in parts] == [
        ("1g.10gb", 9728, "part0-uuid"),
        ("1g.10gb", 9728, "part1-uuid"),
    ]


@fake_and_real
def test_every_card_of_the_library_is_detected(library: Library) -> None:
    program = """
import dataclasses, json
from skypool.devices import cuda
print(json.dumps([dataclasses.asdict(each) for each in cuda._from_nvml()]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    found = [Device(**each) for each in json.loads(done.stdout)]
    assert {each.index for each in found} == set(range(len(library.cards)))
    for each in found:
        card = library.cards[each.index]
        assert (each.kind, each.name, each.pci_id) == ("cuda", card.name, card.pci_id)
        if not each.profile:  # a partition has a memory and an id of its own
            assert (each.uuid, each.pin) == (card.uuid, str(each.index))
            assert card.memory_mib[0] <= (each.memory_mib or 0) <= card.memory_mib[1]


def test_the_hottest_spot_is_the_temperature_where_amd_reports_it() -> None:
    both = '{"gpu_data": [{"gpu": 0, "temperature": {"edge": {"value": 45}, "hotspot": {"value": 61}}}]}'
    assert rocm.read_amd_metric(both).temperature_celsius == 61


def test_devices_of_several_kinds_are_pinned_each_by_its_own_variable() -> None:
    mixed = [Device("cuda", 1, "x", pin="1"), Device("hpu", 0, "y", pin="5")]
    env = devices.pinned(mixed)
    assert (env["CUDA_VISIBLE_DEVICES"], env["HABANA_VISIBLE_MODULES"]) == ("1", "5")
    assert devices.pinned([]) == {}
