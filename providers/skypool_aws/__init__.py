"""Driver for AWS: EC2 instances, on demand and spot, billed by the second after the first minute.

API: https://docs.aws.amazon.com/AWSEC2/latest/APIReference (read 2026-11-21). boto3 (AWS's Python package) finds the
credentials. An instance that shuts itself down is terminated, which ends its cost. The instance needs no credentials
for that.

Words of this package:

- instance: a rented machine of EC2. A node is an instance of a pool; its node number is its number in the pool.
- zone: a part of a region, such as "us-east-1a". Market: "on-demand" or "spot".
- record: AWS's description of something, as a dict.
- AMI: a machine image. SSM parameter: an entry in AWS's parameter store, which may hold the id of an AMI.
- capacity reservation: capacity that the account holds already. A capacity block is one that was paid for in advance.
- EFA: an Elastic Fabric Adapter, which is a faster network interface.
- Elastic IP address: a public address that the account holds until it releases the address.
- dry run: a request that AWS checks and does not execute.
- gang: machines that must reach each other (`private_network`).
- recording: a file into which skypool writes requests and replies, if the user has switched that on.
- need, offer, order: the requirements of a node, an instance type with zone, market and price, and the request to rent
  instances for nodes of a pool (`skypool.model`).
- finding: the result of one check. Leftover: another resource of a pool than an instance, such as a key pair.
- settings: the arguments of `AWS`.

In arguments, `said` and `tags` are the tags that skypool writes to a resource, as a dict. `ec2`, `pricing`, `quotas`,
`ssm` and `sts` are clients of AWS's services, by which requests are sent. All but `pricing` are for one region.
`profile` is a profile of the AWS configuration; None leaves the choice to boto3. `vpc` is the id of a network.
"""
# pyright: reportTypedDictNotRequiredAccess=false
# The stubs of boto3 mark every field of an answer as one that may be missing.

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, ClassVar, Literal

from skypool import tracebacks
from skypool.buckets.bucket import Bucket
from skypool.drivers import retry, settings, ssh_machine, tags, userdata
from skypool.drivers.bucket_identity import BucketIdentity
from skypool.drivers.contract import Abilities, Answers
from skypool.drivers.regional import Regional, chosen, everywhere
from skypool.errors import AccessError, CapacityError, NoAnswer, ProviderError, UsageError
from skypool.model import Access, Bill, Finding, Instance, Leftover, Need, Offer, Order
from skypool_aws import _account_checks, _api, _boot_images, _bucket_identity, _catalog, _elastic_ips, _requests

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import (
        ImageTypeDef,
        InstanceTypeDef,
        SubnetTypeDef,
    )

_PRICES = 12.0
"""Seconds for which a request for prices is repeated after a rate limit or a lost answer."""

_ADDRESS = 90.0
"""Seconds to wait for the public address of a new instance."""

_RUNNING = 300.0
"""Seconds to wait until a new instance with several network interfaces runs and has its Elastic IP address."""

_TIDYING = 180.0
"""Seconds for which the removal of a resource is repeated while instances still use the resource."""

_NEW = 20.0
"""Seconds for which EC2 may not find a key pair or a security group that was just made."""

_YOUNG = 60.0
"""Seconds for which EC2 may not find an instance that was just started."""

_BOOTING = 420.0
"""Seconds within which a virtual machine must accept ssh connections."""

_BOOTING_METAL = 1200.0
"""Seconds within which a bare-metal server must accept ssh connections. Its firmware takes minutes to start."""

_WATCH = ssh_machine.notice_program(
    base="http://169.254.169.254",
    path="/latest/meta-data/spot/instance-action",
    when="datetime.datetime.fromisoformat(json.loads(said)['time'].replace('Z', '+00:00')).timestamp()",
    variable="AWS_EC2_METADATA_SERVICE_ENDPOINT",
    token=("/latest/api/token", "X-aws-ec2-metadata-token-ttl-seconds", "60", "X-aws-ec2-metadata-token"),
)
"""Python source that runs on a spot machine and waits for AWS's interruption notice in the metadata service."""

_Setting = tuple[str, str, bool]
"""Three facts of a setting: a regular expression of its values, examples for messages, and True if it may be a list."""

