"""Values that describe hardware: memory, vendor, form factors, partitions. An `Accelerator` is made of them.

Memory is nominal, as the vendor prints it ("80GB"): neither the exact GiB nor what a driver leaves for you.
A fact nobody documents is None or "", never a guess.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    from skypool.accelerators._record import dataclass


@dataclass(frozen=True, slots=True)
class Metadata:
    """Facts that help to choose and to prepare; any of them may be unknown.

    Attributes:
        cuda_min: first CUDA release that compiles for it; cuda_max: the last one ("12.x" is all of 12), None
            while it is still supported.
        driver_min: oldest NVIDIA driver branch that knows it (525 for R525); driver_max: the last, None while
            supported.
        gfx: AMD's name of the instruction set ("gfx942").
        neuron_cores: NeuronCores in one chip; tensor_cores: TensorCores in one TPU chip.
        bf16_tflops: dense BF16; bandwidth_gb_per_s: memory bandwidth; tdp_watts: of one device.
        memory_type: "HBM3"; socket: how it is built in, in the vendor's words ("SXM5").
        pci_ids: PCI device ids ("0x2330").
        notes: where sources disagree and what was decided; sources: where the row was read.
    """

    cuda_min: str | None = None
    cuda_max: str | None = None
    driver_min: int | None = None
    driver_max: int | None = None
    gfx: str = ""
    neuron_cores: int | None = None
    tensor_cores: int | None = None
    bf16_tflops: float | None = None
    bandwidth_gb_per_s: float | None = None
    tdp_watts: float | None = None
    memory_type: str = ""
    socket: str = ""
    pci_ids: tuple[str, ...] = ()
    notes: str = ""
    sources: str = ""


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the catalogue: a model with one memory size in one form factor."""

    name: str
    memory_gb: float
    form_factor: str
    vendor: str
    kind: str
    architecture: str
    compute_capability: str | None
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class Partition:
    """A part of a card that works as a device of its own: a MIG profile, or a sold fraction ("1of4").

    Attributes:
        profile: NVIDIA's name, such as "2g.10gb".
        memory_gb: nominal; memory_gib_reported: what `nvidia-smi` says, None if not read.
        compute_slices, memory_slices: taken out of `compute_slices_of` and `memory_slices_of` of the card.
        max_per_card: how many of this profile alone fit on one card.
        placements: for each start it may have, the memory slices it then covers: (start, size).
        media: holds the card's video engines, of which there is one set.
        driver_min: oldest driver with this profile ("R575 (575.51.03)"), "" if any with MIG.
    """

    profile: str
    memory_gb: float
    compute_slices: int
    compute_slices_of: int
    memory_slices: int
    memory_slices_of: int
    max_per_card: int
    memory_gib_reported: float | None = None
    sm_count: int | None = None
    nvidia_smi_id: int | None = None
    placements: tuple[tuple[int, int], ...] = ()
    media: bool = False
    k8s_resource: str = ""
    driver_min: str = ""


@dataclass(frozen=True, slots=True)
class Slice:
    """TPU chips wired together and sold as one.

    The number in a type's name counts TensorCores for v2, v3, v4, v5p and tpu7x (two in a chip) and chips for
    v5e and v6e: v5p-8 is 4 chips, v5litepod-8 is 8.

    Attributes:
        type: Google's name, such as "v5p-8" or "v5litepod-16".
        chips, cores: in the whole slice; cores_per_chip: TensorCores in one chip.
        hosts: physical machines it touches; vms: virtual machines you log in to (`chips_per_vm` each).
        topology: "4x4", or "" where no table states it.
        runtime_version: the image Google starts by default, "" where no page states it.
        machine_type: Compute Engine's name; gke_accelerator: GKE's.
        vcpus_per_vm, ram_gb_per_vm: None where unknown.
        zones: where it was listed, as text, dated with the data.
    """

    type: str
    generation: str
    chips: int
    cores: int
    cores_per_chip: int
    hosts: int
    vms: int
    chips_per_vm: int
    topology: str
    runtime_version: str
    machine_type: str = ""
    gke_accelerator: str = ""
    vcpus_per_vm: int | None = None
    ram_gb_per_vm: int | None = None
    zones: str = ""
    notes: str = ""

    @property
    def single_host(self) -> bool:
        """Whether one virtual machine holds all of it."""
        return self.vms == 1
