"""Actions, resources and conditions of AWS IAM policies, for iam_evaluator.py, whose docstring names the pages.

A string of a policy can have wildcards and variables, such as `${aws:username}`. What it may match depends on where it
stands, which is the argument `kind` of `pattern`:

- "exact": no wildcards.
- "any": `*` and `?` match all characters.
- "arn": they match within one of the first five parts of an ARN, and all characters after these.
- "resource": they match within a part, and a `*` that ends a part goes on across colons.

Values that replace variables hold no wildcards. BinaryEquals, and dates without a time, are unknown here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from ipaddress import ip_address, ip_network
from operator import eq, ge, gt, le, lt
from typing import Any, Literal

Context = Mapping[str, str | list[str]]
Kind = Literal["exact", "any", "arn", "resource"]
Lookup = Callable[[str], str | None]
"""Returns the value of a variable, None if it has none. A policy of the version 2008-10-17 has no variables."""
Test = Callable[[str], bool]
Maker = Callable[[str, Lookup | None], Test]


def require(condition: object, message: str) -> None:
    """Raise ValueError with a message unless a condition is true."""
    if not condition:
        raise ValueError(message)


def values(value: object) -> list[str]:
    """Return a JSON string, number or boolean, or a list of these, as strings."""
    each = value if isinstance(value, list) else [value]
    require(each and all(isinstance(one, str | int | float) for one in each), f"{value!r} is not a list of strings")
    return [one if isinstance(one, str) else json.dumps(one) for one in each]


def variable(context: Context, name: str) -> str | None:
    """Return the value of a variable; None if it has neither a value nor a default.

    Args:
        context: The request's, with keys in lower case.
        name: What stands between the braces.
    """
    if name in ("*", "?", "$"):
        return name
    match = re.fullmatch(r"([^,']+)(?:, '([^']*)')?", name)
    value = context.get(match[1].lower()) if match else []
    if match is None or isinstance(value, list):
        raise ValueError(f"${{{name}}} is not a variable with one value")
    return value or match[2]


def pattern(text: str, lookup: Lookup | None, kind: Kind, flags: int = 0) -> Test:
    """Return the test that a policy's string stands for. With a variable that has no value it matches nothing."""
    tokens = list(re.finditer(r"\$\{[^{}]*\}|[*?]|\$(?!\{)|[^*?$]+" if lookup else r"[*?]|[^*?]+", text))
    require("".join(token[0] for token in tokens) == text, f"{text!r} has a variable that does not end")
    regex, colons, valued = "", 0, True
    for token in tokens:
        if lookup and token[0].startswith("${"):
            value = lookup(token[0][2:-1])
            valued = valued and value is not None
            regex += re.escape(value or "")
        elif token[0] in ("*", "?") and kind != "exact":
            ends_part = token[0] == "*" and text[token.end() :][:1] in ("", ":")
            anything = kind == "any" or (kind == "arn" and colons >= 5) or (kind == "resource" and ends_part)
            regex += ("." if anything else "[^:]") + token[0].replace("?", "")
        else:
            colons += token[0].count(":")
            regex += re.escape(token[0])
    require(kind != "arn" or (text.startswith("arn:") and colons >= 5), f"{text!r} has not the six parts of an ARN")
    return lambda value: valued and re.fullmatch(regex, value, flags | re.DOTALL) is not None


def _like(kind: Kind, flags: int = 0) -> Maker:
    return lambda text, lookup: pattern(text, lookup, kind, flags)


def _compared(form: str, read: Callable[[str], Any], compare: Callable[[Any, Any], bool]) -> Maker:
    def parsed(text: str) -> Any:
        require(re.fullmatch(form, text), f"{text!r} does not have the form {form}")
        return read(text)

    def make(text: str, _lookup: Lookup | None) -> Test:
        bound = parsed(text)
        return lambda value: compare(parsed(value), bound)

    return make


def _moment(text: str) -> datetime:
    return datetime.fromtimestamp(int(text), UTC) if text.isdigit() else datetime.fromisoformat(text)


