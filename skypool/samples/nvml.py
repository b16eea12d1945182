"""Reads NVIDIA GPUs through NVML (NVIDIA's library for device management), with the package nvidia-ml-py.

Only the sampler imports this module, in a process of its own: each function may hang in NVIDIA's driver.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from skypool.devices.sample import DeviceSample
from skypool.devices.xid import bounded

_MIB = float(1 << 20)
_ALL_LINKS = 0xFFFFFFFF
"""The scope to pass to NVML to read a value for all NVLinks of a device together."""
_PACKED = "nvidia-ml-py"
"""The folder of skypool's zip with the package nvidia-ml-py."""
_RARELY = 10.0
"""Seconds between two readings of values that rarely change, such as numbers of errors and of active links.

These values need most of the calls to the driver. After an XID error of a GPU, its values are read at once.
"""
_MOST_EVENTS = 4096
"""The most XID errors that are taken from the driver before the GPUs are read again."""
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature, by software",
    0x40: "temperature, by hardware",
    0x80: "external power brake",
}
"""The bits of NVML's clock event reasons (nvmlClocksEventReasons) that mean a loss of speed."""


def load() -> Any:
    """Import and return `pynvml`: that of the node's image, or else skypool's own copy. May raise ImportError."""
    try:
        return import_module("pynvml")
    except ImportError:
        sys.path.append(f"{sys.path[0]}/{_PACKED}")
        return import_module("pynvml")


