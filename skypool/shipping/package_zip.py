"""Makes the zip of Python packages for nodes, and shell text that starts the loader there.

The zip has skypool, its own drivers, skypool_images and cloudpickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import marshal
import os
import re
import shlex
import struct
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from skypool.errors import UsageError
from skypool.safety import private, user_folders
from skypool.wire.agent_config import AgentConfig

if TYPE_CHECKING:
    import zipfile

_LEFT_OUT = ("skypool/cli",)
"""Folders that are left out of the zip, because nodes do not need them."""
_AT_START = ("skypool/agent/", "skypool/wire/")
"""Folders whose bytecode is not compressed. The agent imports most of it, and starts 10 ms earlier (of 80 ms) so.

This adds 0.5 MB to the 4.9 MB of the zip.
"""
_PYNVML = "nvidia-ml-py/pynvml.py"
"""The path in the zip of the module of nvidia-ml-py, outside of the folder from which nodes import other modules."""
_SENT = (".py", ".csv", ".json", ".sh")
"""File name endings of the files that nodes get: Python modules, and tables and programs that they read."""
_KEPT = {"bundle-*.zip": 16, "bundle-of-*.json": 32, "tmp*": 0}
"""The number of files of each kind that stay in the cache: zips of 4 MB, records, and files that are being written."""
_UNFINISHED = 3600.0
"""Seconds after which a file that is being written is removed. Its process was killed while it wrote the file."""
_EPOCH = (1980, 1, 1, 0, 0, 0)

_STAGE_BYTES = 12288
"""The number of bytes that `STAGE` reads. It is fixed, so that `STAGE` does not read any of the data that follows."""
STAGE = ("sh", "-c", f'eval "$(dd bs={_STAGE_BYTES} count=1 iflag=fullblock 2>/dev/null)"')
"""The command that begins a connection: a shell that runs the first `_STAGE_BYTES` of its stdin.

Long or secret text is sent this way, because a command line is limited in length and visible to other users.
"""

ALIVE = b"@alive!\n"
"""The line that a client sends regularly during a machine's setup, to show that the client is still there.

Some of these lines may still be unread when the loader, the next program on the connection, starts.
"""

NOT_FROM_HERE = """import os, sys
sys.path[:] = [each for each in sys.path if each]
sys.stdout.flush()
os.dup2(3, 1)
os.close(3)
"""
"""The beginning of each Python program that is given to the function `program`.

It takes the current folder, which others may fill, off the import path. Python's option -P does so, too, but a Python
that is too old would fail there, before the loader can report its version. Afterwards, stdout leads to the client.
"""

LOADER = NOT_FROM_HERE + (files("skypool") / "agent" / "loader.py").read_text("utf-8")
"""The Python program that starts on every connection. It asks for the zip of skypool if the node lacks the zip."""


def staged(text: str) -> bytes:
    """Return shell text for the beginning of a connection: encoded as UTF-8, and padded with newlines to 12288 bytes.

    A connection begins with the command `STAGE`, a shell that reads exactly 12288 bytes and runs them as a program.
    Bytes that are sent later are the stdin of that program. Raises UsageError for a longer text.
    """
    data = text.encode("utf-8", "surrogateescape")  # settings may have bytes that are not UTF-8
    if len(data) > _STAGE_BYTES:
        raise UsageError(
            f"the shell script that starts a connection has {len(data)} bytes, and the limit is {_STAGE_BYTES}: "
            f"shorten the settings of this node (folders, package indexes, proxies)"
        )
    return padded(data, _STAGE_BYTES)


def assigned(values: Mapping[str, object]) -> str:
    """Return shell text with a line NAME=VALUE for each variable. Values are quoted; names are not checked."""
    return "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())


def padded(data: bytes, block: int) -> bytes:
    """Return `data` with newlines added up to a multiple of `block` bytes. `dd` on a node reads it in such blocks."""
    return data + b"\n" * (-len(data) % block)


def agent_starter(python: str, home: str) -> str:
    """Return shell text that replaces the shell with the loader, which starts the agent or connects to it.

    `python` is the path of the interpreter on the node; "" for the one that the setup wrote to a file below `home`, the
    folder of skypool's files on the node.
    """
    return program(LOADER, python, home)


def program(source: str, python: str, home: str) -> str:
    """Return shell text that replaces the shell with a Python program, which gets the arguments of the shell's script.

    Until the program begins, stdout is redirected to stderr, and the shell's stdout is file descriptor 3. So what a
    node's `sitecustomize` prints does not disturb the protocol.

    Args:
        source: the text of the program. It begins with `NOT_FROM_HERE`, which makes descriptor 3 stdout again.
        python: the path of the interpreter on the node; "" for the one that the setup wrote to a file below `home`.
        home: the folder of skypool's files on the node.
    """
    word = shlex.quote(python) if python else f'"$(cat {shell_path(home)}/boot/python)"'
    return f'exec {word} -c {shlex.quote(source)} "$@" 3>&1 1>&2'


def shell_path(path: str) -> str:
    """Return a path quoted for a shell. A leading "~/" becomes the home folder of the user who runs the shell."""
    return '"$HOME"' + shlex.quote(path[1:]) if path.startswith("~/") else shlex.quote(path)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Zip for nodes.

    Attributes:
        hash: 16 hexadecimal digits that identify the sources and the version of Python. A node knows the zip by them,
            and the zip's file name contains them.
        size: its bytes.
        read: returns the zip. It is not kept in memory, as most nodes have it.
    """

    hash: str
    size: int
    read: Callable[[], bytes] = field(repr=False)


