"""Sends the text of a script with its functions, for tracebacks on nodes and for `inspect.getsource` there.

Compilers such as `triton.jit` read the text of the functions that they compile.
"""

from __future__ import annotations

import hashlib
import linecache
import zlib
from collections.abc import Iterable
from types import CodeType
from typing import NamedTuple

_MOST = 1 << 20
"""The most characters of a file that is sent."""
_BEGINNINGS = ("def ", "async def ", "@", "class ")


class Source(NamedTuple):
    """Text of a file, as it is sent to nodes. Each node gets it once.

    Attributes:
        file: the file's name, as code objects have it. There need not be such a file, as for a cell of a notebook.
        key: a hash of the text, after "source-".
        data: the text, compressed by zlib.
    """

    file: str
    key: str
    data: bytes


_known: dict[str, tuple[list[str], Source]] = {}


def sources_of(codes: Iterable[CodeType]) -> list[Source]:
    """Return the text of each file that these functions come from, sorted by name.

    `codes` are the code objects of the functions. A file is read once, because it may be edited while the program runs.
    It is read again if its text does not fit a function, as after a script was run again in the same process. A file is
    left out if it has no text here, if its text does not fit, or if it has more than 2^20 characters.
    """
    found = {}
    for code in codes:
        source = _source(code)
        if source is not None:
            found[source.file] = source
    return [found[file] for file in sorted(found)]


def _source(code: CodeType) -> Source | None:
    file = code.co_filename
    known = _known.get(file)
    if known is not None and _fits(known[0], code):
        return known[1]
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    if not _fits(lines, code) or sum(map(len, lines)) > _MOST:
        return None
    text = "".join(lines).encode("utf-8", "surrogatepass")
    source = Source(file, f"source-{hashlib.sha256(text).hexdigest()[:16]}", zlib.compress(text))
    _known[file] = lines, source
    return source


def _fits(lines: list[str], code: CodeType) -> bool:
    """Return True if a function can begin in the line where its code says that it does."""
    if not 0 < code.co_firstlineno <= len(lines):
        return False
    line = lines[code.co_firstlineno - 1].strip()
    return code.co_name.startswith("<") or line.startswith(_BEGINNINGS)
