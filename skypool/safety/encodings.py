"""The ways in which a secret may be written in texts, so that it can be found there."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from functools import partial
from urllib.parse import quote, quote_plus

from skypool.text import encodable


def bytes_of(value: str) -> bytes:
    """Return the bytes of a secret. Surrogates, as in environment variables that are not UTF-8, become their bytes."""
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")


def _percent(safe: str) -> Callable[[str], str]:
    return lambda value: quote(bytes_of(value), safe=safe)


def _json(value: str) -> str:
    return json.dumps(value)[1:-1]


def _json_with_unicode(value: str) -> str:
    return encodable(json.dumps(value, ensure_ascii=False)[1:-1])


def _json_for_pages(value: str) -> str:
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", _json_with_unicode(value))


def _html(value: str, quote: bool = True) -> str:
    import html  # imported here, as it takes long

    return html.escape(encodable(value), quote)


def _lower(value: str) -> str:
    return re.sub("%..", lambda found: found[0].lower(), _percent("")(value))


ENCODINGS: tuple[Callable[[str], str], ...] = (
    lambda value: value,
    encodable,
    _percent(""),
    _percent("/"),  # Python's default
    _percent("!*'()"),  # encodeURIComponent of JavaScript
    _lower,
    lambda value: _percent("")(_percent("")(value)),  # a URL in a URL
    lambda value: quote_plus(bytes_of(value)),
    _json,
    _json_with_unicode,
    _json_for_pages,  # Go's default
    lambda value: _json(value).replace("/", r"\/"),  # PHP's default
    lambda value: _json(_json(value)),
    lambda value: repr(value)[1:-1],
    lambda value: ascii(value)[1:-1],
    lambda value: repr(bytes_of(value))[2:-1],
    lambda value: encodable(value).replace("'", "'\"'\"'"),  # shlex.quote
    _html,
    partial(_html, quote=False),
    lambda value: bytes_of(value).hex(),
    lambda value: bytes_of(value).hex().upper(),
)
"""Functions that return a secret as it is written elsewhere: in URLs, JSON, Python, shells, HTML and in hexadecimal."""


def base64_parts(value: str) -> list[str]:
    """Return strings to search for, to find a secret in the base64 form of a longer text, such as "user:secret".

    base64 encodes three bytes at a time. So the characters of a secret depend on its place in the text, modulo three.
    For each of these places, there is a string for a secret at the end of the text, and then a shorter one without the
    character that also depends on what follows. Both are also given in the alphabet for URLs.
    """
    data = bytes_of(value)
    parts: dict[str, None] = {}
    for before in range(3):
        coded = base64.b64encode(b"\0" * before + data).decode().rstrip("=")
        at_end = coded[-(-before * 8 // 6) :]
        certain = at_end[: len(at_end) - bool((before + len(data)) % 3)]
        for part in (at_end, certain):
            parts |= dict.fromkeys((part, part.replace("+", "-").replace("/", "_")))
    return [*parts]
