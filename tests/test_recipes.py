"""Recipes: their values, their shell, and what they do on machines that are bare, ready, half done or broken.

The machines are file systems of their own with a real dpkg and apt; the vendors' repositories are those of
tests/lab/repository.py, and so are the tools. Nothing here has seen an accelerator: docs/recipes.md says what that means.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from skypool.accelerators import tables
from skypool_images.recipes import CUDA_FLOORS, NEURON, RUNTIMES, packages, recipe
from skypool_images.steps import Step, assemble, shell
from tests.lab import repository

ROOT = Path(os.environ.get("SKYPOOL_TEST_ROOT", "/var/tmp/recipes-root"))
CLOSED = "http://127.0.0.1:9"
"""Nobody listens there."""

# --- what recipe() and packages() give -----------------------------------------------------------------------


def names(runtime: str, **asked: Any) -> list[str]:
    return [step.name for step in recipe(runtime, **asked)]


def test_each_runtime_has_its_steps() -> None:
    assert names("none") == []
    assert names("cuda") == ["nvidia"]
    assert names("cuda", cuda="12.8", mig="1g.10gb") == ["nvidia", "cuda", "mig"]
    assert [names(runtime) for runtime in ("rocm", "neuron", "tpu", "hpu")] == [
        ["rocm"],
        ["neuron"],
        ["tpu"],
        ["gaudi"],
    ]


def test_a_version_for_another_runtime_means_nothing() -> None:
    assert recipe("neuron", cuda="12.8", rocm="7.2") == recipe("neuron")


def test_every_step_has_a_check_a_limit_and_a_script_that_changes_with_what_is_asked() -> None:
    steps = [step for runtime in RUNTIMES for step in recipe(runtime, cuda="12.8", mig="1g.10gb")]
    assert all(step.check and 0 < step.limit <= 3600 for step in steps)
    assert all(step.retries for step in steps if step.name not in ("mig",))
    assert recipe("cuda")[0].hash != recipe("cuda", count=2)[0].hash


@pytest.mark.parametrize(
    ("cuda", "floor", "package", "place"),
    [
        ("12", "525.60.13", "cuda-toolkit-12", "/usr/local/cuda-12"),
        ("12.8", "525.60.13", "cuda-toolkit-12-8", "/usr/local/cuda-12.8"),
        ("12.8.1", "525.60.13", "cuda-toolkit-12-8=12.8.1-1", "/usr/local/cuda-12.8"),
        ("13.0", "580.65.06", "cuda-toolkit-13-0", "/usr/local/cuda-13.0"),
        ("14.1", "580.65.06", "cuda-toolkit-14-1", "/usr/local/cuda-14.1"),
    ],
)
def test_a_cuda_needs_a_driver_and_is_a_package(cuda: str, floor: str, package: str, place: str) -> None:
    nvidia, toolkit = recipe("cuda", cuda=cuda)
    assert f"FLOOR={floor}\n" in nvidia.script
    assert f"TOOLKIT={package}\nPLACE={place}\n" in toolkit.script


def test_an_sdk_of_neuron_is_the_versions_of_its_packages() -> None:
    (step,) = recipe("neuron", neuron="2.29.0")
    assert "aws-neuronx-dkms=2.27.4. aws-neuronx-collectives=2.31.24. " in step.script
    assert "=" not in re.findall(r"PACKAGES='(.*)'", recipe("neuron")[0].script)[0]


@pytest.mark.parametrize(
    ("rocm", "release", "driver"),
    [(None, "7.2", "30.30"), ("6.4.1", "6.4.1", "6.4.1"), ("7.0.2", "7.0.2", "30.10.2"), ("7.1", "7.1", "30.20"),
     ("7.9", "7.9", "latest"), ("8.0", "8.0", "latest")],
)  # fmt: skip
def test_a_rocm_has_a_driver_beside_it(rocm: str | None, release: str, driver: str) -> None:
    assert f"RELEASE={release}\nDRIVER={driver}\n" in recipe("rocm", rocm=rocm)[0].script


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"runtime": "cude"}, "no runtime is called 'cude'"),
        ({"runtime": "cuda", "cuda": "cu128"}, "no version"),
        ({"runtime": "cuda", "cuda": "12.8; reboot"}, "no version"),
        ({"runtime": "cuda", "cuda": "10.2"}, "too old"),
        ({"runtime": "cuda", "mig": "1g.10"}, "no MIG profile"),
        ({"runtime": "neuron", "neuron": "2.21"}, "not on record"),
        ({"runtime": "rocm", "rocm": "seven"}, "no version"),
    ],
)
def test_what_cannot_be_meant_is_said_before_a_machine_is_rented(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        recipe(**asked)


def test_profiles_come_in_any_order_and_form() -> None:
    one = recipe("cuda", mig=["3g.40gb", "1g.10gb+me", "1G.10GB"])
    assert one == recipe("cuda", mig="1g.10gb, 1g.10gb+me,3g.40gb")
    assert "LAYOUT='1g.10gb 1g.10gb+me 3g.40gb'\n" in one[-1].script


def test_what_belongs_to_pip() -> None:
    assert packages("neuron").indexes == ("https://pip.repos.neuron.amazonaws.com",)
    assert packages("tpu").instead["jax"] == "jax[tpu]"
    assert packages("cuda", cuda="13.0").instead["jax"] == "jax[cuda13]"
    assert packages("rocm", rocm="6.4.1").indexes == ("https://download.pytorch.org/whl/rocm6.4",)
    assert packages("none") == packages("hpu")


def test_every_sdk_on_record_has_four_versions_that_end_where_a_suffix_may_follow() -> None:
    assert all(len(starts) == 4 and all(start.endswith(".") for start in starts) for starts in NEURON.values())
    assert sorted(CUDA_FLOORS) == [11, 12, 13]


def test_pci_ids_from_0x1e00_on_are_those_of_turing_and_later() -> None:
    """That is how nvidia.sh decides between the open kernel modules and the others."""
    older = {"Kepler", "Maxwell", "Pascal", "Volta"}
    cards = [row for row in tables.rows("accelerators.csv") if row["vendor"] == "nvidia" and row["pci_ids"]]
    ids = [
        (int(each, 16) >= 0x1E00, row["architecture"] not in older) for row in cards for each in row["pci_ids"].split()
    ]
    assert len(ids) > 20
    assert all(by_id == by_architecture for by_id, by_architecture in ids)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    steps = [step for runtime in RUNTIMES for step in recipe(runtime, cuda="12.8", mig="1g.10gb", neuron="2.29")]
    for step in steps:
        for part, text in (("task", step.script), ("check", step.check)):
            (tmp_path / f"{step.name}.{part}").write_text(f"{shell('prelude')}set -eu\n{text}")
    unused = "--exclude=SC2317,SC2329"  # a task carries the functions of its check, and the other way round
    command = ["shellcheck", "--shell=sh", unused, *sorted(map(str, tmp_path.iterdir()))]
    got = subprocess.run(command, capture_output=True, text=True, check=False)
    assert got.stdout == ""


# --- machines ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """A file system of its own, in which programs run as root, with state of its devices in /var/lib/stub."""

    place: Path
    environment: Mapping[str, str]

    def sh(self, script: str, *, check: bool = True) -> str:
        """What a shell in it says."""
        inside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c",
                  'mount -t proc proc "$0/proc" && exec chroot "$0" sh', str(self.place)]  # fmt: skip
        got = subprocess.run(
            inside, input=script, capture_output=True, text=True, env=dict(self.environment), check=False, timeout=100
        )
        assert got.returncode == 0 or not check, got.stdout + got.stderr
        return got.stdout

    def read(self, place: str) -> str:
        path = self.place / place
        return path.read_text().strip() if path.exists() else ""

    @property
    def installed(self) -> set[str]:
        """Packages that were not there at the beginning, NAME=VERSION."""
        rows = self.sh("dpkg-query -W -f '${db:Status-Status} ${Package}=${Version}\n'").splitlines()
        return {row.split()[1] for row in rows if row.startswith("installed ")} - BEFORE

    @property
    def apt_calls(self) -> list[str]:
        return self.read("var/lib/stub/apt").splitlines()


BEFORE: set[str] = set()


@contextmanager
def machine(folder: Path, server: repository.Server) -> Iterator[Machine]:
    for name in ("upper", "work", "place"):
        (folder / name).mkdir(parents=True)
    place = folder / "place"
    options = f"lowerdir={ROOT},upperdir={folder / 'upper'},workdir={folder / 'work'}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(place)], check=True)
    try:
        yield Machine(place, {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root",
            "SKYPOOL_PYTHON": "/usr/bin/python3",
            **{f"SKYPOOL_{name.upper()}_APT": f"{server.url}/{name}" for name in ("cuda", "neuron", "rocm", "gaudi")},
        })  # fmt: skip
    finally:
        subprocess.run(["umount", str(place)], check=True)


def furnish(machine: Machine, server: repository.Server, keyring: Path) -> None:
    """Its distribution's archive, its kernel, a ledger of calls of apt; no devices."""
    put(machine, "etc/apt/keyrings/distribution.asc", keyring.read_text())
    put(machine, "etc/apt/sources.list", f"deb {SIGNED} {server.url}/debian bookworm main\n")
    shutil.rmtree(machine.place / "etc/apt/sources.list.d")
    (machine.place / "etc/apt/sources.list.d").mkdir()
    for name in ("modprobe", "rmmod"):
        put(machine, f"usr/sbin/{name}", (repository.STUBS / "modprobe").read_text(), 0o755)
    put(
        machine,
        "usr/local/bin/apt-get",
        '#!/bin/sh\necho "$*" >> /var/lib/stub/apt\nexec /usr/bin/apt-get "$@"\n',
        0o755,
    )
    put(machine, "var/lib/stub/devices", "0\n")


