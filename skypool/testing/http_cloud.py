"""HttpCloud: a fake cloud with an HTTP API, for tests of a driver that asks its cloud over the network.

The API is that of Acme Cloud, an invented provider. `docs/driver-tutorial.md` writes a driver for it, and `skypool
new-driver NAME` begins with that driver. Behind the API is what is behind `FakeCloud`: machines are agents on this
computer, and a `control` says what goes wrong.

    with HttpCloud(tmp_path / "cloud", key="sesame") as cloud:
        driver = Acme(url=cloud.url, api_key="sesame")

All requests but the last carry `Authorization: Bearer KEY`. Bodies and answers are JSON. A refusal has a status of 400
or more and the body `{"code": "OutOfStock", "message": "there are none left"}`.

    GET    /v1/account                 the limits of the account, by name
    GET    /v1/types                   what is sold: a list of {type, region, zone, market, usd_per_hour, …}
    POST   /v1/machines                make one: {type, zone, market, client_token, tags, lease, lifetime}
    GET    /v1/machines                those that are alive
    GET    /v1/machines/ID             one of them
    PUT    /v1/machines/ID/tags        write its tags anew
    DELETE /v1/machines/ID             begin to end it
    GET    /v1/metadata/ID/notice      when it is taken back, in seconds since 1970; 404 until that is known

A create with a `client_token` that was used before makes nothing, and answers with the machine of that token. A machine
ends itself when its `lease` is over: so many seconds after its boot, or after "SERIAL SECONDS" was last written into
its `lease_file`. It never lives longer than `lifetime` seconds. Commands run on it behind the words of its `console`.

To imitate another provider, subclass `HttpCloud` and override `routes`.

    python -m skypool.testing.http_cloud --key sesame      # serves one until Ctrl-C
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, urlsplit

from skypool.drivers import tags
from skypool.errors import (
    AccessError,
    CapacityError,
    CredentialsError,
    FundsError,
    NoAnswer,
    OfferGone,
    ProviderError,
    QuotaError,
    RateLimitError,
    UsageError,
)
from skypool.model import Need, Order
from skypool.testing import machine
from skypool.testing.api import Api
from skypool.testing.control import Clock, FakeCloudControl
from skypool.testing.state import State
from skypool.testing.world import USUAL, Machine, Stock, When, World

_STATUS: Mapping[type[ProviderError], int] = {
    CredentialsError: 401,
    AccessError: 403,
    CapacityError: 409,
    QuotaError: 409,
    RateLimitError: 429,
    FundsError: 402,
    OfferGone: 410,
}
"""The HTTP status of each refusal; 500 for any other."""

_STATES = {"starting": "booting", "running": "active", "ending": "deleting", "ended": "deleted"}
"""What the API calls the states of a machine."""

_METADATA = "ACME_METADATA"
"""The variable by which a machine knows where its metadata is, which a real one finds at a fixed address."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to the API.

    Attributes:
        path: without the query.
        key: what follows "Bearer" in its Authorization header.
        body: its JSON; {} if there is none.
        parts: what stands in its path where the route has {names}.
    """

    method: str
    path: str
    query: Mapping[str, str]
    key: str
    body: Mapping[str, Any]
    parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API answers. `body` is sent as JSON; None is no body."""

    status: int
    body: object = None
    headers: Mapping[str, str] = field(default_factory=dict)


