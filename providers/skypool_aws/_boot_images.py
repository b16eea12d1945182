"""Chooses the image (AMI) that a machine of AWS boots from, and the size of its disk. This module sends no requests."""

from __future__ import annotations

import math
from collections.abc import Iterable

from skypool.accelerators import Accelerator
from skypool.accelerators.spelling import meanings
from skypool.drivers.settings import words
from skypool.model import Arch, Need, Offer
from skypool_aws._catalog import arch_of, needs_grid_driver

BASE_SHAPE = r"ami-[0-9a-f]+|/\S+|ubuntu-2[24]\.04"
"""Regular expression of the names that a user may give for a base image."""

BASE_EXAMPLE = "'ami-0123456789abcdef0', an SSM parameter '/aws/…', 'ubuntu-22.04' or 'ubuntu-24.04'"
"""Examples of base images, for error messages."""

_DRIVER_DISK_GB = 120
"""Least disk in GB for an image with an accelerator's driver. The largest such image is AWS's for Neuron, 105 GB."""

_PLAIN_DISK_GB = 30
"""Least disk in GB for an image of Ubuntu without drivers."""

_UBUNTU_IMAGES = {
    "24.04": "/aws/service/canonical/ubuntu/server/24.04/stable/current/{cpu}/hvm/ebs-gp3/ami-id",
    "22.04": "/aws/service/canonical/ubuntu/server/22.04/stable/current/{cpu}/hvm/ebs-gp2/ami-id",
}
"""A dict from Ubuntu release to the SSM parameter that holds the AMI of this Ubuntu without drivers.

An SSM parameter is an entry in AWS's parameter store, and an AMI is a machine image.
"""

_DRIVER_IMAGES = {
    "cuda": "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-{release}/latest/ami-id",
    "neuron": "/aws/service/neuron/dlami/multi-framework/ubuntu-24.04/latest/image_id",
}
"""A dict from runtime (an accelerator's software family) to the SSM parameter that holds an AMI with the driver."""

_NOT_DRIVEN = ("K80", "K520", "M60", "V100", "Inferentia1")
"""Accelerators that no AMI in `_DRIVER_IMAGES` supports: NVIDIA's before Turing, and Inferentia1."""


def base(asked: str, offer: Offer, need: Need) -> tuple[str, int]:
    """Return the image that a machine starts from, and the size of the machine's disk.

    Args:
        asked: an AMI's id, an SSM parameter or an Ubuntu release that the user named. "" means the default for the
            accelerator.

    Returns:
        An AMI's id or the name of an SSM parameter that holds an AMI's id, and the disk's size in GiB. The size is that
            of the need, rounded up. It is at least 120 if AWS has an image with the accelerator's driver, and otherwise
            at least 30.

    Raises:
        UsageError: `asked` is not an AMI's id, the name of an SSM parameter, or a known Ubuntu release.
    """
    words("base image of AWS", asked or None, BASE_SHAPE, BASE_EXAMPLE)
    driver_image = _driver_image(offer.accelerator)
    if asked.startswith(("ami-", "/")):
        name = asked
    elif driver_image:
        name = driver_image
    else:
        name = _UBUNTU_IMAGES[_release(asked, offer.accelerator)]
    least_gb = _DRIVER_DISK_GB if driver_image else _PLAIN_DISK_GB
    return parameter(name, offer.arch or "x86_64", asked), max(least_gb, math.ceil(need.disk_gib))


def parameter(template: str, arch: Arch = "x86_64", release: str = "") -> str:
    """Return the name of an SSM parameter with its placeholders for processor and Ubuntu release filled in.

    A template without placeholders, such as an image's id, is returned unchanged.

    Args:
        template: the name with placeholders, as in "/aws/…/{arch}/…".
        arch: the processor architecture.
        release: the Ubuntu release, such as "ubuntu-22.04"; "" means 24.04.
    """
    return template.format(
        release=release.removeprefix("ubuntu-") or "24.04",
        arch=arch,
        cpu="arm64" if arch == "arm64" else "amd64",
    )


def images_of(types: Iterable[str], asked: str = "") -> list[str]:
    """Return the images that machines of these types start from, without duplicates.

    An image is named by the id of an AMI or by an SSM parameter. The images of types without accelerators are always
    among them. Types that skypool does not know are ignored.

    Args:
        types: names of instance types with accelerators.
        asked: the image that the settings name; "" for none.
    """
    known = meanings("aws-type")
    archs: tuple[Arch, ...] = ("x86_64", "arm64")
    offers = [Offer("aws", "", "", "", "on-demand", 0.0, arch=arch) for arch in archs]
    for name in sorted(types):
        if name in known and not needs_grid_driver(name):
            offers.append(Offer("aws", name, "", "", "on-demand", 0.0, accelerator=known[name], arch=arch_of(name)))
    return [*dict.fromkeys(base(asked, offer, Need())[0] for offer in offers)]


def _driver_image(has: Accelerator | None) -> str:
    """Return the SSM parameter, with placeholders, of AWS's image with the driver for `has`; "" if there is none."""
    if has is None or has.name in _NOT_DRIVEN:
        return ""
    return _DRIVER_IMAGES.get(has.runtime, "")


def _release(asked: str, has: Accelerator | None) -> str:
    """Return the Ubuntu release that was asked for, such as "24.04"; "" chooses the one that suits the accelerator."""
    if asked:
        return asked.removeprefix("ubuntu-")
    if has is not None and has.runtime in ("neuron", "hpu"):
        return "22.04"  # the last SDKs for Gaudi and the first Inferentia are for this release
    return "24.04"
