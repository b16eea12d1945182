"""Sends requests to RunPod's two APIs, and translates their errors to skypool's.

The API REST v2 is used for everything that it can do. The GraphQL API reports most errors with HTTP status 200. The
table errors.csv translates such an error by its code or its text.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import tomllib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from skypool.drivers import recording, rest, tags
from skypool.drivers.pages import WholeList
from skypool.drivers.refusals import Refusals
from skypool.drivers.retry import patiently, quietly
from skypool.errors import ProviderError
from skypool_runpod._requests import Pod, Start, StartField

REFUSALS = Refusals("skypool_runpod", "runpod", "RunPod")

PRIVATE = recording.Private(patterns={r"\brpa_(\w{8,})": ("secret",)})
"""What a recording must not contain of RunPod's requests and replies: API keys, also those of pods."""

Record = Mapping[str, Any]
"""An object in an answer of RunPod."""

_UNREAD: tuple[float, WholeList[Record]] = (-float("inf"), WholeList())
"""The value of `Api._pods` if the list of pods must be read: (time of reading by `time.monotonic()`, records)."""

_INVALID = "422"
"""The error code for a request whose body is not valid. RunPod's text names the fields."""

_GONE = "404"
"""The error code for a pod that does not exist."""

_SENT = ("value", "input")
"""Fields in RunPod's list of what is wrong with a request that repeat what was sent."""

_RENAMES = {"PATCH *": 1.0}
"""A dict from a pattern of HTTP method and path to the minimum pause in seconds between two such requests.

The only entry is for requests that rename pods. The pause leaves room for other requests: RunPod allows 60 a minute.
"""


def base() -> str:
    """Return the address of RunPod's API: $RUNPOD_API_BASE_URL, which RunPod's own tools use, or the public one.

    The address does not end with "/" or "/v2".
    """
    given = os.environ.get("RUNPOD_API_BASE_URL") or "https://api.runpod.io"
    return given.rstrip("/").removesuffix("/v2").rstrip("/")


def key(given: str | None) -> str:
    """Return the given API key, else $RUNPOD_API_KEY, else the key in ~/.runpod/config.toml.

    RunPod's own tools store a key in that file. Blanks around the key are removed.

    Raises:
        CredentialsError: no key was found, or only blanks, or the file is not valid TOML. Whether RunPod accepts the
            key is not checked.
    """
    file = Path.home() / ".runpod" / "config.toml"
    found = given or os.environ.get("RUNPOD_API_KEY")
    if not found and file.exists():
        try:
            known = tomllib.loads(file.read_text())
        except tomllib.TOMLDecodeError as e:
            raise REFUSALS.error("a login", "401", f"{file} is not valid TOML: {e}") from e
        found = known.get("default", {}).get("api_key") or known.get("apikey")
    found = str(found or "").strip()
    if not found:
        raise REFUSALS.error("a login", "401", f"neither $RUNPOD_API_KEY nor {file} has an API key")
    return found


