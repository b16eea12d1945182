"""RunPod in the lab: GraphQL as it is asked for stock and pods, and what REST v2 has that GraphQL has not.

Pods are containers: the start command of each is process 1 of a machine, its ports are mapped to others of the lab's
gateway, and it is started anew when that command ends. Errors of GraphQL come with HTTP 200.
"""

from __future__ import annotations

import functools
import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

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
from tests.lab import repository
from tests.lab.cloud import Answer, Cloud, Refused, Rental, Request
from tests.lab.machines import Lab, Machine
from tests.lab.prices import snapshot
from tests.lab.relay import Relay
from tests.lab.runpod_schema import SCHEMA
from tests.lab.world import Fault

CENTERS = {"CA-MTL-1": "CA", "EU-RO-1": "RO", "US-TX-3": "US"}
COUNTRIES = ("CA", "SE", "US")
FLAVORS = {"cpu3c": (2, 0.03), "cpu3g": (4, 0.04), "cpu5c": (2, 0.035)}
"""GB of memory and USD an hour for each vCPU."""
GONE = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again.",
    "SUPPLY_CONSTRAINT",
)
TROUBLE = ("Something went wrong. Please try again later or contact support.", "INTERNAL_SERVER_ERROR")
MOST_GPUS, MOST_VARIABLES = 8, 50
DRIVER = "570.172.08"


@dataclass
class Pod(Rental):
    """One pod. `asked` is its create's input; `kind` the GPU type or CPU instance, `place` its data centre or country.

    Attributes:
        key: of the API, that may end this pod and nothing else.
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


@dataclass
class Delays:
    """Seconds of the world's clock: until a container runs (its image is fetched), and until lists have a new pod."""

    starting: float = 0.0
    listing: float = 0.0


