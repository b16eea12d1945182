"""The XID codes of NVIDIA's driver, by what they mean for a node.

The severities follow the column "Resolution Bucket (Immediate Action)" of NVIDIA's XID catalogue,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html (read 2026-11-24). Codes whose action is to reset
the GPU or to restart the machine are fatal here. So are 48 and 74, whose descriptions say that a reset is needed. All
other codes are about a program, and the GPU goes on. Of these, `SERIOUS` has those that hint at a defect of the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

FATAL = {
    46: "GPU stopped processing",
    48: "uncorrectable memory error (double bit)",
    62: "internal microcontroller halted",
    64: "a faulty row of memory could not be recorded for replacement",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timed out",
    110: "security fault",
    119: "GSP (the GPU's system processor) did not answer",
    120: "GSP (the GPU's system processor) failed",
    136: "link training failed",
    140: "unrecovered memory error",
    143: "GPU initialization failed",
    151: "key rotation error",
    155: "NVLink is down by software",
    156: "a resource of the GPU was retired",
    158: "fatal timeout of the GPU",
}
"""A dict from code to meaning, for codes after which the GPU must be reset or exchanged."""
SERIOUS = {
    63: "a faulty row of memory will be replaced at the next reset",
    92: "many corrected memory errors",
    **dict.fromkeys(range(144, 151), "NVLink error; XID 154 tells if a reset is needed"),
    94: "contained memory error: the program that met it has failed, and the GPU goes on",
}
"""A dict from code to meaning, for codes after which the GPU works but may need attention."""
ACTION_CHANGED = 154
"""The code that says that the driver's recommended action has changed. `DeviceSample.recovery` has the action."""


def meaning(code: int) -> str:
    """Return what an XID code means, as text.

    For a code that this module does not list, the text is "an error of the program, or without effect on the GPU".
    """
    if code == ACTION_CHANGED:
        return "the driver's recommended action has changed"
    return FATAL.get(code) or SERIOUS.get(code) or "an error of the program, or without effect on the GPU"


def bounded(codes: Sequence[int], most: int = 64) -> tuple[int, ...]:
    """Return at most `most` of the codes, in order.

    If there are more, earlier repetitions of a code are left out first, so that a frequent code does not hide another
    one. If more than `most` different codes remain, the oldest of these are left out.
    """
    surplus = len(codes) - most
    if surplus <= 0:
        return tuple(codes)
    kept: list[int] = []
    left: dict[int, int] = {}
    for code in codes:
        left[code] = left.get(code, 0) + 1
    for code in codes:
        left[code] -= 1
        if surplus > 0 and left[code]:
            surplus -= 1
        else:
            kept.append(code)
    return tuple(kept[-most:])
