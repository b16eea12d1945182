"""What Google charges an hour: its catalogue of list prices, read once a day; what that does not tell, tables do.

API: https://cloud.google.com/billing/docs/reference/rest/v1/services.skus/list (read 2026-11-22). How its tens of
thousands of descriptions are understood is in skus.json. The tables, with the day on which their source stated them:

- prices.csv, of machines: https://cloud.google.com/compute/all-pricing as it stood on 2026-08-03 in
  github.com/cloudpilot-ai/karpenter-provider-gcp.
- parts.csv, of N1 and what is attached to it: list prices of the Americas, on demand alone, as public code quotes them
  (T4: github.com/infercrane/infercrane, SKU 88B8-C3ED-03F0). That code was read on 2026-11-22 and names no day.
- chips.csv, of one chip of a TPU: src/gpuhunt/resources/tpu_pricing.json of github.com/dstackai/gpuhunt, made by hand
  from Google's price pages and last changed on 2024-12-23. Its spot prices of v6e are those that it called prices of a
  one-year commitment until that day. For v3 pods in us-east1, sky/catalog/data_fetchers/fetch_gcp.py of
  github.com/skypilot-org/skypilot, which assumes them equal to us-central1's and names no day. A spot price that its
  source has above the one on demand, which cannot be, is left out: that market is not sold there.
"""

from __future__ import annotations

import csv
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from skypool.drivers.settings import table
from skypool.errors import NoAnswer, ProviderError, UsageError
from skypool.model import Market, PriceSource
from skypool.offers import price_cache
from skypool_gcp import _api

SKUS: dict[str, Any] = table("skypool_gcp.billing", "skus.json")
OF_TABLE = PriceSource("table", date(2026, 8, 3), "cloudpilot-ai/karpenter-provider-gcp")
OF_PARTS = PriceSource("table", None, "list prices quoted in public code")
_DAY, _AGAIN = 86400.0, 600.0  # seconds for which the catalogue holds, and after which one that failed is asked again
_SOON = 12.0  # seconds within which it is read, or a table serves
_PAGE = 5000  # the most that a page can have
_NAMES = {key.casefold(): what for key, what in SKUS["names"].items()}
_NAMES |= {
    f"{words} {part}".casefold(): f"{of} {part}" for of, words in SKUS["families"].items() for part in ("core", "ram")
}
_NAMES |= {words.casefold(): of for of, words in SKUS["whole"].items()}
_SHAPES = [re.compile(each, re.IGNORECASE) for each in SKUS["sku"]]
_reading = threading.Lock()
Place = tuple[str, Market]  # a region and a market


class Price(NamedTuple):
    """USD an hour, and where that was read: Google's catalogue is the provider's, and the day is when it was read."""

    usd: float
    source: PriceSource


@dataclass(frozen=True, slots=True)
class Rates:
    """What is known of Google's prices.

    Attributes:
        usd: of one unit of what it charges for, by name and place, as the catalogue has it.
        day: on which it did, "" where it is not known; why: why not.
    """

    usd: Mapping[str, Mapping[Place, float]]
    day: str = ""
    why: str = ""

    @property
    def catalogue(self) -> PriceSource:
        """The catalogue as the source of a price."""
        return PriceSource("provider", date.fromisoformat(self.day) if self.day else None)

    def table(self, source: PriceSource) -> PriceSource:
        """A table as the source of a price, with why it served."""
        return replace(source, why=self.why or "Google's catalogue does not have them")

    def machine(
        self, kind: str, region: str, market: Market, vcpus: float, gib: float, cards: Sequence[tuple[str, int]] = ()
    ) -> Price | None:
        """Of a machine alone, without disk and address.

        Args:
            cards: GPUs that it has, by Google's names, built in or attached.
        """
        needs = _parts(kind, vcpus, gib, cards)
        for usd, source in ((self.usd, self.catalogue), (parts(), self.table(OF_PARTS))):
            rates = [usd.get(what, {}).get((region, market)) for what in needs]
            known = [rate * number for rate, number in zip(rates, needs.values(), strict=True) if rate is not None]
            if needs and len(known) == len(needs):
                return Price(sum(known), source)
        found = machines().get(kind, {}).get((region, market))
        return None if found is None else Price(found, self.table(OF_TABLE))

    def chips(self, name: str) -> dict[Place, Price]:
        """Of one chip of a TPU, by region and market.

        Args:
            name: "v2 device", which is a slice of one host, "v2 pod", "v3 device", "v3 pod", "v4", "v5e", …, "tpu7x".
        """
        found = {place: Price(usd, self.table(source)) for place, (usd, source) in chips().get(name, {}).items()}
        return found | {place: Price(usd, self.catalogue) for place, usd in self.usd.get(name, {}).items()}


@cache
def machines() -> dict[str, dict[Place, float]]:
    """The table: USD an hour of a machine, by type and place."""
    return _only_usd(_read_table("prices.csv"))


@cache
def parts() -> dict[str, dict[Place, float]]:
    """The same of one unit of what an N1 machine is made of."""
    return _only_usd(_read_table("parts.csv"))


@cache
def chips() -> dict[str, dict[Place, Price]]:
    """The same of one chip of a TPU, each with its source: not all are of the same day."""
    return _read_table("chips.csv")


def _only_usd(known: Mapping[str, Mapping[Place, Price]]) -> dict[str, dict[Place, float]]:
    return {name: {place: price.usd for place, price in places.items()} for name, places in known.items()}


def _read_table(file: str) -> dict[str, dict[Place, Price]]:
    found = dict[str, dict[Place, Price]]()
    for row in csv.DictReader((files("skypool_gcp.billing") / file).read_text("utf-8").splitlines()):
        day = row.get("as_of")
        source = PriceSource("table", date.fromisoformat(day) if day else None, row.get("origin", ""))
        known: dict[Market, str] = {"on-demand": row["on_demand"], "spot": row["spot"]}
        for market, usd in known.items():
            if usd:
                found.setdefault(row["instance_type"], {})[row["region"], market] = Price(float(usd), source)
    return found


