"""The lab's Vast.ai: strangers' machines, one ask each, containers with mapped ports, an account with one API key.

It speaks what console.vast.ai speaks, oddities included: `{"instances": {…}}` for one instance, a contract that a
refused bid leaves behind, an outbid instance that is only stopped and billed on, keys of containers that reach their
own instance alone. Asks and prices are those of tests/lab/offers/vastai.csv. Requests and replies are checked against
the OpenAPI document that Vast.ai publishes, with the corrections in which its own client differs
(tests/lab/vastai_v0.json).

Its proxy is a port that leads to a container's own sshd, which shows its own host key: many public scripts tell of
`[sshN.vast.ai]:PORT` with another key for each instance (read 2026-11-22). The tunnel is made by what Vast.ai starts in
place of the image's entry point, so with the run type "args" nobody is behind that port.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from skypool.accelerators import parse
from skypool.accelerators.spelling import meanings
from tests.lab import prices, repository
from tests.lab.cloud import Answer, Cloud, Refused, Rental, Request, Route
from tests.lab.machines import Lab, Machine
from tests.lab.openapi import Checker, Document
from tests.lab.relay import Relay

KEY = "vast-5ecret-0123456789abcdef"
MONTH = 720.0
"""Hours, by which the storage of an offer is charged: 5 GB at $0.2 a month are the $0.001389 of the snapshot."""
STORAGE, SHOWN = 0.2, 5.0
"""USD for a GB and month; the GB that the snapshot's prices include."""
DRIVER = "570.86.15"
SCHEMA = Document(Path(__file__).parent / "vastai_v0.json")
NAMES = "GET /api/v0/gpu_names/unique/"
"""The `vastai` command (1.9.1, cli/util.py) asks this without a key when it starts."""
SEARCHES = ("POST /api/v0/bundles/", "PUT /api/v0/search/asks/")
"""What is told without a key: `vastai search offers` asks so where none is set (vastai 1.9.1, read 2026-11-24)."""
USER = 4711
NOBODY = ("127.0.0.1", 9)
OCI = (
    "Error response from daemon: failed to create task for container: failed to create shim task: OCI runtime create "
    "failed: runc create failed: unable to start container process: error during container init: nvidia-container-cli: "
    "initialization error: nvml error: driver/library version mismatch: unknown"
)
NO_IMAGE = "Error response from daemon: manifest for {} not found: manifest unknown: manifest unknown"
LAUNCH = Path(__file__).parent / "inside" / "vastai"
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda has, asked: has == asked,
    "neq": lambda has, asked: has != asked,
    "gt": lambda has, asked: has > asked,
    "gte": lambda has, asked: has >= asked,
    "lt": lambda has, asked: has < asked,
    "lte": lambda has, asked: has <= asked,
    "in": lambda has, asked: has in asked,
    "notin": lambda has, asked: has not in asked,
}


@dataclass
class Contract(Rental):
    """One instance.

    Attributes:
        ask: what was rented; body: of its create; key: its container's own.
        cur, intended, status: cur_state, intended_status, actual_status; said: status_msg.
        unseen: so many answers do not know it yet.
        proxy: its port of the proxy, which is known from the beginning; None without machines.
        stopped, ended: since when it stands still, and when it was destroyed, on the world's clock.
    """

    ask: dict[str, Any] = field(default_factory=dict[str, Any])
    body: dict[str, Any] = field(default_factory=dict[str, Any])
    key: str = ""
    cur: str = "running"
    intended: str = "running"
    status: str | None = None
    said: str = ""
    unseen: int = 0
    ending: bool = False
    proxy: Relay | None = None
    stopped: float | None = None
    ended: float | None = None


@dataclass
class Delays:
    """Seconds of the lab's clock: until a container is created, until its image is there, until one is destroyed.

    Attributes:
        unseen: not seconds: so many answers do not know a new instance yet.
    """

    created: float = 0.02
    loading: float = 0.05
    ending: float = 0.05
    unseen: int = 0


