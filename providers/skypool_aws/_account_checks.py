"""Checks an AWS account for `skypool doctor` and `skypool prove`, and sends launches that EC2 must refuse.

Permissions are tested by dry runs: EC2 checks the real request of a pool, and does not execute it
(https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html, parameter DryRun, read 2026-11-24).
"""
# pyright: reportTypedDictNotRequiredAccess=false
# The stubs of boto3 mark every field of an answer as one that may be missing.

from __future__ import annotations

import json
import re
import secrets
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from skypool.drivers import preflight, tags
from skypool.drivers.retry import at_once
from skypool.errors import (
    AccessError,
    CredentialsError,
    NoAnswer,
    ProviderError,
    RateLimitError,
    SkypoolError,
)
from skypool.model import Bill, Finding, Instance, Leftover, Market, Need, Offer, Order
from skypool_aws import _api, _boot_images, _catalog, _requests

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import InstanceTypeDef, SubnetTypeDef

_DENIALS = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException")
"""AWS's error codes for a missing permission."""

_NO_IMAGE = ("InvalidAMIID.NotFound", "InvalidAMIID.Unavailable", "ParameterNotFound")
"""AWS's error codes for an image that a region does not have."""

_PRECISION = 1e-6
"""Two prices count as equal if they differ by at most this number of USD."""

_NEEDED = timedelta(minutes=10)
"""Time after which `skypool gc` may end an instance that EC2 launched unexpectedly."""

_MARKETS: tuple[Market, ...] = ("on-demand", "spot")

_UPGRADE = "upgrade skypool: `pip install --upgrade skypool`"


@dataclass(frozen=True)
class Account:
    """The settings and functions of the driver that the checks use.

    Attributes:
        profile: a profile of the AWS configuration; None leaves the choice to boto3.
        region: the region in which permissions and quotas are checked.
        chooses_regions: True if the settings name regions, so that no other regions are checked.
        base: the image that the settings name; "" for none.
        ssh_from: the networks of the settings that may log in; None for this computer's address.
        client: returns the client for EC2 in a region.
        regions: returns the names of the regions that the settings allow.
        subnets: returns EC2's records of the subnets in which machines may be placed.
        launch: called with an offer and an order. It returns the launch request, without key pair, security group and
            placement group.
        reserved: returns the offer of the capacity reservation in the settings; None if the settings have none.
        listed: returns the machines and the leftovers of the user's pools in a region.
        terminate: terminates the instances of these records, and returns when they have ended.
    """

    profile: str | None
    region: str
    chooses_regions: bool
    base: str
    ssh_from: Sequence[str] | None
    client: Callable[[str], EC2Client]
    regions: Callable[[], list[str]]
    subnets: Callable[[EC2Client], list[SubnetTypeDef]]
    launch: Callable[[Offer, Order], _requests.InstanceRequest]
    reserved: Callable[[], Offer | None]
    listed: Callable[[str], tuple[list[Instance], list[Leftover]]]
    terminate: Callable[[Sequence[InstanceTypeDef]], None]


# --- level "read" --------------------------------------------------------------------------------------------


def check(account: Account) -> Iterator[Finding]:
    """Check an account, and yield the findings. Nothing is rented or changed. Does not raise.

    Without valid credentials, only the findings about this computer and the credentials are yielded. If the check of
    the clock fails as well, only one of these two findings is yielded. It is that of the clock if the time is wrong,
    because AWS then refuses valid credentials, too.
    """
    found = {each.what: each for each in preflight.findings(_basics(account))}
    is_known = found["credentials"].good
    if not is_known and not found["clock"].good:
        is_clock_right = found["clock"].advice == found["credentials"].advice  # both failed for the same reason
        del found["clock" if is_clock_right else "credentials"]
    yield from found.values()
    if is_known:
        yield from _told(_questions(account), account.region)


def _basics(account: Account) -> dict[str, Callable[[], object]]:
    """Return the checks of this computer, the credentials and the clock, as input for `preflight.findings`."""
    return preflight.basics(
        lambda: _requests.identity(_api.sts(account.profile, account.region)),
        lambda: _requests.clock(account.client(account.region)),
        account.ssh_from,
    )