_SETTINGS: Mapping[str, _Setting] = {
    "region": (
        r"[a-z]{2}(-[a-z]+)?-(north|south|east|west|central|northeast|northwest|southeast|southwest)-\d",
        "'us-east-1'",
        True,
    ),
    "profile": (r"\S.*", "'default', as ~/.aws/config has them", False),
    "subnet": (r"subnet-[0-9a-f]+", "'subnet-0123456789abcdef0'", True),
    "ami": (_boot_images.BASE_SHAPE, _boot_images.BASE_EXAMPLE, False),
    "user": (r"[a-z_][a-z0-9_-]*", "'ubuntu'", False),
    "capacity_reservation": (r"cr-[0-9a-f]+", "'cr-0123456789abcdef0'", False),
    "ssh_from": (
        r"((25[0-5]|2[0-4]\d|1?\d?\d)(\.(?!$|/)|(?=$|/))){4}(/([12]?\d|3[0-2]))?",
        "'203.0.113.7' or '203.0.113.0/24'",
        True,
    ),
    "instance_profile": (r"[\w+=,.@-]{1,128}", "'skypool-runs', without the path", False),
}


@settings.settings_named
@dataclass(frozen=True)
class AWS(Regional):
    """A driver that rents EC2 instances with one AWS account.

    Args:
        region: a region such as "us-east-1", or several; None means every region that is enabled for the account.
        profile: a profile of your AWS configuration; None leaves the choice to boto3 (AWS's Python package).
        subnet: one of your subnets, or several; None means the default subnet of each zone.
        ami: the image that machines start from: the id of an AMI with cloud-init, the name of an SSM parameter with
            such an id, "ubuntu-22.04" or "ubuntu-24.04". An SSM parameter is an entry in AWS's parameter store. None
            means AWS's own image for the accelerator. The `base=` of an Image overrides this setting.
        user: the user name for ssh logins. The image must have this user.
        capacity_reservation: the id of a capacity reservation or capacity block (capacity that the account holds
            already) to run in. The driver itself never reserves or buys capacity. None means none.
        ssh_from: networks that may reach port 22 of the machines, such as "203.0.113.0/24"; None means this computer's
            public address only.
        instance_profile: the name of an instance profile, which gives machines an identity. All that runs on a machine
            has it. The login that rents must have the permission iam:PassRole for its role. None means none.

    Raises:
        UsageError: a setting is invalid. Or `subnet`, `capacity_reservation` or the id of an AMI is given, but `region`
            does not name exactly one region.
    """

    region: str | Sequence[str] | None = None
    profile: str | None = None
    subnet: str | Sequence[str] | None = None
    ami: str | None = None
    user: str = "ubuntu"
    capacity_reservation: str | None = None
    ssh_from: str | Sequence[str] | None = None
    instance_profile: str | None = None
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
        settings.settle(self, _SETTINGS, {"region": _catalog.GP3_USD_PER_GB_MONTH})
        has_ami_id = self.ami is not None and self.ami.startswith("ami-")
        if (self.subnet or self.capacity_reservation or has_ami_id) and len(self.region or ()) != 1:
            only_there = "subnet" if self.subnet else "capacity_reservation" if self.capacity_reservation else "ami"
            raise UsageError(
                f"{only_there}= belongs to one region: set region= to that region alone, such as region='us-east-1'"
            )

    # --- what is sold ----------------------------------------------------------------------------------------

    def offers(self, need: Need) -> Answers[Offer]:
        """Return an offer for each instance type that could meet the need, in each zone and market that sells the type.

        Prices are in USD per hour and include the disk and the public address. Regions that do not answer are left out,
        and so are types whose prices cannot be read. Each failure issues a RuntimeWarning. Regions that the account
        may not use are left out without a warning. The list is empty if no type could meet the need.

        Raises:
            UsageError: the settings name a region that the account may not use.
            ProviderError, ErrorGroup: no region answered, no prices could be read, or AWS refused to list the regions.
        """
        if not _catalog.patterns(need):
            return Answers()
        regions = self._regions(need.regions)
        sold = everywhere(partial(self._sold, need), regions, "offers")
        rows = self._price_rows(regions, {each.instance_type for each in sold if not each.usd_per_hour})
        prices = dict(_catalog.on_demand(rows))
        asked_base = need.bases.get(self.name) or self.ami or ""
        found: list[Offer] = []
        for offer in sold:
            _, disk_gb = _boot_images.base(asked_base, offer, need)
            extras = _catalog.extras(offer.region, disk_gb)
            if offer.detail["prepaid"]:
                found.append(replace(offer, usd_per_hour=extras))
            elif usd := offer.usd_per_hour or prices.get((offer.region, offer.instance_type)):
                found.append(replace(offer, usd_per_hour=usd + extras))
        return Answers(found, [*sold.lacks, *rows.lacks])

    def _regions(self, patterns: Sequence[str] = ()) -> list[str]:
        """Return the allowed regions that match one of the patterns, such as "eu-*"; without patterns, all of them."""
        return chosen(_requests.regions(self._ec2()), self.region or (), patterns)

    def _sold(self, need: Need, region: str) -> Iterator[Offer]:
        """Yield a region's offers. Prices are completed later: spot offers lack disk and address, others have 0."""
        ec2 = self._ec2(region)
        types = self._types(ec2, need)
        if self.capacity_reservation:
            yield from self._reserved(ec2, region, types)
        elif types:
            yield from self._unreserved(ec2, region, types, need)

    def _types(self, ec2: EC2Client, need: Need) -> dict[str, Offer]:
        """Return a dict from type to an offer without zone and price, for a region's types that could meet the need."""
        names = {each.name for each in need.accelerators if each.kind != "cpu"}
        found = {}
        for record in _requests.instance_types(ec2, _catalog.patterns(need)):
            offer = _catalog.kind(record)
            if _catalog.needs_grid_driver(offer.instance_type) and not (self.ami or need.bases.get(self.name)):
                continue  # AWS's images lack the driver
            if not names or (offer.accelerator and offer.accelerator.name in names):
                found[offer.instance_type] = offer
        return found

    def _reserved(self, ec2: EC2Client, region: str, types: Mapping[str, Offer]) -> Iterator[Offer]:
        """Yield the offer of the capacity reservation in the settings, if `types` has its type. The price is 0."""
        for held in _requests.capacity_reservations(ec2, self.capacity_reservation or ""):
            offer = types.get(held["InstanceType"])
            if offer is None:
                continue
            yield replace(
                offer,
                region=region,
                zone=held["AvailabilityZone"],
                available=held["State"] == "active" and held["AvailableInstanceCount"] > 0,
                detail={
                    **offer.detail,
                    "prepaid": held.get("ReservationType") == "capacity-block",
                    "placement_group": held.get("PlacementGroupArn", "").rpartition("/")[2],
                    "tenancy": held["Tenancy"],
                },
            )

    def _held(self, ec2: EC2Client, region: str) -> Offer | None:
        """Return the offer of the capacity reservation in the settings; None if the settings have none."""
        if not self.capacity_reservation:
            return None
        [held] = _requests.capacity_reservations(ec2, self.capacity_reservation)
        records = _requests.instance_types(ec2, [held["InstanceType"]])
        return next(self._reserved(ec2, region, {each["InstanceType"]: _catalog.kind(each) for each in records}))

    def _unreserved(self, ec2: EC2Client, region: str, types: Mapping[str, Offer], need: Need) -> Iterator[Offer]:
        """Yield offers for each type, in each zone with a subnet, on the need's markets. On demand, the price is 0."""
        if all(offer.detail["sold"] == ["capacity-block"] for offer in types.values()):
            tracebacks.warn(
                f"AWS sells {', '.join(sorted(types))} only by capacity blocks, which are bought in advance: buy one "
                f"in {region}, and name it with AWS(region={region!r}, capacity_reservation=…)"
            )
            return
        zones = [subnet["AvailabilityZone"] for subnet in self._subnets(ec2)]
        spot_usd: dict[tuple[str, str], float] = {}
        if "spot" in need.markets:
            for price in _requests.spot_prices(ec2, [*types]):
                spot_usd[price["AvailabilityZone"], price["InstanceType"]] = float(price["SpotPrice"])
        for offering in _requests.offerings(ec2, [*types], zones):
            name: str = offering["InstanceType"]
            offer = replace(types[name], region=region, zone=offering["Location"])
            if "on-demand" in offer.detail["sold"] and "on-demand" in need.markets:
                yield replace(offer, quota=f"{region} on-demand {offer.quota}")
            if usd := spot_usd.get((offer.zone, name)):
                limit = f"{region} spot {_catalog.spot_quota(offer)}"
                yield replace(offer, quota=limit, market="spot", usd_per_hour=usd)

    def _price_rows(self, regions: Sequence[str], types: Iterable[str]) -> Answers[str]:
        """Return the rows (JSON texts) of AWS's price list for these types: of the region if it is one, else of all."""
        pricing = _api.pricing(self.profile)
        only_region = regions[0] if len(regions) == 1 else ""

        def rows(instance_type: str) -> list[str]:
            return retry.patiently(lambda: _requests.price_list(pricing, instance_type, only_region), _PRICES)

        return everywhere(rows, types, "prices")

    # --- launching -------------------------------------------------------------------------------------------

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Rent instances with one request, and return them sorted by node.

        A repeated order returns the instances that exist already. Fewer instances than ordered may be returned, unless
        the need has `private_network`. While EC2 does not find the key pair or group that was just made, the request is
        repeated for up to 20 s. Instances with several network interfaces need an Elastic IP address each. These
        addresses are allocated before the instances, so that no instance is paid for if the quota of addresses is too
        small.

        Raises:
            NoAnswer: the answer was lost, so instances or addresses may have been made.
            ProviderError: AWS refused; nothing was rented.
            UsageError: the image is for another processor architecture than the offer.
        """
        ec2 = self._ec2(offer.region, attempts=1)
        request = self._prepared(offer, order)

        def run() -> list[InstanceTypeDef]:
            return _requests.run_instances(ec2, request)

        try:
            if request.has_several_interfaces:
                _elastic_ips.allocate(ec2, offer, order)
            made = retry.soon(lambda: retry.quietly(run, *_requests.NOT_KNOWN_YET), _NEW, 0.5)
            if made is None:
                made = run()
        except NoAnswer:
            raise
        except ProviderError:
            if request.has_several_interfaces:
                _elastic_ips.release(self._ec2(offer.region), offer.region, order.pool, {order.token: order.nodes})
            raise
        instances = [replace(self._instance(offer.region, record), offer=offer) for record in made]
        return sorted(instances, key=lambda instance: instance.node)

    def _prepared(self, offer: Offer, order: Order) -> _requests.InstanceRequest:
        """Make the key pair, groups and firewall rules that an order needs, if missing. Return the launch request."""
        ec2 = self._ec2(offer.region)
        gang = order.need.private_network
        subnet = self._subnet(ec2, offer.zone)
        request = self._request(offer, order, subnet["SubnetId"])
        name = request.tags["Name"]
        _requests.import_key_pair(ec2, name, order.keys.public, request.tags)
        placement_group = request.placement_group
        if gang and offer.detail["cluster"] and not self.capacity_reservation:
            placement_group = f"{name}-{offer.zone}"
            _requests.create_placement_group(ec2, placement_group, request.tags)
        group = self._security_group(ec2, name, subnet["VpcId"], request.tags, gang)
        return replace(request, key_name=name, security_group=group, placement_group=placement_group)

    def _request(self, offer: Offer, order: Order, subnet: str) -> _requests.InstanceRequest:
        """Return an order's launch request, without key pair and groups. A repeated order gives the same request."""
        need = order.need
        gang = need.private_network
        ami, root_device, disk_gb = self._image(self._ec2(offer.region), offer, need)
        cap = order.max_usd_per_hour or need.max_usd_per_hour
        extras = _catalog.extras(offer.region, disk_gb)
        return _requests.InstanceRequest(
            token=order.token,
            instance_type=offer.instance_type,
            market=offer.market,
            count=order.count,
            least=order.count if gang else 1,
            ami=ami,
            root_device=root_device,
            disk_gb=disk_gb,
            key_name="",
            user_data=userdata.cloud_config(order, user=self.user),
            subnet=subnet,
            security_group="",
            tags={**tags.tags(order), "Name": f"skypool-{order.pool}-{tags.session(order)}"},
            efa=[(card, device) for card, device in offer.detail["efa"]] if gang else (),
            placement_group=offer.detail.get("placement_group", ""),  # of the reservation
            tenancy=offer.detail.get("tenancy", "default"),
            prepaid=offer.detail["prepaid"],
            reservation=self.capacity_reservation or "",
            instance_profile=self.instance_profile or "",
            max_usd_per_hour=cap - extras if cap else None,
        )

    def _image(self, ec2: EC2Client, offer: Offer, need: Need) -> tuple[str, str, int]:
        """Return (AMI id, root device, disk size in GiB). Raises UsageError if the AMI is for another architecture."""
        asked = need.bases.get(self.name) or self.ami or ""
        name, disk_gb = _boot_images.base(asked, offer, need)
        image = self._image_record(ec2, name)
        ami = image["ImageId"]
        arch = image["Architecture"]
        root = image["RootDeviceName"]
        if arch != offer.arch:
            raise UsageError(
                f"the image {ami} is for {arch} processors, but instance type {offer.instance_type} has {offer.arch} "
                f"processors: ask for machines of the other kind with arch={arch!r}, or choose another image with ami="
            )
        return ami, root, max(disk_gb, _requests.disk_size(image))

    def _image_record(self, ec2: EC2Client, name: str) -> ImageTypeDef:
        """Return EC2's record of an image. `name` is the id of an AMI, or an SSM parameter that holds such an id."""
        if not name.startswith("ami-"):
            name = _requests.image_parameter(_api.ssm(self.profile, ec2.meta.region_name), name)
        return _requests.image(ec2, name)

    def _subnets(self, ec2: EC2Client) -> list[SubnetTypeDef]:
        """Return the subnets of the settings, else each zone's default subnet. Raise AccessError if there is none."""
        found = _requests.subnets(ec2, [*(self.subnet or ())])
        if not found:
            region = ec2.meta.region_name
            if self.subnet:
                says = (
                    f"the AWS account has no subnet {' or '.join(self.subnet)} in {region}; correct subnet= or region="
                )
            else:
                says = (
                    f"the AWS account has no default subnet in {region}; run `aws ec2 create-default-vpc --region "
                    f"{region}`, or name one of your subnets with AWS(subnet=…)"
                )
            raise AccessError(says, provider="aws")
        return sorted(found, key=lambda subnet: subnet["SubnetId"])

    def _subnet(self, ec2: EC2Client, zone: str) -> SubnetTypeDef:
        """Return the subnet for machines in a zone: the first by id. Raise CapacityError if the zone has none."""
        for subnet in self._subnets(ec2):
            if subnet["AvailabilityZone"] == zone:
                return subnet
        raise CapacityError(
            f"the AWS account has no subnet in zone {zone} any more; create one there, or name one of "
            "another zone with AWS(subnet=…)",
            provider="aws",
        )

    def _security_group(self, ec2: EC2Client, name: str, vpc: str, said: Mapping[str, str], gang: bool) -> str:
        """Return the id of a pool's security group in the network `vpc`. Make it if missing, and open its ports."""
        group = _requests.create_security_group(ec2, name, vpc, said)
        if not group:
            group = retry.soon(lambda: _requests.security_group(ec2, name, vpc), _NEW) or ""
        if not group:
            raise NoAnswer(
                f"AWS says that the security group {name} exists, but has not listed it for {_NEW:g} s; try again",
                provider="aws",
            )
        for network in settings.networks(self.ssh_from):
            _requests.allow_ssh(ec2, group, network, _NEW)
        if gang:
            _requests.allow_each_other(ec2, group, _NEW)
        return group

    # --- what is there ---------------------------------------------------------------------------------------

    def admit(self, instance: Instance) -> None:
        """Open port 22 of an instance to this computer's present address. Does nothing with the setting `ssh_from`.

        The rule is in the security group of the instance's pool, and is removed with it.

        Raises:
            ProviderError: the address is not known, or AWS refused.
        """
        if self.ssh_from:
            return
        [network] = settings.networks(None)
        ec2 = self._ec2(instance.region)
        for group in _requests.own_security_groups(ec2, instance.id):
            _requests.allow_ssh(ec2, group, network, _NEW)

    def access(self, instance: Instance) -> Access:
        """Return how to reach an instance: ssh to its public address. Waits up to 90 s for that address.

        An instance with several network interfaces gets the Elastic IP address that its launch allocated only when it
        runs. For such an instance, the wait is up to 300 s. The method does not connect, and allocates nothing at AWS.
        The result says how long the machine may take to accept ssh: 420 s, or 1200 s for a bare-metal type.

        Raises:
            ProviderError: AWS has ended the instance, the instance has no public address in time, or somebody has
                released its Elastic IP address.
        """
        seconds = _RUNNING if _elastic_ips.is_needed_by(instance) else _ADDRESS
        is_metal = ".metal" in instance.instance_type
        return ssh_machine.access(
            instance,
            retry.patiently(lambda: self._address(instance), seconds, "pending", _requests.NOT_RUNNING_YET),
            user=self.user,
            booting=_BOOTING_METAL if is_metal else _BOOTING,
            watch=_WATCH,
        )

    def _address(self, instance: Instance) -> str:
        """Return an instance's public address without waiting. Raise ProviderError ("pending") if it has none yet."""
        for record in _requests.instances(self._ec2(instance.region), [instance.id]):
            if record["State"]["Name"] not in ("pending", "running"):
                why = record.get("StateReason", {})
                raise _api.REFUSALS.error(
                    f"to keep instance {instance.id}", why.get("Code", ""), why.get("Message", "")
                )
            if address := record.get("PublicIpAddress"):
                return str(address)
            if _elastic_ips.is_needed_by(instance) and record["State"]["Name"] == "running":
                # the next call returns this address
                _elastic_ips.attach(self._ec2(instance.region, attempts=1), instance, record)
        raise ProviderError(
            f"AWS has given instance {instance.id} in {instance.region} no public address yet, and ssh needs one; try "
            "again",
            provider="aws",
            code="pending",
        )

    def _found(self, region: str, pool: str | None) -> list[Instance]:
        """Return a region's instances of a pool of this computer; if `pool` is None, of all pools of this user."""
        filters = _requests.pool_filters(tags.owners(pool), pool)
        return [self._instance(region, each) for each in _requests.pool_instances(self._ec2(region), filters)]

    def _instance(self, region: str, record: InstanceTypeDef) -> Instance:
        """Convert EC2's record of an instance to an `Instance`, with pool, node number and token from the tags."""
        states: Mapping[str, Literal["starting", "running"]] = {"pending": "starting", "running": "running"}
        return tags.instance(
            self.name,
            record["InstanceId"],
            _requests.tag_values(record.get("Tags", ())),
            record.get("AmiLaunchIndex", 0),
            states.get(record["State"]["Name"], "ending"),
            {"interfaces": len(record.get("NetworkInterfaces", ()))},
            region=region,
            instance_type=record["InstanceType"],
            created_at=record["LaunchTime"].timestamp(),
        )

    def _tag(self, region: str, ids: Sequence[str], until: datetime) -> None:
        """Write the time until which the resources with these ids are needed into their tags."""
        _requests.tag(self._ec2(region), ids, {tags.UNTIL: tags.stamp(until)})

    # --- ending ----------------------------------------------------------------------------------------------

    def terminate(self, instances: Sequence[Instance]) -> None:
        """Terminate instances, and return when EC2 says that they have ended. Release their Elastic IP addresses.

        An error of one region does not stop the others. If an address cannot be released, a RuntimeWarning says so.

        Raises:
            StillRunning: names the instances whose end was not reported within 90 s, and why. Their addresses are kept.
        """
        super().terminate(instances)
        ended: dict[tuple[str, str], dict[str, set[int]]] = {}
        for each in instances:
            if _elastic_ips.is_needed_by(each):
                ended.setdefault((each.region, each.pool), {}).setdefault(each.token, set()).add(each.node)
        for (region, pool), nodes in ended.items():
            _elastic_ips.release(self._ec2(region), region, pool, nodes)

    def _terminate(self, region: str, instances: Mapping[str, Instance]) -> list[str]:
        """Ask EC2 to end instances, and return the ids of those that have not ended yet."""
        ec2 = self._ec2(region)
        try:
            return _requests.terminate(ec2, [*instances])
        except ProviderError as e:
            if e.code not in _requests.SOME_GONE:
                raise
            # EC2 refuses the whole request if it does not know one of the ids. It also does so if a policy allows only
            # the end of tagged instances, and one has ended: it has lost its tags
            # (https://github.com/aws/karpenter-provider-aws/issues/2100, read 2026-11-24).
            there = _requests.living(ec2, [*instances])
            if len(there) == len(instances):
                if e.code == "UnauthorizedOperation":
                    raise
                return there
        unlisted = [id for id in instances if id not in there]
        # EC2 may not list a young instance yet; an older one that it does not list has ended
        left = [id for id in unlisted if (instances[id].created_at or 0.0) >= time.time() - _YOUNG]
        return [*left, *self._terminate(region, {id: instances[id] for id in there})] if there else left

    def _terminating(self, region: str, instances: Mapping[str, Instance]) -> list[str]:
        """Return the ids of those given instances that have not ended. If one is not ending, ask EC2 again."""
        seen = _requests.instances(self._ec2(region), [*instances])
        states: dict[str, str] = {each["InstanceId"]: each["State"]["Name"] for each in seen}
        if all(states.get(id) in ("shutting-down", "terminated") for id in instances):
            return [id for id in instances if states[id] != "terminated"]
        return self._terminate(region, instances)

    def _left(self, region: str, pool: str | None) -> Iterator[Leftover]:
        """Yield a region's leftovers of a pool of this computer; if `pool` is None, of all pools of this user."""
        filters = _requests.pool_filters(tags.owners(pool), pool)
        for each in _requests.pool_resources(self._ec2(region), filters):
            yield tags.leftover(self.name, each.kind, each.id, each.tags, region, {}, each.tagged_as)

    def _remove(self, leftover: Leftover) -> None:
        """Remove a leftover, such as a key pair. Retry for 180 s while an instance still uses the leftover."""
        _requests.remove(self._ec2(leftover.region), leftover.kind, leftover.id, _TIDYING)

    # --- beforehand ------------------------------------------------------------------------------------------

    def policy(self) -> str:
        """Return the permissions that this driver needs, as an IAM policy in JSON. No request is sent."""
        return (files("skypool_aws") / "policy.json").read_text("utf-8")

    @property
    def gives_identity(self) -> bool:
        """True if machines get an instance profile."""
        return self.instance_profile is not None

    @property
    def bucket_scheme(self) -> str:
        """The scheme of the buckets that machines reach with their instance profile."""
        return "s3"

    def bucket_identity(self, bucket: Bucket) -> BucketIdentity:
        """Return a role and an instance profile for the prefix of a bucket. Requests that only read are sent.

        Raises:
            ProviderError: AWS refused a request.
            UsageError: there is no such bucket, or its region cannot be looked up.
        """
        return _bucket_identity.identity(self.profile, bucket)

    def check(self) -> Iterable[Finding]:
        """Check the account with requests that only read, and with dry runs. Nothing is rented or made.

        Permissions and quotas are checked in the first region of the settings, or in the one of the user's AWS
        configuration. Images and instance types are looked for in all regions that the settings allow. A failed check
        gives a finding, too, and does not raise. The checks run when the first finding is read.
        """
        return _account_checks.check(self._account())

    def prove_creates(self) -> Iterable[Finding]:
        """Test launches by dry runs, and send launches that EC2 must refuse. Does not raise.

        Each such launch is a pool's request for the smallest machine, in which one thing, such as the image, does not
        exist. If EC2 accepts it anyway, the instance is terminated, and the finding is a failure that names it.
        """
        return _account_checks.refusals(self._account())

    def billed(self, instances: Sequence[str], since: datetime, until: datetime) -> Bill:
        """Return where AWS will show the cost of instances. The sum is None: AWS reports it hours later, for a fee.

        No request is sent. The arguments are the ids of the instances, and times before and after all of them ran.
        """
        return _account_checks.bill(self.profile, instances, since, until)

    def _account(self) -> _account_checks.Account:
        """Return the settings and functions of this driver that the checks use. Sends no request."""
        region = self.region[0] if self.region else self._ec2().meta.region_name
        ec2 = partial(self._ec2, region)
        return _account_checks.Account(
            profile=self.profile,
            region=region,
            chooses_regions=bool(self.region),
            base=self.ami or "",
            ssh_from=self.ssh_from,
            client=self._ec2,
            regions=self._regions,
            subnets=self._subnets,
            launch=lambda offer, order: self._request(offer, order, self._subnet(ec2(), offer.zone)["SubnetId"]),
            reserved=lambda: self._held(ec2(), region),
            listed=lambda region: (self._found(region, None), list(self._left(region, None))),
            terminate=lambda records: self.terminate([self._instance(region, each) for each in records]),
        )

    def _ec2(self, region: str = "", attempts: int = _api.ATTEMPTS) -> EC2Client:
        """Return a client for EC2. The region "" is that of the AWS configuration, or us-east-1 if it names none."""
        return _api.ec2(self.profile, region, attempts)