class Refused(Exception):
    """A request that the API refuses."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.answer = Answer(status, {"code": code, "message": message})
        super().__init__(f"{status} {code}: {message}")


Route = Callable[[Request], Answer]


class HttpCloud:
    """A fake cloud behind an HTTP API on this computer. Use it in a `with` block, or `close` it.

    Args:
        state: a folder of its own, in which it lives.
        stock: what it sells; None is a little of everything. It sells no slices of several hosts.
        key: its API key; "" takes any.
        machines: whether its machines are real agents here, which needs Linux. Otherwise they are names alone, and no
            command runs there.
        port: where it listens; 0 is any free port.

    Attributes:
        url: the base address of the API, such as "http://127.0.0.1:41234/v1".

    Raises:
        UsageError: it cannot be run here, or is to sell a slice.
    """

    name: ClassVar[str] = "Acme Cloud"

    def __init__(
        self,
        state: str | Path,
        stock: Sequence[Stock] | None = None,
        *,
        key: str = "",
        machines: bool = True,
        port: int = 0,
    ) -> None:
        if machines and not machine.run_here():
            raise UsageError("machines of HttpCloud are processes and need Linux; use HttpCloud(…, machines=False)")
        self._stock = tuple(USUAL if stock is None else stock)
        if several := [each.instance_type for each in self._stock if each.size > 1]:
            raise UsageError(f"HttpCloud sells no slices of several hosts, such as {several[0]}; FakeCloud does")
        self.folder = Path(state).absolute()
        self._key = key
        self._machines = machines
        self._errors: list[Exception] = []
        self._server = _Server(("127.0.0.1", port), self)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name=self.name, daemon=True)
        self._thread.start()

    # --- for tests -------------------------------------------------------------------------------------------

    @property
    def control(self) -> HttpCloudControl:
        """What it does wrong, and what it has seen."""
        return HttpCloudControl(self._state())

    @property
    def clock(self) -> Clock:
        """The cloud's clock, which tests move."""
        return Clock(self._state())

    def close(self) -> None:
        """Stop answering, and end all machines.

        Raises:
            ExceptionGroup: what went wrong in the cloud itself.
        """
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with contextlib.suppress(FileNotFoundError), State(self.folder).open() as world:
            for each in world.alive():
                world.end(each)
        if self._errors:
            raise ExceptionGroup(f"the fake {self.name} failed", self._errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- the API ---------------------------------------------------------------------------------------------

    def routes(self) -> Mapping[str, Route]:
        """Return what answers each request, by "METHOD /path/{name}"."""
        return {
            "GET /v1/account": self.get_account,
            "GET /v1/types": self.get_types,
            "POST /v1/machines": self.post_machine,
            "GET /v1/machines": self.get_machines,
            "GET /v1/machines/{id}": self.get_machine,
            "PUT /v1/machines/{id}/tags": self.put_tags,
            "DELETE /v1/machines/{id}": self.delete_machine,
            "GET /v1/metadata/{id}/notice": self.get_notice,
        }

    def get_account(self, request: Request) -> Answer:
        """Answer with the limits of the account."""
        return Answer(200, {"limits": self._api(request).account()})

    def get_types(self, request: Request) -> Answer:
        """Answer with everything that is sold, one entry for each type, zone and market."""
        return Answer(200, [_type(each, in_stock) for each, in_stock in self._api(request).stock()])

    def post_machine(self, request: Request) -> Answer:
        """Make a machine, or answer with the one that was made with this token."""
        api = self._api(request)
        body = request.body
        name = _given(body, "type", str)
        zone = _given(body, "zone", str)
        market = _given(body, "market", str)
        with self._state().open(settle=False) as world:
            stock = next((each for each in world.stock if each.place == (name, zone, market)), None)
        if stock is None:
            raise Refused(400, "NoSuchType", f"no {name!r} is sold in {zone!r} as {market!r}")
        token = _given(body, "client_token", str)
        said = {str(name): str(value) for name, value in _given(body, "tags", dict).items()}
        lifetime = body.get("lifetime")
        order = Order(
            pool=said.get(tags.POOL, ""),  # in the log of the fake cloud alone
            token=token,
            nodes=(0,),
            need=Need(),
            lease=float(_given(body, "lease", (int, float))),
            lifetime=None if lifetime is None else float(lifetime),
        )
        [made] = api.create(stock, order, (0,), token, said)
        return Answer(201, self._machine(made))

    def get_machines(self, request: Request) -> Answer:
        """Answer with every machine that is alive."""
        return Answer(200, [self._machine(each) for each in self._api(request).machines()])

    def get_machine(self, request: Request) -> Answer:
        """Answer with one machine that is alive."""
        return Answer(200, self._machine(self._alive(request)))

    def put_tags(self, request: Request) -> Answer:
        """Write the tags of a machine anew."""
        self._alive(request)
        self._api(request).retag(request.parts["id"], {str(key): str(value) for key, value in request.body.items()})
        return Answer(204)

    def delete_machine(self, request: Request) -> Answer:
        """Begin to end a machine."""
        self._alive(request)
        self._api(request).terminate([request.parts["id"]])
        return Answer(202)

    def get_notice(self, request: Request) -> Answer:
        """Answer a machine's question when it is taken back. This needs no key, as machines have none."""
        with self._state().open() as world:
            found = world.machines.get(request.parts["id"])
            if found is None or not found.lives or found.taken_at == float("inf"):
                raise Refused(404, "NotFound", "there is no notice for this machine")
            return Answer(200, found.taken_at - world.offset)

    # --- its parts -------------------------------------------------------------------------------------------

    def answer(self, request: Request) -> Answer:
        """Answer one request.

        Raises:
            ConnectionResetError: the connection is to be dropped without an answer.
        """
        try:
            for route, do in self.routes().items():
                pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", route)
                if found := re.fullmatch(pattern, f"{request.method} {request.path}"):
                    parts = found.groupdict()
                    return do(Request(request.method, request.path, request.query, request.key, request.body, parts))
            raise Refused(404, "NoSuchPath", f"the API has no {request.method} {request.path}")
        except Refused as e:
            return e.answer
        except NoAnswer as e:
            raise ConnectionResetError(str(e)) from e
        except ProviderError as e:
            return _refusal(e)
        except Exception as e:  # noqa: BLE001 - `close` raises it
            self._errors.append(e)
            return Answer(500, {"code": "InternalError", "message": f"the fake cloud itself failed: {e!r}"})

    def _alive(self, request: Request) -> Machine:
        """Find the machine that a request is about.

        Raises:
            Refused: it has ended, or there never was one.
        """
        for each in self._api(request).machines():
            if each.id == request.parts["id"]:
                return each
        raise Refused(404, "NotFound", f"there is no machine {request.parts['id']}")

    def _machine(self, one: Machine) -> dict[str, object]:
        """Return a machine as the API shows it."""
        door = machine.Door(one.folder, machine.devices(one.has))
        return {
            "id": one.id,
            "state": _STATES[one.state],
            "type": one.stock.instance_type,
            "region": one.stock.region,
            "zone": one.stock.zone,
            "market": one.stock.market,
            "tags": one.tags,
            "billed_from": one.born,
            "console": ["env", f"{_METADATA}={self.url}/metadata", *door.argv([])],
            "python": sys.executable,
            "lease_file": machine.guard(one.folder),
        }

    def _state(self) -> State:
        return State(self.folder, self._world)

    def _world(self) -> World:
        return World(str(self.folder), self._stock, self._key, self._machines)

    def _api(self, request: Request) -> _Api:
        return _Api(self._state(), self.name, request.key)


@dataclass(frozen=True, slots=True)
class HttpCloudControl(FakeCloudControl):
    """The control of an `HttpCloud`."""

    def kill_client(self, number: int, when: When) -> None:
        """Refuse to do so: the server does not know which process sent a request.

        Raises:
            UsageError: always.
        """
        raise UsageError("HttpCloud does not know the process of its client; kill that yourself, or use FakeCloud")


class _Api(Api):
    """The fake cloud's calls, as far as clients write their tags themselves."""

    def machines(self) -> list[Machine]:
        """Return all machines that live."""
        return self._call("describe", lambda world: world.alive())

    def retag(self, id: str, said: dict[str, str]) -> None:
        """Write the tags of a machine anew."""

        def tagged(world: World) -> None:
            world.machines[id].tags = said

        self._call("tag", tagged, id=id)


class _Server(ThreadingHTTPServer):
    """Serves one cloud, each connection in a thread of its own."""

    request_queue_size = 64

    def __init__(self, address: tuple[str, int], cloud: HttpCloud) -> None:
        self.cloud = cloud
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    """Reads requests, and writes what the cloud answers."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one write: two of them wait for each other for 40 ms
    disable_nagle_algorithm = True

    def _answered(self) -> None:
        assert isinstance(self.server, _Server)
        try:
            answer = self.server.cloud.answer(self._request())
        except Refused as e:
            answer = e.answer
        except ConnectionResetError:
            self.close_connection = True
            return
        body = b"" if answer.body is None else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        for name, value in {"Content-Type": "application/json", **answer.headers}.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answered

    def _request(self) -> Request:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(raw) if raw else {}
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise Refused(400, "BadRequest", "the body is no JSON object")
        url = urlsplit(self.path)
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return Request(self.command, url.path, dict(parse_qsl(url.query)), key, body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: `control.calls()` has what was asked."""


def _given(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """Return a field of a request's body.

    Raises:
        Refused: it is not there, or is something else.
    """
    if not isinstance(body.get(name), kind):
        raise Refused(400, "BadRequest", f"{name} is missing, or is not what it should be: {body.get(name)!r}")
    return body[name]


def _type(stock: Stock, in_stock: bool) -> dict[str, object]:
    """Return one entry of what is sold, as the API shows it."""
    has = stock.has
    return {
        "type": stock.instance_type,
        "region": stock.region,
        "zone": stock.zone,
        "market": stock.market,
        "usd_per_hour": stock.usd_per_hour,
        "gpu": None if has is None else {"model": str(has).partition(":")[0], "count": has.count},
        "vcpus": stock.vcpus,
        "memory_gib": stock.memory_gib,
        "disk_gib": stock.disk_gib,
        "arch": stock.arch,
        "quota": stock.quota,
        "in_stock": in_stock,
    }


def _refusal(error: ProviderError) -> Answer:
    """Return an error of ours as the API says it."""
    status = next((_STATUS[each] for each in type(error).__mro__ if each in _STATUS), 500)
    headers = {}
    if isinstance(error, RateLimitError) and error.retry_after is not None:
        headers["Retry-After"] = f"{error.retry_after:g}"
    return Answer(status, {"code": error.code, "message": error.text}, headers)


def main(words: Sequence[str] | None = None) -> None:
    """Serve a cloud until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m skypool.testing.http_cloud", description="Serve a fake cloud until Ctrl-C."
    )
    parser.add_argument("--folder", help="where it lives; without it a temporary folder")
    parser.add_argument("--key", default="sesame", help="its API key (sesame)")
    parser.add_argument("--port", type=int, default=0, help="where it listens; without it any free port")
    asked = parser.parse_args(words)

    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: over.set())
    with tempfile.TemporaryDirectory(prefix="acme-") as folder:
        with HttpCloud(asked.folder or folder, key=asked.key, port=asked.port) as cloud:
            print(f"export ACME_URL={cloud.url} ACME_API_KEY={asked.key}", flush=True)
            while not over.wait(0.2):  # a signal that another thread gets does not end a longer wait
                continue


if __name__ == "__main__":
    main()