_making = threading.Lock()
"""Held while the zip is made, because each of the first nodes of a pool asks for it in a thread of its own."""


def _forked() -> None:
    """Let this child process make the zip, although a thread of its parent was making it."""
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def bundle() -> Bundle:
    """Return a zip of skypool, its own drivers, skypool_images and cloudpickle, compiled for this version of Python.

    Drivers of other distributions are not in the zip. The zip is kept in the user's cache folder for later processes,
    and in this process after the first call. A file beside the zip has the names of the packages, and a hash of the
    paths, sizes and times of change of their files. While this hash is the same, the files are not read. In a process
    that runs from such a zip, as on a node, it is this one.

    Raises:
        ImportError: one of the packages is not installed here, or is a single file instead of a package.
        SyntaxError: a ".py" file of a package cannot be compiled.
    """
    with _making:
        return _bundle()


_NAME = re.compile(r"skypool-([0-9a-f]+)\.zip")
"""The name of the zip on a node, as the loader calls it, with its hash."""


@cache
def _bundle() -> Bundle:
    """Return the zip from which this process runs, if any, or that of the cache folder. Otherwise make it."""
    archive = Path(getattr(sys.modules[__name__].__loader__, "archive", ""))
    if (named := _NAME.fullmatch(archive.name)) is not None:
        return Bundle(named[1], archive.stat().st_size, archive.read_bytes)
    folder = user_folders.cache() / "bundles"
    place = repr((__file__, sys.version_info[:3])).encode()
    record = folder / f"bundle-of-{hashlib.sha256(place).hexdigest()[:16]}.json"
    # Without a usable record or a zip, or if a package is no longer found, the files are read.
    with contextlib.suppress(OSError, ValueError, TypeError, ImportError):
        private.check(folder)  # the zip runs on nodes, with all that is secret there
        packages, stamp, key = json.loads(private.read(record))
        if stamp == _stamp(_files(packages)):
            made = _opened(folder, key)
            os.utime(folder / f"bundle-{key}.zip")  # it is in use
            return made
    return _made(folder, record)


def _made(folder: Path, record: Path) -> Bundle:
    """Read all files of the packages, make the zip if it is not in the cache, write the record, and return the zip."""
    packages = _packages()
    files = _files(packages)
    stamp = _stamp(files)  # taken before the files are read, so that a later change gives another stamp
    sources = {name: Path(path).read_bytes() for name, path in files.items()}
    digest = hashlib.sha256(repr(sys.version_info[:3]).encode())
    for name, data in sorted(sources.items()):
        digest.update(name.encode() + struct.pack("!Q", len(data)) + data)
    key = digest.hexdigest()[:16]
    kept = folder / f"bundle-{key}.zip"
    try:
        made = _opened(folder, key)
    except OSError:
        data = _pack(sources)
        _keep(kept, data)
        try:
            made = _opened(folder, key)
        except OSError:  # the disk is full, or others can change the folder
            made = Bundle(key, len(data), lambda: data)
    _keep(record, json.dumps([packages, stamp, key]).encode())
    _prune(folder)
    return made


