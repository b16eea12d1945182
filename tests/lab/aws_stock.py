"""What the lab's AWS has to give: capacity by zone, type and market, quotas by family, spot prices, reservations."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from tests.lab import aws_facts
from tests.lab.aws_facts import Market
from tests.lab.aws_wire import ApiError, Call

if TYPE_CHECKING:
    from tests.lab.aws import AWS

QUOTA = 100_000.0
"""vCPUs of a family and market unless a test says otherwise: never the reason by accident."""
GP3 = {
    "us-east-1": 0.08, "us-east-2": 0.08, "us-west-1": 0.096, "us-west-2": 0.08, "ap-south-1": 0.0912,
    "ap-northeast-1": 0.096, "ap-northeast-2": 0.0912, "ap-northeast-3": 0.096, "ap-southeast-1": 0.096,
    "ap-southeast-2": 0.096, "ca-central-1": 0.088, "eu-central-1": 0.0952, "eu-west-1": 0.088, "eu-west-2": 0.0928,
    "eu-west-3": 0.0928, "eu-north-1": 0.0836, "sa-east-1": 0.152,
}  # fmt: skip
"""USD a GB and month of a gp3 disk: https://aws.amazon.com/ebs/pricing as quoted on 2021-07-14."""
BLOCK_ENDS = 1800.0
"""Seconds before the end of a capacity block when its instances are terminated."""


@dataclass
class Reservation:
    """A capacity reservation, or a capacity block that was bought. Times are those of the lab's clock.

    Attributes:
        match: "open", or "targeted": only launches that name it.
        group: the name of the placement group that its machines must be in; "" if it is in none.
    """

    region: str
    zone: str
    type: str
    total: int
    kind: str
    match: str
    start: float
    end: float | None
    state: str = "active"
    tags: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    group: str = ""
    tenancy: str = "default"
    id: str = field(default_factory=lambda: f"cr-0{secrets.token_hex(8)}")


@dataclass(frozen=True)
class Rule:
    """So many of what the patterns match, in each zone for itself; None for no limit."""

    type: str
    zone: str
    market: str
    number: int | None


