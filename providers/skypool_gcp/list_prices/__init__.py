"""Finds Google's prices, in Google's price catalogue or in tables of this package.

The catalogue is read at most once a day; the tables have the prices that the catalogue lacks. `rates` returns all known
prices, as a `Rates`. A unit is what Google charges for, such as one vCPU, one GiB of memory or one GPU of a family of
machine types. A SKU is one item of the catalogue: a unit in some regions, on one market ("on-demand" or "spot").
API: https://cloud.google.com/billing/docs/reference/rest/v1/services.skus/list (read 2026-11-22).
The catalogue has tens of thousands of descriptions of charged items. skus.json defines how they are interpreted.

The tables, with their sources and the days on which the sources stated the prices:

- prices.csv has prices of machines. The source is https://cloud.google.com/compute/all-pricing as it stood on
  2026-08-03, in github.com/cloudpilot-ai/karpenter-provider-gcp.
- parts.csv has prices of N1 machines and the GPUs attached to them. They are on-demand list prices of the Americas, as
  public code quotes them (T4: github.com/infercrane/infercrane, SKU 88B8-C3ED-03F0). The code was read on 2026-11-22
  and names no day.
- chips.csv has prices of one TPU chip. The source is src/gpuhunt/resources/tpu_pricing.json of
  github.com/dstackai/gpuhunt. That file was made by hand from Google's price pages and last changed on 2024-12-23.
  Before that day, the file named its spot prices of v6e "one-year commitment". For v3 pods in us-east1, the source is
  sky/catalog/data_fetchers/fetch_gcp.py of github.com/skypilot-org/skypilot. That code assumes that the prices are
  equal to those in us-central1, and names no day. A spot price above the on-demand price must be wrong. The table
  leaves such prices out, so no spot slices are offered at these prices.
"""

from __future__ import annotations

import csv
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from skypool.drivers.settings import table
from skypool.errors import NoAnswer, ProviderError, UsageError
from skypool.model import Market, PriceSource
from skypool.offers import price_cache
from skypool_gcp import _api
from skypool_gcp._sdk import auth_credentials, billing_transports, billing_v1
from skypool_gcp._settings import Settings
from skypool_gcp.list_prices._drift import Comparison, Place, compare

if TYPE_CHECKING:
    from google.auth.credentials import Credentials


class Skus(TypedDict):
    """The content of skus.json: rules for reading the descriptions in Google's price catalogue.

    A SKU is one item of the catalogue, such as "A3 Instance Core running in Americas". The entry "about" of the file
    tells more.

    Attributes:
        services: The ids of the two services whose SKUs are read: Compute Engine and Cloud TPU.
        sku: Regular expressions for the descriptions of SKUs, with the groups "name", "spot" and "also" (also spot).
        units: A dict from the catalogue's unit of usage, such as "h", to the factor that gives the price for an hour.
        families: A dict from family (the start of a machine type's name) to its name in the catalogue: "A2 Instance".
        plain: The families whose machine types have no GPUs, or GPUs that are attached to machines.
        whole: A dict from family to the catalogue's name of a GPU whose price includes its share of the machine.
        share: A dict from family to the vCPUs for a whole GPU, for families with fractions of a GPU.
        ssd: A dict from the start of a machine type's name to the GiB of local SSD for each GPU that cost extra.
        names: A dict from the catalogue's name of a unit to skypool's, such as "nvidia-l4".
        fours: A dict from the catalogue's name of a TPU, whose price is for four chips, to the name in `Rates.chips`.
    """

    services: list[str]
    sku: list[str]
    units: dict[str, float]
    families: dict[str, str]
    plain: list[str]
    whole: dict[str, str]
    share: dict[str, int]
    ssd: dict[str, int]
    names: dict[str, str]
    fours: dict[str, str]


SKUS: Skus = table("skypool_gcp.list_prices", "skus.json")

OF_TABLE = PriceSource("table", date(2026, 8, 3), "cloudpilot-ai/karpenter-provider-gcp")
"""The source of the prices in prices.csv."""

OF_PARTS = PriceSource("table", None, "list prices quoted in public code")
"""The source of the prices in parts.csv."""

_DAY = 86400.0
"""Seconds for which the cached catalogue is used before it is read again."""

_AGAIN = 600.0
"""Seconds after which the catalogue is requested again if it could not be read."""

_SOON = 12.0
"""Seconds that reading the catalogue may take. If it takes longer, earlier prices and the tables are used."""

_PAGE = 5000
"""The number of SKUs on a page of the catalogue. It is the largest that the API allows."""

_SHAPES = [re.compile(each, re.IGNORECASE) for each in SKUS["sku"]]
"""Regular expressions for the descriptions of SKUs."""

