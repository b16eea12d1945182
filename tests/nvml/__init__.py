"""NVML for tests: a library of our own with a script that says what it reports, or the real one of a machine with GPUs.

A test with the mark `fake_and_real` and the fixture `library` runs with both. Its variant `real` has the marker `gpu`.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from skypool.devices.sample import DeviceSample
from tests.needs import lacking, skip_or_fail


class FakeNvml:
    """`libnvidia-ml.so.1` built from `nvml.c`, and its script.

    Args:
        library: the folder of the library.
        folder: an empty folder for the script.
    """

    def __init__(self, library: Path, folder: Path) -> None:
        self.library = library
        self.script = folder / "script"
        self._values: dict[tuple[int, str], int] = {}
        self.say(0)

    def say(self, device: int, **values: int) -> None:
        """Change what a device reports. Readers see all of the change, or nothing."""
        self._values |= {(device, name): value for name, value in values.items()}
        lines = [f"{device} {name} {value}\n" for (device, name), value in self._values.items()]
        part = self.script.with_suffix(".part")
        part.write_text("".join(lines))
        os.replace(part, self.script)

    def value(self, device: int, name: str) -> int | None:
        """Return what the script says of a device; None if it says nothing."""
        return self._values.get((device, name))

    def xid(self, device: int, code: int) -> None:
        """Report an error of the driver on a device."""
        self.say(device, xid=code, xids=self._values.get((device, "xids"), 0) + 1)

    @property
    def env(self) -> Mapping[str, str]:
        """The environment variables with which a process finds the library and its script."""
        return {"LD_LIBRARY_PATH": str(self.library), "NVML_SCRIPT": str(self.script)}


Range = tuple[float, float]
"""The lowest and the highest right value."""


@dataclass(frozen=True)
class Card:
    """What a test expects of a GPU.

    Attributes:
        name: the name of its model.
        uuid: its unique id.
        pci_id: its PCI device id, such as "0x2330".
        values: the right values of its sample, by the name of the field. None for a field that the GPU does not have.
    """

    name: str
    uuid: str
    pci_id: str
    values: Mapping[str, Range | None]

    def check(self, seen: DeviceSample) -> None:
        """Fail the test unless a sample is one of this GPU."""
        assert (seen.kind, seen.unknown, seen.lost) == ("cuda", "", False)
        for name, wanted in self.values.items():
            value = getattr(seen, name)
            if wanted is None:
                assert value is None, (name, value)
            else:
                assert value is not None, (name, wanted)
                assert wanted[0] <= value <= wanted[1], (name, value, wanted)
        assert 0 <= (seen.memory_used_mib or 0) <= (seen.memory_total_mib or 0)
        assert 0 <= (seen.nvlinks or 0) <= (seen.nvlinks_all or 0)

    @property
    def memory_mib(self) -> Range:
        """The range of its whole memory in MiB."""
        found = self.values["memory_total_mib"]
        assert found is not None
        return found


@dataclass(frozen=True)
class Library:
    """The NVML library that processes of a test find, and the GPUs that it must report.

    Attributes:
        cards: the GPUs, by their index.
        states: the states of health that they may have.
        nvml: the script of the fake library; None for the real one.
    """

    cards: tuple[Card, ...]
    states: tuple[str, ...]
    nvml: FakeNvml | None = None

    def report_use(self, pid: int, mib: int) -> None:
        """Let the fake library report that a process uses GPU 0. A real one sees by itself what a process does."""
        if self.nvml is not None:
            self.nvml.say(0, pid=pid, pid_memory=mib, busy=88)

    def memory_of(self, pid: int) -> float | None:
        """Return the device memory in MiB that a process uses; None if the driver does not report it."""
        if self.nvml is not None:
            return self.nvml.value(0, "pid_memory") if self.nvml.value(0, "pid") == pid else None
        found = {row[0]: number(row[1]) for row in query("--query-compute-apps=pid,used_memory")}
        return found.get(str(pid))


fake_and_real = pytest.mark.parametrize("library", ["fake", pytest.param("real", marks=pytest.mark.gpu)], indirect=True)
"""Runs a test with the fake library, and with the real one where there is a GPU."""


@pytest.fixture(scope="session")
def built_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake library."""
    folder = tmp_path_factory.mktemp("nvml")
    build(folder)
    return folder


