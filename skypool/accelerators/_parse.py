"""`accelerators.parse`: returns the accelerator that a text names.

The module `spelling` reads every spelling, but importing it takes some 30 ms. So `parse` first tries a quick reader
that knows only bare catalogue names and the texts that `str(accelerator)` returns for whole cards.
"""

from __future__ import annotations

import sys

from skypool.accelerators.value import canonical

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skypool.accelerators.spelling import Spelling
    from skypool.accelerators.value import Accelerator

_READER = "skypool.accelerators.spelling"
"""The name of the module that reads all spellings. Once this module is imported, `parse` always uses it."""


def parse(spelling: Spelling, *, dialect: str | None = None) -> Accelerator:
    """Return the accelerator that a spelling names.

    An `Accelerator` is returned unchanged. A factory such as `accelerators.H100` is called without arguments. Case,
    spaces, dashes, underscores and dots do not matter.

    Args:
        spelling: "H100:8", "8x H100", "A100-80GB", "A100:4@40GB", "A100/2g.10gb", "nvidia-tesla-a100", "p5.48xlarge",
            "v5p-8" and so on.
        dialect: source whose names are tried first: "aws", "aws-type", "azure", "flyte", "gcp", "runpod", "skypilot",
            "skypilot-runpod", "skyward", "vastai", "verda" and others. By default no source is preferred.

    Raises:
        UnknownAccelerator: no accelerator has this name, or the accelerator does not exist with this count, memory or
            partition. The error lists the nearest names.
        UsageError: there is no such dialect.
    """
    if _READER not in sys.modules and dialect is None and isinstance(spelling, str) and (found := canonical(spelling)):
        return found
    from skypool.accelerators.spelling import read  # loads the tables of names, and `re`

    return read(spelling, dialect)