class Nvml:
    """Reader of NVIDIA GPUs of this machine. `wanted` has a pair (index, uuid) for each GPU to read.

    NVML is initialised when the object is made. That raises ImportError without nvidia-ml-py, and an NVMLError of
    `pynvml` if the driver or its library is missing or does not work.
    """

    def __init__(self, wanted: Sequence[tuple[int, str]]) -> None:
        self._nvml = load()
        self._nvml.nvmlInit()
        self._wanted = wanted
        self._handles: dict[int, Any] = {}
        self._lost: set[int] = set()
        self._counters: dict[tuple[int, str], tuple[float, float]] = {}
        self._links: dict[int, int] = {}
        self._rare: dict[int, tuple[float, dict[str, Any]]] = {}
        self._gpm: dict[int, tuple[Any, Any] | None] = {}
        self._xids: dict[int, list[int]] = {}
        self._watched: set[int] = set()
        self._events = self._ask(self._nvml.nvmlEventSetCreate)
        for index, uuid in wanted:
            self._open(index, uuid)

    def _open(self, index: int, uuid: str) -> None:
        handle = self._handle(index, uuid)
        if handle is None:
            return
        self._handles[index] = handle
        kind = self._nvml.nvmlEventTypeXidCriticalError
        try:
            self._nvml.nvmlDeviceRegisterEvents(handle, kind, self._events)
        except self._nvml.NVMLError:  # not supported, as on some virtual GPUs
            return
        self._watched.add(index)

    def _handle(self, index: int, uuid: str) -> Any:
        """Return NVML's handle of a GPU; None if there is none. Note a lost GPU in `_lost`."""
        nvml = self._nvml
        handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index, of=index)
        # Indexes change if another GPU was lost before NVML was initialised. So the uuid decides, where NVML tells it.
        if not uuid.startswith("GPU-") or (handle is not None and self._uuid(handle) in ("", uuid)):
            return handle
        is_lost = index in self._lost or handle is not None  # said of what has this index now, as far as is known
        self._lost.discard(index)
        for other in range(self._ask(nvml.nvmlDeviceGetCount) or 0):
            handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, other)
            found = "" if handle is None else self._uuid(handle)
            if found == uuid:
                return handle
            is_lost = is_lost or bool(found)
        if is_lost:  # NVML knows the uuids of other GPUs, and none has this one
            self._lost.add(index)
        return None

    def _uuid(self, handle: Any) -> str:
        return str(self._ask(self._nvml.nvmlDeviceGetUUID, handle) or "")

    def _ask(self, function: Callable[..., Any], *args: Any, of: int | None = None) -> Any:
        """Return the result of a function of NVML; None if NVML cannot tell. If GPU `of` is lost, note that."""
        nvml = self._nvml
        try:
            return function(*args)
        except nvml.NVMLError as e:
            if of is not None and e.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_GPU_NOT_FOUND):
                self._lost.add(of)
            return None

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for XID errors (errors that NVIDIA's driver reports). Return True if one came.

        When an error comes, the method returns at once. The codes of this error and of all others that the driver has
        queued are kept for the next sample.
        """
        nvml = self._nvml
        if not self._watched:
            time.sleep(seconds)
            return False
        until = time.monotonic() + seconds
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, int(1000 * seconds))
        except nvml.NVMLError as e:
            if e.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_GPU_NOT_FOUND):
                self._lost |= {index for index in self._handles if self._is_lost(index)}
            time.sleep(max(0.0, until - time.monotonic()))
            return False
        for _ in range(_MOST_EVENTS):
            self._note(event)
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:  # there is no further one now
                break
        return True

    def _note(self, event: Any) -> None:
        """Keep an XID code for the next sample of its GPU; of all GPUs if NVML does not say which one it is."""
        if event.eventType != self._nvml.nvmlEventTypeXidCriticalError:
            return
        code, place = int(event.eventData), _address(event.device)
        found = [index for index, handle in self._handles.items() if _address(handle) == place]
        if not found:
            index = self._ask(self._nvml.nvmlDeviceGetIndex, event.device)
            found = [index] if index in self._handles else list(self._handles)
        for each in found:
            self._xids.setdefault(each, []).append(code)
            self._rare.pop(each, None)

    def _is_lost(self, index: int) -> bool:
        self._ask(self._nvml.nvmlDeviceGetPowerUsage, self._handles[index], of=index)
        return index in self._lost

    def read(self) -> list[DeviceSample]:
        """Return a sample of each wanted GPU. May hang in the driver."""
        return [self._read(index, uuid) for index, uuid in self._wanted]

    def _read(self, index: int, uuid: str) -> DeviceSample:
        nvml = self._nvml
        handle = self._handles.get(index)
        xids = bounded(self._xids.pop(index, []))
        watched = index in self._watched
        if handle is None or index in self._lost:
            lost = index in self._lost
            unknown = "" if lost else "NVML does not know this device"
            return DeviceSample("cuda", index, uuid, unknown, lost, xids=xids, xids_watched=watched)

        def ask(name: str, *args: Any) -> Any:
            return self._ask(getattr(nvml, name), handle, *args, of=index)

        load = ask("nvmlDeviceGetUtilizationRates")
        memory = ask("nvmlDeviceGetMemoryInfo")
        power = ask("nvmlDeviceGetPowerUsage")
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        fields = self._fields(handle, index)
        made = DeviceSample(
            kind="cuda",
            index=index,
            uuid=uuid,
            utilization_percent=None if load is None else float(load.gpu),
            sm_activity_percent=self._sm_activity(handle, index),
            memory_used_mib=None if memory is None else memory.used / _MIB,
            memory_total_mib=None if memory is None else memory.total / _MIB,
            power_watts=None if power is None else power / 1000,
            temperature_celsius=_real(ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)),
            sm_clock_mhz=_real(ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=_real(ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM)),
            throttled=None if reasons is None else tuple(text for bit, text in _REASONS.items() if reasons & bit),
            pcie_sent_mib=self._rate(index, "pcie sent", fields.get(nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES), _MIB),
            pcie_received_mib=self._rate(index, "pcie got", fields.get(nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES), _MIB),
            nvlink_sent_mib=self._rate(
                index, "links sent", fields.get(nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX), 1024.0
            ),
            nvlink_received_mib=self._rate(
                index, "links got", fields.get(nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX), 1024.0
            ),
            recovery=fields.get(nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
            xids=xids,
            xids_watched=watched,
            memory_of=self._memory_of(handle, index),
            **self._rare_values(handle, index),
        )
        if index in self._lost:  # it was lost while it was read
            return DeviceSample("cuda", index, uuid, lost=True, xids=xids, xids_watched=watched)
        return made

    def _rare_values(self, handle: Any, index: int) -> dict[str, Any]:
        """Return the values of a GPU that rarely change, by the names of their fields. They are up to 10 s old."""
        nvml = self._nvml
        now = time.monotonic()
        at, known = self._rare.get(index, (now, None))
        if known is not None and now - at < _RARELY:
            return known

        def ask(name: str, *args: Any) -> Any:
            return self._ask(getattr(nvml, name), handle, *args, of=index)

        remapped = ask("nvmlDeviceGetRemappedRows")
        limit = ask("nvmlDeviceGetEnforcedPowerLimit")
        links = self._active_links(handle, index)
        read = {
            "power_limit_watts": None if limit is None else limit / 1000,
            "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
            "pcie_width_max": known["pcie_width_max"] if known else ask("nvmlDeviceGetMaxPcieLinkWidth"),
            "nvlinks": links,
            "nvlinks_all": self._links.get(index),
            "ecc_corrected": ask(
                "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "ecc_uncorrected": ask(
                "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "remap_pending": None if remapped is None else bool(remapped[2]),
            "remap_failed": None if remapped is None else bool(remapped[3]),
        }
        self._rare[index] = now, read
        return read

    def _fields(self, handle: Any, index: int) -> dict[int, int]:
        """Return field values of a GPU by the field's number, without those that the GPU does not have."""
        nvml = self._nvml
        links = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        asked: list[Any] = [(each, _ALL_LINKS) for each in links]
        asked += [nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES]
        asked.append(nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
        values = self._ask(nvml.nvmlDeviceGetFieldValues, handle, asked, of=index) or ()
        return {each.fieldId: _value(nvml, each) for each in values if each.nvmlReturn == nvml.NVML_SUCCESS}

    def _rate(self, index: int, name: str, counter: int | None, unit: float) -> float | None:
        """Return by how much a counter has grown per second since the last sample, in `unit`; None if unknown."""
        if counter is None:
            return None
        now = time.monotonic()
        before, at = self._counters.get((index, name), (float(counter), now))
        self._counters[index, name] = float(counter), now
        return (counter - before) / unit / (now - at) if now > at and counter >= before else None

    def _active_links(self, handle: Any, index: int) -> int | None:
        """Return the number of active NVLinks; None if unknown. Note the number of all NVLinks in `_links`."""
        nvml = self._nvml
        states = []
        for link in range(self._links.get(index, int(nvml.NVML_NVLINK_MAX_LINKS))):
            try:
                states.append(nvml.nvmlDeviceGetNvLinkState(handle, link))
            except nvml.NVMLError as e:
                if e.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                    break  # there are no more links
                return None
        self._links.setdefault(index, len(states))
        return sum(map(bool, states))

    def _sm_activity(self, handle: Any, index: int) -> float | None:
        """Return the share of busy multiprocessors since the last sample; None before the H100, or if unknown."""
        nvml = self._nvml
        if index in self._gpm and self._gpm[index] is None:
            return None
        try:
            places = self._gpm.get(index)
            if places is None:
                if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                    self._gpm[index] = None
                    return None
                first = nvml.nvmlGpmSampleGet(handle, nvml.nvmlGpmSampleAlloc())
                self._gpm[index] = first, nvml.nvmlGpmSampleAlloc()
                return None
            before, now = places
            nvml.nvmlGpmSampleGet(handle, now)
            self._gpm[index] = now, before  # the older one is overwritten by the next reading
            asked = nvml.c_nvmlGpmMetricsGet_t()
            asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
            asked.numMetrics = 1
            asked.sample1, asked.sample2 = before, now
            asked.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
            metric = nvml.nvmlGpmMetricsGet(asked).metrics[0]
        except nvml.NVMLError:
            self._gpm[index] = None
            return None
        return float(metric.value) if metric.nvmlReturn == nvml.NVML_SUCCESS else None

    def _memory_of(self, handle: Any, index: int) -> dict[str, float] | None:
        """Return the GPU memory in MiB of each process that computes on a GPU, by process id; None if unknown."""
        found = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle, of=index)
        if found is None:
            return None
        return {str(each.pid): each.usedGpuMemory / _MIB for each in found[:64] if each.usedGpuMemory is not None}


def _address(handle: Any) -> int | None:
    """Return the address in a handle of NVML. Two handles with the same address mean the same GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _real(value: Any) -> float | None:
    return None if value is None else float(value)


def _value(nvml: Any, field: Any) -> int:
    """Return the number in a field value of NVML. Its `valueType` says which member of the union has it."""
    names = {
        nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        nvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    }
    return int(getattr(field.value, names.get(field.valueType, "uiVal")))
