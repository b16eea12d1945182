"""Detects this machine's accelerators and their state, and makes only some of them visible to a new process.

A device becomes invisible by environment variables, such as `CUDA_VISIBLE_DEVICES`. This package needs only the
standard library. Without a device or a vendor's tool, its functions report no devices instead of failing:

    from skypool import devices
    devices.detect()                            # every accelerator, of any vendor
    devices.family("cuda").get_device_stats(0)  # memory, load, temperature and power of the first NVIDIA GPU
    devices.visible_env("cuda", [2, 3])         # environment variables that make only GPUs 2 and 3 visible

- `device`: `Device`, `Stats`, and the base class `Family` of all kinds of devices.
- `cuda` (NVIDIA), `rocm` (AMD), `neuron` (Trainium), `tpu` (Google), `hpu` (Gaudi), `host` (CPU, Apple): the families.
- `catalogue_entry`: finds a device in skypool's catalogue of accelerators (`skypool.accelerators`).
- `tools`: runs the vendors' command-line tools.
- `network`: finds the network interfaces of this machine.
- `elsewhere`: detects the accelerators of another machine.
- `sample`: `NodeSample`, `DeviceSample` and `CallSample`, and the bounds that are checked when a node sends them.
- `health`: judges devices by their samples; `xid`: the XID codes of NVIDIA's driver by severity.

Words of this package:

- kind: the name of a family of devices, such as "cuda" for NVIDIA GPUs. `KINDS` lists the kinds.
- sample: the values that were measured at one time, of a device, a running call or a node (a rented machine).
- MIG partition: a part into which an NVIDIA card can be divided, and which programs use like a card of its own.
- XID code: the number of an error that NVIDIA's driver reports.
- pin: the text that selects a device in the environment variable of its vendor.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, partial

from skypool.devices.device import Device as Device
from skypool.devices.device import Family as Family
from skypool.devices.device import Stats as Stats
from skypool.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skypool.accelerators import Accelerator

__all__ = ["KINDS", "Device", "Family", "Stats", "accelerators", "detect", "family", "hidden", "pinned", "visible_env"]

KINDS = ("cuda", "rocm", "neuron", "tpu", "hpu", "mps", "cpu")


def family(kind: str) -> Family:
    """Return the `Family` object of a kind of device. This machine need not have such a device.

    Args:
        kind: one of `KINDS`, or the name of a device class that the user registered (`skypool.accelerators.register`).

    Raises:
        UsageError: there is no such kind.
    """
    if kind in KINDS:
        return _own()[kind]
    if kind in (brought := _registered()):
        return brought[kind]
    raise UsageError(f"there is no kind of device called {kind!r}; use one of these: {', '.join([*KINDS, *brought])}")


@cache
def _own() -> dict[str, Family]:
    """Return a dict from each kind in `KINDS` to its `Family` object. The objects are made only once."""
    from skypool.devices.cuda import Cuda
    from skypool.devices.host import Cpu, Mps
    from skypool.devices.hpu import Hpu
    from skypool.devices.neuron import Neuron
    from skypool.devices.rocm import Rocm
    from skypool.devices.tpu import Tpu

    return {each.kind: each for each in (Cuda(), Rocm(), Neuron(), Tpu(), Hpu(), Mps(), Cpu())}


def _registered() -> dict[str, Family]:
    """Return a dict from the name of each device class that the user registered to a new object of the class."""
    import sys

    registry = sys.modules.get("skypool.accelerators.registry")  # if it was never imported, nothing can be registered
    return {name: made() for name, made in registry.device_classes().items()} if registry else {}


def detect() -> tuple[Device, ...]:
    """Return every accelerator that this process may use, of all kinds except "cpu"; () if there is none.

    Devices that an environment variable such as `CUDA_VISIBLE_DEVICES` hides are left out. A vendor's tool is run only
    if it is installed, so this is quick on a machine without accelerators. Each tool may block for up to 20 s.

    To rehearse without hardware, set the environment variable `SKYPOOL_DEVICES` to a JSON list of objects with the
    fields of `Device`. These devices are then returned, and no tool is started.

    Raises:
        ValueError: `SKYPOOL_DEVICES` is not valid JSON.
        TypeError: an object in `SKYPOOL_DEVICES` has other fields than `Device`, or lacks a required field.
    """
    if told := os.environ.get("SKYPOOL_DEVICES"):
        return _told(told)
    families = [family for family in _own().values() if family.kind != "cpu"]
    return tuple(device for each in [*families, *_registered().values()] for device in each.detect())


def _told(text: str) -> tuple[Device, ...]:
    """Return the devices in `text`, the value of `SKYPOOL_DEVICES`, except those that a vendor's variable hides."""
    import json

    from skypool.devices.cuda import names
    from skypool.devices.tools import shown

    told = [Device(**each) for each in json.loads(text)]
    found: list[Device] = []
    for kind in dict.fromkeys(each.kind for each in told):
        own = [each for each in told if each.kind == kind]
        variable = next(iter(_pinned_env(kind, [each.pin for each in own])), "")
        found += shown(variable, own, partial(names, own), ordered=kind in ("cuda", "rocm"))
    return tuple(found)


def accelerators() -> tuple[Accelerator, ...]:
    """Return the accelerators of skypool's catalogue that `detect` finds, each with the number of such devices.

    Devices that the catalogue does not know are left out.
    """
    found = detect()
    if not found:
        return ()  # most clients have none, and the catalogue takes long to import
    from skypool.devices.catalogue_entry import summary

    return summary(found)


def visible_env(kind: str, indices: Sequence[int | str]) -> dict[str, str]:
    """Return environment variables that make only some devices of one kind visible to a new process.

    This function sets no variable. Devices of other kinds stay visible. An empty list of indices hides all devices of
    the kind, except for the kinds "neuron", "mps" and "cpu", whose devices cannot all be hidden.

    Args:
        kind: one of `KINDS`, or the name of a device class that the user registered.
        indices: the numbers that the vendor's variable takes. These are the numbers of cards for "cuda" and "rocm", of
            chips for "tpu", of NeuronCores (not devices) for "neuron", and module ids for "hpu". For "cuda", UUIDs are
            possible, too. For every kind, the texts in `Device.pin` can be given. The numbers are not checked.

    Raises:
        UsageError: there is no such kind.
    """
    return family(kind).visible_env([str(index) for index in indices])


def hidden() -> dict[str, str]:
    """Return environment variables that hide the accelerators of all kinds from a new process. No variable is set here.

    No variable reliably hides Trainium, Inferentia and TPU chips. `JAX_PLATFORMS` and `PJRT_DEVICE` make JAX and
    PyTorch/XLA use the CPU instead, and `SKYPOOL_DEVICES` makes `detect` find nothing.
    """
    env = {"SKYPOOL_DEVICES": "[]", "JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
    for each in [*_own().values(), *_registered().values()]:
        env |= each.visible_env([])
    return env


def pinned(devices: Sequence[Device]) -> dict[str, str]:
    """Return environment variables that make only the given devices visible to a new process. No variable is set here.

    Devices of other kinds stay visible. An empty sequence gives {}.

    Args:
        devices: devices as `detect` returns them, of one or several kinds.
    """
    env: dict[str, str] = {}
    for kind in dict.fromkeys(device.kind for device in devices):
        env |= _pinned_env(kind, [device.pin for device in devices if device.kind == kind])
    return env


def _pinned_env(kind: str, pins: Sequence[str]) -> dict[str, str]:
    """Return variables that make only the devices with these pins visible; {} for a kind that skypool cannot detect."""
    return family(kind).visible_env(pins) if kind in KINDS or kind in _registered() else {}
