"""AWS Trainium and Inferentia devices: the family `Neuron`, and parsers for the output of AWS's tools.

The tool `neuron-ls` lists the devices, and `neuron-monitor` reports their state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from skypool.devices.device import Device, Family, Stats, index_of
from skypool.devices.tools import PATIENCE, ask, document, find, number, whole

_PLACE = "/opt/aws/neuron/bin"
_MODELS = {
    "trn1": "Trainium1",
    "trn2": "Trainium2",
    "trn3": "Trainium3",
    "inf1": "Inferentia1",
    "inf2": "Inferentia2",
}


class Neuron(Family):
    """AWS Neuron devices (Trainium and Inferentia) of this machine: detection and state.

    `Device.pin` lists the cores of a device, because the Neuron runtime assigns NeuronCores and not devices. `detect`
    ignores the environment variable `NEURON_RT_VISIBLE_CORES`, and returns all devices. `visible_env` makes chosen
    cores visible to new processes. It returns {} for an empty list, because no environment variable hides all cores.
    """

    kind = "neuron"

    def detect(self) -> tuple[Device, ...]:
        return read_neuron_ls(ask(["neuron-ls", "--json-output"], _PLACE))

    def get_device_stats(self, device: Device | int) -> Stats:
        index = index_of(device)
        found = next((each for each in self.detect() if each.index == index), None)
        if found is None:
            return Stats()
        return read_monitor(_one_report(), cores_of(found), found.memory_mib)

    def visible_env(self, pins: Sequence[str]) -> dict[str, str]:
        # no variable hides all cores: an empty NEURON_RT_VISIBLE_CORES means all cores, and so does
        # NEURON_RT_NUM_CORES=0
        return {"NEURON_RT_VISIBLE_CORES": ",".join(pins)} if pins else {}


def cores_of(device: Device) -> list[int]:
    """Return the numbers of a device's NeuronCores, as the Neuron runtime counts them."""
    return [int(core) for core in device.pin.split(",") if core]


def read_neuron_ls(text: str | None) -> tuple[Device, ...]:
    """Return the devices in the output of `neuron-ls --json-output`, sorted by index.

    `Device.pin` lists the numbers of the device's logical NeuronCores. By default, a Trainium2 combines its 8 physical
    cores to 4 logical ones. The tuple is empty if the text is None or is not a JSON list.
    """
    told = document(text)
    found = []
    for each in told if isinstance(told, list) else ():
        index = whole(each.get("neuron_device"))
        count = whole(each.get("nc_count")) or 0
        if index is None:
            continue
        cores = each.get("neuroncore_ids") or range(index * count, (index + 1) * count)
        memory = number(each.get("memory_size"))
        found.append(
            Device(
                kind="neuron",
                index=index,
                name=_model(each, memory),
                memory_mib=None if memory is None else int(memory) >> 20,
                pin=",".join(str(core) for core in cores),
            )
        )
    return tuple(sorted(found, key=lambda device: device.index))


def _model(each: dict[str, Any], memory: float | None) -> str:
    """Return a device's model, from its instance type, or from its memory in bytes if `neuron-ls` prints no type."""
    family = str(each.get("instance_type", ""))[:4]
    by_memory = {8: "Inferentia1", 96: "Trainium2", 144: "Trainium3"}
    return _MODELS.get(family) or by_memory.get(int((memory or 0) / 2**30), "Neuron device")


def read_monitor(text: str | None, cores: Sequence[int], total_mib: int | None) -> Stats:
    """Return the state of one device from one report of `neuron-monitor`: a line of JSON.

    Used memory and utilization count all programs that use the device. They are 0 if no program uses it, and None if
    `text` is None, because there is no report. The utilization is the mean of the device's NeuronCores, whose numbers
    are `cores`. Temperature and power are always None. `total_mib` is the device's memory, which the report lacks.
    """
    told = document(text)
    runtimes = told.get("neuron_runtime_data", []) if isinstance(told, dict) else []
    used = 0.0
    busy = [0.0] * len(cores)
    for report in (runtime.get("report", {}) for runtime in runtimes):
        counters = _at(report, "neuroncore_counters", "neuroncores_in_use")
        memory = _at(report, "memory_used", "neuron_runtime_used_bytes", "usage_breakdown", "neuroncore_memory_usage")
        for place, core in enumerate(cores):
            busy[place] += number(_at(counters, str(core), "neuroncore_utilization")) or 0.0
            used += sum(_numbers(_at(memory, str(core))))
    if told is None:
        return Stats(memory_total_mib=total_mib)
    return Stats(
        memory_used_mib=used / 2**20,
        memory_total_mib=total_mib,
        utilization_percent=sum(busy) / len(busy) if busy else None,
    )


def _at(given: Any, *path: str) -> Any:
    """Return the value at a path of keys in nested dicts; None if there is none."""
    for step in path:
        given = given.get(step) if isinstance(given, dict) else None
    return given


def _numbers(given: Any) -> Iterator[float]:
    """Yield the values of a dict that are numbers or begin with one, as floats. Anything else yields nothing."""
    for value in given.values() if isinstance(given, dict) else ():
        if (found := number(value)) is not None:
            yield found


def _one_report() -> str | None:
    """Return the first line that `neuron-monitor` prints within 20 s; None if it prints none. Kill the tool then."""
    import selectors
    import subprocess

    if (path := find("neuron-monitor", _PLACE)) is None:
        return None
    with subprocess.Popen([path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        try:
            assert running.stdout is not None
            with selectors.DefaultSelector() as waiting:
                waiting.register(running.stdout, selectors.EVENT_READ)
                line = running.stdout.readline() if waiting.select(PATIENCE) else b""
        finally:
            running.kill()
    return line.decode(errors="replace") or None