def _opened(folder: Path, key: str) -> Bundle:
    """Return the zip with this hash in the cache folder. It stays open, as other processes may remove it.

    Raises OSError if it is not there, or others can change the folder.
    """
    private.check(folder)  # they could put another zip in its place
    file = open(private.opened(folder / f"bundle-{key}.zip", os.O_RDONLY), "rb", buffering=0)  # noqa: SIM115
    size = os.fstat(file.fileno()).st_size
    return Bundle(key, size, lambda: os.pread(file.fileno(), size, 0))


def _packages() -> list[str]:
    """Return the names of the packages in the zip: skypool, cloudpickle, skypool_images, and skypool's own drivers."""
    from importlib.metadata import distribution  # imported here because it takes long

    # drivers, because a node may import a user's module that uses one, such as `sky.RunPod()`
    points = distribution("skypool").entry_points.select(group="skypool.providers")
    return ["skypool", "cloudpickle", "skypool_images", *sorted({each.module.partition(".")[0] for each in points})]


def _files(packages: Sequence[str]) -> dict[str, str]:
    """Return the local paths of these packages' files by their path in the zip. Raise ImportError if one is missing."""
    found: dict[str, str] = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(
                f"{package} cannot be sent to nodes, because it is not installed as a package here; reinstall skypool"
            )
        root = spec.submodule_search_locations[0]
        for folder, folders, names in os.walk(root):
            inside = f"{package}{folder.removeprefix(root)}"
            folders[:] = sorted(each for each in folders if f"{inside}/{each}" not in _LEFT_OUT)
            found.update({f"{inside}/{each}": f"{folder}/{each}" for each in sorted(names) if each.endswith(_SENT)})
    nvml = importlib.util.find_spec("pynvml")
    if nvml is not None and nvml.origin is not None and Path(nvml.origin).name == "pynvml.py":
        found[_PYNVML] = nvml.origin  # the sampler reads NVIDIA GPUs with it
    return found


def _stamp(files: Mapping[str, str]) -> str:
    """Return a hash of the paths, sizes and times of change of these files, and of the folder site-packages."""
    # An installation into site-packages (not another folder, as by `pip install --user`) may bring drivers.
    seen = []
    for path in (sysconfig.get_path("purelib"), *files.values()):
        about = os.stat(path)
        seen.append((path, about.st_size, about.st_mtime_ns, about.st_ctime_ns))
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def _pack(sources: dict[str, bytes]) -> bytes:
    """Return a zip of these files, by their path in the zip. For each module, it has the source and the bytecode."""
    import zipfile  # imported here, as in other functions, because the zip is rarely made

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in sources.items():
            archive.writestr(_entry(name), data)
            if name.endswith(".py"):
                code = compile(data, f"<skypool>/{name}", "exec", dont_inherit=True)
                # the kind of bytecode file that Python never compares with its source
                header = importlib.util.MAGIC_NUMBER + struct.pack("<IQ", 1, 0)
                archive.writestr(_entry(f"{name}c"), header + marshal.dumps(code))
    return out.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    """Return the entry for a file. Its date is fixed, so that the same sources make the same zip."""
    import zipfile

    entry = zipfile.ZipInfo(name, _EPOCH)
    is_needed_at_once = name.startswith(_AT_START) and name.endswith(".pyc")
    entry.compress_type = zipfile.ZIP_STORED if is_needed_at_once else zipfile.ZIP_DEFLATED
    return entry


def _keep(path: Path, data: bytes) -> None:
    """Write a file to the cache for later processes, which see the complete file or none. Errors are ignored."""
    import tempfile

    try:
        private.folder(path.parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
    except OSError:
        return


def _prune(folder: Path) -> None:
    """Remove the oldest zips and records from the cache, and files that were never finished. Errors are ignored."""
    with contextlib.suppress(OSError):
        for pattern, most in _KEPT.items():
            files = sorted(folder.glob(pattern), key=lambda file: file.stat().st_mtime, reverse=True)
            for file in files[most:]:
                if most or time.time() - file.stat().st_mtime > _UNFINISHED:
                    file.unlink()


def prelude(config: AgentConfig, start: bool) -> bytes:
    """Return the first bytes that the loader reads: the length of a JSON text in 8 characters, and that text.

    The text has the agent's configuration, the hash and size of the zip of skypool, and this Python's version. With
    `start`, the loader must start an agent when there is none.
    """
    zip_ = bundle()
    text = json.dumps(
        {
            "hash": zip_.hash,
            "size": zip_.size,
            "python": list(sys.version_info[:2]),
            "start": start,
            "config": config.to_json(),
        }
    ).encode()
    return b"%8d" % len(text) + text
