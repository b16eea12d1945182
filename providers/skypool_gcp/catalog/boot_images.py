"""Chooses the image that a machine of Google Cloud boots from, and the size of its disk. It sends no requests."""

from __future__ import annotations

import math
from typing import NamedTuple

from skypool.accelerators import Accelerator
from skypool.drivers.settings import words
from skypool.errors import UsageError
from skypool.model import Arch, Need
from skypool_gcp import _settings
from skypool_gcp.catalog.facts import FACTS

IMAGES: dict[str, str] = {
    "cuda": "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580",
    "tpu": "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accel-2404-amd64-tpu-tpu7x",
    "ubuntu-24.04": "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64",
    "ubuntu-22.04": "projects/ubuntu-os-cloud/global/images/family/ubuntu-2204-lts",
}
"""A dict to paths of image families. An image family is a name for the newest of several images.

The keys "cuda" and "tpu" are runtimes (software families of accelerators), which the images support. The other keys are
short names that a user may write instead of a path.
"""

_OLDER = {
    IMAGES["cuda"]: "projects/deeplearning-platform-release/global/images/family/common-cu128-ubuntu-2204-nvidia-570",
}
"""A dict from path of an image family to that of an older one, which is used if Google has removed the newer."""

_NEEDS_580 = {"B200", "B300", "GB200", "GB300", "RTX_PRO_6000"}
"""GPUs that need NVIDIA's driver 580. The older image family in `_OLDER`, with driver 570, does not serve them.

https://cloud.google.com/compute/docs/gpus/install-drivers-gpu (read 2026-11-22 in a stored copy)"""

_DISK_GB = 30
"""The smallest size, in GB, of the disk of a machine without accelerators."""

_DRIVEN_DISK_GB = 120
"""The smallest size, in GB, of the disk of a machine with accelerators. Images with drivers need tens of GB."""


class ImagePath(NamedTuple):
    """The parts of the path of a disk image, such as "projects/P/global/images/family/F".

    Attributes:
        project: The project that contains the image; "P" in this example.
        name: The name of the image, or of the image family; "F" in this example.
        is_family: True if the path names a family, of which the newest image is used.
    """

    project: str
    name: str
    is_family: bool


def image_for(asked: str, has: Accelerator | None, arch: Arch, need: Need) -> tuple[str, int]:
    """Return the pair (path of the image for a machine or of an image family, size of the machine's disk in GB).

    If the user chose no image, the result is Google's image with drivers for the accelerator. It is Ubuntu 24.04 if
    there is no image with drivers. The disk has at least 120 GB with an accelerator, and at least 30 GB without one.

    Args:
        asked: The image that the user chose: a path, or a short name such as "ubuntu-24.04". "" means none.
        has: The machine's accelerator; None for a machine without one.
        arch: The machine's processor architecture.
        need: The requirements of a node, of which the disk size is used.

    Raises:
        UsageError: `asked` is not written like a path or a short name of an image. Whether the image exists is not
            checked.
    """
    shape = _settings.SHAPES["image"]
    words("base image of GCP", asked or None, shape.pattern, shape.like)
    fit = "ubuntu-24.04"
    if has is not None and arch == "x86_64" and has.runtime in IMAGES and has.name not in FACTS["undriven"]:
        fit = has.runtime
    path = IMAGES.get(asked or fit, asked)
    if arch == "arm64":
        path = path.replace("-amd64", "-arm64").replace("2204-lts", "2204-lts-arm64")
    least = _DRIVEN_DISK_GB if has is not None else _DISK_GB
    return path, max(least, math.ceil(need.disk_gib))


def families(path: str, has: Accelerator | None = None) -> list[str]:
    """Return the paths to try in turn for an image: the path itself, then that of an older image family, if any.

    Google ends image families, so a newer one may be gone.

    Args:
        has: The machine's accelerator. If it needs a newer driver than the older family has, only `path` is returned.
            None means that the older family serves.
    """
    serves = has is None or has.name not in _NEEDS_580
    return [path, _OLDER[path]] if path in _OLDER and serves else [path]


def parsed(image: str) -> ImagePath:
    """Split the path of an image or of an image family into its parts. The beginning "projects/" may be missing.

    Raises:
        UsageError: The path does not contain "/global/images/".
    """
    project, found, name = image.removeprefix("projects/").partition("/global/images/")
    if not found:
        raise UsageError(
            f"{image!r} is not the path of a Google Cloud image: write it like 'projects/PROJECT/global/images/NAME'"
        )
    return ImagePath(project, name.removeprefix("family/"), is_family=name.startswith("family/"))
