"""Detection of the accelerators of this machine, their state, and how a process is limited to some of them.

Only the standard library is needed, and nothing here fails where there is no device or no tool:

    from skypool import devices
    devices.detect()                          # every accelerator, of any vendor
    devices.family("cuda").get_device_stats(0)
    devices.visible_env("cuda", [2, 3])       # the environment that shows a process only these

- `device`: `Device`, `Stats`, and the base class `Family`.
- `cuda` (NVIDIA), `rocm` (AMD), `neuron` (Trainium), `tpu` (Google), `hpu` (Gaudi), `host` (CPU, Apple): the families.
- `identity`: matches a device with the catalogue; `tools`: runs the vendors' command-line tools.
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
    """The family of a kind: one of `KINDS`, or a name registered with a device class.

    Raises:
        UsageError: no such kind.
    """
    if kind in KINDS:
        return _own()[kind]
    if kind in (brought := _registered()):
        return brought[kind]
    raise UsageError(f"no devices are called {kind!r}; there are {', '.join([*KINDS, *brought])}")


@cache
def _own() -> dict[str, Family]:
    from skypool.devices.cuda import Cuda
    from skypool.devices.host import Cpu, Mps
    from skypool.devices.hpu import Hpu
    from skypool.devices.neuron import Neuron
    from skypool.devices.rocm import Rocm
    from skypool.devices.tpu import Tpu

    return {each.kind: each for each in (Cuda(), Rocm(), Neuron(), Tpu(), Hpu(), Mps(), Cpu())}


def _registered() -> dict[str, Family]:
    import sys

    registry = sys.modules.get("skypool.accelerators.registry")  # nobody can have registered without it
    return {name: made() for name, made in registry.device_classes().items()} if registry else {}


def detect() -> tuple[Device, ...]:
    """Every accelerator that this process may use, of any family; empty on a machine that has none.

    Quick there: a vendor's tool is started only if it is installed. $SKYPOOL_DEVICES, a JSON list of the fields of
    `Device`, is believed in the place of all tools: for rehearsals without the hardware.
    """
    if told := os.environ.get("SKYPOOL_DEVICES"):
        return _told(told)
    families = [family for family in _own().values() if family.kind != "cpu"]
    return tuple(device for each in [*families, *_registered().values()] for device in each.detect())


def _told(text: str) -> tuple[Device, ...]:
    """Those of a list that this process is shown."""
    import json

    from skypool.devices.tools import allowed

    found = [Device(**each) for each in json.loads(text)]
    pins = [next(iter(_pinned_env(each.kind, [each.pin])), "") for each in found]
    return tuple(each for each, pin in zip(found, pins, strict=True) if allowed(pin, (each.pin, each.uuid)))


def accelerators() -> tuple[Accelerator, ...]:
    """What `detect` finds, as the catalogue's values with counts; devices it does not know are left out."""
    from skypool.devices.identity import summary

    return summary(detect())


def visible_env(kind: str, indices: Sequence[int | str]) -> dict[str, str]:
    """The environment that shows a new process only some devices of one kind; none if empty.

    Neuron alone cannot hide all of its cores.

    Args:
        kind: one of `KINDS`, or a registered name.
        indices: what the vendor's variable counts: cards for cuda and rocm, chips for tpu, module ids for
            hpu, NeuronCores (not devices) for neuron; for cuda also UUIDs. `Device.pin` is right for each.
    """
    return family(kind).visible_env([str(index) for index in indices])


def hidden() -> dict[str, str]:
    """Return the environment that shows a new process no accelerator of any kind.

    No variable hides Trainium, Inferentia or TPU chips for certain. `JAX_PLATFORMS` and `PJRT_DEVICE` keep JAX and
    PyTorch/XLA away from them, and `SKYPOOL_DEVICES` makes `detect` find nothing.
    """
    env = {"SKYPOOL_DEVICES": "[]", "JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
    for each in [*_own().values(), *_registered().values()]:
        env |= each.visible_env([])
    return env


def pinned(devices: Sequence[Device]) -> dict[str, str]:
    """The same for devices as `detect` gave them, of one kind or of several."""
    env: dict[str, str] = {}
    for kind in dict.fromkeys(device.kind for device in devices):
        env |= _pinned_env(kind, [device.pin for device in devices if device.kind == kind])
    return env


def _pinned_env(kind: str, pins: Sequence[str]) -> dict[str, str]:
    """The environment that shows a process these devices; empty for a kind that nothing here pins, such as FPGAs."""
    return family(kind).visible_env(pins) if kind in KINDS or kind in _registered() else {}
