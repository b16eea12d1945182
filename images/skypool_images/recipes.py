"""What a machine needs before an accelerator of a family can be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skypool_images.steps import Step


@dataclass(frozen=True, slots=True)
class Packages:
    """What pip has to know on a machine of a runtime; nothing here is installed unasked.

    Attributes:
        indexes: to look in beside PyPI.
        links: pages with wheels, for `--find-links`.
        instead: what to install for a package that was asked for by its bare name: {"jax": "jax[tpu]"}.
    """

    indexes: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict[str, str])


def packages(runtime: str, *, cuda: str | None = None, rocm: str | None = None) -> Packages:
    """What belongs to pip rather than to the machine."""
    return Packages()


def recipe(
    runtime: str,
    *,
    cuda: str | None = None,
    neuron: str | None = None,
    rocm: str | None = None,
    mig: str | Sequence[str] | None = None,
    count: int = 1,
    framework: str = "torch",
) -> list[Step]:
    """The steps that make a machine ready for a runtime."""
    return []