class VastAI(Cloud[Contract]):
    """One account.

    Attributes:
        asks: what is for rent, by id; a test may change any field.
        flaws: what is wrong with a machine, by its machine_id: "oci", "offline", "stuck" (its image never arrives),
            "driver" (an old one), "silent" (its container never answers), "unscripted" (with an ssh run type, no
            script is run there, and its sshd goes on with another host key).
        delays: how long things take.
        quota: searches that are left today, None for no limit.
        key: the account's own for ssh, which every container with an ssh run type lets in; "" for none.
        ssh_keys: further ones, by their ids.
        read_only: keys of the API ("…-name") that may look, and nothing else.
        wrong_key: the status for a key that is not known: 401 as documented, 404 as public programs met it (read
            2026-11-26).
        traffic_gb: GB that each instance receives and sends, its image included.
    """

    name = "vastai"
    things = ("GET /api/v?/instances/*",)

    def __init__(self, lab: Lab | None = None, recording: Path | str | None = None) -> None:
        super().__init__(lab, recording)
        self.traffic_gb = (10.0, 1.0)
        self.wrong_key = 401
        self.asks: dict[int, dict[str, Any]] = {each["id"]: each for each in _asks()}
        self.flaws: dict[int, str] = {}
        self.delays = Delays()
        self.quota: int | None = None
        self.credit, self.key = 100.0, ""
        self.ssh_keys: dict[int, dict[str, Any]] = {}
        self.read_only: set[str] = set()
        self._ids = iter(range(20_000_001, 30_000_000))
        self._key_ids = iter(range(501, 10_000))
        self._results: dict[str, str] = {}
        for name, do in self._table().items():
            checker = Checker(SCHEMA, partial(_unfit, name), self.errors)
            self.routes[name] = checker.checked(name.rstrip("/"), do)
        self.routes |= {
            "PUT /api/v0/search/asks/": lambda r: self._search(r.body["q"]),
            NAMES: lambda _: {"gpu_names": sorted({each["gpu_name"] for each in self.asks.values()})},
            "GET /api/v0/users/me/invoices": self._old_invoices,
            "GET /results/{id}": self._result_of,
        }

    def _table(self) -> dict[str, Route]:
        return {
            "POST /api/v0/bundles/": lambda r: self._search(r.body),
            "PUT /api/v0/asks/{id}/": self._create,
            "GET /api/v1/instances/": self._list,
            "GET /api/v0/instances/{id}/": self._show,
            "PUT /api/v0/instances/{id}/": self._manage,
            "DELETE /api/v0/instances/{id}/": self._destroy,
            "PUT /api/v0/instances/reboot/{id}/": self._reboot,
            "PUT /api/v0/instances/bid_price/{id}/": self._bid,
            "PUT /api/v0/instances/command/{id}/": self._execute,
            "PUT /api/v0/instances/request_logs/{id}/": self._logs,
            "POST /api/v0/instances/{id}/ssh/": self._attach,
            "GET /api/v0/users/current/": self._user,
            "GET /api/v0/users/current": self._user,
            "GET /api/v0/charges/": self._charges,
            "GET /api/v1/invoices/": self._invoices,
            "GET /api/v0/ssh/": lambda _: list(self.ssh_keys.values()),
            "POST /api/v0/ssh/": self._new_key,
            "PUT /api/v0/ssh/{id}/": self._change_key,
            "DELETE /api/v0/ssh/{id}/": self._drop_key,
        }

    @property
    def environment(self) -> dict[str, str]:
        return {"VAST_URL": self.url, "VAST_API_KEY": KEY}

    # --- who asks --------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """The account's key, another one of it ("…-name"), or a container's own, which reaches its own instance."""
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if request.action in (NAMES, "GET /results/{id}") or (not key and request.action in SEARCHES):
            return
        if key in self.read_only and request.method != "GET" and request.action not in SEARCHES:
            raise _no(403, "auth_error", "This API key does not have the permission that this endpoint needs")
        if key.startswith(KEY):
            return
        own = next((each for each in self.rentals.values() if each.key == key and each.living), None)
        if own is None:
            raise _no(self.wrong_key, "auth_error", "Invalid user key")
        if request.by.get("id") != own.id or "instances" not in request.path:
            raise _no(403, "auth_error", "This API key does not have the permission that this endpoint needs")

    def throttled(self, request: Request) -> Refused:
        threshold = next(1 / refill for _, refill in self.limits.values())
        return _no(429, "rate_limit", f"API requests too frequent endpoint threshold={threshold:g}")

    def _user(self, request: Request) -> dict[str, Any]:
        credit = self.credit - sum(map(self._owed, self.rentals.values()))
        return {"id": USER, "username": "lab", "email": "lab@example.org", "credit": credit, "balance": 0.0}

    # --- what is for rent ------------------------------------------------------------------------------------

    def _search(self, body: Any) -> dict[str, Any]:
        if self.quota is not None:
            if self.quota <= 0:
                words = "Daily search quota exceeded; it is renewed at midnight UTC."
                raise _no(429, "search_quota_exceeded", words)
            self.quota -= 1
        asked = dict(body)
        order, limit = asked.pop("order", [["score", "desc"]]), asked.pop("limit", 64)
        kind, storage = asked.pop("type", "on-demand"), asked.pop("allocated_storage", SHOWN)
        if kind not in ("on-demand", "bid", "reserved"):
            raise _no(400, "invalid_args", f"unknown offer type {kind}")
        found = [priced for ask in self.asks.values() if (priced := self._priced(ask, kind, storage))]
        for name, terms in asked.items():
            found = [each for each in found if _fits(each, name, terms)]
        for name, way in reversed(order):
            found.sort(key=lambda each: each.get(name) or 0.0, reverse=way == "desc")
        return {"offers": found[:limit]}

    def _priced(self, ask: Mapping[str, Any], kind: str, storage: float) -> dict[str, Any] | None:
        """An ask as a search shows it; None where this market has none of it."""
        base = ask["min_bid"] if kind == "bid" else ask["dph_base"]
        if base is None:
            return None
        taken = self.room(str(ask["id"]), "*", "*") < 1
        gone = taken or any(each.living and each.kind == str(ask["id"]) for each in self.rentals.values())
        total = base + ask["storage_cost"] * storage / MONTH
        return {**ask, "dph_base": base, "dph_total": total, "is_bid": kind == "bid",
                "rentable": ask["rentable"] and not gone, "rented": gone}  # fmt: skip

    # --- renting ---------------------------------------------------------------------------------------------

    def _create(self, request: Request) -> dict[str, Any]:
        body, ask = _checked(request.body), self.asks.get(int(request.by["id"]) if request.by["id"].isdigit() else 0)
        if self.credit <= 0:
            raise _no(402, "insufficient_credit", "Your account lacks credit; see the billing page.")
        price = body.get("price")
        shown = self._priced(ask, "bid" if price is not None else "on-demand", body["disk"]) if ask else None
        if ask is None or shown is None or not shown["rentable"]:
            words = f"error 404/3603: no_such_ask Instance type by id {request.by['id']} is not available."
            raise _no(404, "no_such_ask", words)
        contract = self._contract(ask, body, shown)
        answer = {"success": True, "new_contract": int(contract.id), "instance_api_key": contract.key}
        if price is not None and price < ask["min_bid"] - 1e-9:
            contract.cur = contract.intended = "stopped"
            contract.stopped = contract.created
            words = f"Bid of {price} is below the minimum bid of {ask['min_bid']}"
            raise Refused(400, answer | {"success": False, "error": "invalid_price", "msg": words})
        self.later(self.delays.created, lambda: self._created(contract))
        return answer

    def _contract(self, ask: dict[str, Any], body: dict[str, Any], shown: Mapping[str, Any]) -> Contract:
        id_ = str(next(self._ids))
        market = "spot" if body.get("price") is not None else "on-demand"
        made = Contract(
            id_, str(ask["id"]), ask["geolocation"], market, self.clock.now(),
            ask=ask | {name: shown[name] for name in ("dph_base", "dph_total")},
            body=body, key=f"container-{id_}-5ecret",
            unseen=self.delays.unseen, proxy=Relay(self.lab.gateway, NOBODY) if self.lab else None,
        )  # fmt: skip
        self.rentals[id_] = made
        return made

    def _created(self, contract: Contract) -> None:
        if contract.intended != "running" or contract.ending or not contract.living:
            return
        contract.status, contract.said = "created", f"creating container from {contract.body['image']}"
        flaw = self.flaws.get(contract.ask["machine_id"])
        if "no-such-image" in contract.body["image"]:
            contract.said = NO_IMAGE.format(contract.body["image"])
        elif flaw == "oci":
            contract.said = OCI
        else:
            contract.status, contract.said = "loading", "latest: Pulling from library/python"
            if flaw != "stuck":
                self.later(self.delays.loading, lambda: self._loaded(contract))

    def _loaded(self, contract: Contract) -> None:
        if contract.intended != "running" or contract.ending or not contract.living:
            return
        if self.flaws.get(contract.ask["machine_id"]) == "offline":
            contract.status, contract.said = "offline", ""
        elif self.lab is None:
            contract.status = "running"
        else:
            self._work.submit(self.watched, lambda: self._start(contract))

    def _start(self, contract: Contract) -> None:
        """Its container: what the image's entry point was replaced by, with its arguments, as process 1."""
        lab, body, silent = self.lab, contract.body, self.flaws.get(contract.ask["machine_id"]) == "silent"
        assert lab is not None
        by_ssh = "ssh" in body["runtype"]
        start = "bash /.launch" if by_ssh else shlex.join([*filter(None, [body["onstart"]]), *body["args"]])
        start = "sleep 1000000" if silent else start
        env = {name: str(value) for name, value in body["env"].items() if not name.startswith("-")}
        env |= {"CONTAINER_ID": contract.id, "CONTAINER_API_KEY": contract.key, "PUBLIC_IPADDR": lab.gateway}
        env |= {"VAST_CONTAINERLABEL": f"C.{contract.id}", "GPU_COUNT": str(contract.ask["num_gpus"])}
        env |= {"SSH_PUBLIC_KEY": "\n".join(filter(None, [self.key, *(e["key"] for e in self.ssh_keys.values())]))}
        ports = [int(name.partition(":")[2]) for name in body["env"] if name.startswith("-p ")]
        ports = [*ports, *([22] if "ssh_direc" in body["runtype"] else [])][: contract.ask["direct_port_count"]]

        def prepare(machine: Machine) -> None:
            contract.machine = machine
            for port in ports:
                contract.ports[port] = relay = Relay(lab.gateway, (machine.address, port))
                machine._plan["env"][f"VAST_TCP_PORT_{port}"] = str(relay.port)
            if by_ssh and contract.proxy is not None:
                machine.path("/.launch").write_text(LAUNCH.read_text())
                script = "" if self.flaws.get(contract.ask["machine_id"]) == "unscripted" else body["onstart"]
                machine.path("/root/onstart.sh").write_text(script)
                contract.proxy.target = machine.address, 22
            self._dress(machine, contract)

        machine = lab.machine(start=start, env=env, minute=self.minute, prepare=prepare, wait=False)
        with self.lock:
            if contract.ending or not contract.living:  # it was destroyed meanwhile
                self.end(contract, lambda: None)
            elif contract.intended == "running":
                contract.status, contract.said = "running", "success, running"
            else:
                machine.kill()

    def _dress(self, machine: Machine, contract: Contract) -> None:
        """What the host's container runtime puts in: nvidia-smi, which sees the GPUs that were rented."""
        version = "470.42.01" if self.flaws.get(contract.ask["machine_id"]) == "driver" else DRIVER
        number, state = contract.ask["num_gpus"], "/var/lib/stub"
        uuid = "(UUID: GPU-{0:08d}-0000-4000-8000-000000000000)"
        listing = "".join(f"GPU {n}: NVIDIA H100 80GB HBM3 {uuid.format(n)}\n" for n in range(number))
        files = repository.nvidia_tool(version) | {
            "/usr/lib/stub/nvidia-L": listing, f"{state}/devices": f"{number}\n", f"{state}/driver": f"{version}\n",
            f"{state}/name": f"NVIDIA {contract.ask['gpu_name']}\n", f"{state}/memory": f"{contract.ask['gpu_ram']}\n",
            f"{state}/loaded": "nvidia\n", f"{state}/persistence": "Enabled\n",
        }  # fmt: skip
        for place, text in files.items():
            path = machine.path(place)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755 if "/bin/" in place else 0o644)

    # --- what there is ---------------------------------------------------------------------------------------

    def _list(self, request: Request) -> dict[str, Any]:
        limit = min(int(request.query.get("limit", 25)), self.pages.size or 25)
        if self.pages.cut:  # its token leads to the same page
            return {"success": True, "instances": [], "next_token": "t0", "total_instances": 1}
        filters = json.loads(request.query.get("select_filters", "{}"))
        shown = [record for each in self._seen() if (record := self._record(each))]
        for name, terms in filters.items():
            shown = [each for each in shown if _fits(each, name, terms)]
        begin = int(request.query.get("after_token", "t0").removeprefix("t"))
        page = shown[begin : begin + limit]
        token = f"t{begin + limit}" if begin + limit < len(shown) else None
        return {"success": True, "instances": page, "next_token": token, "total_instances": len(shown)}

    def _show(self, request: Request) -> dict[str, Any]:
        found = next((each for each in self._seen() if each.id == request.by["id"]), None)
        return {"instances": self._record(found) if found else None}

    def _seen(self) -> Iterator[Contract]:
        for each in self.rentals.values():
            if each.living and each.unseen <= 0:
                yield each
            each.unseen -= 1

    def _record(self, contract: Contract) -> dict[str, Any]:
        ask, running, proxy = contract.ask, contract.status == "running", contract.proxy
        shown = {
            name: ask[name] for name in ("machine_id", "host_id", "gpu_name", "num_gpus", "gpu_ram", "geolocation")
        }
        ports = {
            f"{port}/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(to.port)}] for port, to in contract.ports.items()
        }
        address = self.lab.gateway if self.lab else "203.0.113.5"
        if running and self.lab is None:
            mapped = [{"HostIp": "0.0.0.0", "HostPort": "40123"}, {"HostIp": "::", "HostPort": "40123"}]
            asked = "-p 22:22" in contract.body["env"] or "ssh_direc" in contract.body["runtype"]
            ports = {"22/tcp": mapped} if asked and ask["direct_port_count"] else {}
        known = {"min_bid": ask["min_bid"], "public_ipaddr": f"{address}\n" if running else None}
        return shown | {name: value for name, value in known.items() if value is not None} | {
            "id": int(contract.id), "label": contract.body.get("label"), "actual_status": contract.status,
            "cur_state": contract.cur, "next_state": contract.intended, "intended_status": contract.intended,
            "status_msg": contract.said, "image_uuid": contract.body["image"],
            "image_runtype": contract.body["runtype"], "ssh_host": proxy.host if proxy else "ssh5.vast.ai",
            "ssh_port": proxy.port if proxy else 10122, "ports": ports if running else {},
            "is_bid": contract.market == "spot", "dph_base": ask["dph_base"], "dph_total": ask["dph_total"],
            "start_date": contract.created, "extra_env": [[k, v] for k, v in contract.body["env"].items()],
        }  # fmt: skip

    def _manage(self, request: Request) -> dict[str, Any]:
        contract = self._named(request)
        if "label" in request.body:
            if len(request.body["label"]) > 256:
                raise _no(400, "invalid_args", "label is longer than 256")
            contract.body["label"] = request.body["label"]
        if request.body.get("state") == "stopped":
            self.stop(contract.id)
        elif request.body.get("state") == "running" and contract.intended != "running":
            raise _no(400, "invalid_args", "the lab cannot start an instance that was stopped")
        return {"success": True}

    def _destroy(self, request: Request) -> dict[str, Any]:
        contract = self._named(request)
        if not contract.survives() and not contract.ending:
            contract.ending = True
            self.later(self.delays.ending, lambda: self.end(contract, lambda: self._gone(contract)))
        return {"success": True}

    def _reboot(self, request: Request) -> dict[str, Any]:
        """Its container is stopped and started; its disk stays."""
        contract = self._running(request)
        contract.status = "rebooting"
        machine = contract.machine

        def work() -> None:
            if machine is not None:
                machine.kill()
                machine.boot()
            with self.lock:
                if contract.status == "rebooting":
                    contract.status = "running"

        self._work.submit(self.watched, work)
        return {"success": True}

    def _running(self, request: Request) -> Contract:
        contract = self._named(request)
        if contract.status != "running":
            raise _no(400, "invalid_args", f"Instance {contract.id} is not running")
        return contract

    def _bid(self, request: Request) -> dict[str, Any]:
        """Who bids less than the machine's minimum stands still from now on."""
        contract, price = self._named(request), request.body["price"]
        if contract.market != "spot":
            raise _no(400, "invalid_args", f"Instance {contract.id} is not interruptible")
        contract.body["price"] = price
        if price < (self.asks[int(contract.kind)]["min_bid"] or 0.0):
            self.stop(contract.id)
        return {"success": True}

    def _execute(self, request: Request) -> dict[str, Any]:
        """What it prints is at a URL once it is through, as what is logged is; until then that answers 404."""
        contract = self._running(request)
        if contract.machine is None:
            raise _no(400, "invalid_container", "there is no container without machines")
        machine = contract.machine

        def printed() -> str:
            ran = machine.run(request.body["command"], check=False)
            return f"{ran.stdout}{ran.stderr}"

        return {"writeable_path": "/root/", **self._shown_later(printed)}

    def _logs(self, request: Request) -> dict[str, Any]:
        contract, told = self._named(request), request.body or {}
        machine = contract.machine

        def logged() -> str:
            lines = machine.console().splitlines(keepends=True) if machine is not None else []
            lines = [each for each in lines if told.get("filter", "") in each]
            return "".join(lines[-int(told.get("tail") or 1000) :])

        return self._shown_later(logged)

    def _shown_later(self, what: Callable[[], str]) -> dict[str, Any]:
        id = str(next(self._ids))

        def work() -> None:
            text = what()
            with self.lock:
                self._results[id] = text

        self._work.submit(self.watched, work)
        return {"success": True, "result_url": f"{self.url}/results/{id}"}

    def _result_of(self, request: Request) -> Answer:
        if request.by["id"] not in self._results:
            raise Refused(404, "not there yet")
        return Answer(self._results[request.by["id"]], plain=True)

    # --- keys for ssh ----------------------------------------------------------------------------------------

    def _new_key(self, request: Request) -> dict[str, Any]:
        key = request.body["ssh_key"].strip()
        if not key.startswith(("ssh-", "ecdsa-")):
            raise _no(400, "no_ssh_key", "No ssh key provided")
        id, now = next(self._key_ids), datetime.fromtimestamp(self.clock.now(), UTC).isoformat()
        self.ssh_keys[id] = {"id": id, "user_id": USER, "key": key, "created_at": now, "deleted_at": None}
        made = {name: value for name, value in self.ssh_keys[id].items() if name != "key"}
        return {"success": True, "key": {**made, "public_key": key}}

    def _known_key(self, request: Request) -> dict[str, Any]:
        if (known := self.ssh_keys.get(int(request.by["id"]))) is None:
            raise _no(400, "no_ssh_key", "No ssh key provided")
        return known

    def _change_key(self, request: Request) -> dict[str, Any]:
        known = self._known_key(request)
        known["key"] = request.body["ssh_key"].strip()
        return {"success": True, "key": known}

    def _drop_key(self, request: Request) -> dict[str, Any]:
        del self.ssh_keys[self._known_key(request)["id"]]
        return {"success": True}

    def _attach(self, request: Request) -> dict[str, Any]:
        contract = self._named(request)
        if contract.machine is not None:
            file = contract.machine.path("/root/.ssh/authorized_keys")
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with file.open("a") as keys:
                keys.write(f"{request.body['ssh_key'].strip()}\n")
        return {"success": True, "msg": "SSH key added to instance."}

    # --- what it costs ---------------------------------------------------------------------------------------

    def _parts(self, contract: Contract) -> dict[str, tuple[float, float]]:
        """Hours and USD an hour: the GPU until it stands still, its disk until its end; GB and USD of traffic."""
        ended = self.clock.now() if contract.ended is None else contract.ended
        stopped = ended if contract.stopped is None else min(contract.stopped, ended)
        usd = contract.ask["dph_base"] if contract.market != "spot" else contract.body["price"]
        disk = contract.ask["storage_cost"] * contract.body["disk"] / MONTH
        return {
            "gpu": ((stopped - contract.created) / 3600, usd),
            "disk": ((ended - contract.created) / 3600, disk),
            "bwd": (self.traffic_gb[0], contract.ask["inet_down_cost"]),
            "bwu": (self.traffic_gb[1], contract.ask["inet_up_cost"]),
        }

    def _owed(self, contract: Contract) -> float:
        return sum(hours * usd for hours, usd in self._parts(contract).values())

    def _charges(self, request: Request) -> dict[str, Any]:
        """By contract, each with what its sum is made of: https://docs.vast.ai/api-reference/billing/show-charges."""
        wanted = json.loads(request.query.get("select_filters", "{}"))
        day = wanted.get("day", {})
        if not {"gte", "lte"} <= day.keys():
            raise _no(400, "invalid_args", "Must provide both 'day' gte and lte filters for instance charges")
        now, found = self.clock.now(), []
        kinds = wanted.get("type", {}).get("in", ["instance"])
        for each in self.rentals.values() if "instance" in kinds else ():
            end = now if each.ended is None else each.ended
            if end >= day["gte"] and each.created <= day["lte"]:
                found.append(self._charge(each, end))
        limit, begin = int(request.query.get("limit", 100)), int(request.query.get("after_token", "t0")[1:])
        if request.query.get("latest_first", "true") == "true":
            found.reverse()
        more = f"t{begin + limit}" if begin + limit < len(found) else None
        page = found[begin : begin + limit]
        return {"success": True, "count": len(page), "total": len(found), "next_token": more, "results": page}

    def _charge(self, contract: Contract, end: float) -> dict[str, Any]:
        times = {"start": int(contract.created), "end": int(end)}
        items: list[dict[str, Any]] = [
            {**times, "type": kind, "source": None, "description": f"{hours:.3f} hours at ${usd:.3f}/hour",
             "amount": round(hours * usd, 3), "metadata": {}, "items": []}
            for kind, (hours, usd) in self._parts(contract).items()
        ]  # fmt: skip
        label = contract.body.get("label")
        return {
            **times, "type": "instance", "source": f"instance-{contract.id}",
            "description": f"Instance {contract.id} Charges", "amount": round(self._owed(contract), 3),
            "metadata": {"label": label} if label else {}, "items": items,
        }  # fmt: skip

    def _invoices(self, request: Request) -> dict[str, Any]:
        """Payments: none were made."""
        return {"success": True, "count": 0, "total": 0, "next_token": None, "results": []}

    def _old_invoices(self, request: Request) -> dict[str, Any]:
        """What `vastai show invoices` still asks, in the fields that it shows."""
        begin, end = (float(request.query[name]) for name in ("sdate", "edate"))
        rows = [
            {"id": int(each.id), "instance_id": int(each.id), "type": "charge",
             "description": f"Instance {each.id} {kind}",
             "quantity": round(hours, 3), "rate": usd, "amount": round(hours * usd, 3), "timestamp": each.created}
            for each in self.rentals.values() if begin <= each.created <= end
            for kind, (hours, usd) in self._parts(each).items()
        ]  # fmt: skip
        owed = sum(map(self._owed, self.rentals.values()))
        return {"invoices": rows, "current": {"charges": round(owed, 3), "credit": round(self.credit - owed, 3)}}

    def _gone(self, contract: Contract) -> None:
        contract.living, contract.ended = False, self.clock.now()
        self._unproxied(contract)

    def _unproxied(self, contract: Contract) -> None:
        if contract.proxy is not None:
            contract.proxy.close()
            contract.proxy = None

    def close(self) -> None:
        for each in self.rentals.values():
            self._unproxied(each)
        super().close()

    def _named(self, request: Request) -> Contract:
        contract = self.rentals.get(request.by["id"])
        if contract is None or not contract.living:
            raise _no(404, "no_such_instance", f"Instance {request.by['id']} not found")
        return contract

    # --- what becomes of it ----------------------------------------------------------------------------------

    def off(self, rental: Contract) -> None:
        """Its process 1 has ended: the container is billed on, as a stopped one is."""
        if rental.status == "running" and not rental.ending:
            rental.status, rental.said = "exited", "container exited"

    def stop(self, id: str) -> None:
        """It stands still from now on, and nobody was told; its disk is billed."""
        with self.lock:
            contract = self.rentals[id]
            contract.cur = contract.intended = "stopped"
            contract.status = "exited"
            contract.stopped = self.clock.now() if contract.stopped is None else contract.stopped
            for relay in contract.ports.values():
                relay.close()
            contract.ports = {}
            self._unproxied(contract)
            if contract.machine is not None and contract.machine.is_running:
                contract.machine.kill()

    def outbid(self, id: str) -> None:
        """Somebody pays more for its machine."""
        with self.lock:
            ask = self.asks[int(self.rentals[id].kind)]
            ask["min_bid"] = max(ask["min_bid"] or 0.0, self.rentals[id].body.get("price") or 0.0) * 1.1
            self.stop(id)

    def refuse(self, action: str, status: int, error: str, words: str, times: int | None = 1) -> None:
        """Refuse the next calls in its own words."""
        self.fail(action, status, _no(status, error, words).body, times=times)

    def lose_host(self, id: str) -> None:
        """Its host is not to be reached any more."""
        with self.lock:
            self.stop(id)
            contract = self.rentals[id]
            contract.cur = contract.intended = "running"
            contract.status = "offline"

    def vanish(self, id: str) -> None:
        """It is gone, and nobody was told."""
        with self.lock:
            contract = self.rentals[id]
            contract.ending = True
            self.end(contract, lambda: self._gone(contract))


