"""What the user wants on a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Image:
    """What is on a node beside its base image.

    Args:
        env: environment variables for every call.
    """

    env: Mapping[str, str] = field(default_factory=dict)