@dataclass(frozen=True)
class _Failed:
    """A check that failed: the title of its finding, and the error."""

    what: str
    error: Exception


_Question = Callable[[], Iterable[Finding | _Failed]]
"""A check with several results. If it raises, the error is its only result."""


def _questions(account: Account) -> dict[str, _Question]:
    """Return a dict from title to check, for checks that need valid credentials. A check that raises gets the title."""
    region = account.region
    questions: dict[str, _Question] = {
        f"pools in {region}": partial(_pools, account),
        f"instances in {region}": partial(_dry_runs, account),
        f"keys, groups and addresses in {region}": partial(_creates, account),
        "images and instance types": partial(_sold, account),
        "prices of disks and addresses": partial(_extras, account),
    }
    questions[f"quotas in {region}"] = partial(_quotas, account)
    return questions


def _told(questions: Mapping[str, _Question], region: str) -> Iterator[Finding]:
    """Run the checks `questions` in parallel, and yield their findings. Failures with one cause become one finding."""
    denied: dict[str, Exception] = {}
    failed: dict[str, list[_Failed]] = {}
    for title, outcome in zip(questions, at_once(lambda ask: list(ask()), questions.values()), strict=True):
        for each in [_Failed(title, outcome)] if isinstance(outcome, Exception) else outcome:
            if isinstance(each, Finding):
                yield each
            elif permission := _permission(each.error):
                denied.setdefault(permission, each.error)
            else:
                failed.setdefault(str(each.error), []).append(each)
    yield _permissions(denied, region)
    for several in failed.values():
        yield preflight.failure(", ".join(dict.fromkeys(each.what for each in several)), several[0].error)


def _permission(error: Exception) -> str:
    """Return the permission that an error says is missing, such as "ec2:RunInstances"; "" for other errors."""
    if not isinstance(error, ProviderError) or error.code not in _DENIALS:
        return ""
    named = re.search(r"not authorized to perform: (\S+)", error.text)
    return named[1] if named else error.text


def _permissions(denied: Mapping[str, Exception], region: str) -> Finding:
    """Return the finding about all permissions. `denied` is a dict from each missing permission to AWS's error."""
    title = f"permissions in {region}"
    if not denied:
        return Finding(title, True, "dry runs of all requests are allowed")
    first, *others = denied
    finding = preflight.failure(title, denied[first])
    return replace(finding, text=f"{finding.text}; also missing: {', '.join(others)}") if others else finding


# --- permissions ---------------------------------------------------------------------------------------------


def _pools(account: Account) -> Iterator[Finding]:
    """Count what the user's pools have in the region. This tests the permissions that `skypool gc` needs to search."""
    instances, leftovers = account.listed(account.region)
    yield Finding(f"pools in {account.region}", True, f"{len(instances)} machines, {len(leftovers)} leftovers")


def _creates(account: Account) -> Iterator[Finding | _Failed]:
    """Test by dry runs if key pairs, groups and addresses could be made for a pool. Yield only what failed."""
    ec2 = account.client(account.region)
    said = tags.tags(_order(Need()))
    asks: dict[str, Callable[[], None]] = {
        "key pairs": lambda: _requests.may_import_keys(ec2, said),
        "security groups": lambda: _requests.may_create_security_groups(ec2, account.subnets(ec2)[0]["VpcId"], said),
        "placement groups": lambda: _requests.may_create_placement_groups(ec2, said),
        "Elastic IP addresses": lambda: _requests.may_allocate_addresses(ec2, said),
    }
    for what, outcome in zip(asks, at_once(lambda ask: ask(), asks.values()), strict=True):
        if isinstance(outcome, Exception):
            yield _Failed(f"{what} in {account.region}", outcome)


