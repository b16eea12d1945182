"""What the lab's small clouds share: an API at a real socket, capacity, a clock, faults, machines with mapped ports.

A cloud is a subclass of `Cloud` that says what it answers; its instances are subclasses of `Rental`. Each world has a
socket of its own, so several clouds, and several of a kind, live side by side.
"""

from __future__ import annotations

import heapq
import itertools
import json
import re
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar
from urllib.parse import parse_qsl
from wsgiref.types import StartResponse, WSGIEnvironment

from werkzeug.serving import WSGIRequestHandler, make_server

from skypool.drivers.recording import Exchange
from tests.lab.machines import Lab, Machine
from tests.lab.relay import Relay
from tests.lab.replay import Asked, NotRecorded, Replay
from tests.lab.world import TICK, Bucket, Fault, World


@dataclass
class Request:
    """One call of the API.

    Attributes:
        action: "METHOD /path" as the route is written, "{id}" and all; GraphQL worlds name their field here.
        body: JSON where it is, otherwise text.
        at: on the world's clock; by: its path's parts, by their names.
        status: of its reply, 0 where none came.
    """

    number: int
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any
    at: float
    action: str = ""
    by: dict[str, str] = field(default_factory=dict[str, str])
    status: int = 0


class Refused(Exception):
    """An answer that is a refusal."""

    def __init__(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        self.status, self.body, self.headers = status, body, dict(headers or {})
        super().__init__(f"{status} {body}")


@dataclass
class Answer:
    """An answer with a status, or a body that is not JSON: a `str` as `text/plain`."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict[str, str])
    plain: bool = False


@dataclass(kw_only=True)
class Mortal:
    """What can be ended, but for `undying` times that change nothing; None is always."""

    undying: int | None = 0

    def survives(self) -> bool:
        """Whether it survives this end; counts it."""
        survived = self.undying is None or self.undying > 0
        self.undying = self.undying and self.undying - 1
        return survived


@dataclass
class Rental(Mortal):
    """One instance of a cloud.

    Attributes:
        market: "on-demand" or "spot".
        state: as its cloud calls it; living: whether it is billed, or would hold something.
        machine: what runs it, if anything does; ports: its ports as they are reached from outside.
    """

    id: str
    kind: str
    place: str
    market: str
    created: float
    state: str = ""
    living: bool = True
    machine: Machine | None = None
    ports: dict[int, Relay] = field(default_factory=dict[int, Relay])


R = TypeVar("R", bound=Rental)
Route = Callable[[Request], Any]


class Cloud(World[Request], Generic[R]):
    """One account. See `World`.

    A subclass fills `routes` ("METHOD /path/{id}" -> method; what it returns is JSON, or an `Answer`, or raises
    `Refused`), sets `environment`, and calls `boot` and `ended` as its instances come and go. Everything it answers,
    and everything that `later` does, runs with `lock` held.

    Args:
        lab: where instances boot; None for a world without machines, for calls alone.
        recording: a folder with a recording, which answers reads (tests/lab/replay.py); None for the lab's own answers.

    Attributes:
        url: of its API. Machines reach it, too.
        limits: (calls, calls a second) by patterns of actions; {} for no limits. The first that fits.
        dark: while it is true, nothing answers: connections are closed.
    """

    name: ClassVar[str] = "cloud"
    things: ClassVar[tuple[str, ...]] = ()
    """Patterns of operations that read what was made, such as "GET /v1/instances*"; see `Replay`."""

    def __init__(self, lab: Lab | None = None, recording: Path | str | None = None) -> None:
        super().__init__()
        self.lab = lab
        self.replay = None if recording is None else Replay(recording, self.things)
        self.limits: dict[str, tuple[float, float]] = {}
        self.dark = False
        self.rentals: dict[str, R] = {}
        self.routes: dict[str, Route] = {}
        self._rules: list[tuple[str, str, str, int | None]] = []
        self._buckets: dict[str, Bucket] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._work = ThreadPoolExecutor(4, f"{self.name}-life")
        host = lab.gateway if lab is not None else "127.0.0.1"
        self._server = make_server(host, 0, self._serve, threaded=True, request_handler=_Handler)
        self.url = f"http://{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(TICK,), name=self.name, daemon=True).start()
        self._ticker.start()

    @property
    def environment(self) -> dict[str, str]:
        """For the environment of a client."""
        raise NotImplementedError

    # --- what there is ---------------------------------------------------------------------------------------

    def capacity(self, number: int | None, kind: str = "*", place: str = "*", market: str = "*") -> None:
        """So many instances of a kind in each place and market; None for no limit. The last word counts."""
        with self.lock:
            self._rules.append((kind, place, market, number))

    def room(self, kind: str, place: str, market: str) -> float:
        """How many more there can be."""
        for a, b, c, number in reversed(self._rules):
            if fnmatchcase(kind, a) and fnmatchcase(place, b) and fnmatchcase(market, c):
                if number is None:
                    break
                taken = sum(
                    each.living and (each.kind, each.place, each.market) == (kind, place, market)
                    for each in self.rentals.values()
                )
                return number - taken
        return float("inf")

    def count(self) -> dict[str, int]:
        """What is there that would be billed or left behind; a subclass adds what else there can be."""
        with self.lock:
            self.tick()
            return {"instances": sum(each.living for each in self.rentals.values())}

    # --- what goes wrong -------------------------------------------------------------------------------------

    def fail(
        self, action: str, status: int, body: Any, *, times: int | None = 1,
        when: Callable[[Request], bool] = lambda request: True, headers: Mapping[str, str] | None = None,
    ) -> Fault:  # fmt: skip
        """Refuse the next `times` calls of an action, a pattern; None: all of them."""
        return self.happen(Fault(action, times, when, error=Refused(status, body, headers)))

    def undying(self, id: str, times: int | None) -> None:
        """It survives being ended so often; None: always. Quiet if it is gone."""
        with self.lock:
            if id in self.rentals:
                self.rentals[id].undying = times

    # --- for subclasses --------------------------------------------------------------------------------------

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Once the clock is so much further; `tick` drives it."""
        heapq.heappush(self._due, (self.clock.now() + seconds, next(self._order), do))

    def check(self, request: Request) -> None:
        """Look at credentials before anything else; raises Refused. Every key is good unless a subclass says else."""

    def named(self, request: Request) -> str:
        """What `action` is beyond the route: a GraphQL world says its field."""
        return request.action

    def throttled(self, request: Request) -> Refused:
        """What it says where `limits` are exceeded."""
        return Refused(429, {"error": "too many requests"})

    def off(self, rental: R) -> None:
        """The machine of a living instance has switched itself off, or its start command has ended."""
        raise NotImplementedError

    def boot(self, rental: R, *, ports: Iterable[int] = (), **told: Any) -> None:
        """Give it a machine, told as `Lab.machine` has it, and a mapped port for each of `ports`."""
        if self.lab is None:
            return

        def prepare(machine: Machine) -> None:
            rental.machine = machine

        machine = self.lab.machine(**{"minute": self.minute, "prepare": prepare, "wait": False, **told})
        rental.ports = {port: Relay(self.lab.gateway, (machine.address, port)) for port in ports}

    def end(self, rental: R, then: Callable[[], None]) -> None:
        """End its machine beside everything else, and call `then` with the lock held once that is done."""
        machine, relays = rental.machine, list(rental.ports.values())

        def work() -> None:
            for relay in relays:
                relay.close()
            if machine is not None:
                machine.destroy()
            with self.lock:
                then()

        rental.ports = {}
        self._work.submit(self.watched, work)

    # --- serving ---------------------------------------------------------------------------------------------

    def _serve(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            answer = self._answered(environ)
        except ConnectionResetError:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise
        kind = "text/plain" if answer.plain else "application/json"
        text = str(answer.body) if answer.plain else json.dumps(answer.body)
        body = b"" if answer.status == 204 else text.encode()
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), **answer.headers}
        start_response(f"{answer.status} .", list(headers.items()))
        return [body]

    def _answered(self, environ: WSGIEnvironment) -> Answer:
        """Answer one request.

        Raises:
            ConnectionResetError: it gets no answer.
        """
        with self.lock:
            request = self._read(environ)
            if self.dark or self._closed.is_set():
                raise ConnectionResetError("dark")
            self.journal.append(request)
        return self.live(request, lambda error: self._result(request, error))

    def _result(self, request: Request, error: Exception | None) -> Answer:
        try:
            if error is not None:
                raise error
            self.tick()
            if (recorded := self._recorded(request)) is not None:
                return recorded
            self.check(request)
            self._throttle(request)
            got = self._route(request)(request)
            if self.replay is not None:
                self.replay.did(_asked(request), got.status if isinstance(got, Answer) else 200)
        except Refused as refused:
            return Answer(refused.body, refused.status, refused.headers, plain=isinstance(refused.body, str))
        except Exception as e:  # noqa: BLE001 - `close` raises it
            self.errors.append(e)
            return Answer({"error": f"the lab itself failed: {e!r}"}, 500)
        return got if isinstance(got, Answer) else Answer(got)

    def _recorded(self, request: Request) -> Answer | None:
        """The answer of the recording, if it is the one to answer. Credentials are not looked at then.

        Raises:
            Refused: it should have one, and has none.
        """
        if self.replay is None:
            return None
        try:
            found = self.replay.answer(_asked(request))
        except NotRecorded as e:
            raise self.unrecorded(str(e)) from e
        return None if found is None else self.told(found)

    def told(self, found: Exchange) -> Answer:
        """A recorded answer as it goes back."""
        kept = ("content-type", "deprecation", "sunset")
        headers = {name.title(): text for name, text in found.reply_headers.items() if name in kept}
        return Answer(found.reply, found.status, headers, plain=True)

    def unrecorded(self, text: str) -> Refused:
        """The refusal of a read that the recording lacks, as its clients read refusals."""
        code = "not_recorded"
        return Refused(400, {"success": False, "code": code, "error": code, "msg": text, "detail": text})

    def _read(self, environ: WSGIEnvironment) -> Request:
        raw = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)).decode()
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = raw
        headers = {k[5:].replace("_", "-").lower(): str(v) for k, v in environ.items() if k.startswith("HTTP_")}
        query = dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True))
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        made = Request(len(self.journal) + 1, method, path, query, headers, body, self.clock.now())
        for route in self.routes:
            pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", route)
            if found := re.fullmatch(pattern, f"{method} {path}"):
                made.action, made.by = route, found.groupdict()
                break
        made.action = self.named(made) or f"{method} {path}"
        return made

    def _route(self, request: Request) -> Route:
        for route, do in self.routes.items():
            pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", route)
            if re.fullmatch(pattern, f"{request.method} {request.path}"):
                return do
        raise Refused(404, {"error": f"the lab's {self.name} does not know {request.method} {request.path}"})

    def _throttle(self, request: Request) -> None:
        for pattern, (size, refill) in self.limits.items():
            if fnmatchcase(request.action, pattern):
                if not self._buckets.setdefault(pattern, Bucket(size, refill)).take(self.clock.now(), 1):
                    raise self.throttled(request)
                return

    # --- time ------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        while self._due and self._due[0][0] <= self.clock.now():
            heapq.heappop(self._due)[2]()
        for rental in list(self.rentals.values()):
            if rental.living and rental.machine is not None and not rental.machine.is_running:
                self.off(rental)

    def close(self) -> None:
        self._closed.set()
        self._ticker.join()
        self._server.shutdown()
        self._server.server_close()
        for rental in list(self.rentals.values()):
            for relay in rental.ports.values():
                relay.close()
            if rental.machine is not None:
                self._work.submit(self.watched, rental.machine.destroy)
        self._work.shutdown()
        self.raise_errors()


def _asked(request: Request) -> Asked:
    return Asked(f"{request.method} {request.path}", request.query.items(), request.body)


class _Handler(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Nothing: the journal has it."""
