"""Detects this machine's accelerators and their state, and returns variables that limit a process to some of them.

This package needs only the standard library. Without a device or a vendor's tool, its functions report no devices
instead of failing:

    from skypool import devices
    devices.detect()                          # every accelerator, of any vendor
    devices.family("cuda").get_device_stats(0)
    devices.visible_env("cuda", [2, 3])       # the environment that shows a process only these

- `device`: `Device`, `Stats`, and the base class `Family` of all kinds of devices.
- `cuda` (NVIDIA), `rocm` (AMD), `neuron` (Trainium), `tpu` (Google), `hpu` (Gaudi), `host` (CPU, Apple): the families.
- `identity`: matches a device with the catalogue of accelerators; `tools`: runs the vendors' command-line tools.
- `elsewhere`: detects the accelerators of another machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

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
    """Return the device family of a kind: the object that detects and describes devices of that kind.

    It is returned for a known kind even if this machine has no such devices.

    Args:
        kind: one of `KINDS`, or a name that was registered with a device class.

    Raises:
        UsageError: there is no such kind.
    """
    if kind in KINDS:
        return _own()[kind]
    if kind in (brought := _registered()):
        return brought[kind]
    raise UsageError(f"there is no kind of device called {kind!r}; choose from {', '.join([*KINDS, *brought])}")


@cache
def _own() -> dict[str, Family]:
    """Return one `Family` object for each of `KINDS`, by kind. The same objects are returned each time."""
    from skypool.devices.cuda import Cuda
    from skypool.devices.host import Cpu, Mps
    from skypool.devices.hpu import Hpu
    from skypool.devices.neuron import Neuron
    from skypool.devices.rocm import Rocm
    from skypool.devices.tpu import Tpu

    return {each.kind: each for each in (Cuda(), Rocm(), Neuron(), Tpu(), Hpu(), Mps(), Cpu())}


def _registered() -> dict[str, Family]:
    """Return the device families that users registered, by name; {} if there are none.

    New objects are made at each call.
    """
    import sys

    registry = sys.modules.get("skypool.accelerators.registry")  # if it was never imported, nothing can be registered
    return {name: made() for name, made in registry.device_classes().items()} if registry else {}


def detect() -> tuple[Device, ...]:
    """Return every accelerator that this process may use, of all families except "cpu".

    The tuple is empty if there is none. Devices that a variable such as `CUDA_VISIBLE_DEVICES` hides are left out. A
    vendor's tool is started only if it is installed, so this is quick on a machine without accelerators. With a tool it
    may block for up to 20 s for each call of the tool.

    For rehearsals without hardware, set the environment variable `SKYPOOL_DEVICES`. It is a JSON list of objects with
    the fields of `Device`, and replaces all tools.
    """
    if told := os.environ.get("SKYPOOL_DEVICES"):
        return _told(told)
    families = [family for family in _own().values() if family.kind != "cpu"]
    return tuple(device for each in [*families, *_registered().values()] for device in each.detect())


def _told(text: str) -> tuple[Device, ...]:
    """Return the devices of a JSON list, except those that this process may not use.

    A device is left out if a variable such as `CUDA_VISIBLE_DEVICES` hides it.

    Args:
        text: the value of `SKYPOOL_DEVICES`: a JSON list of objects with the fields of `Device`.

    Raises:
        ValueError: the text is not JSON.
        TypeError: an object has other fields than those of `Device`, or lacks a required one.
    """
    import json

    from skypool.devices.tools import allowed

    found = [Device(**each) for each in json.loads(text)]
    pins = [next(iter(_pinned_env(each.kind, [each.pin])), "") for each in found]
    return tuple(each for each, pin in zip(found, pins, strict=True) if allowed(pin, (each.pin, each.uuid)))


def accelerators() -> tuple[Accelerator, ...]:
    """Return what `detect` finds as accelerators of the catalogue, one for each model, with the number of such devices.

    Devices that the catalogue does not know are left out. The tuple is empty if none is left.
    """
    from skypool.devices.identity import summary

    return summary(detect())


def visible_env(kind: str, indices: Sequence[int | str]) -> dict[str, str]:
    """Return environment variables that show a new process only some devices of one kind. Nothing is set here.

    An empty list of indices hides all devices of the kind, except Neuron cores, which cannot all be hidden.

    Args:
        kind: one of `KINDS`, or a registered name.
        indices: the numbers that the vendor's variable takes: cards for cuda and rocm, chips for tpu, module ids for
            hpu, NeuronCores (not devices) for neuron. For cuda also UUIDs. `Device.pin` is right for each kind. They
            are not checked.

    Raises:
        UsageError: there is no such kind.
    """
    return family(kind).visible_env([str(index) for index in indices])


def hidden() -> dict[str, str]:
    """Return the environment variables that show a new process no accelerator of any kind. Nothing is set here.

    No variable hides Trainium, Inferentia or TPU chips for certain. `JAX_PLATFORMS` and `PJRT_DEVICE` keep JAX and
    PyTorch/XLA away from them, and `SKYPOOL_DEVICES` makes `detect` find nothing.
    """
    env = {"SKYPOOL_DEVICES": "[]", "JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
    for each in [*_own().values(), *_registered().values()]:
        env |= each.visible_env([])
    return env


def pinned(devices: Sequence[Device]) -> dict[str, str]:
    """Return environment variables that show a new process only the given devices. Nothing is set here.

    Args:
        devices: devices as `detect` returns them, of one or several kinds. Devices of kinds that are not among them are
            not hidden, so an empty sequence gives {}.
    """
    env: dict[str, str] = {}
    for kind in dict.fromkeys(device.kind for device in devices):
        env |= _pinned_env(kind, [device.pin for device in devices if device.kind == kind])
    return env


def _pinned_env(kind: str, pins: Sequence[str]) -> dict[str, str]:
    """Return environment variables that show a new process only these devices of one kind.

    Returns {} for a kind without a family, such as FPGAs.

    Args:
        kind: the kind of the devices.
        pins: `Device.pin` of each device.
    """
    return family(kind).visible_env(pins) if kind in KINDS or kind in _registered() else {}
