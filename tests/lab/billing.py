"""Google's catalogue of prices as its clients see it: SKUs by pages, in words, in units and billionths.

    with Billing() as billing:  # beside a `GCE`, whose environment it adds to

Amounts are those of gcp_rates.csv: what its first rows are was solved from the driver's table of machine types, which
is exact to a millionth for every type; of the last ones, B200's and TPUs' and those of T4, V100, P100 and N1 in the
Americas on demand were read in public copies of the real catalogue on 2026-11-22, the others are of about that size.
Among them are SKUs that are no price of a machine that is rented by the hour, in the real one's words. Each request and
every reply is checked against Google's discovery document (tests/lab/cloudbilling_v1.json).
"""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import Any, ClassVar

from tests.lab.cloud import Cloud, Refused, Rental, Request
from tests.lab.discovery import Document
from tests.lab.gcp_iam import Role

RATES = Path(__file__).parent / "gcp_rates.csv"
COMPUTE, TPU = "6F81-5844-456A", "E000-3F24-B8AA"
CITIES = {"us-central1": "Iowa", "europe-west4": "Netherlands", "asia-northeast1": "Tokyo", "us-east5": "Columbus"}
DISABLED = (
    "Cloud Billing API has not been used in project {project} before or it is disabled. Enable it by visiting "
    "https://console.developers.google.com/apis/api/cloudbilling.googleapis.com/overview then retry."
)
JUNK: list[tuple[str, str, str, str]] = [
    ("Commitment v1: A2 Cpu in Americas for 1 Year", "CPU", "Commit1Yr", "h"),
    ("Commitment v1: Nvidia L4 GPU running in Americas for 3 Years", "GPU", "Commit3Yr", "h"),
    ("Commitment v1: TpuV6e running in Columbus for 1 Year", "TPU", "Commit1Yr", "h"),
    ("Reserved Nvidia H100 80GB Mega GPU in Americas in Calendar Mode", "GPU", "OnDemand", "h"),
    ("Reserved A2 Ram in Netherlands", "RAM", "OnDemand", "GiBy.h"),
    ("Reserved TpuV5p in Delhi in Calendar Mode", "TPU", "OnDemand", "h"),
    ("Nvidia H100 Mega 80GB GPU attached to DWS Defined Duration VMs running in Americas", "GPU", "OnDemand", "h"),
    ("DWS Defined Duration V6e running in Columbus", "TPU", "OnDemand", "h"),
    ("Capacity Optimized TpuV6e running in Columbus", "TPU", "OnDemand", "h"),
    ("Nvidia Tesla T4 GPU attached to Sole Tenancy VMs running in Americas", "GPU", "OnDemand", "h"),
    ("A2 Sole Tenancy Instance Core running in Americas", "CPU", "OnDemand", "h"),
    ("Custom Instance Core running in Americas", "CPU", "OnDemand", "h"),
    ("N2 Custom Extended Instance Ram running in Americas", "RAM", "OnDemand", "GiBy.h"),
    ("Committed Use Discount Premium for E2 Instance Core running in Americas", "CPU", "OnDemand", "h"),
    ("Nvidia L4 Virtual Workstation GPU running in Americas", "GPU", "OnDemand", "h"),
    ("Licensing Fee for SUSE Linux Enterprise Server 15 (CPU cost)", "Google", "OnDemand", "h"),
    ("G2 Instance Core running in Americas", "CPU", "CmtCudPremium", "h"),
    ("Nvidia L4 GPU running in Americas", "GPU", "OnDemand", "GiBy.mo.nobody"),
    ("Tpu-v2 Accelerator Commitment - 1 Year USA", "TPU", "OnDemand", "h"),
]
"""What is no price of what is rented: each says that it costs 99 dollars everywhere."""


