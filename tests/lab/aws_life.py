"""The life of the instances of the lab's AWS: their states on a clock, the machines behind them, their end.

moto's own objects hold what DescribeInstances shows. moto would have an instance running at once and terminated at
once; here it takes its time, and what it holds (capacity, volume, interface) is given back when it is really gone.
"""

from __future__ import annotations

import base64
import gzip
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moto.ec2.models.instances import StateReason

from tests.lab import aws_addresses, aws_images, aws_metadata
from tests.lab.aws_facts import Image, Market, family, vcpus
from tests.lab.machines import Machine

if TYPE_CHECKING:
    from tests.lab.aws import AWS

CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopping": 64, "stopped": 80}
REMEMBERED = 3600.0
"""Seconds for which a terminated instance can still be described."""
USER = ("Client.UserInitiatedShutdown", "User initiated shutdown")
INSIDE = ("Client.InstanceInitiatedShutdown", "Instance initiated shutdown")
INTERRUPTED = ("Server.SpotInstanceTermination", "Spot instance termination")
FAILED = ("Server.InternalError", "Internal error on launch")


@dataclass
class Delays:
    """Seconds of the lab's clock that a change takes.

    Attributes:
        pending: until an instance runs.
        address: after that, until it has a public address.
        ending, stopping: until it is terminated, or stopped.
        unseen: not seconds: so many descriptions of a new instance do not find it yet.
        unknown: not seconds: so many calls that name a new security group, key pair or placement group do not know it.
    """

    pending: float = 0.1
    address: float = 0.1
    ending: float = 0.1
    stopping: float = 0.1
    unseen: int = 0
    unknown: int = 0


@dataclass
class SpotRequest:
    """What a spot launch leaves in DescribeSpotInstanceRequests."""

    id: str
    kind: str
    price: str
    zone: str
    created: float
    tags: list[dict[str, str]]
    state: str = "active"
    code: str = "fulfilled"
    instance_id: str = ""

    def close(self, state: str, code: str) -> None:
        self.state, self.code = state, code


@dataclass
class Rental:
    """One instance.

    Attributes:
        model: moto's object.
        options: of its launch, as boto3 names them.
        keys: public keys of its key pair.
        machine: what runs it, if anything does.
        notice: when it will be interrupted, on the lab's clock; None unless that was announced.
        warned: when it was told that its interruption has become likely; None unless it was.
        unseen: so many descriptions do not find it yet.
        awaits_address: it gets a public address soon, unless an Elastic IP address comes before.
    """

    model: Any
    region: str
    zone: str
    type: str
    market: Market
    image: Image
    options: dict[str, Any]
    keys: list[str]
    public: bool
    reservation: str = ""
    spot: SpotRequest | None = None
    machine: Machine | None = None
    notice: float | None = None
    warned: float | None = None
    unseen: int = 0
    awaits_address: bool = False
    ending: Future[None] | None = None
    launched: float = field(default_factory=time.time)

    @property
    def id(self) -> str:
        return str(self.model.id)

    @property
    def state(self) -> str:
        return str(self.model._state.name)

    @state.setter
    def state(self, name: str) -> None:
        self.model._state.name, self.model._state.code = name, CODES[name]

    @property
    def is_living(self) -> bool:
        return self.state != "terminated"

    @property
    def holds_capacity(self) -> bool:
        return self.state not in ("terminated", "stopped")

    @property
    def group(self) -> str:
        return str(self.options.get("Placement", {}).get("GroupName", ""))

    @property
    def vcpus(self) -> int:
        return vcpus(self.type)

    @property
    def family(self) -> str:
        return family(self.type)

    @property
    def user_data(self) -> bytes:
        return base64.b64decode(self.options.get("UserData", ""))

    @property
    def ends_on_shutdown(self) -> bool:
        """Whether `poweroff` in it terminates it; a one-time spot instance cannot be stopped."""
        one_time = self.spot is not None and self.spot.kind == "one-time"
        return one_time or self.model.instance_initiated_shutdown_behavior == "terminate"

    def because(self, reason: tuple[str, str]) -> None:
        """Set StateReason and StateTransitionReason."""
        code, text = reason
        self.model.state_reason = StateReason(f"{code}: {text}", code)
        said = {USER: "User initiated", INTERRUPTED: "Server.SpotInstanceTermination"}.get(reason, code)
        self.model._reason = f"{said} ({time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} GMT)"


