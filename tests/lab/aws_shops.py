"""The services beside EC2 that a driver asks: parameters that name AMIs, prices, quotas. All speak JSON."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tests.lab import aws_facts
from tests.lab.aws_facts import IMAGES, PRICING_REGIONS, QUOTAS, Quota
from tests.lab.aws_wire import ApiError, Call

if TYPE_CHECKING:
    from tests.lab.aws import AWS

PUBLISHED = 1794700800.0
"""When the AMIs of these parameters came out: mid-November 2026."""
PUBLIC = "/aws/service/"


# --- Systems Manager -----------------------------------------------------------------------------------------


def get_parameter(world: AWS, call: Call) -> Mapping[str, Any]:
    found = _parameter(call.region, call.params["Name"])
    if found is None:
        raise ApiError("ParameterNotFound", f"Parameter {call.params['Name']} not found.")
    return {"Parameter": found}


def get_parameters(world: AWS, call: Call) -> Mapping[str, Any]:
    names = call.params["Names"]
    if not 1 <= len(names) <= 10:
        raise ApiError("ValidationException", "Member must have length less than or equal to 10")
    found = {name: _parameter(call.region, name) for name in names}
    return {
        "Parameters": [each for each in found.values() if each],
        "InvalidParameters": [name for name, each in found.items() if not each],
    }


def get_parameters_by_path(world: AWS, call: Call) -> Mapping[str, Any]:
    """Ten a page, as the real one."""
    path = call.params["Path"].rstrip("/") + "/"
    names = [name for name in sorted(IMAGES) if name.startswith(path)]
    if not call.params.get("Recursive"):
        names = [name for name in names if "/" not in name.removeprefix(path)]
    start, size = int(call.params.get("NextToken") or 0), int(call.params.get("MaxResults") or 10)
    found: dict[str, Any] = {"Parameters": [_parameter(call.region, name) for name in names[start : start + size]]}
    return found | ({"NextToken": str(start + size)} if start + size < len(names) else {})


def is_public(call: Call) -> bool:
    """Whether a call is about parameters that AWS publishes; others are moto's."""
    names = [call.params.get("Name", ""), call.params.get("Path", ""), *call.params.get("Names", ())]
    return any(name.startswith(PUBLIC) for name in names)


def _parameter(region: str, name: str) -> dict[str, Any] | None:
    image = IMAGES.get(name)
    if image is None:
        return None
    return {
        "Name": name, "Type": "String", "Value": image.id(region), "Version": 42, "LastModifiedDate": PUBLISHED,
        "ARN": f"arn:aws:ssm:{region}::parameter{name}", "DataType": "aws:ec2:image",
    }  # fmt: skip


# --- prices --------------------------------------------------------------------------------------------------


def get_products(world: AWS, call: Call) -> Mapping[str, Any]:
    """Products as JSON in strings; beside the plain on-demand row of a type stand those that nobody wants."""
    if call.region not in PRICING_REGIONS:
        text = f"There is no pricing endpoint in {call.region}: it is in {', '.join(PRICING_REGIONS)}."
        raise ApiError("UnrecognizedClientException", text)
    if call.params.get("ServiceCode") not in ("AmazonEC2", "AmazonVPC"):
        raise ApiError("NotFoundException", "The lab's price list has AmazonEC2 and AmazonVPC alone.")
    wanted = frozenset((each["Field"], each["Value"]) for each in call.params.get("Filters", ()))
    if any(each.get("Type", "TERM_MATCH") != "TERM_MATCH" for each in call.params.get("Filters", ())):
        raise ApiError("InvalidParameterException", "The lab's price list knows TERM_MATCH alone.")
    service = call.params["ServiceCode"]
    products = [*_usual(service, wanted), *_found(_extras(world), service, wanted)]
    token, size = call.params.get("NextToken") or "", int(call.params.get("MaxResults") or 100)
    if not 1 <= size <= 100:
        raise ApiError("InvalidParameterException", "maxResults must be between 1 and 100")
    start = int(base64.b64decode(token)) if token else 0
    found: dict[str, Any] = {
        "FormatVersion": "aws_v1",
        "PriceList": [json.dumps(product) for product in products[start : start + size]],
    }
    if start + size < len(products):
        found["NextToken"] = base64.b64encode(str(start + size).encode()).decode()
    return found


