"""RunPod in the lab: its API REST v2, and GraphQL as it is asked for stock and pods.

Pods are containers: the start command of each is process 1 of a machine, its ports are mapped to others of the lab's
gateway, and it is started anew when that command ends. Every request and reply of REST v2 is checked against the schema
that RunPod publishes (tests/lab/runpod_v2.json). Errors of GraphQL come with HTTP 200.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal

from graphql import (
    DocumentNode,
    GraphQLError,
    GraphQLSyntaxError,
    OperationDefinitionNode,
    execute_sync,
    parse,
    validate,
)

from skypool.accelerators import parse as accelerator
from skypool.errors import UnknownAccelerator
from tests.lab import repository
from tests.lab.cloud import Answer, Cloud, Refused, Rental, Request
from tests.lab.machines import Lab, Machine
from tests.lab.openapi import Checker, Document
from tests.lab.prices import snapshot
from tests.lab.relay import Relay
from tests.lab.runpod_schema import SCHEMA
from tests.lab.world import Fault

CENTERS = {"CA-MTL-1": "CA", "EU-RO-1": "RO", "US-TX-3": "US"}
COUNTRIES = ("CA", "SE", "US")
FLAVORS = {"cpu3c": (2, 0.03, 10), "cpu3g": (4, 0.04, 10), "cpu5c": (2, 0.035, 15)}
"""GB of memory, USD an hour and GB of disk for each vCPU (https://docs.runpod.io/flash/configuration/cpu-types, read
2026-11-23)."""
FEWEST_VCPUS, MOST_VCPUS = 2, 32
GONE = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again.",
    "SUPPLY_CONSTRAINT",
)
TITLES = {
    400: "Bad Request", 401: "Unauthorized", 402: "Payment Required", 403: "Forbidden", 404: "Not Found",
    409: "Conflict", 422: "Unprocessable Entity", 429: "Too Many Requests", 500: "Internal Server Error",
}  # fmt: skip
TROUBLE = ("Something went wrong. Please try again later or contact support.", "INTERNAL_SERVER_ERROR")
PUBLIC = ("gpuTypes", "cpuFlavors", "dataCenters", "countryCodes")
"""What GraphQL tells without a key."""
DISK = 0.10
"""USD for a GB of a container's disk and month: https://docs.runpod.io/pods/storage/types (read 2026-11-23)."""
MOST_GPUS, MOST_VARIABLES, LONGEST_NAME = 8, 50, 191
DRIVER = "570.172.08"
PAGE = 100
"""Pods on a page of the list. The true number is not known."""


@dataclass
class Pod(Rental):
    """One pod. `asked` is its create's input; `kind` the GPU type or CPU instance, `place` its data centre or country.

    Attributes:
        key: of the API, that may end this pod and nothing else.
        runs: when it began to run and when it stopped, None where it runs. ended: when it was deleted. All on the
            world's clock.
        bid: USD an hour for a GPU; usd: for all of it.
        runtime: since when its container runs, on the world's clock; None until it does.
        seen_at: when lists begin to have it.
    """

    asked: Mapping[str, Any] = field(default_factory=dict[str, Any])
    key: str = ""
    name: str = ""
    bid: float = 0.0
    usd: float = 0.0
    runtime: float | None = None
    seen_at: float = 0.0
    starts: int = 0
    ending: bool = False
    runs: list[tuple[float, float | None]] = field(default_factory=list[tuple[float, float | None]])
    ended: float | None = None


@dataclass
class Delays:
    """Seconds of the world's clock: until a container runs (its image is fetched), and until RunPod knows a new pod, in
    lists and by its id."""

    starting: float = 0.0
    listing: float = 0.0


