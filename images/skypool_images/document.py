"""Converts an image to text and back: TOML for people, JSON for programs. Values of secrets are left out."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skypool_images.errors import ImageError
from skypool_images.field_checks import Spec

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_TABLES = ("pip_indexes", "env", "files", "base")


def given_fields(spec: Spec) -> dict[str, Any]:
    """Return a dict of the image's fields that differ from the defaults, as a user would write them in Python.

    For example, pairs become a dict. Names of secrets are kept, and values of secrets are left out.
    """
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
    """Return a dict of the image's fields that differ from the defaults, as JSON values.

    Values of secrets are left out. Bytes in the field `files` become {"base64": "…"}.
    """
    fields = given_fields(spec)
    if "files" in fields:
        fields["files"] = {
            place: {"base64": base64.b64encode(source).decode()} if isinstance(source, bytes) else source
            for place, source in fields["files"].items()
        }
    return fields


def read_file(path: Path) -> str:
    """Return the text of a file that contains an image. Raise ImageError if it cannot be read, or is not text."""
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(f"the image file {path} cannot be read: {error}") from error


def from_toml(text: str) -> dict[str, Any]:
    """Read the fields of an image from TOML text. Only base64 texts, which become bytes in `files`, are checked.

    Raises:
        ImageError: the text is not valid TOML, or a base64 text is not valid.
    """
    import tomllib  # imported here because most images are not read from a file

    try:
        return _unpacked(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ImageError(f"the text of this image is not valid TOML: {error}") from error


def from_json(text: str) -> dict[str, Any]:
    """Read the fields of an image from JSON text. Only base64 texts, which become bytes in `files`, are checked.

    Raises:
        ImageError: the text is not a valid JSON object, or a base64 text is not valid.
    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ImageError(f"the text of this image is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ImageError(f'an image in JSON must be an object such as {{"pip": ["numpy"]}}, not {fields!r}')
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
            raise ImageError(f"files[{place!r}] must be a local path or {{base64 = '…'}}, not {source!r}")
        return base64.b64decode(only[1], validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise ImageError(f"files[{place!r}] must be a local path or {{base64 = '…'}}, not {source!r}") from error


def to_toml(fields: Mapping[str, Any]) -> str:
    """Return the fields of an image as TOML text, with all tables at the end.

    Values are strings, booleans, lists of strings, or dicts of such values.
    """
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
    """Return a text as a TOML string in double quotes. JSON's escapes are also TOML's, except for the character DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
