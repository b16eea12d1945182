"""What a machine of the lab's AWS has, by its AMI and its instance type: an Ubuntu, a driver, tools that see devices.

The tools are those of tests/lab/stubs, which print what tests/samples has recorded. An arm64 instance is a machine of
this host's own architecture all the same: its AMI, its type and its identity document say arm64, and `uname -m`, by
which pip picks wheels, tells the truth.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.lab import repository
from tests.lab.aws_facts import instance_type
from tests.lab.kernel import wait_until

if TYPE_CHECKING:
    from tests.lab.aws_life import Rental
    from tests.lab.machines import Machine

STATE, SHARE = "/var/lib/stub", "/usr/lib/stub"
DRIVER = "595.58.03"
NEURON_DKMS = "2.31.7.0"
CODENAMES = {"22.04": "jammy", "24.04": "noble"}


class Card(NamedTuple):
    """A GPU as nvidia-smi tells of it: name, MiB, PCI device id."""

    name: str
    memory: int
    pci: str


CARDS: dict[tuple[str, int], Card] = {
    ("A100", 40960): Card("NVIDIA A100-SXM4-40GB", 40960, "0x20B0"),
    ("A100", 81920): Card("NVIDIA A100-SXM4-80GB", 81920, "0x20B2"),
    ("A10G", 22888): Card("NVIDIA A10G", 23028, "0x2237"),
    ("B200", 183359): Card("NVIDIA B200", 183359, "0x2901"),
    ("B300", 275040): Card("NVIDIA B300 SXM6 AC", 275040, "0x3182"),
    ("H100", 81920): Card("NVIDIA H100 80GB HBM3", 81559, "0x2330"),
    ("H200", 144384): Card("NVIDIA H200", 143771, "0x2335"),
    ("L4", 22888): Card("NVIDIA L4", 23034, "0x27B8"),
    ("L40S", 45776): Card("NVIDIA L40S", 46068, "0x26B9"),
    ("T4", 16384): Card("Tesla T4", 15360, "0x1EB8"),
    ("T4g", 16384): Card("NVIDIA T4G", 15360, "0x1EB4"),
    ("V100", 16384): Card("Tesla V100-SXM2-16GB", 16384, "0x1DB1"),
    ("V100", 32768): Card("Tesla V100-SXM2-32GB", 32768, "0x1DB5"),
    ("RTX PRO Server 6000", 98304): Card("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "0x2BB5"),
}
"""By what EC2 calls them and the MiB it says they have."""
NEURON_MEMORY = {"Inferentia": 8, "Inferentia2": 32, "Trainium": 32, "Trainium2": 96}
"""GiB of a device: the API says 512 of a Trainium2."""


def gpus(kind: str) -> list[Card]:
    """The NVIDIA GPUs of an instance type; a fraction of one is one."""
    found: list[Card] = []
    for each in ((instance_type(kind) or {}).get("GpuInfo") or {}).get("Gpus", ()):
        if each["Manufacturer"] == "NVIDIA":
            memory = each["MemoryInfo"]["SizeInMiB"]
            card = CARDS.get((each["Name"], memory), Card(f"NVIDIA {each['Name']}", memory, ""))
            found += [card] * each["LogicalGpuCount"]
    return found


def neuron_devices(kind: str) -> list[dict[str, Any]]:
    """What `neuron-ls --json-output` lists on an instance type."""
    told = json.loads((repository.SAMPLES / "neuron-ls-trn2.json").read_text())[0]
    info = (instance_type(kind) or {}).get("NeuronInfo") or {}
    devices = list(info.get("NeuronDevices") or ())
    if kind.startswith("trn2u."):  # the API forgets them
        devices = [{"Name": "Trainium2", "Count": 16, "CoreInfo": {"Count": 8}}]
    found = []
    for each in devices:
        cores = each["CoreInfo"]["Count"] // (2 if each["Name"] == "Trainium2" else 1)  # two make a logical one
        memory = NEURON_MEMORY[each["Name"]] * 2**30
        for index in range(each["Count"]):
            ids = list(range(index * cores, (index + 1) * cores))
            found.append(told | {
                "instance_type": kind, "neuron_device": index, "nc_count": cores, "memory_size": memory,
                "neuroncore_ids": ids, "connected_to": [], "neuron_processes": [],
            })  # fmt: skip
    return found


def dress(machine: Machine, rental: Rental) -> None:
    """Put on the disk, before the first boot, what the AMI brings."""
    image, kind = rental.image, rental.type
    cards, devices = gpus(kind), neuron_devices(kind)
    ubuntu(machine, image.release, cards, len(devices))
    for place, text in neuron_tables(devices).items():
        put(machine, place, text)
    if image.look == "nvidia":
        nvidia(machine, len(cards))
    if image.look == "neuron":
        _neuron(machine, image.venvs, bool(devices))


def ubuntu(machine: Machine, release: str, cards: list[Card], others: int = 0) -> None:
    """Any image of it, on a machine with these GPUs, or so many other devices; without a driver."""
    name = f'NAME="Ubuntu"\nVERSION_ID="{release}"\nID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME={CODENAMES[release]}\n'
    put(machine, "/etc/os-release", f'PRETTY_NAME="Ubuntu {release} LTS"\n{name}')
    put(machine, f"{STATE}/devices", f"{len(cards) or others}\n")
    for tool in ("modprobe", "rmmod"):
        put(machine, f"/usr/sbin/{tool}", (repository.STUBS / "modprobe").read_text(), 0o755)
    if cards:
        card = cards[0]
        for name, text in (("name", card.name), ("memory", str(card.memory)), ("pci", card.pci)):
            put(machine, f"{STATE}/{name}", f"{text}\n")


def neuron_tables(devices: list[dict[str, Any]]) -> dict[str, str]:
    return {f"{SHARE}/neuron-{len(devices)}": json.dumps(devices, indent=4) + "\n"} if devices else {}


def nvidia(machine: Machine, number: int) -> None:
    """NVIDIA's driver, and its tool that sees so many GPUs."""
    for place, text in repository.nvidia_tool(DRIVER).items():
        put(machine, place, text, 0o755 if "/bin/" in place else 0o644)
    lines = [f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n:08d}-0000-4000-8000-000000000000)" for n in range(number)]
    put(machine, f"{SHARE}/nvidia-L", "".join(f"{line}\n" for line in lines))
    for module in repository.NVIDIA_MODULES:
        put(machine, f"{SHARE}/modules/{module}", f"{DRIVER}\n")
    put(machine, f"{STATE}/driver", f"{DRIVER}\n")
    put(machine, f"{STATE}/persistence", "Enabled\n")
    machine.path(f"{STATE}/mig").mkdir()
    if number:
        put(machine, f"{STATE}/loaded", "".join(f"{module}\n" for module in repository.NVIDIA_MODULES))