def _parts(kind: str, vcpus: float, gib: float, cards: Sequence[tuple[str, int]]) -> dict[str, float]:
    """What is charged for of a machine type, and how much of each; nothing where that is not known."""
    count, of = sum(number for _, number in cards), kind.split("-")[0]
    if of in SKUS["whole"]:
        return {of: count}
    family = next((each for each in SKUS["families"] if kind.startswith(f"{each}-")), "")
    if not family or not (cards or family in SKUS["plain"]):
        return {}
    whole, ssd = SKUS["share"].get(family), next((n for start, n in SKUS["ssd"].items() if kind.startswith(start)), 0)
    found = {f"{family} core": vcpus, f"{family} ram": gib}
    found |= {model: vcpus / whole if whole else number for model, number in cards}
    return found | ({"ssd": ssd * count} if ssd else {})


# --- the catalogue -------------------------------------------------------------------------------------------


def rates(settings: _api.Settings, *, insist: bool = False) -> Rates:
    """Google's prices: kept ones for a day, else as it tells them soon, else tables alone; never an error.

    Args:
        insist: ask also where that failed minutes ago, and with more patience.
    """
    here, elsewhere = _api.endpoint("cloudbilling"), _api.endpoint("compute") or _api.endpoint("tpu")
    if elsewhere and not here:
        return Rates({}, why="other addresses of Google's APIs are set, and none of its catalogue")
    key, failure = f"gcp catalogue 1 {here}", f"gcp catalogue failed {here} {settings.project}"
    with _reading:
        kept, failed = price_cache.recall(key), price_cache.recall(failure)
        old: Rates = kept[0] if kept else Rates({})
        if kept and kept[1] < _DAY:
            return old
        if failed and failed[1] < _AGAIN and not insist:
            return Rates(old.usd, old.day, failed[0])
        try:
            usd = _read(settings, 5 * _SOON if insist else _SOON)
        except (ProviderError, UsageError) as e:
            price_cache.remember(failure, str(e))
            return Rates(old.usd, old.day, str(e))
        made = Rates(usd, datetime.now(UTC).date().isoformat())
        price_cache.remember(key, made)
        return made


def told(settings: _api.Settings) -> str:
    """Where prices come from, for a check."""
    found = rates(settings, insist=True)
    first = f"Google's catalogue of {found.day}, then " if found.day else ""
    days = [price.source.as_of for places in chips().values() for price in places.values() if price.source.as_of]
    said = f"{first}tables of {OF_TABLE.as_of}, for N1 of an unknown day, for TPUs of {max(days)} and older"
    return f"{said}: {found.why}" if found.why else said


def _read(settings: _api.Settings, seconds: float) -> dict[str, dict[Place, float]]:
    """All prices of the catalogue. Raises ProviderError: it does not tell, or not in time."""
    until, found = time.monotonic() + seconds, dict[str, dict[Place, float]]()

    def pages() -> Iterator[Any]:
        client = _client(_api.endpoint("cloudbilling") or "", _login(settings.billed()))
        for service in SKUS["services"]:
            asked = {"parent": service, "currency_code": "USD", "page_size": _PAGE}
            yield from client.list_skus(request=asked, timeout=seconds / 2, retry=None).pages

    def read() -> None:
        for page in pages():
            if time.monotonic() > until:
                raise NoAnswer(f"it took more than {seconds:g} s", provider="gcp", code="Timeout")
            for what, place, usd in _meant(page.skus):
                of = found.setdefault(what, {})
                of[place] = max(usd, of.get(place, 0.0))  # never less than what may be charged

    _api.asked("its catalogue of prices", read, project=settings.billed())
    return found


def _meant(skus: Iterable[Any]) -> Iterator[tuple[str, Place, float]]:
    """What they say of what is sold here."""
    for sku in skus:
        shape = next(filter(None, (each.fullmatch(sku.description) for each in _SHAPES)), None)
        name = shape["name"].casefold() if shape else ""
        what, four = _NAMES.get(name), SKUS["fours"].get(name)
        if shape is None or not (what or four) or (usage := sku.category.usage_type) not in ("OnDemand", "Preemptible"):
            continue
        market: Market = "spot" if shape["spot"] or shape["also"] or usage == "Preemptible" else "on-demand"
        if usd := _usd(sku) / (4 if four else 1):
            for region in sku.service_regions:
                yield what or four, (region, market), usd


def _usd(sku: Any) -> float:
    """An hour of one unit, as it is now; of tiers the first that is not free. 0.0 where it is told in other units."""
    for info in list(sku.pricing_info)[-1:]:
        how = info.pricing_expression
        for price in (tier.unit_price for tier in how.tiered_rates):
            if price.currency_code == "USD" and (price.units or price.nanos):
                return float((price.units + price.nanos / 1e9) * SKUS["units"].get(how.usage_unit, 0.0))
    return 0.0


def _login(project: str) -> Any:
    """The usual credentials; the project that may ask is the one that pays."""
    found, kind = _api.credentials("cloudbilling"), _api.sdk("google.auth.credentials").CredentialsWithQuotaProject
    return found.with_quota_project(project) if isinstance(found, kind) and not found.quota_project_id else found


def _client(address: str, credentials: Any) -> Any:
    """gRPC, unless an address of HTTP is named."""
    other = {"transport": "rest", "client_options": {"api_endpoint": address}} if address else {}
    return _api.sdk("google.cloud.billing_v1").CloudCatalogClient(credentials=credentials, **other)
