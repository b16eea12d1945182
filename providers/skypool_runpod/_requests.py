"""Builds the request that creates a pod by RunPod's API REST v2, and the start command for both APIs.

This module sends no requests. API: https://docs.runpod.io/api-reference-v2/pods/create-a-pod (read 2026-11-23).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NotRequired, TypedDict

from skypool.drivers import userdata
from skypool.model import Offer

PORT = "22/tcp"
"""The port of a pod that RunPod maps to a public port."""


StartField = Literal["args", "cmd"]
"""The field of the request that has the start command."""


class Command(TypedDict, total=False):
    """The start command in a request for a pod. Only one of the two fields is set: a JSON text, or a list of words."""

    args: str
    cmd: list[str]


@dataclass(frozen=True, slots=True)
class Start:
    """The name, image and boot script of a container, from which the requests of both of RunPod's APIs are built.

    Attributes:
        name: name of the pod.
        image: image of the container.
        script: the boot script, packed as one line.
    """

    name: str
    image: str
    script: str

    mount: ClassVar[str] = "/workspace"
    """Where a network volume is mounted."""

    @property
    def env(self) -> dict[str, str]:
        """The environment variables of the container: the boot script, and the user who runs it, which is root.

        RunPod does not document RUNPOD_POD_USER. Other programs set it for images whose user is not root.
        """
        return {"SKYPOOL_START": self.script, "RUNPOD_POD_USER": "0"}

    @property
    def args(self) -> str:
        """The start command, as a JSON text that replaces the image's entry point and its arguments.

        RunPod would pass a plain text to the image's entry point:
        https://docs.runpod.io/pods/templates/manage-templates (read 2026-11-23).
        """
        return json.dumps({"entrypoint": ["sh", "-c"], "cmd": [userdata.UNPACK]})

    def command(self, field: StartField) -> Command:
        """Return the part of the request that has the start command, in one of the forms that RunPod may take.

        Args:
            field: name of the field to use. RunPod's document of 2026-08-20 has "args". Programs that others have
                written since (read 2026-11-26) send "cmd", a list of words. RunPod may give these words to the image's
                entry point.
        """
        if field == "cmd":
            return {"cmd": ["sh", "-c", userdata.UNPACK]}
        return {"args": self.args}


class Gpu(TypedDict):
    """The GPUs of a pod: the id of their type, and their number.

    The driver of the pod's machine must support the CUDA version `minCudaVersion`.
    """

    id: str
    count: int
    minCudaVersion: NotRequired[str]


class Cpu(TypedDict):
    """The CPUs of a pod without GPUs. `id` is the flavor, which also decides the memory."""

    id: str
    vcpuCount: int


class NetworkMount(TypedDict):
    """A network volume and the folder where it is mounted."""

    volumeId: str
    path: str


class Mounts(TypedDict):
    """The volumes that a pod mounts, all of them network volumes."""

    network: list[NetworkMount]


class Pod(TypedDict):
    """The body of `POST /v2/pods`, which creates a pod. Either `gpu` or `cpu` is set. `disk` is in GB.

    The field with the start command is missing here: `Start.command` returns it.
    """

    name: str
    image: str
    cloud: str
    disk: int
    ports: list[str]
    env: Mapping[str, str]
    startSsh: bool
    gpu: NotRequired[Gpu]
    cpu: NotRequired[Cpu]
    dataCenterIds: NotRequired[list[str]]
    mounts: NotRequired[Mounts]


def pod(offer: Offer, start: Start, *, cuda: str | None, volume: str | None) -> Pod:
    """Return the body of the request that creates one pod in a data centre, on demand, without the start command.

    Args:
        cuda: CUDA version that the machine's driver must support; None for any. Not used for a CPU pod.
        volume: id of a network volume to mount; None for none.
    """
    body: Pod = {
        "name": start.name,
        "image": start.image,
        "cloud": "SECURE",
        "disk": offer.detail["disk"],
        "ports": [PORT],
        "env": start.env,
        "startSsh": False,
    }
    if offer.detail["flavor"]:
        body["cpu"] = {"id": offer.detail["flavor"], "vcpuCount": offer.detail["vcpus"]}
    else:
        gpu: Gpu = {"id": offer.detail["gpu"], "count": offer.detail["count"]}
        if cuda:
            gpu["minCudaVersion"] = cuda
        body["gpu"] = gpu
    if offer.region:
        body["dataCenterIds"] = [offer.region]
    if volume:
        mounts: Mounts = {"network": [{"volumeId": volume, "path": start.mount}]}
        body["mounts"] = mounts
    return body
