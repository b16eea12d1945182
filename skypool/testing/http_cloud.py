"""`HttpCloud`: a fake cloud with an HTTP API, for tests of a driver that sends HTTP requests to its cloud.

The API is that of Acme Cloud, an invented provider. `docs/driver-tutorial.md` shows how to write a driver for this API,
and `skypool new-driver NAME` copies the finished driver. Behind the API is the same cloud as behind `FakeCloud`: its
machines are processes on this computer, and tests prepare failures with `HttpCloud.control`.

    with HttpCloud(tmp_path / "cloud", key="sesame") as cloud:
        driver = Acme(url=cloud.url, api_key="sesame")

All requests except the last in this table carry the header `Authorization: Bearer KEY`. Bodies of requests and answers
are JSON. A refusal has a status of 400 or more and a body such as
`{"code": "OutOfStock", "message": "no small is left in north-a"}`.

    GET    /v1/account                 return how many machines may be alive at once, by quota
    GET    /v1/types                   return what is sold: a list of {type, region, zone, market, usd_per_hour, …}
    POST   /v1/machines                make a machine: {type, zone, market, client_token, tags, lease, lifetime};
                                       {region} if the type is sold by regions. The zone is then "" or left out.
    GET    /v1/machines?after=…        return a page of the machines that are alive, and `after` of the next page
    GET    /v1/machines/ID             return one machine that is alive
    PUT    /v1/machines/ID/tags        replace the machine's tags
    DELETE /v1/machines/ID             ask to end the machine
    GET    /v1/metadata/ID/notice      return when the machine is taken back, in seconds since 1970; 404 if unannounced

If a machine was made with the same `client_token` before, POST makes nothing and returns that machine. A machine ends
itself when its `lease` is over, a number of seconds from its creation. To renew the lease, a client writes a serial
number and a number of seconds into the machine's `lease_file`. The lease then ends that many seconds later, but after
at most `lease` seconds. A machine never lives longer than `lifetime` seconds; null means no such limit. The file "end"
beside the lease file brings the end nearer (`skypool.agent.guard`). To run a command on a machine, put the words of the
machine's `console` in front of the command.

To imitate another provider, subclass `HttpCloud` and override `routes`.

    python -m skypool.testing.http_cloud --key sesame      # serves a cloud until Ctrl-C
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
from skypool.testing.api import Api, page_of
from skypool.testing.cloud_state import USUAL, Machine, Stock, When, World
from skypool.testing.control import Clock, FakeCloudControl
from skypool.testing.state_store import State

_STATUS: Mapping[type[ProviderError], int] = {
    CredentialsError: 401,
    AccessError: 403,
    CapacityError: 409,
    QuotaError: 409,
    RateLimitError: 429,
    FundsError: 402,
    OfferGone: 410,
}
"""The HTTP status of each class of error; any other error has status 500."""

_STATES = {"starting": "booting", "running": "active", "ending": "deleting", "ended": "deleted"}
"""The API's name of each state of a machine."""

_METADATA = "ACME_METADATA"
"""The environment variable with the address of the metadata server, which tells a machine about itself.

On a real provider's machine, the metadata server has a fixed address.
"""


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request to the API of a fake cloud.

    Attributes:
        method: the HTTP method, such as "GET".
        path: the path without the query.
        query: the query's parameters. If a parameter is repeated, the last value counts.
        key: the Authorization header without a leading "Bearer "; "" if there is no such header.
        body: the JSON object in the body; {} if there is no body.
        parts: the part of the path in place of each name in braces in the route. For the route "/v1/machines/{id}" and
            the path "/v1/machines/i-0001", this is {"id": "i-0001"}.
    """

    method: str
    path: str
    query: Mapping[str, str]
    key: str
    body: Mapping[str, Any]
    parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer of the API.

    Attributes:
        body: the value to send as JSON; None sends no body.
        headers: headers to send besides Content-Type and Content-Length.
    """

    status: int
    body: object = None
    headers: Mapping[str, str] = field(default_factory=dict)


