"""Builds what each machine of a pool gets: the image's script, files, settings and secrets."""

from __future__ import annotations

import getpass
import re

from skypool.model import Access, Instance
from skypool.processes import host_name
from skypool.provision.bootstrap import SetupBundle
from skypool.rental.request import Terms, packed
from skypool_images.payload import Packed, Progress


class NodeSetup:
    """What each machine of one pool is set up with. Local files are read once, for all nodes."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._payload: Packed | None = None
        self.secrets = dict[str, str]()
        self._scripts: dict[tuple[str, int, tuple[str, ...]], str] = {}

    def pack(self, progress: Progress | None = None) -> None:
        """Read what the image names, before anything is rented.

        Args:
            progress: called with the bytes of files that were read, and how many there are.

        Raises:
            UsageError: a local file or a variable that it names is not there, or makes no sense.
        """
        self._payload, self.secrets = packed(self._terms.image, progress)

    def bundle_for(self, access: Access, instance: Instance) -> SetupBundle | None:
        """What must be done on a node before its agent starts; None where its Python is all that is needed."""
        image = self._terms.image
        sold = instance.offer.accelerator if instance.offer else None
        runtime = "none"
        count = 1
        mig: list[str] = []
        if sold is not None:
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
        guest = f"{self._terms.name!r} of {getpass.getuser()}@{host_name()}" if access.exclusive else ""
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


def _installs(name: str, script: str) -> bool:
    """Whether a secret is for what installs packages: uv knows it by its name, or a requirement names it."""
    return bool(re.fullmatch(r"UV_INDEX_\w+_(USERNAME|PASSWORD)", name)) or f"${{{name}}}" in script
