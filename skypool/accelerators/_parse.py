"""`accelerators.parse`: reads what `str()` of an accelerator gives, and leaves other spellings to `spelling`."""

from __future__ import annotations

from skypool.accelerators.value import canonical

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skypool.accelerators.spelling import Spelling
    from skypool.accelerators.value import Accelerator


def parse(spelling: Spelling, *, dialect: str | None = None) -> Accelerator:
    """The accelerator that a spelling means; a value is itself, and a factory its plain value.

    Args:
        spelling: "H100:8", "8x H100", "A100-80GB", "A100:4@40GB", "A100/2g.10gb", "nvidia-tesla-a100",
            "p5.48xlarge", "v5p-8"…
        dialect: read names first as one source uses them: "aws", "aws-type", "azure", "flyte", "gcp",
            "runpod", "skypilot", "skypilot-runpod", "skyward", "vastai", "verda"…
    Raises:
        UnknownAccelerator: nothing is called so; carries the nearest names.
        UsageError: no such dialect.
    """
    if dialect is None and isinstance(spelling, str) and (found := canonical(spelling)):
        return found
    from skypool.accelerators.spelling import read  # loads the tables of names, and `re`

    return read(spelling, dialect)
