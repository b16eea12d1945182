"""What the lab's Verda has beside what skypool rents: clusters, and what serverless containers use.

A cluster has no machines. Serverless containers are not there: their lists are empty.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tests.lab import verda_wares as wares
from tests.lab.cloud import Answer, Refused, Request, Route

if TYPE_CHECKING:
    from tests.lab.verda import Verda

PLACE = "FIN-03"
"""The only location with clusters."""


def _refused(status: int, code: str, message: str) -> Refused:
    return Refused(status, {"code": code, "message": message})


class Clusters:
    """Clusters of one account.

    Attributes:
        made: what `GET /clusters` lists, by id.
    """

    def __init__(self, world: Verda) -> None:
        self._world = world
        self.made: dict[str, dict[str, Any]] = {}

    def table(self) -> dict[str, Route]:
        return {
            "GET /cluster-types": lambda _: wares.cluster_types(),
            "GET /cluster-availability": self._availability,
            "GET /cluster-availability/{kind}": lambda request: any(
                request.by["kind"] in each["availabilities"] for each in self._availability(request)
            ),
            "GET /clusters": self._list,
            "POST /clusters": self._create,
            "PUT /clusters": self._act,
            "GET /clusters/{id}": lambda request: self._known(request.by["id"]),
        }

    def _availability(self, request: Request) -> list[dict[str, Any]]:
        kinds = [each["cluster_type"] for each in wares.cluster_types()]
        there = request.query.get("location_code") in (None, PLACE)
        return [{"location_code": PLACE, "availabilities": kinds}] if there else []

    def _list(self, request: Request) -> list[dict[str, Any]]:
        return [each for each in self.made.values() if request.query.get("status") in (None, "", each["status"])]

    def _known(self, id: str) -> dict[str, Any]:
        if id not in self.made:
            raise _refused(404, "not_found", "Invalid cluster id")
        return self.made[id]

    def _create(self, request: Request) -> Answer:
        told = request.body
        about = next((each for each in wares.cluster_types() if each["cluster_type"] == told["cluster_type"]), None)
        if about is None:
            raise _refused(400, "invalid_request", "Invalid cluster type")
        if wares.image_type(told["image"]) not in about["supported_os"]:
            raise _refused(400, "invalid_request", "Operating system is not valid for this cluster type")
        if any(each not in self._world.keys for each in told.get("ssh_key_ids") or ()):
            raise _refused(400, "invalid_request", "Invalid ssh key id")
        if told.get("location_code", PLACE) != PLACE:
            raise _refused(503, "service_unavailable", "Not enough resources to deploy the cluster")
        id, volume = str(uuid.uuid4()), told["shared_volume"]
        nodes = [
            {"id": str(uuid.uuid4()), "status": "running", "hostname": f"{told['hostname']}-{n}",
             "private_ip": f"10.0.0.{n}"}
            for n in range(1, 1 + about["gpu"]["number_of_gpus"] // 8)
        ]  # fmt: skip
        self.made[id] = {
            "id": id, "hostname": told["hostname"], "description": told["description"], "status": "provisioning",
            "created_at": datetime.fromtimestamp(self._world.clock.now(), UTC).isoformat(), "location": PLACE,
            "cluster_type": told["cluster_type"], "ssh_key_ids": told.get("ssh_key_ids") or [], "ip": None,
            "worker_nodes": nodes, "image": told["image"], "startup_script_id": told.get("startup_script_id"),
            "shared_volumes": [{"id": str(uuid.uuid4()), "name": volume["name"], "size_in_gigabytes": volume["size"],
                                "mount_point": "/mnt/shared"}],
        }  # fmt: skip
        return Answer({"id": id}, 202)

    def _act(self, request: Request) -> Answer:
        for each in [self._known(action["id"]) for action in request.body["actions"]]:
            del self.made[each["id"]]
        return Answer(None, 204)


class Serverless:
    """Secrets and credentials for serverless containers, by name."""

    def __init__(self) -> None:
        self.things: dict[str, dict[str, dict[str, Any]]] = {}

    def table(self) -> dict[str, Route]:
        nothing: Callable[[Request], Any] = lambda _: []  # noqa: E731
        return {
            "GET /container-types": lambda _: wares.container_types(),
            "GET /serverless-compute-resources": lambda _: [
                {"name": each["model"], "size": each["gpu"]["number_of_gpus"], "is_available": True}
                for each in wares.container_types()
            ],
            "GET /container-deployments": nothing,
            "GET /job-deployments": nothing,
            **self._named("secrets", {"secret_type": "generic"}),
            **self._named("file-secrets", {"secret_type": "file-secret"}),
            **self._named("container-registry-credentials", {}),
        }

    def _named(self, kind: str, more: dict[str, Any]) -> dict[str, Route]:
        things = self.things.setdefault(kind, {})

        def create(request: Request) -> Answer:
            name = request.body["name"]
            if name in things:
                raise _refused(400, "invalid_request", f"{name} exists already")
            things[name] = {"name": name, "created_at": datetime.now(UTC).isoformat(), **more}
            return Answer(None, 201)

        def delete(request: Request) -> Answer:
            if things.pop(request.by["name"], None) is None:
                raise _refused(404, "not_found", "Not found")
            return Answer(None, 200)

        return {
            f"GET /{kind}": lambda _: list(things.values()),
            f"POST /{kind}": create,
            f"DELETE /{kind}/{{name}}": delete,
        }
