"""An image as text and back: TOML for people, JSON for programs. Of secrets it holds the names."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skypool_images.errors import ImageError
from skypool_images.spec import Spec

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_TABLES = ("pip_indexes", "env", "files", "base")


def given_fields(spec: Spec) -> dict[str, Any]:
    """What differs from an empty image, as Python would write it."""
    empty = Spec()
    fields = {}
    for name in (each.name for each in dataclasses.fields(spec) if each.name != "given"):
        value = getattr(spec, name)
        if value == getattr(empty, name):
            continue
        if name in _TABLES and isinstance(value, tuple):
            value = {key: list(each) if isinstance(each, tuple) else each for key, each in value}
        fields[name] = list(value) if isinstance(value, tuple) else value
    return fields


def json_fields(spec: Spec) -> dict[str, Any]:
    """What differs from an empty image, in the words of JSON: bytes are {"base64": …}."""
    fields = given_fields(spec)
    if "files" in fields:
        fields["files"] = {
            place: {"base64": base64.b64encode(source).decode()} if isinstance(source, bytes) else source
            for place, source in fields["files"].items()
        }
    return fields


def read_file(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(f"no image can be read from {path}: {error}") from error


def from_toml(text: str) -> dict[str, Any]:
    try:
        return _unpacked(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ImageError(f"this image is no TOML: {error}") from error


def from_json(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ImageError(f"this image is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ImageError(f"an image in JSON is an object, not {fields!r}")
    return _unpacked(fields)


def _unpacked(fields: dict[str, Any]) -> dict[str, Any]:
    files = fields.get("files")
    if not isinstance(files, Mapping):
        return fields
    return {**fields, "files": {place: _source(place, source) for place, source in files.items()}}


def _source(place: str, source: Any) -> Any:
    if not isinstance(source, Mapping):
        return source
    try:
        (only,) = source.items()
        if only[0] != "base64":
            raise ImageError(f"files[{place!r}] is a local path or {{base64 = '…'}}, not {source!r}")
        return base64.b64decode(only[1], validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise ImageError(f"files[{place!r}] is a local path or {{base64 = '…'}}, not {source!r}") from error


def to_toml(fields: Mapping[str, Any]) -> str:
    """The TOML of strings, booleans, lists of strings, and tables of these: all that an image has."""
    lines = [f"{key} = {_value(each)}" for key, each in fields.items() if not isinstance(each, dict)]
    for name, table in fields.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *(f"{_key(key)} = {_value(each)}" for key, each in table.items())]
    return "\n".join(lines).lstrip("\n") + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items()) + " }"
    return "[" + ", ".join(map(_value, value)) + "]"


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    """A basic string; JSON's escapes are TOML's, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
