"""The sampler: the program that reads a node's devices, in a process of its own, which a broken device may hang.

The sampler prints one line of JSON for each reading: a list of device samples. The agent kills it if it is silent for
too long. It ends when its stdin ends, which means that the agent has ended.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Sequence

from skypool.devices.sample import DeviceSample, to_json

_EVERY = 1.0
"""Seconds between two readings of NVIDIA GPUs."""
_REST = 0.1
"""Seconds from an error of NVIDIA's driver to the next reading.

The pause doubles with each further error in a row, up to `_EVERY`.

So one error is reported at once, and many errors in a row do not keep a core busy.
"""
_TOOLS_EVERY = 10.0
"""Seconds between two readings by vendors' tools, each of which is a process."""


def main(wanted: Sequence[Sequence[str | int]]) -> None:
    """Print samples of devices until stdin ends. `wanted` has a triple (kind, index, uuid) for each device to read."""
    cuda = [(int(index), str(uuid)) for kind, index, uuid in wanted if kind == "cuda"]
    others = [(str(kind), int(index), str(uuid)) for kind, index, uuid in wanted if kind != "cuda"]
    if cuda:
        _read_nvml(cuda, others)
    else:
        while _go_on(0):
            _say(_of_tools(others))
            _go_on_for(_TOOLS_EVERY)


def _read_nvml(cuda: Sequence[tuple[int, str]], others: Sequence[tuple[str, int, str]]) -> None:
    from skypool.samples.nvml import Nvml

    try:
        reader = Nvml(cuda)
    except Exception as e:  # noqa: BLE001 - pynvml's own error, or ImportError: all mean that nothing can be read
        why = f"NVML cannot be used: {e}"
        while _go_on(0):
            _say([DeviceSample("cuda", index, uuid, unknown=why) for index, uuid in cuda])
            _go_on_for(_TOOLS_EVERY)
        return
    told = -_TOOLS_EVERY
    more: list[DeviceSample] = []
    rest = _REST
    while _go_on(0):
        if others and time.monotonic() - told >= _TOOLS_EVERY:
            told = time.monotonic()
            more = _of_tools(others)
        _say([*reader.read(), *more])
        if reader.wait(_EVERY):
            time.sleep(rest)
            rest = min(2 * rest, _EVERY)
        else:
            rest = _REST


def _of_tools(wanted: Sequence[tuple[str, int, str]]) -> list[DeviceSample]:
    from skypool.samples import tools

    return tools.read(wanted)


def _say(samples: Sequence[DeviceSample]) -> None:
    sys.stdout.write(json.dumps([to_json(each) for each in samples], separators=(",", ":")) + "\n")
    sys.stdout.flush()


def _go_on(seconds: float) -> bool:
    """Wait `seconds`, and return True. If stdin ends meanwhile, return False at once."""
    return not select.select([sys.stdin], [], [], seconds)[0]


def _go_on_for(seconds: float) -> None:
    if not _go_on(seconds):
        sys.exit()
