"""Recipes: their values, their shell, and what they do on machines that are bare, ready, half done or broken.

The machines have a real dpkg and apt; the vendors' repositories are those of tests/lab/repository.py, and so are the
tools. Nothing here has seen an accelerator: docs/recipes.md says what that means.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from skypool.accelerators import tables
from skypool_images.recipes import CUDA_FLOORS, NEURON, RUNTIMES, packages, recipe
from skypool_images.script import Step, assemble, shell
from tests.lab import repository
from tests.lab.kernel import wait_until
from tests.lab.machines import Lab, Machine
from tests.needs import SHELLCHECK

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
        ({"runtime": "cude"}, "no accelerator runtime is called 'cude'"),
        ({"runtime": "cuda", "cuda": "cu128"}, "is not a version"),
        ({"runtime": "cuda", "cuda": "12.8; reboot"}, "is not a version"),
        ({"runtime": "cuda", "cuda": "10.2"}, "too old"),
        ({"runtime": "cuda", "mig": "1g.10"}, "is not a MIG profile"),
        ({"runtime": "neuron", "neuron": "2.21"}, "does not know the packages of Neuron SDK 2.21"),
        ({"runtime": "rocm", "rocm": "seven"}, "is not a version"),
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


def test_no_recipe_redefines_what_every_step_has() -> None:
    def functions(*files: str) -> set[str]:
        return {name for file in files for name in re.findall(r"^(\w+)\(\)", shell(file), re.MULTILINE)}

    parts = ("nvidia", "cuda", "mig", "neuron", "rocm", "gaudi", "tpu")
    assert functions("prelude", "python", "machine") & functions(*parts) == set()
    assert functions("prelude", "python") & functions("machine") == set()


@pytest.mark.slow
def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    steps = [step for runtime in RUNTIMES for step in recipe(runtime, cuda="12.8", mig="1g.10gb", neuron="2.29")]
    for step in steps:
        (tmp_path / step.name).write_text(f"{shell('prelude')}set -eu\n{step.script}{step.check.splitlines()[-1]}\n")
    unused = "--exclude=SC2317,SC2329"  # a recipe need not use all that recipes share
    command = [str(SHELLCHECK), "--shell=sh", unused, *sorted(map(str, tmp_path.iterdir()))]
    got = subprocess.run(command, capture_output=True, text=True, check=False)
    assert got.stdout == ""


# --- machines ------------------------------------------------------------------------------------------------


STATE = "/var/lib/stub/"
"""Where the stubs keep their state."""
SIGNED = "[signed-by=/etc/apt/keyrings/distribution.asc]"


@dataclass
class Place:
    """A machine with what was found on it."""

    machine: Machine
    server: repository.Server
    environment: dict[str, str] = field(default_factory=dict[str, str])

    def sh(self, script: str, user: str = "root", *, check: bool = True) -> str:
        """What a shell says that reads `script`."""
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.environment.items())
        return self.machine.run("sh 2>&1", user, check, input=exports + script, timeout=100).stdout

    def put(self, place: str, text: str, mode: int = 0o644) -> None:
        if place.startswith(("/dev/", "/sys/")):  # mounts of the machine's own
            self.machine.run(f"mkdir -p $(dirname {place}); cat > {place}; chmod {mode:o} {place}", input=text)
            return
        path = self.machine.path(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def read(self, place: str) -> str:
        path = self.machine.path(place)
        return path.read_text().strip() if path.exists() else ""

    def packages(self) -> set[str]:
        rows = self.sh("dpkg-query -W -f '${db:Status-Status} ${Package}\n'").splitlines()
        return {row.split()[1] for row in rows if row.startswith("installed ")}

    def apt_calls(self) -> list[str]:
        """Since it was asked last."""
        calls = self.read(STATE + "apt").splitlines()
        self.machine.path(STATE + "apt").unlink(missing_ok=True)
        return calls


def furnish(place: Place) -> None:
    """Its distribution's archive, its kernel, a ledger of calls of apt; no devices."""
    place.environment |= {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "SKYPOOL_PYTHON": "/usr/bin/python3",
        **{f"SKYPOOL_{name.upper()}_APT": f"{place.server.url}/{name}" for name in ("cuda", "neuron", "rocm", "gaudi")},
    }
    place.sh(
        "rm -rf /etc/apt/sources.list.d/* /var/lib/apt/lists/*_*\n"
        "for each in /sys/bus/pci/devices /sys/module; do [ ! -d $each ] || mount -t tmpfs none $each; done\n"
        f"mkdir -p {STATE}mig\n"
    )
    place.put("/etc/apt/keyrings/distribution.asc", place.server.keyring)
    place.put("/etc/apt/sources.list", f"deb {SIGNED} {place.server.url}/debian bookworm main\n")
    for name in ("modprobe", "rmmod"):
        place.put(f"/usr/sbin/{name}", (repository.STUBS / "modprobe").read_text(), 0o755)
    ledger = f'#!/bin/sh\necho "$*" >> {STATE}apt\nexec /usr/bin/apt-get "$@"\n'
    place.put("/usr/local/bin/apt-get", ledger, 0o755)
    place.put(STATE + "devices", "0\n")


