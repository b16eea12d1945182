"""AWS: EC2 instances, on demand and spot, billed by the second after the first minute.

API: https://docs.aws.amazon.com/AWSEC2/latest/APIReference (read 2026-11-21). Credentials: as boto3 finds them.
A machine that shuts itself down is terminated, and that ends its cost: it needs no credential for it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from typing import Any, ClassVar, Literal

from skypool import asking, rented, tags, userdata
from skypool.asking import everywhere
from skypool.driver import Abilities
from skypool.errors import AccessError, CapacityError, ProviderError, UsageError
from skypool.keys import Keys
from skypool.model import Access, Finding, Instance, Leftover, Need, Offer, Order
from skypool_aws import _api, _catalog
from skypool_aws._api import ask, insist

_FACTS = _catalog.FACTS
_ADDRESS, _ENDING, _LAUNCHING, _TIDYING = 90.0, 240.0, 90.0, 180.0
_YOUNG = 60.0  # seconds in which AWS itself may not know what it has made
_LEFT = ("key-pair", "security-group", "placement-group", "volume")
_STATES: dict[str, Literal["starting", "running", "ended"]] = {"pending": "starting", "running": "running"}


@dataclass(frozen=True)
class AWS:
    """Rent from AWS.

    Args:
        region: such as "us-east-1", or several; None is every region that is enabled for the account.
        profile: of your AWS configuration; None leaves that to the SDK.
        subnet: of your own, or several; None is the default one of each zone.
        ami: what machines start from: an AMI with cloud-init, an SSM parameter that holds one, "ubuntu-22.04"; None is
            AWS's own for the accelerator. An Image's base= comes first.
        user: who logs in there.
        capacity_reservation: run in this one, a capacity block perhaps. Nothing is ever reserved or bought.
        ssh_from: networks that may reach port 22; None is this machine's public address alone.

    Raises:
        UsageError: a value that cannot mean anything.
    """

    region: str | Sequence[str] | None = None
    profile: str | None = None
    subnet: str | Sequence[str] | None = None
    ami: str | None = None
    user: str = "ubuntu"
    capacity_reservation: str | None = None
    ssh_from: str | Sequence[str] | None = None
    name: ClassVar[str] = "aws"
    abilities: ClassVar[Abilities] = Abilities(ends_itself=True, private_network=True, spot=True)
    offers_keep: ClassVar[float] = 86400.0

    def __post_init__(self) -> None:
        for name, (shape, like) in _FACTS["settings"].items():
            checked = asking.words(name, getattr(self, name), shape, like, _FACTS["gp3"] if name == "region" else ())
            if name in ("region", "subnet", "ssh_from"):
                object.__setattr__(self, name, checked)
        if (self.subnet or self.capacity_reservation) and len(self.region or ()) != 1:
            raise UsageError("a subnet or a reservation is of one region: say which, region='us-east-1'")

    def offers(self, need: Need) -> Iterable[Offer]:
        """Each type that could serve in each zone that has it."""
        regions = self._regions(need.regions) if _catalog.patterns(need) else []
        if self._asked(need).startswith("ami-") and len(regions) > 1:
            raise UsageError(f"the image {self._asked(need)} is of one region: say which, region='us-east-1'")
        sold, shop = everywhere(partial(self._sold, need), regions, "offers"), self._client("pricing", "us-east-1")
        types = {each.instance_type for each in sold if not each.usd_per_hour}
        prices = dict(everywhere(lambda type_: _catalog.on_demand(ask(shop, "prices", type=type_)), types))
        for each in sold:
            usd = each.usd_per_hour or prices.get((each.region, each.instance_type), 0.0)
            if usd or each.detail["prepaid"]:
                extras = _catalog.extras(each.region, _catalog.base(self._asked(need), each, need)[1])
                yield replace(each, usd_per_hour=(0.0 if each.detail["prepaid"] else usd) + extras)

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Asked again with the same token until AWS says yes or no, and never again for capacity."""
        once, values = self._client("ec2", offer.region, attempts=1), self._ordered(offer, order)
        try:
            made = [self._instance(offer.region, each) for each in insist(_LAUNCHING, once, "run", **values)]
        except ProviderError as e:
            same = e.code == "IdempotentParameterMismatch"
            made = self._found(order.pool, order.token, offer.region) if same else []
            if not made:
                raise
        return sorted((replace(each, offer=offer) for each in made), key=lambda instance: instance.rank)

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """By their tags; a pool of the same name that somebody else runs in this account is not meant."""
        return everywhere(partial(self._found, pool, "*"), self._regions())

    def access(self, instance: Instance) -> Access:
        """ssh to its public address. Raises why AWS has ended it, if it has."""
        watch = _api.WATCH if instance.detail["market"] == "spot" else ""
        booting = 1200.0 if ".metal" in instance.detail["type"] else 420.0
        return rented.access(instance, self._address(instance), user=self.user, booting=booting, watch=watch)

    def terminate(self, instances: Sequence[Instance]) -> None:
        """Until AWS says terminated: one that still shuts down holds its disk, its address and its quota."""
        asking.end_all(self._end, instances, _ENDING)

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Key pairs, security groups, placement groups, and disks that no instance has."""
        return everywhere(partial(self._left, pool), self._regions())

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Asked again for three minutes where an instance that has just ended still holds it."""
        remove = lambda each: insist(_TIDYING, self._client("ec2", each.region), f"remove {each.kind}", id=each.id)  # noqa: E731
        asking.each_done(remove, leftovers, "AWS did not remove what pools left behind")

    def renew(self, pool: str, until: datetime) -> None:
        """The tag of all that the pool has."""
        ids: dict[str, list[str]] = {}
        for instance in self.instances(pool=pool):
            ids.setdefault(instance.detail["region"], []).append(instance.id)
        for each in everywhere(partial(self._left, pool), ids):
            ids[each.region].append(each.detail["resource"])
        new = [{"Key": tags.UNTIL, "Value": tags.stamp(until)}]
        asking.each_done(
            lambda r: ask(self._client("ec2", r), "tag", ids=ids[r], tags=new), ids, "tags are as they were"
        )

    def policy(self) -> str:
        """For IAM, as JSON."""
        return (files("skypool_aws") / "policy.json").read_text()

    def check(self) -> Iterable[Finding]:
        """In one region: the first that was named, or the user's own."""
        ec2 = self._client("ec2", self.region[0] if self.region else "")
        here = ec2.meta.region_name
        images = {name.format(arch="x86_64", cpu="amd64", release="24.04") for name in _FACTS["images"].values()}
        questions: dict[str, Callable[[], object]] = {
            "ssh on this machine": asking.openssh,
            "networks that may log in": lambda: ", ".join(self._networks()),
            "credentials": lambda: ask(self._client("sts", here), "identity"),
            "clock": lambda: asking.clock(ask(ec2, "clock")["HTTPHeaders"]["date"]),
        }
        questions |= {f"image {each} in {here}": partial(self._ami, here, each) for each in sorted(images)}
        questions |= {f"{each} in {here}": partial(self._may, ec2, each) for each in _api.QUESTIONS if "may" in each}
        questions |= {f"quota of {each} in {here}": partial(self._quota, here, each) for each in _FACTS["quotas"]}
        return asking.findings(questions)

    # --- what is sold ----------------------------------------------------------------------------------------

    def _client(self, service: str, region: str = "", attempts: int = 4) -> Any:
        return _api.client(self.profile, service, region, attempts)

    def _regions(self, asked: Sequence[str] = ()) -> list[str]:
        known = [each["RegionName"] for each in ask(self._client("ec2"), "regions")]
        return asking.chosen(known, self.region or (), asked)

    def _asked(self, need: Need) -> str:
        """The base image that the user asks for."""
        asked, (shape, like) = need.bases.get(self.name) or self.ami, _FACTS["settings"]["ami"]
        return (asking.words("base image of AWS", asked, shape, like) or ("",))[0]

    def _sold(self, need: Need, region: str) -> Iterator[Offer]:
        """What a region sells; on demand without a price. A capacity block was paid for when it was bought."""
        ec2 = self._client("ec2", region)
        kinds = _catalog.kinds(ask(ec2, "types", types=_catalog.patterns(need)), need)
        types, now = [*kinds], datetime.now(UTC)
        for held in ask(ec2, "reservation", id=self.capacity_reservation) if self.capacity_reservation else ():
            free = held["State"] == "active" and held["AvailableInstanceCount"] > 0
            if kind := kinds.get(held["InstanceType"]):
                detail = kind.detail | {"prepaid": held.get("ReservationType") == "capacity-block"}
                yield replace(kind, region=region, zone=held["AvailabilityZone"], available=free, detail=detail)
        if self.capacity_reservation or not kinds:
            return
        zones = [each["AvailabilityZone"] for each in self._subnets(ec2)]
        spot = _catalog.spot(ask(ec2, "spot prices", types=types, now=now) if need.market != "on-demand" else ())
        for row in ask(ec2, "zones", types=types, zones=zones):
            offer = replace(kinds[row["InstanceType"]], region=region, zone=row["Location"])
            if "on-demand" in offer.detail["markets"] and need.market != "spot":
                yield replace(offer, quota=f"{region} on-demand {offer.quota}")
            if usd := spot.get((offer.zone, offer.instance_type)):
                yield replace(offer, quota=f"{region} spot {offer.quota}", market="spot", usd_per_hour=usd)

    # --- launching -------------------------------------------------------------------------------------------

    def _ordered(self, offer: Offer, order: Order) -> dict[str, Any]:
        """What RunInstances is told: the same for the same order."""
        ec2, need, order = (
            self._client("ec2", offer.region),
            order.need,
            replace(order, keys=order.keys or Keys.of(order.pool)),
        )
        name, gang, is_spot = (
            f"skypool-{order.pool}-{tags.session(order)}",
            need.private_network,
            offer.market == "spot",
        )
        said = [{"Key": key, "Value": value} for key, value in (tags.tags(order) | {"Name": name}).items()]
        image, root, gb = self._image(ec2, offer, need)
        subnets = [each for each in self._subnets(ec2) if each["AvailabilityZone"] == offer.zone]
        if not subnets:
            raise CapacityError(
                f"no subnet of the settings is in {offer.zone}; name another one, subnet=", provider="aws"
            )
        ask(ec2, "key-pair", name=name, key=order.keys.public.encode(), tags=said)
        cluster = f"{name}-{offer.zone}" if gang and offer.detail["cluster"] else None
        if cluster:
            ask(ec2, "placement-group", name=cluster, tags=said)
        cap = need.max_usd_per_hour
        limit = {"MaxPrice": f"{cap - _catalog.extras(offer.region, gb):.4f}"} if cap else {}
        kinds = ["instance", "volume", "network-interface", *(["spot-instances-request"] if is_spot else [])]
        return {
            "token": order.token,
            "name": name,
            "image": image,
            "root": root,
            "gb": gb,
            "type": offer.instance_type,
            "least": order.count if gang else 1,
            "most": order.count,
            "told": userdata.cloud_config(order, user=self.user),
            "subnet": subnets[0]["SubnetId"],
            "group": self._group(ec2, name, subnets[0]["VpcId"], said, gang),
            "nic": "efa" if gang and offer.detail["efa"] else "interface",
            "cluster": cluster,
            "market": "spot" if is_spot else "capacity-block" if offer.detail["prepaid"] else None,
            "spot": _FACTS["spot"] | limit if is_spot else None,
            "reservation": self.capacity_reservation,
            "tags": [{"ResourceType": each, "Tags": said} for each in kinds],
        }

    def _ami(self, region: str, name: str) -> str:
        """That which an SSM parameter holds."""
        return str(ask(self._client("ssm", region), "parameter", name=name)["Value"])

    def _image(self, ec2: Any, offer: Offer, need: Need) -> tuple[str, str, int]:
        """The AMI, its root device, and GB of the disk."""
        name, gb = _catalog.base(self._asked(need), offer, need)
        about = ask(ec2, "image", id=name if name.startswith("ami-") else self._ami(offer.region, name))[0]
        ami, root, arch = about["ImageId"], about["RootDeviceName"], about["Architecture"]
        if arch != offer.arch:
            raise UsageError(
                f"the image {ami} is for {arch} and {offer.instance_type} is {offer.arch}: say arch={arch!r}"
            )
        sizes = [
            each["Ebs"].get("VolumeSize", 0) for each in about["BlockDeviceMappings"] if each["DeviceName"] == root
        ]
        return ami, root, max(gb, *sizes)

    def _subnets(self, ec2: Any) -> list[dict[str, Any]]:
        name, values = ("subnet-id", [*self.subnet]) if self.subnet else ("default-for-az", ["true"])
        if not (found := ask(ec2, "subnets", name=name, values=values)):
            here = ec2.meta.region_name
            advice = f"`aws ec2 create-default-vpc --region {here}`, or name one (subnet=)"
            raise AccessError(f"there is no subnet for machines in {here}; {advice}", provider="aws")
        return list(found)

    def _group(self, ec2: Any, name: str, vpc: str, said: list[dict[str, str]], gang: bool) -> str:
        """The security group: port 22 for those who may log in, and all ports among the machines of a gang."""
        new = ask(ec2, "security-group", name=name, vpc=vpc, tags=said)
        group = str((new or ask(ec2, "its groups", name=name, vpc=vpc)[0])["GroupId"])
        for network in self._networks():
            ask(ec2, "let ssh in", group=group, network=network)
        for rule in ("let each other in", "let each other out") if gang else ():
            ask(ec2, rule, group=group)
        return group

    def _networks(self) -> list[str]:
        return [each if "/" in each else f"{each}/32" for each in self.ssh_from or [asking.public_network()]]

    # --- what there is ---------------------------------------------------------------------------------------

    def _found(self, pool: str | None, token: str, region: str) -> list[Instance]:
        ec2 = self._client("ec2", region)
        some = ask(ec2, "instances", owner=tags.owners(pool), pool=pool or "*", token=token)
        return [self._instance(region, each) for reservation in some for each in reservation["Instances"]]

    def _instance(self, region: str, record: Mapping[str, Any]) -> Instance:
        detail = {
            "region": region,
            "type": record["InstanceType"],
            "market": record.get("InstanceLifecycle", "on-demand"),
            "launched": record["LaunchTime"].timestamp(),
        }
        said = {each["Key"]: each["Value"] for each in record.get("Tags", ())}
        state, nth = _STATES.get(record["State"]["Name"], "ending"), record.get("AmiLaunchIndex", 0)
        return tags.instance("aws", record["InstanceId"], said, nth, state, detail)

    def _address(self, instance: Instance) -> str:
        """Which it has a few seconds after it was made."""

        def look() -> str:
            some = ask(self._client("ec2", instance.detail["region"]), "instance", id=instance.id)
            for record in (each for reservation in some for each in reservation["Instances"]):
                if record["State"]["Name"] not in ("pending", "running"):
                    why = record.get("StateReason", {})
                    raise _api.REFUSALS.error(f"to keep {instance.id}", why.get("Code", ""), why.get("Message", ""))
                if address := record.get("PublicIpAddress"):
                    return str(address)
            raise ProviderError(f"{instance.id} has no public address yet", provider="aws", code="pending")

        return asking.patiently(look, _ADDRESS, lambda e: e.code == "pending")

    def _end(self, region: str, left: Mapping[str, Instance]) -> list[str]:
        """Ask that these end; which have not."""
        try:
            told = ask(self._client("ec2", region), "terminate", ids=[*left])
            gone = {each["InstanceId"] for each in told if each["CurrentState"]["Name"] == "terminated"}
        except ProviderError as e:
            if e.code != "InvalidInstanceID.NotFound":
                raise
            named = set(re.findall(r"i-\w+", e.text)) & set(left)
            gone = {id_ for id_ in named if time.time() - left[id_].detail.get("launched", 0.0) > _YOUNG}
        return [id_ for id_ in left if id_ not in gone]

    def _left(self, pool: str | None, region: str) -> Iterator[Leftover]:
        for kind in _LEFT:
            for each in ask(self._client("ec2", region), f"find {kind}", owner=tags.owners(pool), pool=pool or "*"):
                id_, said = (
                    each[_api.QUESTIONS[f"find {kind}"]["id"]],
                    {tag["Key"]: tag["Value"] for tag in each["Tags"]},
                )
                until, detail = tags.when(said.get(tags.UNTIL, "")), {"resource": each.get("GroupId", id_)}
                yield Leftover("aws", kind, id_, said[tags.POOL], region, until, detail)

    # --- checks ----------------------------------------------------------------------------------------------

    def _may(self, ec2: Any, what: str) -> str:
        ask(ec2, what, image=self._ami(ec2.meta.region_name, _FACTS["images"]["24.04"].format(cpu="amd64")))
        return "yes"

    def _quota(self, region: str, name: str) -> str:
        limits = self._client("service-quotas", region)
        codes = _FACTS["quotas"][name][:2]
        now, spot = (
            ask(limits, "quota", code=c)["Value"] or ask(limits, "usual quota", code=c)["Value"] for c in codes
        )
        text = f"{now:g} vCPUs at once on demand, {spot:g} as spot"
        if not now and not spot:
            raise _api.REFUSALS.error(name, "VcpuLimitExceeded", text, region=region)
        return text
