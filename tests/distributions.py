"""Source distributions of the package index, whose programs tests run as they are."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest

INDEX = "https://files.pythonhosted.org/packages"


@dataclass(frozen=True)
class Source:
    """A source distribution.

    Attributes:
        path: its path below `INDEX`.
        sha256: its hash.
    """

    path: str
    sha256: str

    @property
    def name(self) -> str:
        """The name of its own folder."""
        return Path(self.path).name.removesuffix(".tar.gz")

    def unpacked(self, folder: Path, files: Collection[str] | None = None) -> Path:
        """Fetch it, unpack it below a folder unless that was done, and return its own folder.

        Args:
            folder: the folder.
            files: the paths of the only files that are needed. Default None: all.
        """
        place = folder / self.name
        if not place.exists():
            with urllib.request.urlopen(f"{INDEX}/{self.path}", timeout=60) as answer:
                data = answer.read()
            assert hashlib.sha256(data).hexdigest() == self.sha256
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 has it
                members = archive.getmembers()
                archive.extractall(
                    folder, [each for each in members if files is None or each.name.partition("/")[2] in files]
                )
        return place

    def unpacked_or_skip(self, folder: Path, files: Collection[str] | None = None) -> Path:
        """Do the same. Skip the test if the index cannot be reached, but fail it in CI."""
        try:
            return self.unpacked(folder, files)
        except (urllib.error.URLError, TimeoutError) as e:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"the package index cannot be reached: {e}")