def _dry_runs(account: Account) -> Iterator[Finding | _Failed]:
    """Test a launch for each quota and market by a dry run. Yield each failure, and a finding for all successes."""
    ec2 = account.client(account.region)
    offers = dict(_smallest(account, ec2))

    def may_launch(offer: Offer) -> None:
        # without key pair and groups, which do not exist before a pool makes them
        _requests.may_run_instances(ec2, account.launch(offer, _order(Need(market=offer.market))))

    allowed: dict[str, list[str]] = {}
    for (family, market), outcome in zip(offers, at_once(may_launch, offers.values()), strict=True):
        if isinstance(outcome, Exception):
            yield _Failed(f"{family} {market} in {account.region}", outcome)
        else:
            allowed.setdefault(market, []).append(family)
    if allowed:
        text = "; ".join(f"{market}: {', '.join(families)}" for market, families in allowed.items())
        yield Finding(f"instances in {account.region}", True, f"dry runs are allowed ({text})")


def _smallest(account: Account, ec2: EC2Client) -> Iterator[tuple[tuple[str, Market], Offer]]:
    """Yield ((name of the quota, market), offer of its smallest type) for each quota; or for the reservation only."""
    if (held := account.reserved()) is not None:
        yield ("the reservation", "on-demand"), held
        return
    arch = (
        _requests.image(ec2, _image(account, account.region, account.base))["Architecture"]
        if _names_image(account)
        else ""
    )
    records = _requests.instance_types(ec2, [*_catalog.accelerated(), *_catalog.patterns(Need())])
    kinds = {offer.instance_type: offer for offer in map(_catalog.kind, records) if _is_offered(account, offer)}
    zones: dict[str, str] = {}
    for row in _requests.offerings(ec2, [*kinds], [subnet["AvailabilityZone"] for subnet in account.subnets(ec2)]):
        zones.setdefault(row["InstanceType"], row["Location"])
    for market in _MARKETS:
        limits: dict[str, list[Offer]] = {}
        for name in zones:
            offer = kinds[name]
            if market in offer.detail["sold"] and arch in ("", offer.arch):
                limits.setdefault(_catalog.spot_quota(offer) if market == "spot" else offer.quota, []).append(offer)
        for limit in filter(limits.get, _limits(market)):
            least = min(limits[limit], key=_size)
            place = zones[least.instance_type]
            yield (limit, market), replace(least, region=account.region, zone=place, market=market)


def _limits(market: Market) -> list[str]:
    """Return the names of the quotas of a market, in the order of `_catalog.QUOTAS`."""
    if market == "spot":
        return [each.name for quota in _catalog.QUOTAS for each in quota.spot]
    return [each.name for each in _catalog.QUOTAS]


def _size(offer: Offer) -> tuple[float, str]:
    """Return a sort key: the offer's vCPUs, then the name of its instance type."""
    return offer.vcpus or 0.0, offer.instance_type


def _names_image(account: Account) -> bool:
    """Return True if the settings name one image, not an Ubuntu release, which has one for each architecture."""
    return account.base.startswith(("ami-", "/"))


def _is_offered(account: Account, offer: Offer) -> bool:
    """Return True if the driver could offer this instance type: skypool knows its accelerator, or it has none."""
    if _catalog.needs_grid_driver(offer.instance_type) and not account.base:
        return False
    return offer.accelerator is not None or offer.quota == _catalog.PLAIN


def _image(account: Account, region: str, name: str) -> str:
    """Return the id of an AMI. `name` is the id itself, or an SSM parameter. Raise ProviderError if it is missing."""
    if name.startswith("ami-"):
        return str(_requests.image(account.client(region), name)["ImageId"])
    return _requests.image_parameter(_api.ssm(account.profile, region), name)


def _order(need: Need) -> Order:
    """Return an order of one machine, for requests that must not or cannot succeed."""
    token = f"{secrets.token_hex(8)}-1"
    return Order(_requests.TRIAL_NAME, token, (0,), need, until=datetime.now(UTC) + _NEEDED)