class Stock:
    """Every method is called with the world's lock held."""

    def __init__(self, world: AWS) -> None:
        self.world = world
        self.rules: list[Rule] = []
        self.quotas: dict[tuple[str, str, str], float] = {}
        self.prices: dict[tuple[str, str], float] = {}
        self.disks: dict[str, float] = dict(GP3)
        self.address = 0.005
        self.reservations: dict[str, Reservation] = {}

    # --- capacity --------------------------------------------------------------------------------------------

    def free(self, zone: str, kind: str, market: str) -> float:
        """How many more there are."""
        limit: int | None = None
        for rule in self.rules:
            patterns = ((rule.type, kind), (rule.zone, zone), (rule.market, market))
            if all(fnmatchcase(value, pattern) for pattern, value in patterns):
                limit = rule.number
        if limit is None:
            return math.inf
        living = self.world.life.rentals.values()
        used = sum(
            each.holds_capacity and not each.reservation and (each.zone, each.type, each.market) == (zone, kind, market)
            for each in living
        )
        return max(0, limit - used)

    def sold_out(self, region: str, kind: str, market: str, zone: str) -> ApiError:
        """In the service's words."""
        if market == "spot":
            return ApiError(
                "InsufficientInstanceCapacity", "There is no Spot capacity available that matches your request."
            )
        others = [each for each in aws_facts.zones_of(region, kind) if each != zone and self.free(each, kind, market)]
        if not zone:
            text = f"We currently do not have sufficient {kind} capacity in the Availability Zones you requested. Our system will be working on provisioning additional capacity."  # noqa: E501
        else:
            text = f"We currently do not have sufficient {kind} capacity in the Availability Zone you requested ({zone}). Our system will be working on provisioning additional capacity."  # noqa: E501
            if others:
                text += f" You can currently get {kind} capacity by not specifying an Availability Zone in your request or choosing {', '.join(others)}."  # noqa: E501
        return ApiError("InsufficientInstanceCapacity", text)

    # --- quotas ----------------------------------------------------------------------------------------------

    def quota(self, region: str, family: str, market: str) -> float:
        """vCPUs."""
        found = [self.quotas.get((place, family, market)) for place in (region, "*")]
        return next((each for each in found if each is not None), QUOTA)

    def within_quota(self, region: str, kind: str, market: Market, least: int, most: int) -> int:
        """How many of them the account may have.

        Raises:
            ApiError: VcpuLimitExceeded, or MaxSpotInstanceCountExceeded, if these are fewer than `least`.
        """
        family, each = aws_facts.bucket(kind, market), aws_facts.vcpus(kind)
        limit = self.quota(region, family, market)
        living = self.world.life.rentals.values()
        used = sum(
            other.vcpus
            for other in living
            if other.holds_capacity
            and (other.region, other.market) == (region, market)
            and aws_facts.bucket(other.type, market) == family
        )
        number = int(max(0, limit - used) // each)
        if number >= least:
            return min(number, most)
        if market == "spot":
            raise ApiError("MaxSpotInstanceCountExceeded")
        text = f"You have requested more vCPU capacity than your current vCPU limit of {limit:.0f} allows for the instance bucket that the specified instance type belongs to. Please visit http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit."  # noqa: E501
        raise ApiError("VcpuLimitExceeded", text)

    # --- spot prices -----------------------------------------------------------------------------------------

    def spot_price(self, zone: str, kind: str) -> float | None:
        """USD an hour now; None where the snapshot has none."""
        region = zone.rstrip("abcdefgh")
        return self.prices.get((zone, kind)) or aws_facts.spot_prices(region).get((kind, zone))

    def affordable(self, region: str, zones: Sequence[str], kind: str, most: float | None) -> list[str]:
        """Where the price is no higher than what is offered, which is the on-demand price if nothing is said.

        Raises:
            ApiError: SpotMaxPriceTooLow: nowhere.
        """
        if most is None:
            return list(zones)
        found = [zone for zone in zones if (self.spot_price(zone, kind) or 0.0) <= most]
        if not found:
            lowest = min(self.spot_price(zone, kind) or 0.0 for zone in zones)
            text = f"Your Spot request price of {most:g} is lower than the minimum required Spot request fulfillment price of {lowest:g}."  # noqa: E501
            raise ApiError("SpotMaxPriceTooLow", text)
        return found

    # --- reservations ----------------------------------------------------------------------------------------

    def available(self, reservation: Reservation) -> int:
        """How many instances it still holds."""
        living = self.world.life.rentals.values()
        used = sum(each.holds_capacity and each.reservation == reservation.id for each in living)
        return reservation.total - used

    def reserved(
        self, call: Call, asked: str, kind: str, zone: str, market: Market, least: int, most: int
    ) -> tuple[str, int]:
        """The zone of a reservation, and how many of it a launch gets."""
        if not asked:
            text = "A Capacity Block launch must target a capacity reservation."
            raise ApiError("InvalidParameterCombination", text)
        found = self.reservations.get(asked)
        if found is None or found.region != call.region:
            text = f"The capacity reservation ID '{asked}' does not exist"
            raise ApiError("InvalidCapacityReservationId.NotFound", text)
        if (found.kind == "capacity-block") != (market == "capacity-block"):
            text = "The specified market type does not match the type of the Capacity Reservation."
            raise ApiError("InvalidParameterCombination", text)
        if found.state != "active":
            text = f"The Capacity Reservation {asked} is not active: it is {found.state}."
            raise ApiError("InvalidCapacityReservationState", text)
        placement = call.params.get("Placement", {})
        group, tenancy = placement.get("GroupName", ""), placement.get("Tenancy", "default")
        if group and found.kind == "capacity-block":  # https://github.com/aws/aws-parallelcluster/pull/6311
            text = "The specified placement group cannot be used with a Capacity Block."
            raise ApiError("InvalidParameterCombination", text)
        is_elsewhere = bool(found.group) and group != found.group
        if found.type != kind or zone not in ("", found.zone) or tenancy != found.tenancy or is_elsewhere:
            text = f"The attributes of the Capacity Reservation {asked} ({found.type}, {found.zone}) do not match those of the launch."  # noqa: E501
            raise ApiError("InvalidParameterValue", text)
        room = self.available(found)
        if group and not found.group:
            # Machines of such a reservation may be far from each other, and a cluster group takes those that are near.
            # Somebody got 11 of 16: https://github.com/eksctl-io/eksctl/issues/7949
            room = room * 11 // 16
        if room < least:
            text = "The Capacity Reservation does not have sufficient available capacity for your request."
            raise ApiError("ReservationCapacityExceeded", text)
        return found.zone, min(room, most)

    def open_reservation(self, region: str, kind: str, zone: str, least: int) -> str:
        """The id of one that a launch uses without naming it; "" if there is none."""
        for each in self.reservations.values():
            fits = (each.region, each.type, each.state) == (region, kind, "active") and zone in ("", each.zone)
            if fits and each.match == "open" and self.available(each) >= least:
                return each.id
        return ""

    def reserve(self, reservation: Reservation) -> Reservation:
        """It begins at `start`, and ends with its instances."""
        self.reservations[reservation.id] = reservation
        now, life = self.world.clock.now(), self.world.life
        if reservation.start > now:
            reservation.state = "scheduled"
            life.later(reservation.start - now, lambda: self._become(reservation, "active"))
        if reservation.end is not None:
            if reservation.kind == "capacity-block":
                life.later(reservation.end - BLOCK_ENDS - now, lambda: self._clear(reservation))
            life.later(reservation.end - now, lambda: self._become(reservation, "expired"))
        return reservation

    def _become(self, reservation: Reservation, state: str) -> None:
        if reservation.state not in ("cancelled", "expired"):
            reservation.state = state

    def _clear(self, reservation: Reservation) -> None:
        reason = ("Server.CapacityBlockExpired", "The Capacity Block reservation is about to end")
        for rental in list(self.world.life.rentals.values()):
            if rental.reservation == reservation.id:
                self.world.life.terminate(rental, reason)