class Life:
    """Of all instances. Every method is called with the world's lock held."""

    def __init__(self, world: AWS) -> None:
        self.world = world
        self.rentals: dict[str, Rental] = {}
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._work = ThreadPoolExecutor(4, "aws-life")

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Once the lab's clock is so much further."""
        heapq.heappush(self.due, (self.world.clock.now() + seconds, next(self._order), do))

    def tick(self) -> None:
        """Do what is due, and see which machines have switched themselves off."""
        while self.due and self.due[0][0] <= self.world.clock.now():
            heapq.heappop(self.due)[2]()
        for rental in list(self.rentals.values()):
            if rental.state in ("pending", "running") and rental.machine is not None and not rental.machine.is_running:
                self._off(rental, rental.machine)

    # --- beginning -------------------------------------------------------------------------------------------

    def begin(self, rentals: list[Rental]) -> None:
        """Instances that moto has just made: nothing of them runs yet."""
        delays = self.world.delays
        for rental in rentals:
            rental.unseen = delays.unseen
            rental.model.state_reason = None
            rental.state = "pending"
            for nic in rental.model.nics.values():
                nic.public_ip = None
            self.rentals[rental.id] = rental
        if self.world.lab is not None:
            list(self._work.map(self._boot, rentals))
        for rental in rentals:
            self.later(delays.pending, lambda rental=rental: self._running(rental))  # type: ignore[misc]

    def _boot(self, rental: Rental) -> None:
        """Give it a machine; its address is known from here on."""
        assert self.world.lab is not None
        data = rental.user_data
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()

        def prepare(machine: Machine) -> None:
            rental.machine = machine
            nic = rental.model.nics[0]
            nic.private_ip_address = machine.address
            nic.private_ip_addresses = [{"Primary": True, "PrivateIpAddress": machine.address}]
            aws_images.dress(machine, rental)

        machine = self.world.lab.machine(
            user_data=text,
            keys=rental.keys,
            user="ubuntu",
            name=f"ip-{rental.id[-8:]}",
            metadata=lambda _: aws_metadata.handler(self.world, rental),
            minute=self.world.minute,
            prepare=prepare,
            wait=False,
        )
        aws_images.plug(machine, rental)

    def _running(self, rental: Rental) -> None:
        if rental.state != "pending":
            return
        rental.state = "running"
        if rental.public:
            rental.awaits_address = True
            self.later(self.world.delays.address, lambda: self._address(rental))

    def _address(self, rental: Rental) -> None:
        if rental.state == "running" and rental.awaits_address:
            rental.awaits_address = False
            nic = rental.model.nics[0]
            nic.public_ip = rental.machine.address if rental.machine else self.world.public_address()

    # --- ending ----------------------------------------------------------------------------------------------

    def terminate(self, rental: Rental, reason: tuple[str, str] = USER) -> None:
        """Quiet if that was done before."""
        if rental.state in ("shutting-down", "terminated"):
            return
        rental.because(reason)
        rental.state = "shutting-down"
        if rental.spot is not None and rental.spot.state != "cancelled":
            why = "instance-terminated-by-user" if reason is USER else "instance-terminated-no-capacity"
            rental.spot.close("open" if rental.spot.kind == "persistent" else "closed", why)
        if rental.machine is not None:
            rental.ending = self._work.submit(rental.machine.destroy)
        self.later(self.world.delays.ending, lambda: self._terminated(rental))

    def _terminated(self, rental: Rental) -> None:
        if rental.ending is not None:
            if not rental.ending.done():
                self.later(0.02 * self.world.clock.speed, lambda: self._terminated(rental))
                return
            rental.ending.result()
        model, backend = rental.model, self.world.backend(rental.region)
        reason, transition = model.state_reason, model._reason
        aws_addresses.let_go(self.world, rental)
        model.terminate()
        model.state_reason, model._reason = reason, transition
        for nic in model.nics.values():
            nic.public_ip = None
            backend.enis.pop(nic.id, None)
        self.later(REMEMBERED, lambda: self._forgotten(rental))

    def _forgotten(self, rental: Rental) -> None:
        self.rentals.pop(rental.id, None)
        reservations = self.world.backend(rental.region).reservations
        for key, reservation in list(reservations.items()):
            if rental.model in reservation.instances:
                reservation.instances.remove(rental.model)
                if not reservation.instances:
                    del reservations[key]

    def _off(self, rental: Rental, machine: Machine) -> None:
        """It was switched off from inside, or its kernel died."""
        if machine.poweroff_reason.startswith(("reboot", "shutdown -r")):
            self._boot_again(rental)
        elif rental.ends_on_shutdown:
            self.terminate(rental, INSIDE)
        else:
            self.stop(rental, INSIDE)

    # --- in between ------------------------------------------------------------------------------------------

    def stop(self, rental: Rental, reason: tuple[str, str] = USER) -> None:
        """Its disk stays, and is billed."""
        if rental.state not in ("pending", "running"):
            return
        rental.because(reason)
        rental.state = "stopping"
        if rental.public:  # an Elastic IP address stays
            rental.model.nics[0].public_ip = None
        if rental.machine is not None:
            rental.machine.kill()
        self.later(self.world.delays.stopping, lambda: self._stopped(rental))

    def _stopped(self, rental: Rental) -> None:
        if rental.state == "stopping":
            rental.state = "stopped"

    def start(self, rental: Rental) -> None:
        """A stopped one again; the caller has seen that there is capacity."""
        rental.state = "pending"
        rental.model.state_reason = None
        rental.model._reason = ""
        self._boot_again(rental)
        self.later(self.world.delays.pending, lambda: self._running(rental))

    def reboot(self, rental: Rental) -> None:
        if rental.machine is not None:
            rental.machine.kill()
            self._boot_again(rental)

    def _boot_again(self, rental: Rental) -> None:
        if rental.machine is not None:
            rental.machine.forget_user_data()
            rental.machine.boot()
            aws_images.plug(rental.machine, rental)

    def interrupt(self, rental: Rental, notice: float) -> None:
        """Announce that the cloud takes it back, and do so `notice` seconds later."""
        rental.notice = self.world.clock.now() + notice
        if rental.spot is not None:
            rental.spot.code = "marked-for-termination"
        self.later(notice, lambda: self.terminate(rental, INTERRUPTED))

    def close(self) -> None:
        """End every machine."""
        futures = [self._work.submit(each.machine.destroy) for each in self.rentals.values() if each.machine]
        self._work.shutdown()
        for future in futures:
            future.result()
