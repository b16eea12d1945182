"""Checks of what Compute Engine has for a project, for `skypool doctor` and `skypool prove`: networks, quotas, types.

Each function sends requests that only read, and returns the text of a finding. It raises an error for a failed check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from skypool.accelerators import parse
from skypool.drivers import preflight
from skypool.errors import ProviderError, UnknownAccelerator
from skypool.model import Finding
from skypool_gcp import _api, catalog, list_prices
from skypool_gcp.catalog.facts import FACTS
from skypool_gcp.compute._client import ComputeApi, look

if TYPE_CHECKING:
    from google.cloud import compute_v1

_WITH_GPUS = "[ag][0-9]+x?-.*"
"""A regular expression for the names of machine types with built-in GPUs, also of families that may come later."""

_MOST = 4
"""The most names that a text lists. The others are only counted: "and 3 more"."""


def network(calls: ComputeApi, regions: Sequence[str]) -> str:
    """Check that the network of the settings has a subnetwork in each of these regions. Return the result as text.

    Raises:
        ProviderError: There is no such network, or it has no subnetwork in a region, or Google did not answer.
    """
    settings = calls.settings
    record = look(calls.networks.get, settings.network)
    name = settings.subnetwork
    if name is None and not record.auto_create_subnetworks:
        raise ProviderError(
            f"the network {settings.network} has no automatic subnetworks, so Google cannot choose one; name the "
            "subnetwork with GCP(subnetwork=…)",
            provider="gcp",
        )
    there = {
        _api.last_part(each.region)
        for each in look(calls.subnetworks.list, f'name eq "{name or settings.network}"')
        if _api.last_part(each.network) == settings.network
    }
    missing = sorted(set(regions) - there)
    if missing:
        raise ProviderError(
            f"the network {settings.network} has no subnetwork {name or settings.network} in {_some(missing)}; create "
            "it there, or name the zones of other regions with GCP(zones=…)",
            provider="gcp",
        )
    return f"subnetwork {name or settings.network} in all {len(regions)} regions"


def quotas(calls: ComputeApi, regions: Sequence[str]) -> Finding:
    """Return a finding about the quotas of each family of GPUs in these regions.

    It tells the largest limit of each quota, and in how many regions the limit is not zero. Each family has a standard
    and a preemptible quota. Spot machines use the latter. Machines with a limited lifetime, such as skypool's, may use
    either. Compute Engine's API has the quotas of older GPUs only. If all quotas are zero, the finding is not a
    failure, but open (`Finding.open`): the user may want no GPUs.

    Raises:
        ProviderError: Google did not answer.
    """
    metrics = sorted({each for each in FACTS["metrics"].values() if each.startswith("NVIDIA_")})
    limits: dict[str, list[float]] = {}
    untold: list[str] = []
    for region in look(calls.regions.list):
        if region.name not in regions:
            continue
        if region.quota_status_warning.code:
            untold.append(region.name)
        for quota in region.quotas:
            limits.setdefault(quota.metric, []).append(quota.limit)
    parts, silent = [], []
    for metric in metrics:
        called = metric.removeprefix("NVIDIA_").removesuffix("_GPUS").replace("_", " ")
        standard, preemptible = (limits.get(name) for name in (metric, f"PREEMPTIBLE_{metric}"))
        if standard is None and preemptible is None:
            silent.append(called)
        else:
            parts.append(f"{called}: {_most(standard)} (preemptible: {_most(preemptible)})")
    told = f" (Compute Engine's API does not tell those of {', '.join(silent)})" if silent else ""
    if untold:
        told += f" (Google could not tell the quotas of {_some(sorted(untold))})"
    text = f"{', '.join(parts)}{told}; machines with a lifetime may use either"
    wanted = {f"{before}{metric}" for metric in metrics for before in ("", "PREEMPTIBLE_")}
    if untold or not limits or any(each for name in wanted & set(limits) for each in limits[name]):
        return Finding("", True, text)
    refused = _api.REFUSALS.error("GPUs", "QUOTA_EXCEEDED", text, project=calls.project)
    return Finding("", True, text, f"to rent GPUs, {preflight.failure('', refused).advice}", open=True)


def _most(limits: Sequence[float] | None) -> str:
    """Return a text such as "up to 8 in 3 regions": the largest limit, and how many are not 0. None: "not told"."""
    several = [each for each in limits or () if each]
    if limits is None:
        return "not told"
    return f"up to {max(several):g} in {len(several)} regions" if several else "none"


def types(records: Iterable[compute_v1.MachineType], models: Iterable[compute_v1.AcceleratorType]) -> str:
    """Return a text that says that this version of skypool knows all of Google's machine types with GPUs, and all GPUs.

    Args:
        records: Google's machine types of the families with GPUs, in all zones.
        models: Google's types of accelerators, in all zones.

    Raises:
        ProviderError: Google has a machine type or a GPU that skypool does not know.
    """
    known = {*list_prices.machines(), *FACTS["more types"], *FACTS["unpriced"], *FACTS["unsold"]}
    theirs = {each.name for each in records}
    strange = sorted(theirs - known)
    strange += sorted({each.name for each in models if not _is_known(each.name)})
    if strange:
        raise ProviderError(
            f"Google has {_some(strange)}, which this version of skypool does not know; install a later version to "
            "rent these, too",
            provider="gcp",
        )
    return f"all {len(theirs)} machine types with GPUs are known"


def _is_known(model: str) -> bool:
    """Return True if skypool knows the GPU with this name at Google, or if the name is not that of a GPU."""
    if not model.startswith("nvidia-") or model.endswith("-vws"):
        return True
    try:
        parse(model, dialect="gcp")
    except UnknownAccelerator:
        return False
    return True


def fabric(places: Mapping[str, catalog.Place] | None) -> str:
    """Return a text that says how many networks connect the GPUs of several machines.

    Args:
        places: A dict from each network of the setting `networks` to where it can be used. None without this setting:
            the text then says that such GPUs have only one ordinary interface.
    """
    if places is None:
        kinds = ", ".join(FACTS["fabric"])
        return f"GCP(networks=…) is not set, so GPUs of several {kinds} have one ordinary interface between them"
    mrdma = sum(bool(each.profile) for each in places.values())
    return f"{len(places)} subnetworks, {mrdma} of them for RDMA"


def filter() -> str:
    """Return the filter of the API for machine types with built-in GPUs."""
    return f'name eq "{_WITH_GPUS}"'


def _some(names: Sequence[str]) -> str:
    """Return names as text. Of more than four names, only four are listed: "a, b, c, d and 3 more"."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{', '.join(names[:_MOST])}{more}"