# --- what may be found on a machine ---------------------------------------------------------------------------

Change = Callable[[Place], object]


def devices(number: int, vendor: str = "0x10de", device: str = "0x2330", kind: str = "0x030200") -> Change:
    """So many, on the PCI bus and for the tools."""

    def change(place: Place) -> None:
        place.put(STATE + "devices", f"{number}\n")
        for at in range(max(number, 1)):
            _pci(place, at, vendor, device, kind)

    return change


def _pci(place: Place, at: int, vendor: str, device: str, kind: str) -> None:
    folder = f"/sys/bus/pci/devices/0000:0{at}:00.0"
    place.sh(f"mkdir -p {folder}; echo {vendor} > {folder}/vendor; echo {device} > {folder}/device; "
             f"echo {kind} > {folder}/class")  # fmt: skip


def bus(place: Place) -> None:
    """A PCI bus with a network card on it."""
    _pci(place, 5, "0x1d0f", "0xec20", "0x020000")


def shows(number: int) -> Change:
    """What the tools see, whatever is on the bus."""
    return lambda place: place.put(STATE + "devices", f"{number}\n")


def ubuntu(*archives: str) -> Change:
    def change(place: Place) -> None:
        place.machine.path("/etc/os-release").unlink()
        place.put("/etc/os-release", 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n')
        lines = [f"deb {SIGNED} {place.server.url}/{archive} noble main\n" for archive in archives]
        place.put("/etc/apt/sources.list", "".join(lines))

    return change


def has(files: Mapping[str, str]) -> Change:
    """Files that an image brings, of no package."""

    def change(place: Place) -> None:
        for path, text in files.items():
            place.put(path, text, 0o755 if "/bin/" in path else 0o644)

    return change


def state(**files: str) -> Change:
    """State of the stubs."""
    return has({STATE + name: text for name, text in files.items()})


def does(script: str) -> Change:
    """Whatever else was done there, $URL being where the repositories are."""
    return lambda place: place.sh(f"URL={place.server.url}\nset -e\n{script}\n")


def variable(name: str, value: str) -> Change:
    """In the machine's environment."""
    return lambda place: place.environment.update({name: value.replace("$URL", place.server.url)})


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
CUT_SHORT = (  # as dpkg notes a package down before it unpacks it
    "sed -i '/^Package: aws-neuronx-collectives/,/^$/{s/^Status: .*/Status: install reinstreq half-installed/\n"
    "/^Version:/d; /^Description:/d}' /var/lib/dpkg/status; rm /var/lib/dpkg/info/aws-neuronx-collectives.*"
)
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
    user: str = "root"
    """Who runs it: root; ubuntu, who may sudo; plain, who may not."""


@dataclass(frozen=True)
class Outcome:
    """Of two runs, one after the other; the second only where the first made the machine ready."""

    output: str
    again: str
    seconds: float
    came: set[str]
    audit: str
    files: Mapping[str, str]
    apt_again: list[str]


HEADERS = f"linux-headers-{repository.KERNEL}"
HEADLESS, UTILS = "nvidia-headless-590-server-open", "nvidia-utils-590-server"
SIGNED_MODULES = f"linux-modules-nvidia-590-server-open-{repository.KERNEL}"
NEURON_NAMES = [f"aws-neuronx-{part}" for part in ("dkms", "collectives", "runtime-lib", "tools")]
GAUDI_NAMES = [f"habanalabs-{part}" for part in ("firmware", "dkms", "thunk", "rdma-core", "graph", "firmware-tools")]
ROCM_NAMES = ["rocminfo", "rocm-smi-lib", "amd-smi-lib"]
UBUNTU = ubuntu("ubuntu")


def card(number: int, **files: str) -> Change:
    """MIG state of one card."""
    return has({f"{STATE}mig/{number}.{name}": f"{text}\n" for name, text in files.items()})


def trusted(archive: str, name: str = "other") -> str:
    """Shell: another list, made by whoever made the image."""
    line = f"deb [trusted=yes] $URL/{archive} bookworm main"
    return f'echo "{line}" > /etc/apt/sources.list.d/{name}.list; apt-get -q update\n'


def done(*steps: str) -> list[str]:
    return [f"@done {step}" for step in steps]


def fails(step: str, command: str, advice: str, *, after: Sequence[str] = (), again: bool = False) -> list[str]:
    """Patterns of the lines of a failure; `again` if it is one of the network, and so tried a second time."""
    retry = [f"@retry {step} 1 2"] if again else []
    network = ["@advice this machine does not reach what it needs: .*"] if again else []
    return [*done(*after), *retry, f"@advice {advice}", *network, rf"@fail {step} \d+ {command}"]


OLD_BRANCH = does("apt-get -q update; apt-get -y install nvidia-headless-535-server-open nvidia-utils-535-server")
OTHER_LIBRARY = has({"/usr/lib/stub/nvidia-library": "580.95.05\n"})
OTHER_MODULE = module_files("nvidia", version="580.95.05")
TRAINIUM = (shows(1), has(repository.neuron_tool()), module_files("neuron"), loaded("neuron"))
KFD = has({"/dev/kfd": ""})
ROCM = (RADEON, has(repository.rocm_tools()), KFD)
BY_CHECK = "its check: "
NOWHERE = {name: variable(f"SKYPOOL_{name}_APT", CLOSED) for name in ("NEURON", "ROCM", "GAUDI", "CUDA")}
MIRROR = "packages come from {} .*SKYPOOL_{}_APT.*"

PERSISTS = {f"{STATE}persistence": "Enabled"}
NVIDIA_CASES = [
    Case("nvidia, bare", "cuda", [UBUNTU, devices(2)], done("nvidia"), {"count": 2}, [HEADERS, HEADLESS, UTILS],
         kept=PERSISTS),
    Case("nvidia, bare, not as root", "cuda", [UBUNTU, devices(1)], done("nvidia"), {}, [HEADERS, HEADLESS, UTILS],
         kept=PERSISTS, user="ubuntu"),
    Case("nvidia, bare, nobody may be root", "cuda", [UBUNTU, devices(1)],
         fails("nvidia", "apt-get .* update", "it needs root: .*"), {}, [], user="plain"),
    Case("nvidia, bare, signed modules", "cuda", [ubuntu("ubuntu", "signed-ubuntu"), devices(1)], done("nvidia"), {},
         [SIGNED_MODULES, "nvidia-headless-no-dkms-590-server-open", UTILS]),
    Case("nvidia, bare, a V100", "cuda", [UBUNTU, devices(1, device="0x1db1")], done("nvidia"), {},
         [HEADERS, "nvidia-headless-580-server", "nvidia-utils-580-server"]),
    Case("nvidia, bare Debian, with a toolkit", "cuda", [devices(1)], done("nvidia", "cuda"), {"cuda": "12.8"},
         [HEADERS, "nvidia-driver", "nvidia-smi", "cuda-keyring", "cuda-toolkit-12-8"], [r"release 12\.8"],
         {"etc/apt/sources.list.d/cuda-debian12-x86_64.list": "http://[0-9]"}),
    Case("nvidia, Debian's driver is too old", "cuda", [devices(1)],
         fails("cuda", "apt-get install cuda-toolkit-13-0", "NVIDIA has no .* for debian 12; it has: cuda-toolkit-12-8",
               after=["nvidia"]),
         {"cuda": "13.0"}, [HEADERS, "nvidia-open", "cuda-keyring"], ["Debian has 535.247.01, so"]),
    Case("nvidia, toolkit is there", "cuda", [*DRIVER, has({"/usr/local/cuda-12.8/bin/nvcc": "#!/bin/sh\n"})],
         done("nvidia", "cuda"), {"cuda": "12.8"}, []),
    Case("nvidia, toolkit's repository down", "cuda", [*DRIVER, NOWHERE["CUDA"]],
         fails("cuda", ".*apt-helper .*", MIRROR.format(CLOSED + ".*", "CUDA"), after=["nvidia"], again=True),
         {"cuda": "12.8"}, []),
    Case("nvidia, ready", "cuda", [*DRIVER, PERSISTENT], done("nvidia"), {"count": 2}, []),
    Case("nvidia, without persistence", "cuda", [*DRIVER], done("nvidia"), {}, [], kept=PERSISTS),
    Case("nvidia, without persistence, nobody may be root", "cuda", [*DRIVER], done("nvidia"), {}, [],
         ["it goes on without"], {f"{STATE}persistence": "^$"}, user="plain"),
    Case("nvidia, not loaded", "cuda", [*DRIVER, does("rmmod nvidia-uvm; rmmod nvidia")], done("nvidia"), {}, []),
    Case("nvidia, unpacked only", "cuda", [UBUNTU, devices(1), does(UNPACK.format(f"{UTILS} {HEADLESS}"))],
         done("nvidia"), {}, [HEADLESS, UTILS]),
    Case("nvidia, an older branch runs", "cuda", [UBUNTU, devices(1), OLD_BRANCH, loaded("nvidia")],
         fails("cuda", "apt-get .*", ".*", after=["nvidia"]), {"cuda": "13.0"},
         [HEADERS, HEADLESS, UTILS, "cuda-keyring"], ["driver 535.247.01 is older than 580.65.06"]),
    Case("nvidia, an older branch runs and is busy", "cuda",
         [UBUNTU, devices(1), OLD_BRANCH, loaded("nvidia"), state(busy="")],
         fails("nvidia", BY_CHECK + "nvidia-smi -L", ".*reboot.*"), {"cuda": "13.0"}),
    Case("nvidia, driver and library differ", "cuda", [*DRIVER, OTHER_LIBRARY, OTHER_MODULE], done("nvidia"), {}, []),
    Case("nvidia, they differ and it is busy", "cuda", [*DRIVER, OTHER_LIBRARY, state(busy="")],
         fails("nvidia", "rmmod nvidia.*", ".* reboot this machine"), {}, [], ["Driver/library version mismatch"]),
    Case("nvidia, Secure Boot", "cuda", [UBUNTU, devices(1), state(
            modprobe="modprobe: ERROR: could not insert 'nvidia': Key was rejected by service\n")],
         fails("nvidia", "modprobe nvidia", "Secure Boot refuses .*")),
    Case("nvidia, built for another kernel", "cuda", [UBUNTU, devices(1), state(
            modprobe="modprobe: ERROR: could not insert 'nvidia': Exec format error\n")],
         fails("nvidia", "modprobe nvidia", "the module nvidia was built for another kernel .*")),
    Case("nvidia, no headers", "cuda", [ubuntu("signed-ubuntu"), devices(1), OTHER_KERNEL],
         fails("nvidia", "apt-get install linux-headers-6.1.0-1-none", "no headers for .* 6.1.0-1-none .*"), {}, []),
    Case("nvidia, no devices", "cuda", [UBUNTU, devices(0)],
         fails("nvidia", BY_CHECK + "nvidia-smi -L", "the driver runs and finds no GPU.*"),
         shows=["No devices were found"]),
    Case("nvidia, a device is missing", "cuda", [*DRIVER, shows(1)],
         fails("nvidia", BY_CHECK + "nvidia-smi -L", "1 of 2 devices .*"), {"count": 2}, []),
    Case("nvidia, nothing on the bus", "cuda", [UBUNTU, bus],
         fails("nvidia", "look for PCI vendor 0x10de .*", "this machine has no NVIDIA device: .*"), {}, []),
    Case("nvidia, archive down", "cuda", [UBUNTU, devices(1), does(f"sed -i s,$URL,{CLOSED}, /etc/apt/sources.list")],
         fails("nvidia", "apt-get .* update", "apt cannot read .*", again=True), {}, []),
    Case("nvidia, not ours to change", "cuda", [UBUNTU, devices(1), variable("SKYPOOL_CHANGES", "no")],
         fails("nvidia", "install an NVIDIA driver", "this machine is yours .* install an NVIDIA driver"), {}, []),
    Case("nvidia, in a container", "cuda", [devices(1), has({"/.dockerenv": ""})],
         fails("nvidia", "install an NVIDIA driver", "this is a container .*"), {}, []),
]  # fmt: skip

MIG = "nvidia-smi mig -i 0 "
HALVES = "3g.40gb\n3g.40gb"
ONE, OTHER = card(0, mode="Enabled", parts="3g.40gb", instances="3g.40gb"), {"mig": "1g.10gb"}
MIXED = {"mode": "Enabled", "parts": "3g.40gb\n1g.10gb", "instances": "as they are"}
MIG_CASES = [
    Case("mig, whole cards", "cuda", [*DRIVER, PERSISTENT], done("nvidia", "mig"), {"mig": "3g.40gb,3g.40gb"}, [],
         kept={f"{STATE}mig/0.parts": HALVES, f"{STATE}mig/1.parts": HALVES}),
    Case("mig, ready", "cuda", [*DRIVER, card(0, **MIXED), card(1, **MIXED)], done("nvidia", "mig"),
         {"mig": "1g.10gb,3g.40gb"}, [], kept={f"{STATE}mig/0.instances": "as they are"}),
    Case("mig, instances that compute nothing", "cuda", [*DRIVER, card(0, mode="Enabled", instances="1g.10gb")],
         done("nvidia", "mig"), {"mig": ["1g.10gb"] * 2}, [], kept={f"{STATE}mig/0.instances": "^1g.10gb\n1g.10gb$"}),
    Case("mig, cut in another way", "cuda", [*DRIVER, ONE], done("nvidia", "mig"), OTHER, [],
         kept={f"{STATE}mig/0.parts": "^1g.10gb$"}),
    Case("mig, cut in another way and busy", "cuda", [*DRIVER, ONE, state(busy="")],
         fails("mig", MIG + "-dgi", "programs use the partitions of card 0 .*", after=["nvidia"]), OTHER, []),
    Case("mig, cut in another way and not ours", "cuda", [*DRIVER, ONE, variable("SKYPOOL_CHANGES", "no")],
         fails("mig", MIG + "-cgi", "this machine is yours .*" + MIG + "-cgi 1g.10gb -C", after=["nvidia"]), OTHER, []),
    Case("mig, after a reset", "cuda", [*DRIVER, state(reset="yes\n")], done("nvidia", "mig"), OTHER, [],
         ["successfully reset"]),
    Case("mig, no reset to be had", "cuda", [*DRIVER, state(reset="no\n")],
         fails("mig", "nvidia-smi -i 0 --gpu-reset", "MIG is on from .* reboot .*", after=["nvidia"]), OTHER, []),
    Case("mig, a card without it", "cuda", [*DRIVER, state(mig_default="[N/A]\n", name="Tesla T4\n")],
         fails("mig", "nvidia-smi -i 0 -mig 1", "MIG is for .* a whole Tesla T4.*", after=["nvidia"]), OTHER, []),
    Case("mig, a profile of another card", "cuda", [*DRIVER],
         fails("mig", MIG + "-cgi 1g.5gb -C", ".* does not hold 1g.5gb; it has: 1g.10gb 3g.40gb", after=["nvidia"]),
         {"mig": "1g.5gb"}, []),
    Case("mig, more than a card holds", "cuda", [*DRIVER],
         fails("mig", MIG + "-cgi .*", ".* does not hold 3g.40gb 3g.40gb 3g.40gb; .*", after=["nvidia"]),
         {"mig": ["3g.40gb"] * 3}, []),
]  # fmt: skip

NEURON_LIST, NEURON_KEY = "etc/apt/sources.list.d/skypool-neuron.list", "/etc/apt/keyrings/skypool-neuron.asc"
NEURON_LS = BY_CHECK + "neuron-ls --json-output"
NEURON_ALL = [HEADERS, *NEURON_NAMES]
NEWEST = "opt/aws_neuronx_venv_torch_neuronx_2_14_0"
DKMS = "usr/lib/stub/modules/neuron"
NEURON_CASES = [
    Case("neuron, bare", "neuron", [shows(2)], done("neuron"), {"count": 2}, NEURON_ALL,
         kept={NEURON_LIST: rf"deb \[signed-by={NEURON_KEY}\] \S+ bookworm main", DKMS: "2.31.7.0"}),
    Case("neuron, bare, not as root", "neuron", [shows(1)], done("neuron"), {}, NEURON_ALL, user="ubuntu"),
    Case("neuron, a release", "neuron", [shows(1)], done("neuron"), {"neuron": "2.29"}, NEURON_ALL,
         kept={DKMS: "2.27.4.0"}),
    Case("neuron, a release that is not there", "neuron", [shows(1)],
         fails("neuron", "apt-cache madison aws-neuronx-dkms", "the repository has no .* it has 2.31.7.0 2.27.4.0; .*"),
         {"neuron": "2.30"}, [HEADERS]),
    Case("neuron, ready", "neuron", TRAINIUM, done("neuron"), {}, []),
    Case("neuron, ready but of another release", "neuron",
         [shows(1), does(trusted("neuron") + f"apt-get -y install {' '.join(NEURON_NAMES)}")], done("neuron"),
         {"neuron": "2.29"}, NEURON_ALL, kept={DKMS: "2.27.4.0", NEURON_LIST: "^$"}),
    Case("neuron, key without list", "neuron",
         [shows(1), does(f"/usr/lib/apt/apt-helper download-file $URL/neuron/{repository.NEURON_KEY} {NEURON_KEY}")],
         done("neuron"), {}, NEURON_ALL),
    Case("neuron, list with an old key", "neuron",
         [shows(1), does(f"cp /etc/apt/keyrings/distribution.asc {NEURON_KEY}\n"
                         f'echo "deb [signed-by={NEURON_KEY}] $URL/neuron bookworm main" > /{NEURON_LIST}')],
         done("neuron"), {}, NEURON_ALL, ["NO_PUBKEY", "the key has changed"]),
    Case("neuron, unpacked only", "neuron",
         [shows(1), does(trusted("neuron") + UNPACK.format("aws-neuronx-tools aws-neuronx-dkms")),
          does("rm /etc/apt/sources.list.d/other.list")], done("neuron"), {}, NEURON_ALL),
    Case("neuron, a package cut short by a power cut", "neuron",
         [shows(1), does(trusted("neuron") + UNPACK.format(" ".join(NEURON_NAMES)) + CUT_SHORT)], done("neuron"), {},
         NEURON_NAMES),
    Case("neuron, repository down", "neuron", [shows(1), NOWHERE["NEURON"]],
         fails("neuron", ".*apt-helper .*", MIRROR.format(CLOSED + ".*", "NEURON"), again=True), {}, []),
    Case("neuron, signed by somebody else", "neuron", [shows(1), variable("SKYPOOL_NEURON_APT", "$URL/forged")],
         fails("neuron", "apt-get .* update", "packages come from .*"), {}, [], ["NO_PUBKEY"], {NEURON_LIST: "^$"}),
    Case("neuron, no devices", "neuron", [shows(0)], fails("neuron", NEURON_LS, "neuron-ls sees no device.*")),
    Case("neuron, a device is missing", "neuron", [shows(1)], fails("neuron", NEURON_LS, "1 of 2 devices .*"),
         {"count": 2}),
    Case("neuron, an image with environments", "neuron", [*TRAINIUM, DLAMI], done("neuron"), {}, [],
         [f"brings /{NEWEST}"], {f"{NEWEST}/pip.conf": "extra-index-url = https://pip.repos.neuron"}),
    Case("neuron, an image with environments, the newest for another Python", "neuron",
         [*TRAINIUM, DLAMI, does(f"ln -sf /bin/false /{NEWEST}/bin/python")], done("neuron"), {"python": "3.11"}, [],
         [f"/{NEWEST} is not taken", "brings /opt/aws_neuronx_venv_pytorch_2_9"]),
    Case("neuron, an image with environments, for JAX", "neuron", [*TRAINIUM, DLAMI], done("neuron"),
         {"framework": "jax"}, [], ["brings /opt/aws_neuronx_venv_jax_0_10"]),
]  # fmt: skip

ROCM_CHECK, HL_SMI = BY_CHECK + "rocm-smi .*", BY_CHECK + "hl-smi .*"
OTHER_CASES = [
    Case("rocm, bare", "rocm", [RADEON], done("rocm"), {"count": 2}, [HEADERS, "amdgpu-dkms", *ROCM_NAMES]),
    Case("rocm, the whole of it", "rocm", [RADEON, module_files("amdgpu")], done("rocm"), {"rocm": "7.2"},
         [*ROCM_NAMES, "rocm"]),
    Case("rocm, ready", "rocm", ROCM, done("rocm"), {}, []),
    Case("rocm, ready, with the older tool", "rocm", [*ROCM, does("rm /opt/rocm/bin/amd-smi")], done("rocm"),
         {"count": 2}, []),
    Case("rocm, tools without driver", "rocm", ROCM[:2], done("rocm"), {}, [HEADERS, "amdgpu-dkms", *ROCM_NAMES]),
    Case("rocm, repository down", "rocm", [RADEON, NOWHERE["ROCM"]],
         fails("rocm", ".*", MIRROR.format(".*", "ROCM"), again=True), {}, []),
    Case("rocm, no devices", "rocm", [RADEON, shows(0)], fails("rocm", ROCM_CHECK, "the tools see no card.*")),
    Case("rocm, a device is missing", "rocm", [*ROCM, shows(1)], fails("rocm", ROCM_CHECK, "1 of 2 devices .*"),
         {"count": 2}),
    Case("gaudi, bare", "hpu", [GAUDI], done("gaudi"), {"count": 2}, [HEADERS, *GAUDI_NAMES]),
    Case("gaudi, ready", "hpu",
         [GAUDI, has(repository.gaudi_tool()), module_files("habanalabs"), loaded("habanalabs")], done("gaudi"),
         {"count": 2}, []),
    Case("gaudi, not loaded", "hpu",
         [GAUDI, does(trusted("gaudi/debian") + f"apt-get -y install {' '.join(GAUDI_NAMES)}")], done("gaudi"), {},
         GAUDI_NAMES),
    Case("gaudi, unpacked only", "hpu",
         [GAUDI, does(trusted("gaudi/debian") + UNPACK.format("habanalabs-firmware-tools habanalabs-dkms"))],
         done("gaudi"), {}, [HEADERS, *GAUDI_NAMES]),
    Case("gaudi, repository down", "hpu", [GAUDI, NOWHERE["GAUDI"]],
         fails("gaudi", ".*", MIRROR.format(".*", "GAUDI"), again=True), {}, []),
    Case("gaudi, no devices", "hpu", [GAUDI, shows(0)], fails("gaudi", HL_SMI, "hl-smi sees no card.*")),
    Case("gaudi, a device is missing", "hpu", [GAUDI, shows(1)], fails("gaudi", HL_SMI, "1 of 2 .*"), {"count": 2}),
    Case("gaudi, without apt", "hpu", [GAUDI, does("rm /usr/local/bin/apt-get /usr/bin/apt-get")],
         fails("gaudi", "install .*", "only Debian and Ubuntu are known here: .*"), {}, []),
    Case("tpu, ready", "tpu", [has({f"/dev/accel{n}": "" for n in range(4)})], done("tpu"), {"count": 4}, [],
         ["/dev/accel3"]),
    Case("tpu, ready, through vfio", "tpu", [has({"/dev/vfio/0": "", "/dev/vfio/vfio": ""})], done("tpu"), {}, []),
    Case("tpu, only root may open it", "tpu", [has({"/dev/accel0": ""})],
         fails("tpu", BY_CHECK + "ls .*", "ubuntu may not open /dev/accel0: .*"), {}, [], user="ubuntu"),
    Case("tpu, no devices", "tpu", [], fails("tpu", BY_CHECK + "ls .*", "there is no TPU .*"), {}, []),
    Case("tpu, a device is missing", "tpu", [has({"/dev/accel0": ""})],
         fails("tpu", BY_CHECK + "ls .*", "1 of 4 .*"), {"count": 4}, []),
]  # fmt: skip
COMMON: list[Any] = [*NVIDIA_CASES, *MIG_CASES, *NEURON_CASES]


# --- the table -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[repository.Server]:
    with repository.serve(tmp_path_factory.mktemp("repository"), lab.gateway) as server:
        yield server


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, lab: Lab, server: repository.Server
) -> Iterator[dict[str, Future[Outcome]]]:
    """Of all cases that are selected, several at a time: mostly they wait."""
    asked = (getattr(item, "callspec", None) for item in request.session.items)
    params = [call.params.get("case") for call in asked if call]
    cases = [case for case in params if isinstance(case, Case)]
    with ThreadPoolExecutor(4) as pool:
        yield {case.name: pool.submit(perform, case, lab, server) for case in cases}


