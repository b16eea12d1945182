"""Values that describe hardware: memory, vendor, form factors, partitions. An `Accelerator` is made of them.

Memory sizes are nominal, in GB, as the vendor prints them ("80GB"). They are not exact GiB, and the device driver
leaves less to programs. A fact that nobody documents is None or "", never a guess.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    from skypool.accelerators._record import dataclass


@dataclass(frozen=True, slots=True)
class Metadata:
    """Facts about a device that help to choose it and to prepare a node for it.

    An unknown fact is None if it is a number or a release, "" if it is a text, and () for `pci_ids`.

    Attributes:
        cuda_min: first CUDA release that supports the device.
        cuda_max: last CUDA release that supports the device ("12.x" means all of 12), or None while the device is still
            supported.
        driver_min: oldest NVIDIA driver branch that supports the device (525 for R525).
        driver_max: newest NVIDIA driver branch that supports the device, or None while the device is still supported.
        gfx: AMD's name of the instruction set ("gfx942").
        neuron_cores: NeuronCores in one chip.
        tensor_cores: TensorCores in one TPU chip.
        bf16_tflops: dense BF16 performance of one device, in TFLOPS.
        bandwidth_gb_per_s: memory bandwidth of one device, in GB per second.
        tdp_watts: thermal design power of one device, in watts.
        memory_type: kind of memory, such as "HBM3".
        socket: how the device is mounted, in the vendor's words ("SXM5").
        pci_ids: PCI device ids ("0x2330").
        notes: where sources disagree, and which value was chosen.
        sources: where the facts were read.
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
    """One row of the catalogue: a model with one memory size in one form factor.

    Attributes:
        name: name of the model, such as "A100".
        memory_gb: nominal memory of one device in GB.
        form_factor: form factor, such as "SXM"; "" for hardware that has none, such as TPUs.
        vendor: the vendor in lower case, such as "nvidia".
        kind: kind of device, such as "gpu" or "tpu".
        architecture: the vendor's name of the architecture, such as "Hopper".
        compute_capability: NVIDIA's compute capability, such as "9.0"; None for other vendors.
        metadata: further facts, such as the memory bandwidth.
    """

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
    """A part of a card that works as a device of its own.

    The part is a partition of NVIDIA's MIG (Multi-Instance GPU), or a fraction of a card that a cloud sells. MIG
    divides the card's processors into equal compute slices, and the card's memory into equal memory slices.

    Attributes:
        profile: name of this kind of partition: NVIDIA's, such as "2g.10gb", or "1of4" for a quarter of a card.
        memory_gb: nominal memory of the partition in GB.
        memory_gib_reported: memory in GiB that `nvidia-smi` reports, None if unknown.
        compute_slices: compute slices that the partition takes.
        compute_slices_of: compute slices of the whole card.
        memory_slices: memory slices that the partition takes.
        memory_slices_of: memory slices of the whole card.
        max_per_card: how many partitions fit on one card if all have this profile.
        sm_count: streaming multiprocessors of the partition, None if unknown.
        nvidia_smi_id: number of the profile in `nvidia-smi mig`, None if unknown.
        placements: possible positions on the card, each as (first memory slice, number of memory slices).
        media: True if the partition includes the card's only set of video engines.
        k8s_resource: name of the resource in Kubernetes, "" if unknown.
        driver_min: oldest driver that supports this profile ("R575 (575.51.03)"), "" if every driver with MIG does.
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
    """TPU chips that are wired together and sold as one unit.

    The number in a type's name counts TensorCores for v2, v3, v4, v5p and tpu7x, whose chips have two each. For v5e and
    v6e, the number counts chips: v5p-8 has 4 chips, v5litepod-8 has 8.

    Attributes:
        type: Google's name, such as "v5p-8" or "v5litepod-16".
        generation: generation of the chips, such as "v5p" or "v5e".
        chips: TPU chips in the whole slice.
        cores: TensorCores in the whole slice.
        cores_per_chip: TensorCores in one chip.
        hosts: physical machines that the slice occupies.
        vms: virtual machines to log in to, each with `chips_per_vm` chips.
        chips_per_vm: TPU chips of each virtual machine.
        topology: arrangement of the chips, such as "4x4"; "" if no table states it.
        runtime_version: name of the system image that Google starts by default, "" if no page states it.
        machine_type: Compute Engine's name of the machine type, "" if there is none.
        gke_accelerator: Google Kubernetes Engine's name of the chips, "" if there is none.
        vcpus_per_vm: virtual CPUs of each virtual machine, None if unknown.
        ram_gb_per_vm: main memory of each virtual machine in GB, None if unknown.
        zones: zones that offered the slice when the data was collected, as text.
        notes: where sources disagree, and which value was chosen.
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
        """Return True if one virtual machine holds the whole slice. The number of physical machines does not matter."""
        return self.vms == 1
