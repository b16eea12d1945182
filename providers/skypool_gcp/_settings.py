"""The settings of the Google Cloud driver: their form, further checks of them, and the project that pays."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from skypool.drivers import recording
from skypool.errors import UsageError
from skypool_gcp import _api

_PROJECT_VARIABLES = ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT")
"""Environment variables that may hold the project's id, in order of precedence."""


class Shape(NamedTuple):
    """The required form of a setting that is a string or a list of strings.

    Attributes:
        pattern: A regular expression that must match the whole string.
        like: An example in quotes, with an explanation if it needs one, for error messages.
        several: True if the setting may be a list of strings.
    """

    pattern: str
    like: str
    several: bool = False


_RESOURCE_NAME = "[a-z]([a-z0-9-]{0,61}[a-z0-9])?"

SHAPES: dict[str, Shape] = {
    "project": Shape(
        "[a-z][a-z0-9-]{4,28}[a-z0-9]|[a-z0-9.-]+:[a-z][a-z0-9-]{4,28}[a-z0-9]",
        "'my-project-123' (the id and not the number of the project)",
    ),
    "zones": Shape(r"[a-z]+-[a-z]+\d+-(ai\d+)?[a-z]", "'us-central1-a'", several=True),
    "network": Shape(_RESOURCE_NAME, "'default' (the name of a network of the project)"),
    "subnetwork": Shape(_RESOURCE_NAME, "'my-subnet' (the name of a subnetwork, the same in every region)"),
    "networks": Shape(
        f"{_RESOURCE_NAME}/{_RESOURCE_NAME}",
        "'my-rdma-net/my-rdma-subnet-0' (the names of a network and of a subnetwork, which exist already)",
        several=True,
    ),
    "image": Shape(
        r"(projects/)?[a-z0-9.:-]+/global/images/(family/)?[a-z0-9-]+|ubuntu-2[24]\.04",
        "'projects/my-project/global/images/family/my-family' or 'ubuntu-24.04'",
    ),
    "reservation": Shape(_RESOURCE_NAME, "'my-reservation'"),
    "service_account": Shape(
        r"[a-z0-9-]+@[a-z0-9.-]+\.iam\.gserviceaccount\.com|\d+-compute@developer\.gserviceaccount\.com",
        "'my-account@my-project.iam.gserviceaccount.com'",
    ),
    "ssh_from": Shape(
        r"((25[0-5]|2[0-4]\d|1?\d?\d)(\.(?!$|/)|(?=$|/))){4}(/([12]?\d|3[0-2]))?",
        "'203.0.113.7' or '203.0.113.0/24'",
        several=True,
    ),
}
"""The required form of each setting of `GCP` that is a string or a list of strings, by the name of the setting."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the Google Cloud driver after they were checked: the arguments of `skypool_gcp.GCP`."""

    project: str | None
    zones: tuple[str, ...] | None
    network: str
    subnetwork: str | None
    image: str | None
    reservation: str | None
    service_account: str | None
    ssh_from: tuple[str, ...] | None
    queue: float = 300.0
    networks: tuple[str, ...] | None = None

    def billed(self) -> str:
        """Return the id of the project that pays. If requests are being recorded, the recording leaves this id out.

        The first of these that names a project is used: the setting `project`, $GOOGLE_CLOUD_PROJECT,
        $CLOUDSDK_CORE_PROJECT, and the credentials.

        Raises:
            CredentialsError: The setting and the variables name no project, and the credentials name none or cannot be
                read.
        """
        project = self._billed()
        if (recorder := recording.current()) is not None:
            recorder.hide(project, "project")
        return project

    def _billed(self) -> str:
        """Return the id of the project that pays. The caller must keep the id out of recordings."""
        if self.project:
            return self.project
        for variable in _PROJECT_VARIABLES:
            if project := os.environ.get(variable):
                return project
        of_credentials = _api.project_of_credentials()
        if not of_credentials:
            raise _api.REFUSALS.error(
                "to log in", "NoProject", "neither the settings, the environment nor the credentials name a project"
            )
        return of_credentials

    def path(self) -> str:
        """Return the path of the network in which machines are placed, such as "projects/P/global/networks/default".

        Raises:
            CredentialsError: The project that pays is not known.
        """
        return f"projects/{self.billed()}/global/networks/{self.network}"


def refuse_ipv6(ssh_from: str | Sequence[str] | None) -> None:
    """Check that the setting `ssh_from` has no IPv6 addresses, because machines have IPv4 addresses only.

    `ssh_from` is the value that the user gave, which need not have been checked otherwise. Compute Engine gives an
    interface an IPv4 address only, unless `stackType` says more, which skypool never sets:
    https://docs.cloud.google.com/compute/docs/reference/rest/v1/instances (discovery document of 2026-11-06).

    Raises:
        UsageError: An item is an IPv6 address or network.
    """
    for each in [ssh_from] if isinstance(ssh_from, str) else ssh_from or ():
        if isinstance(each, str) and re.fullmatch(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(/\d+)?", each):
            raise UsageError(
                f"ssh_from: {each!r} is an IPv6 address, but machines of Google Cloud get IPv4 addresses only; name "
                "the IPv4 address from which you reach the internet, such as '203.0.113.7' (`curl -4 "
                "https://checkip.amazonaws.com` prints it)"
            )


def check_networks(network: str, networks: Sequence[str]) -> None:
    """Check that no further network is named twice, and that none is the network of the first interface.

    Google refuses both: https://docs.cloud.google.com/vpc/docs/create-use-multiple-interfaces (read 2026-11-24 in a
    stored copy).

    Args:
        network: The network of the first interface.
        networks: The further networks, as "NETWORK/SUBNETWORK".

    Raises:
        UsageError: A subnetwork occurs twice, or a further network is that of the first interface.
    """
    for number, each in enumerate(networks):
        if each in networks[:number]:
            raise UsageError(f"networks names {each} twice, but each interface of a machine needs another subnetwork")
        if each.partition("/")[0] == network:
            raise UsageError(
                f"networks names {each}, but a machine's first interface is in the network {network} (network=) "
                "already, and Google takes no second one there; name another network"
            )