class RunPod(Cloud[Pod]):
    """One account. GPU types and prices are those of the snapshot, the same in both clouds unless `price` was called.

    Attributes:
        balance, spend_limit: USD, and USD an hour (None for no limit); a pod that exceeds one of them is refused.
        volumes: network volumes and their data centres.
        least: (vCPUs, GB) of every machine.
        most_cuda: the newest CUDA that drivers of its machines can do.
        bad_keys: keys that are not known; read_only: those that may look and nothing else.
        spoilt: fields of pods, with what is said of them: each time a pod is told of, the last one fails, and is null
            in data that come with that error.
        odd: fields of pods that REST v2 tells otherwise than they are.
        takes: the field of a create that has the start command: "args", or "cmd" as it is seen since October 2026.
    """

    name: ClassVar[str] = "runpod"
    things: ClassVar[tuple[str, ...]] = ("GET /v2/pods*", "GET /v2/network-volumes*")

    def __init__(self, lab: Lab | None = None, recording: Path | str | None = None) -> None:
        super().__init__(lab, recording)
        self.key = "rpa_TESTTESTTESTTEST"
        self.balance = 1000.0
        self.spend_limit: float | None = 10_000.0
        self.volumes: dict[str, str] = {"vol0ro": "EU-RO-1"}
        self.delays = Delays()
        self.least, self.most_cuda = (16, 120), (13, 0)
        self.bad_keys: set[str] = set()
        self.read_only: set[str] = set()
        self.pubkey = ""
        self._ever: list[Pod] = []
        self.spoilt: list[tuple[str, str]] = []
        self.odd: dict[str, Any] = {}
        self.prices: dict[tuple[str, str], tuple[float, float | None]] = {}
        on_demand = {each.instance_type: each.usd_per_hour for each in snapshot("runpod") if each.market != "spot"}
        spot = {each.instance_type: each.usd_per_hour for each in snapshot("runpod") if each.market == "spot"}
        for kind, usd in on_demand.items():
            for cloud in ("SECURE", "COMMUNITY"):
                self.prices[kind, cloud] = usd, spot.get(kind)
        self.takes: Literal["args", "cmd"] = "args"
        self.schema = published()
        rest = {
            "GET /v2/pods": self._pods,
            "POST /v2/pods": self._create,
            "GET /v2/pods/{id}": lambda request: self._v2(self._there(request)),
            "PATCH /v2/pods/{id}": self._patch,
            "DELETE /v2/pods/{id}": self._delete,
            "POST /v2/pods/{id}/action": self._act,
            "GET /v2/billing/pods": self._billing,
            "GET /v2/network-volumes": self._volumes,
            "GET /v2/catalog/gpus": self._catalog_gpus,
            "GET /v2/catalog/cpus": self._catalog_cpus,
            "GET /v2/catalog/datacenters": lambda request: {"dataCenters": [_center(each) for each in CENTERS]},
        }
        self.routes = {"POST /graphql": self._graphql}
        checker = Checker(self.schema, _unfit, self.errors)
        self.routes |= {route: checker.checked(route, do) for route, do in rest.items()}
        later = Checker(with_cmd(), _unfit, self.errors).checked("POST /v2/pods", self._create)
        create = self.routes["POST /v2/pods"]
        self.routes["POST /v2/pods"] = lambda request: (later if self.takes == "cmd" else create)(request)
        self._asking, self._nobody = "", False
        self._numbers = itertools.count(1)

    @property
    def environment(self) -> dict[str, str]:
        return {"RUNPOD_API_KEY": self.key, "RUNPOD_API_BASE_URL": self.url}

    # --- strings ---------------------------------------------------------------------------------------------

    def price(self, kind: str, usd: float, spot: float | None, cloud: str = "SECURE") -> None:
        """USD an hour for each GPU from now on; who bid less than that is out."""
        with self.lock:
            self.prices[kind, cloud] = usd, spot
            out = [each for each in self.rentals.values() if each.market == "spot" and each.kind == kind]
        for each in out:
            if each.asked["cloudType"] == cloud and each.bid < (spot or 0.0):
                self.interrupt(each.id)

    def interrupt(self, id: str) -> None:
        """It is outbid: it stops, and its disk is billed on. Nobody is told."""
        with self.lock:
            pod = self.rentals[id]
            machine, relays = pod.machine, list(pod.ports.values())
            pod.machine, pod.ports, pod.state, pod.runtime = None, {}, "EXITED", None
            pod.runs[-1] = pod.runs[-1][0], pod.runs[-1][1] or self.clock.now()
        for relay in relays:
            relay.close()
        if machine is not None:
            machine.destroy()

    def vanish(self, id: str) -> None:
        """Its host is gone, and it with it."""
        with self.lock:
            self._terminate(self.rentals[id])
        self.wait(lambda: id not in self.rentals, 30)

    def refuse(self, action: str, text: str, code: str = "", times: int | None = 1) -> Fault:
        """REST v2 refuses a call with this status, which is 400 without one; GraphQL a field, with HTTP 200."""
        if " " in action:
            status = int(code or 400)
            return self.fail(action, status, _problem(status, TITLES[status], text).body, times=times)
        error = {"message": text, "path": [action], **({"extensions": {"code": code}} if code else {})}
        return self.fail(action, 200, {"errors": [error], "data": {action: None}}, times=times)

    # --- asking ----------------------------------------------------------------------------------------------

    def named(self, request: Request) -> str:
        """The first field of what is asked."""
        if request.path != "/graphql" or not isinstance(request.body, dict):
            return request.action
        document, _ = _read(request.body.get("query", ""))
        if not document.definitions:
            return request.action
        operation = document.definitions[0]
        assert isinstance(operation, OperationDefinitionNode)
        return str(getattr(operation.selection_set.selections[0], "name").value)  # noqa: B009 - not all kinds have one

    def check(self, request: Request) -> None:
        key = request.headers.get("authorization", "").removeprefix("Bearer ") or request.query.get("api_key", "")
        self._asking = next((pod.id for pod in self.rentals.values() if pod.key == key), "")
        self._nobody = not key and request.path == "/graphql"  # who may ask what is sold
        if self._nobody:
            return
        if (not self._asking and not key.startswith("rpa_")) or key in self.bad_keys:
            if request.path != "/graphql":
                raise _problem(401, "Unauthorized", "Invalid or missing API key.")
            raise Refused(401, {"errors": [{"message": "Unauthorized", "extensions": {"code": "UNAUTHENTICATED"}}]})
        if key in self.read_only and request.path != "/graphql" and request.method != "GET":
            raise _problem(403, "Forbidden", "this key may not do that")
        own = f"/v2/pods/{self._asking}"
        ends = ((own, "DELETE"), (f"{own}/action", "POST"))
        if self._asking and request.path != "/graphql" and (request.path, request.method) not in ends:
            raise _problem(403, "Forbidden", "this key may not do that")

    def throttled(self, request: Request) -> Refused:
        limit = {"Retry-After": "1", "RateLimit": '"minute";r=0;t=1', "RateLimit-Policy": '"minute";q=60;w=60'}
        return _problem(429, "Too Many Requests", "Rate limit exceeded.", limit)

    def _graphql(self, request: Request) -> Answer:
        asked = request.body if isinstance(request.body, dict) else {}
        document, wrong = _read(asked.get("query", ""))
        if wrong:
            code = {"extensions": {"code": "GRAPHQL_VALIDATION_FAILED"}}
            return Answer({"errors": [{"message": each.message, **code} for each in wrong]}, 400)
        done = execute_sync(
            SCHEMA, document, self._root(), variable_values=asked.get("variables") or {},
            operation_name=asked.get("operationName"),
        )  # fmt: skip
        for each in done.errors or ():
            if each.original_error is not None and not isinstance(each.original_error, GraphQLError):
                self.errors.append(AssertionError(f"{each.message}: {each.original_error!r}"))
        if done.errors and done.data is None:  # the variables did not fit their types
            bad = {"extensions": {"code": "BAD_USER_INPUT"}}
            return Answer({"errors": [{"message": each.message, **bad} for each in done.errors]}, 400)
        return Answer(done.formatted)

    def _root(self) -> dict[str, Any]:
        mine = bool(self._asking)

        def denied(info: Any, **given: Any) -> Any:
            raise GraphQLError("Not authorized to perform this operation", extensions={"code": "FORBIDDEN"})

        fields = {
            "gpuTypes": self._gpu_types,
            "cpuFlavors": self._cpu_flavors,
            "dataCenters": lambda info: [{"id": each, "name": each, "listed": True} for each in CENTERS],
            "countryCodes": lambda info: [*COUNTRIES],
            "myself": self._myself,
            "podFindAndDeployOnDemand": lambda info, input: self._deploy(input, "on-demand"),
            "podRentInterruptable": lambda info, input: self._deploy(input, "spot"),
            "deployCpuPod": lambda info, input: self._deploy(input, "on-demand"),
            "updateUserSettings": lambda info, input: self._settled(input["pubKey"]),
        }
        own = {
            "pod": self._pod,
            "podTerminate": lambda info, input: self._terminated(input["podId"]),
            "podStop": lambda info, input: self._stopped(input["podId"]),
            "podResume": lambda info, input: self._resumed(input["podId"]),
        }
        if self._nobody:
            return {**dict.fromkeys({**fields, **own}, denied), **{name: fields[name] for name in PUBLIC}}
        return {**(dict.fromkeys(fields, denied) if mine else fields), **own}

    # --- what is sold ----------------------------------------------------------------------------------------

    def _gpu_types(self, info: Any, input: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        asked = input or {}
        ids = asked.get("ids") or ([asked["id"]] if asked.get("id") else None)
        kinds = dict.fromkeys(kind for kind, _ in self.prices)
        return [self._gpu_type(kind) for kind in kinds if ids is None or kind in ids]

    def _gpu_type(self, kind: str) -> dict[str, Any]:
        secure, community = self.prices.get((kind, "SECURE")), self.prices.get((kind, "COMMUNITY"))
        return {
            "id": kind, "displayName": kind.removeprefix("NVIDIA "), "manufacturer": kind.split()[0],
            "memoryInGb": _memory(kind), "cudaCores": 0, "secureCloud": bool(secure), "communityCloud": bool(community),
            "securePrice": secure and secure[0], "communityPrice": community and community[0],
            "secureSpotPrice": secure and secure[1], "communitySpotPrice": community and community[1],
            "maxGpuCount": MOST_GPUS, "maxGpuCountSecureCloud": MOST_GPUS if secure else 0,
            "maxGpuCountCommunityCloud": MOST_GPUS if community else 0,
            "lowestPrice": lambda info, input=None: self._lowest(kind, input or {"gpuCount": 1}),
        }  # fmt: skip

    def _lowest(self, kind: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Of one GPU, for a pod of so many; all null where there is none."""
        cloud = "SECURE" if asked.get("secureCloud", True) else "COMMUNITY"
        prices, fits = self.prices.get((kind, cloud)), self._fits(asked)
        stocked = {
            market: self._place(kind, cloud, market, asked) is not None and asked["gpuCount"] <= MOST_GPUS
            for market in ("on-demand", "spot")
        }
        if prices is None or not fits or not any(stocked.values()):
            return {}  # whatever is asked of it is null
        return {
            "uninterruptablePrice": prices[0] if stocked["on-demand"] else None,
            "minimumBidPrice": prices[1] if stocked["spot"] else None,
            "stockStatus": "Low", "minVcpu": self.least[0], "minMemory": self.least[1],
        }  # fmt: skip

    def _fits(self, asked: Mapping[str, Any]) -> bool:
        """Whether its machines are large and new enough."""
        floor = tuple(map(int, (asked.get("minCudaVersion") or "0.0").split(".")))
        small = (asked.get("minVcpuCount") or 0) > self.least[0] or (asked.get("minMemoryInGb") or 0) > self.least[1]
        return floor <= self.most_cuda and not small

    def _place(self, kind: str, cloud: str, market: str, asked: Mapping[str, Any]) -> str | None:
        """Where there is room for one more."""
        places: Iterable[str] = CENTERS if cloud == "SECURE" else COUNTRIES
        places = [each for each in places if each in (asked.get("dataCenterIds") or places)]
        only = asked.get("dataCenterId") or asked.get("countryCode")
        wanted = [each for each in places if only in (None, each) or CENTERS.get(each) == asked.get("countryCode")]
        if volume := asked.get("networkVolumeId"):
            wanted = [each for each in wanted if each == self.volumes.get(volume)]
        return next((each for each in wanted if self.room(kind, each, market) >= 1), None)

    def _cpu_flavors(self, info: Any, input: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        def specifics(flavor: str, asked: Mapping[str, Any] | None) -> dict[str, Any]:
            wanted = str((asked or {}).get("instanceId") or f"{flavor}-1-0")
            stocked = wanted.startswith(f"{flavor}-") and self._place(wanted, "SECURE", "on-demand", asked or {})
            price = FLAVORS[flavor][1] * int(wanted.split("-")[1])
            return {"stockStatus": "High" if stocked else None, "securePrice": price}

        return [
            {"id": each, "displayName": each, "groupName": each, "minVcpu": 2, "maxVcpu": 32, "ramMultiplier": ram,
             "diskLimitPerVcpu": disk, "specifics": lambda info, input=None, each=each: specifics(each, input)}
            for each, (ram, _, disk) in FLAVORS.items()
        ]  # fmt: skip

    # --- pods ------------------------------------------------------------------------------------------------

    def _myself(self, info: Any) -> dict[str, Any]:
        volumes = [{"id": id, "name": id, "size": 100, "dataCenterId": place} for id, place in self.volumes.items()]
        return {
            "id": "user_lab", "pubKey": self.pubkey, "endpoints": [],
            "clientBalance": self.balance, "spendLimit": self.spend_limit,
            "currentSpendPerHr": self._spends(), "networkVolumes": volumes,
            "pods": [self._record(each) for each in self._listed()],
        }  # fmt: skip

    def _spends(self) -> float:
        return sum(each.usd for each in self.rentals.values() if each.state == "RUNNING")

    def _listed(self) -> list[Pod]:
        return [each for each in self.rentals.values() if each.living and each.seen_at <= self.clock.now()]

    def _pod(self, info: Any, input: Mapping[str, Any]) -> dict[str, Any] | None:
        pod = self.rentals.get(input.get("podId") or "")
        return self._record(pod) if pod is not None and pod.living else None

    def _record(self, pod: Pod) -> dict[str, Any]:
        runtime = None
        if pod.runtime is not None:
            runtime = {"uptimeInSeconds": int(self.clock.now() - pod.runtime), "ports": self._mapped(pod)}
        asked, cpu = pod.asked, pod.kind.startswith("cpu")
        spoilt = [self.spoilt.pop()] if self.spoilt else []
        return {
            "id": pod.id, "name": pod.name, "desiredStatus": pod.state, "costPerHr": pod.usd,
            "env": [f"{each['key']}={each['value']}" for each in asked.get("env") or ()],
            "imageName": asked.get("imageName"), "ports": asked.get("ports"), "dockerArgs": asked.get("dockerArgs"),
            "gpuCount": 0 if cpu else asked["gpuCount"], "machineId": "m0lab", "runtime": runtime,
            "podType": "INTERRUPTABLE" if pod.market == "spot" else "RESERVED",
            "machine": {"gpuDisplayName": pod.kind, "podHostId": f"{pod.id}-64410000", "dataCenterId": pod.place},
            "containerDiskInGb": asked.get("containerDiskInGb"), "volumeInGb": asked.get("volumeInGb") or 0,
            "createdAt": datetime.fromtimestamp(pod.created, UTC).isoformat(),
            **{field: _failing(text) for field, text in spoilt},
        }  # fmt: skip

    def _mapped(self, pod: Pod) -> list[dict[str, Any]]:
        """Ports of the proxy are there, too, and are not public."""
        public = (
            "supportPublicIp" not in pod.asked or pod.asked["supportPublicIp"] or pod.asked["cloudType"] == "SECURE"
        )
        made = [{"ip": "100.65.0.7", "isIpPublic": False, "privatePort": 19123, "publicPort": 60001, "type": "http"}]
        for port in _tcp(pod.asked):
            relay = pod.ports.get(port)
            host, outer = (relay.host, relay.port) if relay is not None else ("203.0.113.9", 10000 + port)
            made.append({"ip": host, "isIpPublic": public, "privatePort": port, "publicPort": outer, "type": "tcp"})
        return made

    def _deploy(self, asked: Mapping[str, Any], market: str) -> dict[str, Any]:
        return self._record(self._placed(asked, market))

    def _placed(self, asked: Mapping[str, Any], market: str) -> Pod:
        """A new pod, as GraphQL is told of it."""
        cpu = asked.get("instanceId") or ""
        kind, count = cpu or asked.get("gpuTypeId") or "", 1 if cpu else asked.get("gpuCount") or 1
        asked = {"cloudType": "SECURE", "gpuCount": count, **asked}
        if not asked.get("imageName") or len(asked.get("env") or ()) > MOST_VARIABLES:
            raise _error(*TROUBLE)
        clouds = ("SECURE", "COMMUNITY") if asked["cloudType"] == "ALL" else (asked["cloudType"],)
        found = ((cloud, place) for cloud in clouds if (place := self._place(kind, cloud, market, asked)))
        cloud, place = next(found, ("", ""))
        if not cloud or not self._fits(asked) or count > MOST_GPUS or (not cpu and (kind, cloud) not in self.prices):
            raise _error(*GONE)
        asked["cloudType"] = cloud
        usd, least = self._cost(kind, cloud, market)
        if market == "spot" and (least is None or asked["bidPerGpu"] < least):
            raise _error("The bid is below the current minimum bid price.")
        usd = asked["bidPerGpu"] if market == "spot" else usd
        if self.balance <= 0:
            raise _error("You do not have enough money to deploy this pod.")
        if self.spend_limit is not None and self._spends() + usd * count > self.spend_limit:
            raise _error("This would exceed the spend limit of your account.")
        return self._made(kind, place, market, asked, usd)

    def _cost(self, kind: str, cloud: str, market: str) -> tuple[float, float | None]:
        if kind.startswith("cpu"):
            flavor, vcpus, _ = kind.split("-")
            return FLAVORS[flavor][1] * int(vcpus), None
        return self.prices[kind, cloud]

    def _made(self, kind: str, place: str, market: str, asked: Mapping[str, Any], usd: float) -> Pod:
        now, id = self.clock.now(), f"{next(self._numbers):04d}podlabxyz"
        pod = Pod(
            id, kind, place, market, now, "RUNNING", asked=asked, key=f"rpp_{id}", name=asked.get("name") or "pod",
            bid=usd, usd=round(usd * asked["gpuCount"], 6), seen_at=now + self.delays.listing, runs=[(now, None)],
        )  # fmt: skip
        self.rentals[id] = pod
        self._ever.append(pod)
        if asked.get("terminateAfter"):
            at = datetime.fromisoformat(asked["terminateAfter"].replace("Z", "+00:00")).timestamp()
            self.later(at - now, lambda: self._terminate(pod))
        self.later(self.delays.starting, lambda: self._start(pod))
        return pod

    def _start(self, pod: Pod) -> None:
        """Its image is there, and its container runs."""
        if not pod.living or pod.ending or pod.state != "RUNNING":
            return
        pod.starts += 1
        if self.lab is not None and pod.machine is None:
            self._boot(self.lab, pod)
        elif pod.machine is not None:
            pod.machine.boot()
        pod.runtime = self.clock.now()

    def _boot(self, lab: Lab, pod: Pod) -> None:
        pod.ports = {port: Relay(lab.gateway, ("", 0)) for port in _tcp(pod.asked)}
        given = {each["key"]: each["value"] for each in pod.asked.get("env") or ()}
        own = {
            "RUNPOD_POD_ID": pod.id, "RUNPOD_API_KEY": pod.key, "RUNPOD_PUBLIC_IP": lab.gateway,
            "RUNPOD_DC_ID": pod.place, "RUNPOD_GPU_COUNT": str(pod.asked["gpuCount"]),
            **{f"RUNPOD_TCP_PORT_{port}": str(relay.port) for port, relay in pod.ports.items()},
        }  # fmt: skip

        def prepare(machine: Machine) -> None:
            pod.machine = machine
            for port, relay in pod.ports.items():
                relay.target = machine.address, port
            if not pod.kind.startswith("cpu"):
                _dress(machine, pod.kind, pod.asked["gpuCount"])

        lab.machine(
            start=shlex.join(_command(pod.asked.get("dockerArgs") or "")),
            env=given | own,
            minute=self.minute,
            prepare=prepare,
            wait=False,
        )

    def off(self, rental: Pod) -> None:
        """A container whose command ends is started anew, its disk as it was."""
        if not rental.ending and rental.runtime is not None:
            rental.runtime = None
            self.later(1.0, lambda: self._start(rental))

    def _stopped(self, id: str) -> dict[str, Any]:
        pod = self._mine(id, "pod not found to stop")
        pod.state = "EXITED"
        self._work.submit(self.watched, lambda: self.interrupt(pod.id))
        return self._record(pod)

    def _resumed(self, id: str) -> dict[str, Any]:
        """It runs anew, and of its disk nothing is left: what is to stay is on a volume."""
        pod = self._mine(id, "pod not found to resume")
        if pod.state == "EXITED" and pod.runs[-1][1] is not None:
            if self._place(pod.kind, pod.asked["cloudType"], pod.market, {}) is None:
                raise _error("There are not enough free GPUs on the host machine to start this pod.")
            pod.state = "RUNNING"
            pod.runs.append((self.clock.now(), None))
            self.later(self.delays.starting, lambda: self._start(pod))
        return self._record(pod)

    def _settled(self, pubkey: str) -> dict[str, Any]:
        self.pubkey = pubkey
        return {"id": "user_lab", "pubKey": pubkey}

    def _terminated(self, id: str) -> None:
        pod = self._mine(id, "pod not found to terminate")
        if not pod.survives():
            self._terminate(pod)

    def _mine(self, id: str, unknown: str) -> Pod:
        pod = self.rentals.get(id)
        if pod is None or not pod.living:
            raise _error(unknown)
        if self._asking not in ("", id):
            raise _error("Not authorized to perform this operation", "FORBIDDEN")
        return pod

    def _terminate(self, pod: Pod) -> None:
        if pod.ending or not pod.living:
            return
        pod.ending = True

        def over() -> None:
            pod.living, pod.ended = False, self.clock.now()
            pod.runs[-1] = pod.runs[-1][0], pod.runs[-1][1] or pod.ended
            self.rentals.pop(pod.id, None)

        if pod.machine is None and not pod.ports:
            over()
        else:
            self.end(pod, over)

    # --- REST v2 ---------------------------------------------------------------------------------------------

    def _there(self, request: Request) -> Pod:
        pod = self.rentals.get(request.by["id"])
        if pod is None or not pod.living or pod.seen_at > self.clock.now():
            raise _problem(404, TITLES[404], "Pod not found.")
        return pod

    def _pods(self, request: Request) -> dict[str, Any]:
        """A page of the pods, the newest first. A cursor that was never given is refused."""
        pods = [self._v2(each) for each in reversed(self._listed())]
        if self.pages.cut:
            return {"pods": [], "pagination": {"nextCursor": None, "hasNextPage": True}}
        cursor, limit = request.query.get("cursor", "at-0"), int(request.query.get("limit", PAGE))
        if not cursor.startswith("at-"):
            raise _unfit(["query cursor: it is malformed"])
        first = int(cursor.removeprefix("at-"))
        last = first + min(limit, self.pages.size or limit)
        follows = f"at-{last}" if last < len(pods) else None
        return {"pods": pods[first:last], "pagination": {"nextCursor": follows, "hasNextPage": follows is not None}}

    def _create(self, request: Request) -> Answer:
        """A body that fits the schema may still break rules: https://docs.runpod.io/api-reference-v2/pods/create-a-pod."""
        body = request.body
        gpu, cpu, mounts = body.get("gpu"), body.get("cpu"), body.get("mounts") or {}
        network = (mounts.get("network") or [{}])[0]
        if (gpu is None) == (cpu is None):
            raise _problem(400, TITLES[400], "exactly one of gpu or cpu must be set")
        if "persistent" in mounts and (cpu or "network" in mounts):
            raise _problem(400, TITLES[400], "mounts.persistent cannot be combined with cpu or mounts.network")
        if len(body.get("env") or {}) > MOST_VARIABLES:
            raise _problem(400, TITLES[400], "too many environment variables")
        asked = {
            "name": body["name"], "imageName": body["image"], "dockerArgs": body.get("args") or _words(body.get("cmd")),
            "env": [{"key": key, "value": value} for key, value in (body.get("env") or {}).items()],
            "ports": ",".join(body.get("ports") or ()), "containerDiskInGb": body.get("disk"),
            "cloudType": body.get("cloud", "SECURE"), "dataCenterIds": body.get("dataCenterIds"),
            "networkVolumeId": network.get("volumeId"), "volumeMountPath": network.get("path"),
        }  # fmt: skip
        if cpu is not None:
            asked |= {"instanceId": _instance(cpu, body.get("disk", 0)), "gpuCount": 1}
        else:
            asked |= {
                "gpuTypeId": gpu["id"], "gpuCount": gpu.get("count", 1), "minCudaVersion": gpu.get("minCudaVersion"),
                "supportPublicIp": False,
            }  # fmt: skip
        try:
            pod = self._placed(asked, "on-demand")
        except GraphQLError as e:
            status = 402 if "enough money" in e.message else 400
            raise _problem(status, TITLES[status], e.message) from e
        return Answer(self._v2(pod), 201)

    def _patch(self, request: Request) -> dict[str, Any]:
        pod = self._there(request)
        name = request.body.get("name", pod.name)
        if len(name) > LONGEST_NAME:
            raise _problem(400, TITLES[400], "the name is too long")
        pod.name = name
        return self._v2(pod)

    def _delete(self, request: Request) -> Answer:
        pod = self._there(request)
        if not pod.survives():
            self._terminate(pod)
        return Answer(None, 204)

    def _act(self, request: Request) -> Answer:
        """The end is 204, which was also seen with the pod's own key (public programs, read 2026-11-26)."""
        pod, action = self._there(request), request.body["action"]
        if action == "terminate":
            return self._delete(request)
        try:
            self._stopped(pod.id) if action == "stop" else self._resumed(pod.id)
        except GraphQLError as e:
            raise _problem(400, TITLES[400], e.message) from e
        return Answer(self._v2(pod))

    def _billing(self, request: Request) -> dict[str, Any]:
        """Costs by pod and hour or day; times are widened to whole ones.
        https://docs.runpod.io/api-reference-v2/billing/get-pod-billing-history (read 2026-11-24)."""
        query, now = request.query, self.clock.now()
        size = {"hour": 3600.0, "day": 86400.0}.get(query.get("bucketSize", "day"))
        if size is None:
            raise _problem(400, TITLES[400], "the lab bills by the hour and by the day")
        for name in ("startTime", "endTime"):  # as public programs send them (read 2026-11-26)
            if name in query and _seconds(query[name]) % 3600:
                raise _problem(400, TITLES[400], f"{name} must be on the full hour")
        end = _seconds(query["endTime"]) if "endTime" in query else now
        start = _seconds(query["startTime"]) if "startTime" in query else end - 30 * 86400
        if "lastN" in query:
            start, end = now - (int(query["lastN"]) - 1) * size, now
        first, last = math.floor(start / size), math.ceil(end / size)
        records = [
            {"podId": pod.id, "startTime": _text(n * size), "endTime": _text((n + 1) * size), **amounts}
            for pod in self._ever if query.get("podId") in (None, pod.id)
            for n in range(max(first, math.floor(pod.created / size)), min(last, math.floor(now / size) + 1))
            if (amounts := self._amounts(pod, n * size, (n + 1) * size))
        ]  # fmt: skip
        fields = ("totalAmount", "gpuAmount", "cpuAmount", "diskAmount")
        return {
            "records": records,
            "metadata": {
                "query": {
                    "startTime": _text(first * size), "endTime": _text(last * size),
                    "bucketSize": query.get("bucketSize", "day"), "podId": query.get("podId"),
                },
                "recordCount": len(records), "uniquePodCount": len({each["podId"] for each in records}),
                "totals": {name: sum(each[name] for each in records) for name in fields},
            },
        }  # fmt: skip

    def _amounts(self, pod: Pod, start: float, end: float) -> dict[str, float]:
        """What a pod costs in a span: its GPUs or CPUs while it runs, its disk until it is deleted."""

        def hours(since: float, until: float | None) -> float:
            until = self.clock.now() if until is None else until
            return max(0.0, min(end, until) - max(start, since)) / 3600

        there = hours(pod.created, pod.ended)
        runs = sum(hours(*each) for each in pod.runs)
        disk = there * (pod.asked.get("containerDiskInGb") or 0) * DISK / 730
        kind = "cpuAmount" if pod.kind.startswith("cpu") else "gpuAmount"
        amounts = {"gpuAmount": 0.0, "cpuAmount": 0.0, "diskAmount": disk, kind: runs * pod.usd}
        return {**amounts, "totalAmount": sum(amounts.values())} if there else {}

    def _v2(self, pod: Pod) -> dict[str, Any]:
        """`createdAt` is the world's time; `ssh` tells of port 22 once it is mapped and public."""
        status = pod.state if pod.state != "RUNNING" or pod.runtime is not None else "STARTING"
        asked, cpu = pod.asked, pod.kind.startswith("cpu")
        ports = self._mapped(pod) if status == "RUNNING" else []
        public = next((each for each in ports if each["privatePort"] == 22 and each["isIpPublic"]), None)
        started = None if pod.runtime is None else datetime.fromtimestamp(pod.runtime, UTC).isoformat()
        runtime = {
            "uptime": int(self.clock.now() - (pod.runtime or 0.0)),
            "ports": [
                {"private": each["privatePort"], "public": each["publicPort"], "type": each["type"], "ip": each["ip"]}
                for each in ports
            ],
        }
        network = [{"volumeId": asked.get("networkVolumeId"), "path": asked.get("volumeMountPath")}]
        if cpu:
            flavor, vcpus, memory = pod.kind.split("-")
            compute: dict[str, Any] = {"cpu": {"id": flavor, "vcpuCount": int(vcpus), "memory": int(float(memory))}}
        else:
            compute = {"gpu": {"id": pod.kind, "count": asked["gpuCount"]}}
        return {
            "id": pod.id, "name": pod.name, "status": status, "actions": ["terminate"], "image": asked["imageName"],
            "args": asked.get("dockerArgs") or "", "disk": asked.get("containerDiskInGb") or 20,
            "mounts": {"network": network} if network[0]["volumeId"] else {},
            "ports": [each for each in (asked.get("ports") or "").split(",") if each],
            "env": {each["key"]: each["value"] for each in asked.get("env") or ()}, "registry": None,
            "cloud": asked["cloudType"], "dataCenterId": pod.place if pod.place in CENTERS else None,
            "cudaVersion": None if cpu else "{}.{}".format(*self.most_cuda),
            "ssh": {
                "proxy": {
                    "host": "ssh.runpod.io", "port": 22, "username": f"{pod.id}-64410000",
                    "command": f"ssh {pod.id}-64410000@ssh.runpod.io",
                },
                "direct": public and {
                    "host": public["ip"], "port": public["publicPort"], "username": "root",
                    "command": f"ssh root@{public['ip']} -p {public['publicPort']}",
                },
            },
            "template": None, "cost": 0.0 if status in ("EXITED", "TERMINATED") else pod.usd, "locked": False,
            "globalNetworking": {"enabled": False}, "runtime": runtime if status == "RUNNING" else None,
            "createdAt": datetime.fromtimestamp(pod.created, UTC).isoformat(), "startedAt": started, **compute,
            **self.odd,
        }  # fmt: skip

    def _volumes(self, request: Request) -> dict[str, Any]:
        made = [
            {"id": id, "name": id, "size": 100, "dataCenter": place, "type": "STANDARD"}
            for id, place in self.volumes.items()
        ]
        return {"networkVolumes": made}

    def _catalog_gpus(self, request: Request) -> dict[str, Any]:
        query = request.query
        stocked = _with_stock(query)
        kinds = dict.fromkeys(kind for kind, _ in self.prices)
        asked = {"gpuCount": int(query.get("count", 1)), "minCudaVersion": query.get("minCudaVersion")}
        return {"gpus": [self._catalog_gpu(kind, query.get("cloud", "SECURE"), asked, stocked) for kind in kinds]}

    def _catalog_gpu(self, kind: str, cloud: str, asked: Mapping[str, Any], stocked: bool) -> dict[str, Any]:
        secure, community = self.prices.get((kind, "SECURE")), self.prices.get((kind, "COMMUNITY"))
        maker = kind.split()[0]
        told: dict[str, Any] = {
            "id": kind, "name": kind.removeprefix("NVIDIA "), "pool": None,
            "manufacturer": maker if maker in ("NVIDIA", "AMD") else "UNKNOWN", "memory": _memory(kind),
            "secure": bool(secure), "community": bool(community),
            "price": {"secure": secure[0] if secure else 0.0, "community": community[0] if community else 0.0},
            "maxCount": {"secure": MOST_GPUS if secure else 0, "community": MOST_GPUS if community else 0},
        }  # fmt: skip
        if stocked:
            fits = (kind, cloud) in self.prices and self._fits(asked) and asked["gpuCount"] <= MOST_GPUS
            told |= self._stock_of(kind, cloud, fits)
        return told

    def _stock_of(self, kind: str, cloud: str, fits: bool) -> dict[str, Any]:
        """Where there is some; nothing is told of places where there is none."""
        places = [
            each
            for each in CENTERS
            if fits and self._place(kind, cloud, "on-demand", {"dataCenterIds": [each]}) == each
        ]
        if cloud == "COMMUNITY" and fits and self._place(kind, cloud, "on-demand", {}):
            return {"availability": "LOW"}
        if not places:
            return {"availability": "NONE"}
        return {"availability": "LOW", "dataCenters": [{"id": p, "name": p, "availability": "LOW"} for p in places]}

    def _catalog_cpus(self, request: Request) -> dict[str, Any]:
        stocked, vcpus = _with_stock(request.query), int(request.query.get("vcpuCount", FEWEST_VCPUS))
        made = []
        for each, (ram, usd, _) in FLAVORS.items():
            told: dict[str, Any] = {
                "id": each, "name": each, "group": each, "vcpu": {"min": FEWEST_VCPUS, "max": MOST_VCPUS},
                "ramGbPerVcpu": float(ram), "price": {"securePerVcpu": usd, "serverlessPerVcpu": usd},
            }  # fmt: skip
            made.append(told | (self._stock_of(f"{each}-{vcpus}-{vcpus * ram:g}", "SECURE", True) if stocked else {}))
        return {"cpus": made}


@functools.cache
def published() -> Document:
    """The schema of REST v2, read once for all worlds, with the pages that the list of pods has had since.

    The pages are as five public programs read them in autumn 2026 (read 2026-11-26); no document of them was at hand.
    """
    told = json.loads((Path(__file__).parent / "runpod_v2.json").read_text())
    limit = {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1000}}
    cursor = {"name": "cursor", "in": "query", "schema": {"type": "string", "minLength": 1}}
    told["paths"]["/v2/pods"]["get"].setdefault("parameters", []).extend((limit, cursor))
    listed = told["components"]["schemas"]["ListPodsResponse"]
    listed["required"] = ["pods", "pagination"]
    listed["properties"]["pagination"] = {
        "type": "object",
        "required": ["nextCursor", "hasNextPage"],
        "properties": {"nextCursor": {"type": ["string", "null"]}, "hasNextPage": {"type": "boolean"}},
    }
    return Document(told)


@functools.cache
def with_cmd() -> Document:
    """The same, where a create has `cmd`, a list of words, in the place of `args`.

    As public programs send it (one says "checked 2026-10-09"; read 2026-11-26).
    """
    told = json.loads((Path(__file__).parent / "runpod_v2.json").read_text())
    schemas = told["components"]["schemas"]
    fields = schemas["BaseContainerConfig"]["properties"]
    schemas["Pod"]["allOf"][1]["properties"]["args"] = fields.pop("args")  # what a pod is told of is not known
    fields["cmd"] = {"type": "array", "items": {"type": "string"}}
    return Document(told)


def _words(cmd: Sequence[str] | None) -> str:
    """Words for the image's entry point, as `_command` reads them: the lab's images have none."""
    return shlex.join(cmd or ())


def _unfit(wrong: list[str]) -> Refused:
    return _problem(422, TITLES[422], "Request validation failed.", errors=wrong)


def _with_stock(query: Mapping[str, str]) -> bool:
    """Whether a catalogue is asked for with its stock.

    Raises:
        Refused: that is asked for in part.
    """
    stocked = query.get("include") == "AVAILABILITY"
    if stocked != ("product" in query) or (not stocked and query):
        raise _problem(400, TITLES[400], "include=AVAILABILITY and product belong together")
    return stocked


def _center(id: str) -> dict[str, Any]:
    region = "NORTH_AMERICA" if CENTERS[id] in ("CA", "US") else "EUROPE"
    return {
        "id": id, "name": id, "region": region, "networkVolumeTypes": ["STANDARD"], "compliance": [],
        "globalNetwork": False,
    }  # fmt: skip


def _instance(cpu: Mapping[str, Any], disk: int) -> str:
    """What GraphQL calls it.

    Raises:
        Refused: the flavor has no such instance.
    """
    vcpus = cpu["vcpuCount"]
    if cpu["id"] not in FLAVORS or vcpus & (vcpus - 1) or not FEWEST_VCPUS <= vcpus <= MOST_VCPUS:
        raise _problem(400, TITLES[400], "cpu.vcpuCount is not valid for the flavor")
    memory, _, most = FLAVORS[cpu["id"]]
    if disk > most * vcpus:
        raise _problem(400, TITLES[400], f"disk is larger than {most} GB for each vCPU")
    return f"{cpu['id']}-{vcpus}-{vcpus * memory}"


def _memory(kind: str) -> int:
    """GB of one GPU of this type; 0 where nobody here knows it."""
    try:
        return round(accelerator(kind, dialect="runpod").memory_gb)
    except UnknownAccelerator:
        return 0


def _command(args: str) -> list[str]:
    """The start command of a container: JSON has its own entry point, and other text is for that of the image, which
    runs what it is given (https://docs.runpod.io/pods/templates/manage-templates, read 2026-11-23). Without any, it
    does what the image does: the lab's images do nothing."""
    if not args:
        return ["sleep", "1000000"]
    if not args.startswith("{"):
        return shlex.split(args)
    told = json.loads(args)
    return [*told.get("entrypoint", ()), *told.get("cmd", ())]


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def _text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def _tcp(asked: Mapping[str, Any]) -> list[int]:
    """The ports that are mapped: "22/tcp,8888/http" has one."""
    return [int(each[:-4]) for each in (asked.get("ports") or "").split(",") if each.endswith("/tcp")]


def _error(text: str, code: str = "") -> GraphQLError:
    return GraphQLError(text, extensions={"code": code} if code else None)


def _failing(text: str) -> Callable[[Any], Any]:
    """A field that cannot be told."""

    def resolve(info: Any) -> Any:
        raise _error(text)

    return resolve


@functools.cache
def _read(query: str) -> tuple[DocumentNode, list[GraphQLError]]:
    """A query, and what is wrong with it."""
    try:
        document = parse(query)
    except GraphQLSyntaxError as e:
        return DocumentNode(definitions=()), [e]
    return document, validate(SCHEMA, document)


def _problem(
    status: int, title: str, detail: str, headers: Mapping[str, str] | None = None, errors: Iterable[str] = ()
) -> Refused:
    more = {"errors": [*errors]} if errors else {}
    return Refused(status, {"title": title, "status": status, "detail": detail, **more}, headers)


def _dress(machine: Machine, kind: str, count: int) -> None:
    """The host's driver and tools, as a container sees them. A partition is shown below its card, whose name it has."""
    has = accelerator(kind, dialect="runpod")
    name = kind.partition(" MIG ")[0]
    state, share = "/var/lib/stub", "/usr/lib/stub"
    lines = [f"GPU {n}: {name} (UUID: GPU-{n:08d}-0000-4000-8000-000000000000)\n" for n in range(count)]
    texts = {
        **repository.nvidia_tool(DRIVER), f"{share}/nvidia-L": "".join(lines), f"{state}/devices": f"{count}\n",
        f"{state}/name": f"{name}\n", f"{state}/memory": f"{has.card_memory_gb * 1024:.0f}\n",
        f"{state}/pci": "0x2330\n",
        f"{state}/driver": f"{DRIVER}\n", f"{state}/persistence": "Enabled\n",
        f"{state}/loaded": "".join(f"{module}\n" for module in repository.NVIDIA_MODULES),
    }  # fmt: skip
    if has.profile:
        texts |= {f"{state}/mig/{n}.parts": f"{has.profile}\n" for n in range(count)}
        texts |= {f"{state}/mig/{n}.mode": "Enabled\n" for n in range(count)}
    for place, text in texts.items():
        path = machine.path(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if "/bin/" in place else 0o644)
    machine.path(f"{state}/mig").mkdir(exist_ok=True)