def _quotas(account: Account) -> Iterator[Finding | _Failed]:
    """Yield a finding about the limits of each quota. If all limits are 0, also yield a failure."""
    outcomes = at_once(partial(_limits_of, account), _catalog.QUOTAS)
    nothing = all(isinstance(each, tuple) and not any(each[1:]) for each in outcomes)
    for quota, outcome in zip(_catalog.QUOTAS, outcomes, strict=True):
        title = f"quota of {quota.name} in {account.region}"
        if isinstance(outcome, Exception):
            yield _Failed(title, outcome)
            continue
        text, on_demand, spot = outcome
        refused = _api.REFUSALS.error(title, "VcpuLimitExceeded", text, region=account.region)
        # most accounts have a quota of 0 for machines that they do not use
        advice = "" if on_demand or spot else preflight.failure(title, refused).advice
        yield Finding(title, True, text, advice and f"to rent these, {advice}", open=bool(advice))
    if nothing:
        what, text = f"quotas in {account.region}", "all limits are 0, so nothing can be rented"
        yield _Failed(what, _api.REFUSALS.error(what, "VcpuLimitExceeded", text, region=account.region))


def _limits_of(account: Account, quota: _catalog.Quota) -> tuple[str, float, float]:
    """Return (text with all limits of a quota, its limit on demand, its largest limit for spot), in vCPUs."""
    quotas = _api.service_quotas(account.profile, account.region)
    on_demand = _requests.quota(quotas, quota.on_demand)
    codes = list(dict.fromkeys(code for each in quota.spot for code in each.codes))
    limits = dict(zip(codes, (_requests.quota(quotas, code) for code in codes), strict=True))
    told = []
    for each in quota.spot:
        values = " or ".join(dict.fromkeys(f"{limits[code]:g}" for code in each.codes))
        of = f" for {each.name}" if len(quota.spot) > 1 else ""
        unsure = f" (AWS does not say which quota counts: {' or '.join(each.codes)})" if len(each.codes) > 1 else ""
        told.append(f"{values}{of}{unsure}")
    return f"{on_demand:g} vCPUs at once on demand; as spot: {', '.join(told)}", on_demand, max(limits.values())


# --- images, types and prices --------------------------------------------------------------------------------


def _sold(account: Account) -> Iterator[Finding | _Failed]:
    """Yield the findings about images and instance types in all regions that the settings allow."""
    regions = account.regions()
    types: dict[str, set[str]] = {}
    for region, outcome in zip(regions, at_once(partial(_types, account), regions), strict=True):
        if isinstance(outcome, Exception):
            yield _Failed("instance types", outcome)
        else:
            types[region] = outcome
    yield from _images(account, types)
    if len(types) == len(regions):
        yield _drift(set().union(*types.values()), len(regions), complete=not account.chooses_regions)


def _types(account: Account, region: str) -> set[str]:
    """Return the names of the instance types that a region sells, in the families with accelerators."""
    return set(_requests.types_in_region(account.client(region), _catalog.accelerated()))


def _images(account: Account, types: Mapping[str, Iterable[str]]) -> Iterator[Finding | _Failed]:
    """Yield a finding for each image from which the types start: does it exist? `types`: names by region."""
    pairs = [(region, name) for region, names in types.items() for name in _boot_images.images_of(names, account.base)]
    missing: dict[str, list[str]] = {name: [] for _, name in pairs}
    outcomes = at_once(lambda pair: _image(account, *pair), pairs)
    for (region, name), outcome in zip(pairs, outcomes, strict=True):
        if isinstance(outcome, ProviderError) and outcome.code in _NO_IMAGE:
            missing[name].append(region)
        elif isinstance(outcome, Exception):
            yield _Failed(f"image {name}", outcome)
    for name, lacking in missing.items():
        regions = [region for region, each in pairs if each == name]
        if lacking:
            text = f"missing in {', '.join(lacking)}, where AWS sells instance types that start from it"
            advice = "name another image with ami= or an Image's base=, or take another region"
            yield Finding(f"image {name}", False, text, advice)
        else:
            yield Finding(f"image {name}", True, _counted(regions))


def _counted(regions: Sequence[str]) -> str:
    """Return the region's name if there is only one, or else a text such as "3 regions"."""
    return regions[0] if len(regions) == 1 else f"{len(regions)} regions"


