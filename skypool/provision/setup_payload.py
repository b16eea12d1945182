"""Prepares the setup that is sent to each rented machine of a pool: the image's script, files, settings and secrets."""

from __future__ import annotations

import re

from skypool.errors import UsageError
from skypool.model import Access, Instance
from skypool.processes import host_name, user_name
from skypool.provision.bootstrap import SetupBundle
from skypool.rental.pool_terms import Terms
from skypool_images import Image, ImageError
from skypool_images.file_archive import Packed, Progress
from skypool_images.sent_project import SentProject


class NodeSetup:
    """The image's files, secrets and scripts for the machines of one pool. Local files are read once for all machines.

    Call `pack` first, and then `bundle_for` for each machine. The attribute `secrets` has the values of the secrets by
    their names; it is empty before `pack`.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._payload: Packed | None = None
        self.secrets = dict[str, str]()
        self._scripts: dict[tuple[str, int, tuple[str, ...]], str] = {}

    def pack(self, progress: Progress | None = None) -> None:
        """Read the files and secrets that the image names, before anything is rented.

        Blocks until all are read. `progress` is called as (bytes read so far, bytes in all). Raises UsageError if a
        file, the project or an environment variable is missing or not valid.
        """
        image = self._terms.image
        try:
            self._payload = image.pack(progress, _project_of(image))
            image.steps(packed=self._payload)
            self.secrets = image.secret_values()
        except (ImageError, OSError) as e:
            raise UsageError(str(e)) from e

    def bundle_for(self, access: Access, instance: Instance) -> SetupBundle | None:
        """Return what a machine needs before its agent can start.

        Returns None if nothing is needed: the machine has a known Python, the image asks for nothing else, and several
        pools may share the machine. A secret is included only if the installation of packages needs it. The accelerator
        in the machine's offer decides which drivers and libraries are installed.
        """
        image = self._terms.image
        sold = instance.offer.accelerator if instance.offer else None
        runtime = "none"
        count = 1
        mig: list[str] = []
        if sold is not None and not access.simulated:
            runtime = sold.runtime
            count = sold.slice.chips_per_vm if sold.slice else sold.cards
            if sold.part:
                mig = [sold.part.profile] * min(sold.count, sold.part.max_per_card)
        is_bare = image.bare("none" if access.owned or sold is None else runtime, self._payload)
        if access.python is not None and is_bare and not access.exclusive:
            return None
        settings = {"SKYPOOL_CHANGES": "no" if access.owned else "yes"}
        if access.python is not None:
            settings["SKYPOOL_PYTHON"] = access.python
        guest = f"{self._terms.name!r} of {user_name()}@{host_name()}" if access.exclusive else ""
        asked = (runtime, count, tuple(mig))
        script: str | None = self._scripts.get(asked)
        if script is None:
            script = str(image.script(runtime, mig=mig or None, count=count, packed=self._payload))
            self._scripts[asked] = script
        return SetupBundle(
            script=script,
            payload=self._payload,
            home=access.home,
            settings=settings,
            secrets={name: value for name, value in self.secrets.items() if _installs(name, script)},
            guest=guest,
            guard=access.guard,
            lease=self._terms.lease,
        )


def _project_of(image: Image) -> SentProject | None:
    """Return the project of an image; None for none. Raises UsageError if it cannot be sent."""
    if image.spec.project is None:
        return None
    from skypool.provision import image_project  # imported here because most images have none

    return image_project.sent_project(image)


def _installs(name: str, script: str) -> bool:
    """Return True if a secret is needed for the installation: by a package index or by the image's script."""
    return bool(re.fullmatch(r"UV_INDEX_\w+_(USERNAME|PASSWORD)", name)) or f"${{{name}}}" in script