class Api:
    """A client of RunPod's APIs. Any thread may use it. Creating a client sends nothing.

    All methods except `create` and `graphql_once` repeat their request for up to 20 s if RunPod does not answer or gets
    too many requests. Every method raises ProviderError if RunPod refuses, and NoAnswer, a subclass, if there is no
    usable answer. The argument `what` says what a request is for, such as "to rent a pod", for error messages.
    """

    def __init__(self, key: str, base: str) -> None:
        headers = {"Authorization": f"Bearer {key}", "User-Agent": "skypool"}
        self._rest = rest.Rest(base, REFUSALS, lambda: headers, said=_said, apart=_RENAMES, private=PRIVATE)
        self._lock = threading.Lock()  # held while the list of pods is read; guards _pods and _created
        self._pods = _UNREAD  # when pods were listed, and their records
        self._start_field: StartField = "args"
        self._created: dict[str, float] = {}  # when each pod was created by this client, by id

    # --- API REST v2 -----------------------------------------------------------------------------------------

    def pods(self, age: float = 0.0) -> WholeList[Record]:
        """Return the records of all pods of the account, except members of clusters.

        Args:
            age: maximum age of the list in seconds. If this client read a list so recently, it returns that list. With
                0, a new list is requested. RunPod allows about 60 requests a minute, so callers that ask often should
                accept an earlier list.
        """
        with self._lock:
            listed, found = self._pods
            if time.monotonic() - listed >= age:
                now = time.monotonic()
                found = self._list("/v2/pods", "pods", "to list pods")
                self._pods = now, found
            return found

    def pod(self, id: str) -> Record | None:
        """Return the record of one pod, or None if it does not exist."""
        ask = partial(self._rest.ask, "GET", f"/v2/pods/{id}", what=f"to describe the pod {id}")
        found: Record | None = quietly(ask, _GONE)
        return found

    def create(self, body: Pod, start: Start, what: str) -> Record:
        """Create a pod, and return its record.

        A request that may have created a pod is not repeated, because RunPod cannot recognize a repetition. But for the
        start command there are two fields, "args" and "cmd", of which RunPod may know only one. If RunPod refuses the
        one that was sent, the request is sent once more with the other. This client then uses that one for later pods,
        too.

        The errors for the HTTP statuses 400 and 403 have the codes "create-400" and "create-403", because here these
        statuses have another meaning than usual: RunPod has no such pod now, or the account may not rent it.

        Args:
            body: the body of the request, without the start command.
            start: has the start command.
        """
        field = self._start_field
        try:
            made = self._create({**body, **start.command(field)}, what)
        except ProviderError as e:
            if e.code not in (_INVALID, "create-400") or not re.search(rf"\b{field}\b", e.text):
                raise
            self._start_field = "args" if field == "cmd" else "cmd"
            made = self._create({**body, **start.command(self._start_field)}, what)
        if not isinstance(made, Mapping) or "id" not in made:
            raise self._rest.error(what, "502", f"the answer has no pod: {str(made)[:300]}")
        self.created(made["id"])
        return made

    def _create(self, body: Mapping[str, object], what: str) -> Any:
        """Send one request to create a pod. The errors for HTTP status 400 and 403 have the code "create-STATUS"."""
        try:
            return self._rest.once("POST", "/v2/pods", what=what, json=body)
        except ProviderError as e:
            if e.code in ("400", "403"):
                raise REFUSALS.error(what, f"create-{e.code}", e.text) from e
            raise

    def created(self, id: str) -> None:
        """Note that a pod was created now. The method `age` uses the time. The next call of `pods` reads a new list."""
        with self._lock:
            self._created[id] = time.monotonic()
            self._pods = _UNREAD

    def age(self, id: str) -> float:
        """Return the seconds since this client created a pod, or infinity if this client did not create it."""
        with self._lock:
            return time.monotonic() - self._created.get(id, -float("inf"))

    def delete(self, id: str) -> bool:
        """Ask RunPod to end a pod, without waiting. Return False if RunPod knows no such pod, else True."""
        try:
            self._rest.ask("DELETE", f"/v2/pods/{id}", what=f"to end {id}")
            self._forget_list()
        except ProviderError as e:
            if e.code == _GONE:
                return False
            raise
        return True

    def rename(self, id: str, name: str) -> None:
        """Give a pod another name. Does not raise for a pod that no longer exists.

        Waits so that there is at least a second between two renames.
        """
        ask = partial(self._rest.ask, "PATCH", f"/v2/pods/{id}", what=f"to rename {id}", json={"name": name})
        quietly(ask, _GONE)
        self._forget_list()

    def _forget_list(self) -> None:
        """Forget the list of pods, so that the next call of `pods` reads a new one."""
        with self._lock:
            self._pods = _UNREAD

    def gpus(self, count: int, cuda: str | None) -> list[Record]:
        """Return the records of the GPU types, with their prices and their stock in the secure cloud.

        Args:
            count: number of GPUs of one pod. The stock is that of such pods.
            cuda: CUDA version that the machine's driver must support; None for any.
        """
        stock: dict[str, str | int] = {"include": "AVAILABILITY", "product": "POD", "count": count, "cloud": "SECURE"}
        if cuda:
            stock["minCudaVersion"] = cuda
        return self._list("/v2/catalog/gpus", "gpus", "to list GPU types", stock)

    def cpus(self, vcpus: int | None = None) -> list[Record]:
        """Return the records of the flavors, with their prices.

        Args:
            vcpus: number of vCPUs of a CPU pod. The records then have the stock of such pods, too. None for records
                without the stock.
        """
        stock: dict[str, str | int] | None = None
        if vcpus is not None:
            stock = {"include": "AVAILABILITY", "product": "POD", "vcpuCount": vcpus}
        return self._list("/v2/catalog/cpus", "cpus", "to list CPU types", stock)

    def data_centers(self) -> list[str]:
        """Return the ids of RunPod's data centres."""
        return [each["id"] for each in self._list("/v2/catalog/datacenters", "dataCenters", "to list data centres")]

    def volumes(self) -> dict[str, str]:
        """Return a dict from the id of each network volume of the account to its data centre."""
        found = self._list("/v2/network-volumes", "networkVolumes", "to list network volumes")
        return {each["id"]: each["dataCenter"] for each in found}

    def date(self) -> str:
        """Send a request, and return the header "Date" of the answer."""
        _, headers = self._rest.reply("GET", "/v2/catalog/datacenters", what="to list data centres")
        return str(headers["Date"])

    def billed(self, id: str, since: datetime) -> float | None:
        """Return what RunPod has billed for a pod until now, in USD; None if RunPod has no record of the pod's costs.

        Args:
            id: id of the pod.
            since: a time before the pod was created. RunPod has a record for each full hour. The hour of `since` counts
                in full.
        """
        hour = since.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
        span: dict[str, str | int] = {"podId": id, "startTime": tags.stamp(hour), "bucketSize": "hour"}
        found = self._list("/v2/billing/pods", "records", f"to show the costs of {id}", span)
        return sum(float(each["totalAmount"]) for each in found) if found else None

    def _list(self, path: str, field: str, what: str, params: rest.Params | None = None) -> WholeList[Record]:
        """Return the items of all pages of a list. Raise ProviderError ("incomplete") if a page is missing."""
        # Lists of pods have pages since autumn 2026, the newest pod first. `limit` is left out, because RunPod's older
        # servers refuse it.
        return self._rest.ask_all(path, field, what=what, params=params, next="pagination.nextCursor", token="cursor")

    # --- GraphQL ---------------------------------------------------------------------------------------------

    def graphql(self, query: str, what: str, /, **variables: Any) -> Record:
        """Send a GraphQL query that is safe to repeat, with these variables, and return the data of the answer."""
        return patiently(partial(self.graphql_once, query, what, **variables), rest.PATIENCE)

    def graphql_once(self, query: str, what: str, /, **variables: Any) -> Record:
        """Send a GraphQL query with these variables once, and return the data of the answer. Use it to create a pod.

        NoAnswer is also raised if the answer is unclear: it has neither data nor a refusal, or both a pod and an error.
        The query may have taken effect then.
        """
        answer = self._rest.once("POST", "/graphql", what=what, json={"query": query, "variables": variables})
        if not isinstance(answer, Mapping):
            answer = {"error": str(answer)}
        errors = answer.get("errors")
        data = answer.get("data")
        if not isinstance(data, Mapping):
            data = {}
        if data and not errors:
            return dict(data)
        code, text = _said(200, answer)
        refused = errors and not data.get("pod")
        raise self._rest.error(what, code if refused else "502", text)