def _no(status: int, error: str, words: str) -> Refused:
    return Refused(status, {"success": False, "error": error, "msg": words})


def _unfit(action: str, wrong: list[str]) -> Refused:
    codes = {"GET /api/v1/instances/": "invalid_request", "POST /api/v0/ssh/": "no_ssh_key"}
    return _no(400, codes.get(action, "invalid_args"), "; ".join(wrong))


def _fits(record: Mapping[str, Any], name: str, terms: Mapping[str, Any]) -> bool:
    """Whether a record is what a filter asks for; what is null fits nothing."""
    value = record["verification"] == "verified" if name == "verified" else record.get(name, KeyError)
    if value is KeyError or not isinstance(terms, Mapping) or not set(terms) <= set(OPERATORS):
        raise _no(400, "invalid_args", f"cannot filter by {name}: {terms}")
    return value is not None and all(OPERATORS[name](value, _like(value, asked)) for name, asked in terms.items())


def _like(value: Any, asked: Any) -> Any:
    """Its own tools write a number as text."""
    return float(asked) if isinstance(asked, str) and isinstance(value, (int, float)) else asked


def _checked(body: Any) -> dict[str, Any]:
    """What a create asks for, with what is left out."""
    full: dict[str, Any] = {"label": None, "env": {}, "args": [], "onstart": "", "disk": 8, "runtype": "ssh"}
    full |= {name: value for name, value in body.items() if value is not None}
    if full.get("client_id") != "me" or not full.get("image"):
        raise _no(400, "invalid_args", "client_id and image are needed")
    sizes = {"label": (len(full["label"] or ""), 256), "env": (len(json.dumps(full["env"])), 32768),
             "args": (len(full["onstart"]) + sum(map(len, full["args"])), 4096)}  # fmt: skip
    for name, (size, most) in sizes.items():
        if size > most:
            raise _no(400, "invalid_args", f"{name} has {size} characters and may have {most}")
    return full


