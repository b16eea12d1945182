"""The AWS of the lab: EC2, SSM, Pricing, Service Quotas and STS over a real socket, for a boto3 that nobody patched.

moto answers what it answers as the real service does; the modules aws_*.py beside this one do the rest: capacity,
quotas, idempotence, time, interruptions, faults. Every instance is a machine of the lab (docs/lab.md). moto's state
is one for the process, so there is one world at a time.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from email.utils import formatdate
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import boto3
from moto import settings
from moto.ec2.models import ec2_backends
from moto.ec2.models.amis import Ami
from moto.ec2.models.elastic_network_interfaces import Attachment
from moto.ec2.models.tags import TagBackend
from moto.moto_api._internal.models import moto_api_backend
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.lab import aws_addresses, aws_calls, aws_facts, aws_schema, aws_shops, aws_wire
from tests.lab.aws_calls import PlacementGroup
from tests.lab.aws_facts import IMAGES
from tests.lab.aws_lag import Lag
from tests.lab.aws_launch import run_instances
from tests.lab.aws_life import Delays, Life, Rental, SpotRequest
from tests.lab.aws_limits import Throttle
from tests.lab.aws_permissions import Permissions, User
from tests.lab.aws_stock import Reservation, Rule, Stock
from tests.lab.aws_wire import (
    ApiError,
    Call,
    Reply,
    answer,
    ask_moto,
    confirmed,
    continued,
    error_code,
    read,
    refusal,
    rewritten,
)
from tests.lab.machines import Lab
from tests.lab.replay import Asked, NotRecorded, Replay
from tests.lab.world import Fault, World

ACCOUNT = "123456789012"
THINGS = (
    "DescribeInstances",
    "DescribeInstanceStatus",
    "DescribeKeyPairs",
    "DescribeNetworkInterfaces",
    "DescribePlacementGroups",
    "DescribeSpotInstanceRequests",
    "DescribeTags",
    "DescribeVolumes",
    "GetConsoleOutput",
)
"""Reads of what was made; see `Replay`."""
OWN = ("DescribeSecurityGroups", "DescribeSubnets", "DescribeVpcs")
NOTICE = 120.0
"""Seconds between the notice of an interruption and the interruption."""


class AWS(World[Call]):
    """One account. See `World`.

    Args:
        lab: Where instances boot; None for a world without machines, for calls alone.
        recording: A folder with a recording, which answers reads (tests/lab/replay.py); None for the lab's own answers.

    Attributes:
        url: For AWS_ENDPOINT_URL.
        delays: How long changes take.
        checks_times: Refuse requests whose time of signature is more than 5 minutes from `clock`.
        throttle: Set `throttle.requests` for limits on requests; 1000 instances at once are always the most.
        elastic_ips: So many Elastic IP addresses the account may have in each region.
        schema: What every request and reply is checked against, with how many that were.
    """

    def __init__(self, lab: Lab | None = None, recording: Path | str | None = None) -> None:
        super().__init__()
        self.lab = lab
        self.replay = None if recording is None else Replay(recording, THINGS, OWN)
        self.delays = Delays()
        self.checks_times = False
        self.throttle = Throttle()
        self.elastic_ips = aws_addresses.QUOTA
        self.schema = aws_schema.schema()
        self.tokens: dict[tuple[str, str], tuple[str, str]] = {}
        self.spots: dict[str, SpotRequest] = {}
        self.groups: dict[tuple[str, str], PlacementGroup] = {}
        self.lag = Lag(self.delays)
        self.opted_in: set[str] = set(aws_facts.ENABLED)
        self.life = Life(self)
        self.stock = Stock(self)
        self.permissions = Permissions(self)
        self._addresses = itertools.count(1)
        settings.ec2_load_default_amis = lambda: False  # 1300 of 2017, in each region
        moto_api_backend.reset()
        self.url = _server.serve(self)
        self._ticker.start()

    # --- for clients -----------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """For the environment of a client."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7LABLAB1",
            "AWS_SECRET_ACCESS_KEY": "not-a-secret-of-anybody",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def client(self, service: str = "ec2", region: str = "us-east-1", **options: Any) -> Any:
        """A boto3 client; `options` go to boto3."""
        environment = self.environment
        return boto3.client(
            service,
            region_name=region,
            endpoint_url=self.url,
            aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
            **options,
        )

    # --- what there is ---------------------------------------------------------------------------------------

    def capacity(self, number: int | None, type: str = "*", zone: str = "*", market: str = "*") -> None:
        """So many of an instance type in each zone and market; None for no limit. The last word counts.

        Args:
            type, zone, market: patterns of the shell: "p5.*", "us-east-1?"; "on-demand", "spot".
        """
        with self.lock:
            self.stock.rules.append(Rule(type, zone, market, number))

    def quota(self, vcpus: float, family: str, market: str = "on-demand", region: str = "*") -> None:
        """Of a family: P, G, Inf, Trn, DL, F, Standard, X, HPC, High; P5 for spot instances of P5 and P6."""
        with self.lock:
            self.stock.quotas[region, family, market] = vcpus

    def spot_price(self, zone: str, type: str, usd_per_hour: float) -> None:
        with self.lock:
            self.stock.prices[zone, type] = usd_per_hour

    def disk_price(self, region: str, usd: float) -> None:
        """Of a GB and month of a gp3 disk, in the price list; and `stock.address`, of an hour of a public address."""
        with self.lock:
            self.stock.disks[region] = usd

    def reserve(
        self,
        type: str,
        zone: str,
        number: int = 1,
        *,
        kind: str = "default",
        match: str = "targeted",
        start: float = 0.0,
        end: float | None = None,
        group: str = "",
        tenancy: str = "default",
    ) -> str:
        """A capacity reservation, or with kind="capacity-block" such a block; its id.

        Args:
            start, end: seconds from now; without an end it does not end.
            group: the name of its placement group, which must exist; "" for none.
        """
        with self.lock:
            now = self.clock.now()
            made = Reservation(
                zone.rstrip("abcdefgh"),
                zone,
                type,
                number,
                kind,
                match,
                now + start,
                None if end is None else now + end,
                group=group,
                tenancy=tenancy,
            )
            return self.stock.reserve(made).id

    def opt_in(self, region: str) -> None:
        """Regions beyond the 17 of every account answer AuthFailure before that."""
        self.opted_in.add(region)

    def opt_out(self, region: str) -> None:
        self.opted_in.discard(region)

    def may_use(self, region: str) -> bool:
        return region in self.opted_in

    def user(self, policy: str | Mapping[str, Any]) -> User:
        """A new IAM user with this policy, whose requests are put to it: see aws_permissions.py."""
        with self.lock:
            return self.permissions.add(policy)

    # --- what goes wrong -------------------------------------------------------------------------------------

    def fail(
        self,
        action: str,
        code: str,
        message: str = "",
        *,
        status: int = 0,
        times: int | None = 1,
        region: str = "*",
        service: str = "*",
        when: Callable[[Call], bool] = lambda call: True,
    ) -> Fault:
        """Refuse the next `times` calls of an action (None: all). Text and status follow from well-known codes."""

        def fits(call: Call) -> bool:
            return fnmatchcase(call.region, region) and fnmatchcase(call.service, service) and when(call)

        return self.happen(Fault(action, times, fits, error=ApiError(code, message, status)))

    def deny(self, action: str, region: str = "*") -> Fault:
        """The account may not do that: UnauthorizedOperation, also for a dry run."""
        return self.fail(action, "UnauthorizedOperation", times=None, region=region, service="ec2")

    def bad_credentials(self, *, expired: bool = False) -> list[Fault]:
        """Every call is refused as each service does it; `heal` ends that."""
        codes = ("RequestExpired", "ExpiredToken", "ExpiredTokenException") if expired else (
            "AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException")  # fmt: skip
        tests: list[Callable[[Call], bool]] = [
            lambda call: call.service == "ec2",
            lambda call: not call.is_json and call.service != "ec2",
            lambda call: call.is_json,
        ]
        return [self.fail("*", code, times=None, when=when) for code, when in zip(codes, tests, strict=True)]

    # --- instances -------------------------------------------------------------------------------------------

    def rental(self, instance_id: str) -> Rental:
        """What the lab knows of an instance, its `machine` among it."""
        return self.life.rentals[instance_id]

    @property
    def rentals(self) -> list[Rental]:
        """Every instance that is not terminated, by age."""
        with self.lock:
            self.life.tick()
            return [each for each in self.life.rentals.values() if each.is_living]

    def interrupt(self, instance_id: str, notice: float = NOTICE) -> None:
        """Take a spot instance back: its metadata says so, and after `notice` seconds of the clock it ends."""
        with self.lock:
            self.life.interrupt(self.rental(instance_id), notice)

    def rebalance(self, instance_id: str) -> None:
        """Recommend to leave a spot instance."""
        with self.lock:
            self.rental(instance_id).warned = self.clock.now()

    def fail_instance(self, instance_id: str, code: str, message: str) -> None:
        """End it as EC2 does on its own: Server.InternalError, Client.VolumeLimitExceeded, …"""
        with self.lock:
            self.life.terminate(self.rental(instance_id), (code, message))

    def count(self) -> dict[str, int]:
        """What is there, in all regions, that would be billed or left behind."""
        with self.lock:
            self.life.tick()
            regions = list(ec2_backends[ACCOUNT].values())
            return {
                "instances": sum(each.is_living for each in self.life.rentals.values()),
                "volumes": sum(len(region.volumes) for region in regions),
                "network_interfaces": sum(len(region.enis) for region in regions),
                "key_pairs": sum(len(region.key_pairs) for region in regions),
                "security_groups": sum(
                    group.name != "default"
                    for region in regions
                    for groups in region.groups.values()
                    for group in groups.values()
                ),
                "placement_groups": len(self.groups),
                "launch_templates": sum(len(region.launch_templates) for region in regions),
                "spot_requests": sum(each.state == "open" for each in self.spots.values()),
                "addresses": sum(len(region.addresses) for region in regions),
            }

    # --- used by the other modules ---------------------------------------------------------------------------

    def backend(self, region: str) -> Any:
        """moto's EC2 of a region, with the AMIs of this lab."""
        found = ec2_backends[ACCOUNT][region]
        if not any(image.id(region) in found.amis for image in IMAGES.values()):
            for image in IMAGES.values():
                found.amis[image.id(region)] = _ami(found, image, region)
            _open_to_the_internet(found)
        return found

    def public_address(self) -> str:
        """One that leads to no machine yet; without a lab, of a network kept for tests (RFC 2544)."""
        if self.lab is not None:
            return self.lab.network.take()
        number = next(self._addresses)
        return f"198.18.{number // 250 % 250}.{number % 250 + 1}"

    # --- serving ---------------------------------------------------------------------------------------------

    def serve(self, environ: WSGIEnvironment) -> Reply:
        """Answer one request.

        Raises:
            ConnectionResetError: If it gets no answer.
        """
        with self.lock:
            call = read(environ, len(self.journal) + 1, self.clock.now())
            self.journal.append(call)
        reply = self.live(call, lambda error: self._answer(call, environ, error))
        self.lag.after(call, reply)
        return reply

    def _answer(self, call: Call, environ: WSGIEnvironment, error: Exception | None) -> Reply:
        try:
            if error is not None:
                raise error
            self.watched(self.tick)
            if self.checks_times:
                aws_wire.check_time(environ, call)
            if (recorded := self._recorded(call)) is not None:
                return recorded
            if call.service and call.region not in self.opted_in:
                raise ApiError("AuthFailure" if call.service == "ec2" else "UnrecognizedClientException")
            if wrong := self.schema.wrong_request(call):
                raise aws_schema.refusal_of(call, wrong[0])
            reply = self._dispatch(call, environ)
            if reply.status < 400 and (told := self.schema.wrong_reply(call, reply)):
                self.errors.append(AssertionError(f"the lab's reply to {call.action} is not AWS's: {told[:5]}"))
            if self.replay is not None:
                self.replay.did(Asked.by_form(call.action, call.region, call.body.decode()), reply.status)
            return reply
        except ApiError as refused:
            call.error = refused.code
            return refusal(call, refused)
        except Exception as e:  # noqa: BLE001 - `close` raises it
            self.errors.append(e)
            return refusal(call, ApiError("InternalError", f"the lab itself failed: {e!r}", 500))

    def _recorded(self, call: Call) -> Reply | None:
        """The answer of the recording, if it is the one to answer.

        Raises:
            ApiError: It should have one, and has none.
        """
        if self.replay is None:
            return None
        try:
            found = self.replay.answer(Asked.by_form(call.action, call.region, call.body.decode()))
        except NotRecorded as e:
            raise ApiError("NotRecorded", str(e)) from e
        if found is None:
            return None
        reply = Reply(found.status, list(found.reply_headers.items()), str(found.reply).encode())
        call.error = error_code(reply)
        return reply

    def _dispatch(self, call: Call, environ: WSGIEnvironment) -> Reply:
        if call.service:
            self.permissions.check(call)
        if call.service == "ec2":
            self.throttle.request(call)
            self.backend(call.region)
            if (blank := self.lag.before(call)) is not None:
                return answer(call, blank)
            aws_calls.check_ids(call)
            aws_calls.check_tags(call)
            if call.action == "RunInstances":
                return run_instances(self, call, environ)
            if call.params.get("DryRun"):
                raise ApiError("DryRunOperation", "Request would have succeeded, but DryRun flag is set.", 412)
            if (check := aws_calls.CHECKS.get(call.action)) is not None:
                check(self, call)
            own = aws_calls.ANSWERS.get(call.action) or aws_addresses.ANSWERS.get(call.action)
            if own is not None:
                return answer(call, own(self, call))
        body = call.body
        if call.service == "ec2" and call.action == "CreateTags":  # moto does not know the placement groups
            if not (others := aws_calls.tag_groups(self, call)):
                return answer(call, {})
            body = rewritten(body, {f"ResourceId.{n}": each for n, each in enumerate(others, 1)}, ["ResourceId."])
        shop = aws_shops.ANSWERS.get((call.service, call.action))
        if shop is not None and (call.service != "ssm" or aws_shops.is_public(call)):
            return answer(call, shop(self, call))
        hidden = self._hide(call) if call.action in ("DescribeInstances", "DescribeInstanceStatus") else {}
        follows = self._turn(call, hidden) if call.action == "DescribeInstances" else ""
        body = rewritten(body, {}, ["NextToken"]) if call.action == "DescribeInstances" else body
        try:
            reply = ask_moto(environ, body)
        except NotImplementedError as error:
            raise ApiError("InvalidAction", f"The lab's AWS does not know {call.service}:{call.action}.") from error
        finally:
            for reservations, name, reservation in hidden.values():
                reservations[name] = reservation
        call.error = error_code(reply)
        return confirmed(call, continued(call, reply, follows))

    def _turn(self, call: Call, hidden: dict[str, tuple[Any, str, Any]]) -> str:
        """Take out the reservations of other pages, which moto does not have; the token of the next page.

        Filters apply within a page, as with the real one: a page may be empty and not the last.
        """
        if call.params.get("InstanceIds") or (self.pages.size is None and not self.pages.cut):
            return ""
        reservations = self.backend(call.region).reservations
        names, first = sorted(reservations), int(call.params.get("NextToken") or 0)
        last = first if self.pages.cut else first + (self.pages.size or 0)
        for name in (*names[:first], *names[last:]):
            hidden[name] = (reservations, name, reservations.pop(name))
        return str(last) if last < len(names) or self.pages.cut else ""

    def _hide(self, call: Call) -> dict[str, tuple[Any, str, Any]]:
        """Take out reservations that a description does not find yet; whoever asks for one by name is told so."""
        reservations = self.backend(call.region).reservations
        unseen = [each for each in self.life.rentals.values() if each.unseen and each.region == call.region]
        asked = call.params.get("InstanceIds", ())
        for each in unseen:
            each.unseen -= 1
        missing = [each.id for each in unseen if each.id in asked]
        if missing:
            raise aws_calls.not_found(missing)
        found = {}
        for name, reservation in list(reservations.items()):
            if any(each.model in reservation.instances for each in unseen):
                found[name] = (reservations, name, reservations.pop(name))
        return found

    # --- time ------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.life.tick()

    def close(self) -> None:
        _server.world = None
        self._closed.set()
        self._ticker.join()
        with self.lock:
            self.life.close()
        self.raise_errors()