_NO_ADDRESS = (
    "environment variables set other addresses for some of Google's APIs, but none for its price catalogue "
    "(CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBILLING)"
)
"""The text of `Rates.why` if the user set other addresses for Google's APIs, but none for the price catalogue."""

_reading = threading.Lock()


def _names() -> dict[str, str]:
    """Return a dict from Google's name of a charged unit, such as "a2 instance core", to skypool's ("a2 core")."""
    names = {theirs.casefold(): ours for theirs, ours in SKUS["names"].items()}
    for family, theirs in SKUS["families"].items():
        for part in ("core", "ram"):
            names[f"{theirs} {part}".casefold()] = f"{family} {part}"
    for family, theirs in SKUS["whole"].items():
        names[theirs.casefold()] = family
    return names


_NAMES = _names()


class Shape(NamedTuple):
    """The vCPUs, GiB of memory and GPUs of a machine type, for which Google charges.

    Attributes:
        cards: The GPUs, as (Google's name, number).
    """

    vcpus: float
    gib: float
    cards: Sequence[tuple[str, int]]


class Price(NamedTuple):
    """A price in US dollars per hour, and where it was read."""

    usd: float
    source: PriceSource


@dataclass(frozen=True, slots=True)
class Rates:
    """All known prices of Google. The methods look in the price catalogue first, then in the tables of this package.

    Attributes:
        usd: The catalogue's prices in US dollars per hour of one unit, by the unit's name and then by (region, market).
            A unit is for example one vCPU, one GiB of memory, or one GPU. {} if the catalogue was never read.
        day: The day on which the catalogue was read, such as "2026-11-22"; "" if it was never read.
        why: The reason why the catalogue could not be read now; "" if there was no failure.
    """

    usd: Mapping[str, Mapping[Place, float]]
    day: str = ""
    why: str = ""

    @property
    def catalogue(self) -> PriceSource:
        """Google's price catalogue as the source of a price. Its day is None if the catalogue was never read."""
        return PriceSource("provider", date.fromisoformat(self.day) if self.day else None)

    def table(self, source: PriceSource) -> PriceSource:
        """Return a copy of a price source that says in `why` why a table was used instead of the catalogue."""
        return replace(source, why=self.why or "Google's price catalogue does not have this price")

    def machine(
        self, kind: str, region: str, market: Market, vcpus: float, gib: float, cards: Sequence[tuple[str, int]] = ()
    ) -> Price | None:
        """Return the price of a machine in USD per hour with its source, without its disk and its public address.

        Returns None if the price is neither in the catalogue nor in the tables.

        Args:
            kind: The machine type, such as "g2-standard-4".
            region: The region, such as "us-central1".
            market: "on-demand" or "spot".
            vcpus: The machine's number of vCPUs.
            gib: The machine's memory in GiB.
            cards: The machine's GPUs, built in or attached, as (Google's name, number).
        """
        units = _units(kind, vcpus, gib, cards)
        if (usd := _total(units, self.usd, (region, market))) is not None:
            return Price(usd, self.catalogue)
        if (usd := _total(units, parts(), (region, market))) is not None:
            return Price(usd, self.table(OF_PARTS))
        if (usd := machines().get(kind, {}).get((region, market))) is not None:
            return Price(usd, self.table(OF_TABLE))
        return None

    def chips(self, name: str) -> dict[Place, Price]:
        """Return the prices of one TPU chip in USD per hour, as a dict from (region, market) to price and source.

        The catalogue's price comes before the table's. Returns {} for an unknown name.

        Args:
            name: The generation: "v4", "v5e", …, "tpu7x". For v2 and v3, the price depends on the slice. "v2 device"
                names the price for slices with one host, and "v2 pod" for slices with several.
        """
        found = {place: Price(usd, self.table(source)) for place, (usd, source) in chips().get(name, {}).items()}
        for place, usd in self.usd.get(name, {}).items():
            found[place] = Price(usd, self.catalogue)
        return found


@cache
def machines() -> dict[str, dict[Place, float]]:
    """Return the table of machine prices (prices.csv): USD per hour, by machine type and then by (region, market).

    The file is read once. All callers share the same dict.
    """
    return _only_usd(_read_table("prices.csv"))


@cache
def parts() -> dict[str, dict[Place, float]]:
    """Return the table of prices for parts of N1 machines (parts.csv), such as a vCPU or an attached GPU.

    The prices are in USD per hour of one unit, by the part's name and then by (region, market). All callers share the
    same dict.
    """
    return _only_usd(_read_table("parts.csv"))


@cache
def chips() -> dict[str, dict[Place, Price]]:
    """Return the table of TPU prices (chips.csv): the price of one chip per hour, by name and then by (region, market).

    A name is that of a generation, such as "v5e"; for v2 and v3, also of the size: "v2 device" (one host) or "v2 pod".
    Each price has its own source. All callers share the same dict.
    """
    return _read_table("chips.csv")


