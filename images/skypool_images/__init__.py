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

    def steps(self, runtime: str = "none") -> list[object]:
        return []

    def secret_values(self) -> dict[str, str]:
        return {}

    def script(self, runtime: str = "none") -> str:
        from skypool_images.steps import Step, assemble

        return assemble([Step("python", "keep SKYPOOL_PYTHON /root/.pyenv/versions/3.11.7/bin/python3")], "t")

    def payload(self) -> bytes:
        return b""
