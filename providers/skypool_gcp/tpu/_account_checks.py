"""Checks what Cloud TPU has against what this driver knows, for `skypool doctor` and `skypool prove --level read`.

All requests only read: the zones with TPUs, and the slice types and runtime versions of each zone that may be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from skypool.accelerators import tables
from skypool.accelerators.facts import Slice
from skypool.drivers import preflight
from skypool.drivers.retry import at_once
from skypool.errors import UsageError
from skypool.model import Finding
from skypool_gcp import _api as google
from skypool_gcp.tpu._api import TpuApi

_DISABLED = (
    "not enabled: the API of Cloud TPU, which only TPU slices of v2 to v6e need. Enable it with "
    "`gcloud services enable tpu.googleapis.com`"
)
"""The text of the finding about zones, if the API is not enabled for the project."""

_QUOTAS = (
    "not told by the API of Cloud TPU; see the quotas of tpu.googleapis.com at "
    "https://console.cloud.google.com/iam-admin/quotas?project={project}"
)
"""The text of the finding about quotas. Google's reference of the API has no method for them (read 2026-11-24)."""

_UPDATE = "update skypool: `pip install --upgrade 'skypool[gcp]'`"
"""Advice in findings about something that this release of skypool does not know."""

_SHOWN = 4
"""The most names that a finding lists. The others are only counted: "and 3 more"."""


@dataclass(frozen=True, slots=True)
class _Zone:
    """The types of slices and the runtime versions (images of hosts) that Cloud TPU has in one zone."""

    name: str
    types: frozenset[str]
    runtimes: frozenset[str]


def findings(calls: TpuApi, chosen: Sequence[str] | None, end: str) -> Iterator[Finding]:
    """Yield the findings about Cloud TPU: its zones, slice types, runtime versions and quotas, and the end of slices.

    If the API is not enabled, or the zones cannot be read, only the first and the last finding are yielded. A failed
    check does not raise.

    Args:
        chosen: The zones of the settings; None for all zones.
        end: What ends a slice, as the text of the last finding.
    """
    zones: list[str] = []

    def ask() -> str:
        zones.extend(calls.zones())
        return str(len(zones))

    yield from preflight.findings({"Cloud TPU: zones": lambda: google.unless_disabled(ask, _DISABLED)})
    used = [each for each in zones if chosen is None or each in chosen]
    questions: dict[str, Callable[[], object]] = {}
    if zones:
        seen = at_once(partial(_seen, calls), used)
        questions["Cloud TPU: types of slices"] = lambda: _types(seen, is_all=chosen is None)
        questions["Cloud TPU: runtime versions"] = lambda: _runtimes(seen)
        questions["Cloud TPU: quotas"] = lambda: _QUOTAS.format(project=calls.settings.billed())
    questions["Cloud TPU: end of slices"] = lambda: end
    yield from preflight.findings(questions)


def _seen(calls: TpuApi, zone: str) -> _Zone:
    """Request the types of slices and the runtime versions that Cloud TPU has in a zone, and return them."""
    types = frozenset(google.last_part(each.name) for each in calls.accelerator_types(zone))
    return _Zone(zone, types, frozenset(google.last_part(each.name) for each in calls.runtime_versions(zone)))


def _known() -> Mapping[str, Slice]:
    """Return a dict from type to slice, for the slices of skypool's tables that Cloud TPU's API has, unlike TPU7x."""
    return {type: slice for type, slice in tables.slices().items() if slice.runtime_version}


def _read(seen: Sequence[_Zone | Exception]) -> list[_Zone]:
    """Return the zones in `seen`, the results and errors of the function `_seen`. Raise the first error, if any."""
    for each in seen:
        if isinstance(each, Exception):
            raise each
    return [each for each in seen if not isinstance(each, Exception)]


def _types(seen: Sequence[_Zone | Exception], *, is_all: bool) -> str:
    """Return a text that compares the zones' slice types with skypool's. Raise UsageError if skypool knows none."""
    zones = _read(seen)
    known, sold = set(_known()), {type for zone in zones for type in zone.types}
    where = _listed(zone.name for zone in zones) if len(zones) <= _SHOWN else f"{len(zones)} zones"
    if not known & sold:
        raise UsageError(
            f"none of the {len(known)} types of slices that skypool knows is in {where or 'the chosen zones'}; choose "
            f"other zones with GCP(zones=…), or {_UPDATE}"
        )
    said = [f"{len(known & sold)} of {len(known)} that skypool knows are in {where}"]
    if sold - known:
        said.append(f"skypool does not know {_listed(sold - known)}: {_UPDATE}")
    if is_all and known - sold:
        said.append(f"no zone has {_listed(known - sold)} any more, so none is offered")
    return "; ".join(said)


def _runtimes(seen: Sequence[_Zone | Exception]) -> str:
    """Return the names of the runtime versions that the zones' slices need. Raise UsageError if a zone lacks one."""
    needed: dict[str, list[str]] = {}
    missing: dict[str, list[str]] = {}
    for zone in _read(seen):
        for runtime in sorted({slice.runtime_version for type, slice in _known().items() if type in zone.types}):
            (needed if runtime in zone.runtimes else missing).setdefault(runtime, []).append(zone.name)
    if missing:
        lacks = ", ".join(f"{runtime} in {_listed(zones)}" for runtime, zones in missing.items())
        raise UsageError(f"Google no longer has {lacks}, which slices there would start from; {_UPDATE}")
    return _listed(needed, len(needed))


def _listed(names: Iterable[str], most: int = _SHOWN) -> str:
    """Return names as text, at most `most` of them, and the number of the others: "a, b and 3 more". "" for none."""
    every = sorted(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