class Refused(Exception):
    """The error for a request that the API refuses.

    Args:
        status: the HTTP status, 400 or more.
        code: a short name of the error, such as "NotFound".
        message: a text for people.

    Attributes:
        answer: the HTTP answer to send, with a JSON object of `code` and `message`.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        self.answer = Answer(status, {"code": code, "message": message})
        super().__init__(f"{status} {code}: {message}")


Route = Callable[[Request], Answer]


class HttpCloud:
    """A fake cloud behind an HTTP API on this computer. Use it in a `with` block, or call `close`.

    The server runs in a thread of its own, from the construction on. The methods that `routes` names raise
    ProviderError if the API key is wrong, the cloud refuses, or a test prepared a failure. The methods for one machine
    raise Refused with status 404 if the machine does not exist or has ended.

    Args:
        state: the folder for the cloud's state, which must hold nothing else. If it holds the cloud of an earlier run,
            that cloud goes on with its own machines, stock and key.
        stock: the kinds of machines that a new cloud sells; None means the default stock, `world.USUAL`. Slices are not
            supported.
        key: the API key that clients of a new cloud must send; "" accepts any key.
        machines: True runs machines as processes on this computer, which needs Linux. False makes mere records, which
            run nothing.
        port: the TCP port on which the server listens; 0 chooses a free port.

    Attributes:
        url: the base address of the API, such as "http://127.0.0.1:41234/v1".

    Raises:
        UsageError: `machines` is True and this computer does not run Linux, or `stock` contains a slice.
        OSError: the server cannot listen on the port, for example because another program uses it.
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
            raise UsageError(
                "HttpCloud runs its machines as processes on this computer, which must run Linux, but does not: use a "
                "Linux machine or container, or HttpCloud(…, machines=False), which makes machines but runs nothing "
                "on them"
            )
        self._stock = tuple(USUAL if stock is None else stock)
        if several := [each.instance_type for each in self._stock if each.size > 1]:
            raise UsageError(
                f"HttpCloud cannot sell the type {several[0]!r}, which is a slice (several hosts that are rented "
                "together); use FakeCloud, or leave this type out of `stock`"
            )
        self.folder = Path(state).absolute()
        self._key = key
        self._machines = machines
        self._errors: list[Exception] = []
        self._server = _Server(("127.0.0.1", port), self)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name=self.name, daemon=True)
        self._thread.start()

    # --- for the authors of tests ----------------------------------------------------------------------------

    @property
    def control(self) -> HttpCloudControl:
        """Return the object with which a test prepares failures and reads the calls that the cloud received."""
        return HttpCloudControl(self._state())

    @property
    def clock(self) -> Clock:
        """Return the cloud's clock, which tests can move forward."""
        return Clock(self._state())

    def close(self) -> None:
        """Stop the server, and end all machines. Blocks until both are done. The folder is kept.

        Raises:
            ExceptionGroup: the errors of the fake cloud's own code while it answered requests. The server and the
                machines have ended all the same.
        """
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with contextlib.suppress(FileNotFoundError), State(self.folder).open() as world:
            for each in world.alive():
                world.end(each)
        if self._errors:
            raise ExceptionGroup(
                f"the fake {self.name} at {self.url} failed while it answered requests; see the exceptions in this "
                "group, and correct the cloud's code, such as an overridden routes()",
                self._errors,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- the API ---------------------------------------------------------------------------------------------

    def routes(self) -> Mapping[str, Route]:
        """Return the routes of the API, such as "GET /v1/machines/{id}", and the methods that answer their requests.

        A name in braces matches one part of a path. A subclass overrides this method to imitate another provider's API.
        """
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
        """Return the maximum number of live machines for each quota, as {"limits": {…}} (status 200)."""
        return Answer(200, {"limits": self._api(request).account()})

    def get_types(self, request: Request) -> Answer:
        """Return a list of all that is sold, in stock or not, as an answer with status 200.

        It has one entry for each machine type, zone and market.
        """
        return Answer(200, [_type(each, in_stock) for each, in_stock in self._api(request).stock()])

    def post_machine(self, request: Request) -> Answer:
        """Make a machine, and return its description as an answer with status 201. The machine may still be booting.

        If a machine was made with the same `client_token` before, nothing is made, and that machine is returned.

        Raises:
            Refused: the cloud does not sell the type there, or a field of the body is missing or has the wrong type
                (status 400).
        """
        api = self._api(request)
        body = request.body
        name = _given(body, "type", str)
        has_zone = body.get("zone") or not {"zone", "region"} & body.keys()
        where = _given(body, "zone" if has_zone else "region", str)
        market = _given(body, "market", str)
        with self._state().open(settle=False) as world:
            stock = next((each for each in world.stock if each.place == (name, where, market)), None)
        if stock is None:
            raise Refused(
                400,
                "NoSuchType",
                f"the type {name!r} is not sold in {where!r} on the market {market!r}; GET /v1/types lists "
                "what is sold",
            )
        token = _given(body, "client_token", str)
        said = {str(name): str(value) for name, value in _given(body, "tags", dict).items()}
        lifetime = body.get("lifetime")
        order = Order(
            pool=said.get(tags.POOL, ""),  # only for the fake cloud's journal
            token=token,
            nodes=(0,),
            need=Need(),
            lease=float(_given(body, "lease", (int, float))),
            lifetime=None if lifetime is None else float(lifetime),
        )
        [made] = api.create(stock, order, (0,), token, said)
        return Answer(201, self._machine(made))

    def get_machines(self, request: Request) -> Answer:
        """Return one page of the list of all machines that are alive, as an answer with status 200.

        The body is {"machines": […], "next": …}. "next" is the value of the parameter `after` for the next page, or
        null in the last page.
        """
        page, after = self._api(request).page(request.query.get("after", ""))
        return Answer(200, {"machines": [self._machine(each) for each in page], "next": after or None})

    def get_machine(self, request: Request) -> Answer:
        """Return the description of one machine that is alive, as an answer with status 200."""
        return Answer(200, self._machine(self._alive(request)))

    def put_tags(self, request: Request) -> Answer:
        """Replace all tags of a machine by the body of the request. Return an answer with status 204 and no body."""
        self._alive(request)
        self._api(request).retag(request.parts["id"], {str(key): str(value) for key, value in request.body.items()})
        return Answer(204)

    def delete_machine(self, request: Request) -> Answer:
        """Ask the cloud to end a machine. Return an answer with status 202 and no body."""
        self._alive(request)
        self._api(request).terminate([request.parts["id"]])
        return Answer(202)

    def get_notice(self, request: Request) -> Answer:
        """Return when the cloud takes a machine back, in seconds since 1970, as an answer with status 200.

        This request needs no API key, because the machine itself sends it. Without a notice, it is refused with status
        404.
        """
        with self._state().open() as world:
            found = world.machines.get(request.parts["id"])
            if found is None or not found.lives or found.taken_at == float("inf"):
                raise Refused(404, "NotFound", f"no notice was announced for the machine {request.parts['id']}")
            return Answer(200, found.taken_at - world.offset)

    # --- helpers ---------------------------------------------------------------------------------------------

    def answer(self, request: Request) -> Answer:
        """Return the answer to one request. All errors become answers, except a connection that is to be dropped.

        A refusal has a status of 400 or more. An unexpected error of the fake cloud itself becomes an answer with
        status 500, and `close` raises the error later.

        Raises:
            ConnectionResetError: the connection is to be dropped without an answer, because a test prepared that.
        """
        try:
            for route, do in self.routes().items():
                pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", route)
                if found := re.fullmatch(pattern, f"{request.method} {request.path}"):
                    parts = found.groupdict()
                    return do(Request(request.method, request.path, request.query, request.key, request.body, parts))
            raise Refused(404, "NoSuchPath", f"this API does not know {request.method} {request.path}")
        except Refused as e:
            return e.answer
        except NoAnswer as e:
            raise ConnectionResetError(str(e)) from e
        except ProviderError as e:
            return _refusal(e)
        except Exception as e:  # noqa: BLE001 - `close` raises it later
            self._errors.append(e)
            return Answer(500, {"code": "InternalError", "message": f"the fake cloud's own code failed: {e!r}"})

    def _alive(self, request: Request) -> Machine:
        """Return the live machine whose id is in the path of a request, or raise Refused with status 404."""
        for each in self._api(request).everything():
            if each.id == request.parts["id"]:
                return each
        raise Refused(404, "NotFound", f"the machine {request.parts['id']} does not exist or has ended")

    def _machine(self, one: Machine) -> dict[str, object]:
        """Return the JSON object that describes a machine in the API."""
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
        """Return the stored state of this cloud. It is created when it is first opened."""
        return State(self.folder, self._world)

    def _world(self) -> World:
        """Return a new initial state of this cloud, without machines. Nothing is stored."""
        return World(str(self.folder), self._stock, self._key, self._machines)

    def _api(self, request: Request) -> _Api:
        """Return the cloud's calls with the API key of the request. Each call checks the key."""
        return _Api(self._state(), self.name, request.key)


@dataclass(frozen=True, slots=True)
class HttpCloudControl(FakeCloudControl):
    """The control of an `HttpCloud`. It has all methods of `FakeCloudControl`, but `kill_client` raises UsageError."""

    def kill_client(self, number: int, when: When) -> None:
        """Raise UsageError: this cloud cannot kill a client, because it does not know which process sent a request."""
        raise UsageError(
            "HttpCloud does not know the process of its client, so kill_client() does not work; kill the client "
            "process in the test, or use FakeCloud"
        )


class _Api(Api):
    """A client's connection to a fake cloud: `Api` and further calls, which only `HttpCloud` needs."""

    def page(self, after: str) -> tuple[list[Machine], str]:
        """Return one page of all live machines, whatever their tags, and the value of `after` for the next page.

        That value is "" if there is no next page. `after` is "" for the first page.
        """
        return self._call("describe", lambda world: page_of(world, world.alive(), after))

    def everything(self) -> list[Machine]:
        """Return all live machines, of every client and whatever their tags."""
        return self._call("describe", lambda world: world.alive())

    def retag(self, id: str, said: dict[str, str]) -> None:
        """Replace all tags that clients wrote on a machine by `said`. Raises KeyError if the cloud never made it."""

        def tagged(world: World) -> None:
            world.machines[id].tags = said

        self._call("tag", tagged, id=id)


class _Server(ThreadingHTTPServer):
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], cloud: HttpCloud) -> None:
        self.cloud = cloud
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    """A handler of one HTTP connection, which reads requests and writes the cloud's answers."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # buffered, so that an answer is one write: a second write may be delayed by 40 ms
    disable_nagle_algorithm = True

    def _answered(self) -> None:
        """Read one request, and send the answer. If a test prepared a lost reply, close the connection instead."""
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
        """Read one request from the connection. An empty body counts as {}; one that is no JSON object is refused."""
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(raw) if raw else {}
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise Refused(400, "BadRequest", "the body of the request must be a JSON object")
        url = urlsplit(self.path)
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return Request(self.command, url.path, dict(parse_qsl(url.query)), key, body)

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing: the base class would print each request on stderr."""