@functools.cache
def _usual(service: str, wanted: frozenset[tuple[str, str]]) -> list[dict[str, Any]]:
    """Products that are the same in every world: every client asks for them in the same words."""
    return _found(_products(), service, wanted)


def _found(
    products: Iterable[dict[str, Any]], service: str, wanted: frozenset[tuple[str, str]]
) -> list[dict[str, Any]]:
    return [
        each
        for each in products
        if each["serviceCode"] == service and all(_attribute(each["product"], name) == value for name, value in wanted)
    ]


def _attribute(product: Mapping[str, Any], name: str) -> Any:
    """By which a product is found; its family is beside its attributes."""
    return product[name] if name == "productFamily" else product["attributes"].get(name)


def _extras(world: AWS) -> list[dict[str, Any]]:
    """Disks of kind gp3 and public addresses of each region, and rows beside these that mean something else.

    As https://github.com/mattrobinsonsre/terrapod/issues/973 read the offer AmazonVPC on 2026-07-22: its addresses have
    no productFamily, and are found by their group. That gp3 has the family Storage, volumeApiName and the unit GB-Mo
    is how those who ask the price list find it.
    """
    found = []
    for region, usd in world.stock.disks.items():
        disk = {"volumeApiName": "gp3", "regionCode": region, "locationType": "AWS Region"}
        found += [
            _row("AmazonEC2", "Storage", usd, "GB-Mo", {**disk, "usagetype": f"{region}-EBS:VolumeUsage.gp3"}),
            _row("AmazonEC2", "System Operation", 0.005, "IOPS-Mo", {**disk, "usagetype": "EBS:VolumeP-IOPS.gp3"}),
        ]
        address = {"group": "VPCPublicIPv4Address", "regionCode": region}
        for kind, rate in (("InUseAddress", world.stock.address), ("IdleAddress", 0.005), ("ContiguousBlock", 0.008)):
            found.append(_row("AmazonVPC", "", rate, "Hrs", {**address, "usagetype": f"{region}-PublicIPv4:{kind}"}))
    return found


@functools.cache
def _products() -> list[dict[str, Any]]:
    pairs = sorted({(row.type, row.region) for row in aws_facts.prices() if row.on_demand})
    return [product for kind, region in pairs for product in _variants(kind, region)]


def _variants(kind: str, region: str) -> list[dict[str, Any]]:
    price = aws_facts.on_demand_price(region, kind) or 0.0
    found = [
        _product(kind, region, price),
        _product(kind, region, price * 1.4, operatingSystem="Windows"),
        _product(kind, region, price * 1.06, tenancy="Dedicated"),
        _product(kind, region, price * 3, preInstalledSw="SQL Web"),
        _product(kind, region, price, capacitystatus="UnusedCapacityReservation"),
        _product(kind, region, 0.0, capacitystatus="AllocatedCapacityReservation"),
    ]
    record = aws_facts.instance_type(kind) or {}
    if "capacity-block" in record.get("SupportedUsageClasses", ()):
        found.append(_product(kind, region, 0.0, marketoption="CapacityBlock"))
    return found


