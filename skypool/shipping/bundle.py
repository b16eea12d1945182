"""Packs skypool and cloudpickle into one zip for nodes, and writes the few lines that unpack it there."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import marshal
import os
import shlex
import struct
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from skypool.errors import UsageError
from skypool.wire.handshake import AgentConfig

_LEFT_OUT = ("cli",)
_SENT = (".py", ".csv", ".json", ".sh")
"""Kinds of files that are sent: the modules, and the tables and programs that they read."""
_EPOCH = (1980, 1, 1, 0, 0, 0)

_STAGE_BYTES = 8192
"""How much `STAGE` reads, always: so it takes nothing of what comes behind it."""
STAGE = ("sh", "-c", f'eval "$(dd bs={_STAGE_BYTES} count=1 iflag=fullblock 2>/dev/null)"')
"""Runs whatever shell text is sent first: what is long or secret is in no command line."""

ALIVE = b"@alive!\n"
"""What a client says while a machine is made ready. The loader, which comes next, may find some of it left."""

LOADER = (files("skypool") / "agent" / "loader.py").read_text("utf-8")
"""The program that a connection starts with: Python, which asks for skypool itself where a node does not have it."""


def staged(text: str) -> bytes:
    """Return shell text as `STAGE` takes it. What is sent after it is that text's own stdin.

    Raises:
        UsageError: the text is longer than `STAGE` reads.
    """
    data = text.encode()
    if len(data) > _STAGE_BYTES:
        raise UsageError(
            f"the shell text that begins a connection has {len(data)} bytes, and a node reads {_STAGE_BYTES} of it: "
            f"shorten what was set for this node (folders, settings of package indexes, proxies)"
        )
    return padded(data, _STAGE_BYTES)


def assigned(values: Mapping[str, object]) -> str:
    """Return shell that sets these variables, a line each."""
    return "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())


def padded(data: bytes, block: int) -> bytes:
    """`data` with newlines behind it, to whole blocks: a shell's `dd` reads these, and not a byte more."""
    return data + b"\n" * (-len(data) % block)


def agent_starter(python: str, home: str) -> str:
    """Shell text that becomes the loader, run by `python`, or if that is "" by what the bootstrap in `home` found."""
    word = shlex.quote(python) if python else f'"$(cat {shell_path(home)}/boot/python)"'
    return f"exec {word} -c {shlex.quote(LOADER)}"


def shell_path(path: str) -> str:
    """A path as a shell takes it; "~" is the home of the user there."""
    return '"$HOME"' + shlex.quote(path[1:]) if path.startswith("~/") else shlex.quote(path)


class Bundle(NamedTuple):
    """The zip, and the hash that names it."""

    data: bytes
    hash: str


@cache
def bundle() -> Bundle:
    """skypool and cloudpickle as one zip, compiled for this minor version of Python."""
    import platformdirs  # not on a node, where modules that import skypool are imported too

    sources = dict(_sources())
    digest = hashlib.sha256(repr(sys.version_info[:3]).encode())
    for name, data in sorted(sources.items()):
        digest.update(name.encode() + struct.pack("!Q", len(data)) + data)
    key = digest.hexdigest()[:16]
    kept = Path(platformdirs.user_cache_dir("skypool")) / f"bundle-{key}.zip"
    try:
        return Bundle(kept.read_bytes(), key)
    except OSError:
        data = _pack(sources)
        _keep(kept, data)
        return Bundle(data, key)


def _sources() -> list[tuple[str, bytes]]:
    found = []
    ours = {home for home in sys.modules["skypool"]._HOME.values() if home.startswith("skypool_")}
    for package in ("skypool", "cloudpickle", *sorted(ours)):  # all that the front door leads to: a module of the
        left_out = _LEFT_OUT if package == "skypool" else ()  # user's may name a driver where it is imported
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"{package} is not installed as a package; reinstall skypool")
        root = Path(spec.submodule_search_locations[0])
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root)
            if path.suffix in _SENT and relative.parts[0] not in left_out:
                found.append((f"{package}/{relative.as_posix()}", path.read_bytes()))
    return found


def _pack(sources: dict[str, bytes]) -> bytes:
    """Sources beside their bytecode: a node starts at once, and tracebacks there show lines."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in sources.items():
            archive.writestr(_entry(name), data)
            if name.endswith(".py"):
                code = compile(data, f"<skypool>/{name}", "exec", dont_inherit=True)
                header = importlib.util.MAGIC_NUMBER + struct.pack("<IQ", 1, 0)  # hash-based, never checked
                archive.writestr(_entry(f"{name}c"), header + marshal.dumps(code))
    return out.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    """The same at any time, compressed as a ZipInfo of its own is not."""
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def _keep(path: Path, data: bytes) -> None:
    """Keep the zip for the next process; a cache that cannot be written costs time, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
    except OSError:
        return


def prelude(config: AgentConfig, start: bool) -> bytes:
    """What the loader reads first."""
    zip_ = bundle()
    text = json.dumps(
        {
            "hash": zip_.hash,
            "size": len(zip_.data),
            "python": list(sys.version_info[:2]),
            "start": start,
            "config": config.to_json(),
        }
    ).encode()
    return b"%8d" % len(text) + text