def _only_usd(known: Mapping[str, Mapping[Place, Price]]) -> dict[str, dict[Place, float]]:
    """Return a copy of a table of prices, with a number in USD per hour in place of each `Price`."""
    return {name: {place: price.usd for place, price in places.items()} for name, places in known.items()}


def _read_table(file: str) -> dict[str, dict[Place, Price]]:
    """Read a CSV file of this package. Return a dict from name to a dict from (region, market) to price."""
    found: dict[str, dict[Place, Price]] = {}
    text = (files("skypool_gcp.list_prices") / file).read_text("utf-8")
    for row in csv.DictReader(text.splitlines()):
        day = row.get("as_of")
        source = PriceSource("table", date.fromisoformat(day) if day else None, row.get("origin", ""))
        columns: dict[Market, str] = {"on-demand": row["on_demand"], "spot": row["spot"]}
        for market, usd in columns.items():
            if usd:
                found.setdefault(row["instance_type"], {})[row["region"], market] = Price(float(usd), source)
    return found


def _units(kind: str, vcpus: float, gib: float, cards: Sequence[tuple[str, int]]) -> dict[str, float]:
    """Return a dict from unit, such as "n2 core", to the number that a machine is charged for; {} if not known."""
    count = sum(number for _, number in cards)
    short = kind.split("-")[0]
    if short in SKUS["whole"]:
        return {short: count}
    family = next((each for each in SKUS["families"] if kind.startswith(f"{each}-")), "")
    if not family or not (cards or family in SKUS["plain"]):
        return {}
    units: dict[str, float] = {f"{family} core": vcpus, f"{family} ram": gib}
    vcpus_of_a_gpu = SKUS["share"].get(family)
    for model, number in cards:
        units[model] = vcpus / vcpus_of_a_gpu if vcpus_of_a_gpu else number
    ssd = next((gib for start, gib in SKUS["ssd"].items() if kind.startswith(start)), 0)
    if ssd:
        units["ssd"] = ssd * count
    return units


def _total(units: Mapping[str, float], usd: Mapping[str, Mapping[Place, float]], place: Place) -> float | None:
    """Return the price of all units together, in USD per hour; None if there are none, or if a price is not known."""
    total = 0.0
    for what, number in units.items():
        rate = usd.get(what, {}).get(place)
        if rate is None:
            return None
        total += rate * number
    return total if units else None


# --- the catalogue -------------------------------------------------------------------------------------------


def rates(settings: Settings, *, insist: bool = False) -> Rates:
    """Return Google's prices. The price catalogue is read over the network at most once a day, and cached on disk.

    All processes of this user share the cache. If the catalogue cannot be read, nothing is raised, and `Rates.why` is
    the reason. The result then has the prices of an earlier reading from the cache, if there was one. The catalogue is
    tried again after ten minutes. One thread reads at a time; the others wait.

    If environment variables set other addresses for Compute Engine or Cloud TPU, but none for the catalogue, the
    catalogue is not read.

    Args:
        settings: The settings, which name the project toward which Google counts the requests.
        insist: True to read the catalogue even if reading failed less than ten minutes ago, and to allow 60 s instead
            of 12 s. Prices less than a day old are still taken from the cache.
    """
    here = _api.endpoint("cloudbilling")
    elsewhere = _api.endpoint("compute") or _api.endpoint("tpu")
    if elsewhere and not here:
        return Rates({}, why=_NO_ADDRESS)
    key = f"gcp catalogue 1 {here}"
    failure = f"gcp catalogue failed {here} {settings.project}"
    with _reading:
        kept = price_cache.recall(key, Rates)
        failed = price_cache.recall(failure, str)
        old = kept[0] if kept else Rates({})
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


def told(settings: Settings, shapes: Callable[[], Mapping[str, Shape]]) -> str:
    """Return a text for `skypool doctor` that says where prices come from, and on which days they were stated.

    The function tries to read Google's catalogue, for up to 60 s. If that fails, the text gives the reason, and nothing
    is raised. If the catalogue was read, the tables of this package are compared with it.

    Args:
        shapes: Returns the shape of each machine type of the tables. It is called only if the catalogue was read.

    Raises:
        ProviderError: `shapes` raised it.
    """
    found = rates(settings, insist=True)
    first = f"Google's price catalogue of {found.day}, and for prices that it lacks, " if found.day else ""
    days = [price.source.as_of for places in chips().values() for price in places.values() if price.source.as_of]
    said = (
        f"{first}skypool's tables: of {OF_TABLE.as_of} for machines, of an unknown day for N1 machines, "
        f"and of {max(days)} or older for TPUs"
    )
    if found.why:
        return f"{said}; the catalogue could not be read now: {found.why}"
    return f"{said}; {drift(found, shapes())}" if found.day else said


