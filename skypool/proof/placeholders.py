"""Placeholders that take the place of private values in a recording, and have the same shape as these values.

A reply in which placeholders stand for values can still be parsed: a number is replaced by a number, an address by
an address, and an SSH key by text that is an SSH key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import re

from skypool.drivers.request_hooks import Kind

_UUID = re.compile(r"[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")

_BENCHMARK = ipaddress.IPv4Address("198.18.0.0")
"""The base of placeholders for IPv4 addresses.

The network 198.18.0.0/15 is for benchmarks: https://www.rfc-editor.org/rfc/rfc2544 (read 2026-11-24).
"""

_DOCUMENTATION = ipaddress.IPv6Address("2001:db8::")
"""The base of placeholders for IPv6 addresses.

The network 2001:db8::/32 is for documentation: https://www.rfc-editor.org/rfc/rfc3849 (read 2026-11-24).
"""


def placeholder(kind: Kind, number: int, value: str) -> str:
    """Return the placeholder for a private value, in the value's shape.

    `kind` is the kind of the value, such as "secret". `number`, counted from 1 for each kind, makes the placeholder
    different from others.
    """
    match kind:
        case "address":
            return _address(number, value)
        case "email":
            _, _, host = value.partition("@")
            return f"user-{number}@example.com" if "." in host else f"user-{number}@host-{number}"
        case "money":
            return _amount(number, value)
        case "person":
            return f"user-{number}"
        case "private-key":
            return _numbered(re.sub(r"(?<!\\)[A-Za-z0-9+/=]", "0", value), number)
        case "project":
            return f"project-{number}"
        case "ssh-key":
            return _ssh_key(number, value)
        case "url":
            return f"https://example.com/private-{number}"
        case "account" | "secret":
            return _shaped(number, value)


def _shaped(number: int, value: str) -> str:
    """Return zeros and a number in the shape of a value: a UUID, digits, or the letter x with digits."""
    if _UUID.fullmatch(value):
        return f"00000000-0000-4000-8000-{number:012d}"
    digits = str(number)
    if value.isdigit() or re.fullmatch(r"[0-9a-f]{8,}", value):
        return digits.zfill(len(value))
    # a letter first, so that the placeholder is not taken for a number
    first = "X" if value[:1].isupper() else "x"
    return first + digits.zfill(max(0, len(value) - 1))


def _numbered(zeros: str, number: int) -> str:
    """Return a text in which a number replaces the last zeros, as many as it has digits."""
    digits = str(number)
    before, zero, after = zeros.rpartition("0" * len(digits))
    return f"{before}{digits}{after}" if zero else f"{zeros}{digits}"


def _address(number: int, value: str) -> str:
    if ":" in value:
        return str(_DOCUMENTATION + number)
    return str(_BENCHMARK + number)


def _amount(number: int, value: str) -> str:
    """Return another amount with the same sign; 0 stays 0. A whole number gives a whole number."""
    amount = float(value)
    if amount == 0:
        return value
    made = (1000 + number) * (1 if amount > 0 else -1)
    return f"{made}.0" if "." in value or "e" in value.lower() else str(made)


def _ssh_key(number: int, value: str) -> str:
    """Return the base64 part of a public SSH key of the same type and length, without the "=" at its end."""
    try:
        blob = base64.b64decode(value + "=" * (-len(value) % 4))
    except (binascii.Error, ValueError):
        return _shaped(number, value)
    start = last = 0
    while start + 4 <= len(blob):
        last = start
        start += 4 + int.from_bytes(blob[start : start + 4])
    kept = blob[: last + 5]  # with the first byte of the last field, such as an RSA modulus: that byte has the sign
    made = hashlib.shake_256(f"ssh key {number}".encode()).digest(max(8, len(blob) - len(kept)))
    return base64.b64encode(kept + made[: max(0, len(blob) - len(kept))]).decode().rstrip("=")