def _within(text: str, _lookup: Lookup | None) -> Test:
    require("/" in text or ":" not in text, f"{text!r} needs a prefix: the documented default, /32, is not for IPv6")
    network = ip_network(text)
    return lambda value: ip_address(value) in network


_NUMBER = r"[+-]?\d+(\.\d+)?"
_DATE = r"\d{5,}|\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)"  # seconds since 1970, or ISO 8601
_ORDER = {"LessThan": lt, "LessThanEquals": le, "GreaterThan": gt, "GreaterThanEquals": ge}
_EQUAL: dict[str, Maker] = {
    "StringEquals": _like("exact"),
    "StringEqualsIgnoreCase": _like("exact", re.IGNORECASE),
    "StringLike": _like("any"),
    "ArnEquals": _like("arn"),
    "ArnLike": _like("arn"),
    "NumericEquals": _compared(_NUMBER, Decimal, eq),
    "DateEquals": _compared(_DATE, _moment, eq),
}
_BOOL = _compared("true|false", str, eq)
_NEGATED = {re.sub("Equals|Like", r"Not\g<0>", name, count=1): make for name, make in _EQUAL.items()}
_NEGATED["NotIpAddress"] = _within
_OPERATORS: dict[str, Maker] = {
    **_EQUAL,
    **_NEGATED,
    "Bool": _BOOL,
    "IpAddress": _within,
    **{f"Numeric{name}": _compared(_NUMBER, Decimal, compare) for name, compare in _ORDER.items()},
    **{f"Date{name}": _compared(_DATE, _moment, compare) for name, compare in _ORDER.items()},
}


def action(text: str) -> Test:
    """Return the test that a string of Action or NotAction stands for."""
    require(re.fullmatch(r"\*|[\w-]+:[\w*?]+", text), f"{text!r} is not an action such as ec2:Describe*")
    return pattern(text, None, "any", re.IGNORECASE)


def resource(text: str, lookup: Lookup | None) -> Test:
    """Return the test that a string of Resource or NotResource stands for: no wildcard may stand for the service.

    Variables may stand after the fifth colon.
    """
    form = r"arn:[^:$]+:[^:*?$]+:[^:$]*(:[^:$]*(:.*)?)?" if lookup else r"arn:[^:]+:[^:*?]+:.*"
    require(re.fullmatch(rf"\*|{form}", text, re.DOTALL), f"{text!r} is not an ARN that Resource may have")
    return pattern(text, lookup, "resource")


def meets(context: Context, conditions: Mapping[str, Mapping[str, Any]], lookup: Lookup | None) -> bool:
    """Return True if a context, with keys in lower case, meets all conditions of a statement."""
    known = isinstance(conditions, Mapping) and all(isinstance(keys, Mapping) for keys in conditions.values())
    require(known, f"{conditions} are not conditions")
    met = [
        _holds(operator, context.get(key.lower()), values(wanted), lookup)
        for operator, keys in conditions.items()
        for key, wanted in keys.items()
    ]
    return all(met)


def _holds(operator: str, found: str | list[str] | None, wanted: list[str], lookup: Lookup | None) -> bool:
    """Return True if a condition on one key holds. `found` is the context's value; None if the key is missing."""
    given = [] if found is None else found if isinstance(found, list) else [found]
    if operator == "Null":
        same = [_BOOL(each, None)(json.dumps(not any(given))) for each in wanted]
        return any(same)
    match = re.fullmatch(r"(?:(ForAllValues|ForAnyValue):)?(\w+?)(IfExists)?", operator)
    if not match or match[2] not in _OPERATORS:
        raise ValueError(f"{operator!r} is not a condition operator that this evaluator knows")
    quantifier, name, if_exists = match.groups()
    tests = [_OPERATORS[name](each, lookup) for each in wanted]
    require(
        quantifier or not isinstance(found, list), f"{operator} needs ForAllValues: or ForAnyValue: to test {found}"
    )
    if found is None and if_exists:
        return True
    if quantifier and not any(given):  # the key is missing, or its values are empty
        return bool(quantifier == "ForAllValues")
    if found is None:
        return name in _NEGATED
    met = [any(test(value) for test in tests) != (name in _NEGATED) for value in given]
    return any(met) if quantifier == "ForAnyValue" else all(met)