def perform(case: Case, lab: Lab, server: repository.Server) -> Outcome:
    machine = lab.machine()
    try:
        place = Place(machine, server)
        furnish(place)
        before = place.packages()
        for change in case.found:
            change(place)
        place.apt_calls()
        script = assemble([impatient(step, case) for step in recipe(case.runtime, **case.asked)], case.name)
        output = place.sh(script, case.user, check=False)
        place.apt_calls()
        began = time.monotonic()
        again = place.sh(script, case.user, check=False) if "@ready" in output else ""
        seconds = time.monotonic() - began
        came, audit = place.packages() - before, place.sh("dpkg --audit")
        return Outcome(output, again, seconds, came, audit, {path: place.read(path) for path in case.kept},
                       place.apt_calls())  # fmt: skip
    finally:
        machine.destroy()


def impatient(step: Step, case: Case) -> Step:
    """One more attempt at most, and that only where the network is what fails; apt waits between its own, too."""
    again = any(says.startswith("@retry") for says in case.says)
    quick = [text.replace("Acquire::Retries=3", "Acquire::Retries=0") for text in (step.script, step.check)]
    return replace(step, script=quick[0], check=quick[1], retries=min(step.retries, int(again)))


def protocol(output: str) -> list[str]:
    said = (line.rstrip() for line in output.splitlines() if line.startswith("@"))
    return [line for line in said if line.split()[0] not in ("@boot", "@step", "@python", "@ready")]


