"""Verda as its clients see it: OAuth, plain-text ids, prices as strings, volumes that outlive their machines.

    with Verda(lab) as verda:  # or the fixtures `verda`, and `verda_api` without machines
        driver = sky.Verda()

What it does and how it refuses is what public code and threads tell of the real one (read 2026-11-21). Instances are
machines of the lab, booted with their startup script, which runs once sshd is up; what is switched off is billed on.
Requests and replies are checked against the types of Verda's own SDKs (tests/lab/verda_schema.py).
"""

from __future__ import annotations

import itertools
import math
import re
import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from tests.lab import verda_wares as wares
from tests.lab.cloud import Answer, Cloud, Refused, Rental, Request, Route
from tests.lab.machines import Lab, Machine
from tests.lab.openapi import Checker, Document
from tests.lab.verda_extras import Clusters, Serverless
from tests.lab.verda_schema import DOCUMENT

ID, SECRET = "lab-client-0123456789", "lab-secret-abcdefghij"
TOKEN_SECONDS = 3600.0
REFRESHABLE = 7200.0
WORDS = {
    "invalid_request": 400, "unauthorized_request": 401, "insufficient_funds": 402, "forbidden_action": 403,
    "not_found": 404, "too_many_requests": 429, "server_error": 500, "service_unavailable": 503,
}  # fmt: skip
"""The codes of errors, with their status."""
GONE = ("discontinued", "no_capacity")
PERIOD = 600.0
"""Seconds for which the balance is charged in advance."""
SCHEMA = Document(DOCUMENT)


def refused(code: str, message: str) -> Refused:
    return Refused(WORDS[code], {"code": code, "message": message})


@dataclass
class Delays:
    """Seconds of the lab's clock: until an instance is provisioned, in which it is, and in which it is validated; until
    one that was deleted is gone.

    Attributes:
        unseen: not seconds: so many lists of instances do not have a new one yet.
    """

    ordered: float = 0.05
    provisioning: float = 0.1
    validating: float = 0.05
    deleting: float = 0.05
    unseen: int = 0


@dataclass
class Volume:
    """One volume; `instance` has it, "" where none does. What is in the trash is not billed. `kind`: its type, such as
    "NVMe_Local_Storage" where it is built into the machine. `created`: on the world's clock.
    """

    id: str
    name: str
    size: int
    location: str
    instance: str = ""
    is_os: bool = True
    discontinued: str = "keep_detached"
    trashed: bool = False
    kind: str = "NVMe"
    created: float = 0.0


@dataclass
class VerdaRental(Rental):
    """One instance; `told` is what was asked for. `living`: it is billed.

    Attributes:
        usd: its price an hour.
        ended: when it was no longer billed; None while it is.
    """

    told: dict[str, Any] = field(default_factory=dict[str, Any])
    tags: dict[str, str] = field(default_factory=dict[str, str])
    ip: str | None = None
    unseen: int = 0
    sold_out: bool = False
    usd: float = 0.0
    ended: float | None = None


