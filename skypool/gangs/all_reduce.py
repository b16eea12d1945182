"""The measurement of `check="nccl"`: an all-reduce of 64 MB among all GPUs of a gang.

An all-reduce adds up arrays of all processes, and gives each of them the sum. Each GPU has a process of its own.
`all_reduce` runs in each process of the gang, and `bandwidth_of` in the client. Only the nodes need PyTorch.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from skypool.errors import protocol_violation

SIZE = 64 * 10**6
"""The number of bytes of the array that each process contributes."""
_FEW = 5
"""The number of all-reduces before the measurement, in which libraries connect and choose their algorithm."""
_MANY = 20
"""The number of all-reduces that are measured."""
_PATIENCE = 60
"""Seconds for which a process waits for the others of its gang. Then it raises RuntimeError."""
_ELEMENT = 4
"""The number of bytes of one element, a 32-bit float."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The speed of an all-reduce.

    Attributes:
        processes: the number of processes, one for each GPU.
        device: the name of the devices, such as "NVIDIA H100 80GB HBM3"; several names are separated by " and ".
        size: the number of bytes that each process contributes.
        seconds: the mean time in seconds of one all-reduce, in the slowest process.
    """

    processes: int
    device: str
    size: int
    seconds: float

    @property
    def algorithm(self) -> float:
        """The algorithm bandwidth in bytes per second: the size divided by the time."""
        return self.size / self.seconds

    @property
    def bus(self) -> float:
        """The bus bandwidth in bytes per second, which can be compared with the speed of the hardware.

        It is the algorithm bandwidth times 2 (n - 1) / n for n processes, as nccl-tests defines it
        (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, read 2026-11-24).
        """
        return self.algorithm * 2 * (self.processes - 1) / self.processes

    def __str__(self) -> str:
        return (
            f"an all-reduce of {self.size / 1e6:g} MB among {self.processes} processes ({self.device}) takes "
            f"{self.seconds * 1e3:.3g} ms: bus bandwidth {self.bus / 1e9:.3g} GB/s"
        )


def all_reduce(backend: str = "nccl", size: int = SIZE) -> dict[str, object]:
    """Measure an all-reduce with the other processes of a gang. Runs in each of these processes.

    The processes find each other by MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE of their environment. LOCAL_RANK
    chooses the GPU, if the process sees several.

    Args:
        backend: the backend of torch.distributed: "nccl" for GPUs, "gloo" for CPUs.
        size: the number of bytes that each process contributes, a multiple of 4.

    Returns:
        A dict with `seconds`, the mean time of one all-reduce, `size`, `processes`, and `device`, the name of the
        device. If this process has no torch or no GPU, the dict has only `missing`, the reason. The other processes of
        the gang then wait for this one in vain, and raise RuntimeError.

    Raises:
        RuntimeError: the processes cannot connect within 60 s, or the sum is wrong.
    """
    try:
        torch: Any = __import__("torch")
        dist: Any = __import__("torch.distributed", fromlist=["all_reduce"])
    except ImportError as e:
        return {"missing": f"torch cannot be imported on {socket.gethostname()} ({e})"}
    if backend == "nccl" and not torch.cuda.is_available():
        return {"missing": f"torch {torch.__version__} sees no CUDA GPU on {socket.gethostname()}"}
    name = "CPU"
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=_PATIENCE))
    try:
        processes = int(dist.get_world_size())
        values = torch.ones(size // _ELEMENT, dtype=torch.float32, device=device)
        seconds = _time(torch, dist, values)
        values.fill_(1.0)
        dist.all_reduce(values)
        if values.min().item() != processes or values.max().item() != processes:
            raise RuntimeError(f"an all-reduce of ones among {processes} processes gave another sum on {name}")
    finally:
        dist.destroy_process_group()
    return {"seconds": seconds, "size": size, "processes": processes, "device": name}


def _time(torch: Any, dist: Any, values: Any) -> float:
    """Return the mean time in seconds of one all-reduce of `values`, after some that do not count."""
    # so that sums do not grow
    values.zero_()
    begun = 0.0
    for turn in range(_FEW + _MANY):
        if turn == _FEW:
            _wait(torch, values)
            dist.barrier()
            begun = time.perf_counter()
        dist.all_reduce(values)
    _wait(torch, values)
    return (time.perf_counter() - begun) / _MANY


def _wait(torch: Any, values: Any) -> None:
    """Wait until the GPU has finished the work that was queued on it. Does nothing for a CPU."""
    if values.is_cuda:
        torch.cuda.synchronize(values.device)


def bandwidth_of(answers: Sequence[object]) -> Bandwidth | str:
    """Return the bandwidth that the processes of a gang have measured, or the reason why they could not.

    `answers` has the result of `all_reduce` of each process. Raises ProtocolError if one has another form.
    """
    try:
        told = [cast("dict[str, Any]", each) for each in answers]
        for each in told:
            if "missing" in each:
                return str(each["missing"])
        slowest = max(told, key=lambda each: float(each["seconds"]))
        names = dict.fromkeys(str(each["device"]) for each in told)
        found = Bandwidth(
            int(slowest["processes"]), " and ".join(names), int(slowest["size"]), float(slowest["seconds"])
        )
    except (KeyError, TypeError, ValueError) as e:
        raise protocol_violation(f"a process of the all-reduce answers with {answers!r:.200}") from e
    return found if found.processes > 1 else "the gang has a single process"
