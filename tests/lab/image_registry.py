"""A registry of container images that has one image, for `docker pull` over HTTP on 127.0.0.1."""

from __future__ import annotations

import hashlib
import json
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


class ImageRegistry(ThreadingHTTPServer):
    """The server of the folder that `docker save` writes, unpacked. Every name and tag is its image.

    Args:
        folder: the folder.

    Attributes:
        asked: the paths that were asked for.
        blobs: the files of the image by their digest, such as "sha256:…".
        manifest: what the registry says of the image.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.blobs: dict[str, Path] = {}
        [saved] = json.loads((folder / "manifest.json").read_bytes())
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": self._blob(folder / saved["Config"], "container.image.v1+json"),
            "layers": [self._blob(folder / each, "image.rootfs.diff.tar.gzip") for each in saved["Layers"]],
        }
        self.manifest = json.dumps(manifest).encode()

    def _blob(self, file: Path, kind: str) -> dict[str, str | int]:
        with file.open("rb") as source:
            digest = f"sha256:{hashlib.file_digest(source, 'sha256').hexdigest()}"
        self.blobs[digest] = file
        return {"mediaType": f"application/vnd.docker.{kind}", "size": file.stat().st_size, "digest": digest}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def registry(self) -> ImageRegistry:
        assert isinstance(self.server, ImageRegistry)
        return self.server

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.registry.asked.append(self.path)
        *_, kind, reference = self.path.rstrip("/").split("/")
        if kind == "manifests":
            data = self.registry.manifest
            self._head(_MANIFEST, len(data), f"sha256:{hashlib.sha256(data).hexdigest()}")
            if self.command == "GET":
                self.wfile.write(data)
        elif kind == "blobs":
            file = self.registry.blobs[reference]
            self._head("application/octet-stream", file.stat().st_size, reference)
            if self.command == "GET":
                with file.open("rb") as source:
                    shutil.copyfileobj(source, self.wfile)
        else:
            self._head("application/json", 0, "")

    def _head(self, kind: str, length: int, digest: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        if digest:
            self.send_header("Docker-Content-Digest", digest)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