def _product(kind: str, region: str, price: float, **changes: str) -> dict[str, Any]:
    attributes = {
        "servicecode": "AmazonEC2", "servicename": "Amazon Elastic Compute Cloud", "instanceType": kind,
        "regionCode": region, "location": region, "locationType": "AWS Region", "operatingSystem": "Linux",
        "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used", "marketoption": "OnDemand",
        "licenseModel": "No License required", "usagetype": f"BoxUsage:{kind}", "operation": "RunInstances",
        "currentGeneration": "Yes", **_size(kind), **changes,
    }  # fmt: skip
    said = f"${price:g} per {attributes['operatingSystem']} {kind} Instance Hour"
    return _row("AmazonEC2", "Compute Instance", price, "Hrs", attributes, said)


def _row(
    service: str, family: str, price: float, unit: str, attributes: dict[str, str], said: str = ""
) -> dict[str, Any]:
    sku = hashlib.sha256(repr(attributes).encode()).hexdigest()[:16].upper()
    term, rate = f"{sku}.JRTCKXETXF", f"{sku}.JRTCKXETXF.6YS6EN2CT7"
    dimension = {
        "unit": unit, "endRange": "Inf", "beginRange": "0", "appliesTo": [], "description": said, "rateCode": rate,
        "pricePerUnit": {"USD": f"{price:.10f}"},
    }  # fmt: skip
    offer = {"sku": sku, "offerTermCode": "JRTCKXETXF", "termAttributes": {}, "effectiveDate": "2026-11-01T00:00:00Z",
             "priceDimensions": {rate: dimension}}  # fmt: skip
    return {
        "product": {"productFamily": family, "attributes": attributes, "sku": sku},
        "serviceCode": service, "terms": {"OnDemand": {term: offer}}, "version": "20261118000000",
        "publicationDate": "2026-11-18T00:00:00Z",
    }  # fmt: skip


def _size(kind: str) -> dict[str, str]:
    record = aws_facts.instance_type(kind)
    if record is None:  # withdrawn since
        return {}
    gpus = (record.get("GpuInfo") or {}).get("Gpus", ())
    size = {
        "vcpu": str(record["VCpuInfo"]["DefaultVCpus"]), "memory": f"{record['MemoryInfo']['SizeInMiB'] / 1024:g} GiB",
    }  # fmt: skip
    return size | ({"gpu": str(sum(each["Count"] for each in gpus))} if gpus else {})


# --- quotas --------------------------------------------------------------------------------------------------


def get_service_quota(world: AWS, call: Call) -> Mapping[str, Any]:
    found = QUOTAS.get(call.params["QuotaCode"])
    if call.params["ServiceCode"] != "ec2" or found is None:
        raise ApiError("NoSuchResourceException", "The request failed because the specified resource does not exist.")
    return {"Quota": _quota(world, call, found)}


def list_service_quotas(world: AWS, call: Call) -> Mapping[str, Any]:
    if call.params["ServiceCode"] != "ec2":
        raise ApiError("NoSuchResourceException", "The request failed because the specified service does not exist.")
    return {"Quotas": [_quota(world, call, each) for each in QUOTAS.values()]}


def _quota(world: AWS, call: Call, quota: Quota) -> dict[str, Any]:
    return {
        "ServiceCode": "ec2", "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)", "QuotaCode": quota.code,
        "QuotaArn": f"arn:aws:servicequotas:{call.region}:123456789012:ec2/{quota.code}", "QuotaName": quota.name,
        "Value": float(world.stock.quota(call.region, quota.family, quota.market)), "Unit": "None", "Adjustable": True,
        "GlobalQuota": False,
    }  # fmt: skip


ANSWERS: Mapping[tuple[str, str], Callable[[AWS, Call], Mapping[str, Any]]] = {
    ("ssm", "GetParameter"): get_parameter,
    ("ssm", "GetParameters"): get_parameters,
    ("ssm", "GetParametersByPath"): get_parameters_by_path,
    ("pricing", "GetProducts"): get_products,
    ("servicequotas", "GetServiceQuota"): get_service_quota,
    ("servicequotas", "GetAWSDefaultServiceQuota"): get_service_quota,
    ("servicequotas", "ListServiceQuotas"): list_service_quotas,
}
