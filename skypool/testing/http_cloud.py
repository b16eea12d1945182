"""`HttpCloud`: a fake cloud with an HTTP API, for tests of a driver that sends HTTP requests to its cloud.

The API is that of Acme Cloud, an invented provider. `docs/driver-tutorial.md` writes a driver for it, and `skypool
new-driver NAME` begins with that driver. Behind the API is the same cloud as behind `FakeCloud`. Its machines are
processes on this computer, and tests prepare failures with its `control`.

    with HttpCloud(tmp_path / "cloud", key="sesame") as cloud:
        driver = Acme(url=cloud.url, api_key="sesame")

All requests but the last carry `Authorization: Bearer KEY`. Bodies and answers are JSON. A refusal has a status of 400
or more and a body such as `{"code": "OutOfStock", "message": "there are none left"}`.

    GET    /v1/account                 the limits of the account, by name
    GET    /v1/types                   what is sold: a list of {type, region, zone, market, usd_per_hour, …}
    POST   /v1/machines                make one: {type, zone, market, client_token, tags, lease, lifetime}
    GET    /v1/machines                the machines that are alive
    GET    /v1/machines/ID             one of them
    PUT    /v1/machines/ID/tags        replace its tags
    DELETE /v1/machines/ID             begin to end it
    GET    /v1/metadata/ID/notice      when it is taken back, in seconds since 1970; 404 until that is known

A create with a `client_token` that was used before makes nothing, and answers with the machine of that token. A machine
ends itself when its `lease` is over. The lease lasts that many seconds from the boot, or from the last time that
"SERIAL SECONDS" was written into the machine's `lease_file`. The machine never lives longer than `lifetime` seconds. To
run a command on it, put the words of its `console` in front of the command.

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
"""The HTTP status of each class of error; any other error has status 500."""

_STATES = {"starting": "booting", "running": "active", "ending": "deleting", "ended": "deleted"}
"""The API's name of each state of a machine."""

_METADATA = "ACME_METADATA"
"""The environment variable with the address of the metadata server. A real machine finds it at a fixed address."""


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request to the API of a fake cloud.

    Attributes:
        method: the HTTP method, such as "GET".
        path: the path without the query.
        query: the parameters of the query. If one is repeated, its last value.
        key: the Authorization header without a leading "Bearer "; "" if there is no such header.
        body: the JSON object in the body; {} if there is no body.
        parts: the values of the {names} in the route's path, such as "id".
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
        status: the HTTP status.
        body: the value to send as JSON; None sends no body.
        headers: headers to send beside the content's type and length.
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
        answer: the HTTP answer to send: the status, and a JSON object with `code` and `message`.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        self.answer = Answer(status, {"code": code, "message": message})
        super().__init__(f"{status} {code}: {message}")


Route = Callable[[Request], Answer]