def _called(name: str, accelerator: str) -> str:
    """Vast.ai's own name for what the snapshot calls "V100" or "RTX 4080 Super"."""
    has, known = parse(accelerator), meanings("vastai")
    if name in known:
        return name
    fits = [alias for alias, means in known.items() if means.name == has.name]
    return next((alias for alias in fits if has.with_count(1).accepts(known[alias])), fits[0] if fits else name)


def _asks() -> Iterator[dict[str, Any]]:
    """What strangers offer, as the snapshot had it; every other machine has twice the GPUs that are offered."""
    lines = (prices.FOLDER / "vastai.csv").read_text().splitlines()[1:]
    for number, row in enumerate(csv.DictReader(lines), 1):
        has, name = parse(row["accelerator"]), _called(row["instance_type"].rpartition("x")[0], row["accelerator"])
        gib, cores = float(row["memory_gib"] or 0), float(row["vcpus"] or 0)
        share, paid, bid = 1.0 if number % 2 else 0.5, row["on_demand_usd_per_hour"], row["spot_usd_per_hour"]
        yield {
            "id": 9_000_000 + number, "ask_contract_id": 9_000_000 + number, "machine_id": 40_000 + number,
            "host_id": 1000 + number // 3, "gpu_name": name, "num_gpus": has.count, "gpu_frac": share,
            "gpu_ram": round(has.memory_gb * 1024), "gpu_total_ram": round(has.total_memory_gb * 1024),
            "cpu_cores": round(cores / share) or None, "cpu_cores_effective": cores or None,
            "cpu_ram": round(gib * 1024 / share) or None, "cpu_arch": "amd64", "disk_space": 500.0,
            "dph_base": float(paid) - STORAGE * SHOWN / MONTH if paid else None, "min_bid": float(bid) if bid else None,
            "storage_cost": STORAGE, "inet_up": 800.0, "inet_down": 900.0, "inet_up_cost": 0.005,
            "inet_down_cost": 0.003,
            "cuda_max_good": 12.8, "compute_cap": 900, "driver_version": DRIVER, "reliability": 0.995,
            "reliability2": 0.995, "geolocation": row["region"], "direct_port_count": 100, "static_ip": True,
            "verification": "verified", "cluster_id": None, "duration": 2_592_000.0, "rentable": True, "rented": False,
            "external": False, "hosting_type": 1, "public_ipaddr": "203.0.113.5",
        }  # fmt: skip
