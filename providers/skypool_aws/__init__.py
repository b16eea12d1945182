"""AWS: EC2 instances, on demand and spot, billed by the second after the first minute.

API: https://docs.aws.amazon.com/AWSEC2/latest/APIReference (read 2026-11-21). Credentials: as boto3 finds them.
A machine that shuts itself down is terminated, and that ends its cost: it needs no credential for it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from typing import Any, ClassVar

from skypool.drivers import preflight, retry, settings, ssh_machine, tags, userdata
from skypool.drivers.contract import Abilities
from skypool.drivers.regional import Regional, chosen, everywhere
from skypool.errors import AccessError, CapacityError, NoAnswer, ProviderError, UsageError
from skypool.model import Access, Finding, Instance, Leftover, Need, Offer, Order
from skypool_aws import _api, _catalog
from skypool_aws._api import ask, insist

_FACTS, _QUESTIONS, _WATCH = _catalog.FACTS, _api.QUESTIONS, ssh_machine.watch(**_catalog.FACTS["watch"])
_SOON, _ADDRESS, _TIDYING = 12.0, 90.0, 180.0  # seconds for which AWS is asked
_YOUNG, _NEW = 60.0, 20.0  # seconds in which it may not know yet what it made: an instance, and what that needs


@settings.settings_named
@dataclass(frozen=True)
class AWS(Regional):
    """Rent from AWS.

    Args:
        region: such as "us-east-1", or several; None is every region that is enabled for the account.
        profile: of your AWS configuration; None leaves that to the SDK.
        subnet: of your own, or several; None is the default one of each zone.
        ami: what machines start from: an AMI with cloud-init, an SSM parameter that holds one, "ubuntu-22.04"; None is
            AWS's own for the accelerator. An Image's base= comes first. user: who logs in there.
        capacity_reservation: run in this one, a capacity block perhaps. Nothing is ever reserved or bought.
        ssh_from: networks that may reach port 22; None is this machine's public address alone.
    """

    region: str | Sequence[str] | None = None
    profile: str | None = None
    subnet: str | Sequence[str] | None = None
    ami: str | None = None
    user: str = "ubuntu"
    capacity_reservation: str | None = None
    ssh_from: str | Sequence[str] | None = None
    name: ClassVar[str] = "aws"
    abilities: ClassVar[Abilities] = Abilities(
        ends_itself=True,
        private_network=True,
        spot=True,
        trust="full",
        billed_from="running",  # docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-lifecycle.html, 2026-11-22
    )
    offers_keep: ClassVar[float] = 86400.0

    def __post_init__(self) -> None:
        settings.settle(self, _FACTS["settings"], {"region": _FACTS["gp3"]})
        of_one = self.subnet or self.capacity_reservation or (self.ami or "").startswith("ami-")
        if of_one and len(self.region or ()) != 1:
            raise UsageError("a subnet, an AMI or a reservation is of one region: say which, region='us-east-1'")

    def offers(self, need: Need) -> Iterable[Offer]:
        """Each type that could serve in each zone that has it."""
        regions = self._regions(need.regions) if _catalog.patterns(need) else []
        sold, shop = everywhere(partial(self._sold, need), regions, "offers"), self._client("pricing", "us-east-1")
        types = {each.instance_type for each in sold if not each.usd_per_hour}
        asked, whose = ("prices there", regions[0]) if len(regions) == 1 else ("prices", "")
        rows = everywhere(lambda type_: insist(_SOON, shop, asked, type=type_, region=whose), types, "prices")
        prices, image = dict(_catalog.on_demand(rows)), need.bases.get(self.name) or self.ami or ""
        for each in sold:
            usd = each.usd_per_hour or prices.get((each.region, each.instance_type), 0.0)
            if usd or each.detail["prepaid"]:
                extras = _catalog.extras(each.region, _catalog.base(image, each, need)[1])
                yield replace(each, usd_per_hour=(0.0 if each.detail["prepaid"] else usd) + extras)

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Asked once; who asks again with the same order gets the same machines."""
        run = partial(ask, self._client("ec2", offer.region, attempts=1), "run", **self._told(offer, order))
        ran = retry.soon(partial(retry.quietly, run, *_QUESTIONS["run"]["again"]), _NEW, 0.5) or run()
        made = [self._instance(offer.region, each) for each in ran]
        return sorted((replace(each, offer=offer) for each in made), key=lambda instance: instance.rank)

    def access(self, instance: Instance) -> Access:
        """ssh to its public address. Raises why AWS has ended it, if it has."""
        at, booting = self._address(instance), 1200.0 if ".metal" in instance.detail["type"] else 420.0
        return ssh_machine.access(instance, at, user=self.user, booting=booting, watch=_WATCH)

    def policy(self) -> str:
        return (files("skypool_aws") / "policy.json").read_text("utf-8")

    def check(self) -> Iterable[Finding]:
        """In one region: the first that was named, or the user's own."""
        ec2 = self._client("ec2", self.region[0] if self.region else "")
        region = ec2.meta.region_name
        identity, date = partial(ask, self._client("sts", region), "identity"), partial(ask, ec2, "clock")
        questions = preflight.basics(identity, lambda: date()["HTTPHeaders"]["date"], self.ssh_from)
        images = [each.format(arch="x86_64", cpu="amd64", release="24.04") for each in _FACTS["images"].values()]
        questions |= {f"image {name} in {region}": partial(self._ami, region, name) for name in images}
        questions |= {f"{each} in {region}": partial(ask, ec2, each) for each in _QUESTIONS if each.startswith("may ")}
        questions |= {f"quota of {name} in {region}": partial(self._quota, region, name) for name in _FACTS["quotas"]}
        return preflight.findings(questions)

    def _client(self, service: str, region: str = "", attempts: int = 4) -> Any:
        return _api.client(self.profile, service, region, attempts)

    def _regions(self, patterns: Sequence[str] = ()) -> list[str]:
        return chosen([each["RegionName"] for each in ask(self._client("ec2"), "regions")], self.region or (), patterns)

    def _sold(self, need: Need, region: str) -> Iterator[Offer]:
        """What a region sells; on demand without a price. A capacity block was paid for when it was bought."""
        ec2, names = self._client("ec2", region), {each.name for each in need.accelerators if each.kind != "cpu"}
        kinds = {k.instance_type: k for k in map(_catalog.kind, ask(ec2, "types", types=_catalog.patterns(need)))}
        kinds = {name: k for name, k in kinds.items() if not names or (k.accelerator and k.accelerator.name in names)}
        for held in ask(ec2, "reservation", id=self.capacity_reservation) if self.capacity_reservation else ():
            if offer := kinds.get(held["InstanceType"]):
                free = held["State"] == "active" and held["AvailableInstanceCount"] > 0
                detail = {**offer.detail, "prepaid": held.get("ReservationType") == "capacity-block"}
                yield replace(offer, region=region, zone=held["AvailabilityZone"], available=free, detail=detail)
        if self.capacity_reservation or not kinds:
            return
        types, zones, now = [*kinds], [each["AvailabilityZone"] for each in self._subnets(ec2)], datetime.now(UTC)
        rows = ask(ec2, "spot prices", types=types, now=now) if "spot" in need.markets else ()
        spot = {(row["AvailabilityZone"], row["InstanceType"]): float(row["SpotPrice"]) for row in rows}
        for row in ask(ec2, "zones", types=types, zones=zones):
            offer = replace(kinds[row["InstanceType"]], region=region, zone=row["Location"])
            if "on-demand" in offer.detail["sold"] and "on-demand" in need.markets:
                yield replace(offer, quota=f"{region} on-demand {offer.quota}")
            if usd := spot.get((offer.zone, offer.instance_type)):
                yield replace(offer, quota=f"{region} spot {offer.quota}", market="spot", usd_per_hour=usd)

    def _told(self, offer: Offer, order: Order) -> dict[str, Any]:
        """What RunInstances is told: the same for the same order."""
        need, gang = order.need, order.need.private_network
        ec2, name = self._client("ec2", offer.region), f"skypool-{order.pool}-{tags.session(order)}"
        said = tags.pairs({**tags.tags(order), "Name": name})
        told: dict[str, Any] = {"offer": offer, "order": order, "name": name}
        told["image"], told["root"], gb = self._image(ec2, offer, need)
        told["subnet"] = next((each for each in self._subnets(ec2) if each["AvailabilityZone"] == offer.zone), None)
        if told["subnet"] is None:
            raise CapacityError(f"there is no subnet in {offer.zone} any more; name one, subnet=", provider="aws")
        ask(ec2, "key-pair", name=name, key=order.keys.public.encode(), tags=said)
        told["cluster"] = f"{name}-{offer.zone}" if gang and offer.detail["cluster"] else None
        if told["cluster"]:
            ask(ec2, "placement-group", name=told["cluster"], tags=said)
        cap, extras = order.max_usd_per_hour or need.max_usd_per_hour, _catalog.extras(offer.region, gb)
        limit = {"MaxPrice": f"{cap - extras:.4f}"} if cap else {}
        told |= {"gb": gb, "spot": {**_FACTS["spot"], **limit} if offer.market == "spot" else None}
        told["market"] = "spot" if told["spot"] else "capacity-block" if offer.detail["prepaid"] else None
        told |= {"least": order.count if gang else 1, "reservation": self.capacity_reservation}
        told["told"] = userdata.cloud_config(order, user=self.user)
        told["nic"] = "efa" if gang and offer.detail["efa"] else "interface"
        told["group"] = self._group(ec2, name, told["subnet"]["VpcId"], said, gang)
        return told | {"tags": [{"ResourceType": each, "Tags": said} for each in _FACTS["tagged"][offer.market]]}

    def _ami(self, region: str, name: str) -> str:
        return str(ask(self._client("ssm", region), "parameter", name=name)["Value"])

    def _image(self, ec2: Any, offer: Offer, need: Need) -> tuple[str, str, int]:
        """The AMI, its root device, and GB of the disk."""
        name, gb = _catalog.base(need.bases.get(self.name) or self.ami or "", offer, need)
        about = ask(ec2, "image", id=name if name.startswith("ami-") else self._ami(offer.region, name))[0]
        ami, root, arch = (about[each] for each in ("ImageId", "RootDeviceName", "Architecture"))
        if arch != offer.arch:
            raise UsageError(f"the image {ami} is for {arch}, {offer.instance_type} is {offer.arch}: arch={arch!r}")
        disks = {each["DeviceName"]: each.get("Ebs", {}).get("VolumeSize", 0) for each in about["BlockDeviceMappings"]}
        return ami, root, max(gb, disks.get(root, 0))

    def _subnets(self, ec2: Any) -> list[dict[str, Any]]:
        name, values = ("subnet-id", [*self.subnet]) if self.subnet else ("default-for-az", ["true"])
        if not (found := ask(ec2, "subnets", name=name, values=values)):
            advice = f"`aws ec2 create-default-vpc --region {ec2.meta.region_name}`, or name one, subnet="
            raise AccessError(f"there is no subnet for machines in {ec2.meta.region_name}; {advice}", provider="aws")
        return sorted(found, key=lambda subnet: str(subnet["SubnetId"]))

    def _group(self, ec2: Any, name: str, vpc: str, said: list[dict[str, str]], gang: bool) -> str:
        """The security group: port 22 for those who may log in, and all ports among the machines of a gang."""
        new = ask(ec2, "security-group", name=name, vpc=vpc, tags=said)
        if not (known := new or retry.soon(partial(ask, ec2, "its groups", name=name, vpc=vpc), _NEW)):
            raise NoAnswer(f"there is a security group {name}, and AWS does not tell of it; ask again", provider="aws")
        group = str((new or known[0])["GroupId"])
        for network in settings.networks(self.ssh_from):
            insist(_NEW, ec2, "let ssh in", group=group, network=network)
        for rule in ("let each other in", "let each other out") if gang else ():
            insist(_NEW, ec2, rule, group=group)
        return group

    def _found(self, region: str, pool: str | None) -> list[Instance]:
        found = ask(self._client("ec2", region), "instances", owner=tags.owners(pool), pool=pool or "*")
        return [self._instance(region, each) for each in found]

    def _instance(self, region: str, record: Mapping[str, Any]) -> Instance:
        detail = {"region": region, "type": record["InstanceType"], "launched": record["LaunchTime"].timestamp()}
        state: Any = {"pending": "starting", "running": "running"}.get(record["State"]["Name"], "ending")
        said, nth = tags.read(record.get("Tags", ())), record.get("AmiLaunchIndex", 0)
        return tags.instance("aws", record["InstanceId"], said, nth, state, detail)

    def _address(self, instance: Instance) -> str:
        """Which it has a few seconds after it was made."""

        def look() -> str:
            for record in ask(self._client("ec2", instance.detail["region"]), "these", ids=[instance.id]):
                if record["State"]["Name"] not in ("pending", "running"):
                    why = record.get("StateReason", {})
                    raise _api.REFUSALS.error(f"to keep {instance.id}", why.get("Code", ""), why.get("Message", ""))
                if address := record.get("PublicIpAddress"):
                    return str(address)
            raise ProviderError(f"{instance.id} has no public address yet", provider="aws", code="pending")

        return retry.patiently(look, _ADDRESS, "pending")

    def _end(self, region: str, instances: Mapping[str, Instance]) -> list[str]:
        try:
            told = ask(self._client("ec2", region), "terminate", ids=[*instances])
            return [each["InstanceId"] for each in told if each["CurrentState"]["Name"] != "terminated"]
        except ProviderError as e:
            if e.code != "InvalidInstanceID.NotFound":
                raise
            named, young = set(re.findall(r"i-\w+", e.text)), time.time() - _YOUNG
            return [i for i, each in instances.items() if i not in named or each.detail.get("launched", 0.0) >= young]

    def _ending(self, region: str, instances: Mapping[str, Instance]) -> list[str]:
        """Looked at: to ask again costs as much as to end them. Who shuts down holds its disk, address and quota."""
        seen = ask(self._client("ec2", region), "these", ids=[*instances])
        states = {each["InstanceId"]: each["State"]["Name"] for each in seen}
        sure = all(states.get(id_) in ("shutting-down", "terminated") for id_ in instances)
        return [id_ for id_ in instances if states[id_] != "terminated"] if sure else self._end(region, instances)

    def _left(self, region: str, pool: str | None) -> Iterator[Leftover]:
        """Key pairs, security groups, placement groups, and disks that no instance has."""
        for question, about in ((q, about) for q, about in _QUESTIONS.items() if q.startswith("find ")):
            for each in ask(self._client("ec2", region), question, owner=tags.owners(pool), pool=pool or "*"):
                said, detail = tags.read(each["Tags"]), {"resource": each[about["resource"]]}
                yield tags.leftover("aws", question.removeprefix("find "), each[about["id"]], said, region, detail)

    def _remove(self, leftover: Leftover) -> None:
        insist(_TIDYING, self._client("ec2", leftover.region), f"remove {leftover.kind}", id=leftover.id)

    def _tag(self, region: str, ids: Sequence[str], until: datetime) -> None:
        ask(self._client("ec2", region), "tag", ids=ids, tags=tags.pairs({tags.UNTIL: tags.stamp(until)}))

    def _quota(self, region: str, name: str) -> str:
        limits, codes = self._client("service-quotas", region), _FACTS["quotas"][name][:2]
        both = [(ask(limits, "quota", code=code) or ask(limits, "usual quota", code=code))["Value"] for code in codes]
        text = "{:g} vCPUs at once on demand, {:g} as spot".format(*both)
        if not any(both):
            raise _api.REFUSALS.error(name, "VcpuLimitExceeded", text, region=region)
        return text
