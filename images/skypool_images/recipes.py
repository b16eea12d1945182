"""What each accelerator needs on its machine."""

from __future__ import annotations

from skypool_images.spec import Spec
from skypool_images.steps import Step


def recipe(runtime: str, spec: Spec) -> list[Step]:
    """The steps that make a machine ready for `runtime`; they come after apt and before Python."""
    return []