class Verda(Cloud[VerdaRental]):
    """One account. See `Cloud`; actions are "GET /instances", "POST /oauth2/token", without the "/v1".

    Attributes:
        balance: USD before anything is charged; where none is left, nothing can be deployed.
        volumes, keys, scripts: what there is, by id.
        quoted: whether ids come as JSON strings, as some of its servers write them.
        built_in: GB of a disk that comes with each machine, beside that which is asked for; 0: none.
    """

    name: ClassVar[str] = "verda"
    things: ClassVar[tuple[str, ...]] = tuple(
        f"GET /v1/{each}*" for each in ("instances", "volumes", "ssh", "scripts", "balance")
    )

    def __init__(self, lab: Lab | None = None, recording: Path | str | None = None) -> None:
        super().__init__(lab, recording)
        self.balance, self.delays, self.quoted, self.built_in = 100.0, Delays(), False, 0
        self.volumes: dict[str, Volume] = {}
        self.keys: dict[str, dict[str, str]] = {}
        self.scripts: dict[str, dict[str, str]] = {}
        self.prices: dict[tuple[str, str], str] = {}
        self._tokens: dict[str, float] = {}
        self._refresh: dict[str, float] = {}
        self.clusters, self.serverless = Clusters(self), Serverless()
        self._paid: list[VerdaRental] = []
        self._doomed, self._numbers = 0, itertools.count(1)
        self.capacity(0)
        for row in wares.rows():
            if row["region"] != "unknown":
                self.capacity(None, row["instance_type"], row["region"])
        checker = Checker(SCHEMA, _unfit, self.errors)
        for name, do in {**self._table(), **self.clusters.table(), **self.serverless.table()}.items():
            for each in {name, name.replace("/ssh-keys", "/sshkeys")}:  # its Python SDK says it so
                self.routes[each.replace(" /", " /v1/")] = checker.checked(each, do)

    def _table(self) -> dict[str, Route]:
        return {
            "POST /oauth2/token": self._token,
            "GET /balance": lambda _: {"amount": self.left_usd(), "currency": "usd"},
            "GET /locations": lambda _: wares.LOCATIONS,
            "GET /images": lambda request: wares.images(request.query.get("instance_type", "")),
            "GET /images/cluster": lambda _: wares.images(cluster=True),
            "GET /volume-types": self._volume_types,
            "GET /instance-types": self._types,
            "GET /instance-availability": self._availability,
            "GET /instance-availability/{kind}": self._available,
            "GET /instances": self._instances,
            "POST /instances": self._deploy,
            "PUT /instances": self._act,
            "GET /instances/{id}": lambda request: self._shown(self._known(request.by["id"])),
            "POST /instances/{id}/tags": self._tag,
            "DELETE /instances/{id}/tags/{key}": self._untag,
            "GET /ssh-keys": lambda _: list(self.keys.values()),
            "POST /ssh-keys": lambda request: self._made(self.keys, request, "key"),
            "DELETE /ssh-keys": lambda request: self._dropped(self.keys, request.body["keys"], "ssh key"),
            "GET /ssh-keys/{id}": lambda request: [self._one(self.keys, request.by["id"], "ssh key")],
            "DELETE /ssh-keys/{id}": lambda request: self._dropped(self.keys, [request.by["id"]], "ssh key"),
            "GET /scripts": lambda _: list(self.scripts.values()),
            "POST /scripts": lambda request: self._made(self.scripts, request, "script"),
            "DELETE /scripts": lambda request: self._dropped(self.scripts, request.body["scripts"], "script"),
            "GET /scripts/{id}": lambda request: [self._one(self.scripts, request.by["id"], "script")],
            "DELETE /scripts/{id}": lambda request: self._dropped(self.scripts, [request.by["id"]], "script"),
            "GET /volumes": self._volumes,
            "POST /volumes": self._new_volume,
            "PUT /volumes": self._act_on_volumes,
            "GET /volumes/trash": lambda _: [self._volume(v) for v in self.volumes.values() if v.trashed],
            "GET /volumes/{id}": lambda request: self._volume(self._known_volume(request.by["id"])),
            "DELETE /volumes/{id}": self._delete_volume,
            "GET /long-term/periods": lambda _: wares.PERIODS,
            "GET /long-term/periods/instances": lambda _: wares.PERIODS,
            "GET /long-term/periods/clusters": lambda _: wares.PERIODS,
        }

    @property
    def environment(self) -> dict[str, str]:
        return {"VERDA_BASE_URL": f"{self.url}/v1", "VERDA_CLIENT_ID": ID, "VERDA_CLIENT_SECRET": SECRET}

    def named(self, request: Request) -> str:
        return request.action.replace(" /v1/", " /")

    def count(self) -> dict[str, int]:
        """A volume in the trash costs nothing, and is gone in days."""
        with self.lock:
            kept = sum(not each.trashed and not each.instance for each in self.volumes.values())
            counted = {"volumes": kept, "ssh keys": len(self.keys), "scripts": len(self.scripts)}
            return {**super().count(), **counted, "clusters": len(self.clusters.made)}

    def left_usd(self) -> float:
        """What is left of the balance.

        It is charged for ten minutes in advance. What a machine that has ended did not use of them comes back when they
        are over: https://docs.verda.com/welcome-to-verda/pricing-and-billing, as third parties quoted it (read
        2026-11-22).
        """
        return self.balance - sum(map(self._charged, self._paid))

    def _charged(self, rental: VerdaRental) -> float:
        now, born = self.clock.now(), rental.created
        periods = math.floor(((now if rental.ended is None else rental.ended) - born) / PERIOD) + 1
        seconds = periods * PERIOD
        if rental.ended is not None and now >= born + seconds:
            seconds = rental.ended - born
        return seconds / 3600 * rental.usd

    def _over(self, rental: VerdaRental) -> None:
        """It is no longer billed; one for which there was no machine never was."""
        rental.living = False
        if rental.ended is None:
            rental.ended = self.clock.now()

    # --- what happens to it ----------------------------------------------------------------------------------

    def refuse(self, action: str, code: str, message: str, times: int | None = 1, **when: Any) -> None:
        """Refuse the next calls in its own words."""
        self.fail(action, WORDS[code], {"code": code, "message": message}, times=times, **when)

    def expire(self, *, refreshable: bool = True) -> None:
        """Every access token that is out is of no use any more, nor, unless it is `refreshable`, to get another."""
        with self.lock:
            self._tokens.clear()
            if not refreshable:
                self._refresh.clear()

    def sell_out(self, times: int = 1) -> None:
        """The next instances are accepted, and then there is none for them."""
        with self.lock:
            self._doomed += times

    def preempt(self, id: str) -> None:
        """Take a spot instance back, without a word."""
        with self.lock:
            self._discontinued(self.rentals[id])

    # --- who asks --------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        if request.action == "POST /oauth2/token":
            return
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind != "Bearer" or self._tokens.get(token, 0.0) <= self.clock.now():
            raise refused("unauthorized_request", "Access token is missing or invalid")

    def _token(self, request: Request) -> Any:
        asked, now = request.body or {}, self.clock.now()
        if asked.get("grant_type") == "client_credentials":
            if (asked.get("client_id"), asked.get("client_secret")) != (ID, SECRET):
                raise refused("unauthorized_request", "Invalid client id or client secret")
        elif asked.get("grant_type") != "refresh_token":
            raise refused("invalid_request", "grant_type is not valid")
        elif self._refresh.pop(asked.get("refresh_token", ""), 0.0) <= now:
            raise refused("invalid_request", "Invalid refresh token")
        access, refresh = f"access-{uuid.uuid4().hex}", f"refresh-{uuid.uuid4().hex}"
        self._tokens[access], self._refresh[refresh] = now + TOKEN_SECONDS, now + REFRESHABLE
        told = {"access_token": access, "refresh_token": refresh, "scope": "cloud-api-v1", "token_type": "Bearer"}
        return {**told, "expires_in": int(TOKEN_SECONDS)}

    # --- what is sold ----------------------------------------------------------------------------------------

    def _types(self, request: Request) -> Any:
        euro = request.query.get("currency", "usd") == "eur"
        return [{**each, "currency": "eur"} if euro else each for each in wares.types().values()]

    def _volume_types(self, request: Request) -> Any:
        prices = {"NVMe": wares.NVME, "HDD": 0.05, "NVMe_Shared": 0.2}
        return [
            {"type": name, "price": {"price_per_month_per_gb": usd, "currency": "usd"}} for name, usd in prices.items()
        ]

    def _availability(self, request: Request) -> Any:
        market, where = _market(request.query), request.query.get("location_code")
        codes = [each["code"] for each in wares.LOCATIONS if where in (None, each["code"])]
        return [
            {"location_code": code, "availabilities": [k for k in wares.types() if self.room(k, code, market) > 0]}
            for code in codes
        ]

    def _available(self, request: Request) -> Any:
        market, where, kind = _market(request.query), request.query.get("location_code"), request.by["kind"]
        codes = [each["code"] for each in wares.LOCATIONS if where in (None, each["code"])]
        return any(self.room(kind, code, market) > 0 for code in codes)

    # --- instances -------------------------------------------------------------------------------------------

    def _deploy(self, request: Request) -> Any:
        told = request.body
        kind, place = told["instance_type"], told.get("location_code", "FIN-01")
        market = "spot" if told.get("is_spot") else "on-demand"
        if kind not in wares.types():
            raise refused("invalid_request", "Invalid instance type")
        image = wares.image_type(told["image"])  # its SDKs take the id of an image, too
        if image not in wares.types()[kind]["supported_os"]:
            raise refused("invalid_request", "Operating system is not valid for this instance type")
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", told["hostname"]):
            raise refused("invalid_request", "hostname is not valid")
        if place not in [each["code"] for each in wares.LOCATIONS]:
            raise refused("invalid_request", "Invalid location code")
        unknown = [each for each in told.get("ssh_key_ids") or () if each not in self.keys]
        if unknown or (told.get("startup_script_id") or "") not in {"", *self.scripts}:
            raise refused("invalid_request", "Invalid ssh key id or startup script id")
        if self.left_usd() <= 0:
            raise refused("insufficient_funds", "Not enough funds")
        if self.room(kind, place, market) < 1:
            gpus = wares.types()[kind]["gpu"]["number_of_gpus"]
            text = f"Not enough resources to deploy a {gpus} GPU instance type {kind} in {place}"
            raise refused("service_unavailable", text)
        now, about = self.clock.now(), wares.types()[kind]
        rental = VerdaRental(str(uuid.uuid4()), kind, place, market, now, "ordered", told=told | {"os": image})
        rental.usd = float(about["spot_price" if market == "spot" else "price_per_hour"])
        rental.tags, rental.unseen = _tags(told.get("tags", [])), self.delays.unseen
        rental.sold_out, self._doomed = self._doomed > 0, max(0, self._doomed - 1)
        disk = told.get("os_volume") or {"name": f"OS-{rental.id[:8]}", "size": 50}
        volume = Volume(str(uuid.uuid4()), disk["name"], disk["size"], place, rental.id, created=now)
        volume.discontinued = disk.get("on_spot_discontinue") or "keep_detached"
        self.volumes[volume.id] = volume
        if self.built_in:
            local = Volume(str(uuid.uuid4()), f"local-{rental.id[:8]}", self.built_in, place, rental.id, is_os=False)
            local.kind, local.created = "NVMe_Local_Storage", now
            self.volumes[local.id] = local
        self.rentals[rental.id] = rental
        self._paid.append(rental)
        self.later(self.delays.ordered, lambda: self._provision(rental))
        return self._plain(rental.id, 202)

    def _provision(self, rental: VerdaRental) -> None:
        if rental.state != "ordered":
            return
        if rental.sold_out:
            rental.state, rental.living = "no_capacity", False
            self._paid.remove(rental)
            self._detach(rental)
            return
        rental.state = "provisioning"
        keys = [self.keys[each]["key"] for each in rental.told.get("ssh_key_ids") or () if each in self.keys]
        script = self.scripts.get(rental.told.get("startup_script_id") or "", {}).get("script", "")

        def prepare(machine: Machine) -> None:
            rental.machine = machine
            wares.dress(machine, rental.kind, rental.told["os"])

        self.boot(rental, user_data=script, keys=keys, user="root", prepare=prepare)
        if rental.machine is not None:
            wares.plug(rental.machine, rental.kind)
        self.later(self.delays.provisioning, lambda: self._provisioned(rental))

    def _provisioned(self, rental: VerdaRental) -> None:
        if rental.state == "provisioning":
            rental.state = "validating"
            self.later(self.delays.validating, lambda: self._run(rental))

    def _run(self, rental: VerdaRental) -> None:
        if rental.state == "validating":
            rental.state = "running"
            rental.ip = rental.machine.address if rental.machine else f"203.0.113.{next(self._numbers) % 250 + 1}"

    def off(self, rental: VerdaRental) -> None:
        """It is billed on."""
        if rental.state in ("provisioning", "validating", "running"):
            rental.state = "offline"

    def _instances(self, request: Request) -> Any:
        """All of them: its API has no pages. Where it breaks off, it says so as others do (RFC 8288)."""
        if self.pages.cut:
            return Answer([], headers={"Link": f'<{self.url}/v1/instances?page=2>; rel="next"'})
        shown = []
        for each in self.rentals.values():
            each.unseen -= each.unseen > 0
            if not each.unseen and request.query.get("status") in (None, "", each.state):
                shown.append(self._shown(each))
        return shown

    def _known(self, id: str) -> VerdaRental:
        if id not in self.rentals:
            raise refused("not_found", "Invalid instance id")
        return self.rentals[id]

    def _shown(self, rental: VerdaRental) -> dict[str, Any]:
        about, told = wares.types()[rental.kind], rental.told
        has = [each for each in self.volumes.values() if each.instance == rental.id]
        price = about["spot_price" if rental.market == "spot" else "price_per_hour"]
        return {
            "id": rental.id, "ip": rental.ip, "status": rental.state, "hostname": told["hostname"],
            "created_at": _time(rental.created),
            "description": told["description"], "location": rental.place, "is_spot": rental.market == "spot",
            "instance_type": rental.kind, "image": told["image"],
            "ssh_key_ids": told.get("ssh_key_ids") or [],
            "os_volume_id": next((each.id for each in has if each.is_os), None),
            "volume_ids": [each.id for each in has], "startup_script_id": told.get("startup_script_id"),
            "contract": told.get("contract"), "pricing": told.get("pricing"), "price_per_hour": float(price),
            "gpu": about["gpu"], "cpu": about["cpu"], "memory": about["memory"], "gpu_memory": about["gpu_memory"],
            "storage": about["storage"], "jupyter_token": None,
            "tags": [{"id": f"{rental.id[:8]}-{key}", "key": key, "value": v} for key, v in rental.tags.items()],
        }  # fmt: skip

    def _act(self, request: Request) -> Any:
        told = request.body
        ids = told["id"] if isinstance(told["id"], list) else [told["id"]]
        outcomes = [self._acted(each, told) for each in ids]
        wrong = [each for each in outcomes if each["status"] == "error"]
        if len(ids) == 1 and wrong:
            raise refused({404: "not_found"}.get(wrong[0]["statusCode"], "forbidden_action"), wrong[0]["error"])
        return Answer(outcomes, 207) if wrong else Answer(None, 204)

    def _acted(self, id: str, told: dict[str, Any]) -> dict[str, Any]:
        outcome = {"action": told["action"], "instanceId": id, "status": "success", "error": None, "statusCode": 200}
        try:
            rental = self._known(id)
            if told["action"] not in ("delete", "discontinue", "shutdown", "start"):
                raise refused("invalid_request", f"the lab's Verda cannot {told['action']}")
            if rental.state in ("discontinued", "provisioning"):
                raise refused("forbidden_action", f"Can't discontinue a {rental.state} instance")
            if told["action"] in ("delete", "discontinue"):
                self._delete(rental, told.get("volume_ids"), bool(told.get("delete_permanently")))
            else:
                self._switch(rental, on=told["action"] == "start")
        except Refused as e:
            return {**outcome, "status": "error", "error": e.body["message"], "statusCode": e.status}
        return outcome

    def _switch(self, rental: VerdaRental, *, on: bool) -> None:
        """It is billed on where it is off."""
        if rental.state != ("offline" if on else "running"):
            raise refused("forbidden_action", f"Can't {'start' if on else 'shutdown'} a {rental.state} instance")
        rental.state = "running" if on else "offline"
        if rental.machine is not None:
            rental.machine.boot() if on else rental.machine.kill()

    def _delete(self, rental: VerdaRental, volume_ids: list[str] | None, permanently: bool) -> None:
        """Without volumes that are named, its disk goes to the trash; what is not named stays, and is billed."""
        if rental.survives():
            return
        rental.state = "deleting"
        for each in [each for each in self.volumes.values() if each.instance == rental.id]:
            if each.id in (volume_ids or ()) and permanently:
                del self.volumes[each.id]
            elif each.id in (volume_ids or ()) or (volume_ids is None and each.is_os):
                each.trashed, each.instance = True, ""
            else:
                each.instance = ""

        def gone() -> None:
            self._over(rental)
            self.rentals.pop(rental.id, None)

        self.later(self.delays.deleting, lambda: self.end(rental, gone))

    def _discontinued(self, rental: VerdaRental) -> None:
        rental.state, rental.ip = "discontinued", None
        self._over(rental)
        self._detach(rental)
        self.end(rental, lambda: None)

    def _detach(self, rental: VerdaRental) -> None:
        for each in [each for each in self.volumes.values() if each.instance == rental.id]:
            each.instance, each.trashed = "", each.discontinued == "move_to_trash"
            if each.discontinued == "delete_permanently" and rental.market == "spot":
                del self.volumes[each.id]

    # --- tags, keys, scripts, volumes ------------------------------------------------------------------------

    def _tag(self, request: Request) -> Any:
        rental = self._known(request.by["id"])
        new = _tags([request.body])
        if set(new) & set(rental.tags):
            raise Refused(409, {"code": "invalid_request", "message": "Tag already exists"})
        if len(rental.tags) >= 10:
            raise refused("invalid_request", "An instance can have at most 10 tags")
        rental.tags |= new
        return Answer({"key": request.body["key"], "value": request.body["value"]}, 201)

    def _untag(self, request: Request) -> Any:
        rental = self._known(request.by["id"])
        if rental.tags.pop(request.by["key"], None) is None:
            raise refused("not_found", "Tag not found")
        return Answer(None, 204)

    def _made(self, things: dict[str, dict[str, str]], request: Request, what: str) -> Any:
        made = {"id": str(uuid.uuid4()), "name": request.body["name"], what: request.body[what]}
        things[made["id"]] = made
        return self._plain(made["id"], 201)

    def _one(self, things: dict[str, dict[str, str]], id: str, what: str) -> dict[str, str]:
        if id not in things:
            raise refused("not_found", f"Invalid {what} id")
        return things[id]

    def _dropped(self, things: dict[str, dict[str, str]], ids: list[str], what: str) -> Any:
        """All of them, or none where one is not there."""
        for each in [self._one(things, id, what) for id in ids]:
            del things[each["id"]]
        return Answer(None, 200)

    def _volumes(self, request: Request) -> list[dict[str, Any]]:
        shown = [self._volume(each) for each in self.volumes.values() if not each.trashed]
        return [each for each in shown if request.query.get("status") in (None, "", each["status"])]

    def _volume(self, volume: Volume) -> dict[str, Any]:
        status = "deleted" if volume.trashed else "attached" if volume.instance else "detached"
        monthly = volume.size * wares.NVME
        return {
            "id": volume.id, "name": volume.name, "size": volume.size, "status": status, "type": volume.kind,
            "location": volume.location, "is_os_volume": volume.is_os, "instance_id": volume.instance or None,
            "created_at": _time(volume.created), "target": "vda" if volume.instance else None, "ssh_key_ids": [],
            "contract": "PAY_AS_YOU_GO", "base_hourly_cost": monthly / 730, "monthly_price": monthly, "currency": "usd",
        }  # fmt: skip

    def _known_volume(self, id: str) -> Volume:
        if id not in self.volumes:
            raise refused("not_found", "Invalid volume id")
        return self.volumes[id]

    def _new_volume(self, request: Request) -> Answer:
        told = request.body
        owner = told.get("instance_id") or ""
        place = self._known(owner).place if owner else told.get("location_code", "FIN-01")
        made = Volume(
            str(uuid.uuid4()), told["name"], told["size"], place, owner, is_os=False, kind=told["type"],
            created=self.clock.now(),
        )  # fmt: skip
        self.volumes[made.id] = made
        return self._plain(made.id, 202)

    def _act_on_volumes(self, request: Request) -> Answer:
        """Attaching and detaching need an instance that is off."""
        told = request.body
        ids = [told["id"]] if isinstance(told["id"], str) else told["id"]
        made: list[str] = []
        for volume in [self._known_volume(each) for each in ids]:
            owner = told.get("instance_id") or volume.instance
            if told["action"] in ("attach", "detach") and self._known(owner).state != "offline":
                raise refused("forbidden_action", f"Can't {told['action']} a volume of a running instance")
            if told["action"] == "attach":
                volume.instance = owner
            elif told["action"] == "detach":
                volume.instance = ""
            elif told["action"] == "rename":
                volume.name = told["name"]
            elif told["action"] == "resize":
                if told["size"] <= volume.size:
                    raise refused("invalid_request", "The size of a volume can only grow")
                volume.size = told["size"]
            elif told["action"] == "delete":
                self._drop_volume(volume, bool(told.get("is_permanent")))
            else:
                clone = replace(
                    volume, id=str(uuid.uuid4()), name=told.get("name") or f"{volume.name}-clone", instance="",
                    kind=told.get("type") or volume.kind, created=self.clock.now(),
                )  # fmt: skip
                self.volumes[clone.id] = clone
                made.append(clone.id)
        return Answer(made, 202)

    def _drop_volume(self, volume: Volume, permanently: bool) -> None:
        if volume.instance:
            raise refused("forbidden_action", "Can't delete a volume that is attached to a running instance")
        volume.trashed = True
        if permanently:
            del self.volumes[volume.id]

    def _delete_volume(self, request: Request) -> Any:
        self._drop_volume(self._known_volume(request.by["id"]), bool((request.body or {}).get("is_permanent")))
        return Answer(None, 202)

    def _plain(self, id: str, status: int) -> Answer:
        return Answer(id, status, plain=not self.quoted)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def _unfit(wrong: list[str]) -> Refused:
    return refused("invalid_request", "; ".join(wrong))


def _market(query: dict[str, str]) -> str:
    """Its own clients write the word in two ways."""
    return "spot" if "true" in (query.get("is_spot"), query.get("isSpot")) else "on-demand"


def _tags(pairs: list[dict[str, str]]) -> dict[str, str]:
    """As they are kept: keys in lower case."""
    tags = {each["key"].lower(): each["value"] for each in pairs}
    if len(tags) > 10 or any(len(key) > 63 or len(value) > 127 for key, value in tags.items()):
        raise refused("invalid_request", "Invalid tags")
    return tags