api = lru_cache(maxsize=16)(Api)
"""Return the client for an API key and an address of the API. The same arguments give the same client."""


def _said(status: int, body: Any) -> tuple[str, str]:
    """Return the code and the text of a refusal, from its HTTP status and its body."""
    errors = body.get("errors") if isinstance(body, Mapping) else None
    first = errors[0] if isinstance(errors, list) and errors else None
    # the API REST v2 answers with problems as in RFC 9457, the GraphQL API with a list of errors
    is_problem = isinstance(body, Mapping) and bool({"title", "status", "detail"} & body.keys())
    if isinstance(first, Mapping) and first.get("message") and not is_problem:
        code = (first.get("extensions") or {}).get("code") or status
        return str(code), str(first["message"])
    if isinstance(body, Mapping) and isinstance(details := body.get("detail"), list):
        body = {**body, "detail": _listed(details)}
    code, text = rest.said(status, body)
    if first and is_problem:
        text = f"{text} ({_listed(errors or ())})"
    return code, text


def _listed(wrong: Iterable[Any]) -> str:
    """Return RunPod's list of what is wrong with a request as text. Leave out what was sent, which could mislead."""
    return "; ".join(
        json.dumps({name: told for name, told in each.items() if name not in _SENT})
        if isinstance(each, Mapping)
        else str(each)
        for each in wrong
    )