_describe_tags = TagBackend.describe_tags


def _tags_of(backend: Any, filters: dict[str, list[str]] | None = None) -> Any:
    """Of one resource, from its own place: moto looks through the tags of all, for each of a thousand instances."""
    ids = (filters or {}).get("resource-id", [])
    if len(filters or ()) != 1 or len(ids) != 1 or ids[0] not in backend.tags:
        return _describe_tags(backend, filters)
    alone = TagBackend()
    alone.tags = {ids[0]: backend.tags[ids[0]]}
    return _describe_tags(alone, filters)


TagBackend.describe_tags = _tags_of  # type: ignore[method-assign, unused-ignore]  # pyright: ignore[reportAttributeAccessIssue]


_attached = Attachment.__init__


def _attached_to_its_card(attachment: Any, nic: Any) -> None:
    """As moto has it, but with the number of the card, which moto takes for 0."""
    _attached(attachment, nic)
    attachment.network_card_index = getattr(nic, "network_card_index", 0)


Attachment.__init__ = _attached_to_its_card  # type: ignore[method-assign, unused-ignore]  # pyright: ignore[reportAttributeAccessIssue]


class _Ami(Ami):  # type: ignore[misc]  # moto is not looked into
    """An AMI whose snapshot has a size."""

    image: aws_facts.Image

    @property
    def block_device_mappings(self) -> list[dict[str, Any]]:
        disk = {
            "SnapshotId": self.image.snapshot, "VolumeSize": self.image.size, "DeleteOnTermination": True,
            "VolumeType": "gp3", "Encrypted": False,
        }  # fmt: skip
        return [{"DeviceName": self.root_device_name, "Ebs": disk}]