def name_of(case: Case) -> str:
    return case.name.replace(", ", "-").replace(" ", "_")


@pytest.mark.parametrize(
    "case", COMMON + [pytest.param(each, marks=pytest.mark.slow) for each in OTHER_CASES], ids=name_of
)
def test_a_machine_is_made_ready_or_says_why_not(case: Case, outcomes: dict[str, Future[Outcome]]) -> None:
    got = outcomes[case.name].result()
    lines = protocol(got.output)
    assert len(lines) == len(case.says), got.output
    assert all(re.fullmatch(says, line) for says, line in zip(case.says, lines, strict=True)), got.output
    assert all(re.search(shown, got.output) for shown in case.shows), got.output
    assert case.installs is None or got.came == set(case.installs), got.output
    for place, pattern in case.kept.items():
        assert re.search(pattern, got.files[place]), (place, got.files[place])
    if "@ready" in got.output:
        assert got.audit == ""
        assert protocol(got.again) == [line.replace("@done", "@skip") for line in lines]
        assert got.apt_again == []
        assert got.seconds < 60  # 0.25 s on a quiet computer


def test_a_machine_that_lost_its_power_in_the_middle_is_made_ready_by_the_next_run(
    lab: Lab, server: repository.Server
) -> None:
    machine = lab.machine()
    place = Place(machine, server)
    furnish(place)
    place.put(STATE + "devices", "1\n")
    script = assemble(recipe("neuron"), "cut short")
    log = machine.path("/var/log/dpkg.log")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(place.sh, script, check=False)
        wait_until(lambda: re.search("unpack.* aws-neuronx-collectives", log.read_text()), 60, "the first package")
        machine.kill()
        assert "@ready" not in running.result()
    machine.boot()
    machine.wait_for_ssh()
    assert protocol(place.sh(script)) == ["@done neuron"]
    assert place.sh("dpkg --audit") == ""
    assert set(NEURON_ALL) <= place.packages()
    machine.destroy()