def _drift(sold: set[str], regions: int, *, complete: bool) -> Finding:
    """Return a finding that compares AWS's types with skypool's tables. `complete`: all regions were asked."""
    known = _catalog.known_types()
    text = f"AWS sells {len(sold)} in {regions} {'region' if regions == 1 else 'regions'}"
    new, gone = _short(sold - known, sold), _short(known - sold, known) if complete else ""
    if new:
        text += f"; skypool does not know {new}"
    if gone:
        text += f"; none of these regions sells {gone} any more"
    return Finding("instance types with accelerators", True, text, _UPGRADE if new else "")


def _short(names: set[str], among: set[str]) -> str:
    """Return names of types as text. A family such as "p5" stands for its types if `among` has no other of it."""
    families: dict[str, list[str]] = {}
    for name in sorted(names):
        families.setdefault(name.partition(".")[0], []).append(name)
    others = {name.partition(".")[0] for name in among - names}
    return ", ".join(each for family, some in families.items() for each in (some if family in others else [family]))


def _extras(account: Account) -> Iterator[Finding]:
    """Yield the finding that compares AWS's prices of disks and addresses with skypool's. It is always good."""
    pricing = _api.pricing(account.profile)
    regions = set(account.regions())
    disks = _catalog.by_region(_requests.disk_prices(pricing), "EBS:VolumeUsage.gp3")
    addresses = _catalog.by_region(_requests.address_prices(pricing), "PublicIPv4:InUseAddress")
    known = _catalog.ADDRESS_USD_PER_HOUR
    differences = [
        f"a GB and month of disk in {region} costs {usd:g} USD, not {_catalog.disk_usd(region):g}"
        for region, usd in sorted(disks.items())
        if region in regions and abs(usd - _catalog.disk_usd(region)) > _PRECISION
    ] + [
        f"an hour of a public address in {region} costs {usd:g} USD, not {known:g}"
        for region, usd in sorted(addresses.items())
        if region in regions and abs(usd - known) > _PRECISION
    ]
    title = "prices of disks and addresses"
    if differences:
        text = f"AWS's price list differs from skypool's tables: {', '.join(differences)}"
        yield Finding(title, True, text, f"{_UPGRADE}; until then, offers are off by that")
    else:
        yield Finding(title, True, "AWS's price list and skypool's tables agree")


# --- level "write" -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Impossible:
    """A launch that EC2 must refuse: with the error `code`, and a text that names `named`, which does not exist."""

    what: str
    request: _requests.InstanceRequest
    code: str
    named: str


def refusals(account: Account) -> Iterator[Finding]:
    """Send launches that EC2 must refuse, in parallel, and yield a finding for each. Does not raise.

    At the same time, dry runs test possible launches. An instance that EC2 launches anyway is terminated.
    """
    questions: dict[str, _Question] = {f"instances in {account.region}": partial(_dry_runs, account)}
    try:
        impossible = _impossible(account)
    except SkypoolError as e:
        questions["launches that must be refused"] = partial(_raise, e)
    else:
        questions |= {each.what: partial(_refused, account, each) for each in impossible}
    yield from _told(questions, account.region)


def _impossible(account: Account) -> list[_Impossible]:
    """Return launches of the smallest machine that EC2 must refuse. In each, one thing does not exist."""
    ec2 = account.client(account.region)
    offers = [offer for (_, market), offer in _smallest(account, ec2) if market == "on-demand"]
    if not offers:
        raise ProviderError(
            f"AWS sells no instance type for the image {account.base} in {account.region}; take another region",
            provider="aws",
        )
    least = min(offers, key=_size)

    def launch() -> _requests.InstanceRequest:
        return account.launch(least, _order(Need()))

    # too low a spot price is not tried, because even dry runs do not check the price
    kind, name = "p99.skypool", f"{_requests.TRIAL_NAME}-{secrets.token_hex(4)}"
    image, subnet, group = (f"{each}-{'0' * 17}" for each in ("ami", "subnet", "sg"))
    return [
        _Impossible("an unknown instance type", replace(launch(), instance_type=kind), "InvalidParameterValue", kind),
        _Impossible("an unknown image", replace(launch(), ami=image), "InvalidAMIID.NotFound", image),
        _Impossible("an unknown subnet", replace(launch(), subnet=subnet), "InvalidSubnetID.NotFound", subnet),
        _Impossible("an unknown key pair", replace(launch(), key_name=name), "InvalidKeyPair.NotFound", name),
        _Impossible(
            "an unknown security group", replace(launch(), security_group=group), "InvalidGroup.NotFound", group
        ),
        _Impossible(
            "an unknown placement group",
            replace(launch(), placement_group=name),
            "InvalidPlacementGroup.Unknown",
            name,
        ),
    ]