SIGNED = "[signed-by=/etc/apt/keyrings/distribution.asc]"


def put(machine: Machine, place: str, text: str, mode: int = 0o644) -> None:
    path = machine.place / place.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


# --- what may be found on a machine ---------------------------------------------------------------------------

Change = Callable[[Machine, repository.Server], None]


def devices(number: int, vendor: str = "0x10de", device: str = "0x2330", kind: str = "0x030200") -> Change:
    """So many, on the PCI bus and for the tools."""

    def change(machine: Machine, server: repository.Server) -> None:
        put(machine, "var/lib/stub/devices", f"{number}\n")
        for at in range(max(number, 1)):
            for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
                put(machine, f"sys/bus/pci/devices/0000:0{at}:00.0/{name}", value + "\n")

    return change


def bus(machine: Machine, server: repository.Server) -> None:
    """A PCI bus with a network card on it."""
    for name, value in (("vendor", "0x1d0f"), ("device", "0xec20"), ("class", "0x020000")):
        put(machine, f"sys/bus/pci/devices/0000:05:00.0/{name}", value + "\n")


def shows(number: int) -> Change:
    """What the tools see, whatever is on the bus."""
    return lambda machine, server: put(machine, "var/lib/stub/devices", f"{number}\n")


def ubuntu(*archives: str) -> Change:
    def change(machine: Machine, server: repository.Server) -> None:
        (machine.place / "etc/os-release").unlink()
        put(machine, "etc/os-release", 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n')
        lines = [f"deb {SIGNED} {server.url}/{archive} noble main\n" for archive in archives]
        put(machine, "etc/apt/sources.list", "".join(lines))

    return change


def has(files: Mapping[str, str]) -> Change:
    """Files that an image brings, of no package."""

    def change(machine: Machine, server: repository.Server) -> None:
        for place, text in files.items():
            put(machine, place, text, 0o755 if "/bin/" in place else 0o644)

    return change


def does(script: str) -> Change:
    """Whatever else was done there, $URL being where the repositories are."""
    return lambda machine, server: void(machine.sh(f"URL={server.url}\nset -e\n{script}"))


def void(_: object) -> None: ...


def variable(name: str, value: str) -> Change:
    def change(machine: Machine, server: repository.Server) -> None:
        environment = machine.environment
        assert isinstance(environment, dict)
        environment[name] = value.replace("$URL", server.url)

    return change


def loaded(*modules: str) -> Change:
    return does("".join(f"modprobe {module}\n" for module in modules))


def module_files(*modules: str, version: str = "590.48.01") -> Change:
    return has({f"/usr/lib/stub/modules/{module}": f"{version}\n" for module in modules})


DRIVER = (
    devices(2),
    has(repository.nvidia_tool("590.48.01")),
    module_files("nvidia", "nvidia-uvm"),
    loaded("nvidia", "nvidia-uvm"),
)
PERSISTENT = does("echo Enabled > /var/lib/stub/persistence")
GAUDI = devices(2, "0x1da3", "0x1060", "0x120000")
RADEON = devices(2, "0x1002", "0x74a1", "0x120000")
UNPACK = "apt-get -q update\ncd /tmp\nfor each in {}; do apt-get download $each; done\ndpkg --unpack ./*.deb\n"
OTHER_KERNEL = has({"/usr/local/bin/uname": "#!/bin/sh\necho 6.1.0-1-none\n"})
DLAMI = does(
    "for each in pytorch_2_8 pytorch_2_9 pytorch_2_9_nxd_training pytorch_1_13_inf1 jax_0_10 torch_neuronx_2_14_0; do\n"
    "place=/opt/aws_neuronx_venv_$each; mkdir -p $place/bin; ln -s /usr/bin/python3 $place/bin/python; done"
)


@dataclass(frozen=True)
class Case:
    """A machine, what was asked of it, and what is to be seen."""

    name: str
    runtime: str
    found: Sequence[Change]
    says: Sequence[str]
    """Patterns of the lines that the script has to say, without @boot, @step, @python and @ready."""
    asked: Mapping[str, Any] = field(default_factory=dict[str, Any])
    installs: Sequence[str] | None = None
    """Names of the packages that come; None if that is of no interest."""
    shows: Sequence[str] = ()
    """Patterns to be found in the output."""
    kept: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files of the machine afterwards, and a pattern of their text."""


@dataclass(frozen=True)
class Outcome:
    """Of two runs, one after the other."""

    lines: list[str]
    output: str
    again: list[str]
    seconds: float
    installed: set[str]
    audit: str
    files: Mapping[str, str]
    apt_first: list[str]
    apt_again: list[str]
    asked_again: list[str]


HEADERS = f"linux-headers-{repository.KERNEL}"
NEURON_NAMES = [f"aws-neuronx-{part}" for part in ("dkms", "collectives", "runtime-lib", "tools")]
GAUDI_NAMES = [f"habanalabs-{part}" for part in ("firmware", "dkms", "thunk", "rdma-core", "graph", "firmware-tools")]
ROCM_NAMES = ["rocminfo", "rocm-smi-lib", "amd-smi-lib"]
READY = ["nvidia 590.48.01"]
UBUNTU = ubuntu("ubuntu")

CASES = [
    Case("nvidia, bare", "cuda", [UBUNTU, devices(2)], ["@done nvidia"], {"count": 2},
         [HEADERS, "nvidia-headless-590-server-open", "nvidia-utils-590-server"], kept={"var/lib/stub/persistence": "Enabled"}),
    Case("nvidia, bare, signed modules", "cuda", [ubuntu("ubuntu", "signed-ubuntu"), devices(1)], ["@done nvidia"], {},
         [f"linux-modules-nvidia-590-server-open-{repository.KERNEL}", "nvidia-headless-no-dkms-590-server-open",
          "nvidia-utils-590-server"]),
    Case("nvidia, bare, a V100", "cuda", [UBUNTU, devices(1, device="0x1db1")], ["@done nvidia"], {},
         [HEADERS, "nvidia-headless-580-server", "nvidia-utils-580-server"]),
    Case("nvidia, bare Debian, with a toolkit", "cuda", [devices(1)], ["@done nvidia", "@done cuda"], {"cuda": "12.8"},
         [HEADERS, "nvidia-driver", "nvidia-smi", "cuda-keyring", "cuda-toolkit-12-8"],
         shows=[r"release 12\.8"], kept={"etc/apt/sources.list.d/cuda-debian12-x86_64.list": "http://127.0.0.1"}),
    Case("nvidia, Debian's driver is too old", "cuda", [devices(1)],
         ["@done nvidia", r"@fail cuda 100 apt-get .* install cuda-toolkit-13-0"], {"cuda": "13.0"},
         [HEADERS, "nvidia-open", "cuda-keyring"], shows=["Debian has 535.247.01, so", "Unable to locate package"]),
    Case("nvidia, ready", "cuda", [*DRIVER, PERSISTENT], ["@done nvidia"], {"count": 2}, []),
    Case("nvidia, without persistence", "cuda", [*DRIVER], ["@done nvidia"], {"cuda": None}, [],
         kept={"var/lib/stub/persistence": "Enabled"}),
    Case("nvidia, not loaded", "cuda", [*DRIVER, does("rmmod nvidia-uvm; rmmod nvidia")], ["@done nvidia"], {}, []),
    Case("nvidia, unpacked only", "cuda",
         [UBUNTU, devices(1), does(UNPACK.format("nvidia-utils-590-server nvidia-headless-590-server-open"))],
         ["@done nvidia"], {}, ["nvidia-headless-590-server-open", "nvidia-utils-590-server"]),
    Case("nvidia, an older branch runs", "cuda",
         [UBUNTU, devices(1), does("apt-get -q update; apt-get install -y nvidia-headless-535-server-open nvidia-utils-535-server"),
          loaded("nvidia")],
         [r"@done nvidia", "@fail cuda .*"], {"cuda": "13.0"},
         [HEADERS, "nvidia-headless-590-server-open", "nvidia-utils-590-server", "cuda-keyring"], shows=["driver 535.247.01 is older than 580.65.06"]),
    Case("nvidia, an older branch runs and is busy", "cuda",
         [UBUNTU, devices(1), does("apt-get -q update; apt-get install -y nvidia-headless-535-server-open nvidia-utils-535-server"),
          loaded("nvidia"), does("touch /var/lib/stub/busy")],
         ["@advice .*reboot.*", "@fail nvidia 1 its check: nvidia-smi -L"], {"cuda": "13.0"}),
    Case("nvidia, driver and library differ", "cuda", [*DRIVER, has({"/usr/lib/stub/nvidia-library": "580.95.05\n"}),
                                                      module_files("nvidia", version="580.95.05")], ["@done nvidia"], {}, []),
    Case("nvidia, they differ and it is busy", "cuda", [*DRIVER, has({"/usr/lib/stub/nvidia-library": "580.95.05\n",
                                                                     "/var/lib/stub/busy": ""})],
         ["@advice .* reboot this machine", "@fail nvidia 1 rmmod nvidia.*"], {}, [], shows=["Driver/library version mismatch"]),
    Case("nvidia, Secure Boot", "cuda", [UBUNTU, devices(1), has({"/var/lib/stub/modprobe":
         "modprobe: ERROR: could not insert 'nvidia': Key was rejected by service\n"})],
         ["@advice Secure Boot refuses .*", "@fail nvidia 1 modprobe nvidia"]),
    Case("nvidia, built for another kernel", "cuda", [UBUNTU, devices(1), has({"/var/lib/stub/modprobe":
         "modprobe: ERROR: could not insert 'nvidia': Exec format error\n"})],
         ["@advice the module nvidia was built for another kernel .*", "@fail nvidia 1 modprobe nvidia"]),
    Case("nvidia, no headers", "cuda", [ubuntu("signed-ubuntu"), devices(1), OTHER_KERNEL],
         ["@advice no headers for the running kernel 6.1.0-1-none .*",
          "@fail nvidia 1 apt-get install linux-headers-6.1.0-1-none"], {}, []),
    Case("nvidia, no devices", "cuda", [UBUNTU, devices(0)],
         ["@advice the driver runs and finds no GPU.*", "@fail nvidia 1 its check: nvidia-smi -L"], shows=["No devices were found"]),
    Case("nvidia, a device is missing", "cuda", [*DRIVER, shows(1)],
         ["@advice 1 of 2 devices .*", "@fail nvidia 1 its check: nvidia-smi -L"], {"count": 2}, []),
    Case("nvidia, nothing on the bus", "cuda", [UBUNTU, bus],
         ["@advice this machine has no NVIDIA device: .*", "@fail nvidia 1 look for PCI vendor 0x10de .*"], {}, []),
    Case("nvidia, archive down", "cuda", [UBUNTU, devices(1), does(f"sed -i s,$URL,{CLOSED}, /etc/apt/sources.list")],
         ["@retry nvidia 1 2", "@advice apt cannot read .*", "@fail nvidia 1 apt-get .* update"], {}, []),
    Case("nvidia, not ours to change", "cuda", [UBUNTU, devices(1), variable("SKYPOOL_CHANGES", "no")],
         ["@advice this machine is yours and is left as it is; do it yourself: install an NVIDIA driver",
          "@fail nvidia 1 install an NVIDIA driver"], {}, []),
    Case("nvidia, in a container", "cuda", [devices(1), has({"/.dockerenv": ""})],
         ["@advice this is a container .*", "@fail nvidia 1 install an NVIDIA driver"], {}, []),
    Case("mig, whole cards", "cuda", [*DRIVER, PERSISTENT], ["@done nvidia", "@done mig"], {"mig": "3g.40gb,3g.40gb"}, [],
         kept={"var/lib/stub/mig/0.parts": "3g.40gb\n3g.40gb", "var/lib/stub/mig/1.parts": "3g.40gb\n3g.40gb"}),
    Case("mig, ready", "cuda", [*DRIVER, has({f"/var/lib/stub/mig/{c}.{f}": t for c in (0, 1) for f, t in (
         ("mode", "Enabled\n"), ("parts", "3g.40gb\n1g.10gb\n"), ("instances", "as they are\n"))})],
         ["@done nvidia", "@done mig"], {"mig": "1g.10gb,3g.40gb"}, [], kept={"var/lib/stub/mig/0.instances": "as they are"}),
    Case("mig, instances that compute nothing", "cuda", [*DRIVER, has({"/var/lib/stub/mig/0.mode": "Enabled\n",
         "/var/lib/stub/mig/0.instances": "1g.10gb\n"})], ["@done nvidia", "@done mig"], {"mig": ["1g.10gb"] * 2}, [],
         kept={"var/lib/stub/mig/0.instances": "1g.10gb\n1g.10gb"}),
    Case("mig, cut in another way", "cuda", [*DRIVER, has({f"/var/lib/stub/mig/0.{f}": t for f, t in (
         ("mode", "Enabled\n"), ("parts", "3g.40gb\n"), ("instances", "3g.40gb\n"))})], ["@done nvidia", "@done mig"],
         {"mig": "1g.10gb"}, [], kept={"var/lib/stub/mig/0.parts": "1g.10gb"}),
    Case("mig, cut in another way and busy", "cuda", [*DRIVER, has({"/var/lib/stub/busy": "", **{f"/var/lib/stub/mig/0.{f}": t
         for f, t in (("mode", "Enabled\n"), ("parts", "3g.40gb\n"), ("instances", "3g.40gb\n"))}})],
         ["@done nvidia", "@advice programs use the partitions of card 0 .*", "@fail mig 1 nvidia-smi mig -i 0 -dgi"],
         {"mig": "1g.10gb"}, []),
    Case("mig, after a reset", "cuda", [*DRIVER, has({"/var/lib/stub/reset": "yes\n"})], ["@done nvidia", "@done mig"],
         {"mig": "1g.10gb"}, [], shows=["successfully reset"]),
    Case("mig, no reset to be had", "cuda", [*DRIVER, has({"/var/lib/stub/reset": "no\n"})],
         ["@done nvidia", "@advice MIG is on from the next reset of card 0.*reboot this machine",
          "@fail mig 1 nvidia-smi -i 0 --gpu-reset"], {"mig": "1g.10gb"}, []),
    Case("mig, a card without it", "cuda", [*DRIVER, has({"/var/lib/stub/mig-default": "[N/A]\n", "/var/lib/stub/name": "Tesla T4\n"})],
         ["@done nvidia", "@advice MIG is for .*ask for a whole Tesla T4.*", "@fail mig 1 nvidia-smi -i 0 -mig 1"], {"mig": "1g.10gb"}, []),
    Case("mig, a profile of another card", "cuda", [*DRIVER],
         ["@done nvidia", "@advice .* does not hold 1g.5gb; it has: 1g.10gb 3g.40gb", "@fail mig 1 nvidia-smi mig -i 0 -cgi 1g.5gb -C"],
         {"mig": "1g.5gb"}, []),
    Case("mig, more than a card holds", "cuda", [*DRIVER],
         ["@done nvidia", "@advice .* does not hold 3g.40gb 3g.40gb 3g.40gb; .*", "@fail mig 1 .*"], {"mig": ["3g.40gb"] * 3}, []),
    Case("neuron, bare", "neuron", [shows(2)], ["@done neuron"], {"count": 2}, [HEADERS, *NEURON_NAMES],
         kept={"etc/apt/sources.list.d/skypool-neuron.list": r"deb \[signed-by=/etc/apt/keyrings/skypool-neuron.asc\] \S+ bookworm main"}),
    Case("neuron, a release", "neuron", [shows(1)], ["@done neuron"], {"neuron": "2.29"}, [HEADERS, *NEURON_NAMES],
         kept={"usr/lib/stub/modules/neuron": "2.27.4.0"}),
    Case("neuron, ready", "neuron", [shows(1), has(repository.neuron_tool()), module_files("neuron"), loaded("neuron")],
         ["@done neuron"], {}, []),
    Case("neuron, ready but another release", "neuron", [shows(1), variable("SKYPOOL_NEURON_APT", "$URL/neuron"), does(
         "cp /etc/apt/keyrings/distribution.asc /tmp; apt-get -q update; "
         "echo \"deb [trusted=yes] $URL/neuron bookworm main\" > /etc/apt/sources.list.d/neuron.list; apt-get -q update; "
         f"apt-get install -y {' '.join(NEURON_NAMES)}")], ["@done neuron"], {"neuron": "2.29"}, [HEADERS, *NEURON_NAMES],
         kept={"usr/lib/stub/modules/neuron": "2.27.4.0", "etc/apt/sources.list.d/skypool-neuron.list": "^$"}),
    Case("neuron, key without list", "neuron", [shows(1), does("mkdir -p /etc/apt/keyrings; /usr/lib/apt/apt-helper download-file "
         "$URL/neuron/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB /etc/apt/keyrings/skypool-neuron.asc")], ["@done neuron"], {},
         [HEADERS, *NEURON_NAMES]),
    Case("neuron, list with an old key", "neuron", [shows(1), does("cp /etc/apt/keyrings/distribution.asc /etc/apt/keyrings/skypool-neuron.asc; "
         "echo \"deb [signed-by=/etc/apt/keyrings/skypool-neuron.asc] $URL/neuron bookworm main\" > /etc/apt/sources.list.d/skypool-neuron.list")],
         ["@done neuron"], {}, [HEADERS, *NEURON_NAMES], shows=["NO_PUBKEY", "the key has changed"]),
    Case("neuron, unpacked only", "neuron", [shows(1), does("echo \"deb [trusted=yes] $URL/neuron bookworm main\" > /etc/apt/sources.list.d/other.list\n"
         + UNPACK.format("aws-neuronx-tools aws-neuronx-dkms") + "rm /etc/apt/sources.list.d/other.list")],
         ["@done neuron"], {}, [HEADERS, *NEURON_NAMES]),
    Case("neuron, repository down", "neuron", [shows(1), variable("SKYPOOL_NEURON_APT", CLOSED)],
         ["@retry neuron 1 2", f"@advice packages come from {CLOSED}.*SKYPOOL_NEURON_APT.*", "@fail neuron 1 .*apt-helper .*"], {}, []),
    Case("neuron, signed by somebody else", "neuron", [shows(1), variable("SKYPOOL_NEURON_APT", "$URL/forged")],
         ["@advice packages come from .*", "@fail neuron 1 apt-get .* update"], {}, [], shows=["NO_PUBKEY"]),
    Case("neuron, no devices", "neuron", [shows(0)], ["@advice neuron-ls sees no device.*", "@fail neuron 1 its check: neuron-ls --json-output"]),
    Case("neuron, a device is missing", "neuron", [shows(1)],
         ["@advice 1 of 2 devices .*", "@fail neuron 1 its check: neuron-ls --json-output"], {"count": 2}),
    Case("neuron, an image with environments", "neuron",
         [shows(1), has(repository.neuron_tool()), module_files("neuron"), loaded("neuron"), DLAMI], ["@done neuron"], {}, [],
         shows=["brings /opt/aws_neuronx_venv_torch_neuronx_2_14_0"],
         kept={"opt/aws_neuronx_venv_torch_neuronx_2_14_0/pip.conf": "extra-index-url = https://pip.repos.neuron"}),
    Case("neuron, an image with environments, for JAX", "neuron",
         [shows(1), has(repository.neuron_tool()), module_files("neuron"), loaded("neuron"), DLAMI], ["@done neuron"],
         {"framework": "jax"}, [], shows=["brings /opt/aws_neuronx_venv_jax_0_10"]),
    Case("rocm, bare", "rocm", [RADEON], ["@done rocm"], {"count": 2}, [HEADERS, "amdgpu-dkms", *ROCM_NAMES]),
    Case("rocm, the whole of it", "rocm", [RADEON, module_files("amdgpu")], ["@done rocm"], {"rocm": "7.2"}, [*ROCM_NAMES, "rocm"]),
    Case("rocm, ready", "rocm", [RADEON, has(repository.rocm_tools()), has({"/dev/kfd": ""})], ["@done rocm"], {}, []),
    Case("rocm, ready, with the older tool", "rocm", [RADEON, has(repository.rocm_tools()), has({"/dev/kfd": ""}),
         does("rm /opt/rocm/bin/amd-smi")], ["@done rocm"], {"count": 2}, []),
    Case("rocm, tools without driver", "rocm", [RADEON, has(repository.rocm_tools())], ["@done rocm"], {},
         [HEADERS, "amdgpu-dkms", *ROCM_NAMES]),
    Case("rocm, repository down", "rocm", [RADEON, variable("SKYPOOL_ROCM_APT", CLOSED)],
         ["@retry rocm 1 2", "@advice packages come from .*SKYPOOL_ROCM_APT.*", "@fail rocm 1 .*"], {}, []),
    Case("rocm, no devices", "rocm", [RADEON, shows(0)], ["@advice the tools see no card.*", "@fail rocm 1 its check: rocm-smi .*"]),
    Case("rocm, a device is missing", "rocm", [RADEON, has(repository.rocm_tools()), has({"/dev/kfd": ""}), shows(1)],
         ["@advice 1 of 2 devices .*", "@fail rocm 1 its check: rocm-smi .*"], {"count": 2}, []),
    Case("gaudi, bare", "hpu", [GAUDI], ["@done gaudi"], {"count": 2}, [HEADERS, *GAUDI_NAMES]),
    Case("gaudi, ready", "hpu", [GAUDI, has(repository.gaudi_tool()), module_files("habanalabs"), loaded("habanalabs")],
         ["@done gaudi"], {"count": 2}, []),
    Case("gaudi, not loaded", "hpu", [GAUDI, does("echo \"deb [trusted=yes] $URL/gaudi/debian bookworm main\" > /etc/apt/sources.list.d/gaudi.list; "
         f"apt-get -q update; apt-get install -y {' '.join(GAUDI_NAMES)}")], ["@done gaudi"], {}, GAUDI_NAMES),
    Case("gaudi, repository down", "hpu", [GAUDI, variable("SKYPOOL_GAUDI_APT", CLOSED)],
         ["@retry gaudi 1 2", "@advice packages come from .*SKYPOOL_GAUDI_APT.*", "@fail gaudi 1 .*"], {}, []),
    Case("gaudi, no devices", "hpu", [GAUDI, shows(0)], ["@advice hl-smi sees no card.*", "@fail gaudi 1 its check: hl-smi .*"]),
    Case("gaudi, a device is missing", "hpu", [GAUDI, shows(1)], ["@advice 1 of 2 .*", "@fail gaudi 1 its check: hl-smi .*"], {"count": 2}),
    Case("tpu, ready", "tpu", [has({f"/dev/accel{n}": "" for n in range(4)})], ["@done tpu"], {"count": 4}, [], shows=["/dev/accel3"]),
    Case("tpu, ready, through vfio", "tpu", [has({"/dev/vfio/0": "", "/dev/vfio/vfio": ""})], ["@done tpu"], {}, []),
    Case("tpu, no devices", "tpu", [], ["@advice there is no TPU .*", "@fail tpu 1 its check: ls /dev/accel.*"], {}, []),
    Case("tpu, a device is missing", "tpu", [has({"/dev/accel0": ""})], ["@advice 1 of 4 .*", "@fail tpu 1 its check: .*"], {"count": 4}, []),
]  # fmt: skip


# --- the table -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[repository.Server]:
    if os.geteuid() or not ROOT.exists():
        pytest.skip("machines are made of mounts and a Debian root: that needs root")
    with repository.serve(tmp_path_factory.mktemp("repository"), "127.0.0.1") as server:
        yield server


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, server: repository.Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    """All that are selected, several at once: most of their time they wait."""
    place = tmp_path_factory.mktemp("machines")
    wanted = [item.callspec.params["case"] for item in request.session.items
              if isinstance(item, pytest.Function) and "case" in getattr(getattr(item, "callspec", None), "params", {})]  # fmt: skip
    with machine(place / "before", server) as bare:
        furnish(bare, server, _keyring(server, tmp_path_factory))
        BEFORE.update(bare.installed)
    with ThreadPoolExecutor(4) as pool:
        yield {
            case.name: pool.submit(perform, case, place / str(at), server, _keyring(server, tmp_path_factory))
            for at, case in enumerate(wanted)
        }


def _keyring(server: repository.Server, factory: pytest.TempPathFactory) -> Path:
    return next(factory.getbasetemp().glob("repository*/distribution.asc"))


def perform(case: Case, folder: Path, server: repository.Server, keyring: Path) -> Outcome:
    with machine(folder, server) as there:
        furnish(there, server, keyring)
        for change in case.found:
            change(there, server)
        (there.place / "var/lib/stub/apt").unlink(missing_ok=True)
        script = assemble([impatient(step) for step in recipe(case.runtime, **case.asked)], case.name)
        output = there.sh(script, check=False)
        first = there.apt_calls
        (there.place / "var/lib/stub/apt").unlink(missing_ok=True)
        before = len(server.asked)
        began = time.monotonic()
        again = protocol(there.sh(script, check=False)) if "@ready" in output else []
        seconds = time.monotonic() - began
        files = {place: there.read(place) for place in case.kept}
        audit = there.sh("dpkg --audit")
        return Outcome(protocol(output), output, again, seconds, there.installed, audit, files, first, there.apt_calls,
                       server.asked[before:])  # fmt: skip


def impatient(step: Step) -> Step:
    """apt waits between its own attempts, too."""
    quick = [text.replace("Acquire::Retries=3", "Acquire::Retries=0") for text in (step.script, step.check)]
    return replace(step, script=quick[0], check=quick[1], retries=min(step.retries, 1))


def protocol(output: str) -> list[str]:
    said = (line.rstrip() for line in output.splitlines() if line.startswith("@"))
    return [line for line in said if line.split()[0] not in ("@boot", "@step", "@python", "@ready")]


def ids(case: Case) -> str:
    return case.name.replace(", ", "-").replace(" ", "_")


@pytest.mark.root
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_machine_is_made_ready_or_says_why_not(case: Case, outcomes: dict[str, Future[Outcome]]) -> None:
    got = outcomes[case.name].result()
    assert len(got.lines) == len(case.says), got.output
    assert all(re.fullmatch(says, line) for says, line in zip(case.says, got.lines, strict=True)), got.output
    assert all(re.search(shown, got.output) for shown in case.shows), got.output
    if case.installs is not None:
        assert {each.partition("=")[0] for each in got.installed} == set(case.installs) | prepared(case), got.output
    for place, pattern in case.kept.items():
        assert re.search(pattern, got.files[place]), (place, got.files[place])
    if not got.again:
        return
    assert got.audit == ""
    assert got.again == [line.replace("@done", "@skip") for line in got.lines]
    assert got.apt_again == []
    assert got.seconds < 5


def prepared(case: Case) -> set[str]:
    return set()