class RunPod(Cloud[Pod]):
    """One account. GPU types and prices are those of the snapshot, the same in both clouds unless `price` was called.

    Attributes:
        balance, spend_limit: USD, and USD an hour (None for no limit); a pod that exceeds one of them is refused.
        volumes: network volumes and their data centres.
        least: (vCPUs, GB) of every machine.
        most_cuda: the newest CUDA that drivers of its machines can do.
        bad_keys: keys that are not known.
        spoilt: fields of pods, with what is said of them: each time a pod is told of, the last one fails, and is null
            in data that come with that error.
    """

    name: ClassVar[str] = "runpod"

    def __init__(self, lab: Lab | None = None) -> None:
        super().__init__(lab)
        self.key = "rpa_TESTTESTTESTTEST"
        self.balance = 1000.0
        self.spend_limit: float | None = 10_000.0
        self.volumes: dict[str, str] = {"vol0ro": "EU-RO-1"}
        self.delays = Delays()
        self.least, self.most_cuda = (16, 120), (13, 0)
        self.bad_keys: set[str] = set()
        self.spoilt: list[tuple[str, str]] = []
        self.prices: dict[tuple[str, str], tuple[float, float | None]] = {}
        on_demand = {each.instance_type: each.usd_per_hour for each in snapshot("runpod") if each.market != "spot"}
        spot = {each.instance_type: each.usd_per_hour for each in snapshot("runpod") if each.market == "spot"}
        for kind, usd in on_demand.items():
            for cloud in ("SECURE", "COMMUNITY"):
                self.prices[kind, cloud] = usd, spot.get(kind)
        self.routes = {
            "POST /graphql": self._graphql,
            "PATCH /v2/pods/{id}": self._patch,
            "GET /v2/pods": lambda request: {"pods": [self._v2(each) for each in self._listed()]},
        }
        self._asking = ""
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
        """GraphQL refuses a field, as it does: with HTTP 200."""
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
        if (not self._asking and not key.startswith("rpa_")) or key in self.bad_keys:
            raise Refused(401, {"errors": [{"message": "Unauthorized", "extensions": {"code": "UNAUTHENTICATED"}}]})
        if self._asking and request.path != "/graphql":
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
        }
        return {
            **(dict.fromkeys(fields, denied) if mine else fields),
            "pod": self._pod,
            "podTerminate": lambda info, input: self._terminated(input["podId"]),
            "podStop": lambda info, input: self._stopped(input["podId"]),
        }

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
            "memoryInGb": 0, "cudaCores": 0, "secureCloud": bool(secure), "communityCloud": bool(community),
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
             "diskLimitPerVcpu": 10, "specifics": lambda info, input=None, each=each: specifics(each, input)}
            for each, (ram, _) in FLAVORS.items()
        ]  # fmt: skip

    # --- pods ------------------------------------------------------------------------------------------------

    def _myself(self, info: Any) -> dict[str, Any]:
        volumes = [{"id": id, "name": id, "size": 100, "dataCenterId": place} for id, place in self.volumes.items()]
        return {
            "id": "user_lab", "pubKey": "", "clientBalance": self.balance, "spendLimit": self.spend_limit,
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
        cpu = asked.get("instanceId") or ""
        kind, count = cpu or asked.get("gpuTypeId") or "", 1 if cpu else asked.get("gpuCount") or 1
        asked = {"cloudType": "SECURE", "gpuCount": count, **asked}
        if not asked.get("dockerArgs") or not asked.get("imageName") or len(asked.get("env") or ()) > MOST_VARIABLES:
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
        return self._record(self._made(kind, place, market, asked, usd))

    def _cost(self, kind: str, cloud: str, market: str) -> tuple[float, float | None]:
        if kind.startswith("cpu"):
            flavor, vcpus, _ = kind.split("-")
            return FLAVORS[flavor][1] * int(vcpus), None
        return self.prices[kind, cloud]

    def _made(self, kind: str, place: str, market: str, asked: Mapping[str, Any], usd: float) -> Pod:
        now, id = self.clock.now(), f"{next(self._numbers):04d}podlabxyz"
        pod = Pod(
            id, kind, place, market, now, "RUNNING", asked=asked, key=f"rpp_{id}", name=asked.get("name") or "pod",
            bid=usd, usd=round(usd * asked["gpuCount"], 6), seen_at=now + self.delays.listing,
        )  # fmt: skip
        self.rentals[id] = pod
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

        start = shlex.join(shlex.split(pod.asked["dockerArgs"]))
        lab.machine(start=start, env=given | own, minute=self.minute, prepare=prepare, wait=False)

    def off(self, rental: Pod) -> None:
        """A container whose command ends is started anew, its disk as it was."""
        if not rental.ending and rental.runtime is not None:
            rental.runtime = None
            self.later(1.0, lambda: self._start(rental))

    def _stopped(self, id: str) -> dict[str, Any]:
        pod = self._mine(id, "pod not found to stop")
        self._work.submit(self.watched, lambda: self.interrupt(pod.id))
        return self._record(pod)

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
            pod.living = False
            self.rentals.pop(pod.id, None)

        if pod.machine is None and not pod.ports:
            over()
        else:
            self.end(pod, over)

    # --- REST v2 ---------------------------------------------------------------------------------------------

    def _patch(self, request: Request) -> dict[str, Any]:
        pod, body = self.rentals.get(request.by["id"]), request.body
        if pod is None or not pod.living:
            raise _problem(404, "Not Found", "Pod not found.")
        if not isinstance(body, dict) or not re.fullmatch(r".{1,191}", str(body.get("name", ""))):
            raise _problem(422, "Unprocessable Entity", "Request validation failed.")
        pod.name = body["name"]
        return self._v2(pod)

    def _v2(self, pod: Pod) -> dict[str, Any]:
        status = pod.state if pod.state != "RUNNING" or pod.runtime is not None else "STARTING"
        return {"id": pod.id, "name": pod.name, "status": status, "cost": pod.usd, "locked": False}


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


def _problem(status: int, title: str, detail: str, headers: Mapping[str, str] | None = None) -> Refused:
    return Refused(status, {"title": title, "status": status, "detail": detail}, headers)


def _dress(machine: Machine, kind: str, count: int) -> None:
    """The host's driver and tools, as a container sees them."""
    has = accelerator(kind, dialect="runpod")
    state, share = "/var/lib/stub", "/usr/lib/stub"
    lines = [f"GPU {n}: {kind} (UUID: GPU-{n:08d}-0000-4000-8000-000000000000)\n" for n in range(count)]
    texts = {
        **repository.nvidia_tool(DRIVER), f"{share}/nvidia-L": "".join(lines), f"{state}/devices": f"{count}\n",
        f"{state}/name": f"{kind}\n", f"{state}/memory": f"{has.memory_gb * 1024:.0f}\n", f"{state}/pci": "0x2330\n",
        f"{state}/driver": f"{DRIVER}\n", f"{state}/persistence": "Enabled\n",
        f"{state}/loaded": "".join(f"{module}\n" for module in repository.NVIDIA_MODULES),
    }  # fmt: skip
    for place, text in texts.items():
        path = machine.path(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if "/bin/" in place else 0o644)
    machine.path(f"{state}/mig").mkdir(exist_ok=True)