class HttpCloud:
    """A fake cloud behind an HTTP API on this computer. Use it in a `with` block, or call `close`.

    The server runs in a thread of its own, from the construction on.

    Args:
        state: a folder for the cloud alone. It may exist from an earlier run; the cloud then goes on with its machines,
            stock and key.
        stock: the kinds of machines that it sells; None means `world.USUAL`. Slices of several hosts are not supported.
        key: the API key that clients must send; "" accepts any.
        machines: True to run machines as processes here, which needs Linux. With False they exist by name only, and no
            command runs there.
        port: the TCP port on which it listens; 0 chooses a free port.

    Attributes:
        url: the base address of the API, such as "http://127.0.0.1:41234/v1".

    Raises:
        UsageError: real machines cannot run on this computer, or the stock contains a slice.
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
            raise UsageError(
                f"HttpCloud sells no slices of several hosts, such as {several[0]}; use FakeCloud for these"
            )
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
        """Return the control, with which a test prepares failures and reads the calls that the cloud received."""
        return HttpCloudControl(self._state())

    @property
    def clock(self) -> Clock:
        """Return the cloud's clock, which tests can move forward."""
        return Clock(self._state())

    def close(self) -> None:
        """Stop the server, and end all machines. Blocks until both are done. The folder is kept.

        Raises:
            ExceptionGroup: the cloud's own code failed while it answered requests. It has those errors. The server and
                the machines have ended all the same.
        """
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with contextlib.suppress(FileNotFoundError), State(self.folder).open() as world:
            for each in world.alive():
                world.end(each)
        if self._errors:
            raise ExceptionGroup(
                f"the fake {self.name} at {self.url} failed while it answered requests; the exceptions in this "
                "group say why",
                self._errors,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- the API ---------------------------------------------------------------------------------------------

    def routes(self) -> Mapping[str, Route]:
        """Return the methods that answer requests, by route, such as "GET /v1/machines/{id}".

        A subclass overrides this to imitate the API of another provider. A name in braces matches one part of a path.
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
        """Return the answer with the limits of the account, by name. The answer has status 200.

        Raises:
            ProviderError: the key is wrong, or a test prepared a failure.
        """
        return Answer(200, {"limits": self._api(request).account()})

    def get_types(self, request: Request) -> Answer:
        """Return the answer with everything that is sold: one entry for each type, zone and market, in stock or not.

        The answer has status 200.

        Raises:
            ProviderError: the key is wrong, or a test prepared a failure.
        """
        return Answer(200, [_type(each, in_stock) for each, in_stock in self._api(request).stock()])

    def post_machine(self, request: Request) -> Answer:
        """Make a machine, and return the answer with it.

        The answer has status 201, and the machine may still be booting.

        If the `client_token` in the body was used before, nothing is made, and the existing machine is returned.

        Raises:
            Refused: the cloud sells no such type in that zone and market, or a field of the body is missing or has the
                wrong type.
            ProviderError: the cloud refuses, for example because it is out of stock or the key is wrong.
        """
        api = self._api(request)
        body = request.body
        name = _given(body, "type", str)
        zone = _given(body, "zone", str)
        market = _given(body, "market", str)
        with self._state().open(settle=False) as world:
            stock = next((each for each in world.stock if each.place == (name, zone, market)), None)
        if stock is None:
            raise Refused(
                400,
                "NoSuchType",
                f"no {name!r} is sold in {zone!r} on the market {market!r}; see GET /v1/types",
            )
        token = _given(body, "client_token", str)
        said = {str(name): str(value) for name, value in _given(body, "tags", dict).items()}
        lifetime = body.get("lifetime")
        order = Order(
            pool=said.get(tags.POOL, ""),  # only used in the fake cloud's own log
            token=token,
            nodes=(0,),
            need=Need(),
            lease=float(_given(body, "lease", (int, float))),
            lifetime=None if lifetime is None else float(lifetime),
        )
        [made] = api.create(stock, order, (0,), token, said)
        return Answer(201, self._machine(made))

    def get_machines(self, request: Request) -> Answer:
        """Return the answer with a list of all machines that are alive, empty if there are none.

        The answer has status 200.

        Raises:
            ProviderError: the key is wrong, or a test prepared a failure.
        """
        return Answer(200, [self._machine(each) for each in self._api(request).machines()])

    def get_machine(self, request: Request) -> Answer:
        """Return the answer with one machine that is alive. The answer has status 200.

        Raises:
            Refused: the machine does not exist or has ended (status 404).
            ProviderError: the key is wrong, or a test prepared a failure.
        """
        return Answer(200, self._machine(self._alive(request)))

    def put_tags(self, request: Request) -> Answer:
        """Replace all tags of a machine by the body of the request. Return an answer with status 204 and no body.

        Raises:
            Refused: the machine does not exist or has ended (status 404).
            ProviderError: the key is wrong, or a test prepared a failure.
        """
        self._alive(request)
        self._api(request).retag(request.parts["id"], {str(key): str(value) for key, value in request.body.items()})
        return Answer(204)

    def delete_machine(self, request: Request) -> Answer:
        """Ask the cloud to end a machine. Return an answer with status 202 and no body.

        Raises:
            Refused: the machine does not exist or has ended already (status 404).
            ProviderError: the key is wrong, or a test prepared a failure.
        """
        self._alive(request)
        self._api(request).terminate([request.parts["id"]])
        return Answer(202)

    def get_notice(self, request: Request) -> Answer:
        """Return the answer with the time at which the cloud takes a machine back, in seconds since 1970.

        The answer has status 200. The machine itself sends this request, so no key is needed.

        Raises:
            Refused: it is not announced that this machine is taken back, or the machine does not exist or has ended
                (status 404).
        """
        with self._state().open() as world:
            found = world.machines.get(request.parts["id"])
            if found is None or not found.lives or found.taken_at == float("inf"):
                raise Refused(404, "NotFound", f"there is no notice for the machine {request.parts['id']}")
            return Answer(200, found.taken_at - world.offset)

    # --- its parts -------------------------------------------------------------------------------------------

    def answer(self, request: Request) -> Answer:
        """Return the answer to one request. All errors except a dropped connection become an answer, too.

        A request that the cloud refuses gets a status of 400 or more. An unexpected error of the fake cloud itself gets
        status 500, and `close` raises that error later.

        Raises:
            ConnectionResetError: the connection is to be dropped without an answer, because a test prepared that.
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
        except Exception as e:  # noqa: BLE001 - `close` raises it later
            self._errors.append(e)
            return Answer(500, {"code": "InternalError", "message": f"the fake cloud itself failed: {e!r}"})

    def _alive(self, request: Request) -> Machine:
        """Return the live machine whose id is in the path of a request.

        Raises:
            Refused: it has ended, or never existed (status 404).
            ProviderError: the key is wrong, or a test prepared a failure.
        """
        for each in self._api(request).machines():
            if each.id == request.parts["id"]:
                return each
        raise Refused(404, "NotFound", f"there is no live machine {request.parts['id']}")

    def _machine(self, one: Machine) -> dict[str, object]:
        """Return a machine as the JSON object with which the API describes it."""
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
        """Return the stored state of this cloud. The state is created when it is first opened."""
        return State(self.folder, self._world)

    def _world(self) -> World:
        """Return a new initial state of this cloud, with its stock and key and no machines. Nothing is stored."""
        return World(str(self.folder), self._stock, self._key, self._machines)

    def _api(self, request: Request) -> _Api:
        """Return an object with the cloud's calls, which uses the API key that the request carries.

        The key is not checked yet: each call does that.
        """
        return _Api(self._state(), self.name, request.key)


@dataclass(frozen=True, slots=True)
class HttpCloudControl(FakeCloudControl):
    """The control of an `HttpCloud`: it prepares failures, and reads the calls that the cloud received.

    It has all methods of `FakeCloudControl`, except that `kill_client` does not work.
    """

    def kill_client(self, number: int, when: When) -> None:
        """Always raise UsageError: the server does not know which process sent a request.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "HttpCloud does not know the process of its client; kill the client from the test, or use FakeCloud"
        )


class _Api(Api):
    """A connection to a fake cloud whose clients write the tags of their machines themselves, as over HTTP."""

    def machines(self) -> list[Machine]:
        """Return all machines that are alive, of every client and whatever their tags say."""
        return self._call("describe", lambda world: world.alive())

    def retag(self, id: str, said: dict[str, str]) -> None:
        """Replace all tags of a machine, which must exist.

        Args:
            id: the machine's id.
            said: the new tags. Tags that are not in it are removed.

        Raises:
            KeyError: the cloud never made this machine.
        """

        def tagged(world: World) -> None:
            world.machines[id].tags = said

        self._call("tag", tagged, id=id)


class _Server(ThreadingHTTPServer):
    """An HTTP server for one cloud, on which the requests of each connection are answered in a thread of their own.

    Args:
        address: the host and TCP port to listen on; port 0 chooses a free one.
        cloud: the cloud that answers.
    """

    request_queue_size = 64

    def __init__(self, address: tuple[str, int], cloud: HttpCloud) -> None:
        self.cloud = cloud
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    """A handler of one HTTP connection: it reads requests, and writes the cloud's answers."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # buffered, so that an answer is one write: a second write may be delayed by 40 ms
    disable_nagle_algorithm = True

    def _answered(self) -> None:
        """Read one request and send the answer to it.

        If the cloud drops the connection instead of an answer, close the connection and send nothing.
        """
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
        """Read one request from the connection and return it. An empty body counts as {}.

        Raises:
            Refused: the body is not a JSON object (status 400).
        """
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(raw) if raw else {}
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise Refused(400, "BadRequest", "the body of the request is not a JSON object")
        url = urlsplit(self.path)
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return Request(self.command, url.path, dict(parse_qsl(url.query)), key, body)

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing. The base class would print each request on stderr; here `control.calls()` returns the calls."""


def _given(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """Return a field of a request's body.

    Args:
        body: the JSON object of the request.
        name: the name of the field.
        kind: the type, or types, that the value must have.

    Raises:
        Refused: the field is missing, or has another type (status 400).
    """
    if not isinstance(body.get(name), kind):
        raise Refused(400, "BadRequest", f"the field {name} is missing or has the wrong type: {body.get(name)!r}")
    return body[name]


def _type(stock: Stock, in_stock: bool) -> dict[str, object]:
    """Return a kind of machine as the JSON object with which the API describes it. Its "gpu" is None if it has none.

    Args:
        stock: the kind of machine.
        in_stock: True if one can be made now.
    """
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
    """Return the HTTP answer for an error of skypool: a status, and a JSON object with the error's code and message.

    The status follows from the class of the error (see `_STATUS`); it is 500 for other classes. A RateLimitError with a
    time to wait also gets a "Retry-After" header, in seconds.
    """
    status = next((_STATUS[each] for each in type(error).__mro__ if each in _STATUS), 500)
    headers = {}
    if isinstance(error, RateLimitError) and error.retry_after is not None:
        headers["Retry-After"] = f"{error.retry_after:g}"
    return Answer(status, {"code": error.code, "message": error.text}, headers)


def main(words: Sequence[str] | None = None) -> None:
    """Serve a fake cloud until Ctrl-C or SIGTERM. First print the environment variables that a client needs.

    Blocks until then. All machines of the cloud are ended at the end. A temporary folder is removed, but the one of
    `--folder` is kept.

    Args:
        words: command-line arguments; None takes those of the process.
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
            while not over.wait(0.2):  # short waits: a signal that another thread receives does not end a long one
                continue


if __name__ == "__main__":
    main()
