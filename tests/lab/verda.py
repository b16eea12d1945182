"""Verda as its clients see it: OAuth, plain-text ids, prices as strings, volumes that outlive their machines.

    with Verda(lab) as verda:  # or the fixtures `verda`, and `verda_api` without machines
        driver = sky.Verda()

What it does and how it refuses is what public code and threads tell of the real one (read 2026-11-21). Instances are
machines of the lab, booted with their startup script, which runs once sshd is up; what is switched off is billed on.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from tests.lab import verda_wares as wares
from tests.lab.cloud import Answer, Cloud, Refused, Rental, Request
from tests.lab.machines import Lab, Machine

ID, SECRET = "lab-client-0123456789", "lab-secret-abcdefghij"
TOKEN_SECONDS = 3600.0
REFRESHABLE = 7200.0
WORDS = {
    "invalid_request": 400, "unauthorized_request": 401, "insufficient_funds": 402, "forbidden_action": 403,
    "not_found": 404, "too_many_requests": 429, "server_error": 500, "service_unavailable": 503,
}  # fmt: skip
"""The codes of errors, with their status."""
GONE = ("discontinued", "no_capacity")


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
    "NVMe_Local_Storage" where it is built into the machine.
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


@dataclass
class VerdaRental(Rental):
    """One instance; `told` is what was asked for. `living`: it is billed."""

    told: dict[str, Any] = field(default_factory=dict[str, Any])
    tags: dict[str, str] = field(default_factory=dict[str, str])
    ip: str | None = None
    unseen: int = 0
    sold_out: bool = False


class Verda(Cloud[VerdaRental]):
    """One account. See `Cloud`; actions are "GET /instances", "POST /oauth2/token", without the "/v1".

    Attributes:
        balance: USD that are left; without any nothing can be deployed.
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
        self._doomed, self._numbers = 0, itertools.count(1)
        self.capacity(0)
        for row in wares.rows():
            if row["region"] != "unknown":
                self.capacity(None, row["instance_type"], row["region"])
        self.routes = {f"{method} /v1{path}": do for method, path, do in self._table()}
        keys = {route: do for route, do in self.routes.items() if "/ssh-keys" in route}
        self.routes |= {route.replace("/ssh-keys", "/sshkeys"): do for route, do in keys.items()}  # as its SDK says

    def _table(self) -> list[tuple[str, str, Callable[[Request], Any]]]:
        return [
            ("POST", "/oauth2/token", self._token),
            ("GET", "/balance", lambda _: {"amount": self.balance, "currency": "usd"}),
            ("GET", "/locations", lambda _: wares.LOCATIONS),
            ("GET", "/images", lambda request: wares.images(request.query.get("instance_type", ""))),
            ("GET", "/volume-types", self._volume_types),
            ("GET", "/instance-types", self._types),
            ("GET", "/instance-availability", self._availability),
            ("GET", "/instance-availability/{kind}", self._available),
            ("GET", "/instances", self._instances),
            ("POST", "/instances", self._deploy),
            ("PUT", "/instances", self._act),
            ("GET", "/instances/{id}", lambda request: self._shown(self._known(request.by["id"]))),
            ("POST", "/instances/{id}/tags", self._tag),
            ("DELETE", "/instances/{id}/tags/{key}", self._untag),
            ("GET", "/ssh-keys", lambda _: list(self.keys.values())),
            ("POST", "/ssh-keys", lambda request: self._made(self.keys, request, "key")),
            ("DELETE", "/ssh-keys/{id}", lambda request: self._dropped(self.keys, request, "ssh key")),
            ("GET", "/scripts", lambda _: list(self.scripts.values())),
            ("POST", "/scripts", lambda request: self._made(self.scripts, request, "script")),
            ("GET", "/scripts/{id}", lambda request: [self._one(self.scripts, request, "script")]),
            ("DELETE", "/scripts/{id}", lambda request: self._dropped(self.scripts, request, "script")),
            ("GET", "/volumes", lambda _: [self._volume(each) for each in self.volumes.values() if not each.trashed]),
            ("GET", "/volumes/trash", lambda _: [self._volume(v) for v in self.volumes.values() if v.trashed]),
            ("DELETE", "/volumes/{id}", self._delete_volume),
        ]

    @property
    def environment(self) -> dict[str, str]:
        return {"VERDA_BASE_URL": f"{self.url}/v1", "VERDA_CLIENT_ID": ID, "VERDA_CLIENT_SECRET": SECRET}

    def named(self, request: Request) -> str:
        return request.action.replace(" /v1/", " /")

    def count(self) -> dict[str, int]:
        """A volume in the trash costs nothing, and is gone in days."""
        with self.lock:
            kept = sum(not each.trashed and not each.instance for each in self.volumes.values())
            return {**super().count(), "volumes": kept, "ssh keys": len(self.keys), "scripts": len(self.scripts)}

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
        return [{"type": name, "price": {"price_per_month_per_gb": usd}} for name, usd in prices.items()]

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
        kind, place = told["instance_type"], told["location_code"]
        market = "spot" if told.get("is_spot") else "on-demand"
        if kind not in wares.types():
            raise refused("invalid_request", "Invalid instance type")
        if told["image"] not in wares.types()[kind]["supported_os"]:
            raise refused("invalid_request", "Operating system is not valid for this instance type")
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", told["hostname"]):
            raise refused("invalid_request", "hostname is not valid")
        unknown = [each for each in told["ssh_key_ids"] if each not in self.keys]
        if unknown or not told["ssh_key_ids"] or told.get("startup_script_id", "") not in {"", *self.scripts}:
            raise refused("invalid_request", "Invalid ssh key id or startup script id")
        if self.balance <= 0:
            raise refused("insufficient_funds", "Not enough funds")
        if self.room(kind, place, market) < 1:
            gpus = wares.types()[kind]["gpu"]["number_of_gpus"]
            text = f"Not enough resources to deploy a {gpus} GPU instance type {kind} in {place}"
            raise refused("service_unavailable", text)
        rental = VerdaRental(str(uuid.uuid4()), kind, place, market, self.clock.now(), "ordered", told=told)
        rental.tags, rental.unseen = _tags(told.get("tags", [])), self.delays.unseen
        rental.sold_out, self._doomed = self._doomed > 0, max(0, self._doomed - 1)
        disk = told.get("os_volume") or {"name": f"OS-{rental.id[:8]}", "size": 50}
        volume = Volume(str(uuid.uuid4()), disk["name"], disk["size"], place, rental.id)
        volume.discontinued = disk.get("on_spot_discontinue") or "keep_detached"
        self.volumes[volume.id] = volume
        if self.built_in:
            local = Volume(str(uuid.uuid4()), f"local-{rental.id[:8]}", self.built_in, place, rental.id, is_os=False)
            local.kind = "NVMe_Local_Storage"
            self.volumes[local.id] = local
        self.rentals[rental.id] = rental
        self.later(self.delays.ordered, lambda: self._provision(rental))
        return self._plain(rental.id, 202)

    def _provision(self, rental: VerdaRental) -> None:
        if rental.state != "ordered":
            return
        if rental.sold_out:
            rental.state, rental.living = "no_capacity", False
            self._detach(rental)
            return
        rental.state = "provisioning"
        keys = [self.keys[each]["key"] for each in rental.told["ssh_key_ids"] if each in self.keys]
        script = self.scripts.get(rental.told.get("startup_script_id", ""), {}).get("script", "")

        def prepare(machine: Machine) -> None:
            rental.machine = machine
            wares.dress(machine, rental.kind, rental.told["image"])

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
            "created_at": datetime.fromtimestamp(rental.created, UTC).isoformat().replace("+00:00", "Z"),
            "description": told["description"], "location": rental.place, "is_spot": rental.market == "spot",
            "instance_type": rental.kind, "image": told["image"], "ssh_key_ids": told["ssh_key_ids"],
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
                raise refused("invalid_request", "Invalid action")
            if rental.state in ("discontinued", "provisioning"):
                raise refused("forbidden_action", f"Can't discontinue a {rental.state} instance")
            if told["action"] in ("delete", "discontinue"):
                self._delete(rental, told.get("volume_ids"), bool(told.get("delete_permanently")))
        except Refused as e:
            return {**outcome, "status": "error", "error": e.body["message"], "statusCode": e.status}
        return outcome

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
            rental.living = False
            self.rentals.pop(rental.id, None)

        self.later(self.delays.deleting, lambda: self.end(rental, gone))

    def _discontinued(self, rental: VerdaRental) -> None:
        rental.state, rental.living, rental.ip = "discontinued", False, None
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

    def _one(self, things: dict[str, dict[str, str]], request: Request, what: str) -> dict[str, str]:
        if request.by["id"] not in things:
            raise refused("not_found", f"Invalid {what} id")
        return things[request.by["id"]]

    def _dropped(self, things: dict[str, dict[str, str]], request: Request, what: str) -> Any:
        del things[self._one(things, request, what)["id"]]
        return Answer(None, 200)

    def _volume(self, volume: Volume) -> dict[str, Any]:
        status = "deleted" if volume.trashed else "attached" if volume.instance else "detached"
        return {
            "id": volume.id, "name": volume.name, "size": volume.size, "status": status, "type": volume.kind,
            "location": volume.location, "is_os_volume": volume.is_os, "instance_id": volume.instance or None,
            "created_at": datetime.now(UTC).isoformat(), "target": "vda", "ssh_key_ids": [],
        }  # fmt: skip

    def _delete_volume(self, request: Request) -> Any:
        volume = self.volumes.get(request.by["id"])
        if volume is None:
            raise refused("not_found", "Invalid volume id")
        if volume.instance:
            raise refused("forbidden_action", "Can't delete a volume that is attached to a running instance")
        volume.trashed = True
        if (request.body or {}).get("is_permanent"):
            del self.volumes[volume.id]
        return Answer(None, 202)

    def _plain(self, id: str, status: int) -> Answer:
        return Answer(id, status, plain=not self.quoted)


def _market(query: dict[str, str]) -> str:
    """Its own clients write the word in two ways."""
    return "spot" if "true" in (query.get("is_spot"), query.get("isSpot")) else "on-demand"


def _tags(pairs: list[dict[str, str]]) -> dict[str, str]:
    """As they are kept: keys in lower case."""
    tags = {each["key"].lower(): each["value"] for each in pairs}
    if len(tags) > 10 or any(len(key) > 63 or len(value) > 127 for key, value in tags.items()):
        raise refused("invalid_request", "Invalid tags")
    return tags