def _ami(backend: Any, image: aws_facts.Image, region: str) -> Any:
    made: Any = _Ami(
        backend, image.id(region), name=image.name, description=image.name, owner_id=image.owner, owner_alias="amazon",
        public=True, virtualization_type="hvm", architecture=image.architecture, hypervisor="xen",
        root_device_type="ebs", region_name=f"{region}a",
    )  # fmt: skip
    made.image = image
    return made


def _open_to_the_internet(backend: Any) -> None:
    """Give the default network what moto leaves out: an internet gateway, and the route to it.

    https://docs.aws.amazon.com/vpc/latest/userguide/default-vpc-components.html (read 2026-11-24 in a stored copy).
    """
    vpc = backend.get_default_vpc()
    gateway = backend.create_internet_gateway()
    backend.attach_internet_gateway(gateway.id, vpc.id)
    main = backend.describe_route_tables(filters={"vpc-id": vpc.id, "association.main": "true"})
    backend.create_route(main[0].id, "0.0.0.0/0", gateway_id=gateway.id)


class _Handler(WSGIRequestHandler):
    def date_time_string(self, timestamp: float | None = None) -> str:
        """For the header Date: the lab's time."""
        world = _server.world
        return formatdate(world.clock.now() if world else timestamp, usegmt=True)

    def log(self, type: str, message: str, *args: Any) -> None:
        """Nothing: the journal has it."""


class _Server:
    """The socket, one for the process: it is bound once and never closed, so that a late call of a client that a
    test left behind is refused and does not meet somebody else's."""

    def __init__(self) -> None:
        self.world: AWS | None = None
        self._url = ""

    def serve(self, world: AWS) -> str:
        if self.world is not None:
            raise RuntimeError("another world is not closed yet: moto's state is one for the process")
        self.world = world
        if not self._url:
            server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=_Handler)
            threading.Thread(target=server.serve_forever, name="aws", daemon=True).start()
            self._url = f"http://127.0.0.1:{server.server_port}"
        return self._url

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if (world := self.world) is None:
            start_response("503 Service Unavailable", [])
            return [b""]
        try:
            reply = world.serve(environ)
        except ConnectionResetError:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise
        start_response(f"{reply.status} .", [*reply.headers, ("Content-Length", str(len(reply.body)))])
        return [reply.body]


_server = _Server()