def _refused(account: Account, launch: _Impossible) -> Iterator[Finding]:
    """Send a launch that EC2 must refuse, and yield a finding. Raise ProviderError if the answer is not as expected."""
    try:
        made = _requests.run_instances(account.client(account.region), launch.request)
    except ProviderError as e:
        if type(e) is ProviderError and e.code == launch.code and launch.named in e.text:
            yield Finding(f"{launch.what} is refused", True, f"{e.text.strip()} ({e.code})")
            return
        if isinstance(e, (AccessError, CredentialsError, NoAnswer, RateLimitError)):
            raise
        raise ProviderError(
            f"{e.text.strip()} ({e.code}), raised as {type(e).__name__}, but skypool expects {launch.code} as "
            f"ProviderError, with a text that names {launch.named}; report this message to skypool's authors",
            provider="aws",
            code=e.code,
        ) from e
    account.terminate(made)
    ids = ", ".join(each["InstanceId"] for each in made)
    raise ProviderError(
        f"AWS launched {ids} in {account.region}, which should be impossible; skypool has terminated it; "
        "report this message to skypool's authors",
        provider="aws",
    )


def _raise(error: Exception) -> Iterator[Finding]:
    raise error


# --- the bill ------------------------------------------------------------------------------------------------


def bill(profile: str | None, instances: Sequence[str], since: datetime, until: datetime) -> Bill:
    """Return where AWS shows the cost of instances. The sum is always None, and no request is sent.

    AWS shows costs in Cost Explorer only, and updates these up to three times a day
    (https://docs.aws.amazon.com/cost-management/latest/userguide/ce-api-best-practices.html). Costs of single instances
    are shown for 14 days, if the account's owner has switched that on
    (https://docs.aws.amazon.com/aws-cost-management/latest/APIReference/API_GetCostAndUsageWithResources.html). Each
    request costs 0.01 USD (https://aws.amazon.com/aws-cost-management/aws-cost-explorer/faqs). All read 2026-11-24.

    Args:
        profile: a profile of the AWS configuration; None leaves the choice to boto3.
        instances: the ids of the instances.
        since: a time before the first instance was launched.
        until: a time after the last instance had ended.
    """
    days = {
        "Start": f"{since.astimezone(UTC):%Y-%m-%d}",
        "End": f"{until.astimezone(UTC) + timedelta(days=1):%Y-%m-%d}",
    }
    command = [
        "aws", "ce", "get-cost-and-usage-with-resources", "--region", "us-east-1",
        "--time-period", ",".join(f"{name}={day}" for name, day in days.items()),
        "--granularity", "DAILY", "--metrics", "UnblendedCost",
        "--filter", json.dumps({"Dimensions": {"Key": "RESOURCE_ID", "Values": list(instances)}}),
        "--group-by", "Type=DIMENSION,Key=RESOURCE_ID",
    ]  # fmt: skip
    if profile is not None:
        command += ["--profile", profile]
    return Bill(
        None,
        "AWS tells the cost of single instances hours later, and charges 0.01 USD for each request, so skypool does "
        "not ask. Switch on resource-level data at https://console.aws.amazon.com/costmanagement/home#/settings, and "
        f"run tomorrow, within 14 days: {shlex.join(command)}",
    )