@pytest.fixture
def nvml(built_nvml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """The fake library in the environment of processes that the test starts. It reports one healthy H100."""
    made = FakeNvml(built_nvml, tmp_path)
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The fake library, with two GPUs, or the real one with what nvidia-smi says of its GPUs (see `fake_and_real`)."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if getattr(request, "param", "fake") == "real":
        return Library(real_cards(), ("ok", "unknown", "degraded"))
    nvml: FakeNvml = request.getfixturevalue("nvml")
    nvml.say(0, count=2)
    return Library((scripted_card(nvml, 0, busy=0), scripted_card(nvml, 1, busy=99)), ("ok",), nvml)


def scripted_card(nvml: FakeNvml, index: int, busy: int) -> Card:
    """Script a GPU of the fake library, and return what a test expects of it."""
    nvml.say(index, busy=busy, memory=2048 + index, milliwatts=310_000, celsius=61 + index)
    values = {
        "utilization_percent": busy, "memory_used_mib": 2048 + index, "memory_total_mib": 81_559, "power_watts": 310,
        "power_limit_watts": 700, "temperature_celsius": 61 + index, "sm_clock_mhz": 1980, "memory_clock_mhz": 1980,
        "pcie_width": 16, "pcie_width_max": 16, "nvlinks": 18, "nvlinks_all": 18, "ecc_uncorrected": 0, "recovery": 0,
    }  # fmt: skip
    ranges = {name: (value, value) for name, value in values.items()}
    return Card("NVIDIA H100 80GB HBM3", f"GPU-{index:08d}-0000", "0x2330", ranges)


_FACTS = ("name", "uuid", "pci.device_id")
_FIXED = {
    "memory_total_mib": "memory.total",
    "power_limit_watts": "enforced.power.limit",
    "pcie_width_max": "pcie.link.width.max",
}
"""The fields of nvidia-smi whose values must be those of a sample, by the field of the sample."""
_CHANGING: dict[str, tuple[str, Range]] = {
    "utilization_percent": ("utilization.gpu", (0, 100)),
    "power_watts": ("power.draw", (0.1, 3000)),
    "temperature_celsius": ("temperature.gpu", (1, 130)),
    "sm_clock_mhz": ("clocks.sm", (1, 10_000)),
    "memory_clock_mhz": ("clocks.mem", (1, 50_000)),
    "pcie_width": ("pcie.link.width.current", (1, 32)),
    "ecc_uncorrected": ("ecc.errors.uncorrected.volatile.total", (0, 1e6)),
}
"""The fields of nvidia-smi that tell if a GPU has a value at all, and the range of the value in a sample."""


def real_cards() -> tuple[Card, ...]:
    """Return what nvidia-smi says of the GPUs of this machine. Skip the test if there is none."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no real NVIDIA GPU here: nvidia-smi is not installed")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    if not listed.stdout.startswith("GPU "):
        pytest.skip(f"no real NVIDIA GPU here: nvidia-smi -L says {(listed.stdout + listed.stderr).strip()!r}")
    names = [*_FACTS, *_FIXED.values(), *(name for name, _ in _CHANGING.values())]
    return tuple(real_card(dict(zip(names, row, strict=True))) for row in query(f"--query-gpu={','.join(names)}"))


def real_card(said: Mapping[str, str]) -> Card:
    """Return what a test expects of a GPU, by what nvidia-smi says of it."""
    values: dict[str, Range | None] = {}
    for field, name in _FIXED.items():
        value = number(said[name])
        values[field] = None if value is None else (value - 1, value + 1)  # nvidia-smi rounds
    for field, (name, wanted) in _CHANGING.items():
        values[field] = None if number(said[name]) is None else wanted
    return Card(said["name"], said["uuid"], "0x" + said["pci.device_id"][2:6].upper(), values)


def query(what: str) -> list[list[str]]:
    """Return the table that nvidia-smi prints for a query."""
    argv = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return list(csv.reader(done.stdout.splitlines(), skipinitialspace=True))


def number(cell: str) -> float | None:
    """Return the number in a cell of nvidia-smi; None if it has none, such as "[N/A]"."""
    try:
        return float(cell)
    except ValueError:
        return None


def build(folder: Path) -> None:
    """Compile the library into a folder. Skip the test if there is no compiler, or no nvidia-ml-py to load it."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if reason := lacking("compiler"):
        skip_or_fail(reason)
    source = Path(__file__).with_name("nvml.c")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", target, source], check=True, timeout=120)