class Billing(Cloud[Rental]):
    """The catalogue of one day. The action is "GET skus".

    Attributes:
        page: the most SKUs that a page has.
        dearer: a factor to all its prices; changed: factors to those of some rows of gcp_rates.csv, by its `sku`.
        caller: what a client may do; None: everything. It cannot be seen here which project a request counts toward, as
            clients show no credentials to this address, so each is taken to name one.
        document: what the requests and replies were checked against, with its counts.
    """

    name: ClassVar[str] = "billing"

    def __init__(self, lab: object = None) -> None:
        super().__init__()
        self.page, self.dearer = 150, 1.0
        self.changed: dict[str, float] = {}
        self.caller: Role | None = None
        self.document = Document(Path(__file__).parent / "cloudbilling_v1.json")
        self.routes = {"GET /v1/services/{service}/skus": self._skus}

    @property
    def environment(self) -> dict[str, str]:
        return {"CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBILLING": f"{self.url}/"}

    def named(self, request: Request) -> str:
        return "GET skus"

    def disable(self) -> None:
        """As for a project that has never used it."""
        info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "SERVICE_DISABLED"}
        text = DISABLED.format(project="lab-project")
        body = {"error": {"code": 403, "message": text, "status": "PERMISSION_DENIED", "details": [info]}}
        self.fail("GET skus", 403, body, times=None)

    def check(self, request: Request) -> None:
        """Refuse whoever may not use the project toward which its requests count."""
        missing = self.caller and self.caller.lacks("cloudbilling.services.skus.list", {"quota project"})
        if missing:
            text = (
                "Caller does not have required permission to use project lab-project. Grant the caller the "
                f"roles/serviceusage.serviceUsageConsumer role, or a custom role with the {missing} permission, by "
                "visiting https://console.developers.google.com/iam-admin/iam/project?project=lab-project and then "
                "retry. Propagation of the new permission may take a few minutes."
            )
            info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "USER_PROJECT_DENIED"}
            body = {"error": {"code": 403, "message": text, "status": "PERMISSION_DENIED", "details": [info]}}
            raise Refused(403, body)

    def _skus(self, request: Request) -> Any:
        if wrong := self.document.wrong_request("GET", request.path, request.query, request.body or None):
            text = "\n".join(map(str, wrong))
            raise Refused(400, {"error": {"code": 400, "message": text, "status": "INVALID_ARGUMENT"}})
        if request.query.get("currencyCode") not in ("USD", None) or "authorization" in request.headers:
            raise Refused(400, {"error": {"code": 400, "message": "this lab has dollars, and no keys", "status": "…"}})
        service = request.by["service"]
        listed = [
            each
            for each in _all(self.dearer, tuple(self.changed.items()))
            if each["name"].startswith(f"services/{service}/")
        ]
        first = int(request.query.get("pageToken") or 0)
        last = first + min(self.page, int(request.query.get("pageSize") or 5000))
        page = {"skus": listed[first:last], "nextPageToken": str(last) if last < len(listed) else ""}
        if wrong := self.document.wrong_reply("GET", request.path, page):
            raise AssertionError(f"the lab's page of prices is not Google's: {wrong[:3]}")
        return page


@functools.cache
def _all(dearer: float, changed: tuple[tuple[str, float], ...]) -> list[dict[str, Any]]:
    """What the catalogue lists, so many times as dear as it was, some rows besides."""
    rows = list(csv.DictReader(RATES.read_text().splitlines()))
    everywhere = sorted({region for row in rows for region in row["regions"].split()})
    listed = [_sku(words, group, usage, unit, everywhere, 99.0) for words, group, usage, unit in JUNK]
    for row in rows:
        regions, place = row["regions"].split(), CITIES.get(row["regions"], "Americas")
        for market in ("on_demand", "spot"):
            if row[market]:
                words, group, usage, unit = _told(row["sku"], place, market == "spot")
                usd = float(row[market]) * dearer * dict(changed).get(row["sku"], 1.0)
                listed.append(_sku(words, group, usage, unit, regions, usd))
    return listed


def _sku(words: str, group: str, usage: str, unit: str, regions: list[str], usd: float) -> dict[str, Any]:
    service = TPU if words.startswith(("Tpu-", "Preemptible Tpu-")) else COMPUTE
    nanos = round(usd * 1e9)
    price = {"currencyCode": "USD", "units": str(nanos // 10**9), "nanos": nanos % 10**9}
    free = {"startUsageAmount": 0, "unitPrice": {"currencyCode": "USD", "units": "0", "nanos": 0}}
    rate = {"startUsageAmount": 1 if group == "LocalSSD" else 0, "unitPrice": price}
    tiers = [free, rate] if group == "LocalSSD" else [rate]
    how = {"usageUnit": unit, "displayQuantity": 1, "tieredRates": tiers, "baseUnit": "s"}
    old = {**how, "tieredRates": [{**rate, "unitPrice": {**price, "units": "98"}}]}
    timeline = [("2020-01-01T00:00:00Z", old), ("2026-11-01T00:00:00Z", how)]
    return {
        "name": f"services/{service}/skus/{abs(hash((words, *regions))):016X}", "description": words,
        "category": {
            "serviceDisplayName": "Compute Engine", "resourceFamily": "Compute", "resourceGroup": group,
            "usageType": usage,
        },
        "serviceRegions": regions, "serviceProviderName": "Google",
        "pricingInfo": [{"effectiveTime": at, "pricingExpression": each} for at, each in timeline],
        "geoTaxonomy": {"type": "REGIONAL" if len(regions) == 1 else "MULTI_REGIONAL", "regions": regions},
    }  # fmt: skip


def _told(what: str, place: str, spot: bool) -> tuple[str, str, str, str]:
    """How the catalogue says it: words, resource group, usage type and unit."""
    usage, running = "Preemptible" if spot else "OnDemand", f"running in {place}"
    if "Instance" in what:
        group = "N1Standard" if what.startswith("N1") else what.split()[-1].upper().replace("CORE", "CPU")
        return f"{'Spot Preemptible ' * spot}{what} {running}", group, usage, "GiBy.h" if what.endswith("Ram") else "h"
    attached = " attached to Spot Preemptible VMs" * spot
    if "Storage" in what:
        return f"{what}{attached}", "LocalSSD", usage, "GiBy.mo"
    if "slice" in what:
        return f"{'Spot Preemptible ' * spot}{what} {running}", "GPU", "OnDemand", "h"
    if what.startswith("Tpu-"):
        return f"{'Preemptible ' * spot}{what} USA", "TPU", "OnDemand", "h"
    return f"{what}{attached} {running}", "TPU" if what.upper().startswith("TPU") else "GPU", usage, "h"