def _neuron(machine: Machine, venvs: tuple[str, ...], present: bool) -> None:
    put(machine, "/opt/aws/neuron/bin/neuron-ls", (repository.STUBS / "neuron-ls").read_text(), 0o755)
    put(machine, f"{SHARE}/modules/neuron", f"{NEURON_DKMS}\n")
    if present:
        put(machine, f"{STATE}/loaded", "neuron\n")
    for name in venvs:
        python = machine.path(f"/opt/aws_neuronx_venv_{name}/bin/python")
        python.parent.mkdir(parents=True)
        python.symlink_to("/usr/bin/python3")


def plug(machine: Machine, rental: Rental) -> None:
    """Its devices on the PCI bus, as soon as it has one."""
    insert(machine, gpus(rental.type), len(neuron_devices(rental.type)))


def insert(machine: Machine, cards: list[Card], neuron: int = 0) -> None:
    """These on its PCI bus."""
    found = [("0x10de", card.pci or "0x2330", "0x030200") for card in cards]
    found += [("0x1d0f", "0x7364", "0x088000")] * neuron
    if not found:
        return
    lines = ["mount -t tmpfs none /sys/bus/pci/devices"]
    for number, (vendor, device, kind) in enumerate(found):
        place = f"/sys/bus/pci/devices/0000:{number + 16:02x}:00.0"
        lines.append(f"mkdir {place}; echo {vendor} >{place}/vendor; echo {device} >{place}/device")
        lines.append(f"echo {kind} >{place}/class")
    try:
        machine.run("\n".join(lines))
    except (RuntimeError, subprocess.CalledProcessError):
        wait_until(lambda: not machine.is_running, 5.0, "a machine that was furnished has switched itself off")


def put(machine: Machine, place: str, text: str, mode: int = 0o644) -> None:
    """A file of its disk."""
    path = machine.path(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # os-release is a link
    path.write_text(text)
    path.chmod(mode)
