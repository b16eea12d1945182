"""A search for secrets in the memory and environment of processes, and in files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from io import RawIOBase
from pathlib import Path

_PIECE = 1 << 24


def in_memory(pid: int, secrets: Mapping[str, bytes]) -> set[str]:
    """Return the names of the secrets that are in the memory of a process, which includes its environment."""
    found: set[str] = set()
    longest = max(map(len, secrets.values()))
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
        maps = Path("/proc", str(pid), "maps").read_text().splitlines()
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for line in maps:
                first, last = (int(each, 16) for each in line.split()[0].split("-"))
                if line.split()[1][0] == "r":
                    found |= _in_range(memory, first, last, secrets, longest)
    return found


def _in_range(memory: RawIOBase, first: int, last: int, secrets: Mapping[str, bytes], longest: int) -> set[str]:
    found: set[str] = set()
    tail = b""
    with contextlib.suppress(OSError, ValueError, OverflowError):  # a device, or no memory of the process itself
        memory.seek(first)
        while first < last and (data := memory.read(min(_PIECE, last - first))):
            first += len(data)
            found |= {name for name, secret in secrets.items() if secret in tail + data}
            tail = data[-longest:]
    return found


def in_files(folders: Iterable[Path], secrets: Mapping[str, bytes]) -> set[str]:
    """Return the names of the secrets that are in files below these folders, each with its first file."""
    found: dict[str, Path] = {}
    for folder in folders:
        for each in folder.rglob("*"):
            with contextlib.suppress(OSError):  # it has ended, or is a socket
                if each.is_file() and not each.is_symlink():
                    data = each.read_bytes()
                    for name, secret in secrets.items():
                        if secret in data:
                            found.setdefault(name, each)
    return {f"{name} in {file}" for name, file in found.items()}
