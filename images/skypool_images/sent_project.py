"""`SentProject`: a project whose files are sent to nodes, and how its packages are installed from these files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SentProject:
    """A project that the client has looked at. Its files lie in the folder where calls run.

    Attributes:
        root: its folder on the client.
        paths: the files and links that are sent, relative to the root.
        install: the arguments of uv that install its packages; () if it names none.
        packages: requirements beside those: of a script's header, or what pip is to install where uv is missing.
        only_uv: what only uv can install, such as "uv.lock"; "" if pip can install the packages, too.
        env: pairs of name and value of the variables that tell build tools the project's version.
        content: hash of what the environment is made from. A change makes a new environment.
    """

    root: Path
    paths: tuple[str, ...]
    install: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    only_uv: str = ""
    env: tuple[tuple[str, str], ...] = ()
    content: str = ""

    @property
    def key(self) -> str:
        """Return a text that differs for projects which need environments of their own."""
        said = [str(self.root), self.install, self.packages, self.env, self.content]
        return hashlib.sha256(json.dumps(said).encode("utf-8", "surrogateescape")).hexdigest()[:16]