def _given(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """Return a field of a request's body. Raise Refused (status 400) if it is missing, or not of the type `kind`."""
    if not isinstance(body.get(name), kind):
        why = f"has a value of the wrong type: {body[name]!r}" if name in body else "is missing"
        raise Refused(400, "BadRequest", f"the field {name!r} of the request's body {why}")
    return body[name]


def _type(stock: Stock, in_stock: bool) -> dict[str, object]:
    """Return the JSON object that describes a kind of machine in the API. Its "gpu" is None for no accelerator."""
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
    """Return the HTTP answer for an error of skypool, with the status from `_STATUS`, or else 500."""
    status = next((_STATUS[each] for each in type(error).__mro__ if each in _STATUS), 500)
    headers = {}
    if isinstance(error, RateLimitError) and error.retry_after is not None:
        headers["Retry-After"] = f"{error.retry_after:g}"
    return Answer(status, {"code": error.code, "message": error.text}, headers)


def main(words: Sequence[str] | None = None) -> None:
    """Serve a fake cloud until Ctrl-C or SIGTERM, and then end all machines of the cloud.

    First prints a shell command that sets the environment variables which a client needs. The cloud's state is in the
    folder that `--folder` names, or else in a temporary folder, which is removed at the end.

    Args:
        words: the command-line arguments; None means the arguments of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m skypool.testing.http_cloud", description="Serve a fake cloud until Ctrl-C."
    )
    parser.add_argument("--folder", help="folder of the cloud (default: a temporary folder)")
    parser.add_argument("--key", default="sesame", help="API key of the cloud (default: sesame)")
    parser.add_argument("--port", type=int, default=0, help="TCP port to listen on (default: a free port)")
    asked = parser.parse_args(words)

    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: over.set())
    with tempfile.TemporaryDirectory(prefix="acme-") as folder:
        with HttpCloud(asked.folder or folder, key=asked.key, port=asked.port) as cloud:
            print(f"export ACME_URL={cloud.url} ACME_API_KEY={asked.key}", flush=True)
            while not over.wait(0.2):  # waits are short because a signal to another thread does not end a wait
                continue


if __name__ == "__main__":
    main()
