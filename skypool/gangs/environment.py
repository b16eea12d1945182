"""The values of the environment variables by which a process of a gang finds its rank and its peers, as pure functions.

Libraries for distributed training read their place from environment variables. PyTorch (`init_method="env://"`),
Accelerate 1.15, Lightning 2.6 and JAX 0.10 were read for this table on 2026-11-24.

| variable | value | read by |
|---|---|---|
| `RANK`, `WORLD_SIZE` | number of the process, from 0, and number of processes | PyTorch, Accelerate, Lightning |
| `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | the same among the processes of this node | PyTorch, Accelerate, Lightning |
| `NODE_RANK`, `GROUP_RANK` | number of the node in the gang, from 0 | Lightning (either), programs for torchrun |
| `GROUP_WORLD_SIZE` | number of nodes of the gang | programs for torchrun |
| `MASTER_ADDR`, `MASTER_PORT` | where rank 0 listens | PyTorch, Accelerate, Lightning |
| `TORCHELASTIC_RUN_ID` | the gang's id | PyTorch, and Lightning: without it, Lightning counts ranks itself |
| `TORCHELASTIC_RESTART_COUNT` | how often the gang ran before | PyTorch, programs for torchrun |
| `JAX_COORDINATOR_ADDRESS` | address and port where process 0 of JAX listens | JAX |
| `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID` | the same as `WORLD_SIZE` and `RANK` | programs, which pass them to JAX |
| `PET_LOCAL_ADDR` | the address of the node, if there are several | `torchrun`, which tells others its name otherwise |
| `OMP_NUM_THREADS` | the process's share of the CPUs | OpenMP, PyTorch, Accelerate |
| `FI_PROVIDER=efa` | the network provider of libfabric, on nodes with an EFA device (AWS) | aws-ofi-nccl |
| `CUDA_VISIBLE_DEVICES` and others | the process's share of the devices, except as below | drivers of the devices |
| `JAX_LOCAL_DEVICE_IDS` | the index of the process's own GPU, if it sees all GPUs | JAX |

With one process for each GPU, every process sees all GPUs of its node, as under torchrun. PyTorch programs, Lightning,
DeepSpeed and the Trainer of Hugging Face use the GPU with the index `LOCAL_RANK`, which would not exist if each process
saw a single one. With fewer processes than GPUs, and for other kinds of devices, each process sees only its own share.

`skypool.agent.worker_processes` sets these variables for the process.

Variables that are left out on purpose:

- `TORCHELASTIC_USE_AGENT_STORE`: with it, PyTorch expects torchrun to listen at `MASTER_PORT`. Without it, rank 0 does.
- `ACCELERATE_*`: Accelerate takes its place from the variables above, and each of its own has a default.
- `OMPI_*`, `SLURM_*`: JAX would find its place in them, but MPI and Lightning would then look for a launcher.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SHORT = {"cuda": "gpu", "rocm": "gpu"}
"""A dict from the kind of a device to its name before the lines that a process prints, where the two differ."""


@dataclass(frozen=True, slots=True)
class Member:
    """Process of a gang, as the client describes it to the node that runs it.

    Attributes:
        rank: the number of the process among the `size` processes of the gang, from 0.
        local: the number of the process among the `of` processes of the gang on its node, from 0.
        position: the number of this node among the gang's `nodes`, from 0.
        attempt: the number of this run of the gang, from 1.
        changed: True if the gang has another number of processes than in the run before.
        gang: a text that names the gang.
        master: the address at which the processes reach rank 0.
        port: a free port of rank 0's node, for PyTorch.
        jax_port: another free port of that node, for JAX.
        hosts: the name and the address of each node, in the order of `position`; "" for one that is not known.
    """

    rank: int
    size: int
    local: int
    of: int
    position: int
    nodes: int
    attempt: int
    changed: bool
    gang: str
    master: str
    port: int
    jax_port: int
    hosts: tuple[tuple[str, str], ...] = ()

    @property
    def header(self) -> dict[str, object]:
        """The value of "gang" in the header of a CALL frame.

        `position`, `nodes` and addresses are left out, because the header has them in "world".
        """
        return {
            "rank": self.rank,
            "size": self.size,
            "local": self.local,
            "of": self.of,
            "attempt": self.attempt,
            "changed": self.changed,
            "id": self.gang,
            "master": [self.master, self.port, self.jax_port],
            "names": [name for name, _ in self.hosts],
        }

    @property
    def address(self) -> str:
        """The address of this node; "" if it is not known."""
        return self.hosts[self.position][1] if self.hosts else ""

    @property
    def peers(self) -> dict[str, str]:
        """The addresses of the other nodes by their names, without those whose name or address is not known.

        A name that several nodes have, such as machines from one image, is left out. Upper and lower case are the same.
        """
        counts = Counter(name.lower() for name, _ in self.hosts)
        others = [*self.hosts[: self.position], *self.hosts[self.position + 1 :]]
        return {name: address for name, address in others if name and address and counts[name.lower()] == 1}

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Member:
        """Return the process that "gang" and "world" in the header of a CALL frame describe.

        Raises KeyError, TypeError or ValueError if one of the two is missing or not valid.
        """
        said = header["gang"]
        position, addresses = header["world"]
        master, port, jax_port = said["master"]
        names = said.get("names") or [""] * len(addresses)
        member = cls(
            rank=int(said["rank"]),
            size=int(said["size"]),
            local=int(said["local"]),
            of=int(said["of"]),
            position=int(position),
            nodes=len(addresses),
            attempt=int(said["attempt"]),
            changed=bool(said["changed"]),
            gang=str(said["id"]),
            master=str(master),
            port=int(port),
            jax_port=int(jax_port),
            hosts=tuple((str(name), str(there)) for name, there in zip(names, addresses, strict=True)),
        )
        if not (0 <= member.rank < member.size and 0 <= member.local < member.of and member.position < member.nodes):
            raise ValueError(f"rank {member.rank} of {member.size}, {member.local} of {member.of} on its node")
        return member


def variables(
    member: Member,
    given: Container[str],
    machine: Container[str] = (),
    *,
    devices: Mapping[str, str] | None = None,
    index: int | None = None,
    cpus: int = 1,
    hosts: int = 1,
    efa: bool = False,
) -> dict[str, str]:
    """Return the environment variables by which one process of a gang finds its rank and its peers, such as RANK.

    The module's docstring lists them. No variable is set here.

    Args:
        given: names of the variables that the user has set for the image. They are left out, except those in `devices`.
        machine: names of the variables that the machine has set. OMP_NUM_THREADS and FI_PROVIDER are then left out.
            Others are not: another launcher may have set them, and then all processes would get the same place.
        devices: the variables that make only this process's devices visible.
        index: the index of the process's own device among those that it sees, if it also sees devices of other
            processes; otherwise None.
        cpus: how many CPUs the processes of the node may use together.
        hosts: how many machines the TPU slice of this node has; 1 if it is not part of a larger slice. In a larger
            slice, libtpu (Google's TPU library) tells JAX its place, so JAX gets no variables here.
        efa: True if the node has an EFA device, a fast network adapter of AWS.
    """
    wanted = {
        "RANK": member.rank,
        "WORLD_SIZE": member.size,
        "LOCAL_RANK": member.local,
        "LOCAL_WORLD_SIZE": member.of,
        "NODE_RANK": member.position,
        "GROUP_RANK": member.position,
        "GROUP_WORLD_SIZE": member.nodes,
        "MASTER_ADDR": member.master,
        "MASTER_PORT": member.port,
        "TORCHELASTIC_RUN_ID": member.gang,
        "TORCHELASTIC_RESTART_COUNT": member.attempt - 1,
    }
    if hosts == 1:
        address = f"[{member.master}]" if ":" in member.master else member.master  # an IPv6 address
        wanted |= {
            "JAX_COORDINATOR_ADDRESS": f"{address}:{member.jax_port}",
            "JAX_NUM_PROCESSES": member.size,
            "JAX_PROCESS_ID": member.rank,
        }
    if member.nodes > 1 and member.address:
        wanted["PET_LOCAL_ADDR"] = member.address
    if index is not None:
        wanted["JAX_LOCAL_DEVICE_IDS"] = index
    if "OMP_NUM_THREADS" not in machine:
        wanted["OMP_NUM_THREADS"] = max(1, cpus // member.of)
    if efa and "FI_PROVIDER" not in machine:
        wanted["FI_PROVIDER"] = "efa"
    return {name: str(value) for name, value in wanted.items() if name not in given} | dict(devices or {})


def has_efa(root: str = "/") -> bool:
    """Return True if this machine has an EFA device, a fast network adapter of AWS, that programs can open.

    In a container, the device may be listed although its device file is missing. Such a device does not count. Only
    tests set `root`, the folder with sys/ and dev/.
    """
    devices = os.path.join(root, "sys/class/infiniband")
    with contextlib.suppress(OSError):
        for name in os.listdir(devices):
            with contextlib.suppress(OSError):
                device = os.path.join(devices, name, "device")
                if os.path.basename(os.path.realpath(os.path.join(device, "driver"))) == "efa" and any(
                    os.path.exists(os.path.join(root, "dev/infiniband", each))
                    for each in os.listdir(os.path.join(device, "infiniband_verbs"))
                ):
                    return True
    return False


def label(shares: Sequence[Sequence[str]], local: int) -> str:
    """Return the text before each output line of a process. It tells apart the gang's processes on one node.

    The text names the process's devices, such as "gpu1" or "gpu4-7". If processes share devices, or have none, it is
    the number of the process. It is "" for the only process on a node.

    Args:
        shares: for each process of the gang on the node, the names of its devices, such as "cuda 1".
        local: the number of the process among them, from 0.
    """
    if len(shares) == 1:
        return ""
    labels = [_short(names) for names in shares]
    return labels[local] if all(labels) and len({*labels}) == len(labels) else str(local)


def _short(names: Sequence[str]) -> str:
    """Return a short name for neighbouring devices, such as "gpu4-7" for "cuda 4" to "cuda 7"; "" for others."""
    if not names:
        return ""
    kind, _, first = names[0].partition(" ")
    last_kind, _, last = names[-1].partition(" ")
    if kind != last_kind or not (first.isdecimal() and last.isdecimal() and kind.isalnum() and len(kind) < 8):
        return ""  # such as the UUID of a MIG partition
    return f"{_SHORT.get(kind, kind)}{first}" + (f"-{last}" if len(names) > 1 else "")
