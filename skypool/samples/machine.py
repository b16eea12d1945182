"""Reads the load of a machine (CPU, memory, disks and network) and the use of its processes, from Linux's `/proc`."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, replace

from skypool.devices.sample import NodeSample

_MIB = float(1 << 20)
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SECTOR = 512
"""Bytes of a sector in `/proc/diskstats`, whatever the disk's own sectors are."""
_BLOCK_DEVICES = "/sys/block"
_DISKSTATS = "/proc/diskstats"
_PATH_OF_NVME = re.compile(r"nvme\d+c\d+n\d+")
"""The names of NVMe paths: ways to a disk that is listed by its own name, too."""


_Pair = tuple[int, int] | None


class Machine:
    """Reader of the machine's load, and of the space on the disk that has `folder`.

    Rates are averages over the time since the last reading.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._before: tuple[float, _Pair, _Pair, _Pair] | None = None
        self._is_disk: dict[str, bool] = {}

    def read(self) -> NodeSample:
        """Return a sample without devices and calls. A value that cannot be read is None."""
        now = time.monotonic()
        cpu, net, traffic = _cpu(), _network(), self._disk_traffic()
        used, total = _memory()
        sample = NodeSample(time=time.time(), memory_used_mib=used, memory_total_mib=total)
        try:
            disk = os.statvfs(self._folder)
        except OSError:
            pass
        else:
            whole = disk.f_blocks * disk.f_frsize / _MIB
            free = disk.f_bfree * disk.f_frsize / _MIB
            sample = replace(sample, disk_used_mib=whole - free, disk_total_mib=whole)
        if self._before is not None:
            at, cpu_before, net_before, traffic_before = self._before
            span = now - at
            if cpu and cpu_before and cpu[1] > cpu_before[1]:
                busy = 100 * (cpu[0] - cpu_before[0]) / (cpu[1] - cpu_before[1])
                sample = replace(sample, cpu_percent=min(100.0, max(0.0, busy)))
            if net and net_before and span > 0:
                received, sent = _rates(net_before, net, span)
                sample = replace(sample, received_mib=received, sent_mib=sent)
            if traffic and traffic_before and span > 0:
                read, written = _rates(traffic_before, traffic, span)
                sample = replace(sample, disk_read_mib=read, disk_written_mib=written)
        self._before = now, cpu, net, traffic
        return sample

    def _disk_traffic(self) -> _Pair:
        """Return the bytes read and written on disks with hardware since the machine's start; None if unknown."""
        read = written = 0
        any_disk = False
        try:
            with open(_DISKSTATS, encoding="ascii", errors="replace") as file:
                for line in file:
                    columns = line.split()
                    name = columns[2]
                    is_disk = self._is_disk.get(name)
                    if is_disk is None:
                        is_disk = self._is_disk[name] = _is_disk(name)
                    # not partitions, RAID, LVM and loop devices, whose traffic is part of that of the disks below
                    if is_disk:
                        any_disk = True
                        read += int(columns[5]) * _SECTOR
                        written += int(columns[9]) * _SECTOR
        except (OSError, ValueError, IndexError):
            return None
        return (read, written) if any_disk else None


def _is_disk(name: str) -> bool:
    """Return True if a block device of `/proc/diskstats` is a whole disk with hardware behind it."""
    return not _PATH_OF_NVME.fullmatch(name) and os.path.exists(f"{_BLOCK_DEVICES}/{name.replace('/', '!')}/device")


def _rates(before: tuple[int, int], now: tuple[int, int], seconds: float) -> tuple[float, float]:
    """Return how many MiB per second two byte counters have grown in `seconds`; 0 for one that became smaller."""
    first, second = (max(0.0, (new - old) / _MIB / seconds) for old, new in zip(before, now, strict=True))
    return first, second


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process uses.

    Attributes:
        cpu_seconds: CPU time of the process and of its children that have ended.
        rss_mib: memory of the process in MiB.
    """

    cpu_seconds: float
    rss_mib: float


def process(pid: int) -> ProcessUse | None:
    """Return what a process uses; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return ProcessUse(sum(map(int, fields[11:15])) / _TICKS, int(fields[21]) * _PAGE / _MIB)
    except (OSError, ValueError, IndexError):
        return None


def _cpu() -> _Pair:
    """Return the busy and the total CPU time of the machine, in clock ticks; None if they cannot be read."""
    try:
        with open("/proc/stat", "rb") as file:
            times = [int(each) for each in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    return sum(times) - times[3] - times[4], sum(times)  # without the times of "idle" and "iowait"


def _memory() -> tuple[float | None, float | None]:
    """Return the used and the total memory of the machine in MiB; None for a value that cannot be read."""
    found: dict[bytes, int] = {}
    try:
        with open("/proc/meminfo", "rb") as file:
            for line in file.read(256).splitlines()[:3]:
                name, _, rest = line.partition(b":")
                found[name] = int(rest.split()[0])
    except (OSError, ValueError, IndexError):
        return None, None
    total, free = found.get(b"MemTotal"), found.get(b"MemAvailable")
    return (
        (total - free) / 1024 if total is not None and free is not None else None,
        total / 1024 if total is not None else None,
    )


def _network() -> _Pair:
    """Return the bytes that all interfaces but loopback received and sent; None if they cannot be read."""
    received = sent = 0
    try:
        with open("/proc/net/dev", "rb") as file:
            for line in file.read().splitlines()[2:]:
                name, _, rest = line.partition(b":")
                if name.strip() != b"lo":
                    numbers = rest.split()
                    received += int(numbers[0])
                    sent += int(numbers[8])
    except (OSError, ValueError, IndexError):
        return None
    return received, sent