def drift(found: Rates, shapes: Mapping[str, Shape]) -> Comparison:
    """Compare the tables of this package with the prices of Google's catalogue.

    Args:
        found: The prices, as `rates` returned them.
        shapes: A dict from machine type to its shape. A machine type that the dict lacks is not compared.
    """
    kinds = {name: places for name, places in machines().items() if name in shapes}
    of_chips = _only_usd(chips())

    def in_catalogue(name: str, place: Place) -> float | None:
        if name in kinds:
            return _total(_units(name, *shapes[name]), found.usd, place)
        return found.usd.get(name, {}).get(place)

    return compare({**kinds, **parts(), **of_chips}, in_catalogue)


def _read(settings: Settings, seconds: float) -> dict[str, dict[Place, float]]:
    """Read Google's price catalogue within `seconds`. Return a dict: unit to (region, market) to USD per hour."""
    until = time.monotonic() + seconds
    found: dict[str, dict[Place, float]] = {}

    def read() -> None:
        for page in _pages(settings, seconds / 2):
            if time.monotonic() > until:
                raise NoAnswer(
                    f"Google's price catalogue was not read within {seconds:g} s; try again",
                    provider="gcp",
                    code="Timeout",
                )
            for what, place, usd in _meant(page.skus):
                known = found.setdefault(what, {})
                known[place] = max(usd, known.get(place, 0.0))  # the highest price, so that no plan is too cheap

    _api.call("its price catalogue", read, project=settings.billed())
    return found


def _pages(settings: Settings, timeout: float) -> Iterator[billing_v1.ListSkusResponse]:
    """Yield the pages of Google's price catalogue. Each is requested when it is taken. Raise the SDK's own errors."""
    client = _client(_api.endpoint("cloudbilling") or "", _login(settings.billed()))
    for service in SKUS["services"]:
        request = billing_v1.ListSkusRequest(parent=service, currency_code="USD", page_size=_PAGE)
        yield from client.list_skus(request=request, timeout=timeout, retry=None).pages


def _meant(skus: Iterable[billing_v1.Sku]) -> Iterator[tuple[str, Place, float]]:
    """Yield (unit, (region, market), USD per hour) for each SKU that is charged for what this driver rents."""
    for sku in skus:
        shape = next(filter(None, (each.fullmatch(sku.description) for each in _SHAPES)), None)
        usage = sku.category.usage_type
        if shape is None or usage not in ("OnDemand", "Preemptible"):
            continue
        theirs = shape["name"].casefold()
        of_four_chips = SKUS["fours"].get(theirs)
        name = _NAMES.get(theirs) or of_four_chips
        if name is None:
            continue
        is_spot = shape["spot"] or shape["also"] or usage == "Preemptible"
        market: Market = "spot" if is_spot else "on-demand"
        usd = _usd(sku) / (4 if of_four_chips else 1)
        if not usd:
            continue
        for region in sku.service_regions:
            yield name, (region, market), usd


def _usd(sku: billing_v1.Sku) -> float:
    """Return a SKU's present price in USD per hour: the first one above 0; 0.0 if there is none."""
    for info in list(sku.pricing_info)[-1:]:
        expression = info.pricing_expression
        hours = SKUS["units"].get(expression.usage_unit, 0.0)
        for price in (tier.unit_price for tier in expression.tiered_rates):
            if price.currency_code == "USD" and (price.units or price.nanos):
                return float(price.units + price.nanos / 1e9) * hours
    return 0.0


def _login(project: str) -> Credentials:
    """Return credentials for the catalogue. If they can name a project, Google counts requests toward `project`."""
    found = _api.credentials("cloudbilling")
    if isinstance(found, auth_credentials.CredentialsWithQuotaProject) and not found.quota_project_id:
        return _api.followed(found.with_quota_project(project))
    return found


def _client(address: str, credentials: Credentials) -> billing_v1.CloudCatalogClient:
    """Return a new client for Google's price catalogue: by gRPC for Google's own address (""), else by REST."""
    if not address:
        from skypool_gcp import _channel  # imports gRPC

        transport = billing_transports.CloudCatalogGrpcTransport
        create = _channel.recorded(transport.create_channel, "cloudbilling")
        return billing_v1.CloudCatalogClient(credentials=credentials, transport=partial(transport, channel=create))
    client = billing_v1.CloudCatalogClient(
        credentials=credentials,
        transport="rest",
        client_options={"api_endpoint": address},
    )
    _api.attend(client, "cloudbilling")
    return client
