"""Replaces private data in the requests and replies of a provider: secrets, account numbers, names, addresses.

A `Scrubber` replaces each private value by a placeholder, and keeps a table of them, so that the same value always gets
the same placeholder. A value is recognised as private in three ways:

- by its form, such as an e-mail address or a private key;
- by the name of the field that holds it, such as "password";
- because it was named before, by `Scrubber.hide`: the credentials of requests, for example.

Texts are searched also where they are encoded: as base64, compressed in base64, in URLs, in XML, with the escapes of
JSON, or as JSON in a string. A `Private` object has the patterns and names of fields of one provider.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import html
import ipaddress
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

from skypool.drivers.request_hooks import Kind, Private
from skypool.proof.placeholders import placeholder
from skypool.safety.encodings import ENCODINGS, base64_parts, bytes_of

_DEEPEST = 8
"""How often text within a text may be encoded, such as base64 in JSON in base64. Beyond that, it is removed."""

_REMEMBERED = 50_000
"""The most texts whose results are remembered. Lists of prices have the same texts thousands of times."""

_SHORTEST = 6
"""If the value of a private field has at least this many characters, it is also replaced in other texts."""

_FRAGMENT = 8
"""The least number of base64 characters of a hidden value that are searched for in longer base64 texts."""

_BIGGEST = 2**24
"""A compressed text that has at least this many characters is removed, because a search would take too long."""


_WORD_OF_SECRETS = r"(?:token|secret|password|passwd|passphrase|api[_-]?key|access[_-]?key|credentials?)"

_PATTERNS: Mapping[str, tuple[Kind, ...]] = {
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----(.*?)(?:-----END|\Z)": ("private-key",),
    # a URL that is signed, or has a password
    r"(?i)\bhttps?://[^\s\"'<>?\\]+\?[^\s\"'<>\\]*(?:signature|credential|[?&]sig)=[^\s\"'<>\\]*": ("url",),
    r"://([^/\s:@\"']+):([^/\s@\"']+)@": ("person", "secret"),
    # a public SSH key, and its comment
    r"\b(AAAA[BCEGI][0-9A-Za-z+/]{40,})={0,2}(?: +([A-Za-z][\w.+-]{2,})(?![\w@.+-]))?": (
        "ssh-key",
        "person",
    ),
    # tokens that tell what they are
    r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?": ("secret",),
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-|pypi-|npm_|dop_v1_)([A-Za-z0-9_-]{16,})": ("secret",),
    r"(?i)\b(?:bearer|basic) +([A-Za-z0-9._~+/=-]{8,})": ("secret",),
    rf"(?i){_WORD_OF_SECRETS}[\"']?\s*[=:]\s*[\"']?(?!(?:null|none|true|false)\b)([^\s\"'&;,<>{{}}()$\\]{{4,}})": (
        "secret",
    ),
    r"(?i)\b(?:balance|credit)\b[^\d\n]{0,20}?(\d+\.\d+)": ("money",),
    r"(?<![\w.+@-])[A-Za-z0-9][\w.+-]*@(?!sha256:)(?:\*|[A-Za-z0-9][\w-]*(?:\.[\w-]+)*)": ("email",),
    r"(?<![\w.-])(?:\d{1,3}\.){3}\d{1,3}(?![\w-]|\.\d)": ("address",),
    r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])": ("address",),
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SECRETS = """
    accesstoken apikey authorization clientid clientsecret cookie passphrase passwd password privatekey secret
    secretaccesskey secretkey setcookie signature
"""
_ACCOUNTS = "account accountid customerid ownerid subscriptionid userid useruuid"
_PERSONS = "firstname fullname lastname login owner phone phonenumber user username"
_AMOUNTS = "balance clientbalance credit creditbalance currentspendperhr spendlimit"

_FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys(_words(_SECRETS), "secret"),
    **dict.fromkeys(_words(_ACCOUNTS), "account"),
    **dict.fromkeys(_words(_PERSONS), "person"),
    **dict.fromkeys(_words(_AMOUNTS), "money"),
    **dict.fromkeys(_words("project projectid"), "project"),
    "projectnumber": "account",
}
"""Names of fields in small letters without "-" and "_", and the kinds of their private values."""

_ENDS: tuple[tuple[str, Kind], ...] = (
    ("password", "secret"),
    ("secret", "secret"),
    ("apikey", "secret"),
    ("secretkey", "secret"),
    ("token", "secret"),
    ("accountid", "account"),
    ("ownerid", "account"),
    ("userid", "account"),
    ("owner", "person"),
    ("username", "person"),
    ("email", "email"),
)
"""Ends of the names of fields, and the kinds of private values that such fields have."""

_PUBLIC = _words("aftertoken clienttoken continuationtoken nextpagetoken nexttoken pagetoken skypooltoken")
"""Names of fields whose values are no secrets, although the names end like those of secrets."""

_PEOPLE = _words("balance clientbalance credit email username")
"""Names of fields that only an object about a person has. Its id and its name are private then."""

_VARIABLES = _words("env environment extraenv variables")
"""Names of fields that hold environment variables."""

_COMMON = _words("admin anonymous debian default nobody root self ubuntu user users")
"""User names that are no secret, and occur in many other texts."""

_SENSITIVE_HEADER = re.compile(r"(?i)token|key|secret|cookie|password|session")

_CREDENTIALS = re.compile(r"(?i)(?:bearer|basic|token|apikey) +(\S{8,})")

_RANDOM = re.compile(r"(?=[^\d]*\d)(?=.*[A-Za-z])[\w.~+/=-]{16,200}")
"""Matches a value that looks random: at least 16 letters and digits without a space."""

_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{16,}={0,2}")

_LEAF = re.compile(r"<([\w:.-]+)((?:\s[^<>]*)?)>([^<]+)</\1>")
"""Matches an element of XML that holds text only."""

_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})|\\([\"'/\\])")

_FORM = re.compile(r"[\w.%~\[\]-]+=[^&\s]*(?:&[\w.%~\[\]-]+=[^&\s]*)*")

_SAFE = "/:?&=+,;@~$!*'()[]"
"""Characters that stay as they are when a text is encoded for a URL again."""


class Scrubber:
    """A table of private values and their placeholders, and the search for such values in texts.

    The object is not safe for use by several threads at the same time. In all methods, `private` has the patterns and
    fields of the provider, and `depth` is how many encodings around the text were decoded already.

    Args:
        hidden: private values that are searched for in every text, also where they are encoded.
    """

    def __init__(self, hidden: Iterable[str] = ()) -> None:
        self._made: dict[str, str] = {}  # from private value to placeholder
        self._issued: set[str] = set()  # all placeholders
        self._counts: dict[str, int] = {}
        self._words: dict[str, str] = {}  # values of fields that are also replaced in other texts
        self._hidden: dict[str, str] = {}  # from each encoding of a hidden value to what replaces it
        self._fragments: dict[str, str] = {}  # the same for base64 in which such a value stands
        self._known: dict[tuple[Private, str], str] = {}  # results of earlier searches
        for each in hidden:
            self.hide(each)

    # --- what is private -------------------------------------------------------------------------------------

    def hide(self, value: str, kind: Kind = "secret") -> None:
        """Replace a value in every text from now on, by a placeholder for `kind`. Ignores values under 4 characters."""
        if len(value) < 4 or value in self._hidden or value in self._issued:
            return
        made = self._placeholder(kind, value)
        for encode in (*ENCODINGS, _labelled):
            self._hidden.setdefault(encode(value), encode(made))
        for encoded in base64_parts(value):
            if len(encoded) < _FRAGMENT:
                continue
            self._fragments.setdefault(encoded, "0" * len(encoded))
        self._known.clear()

    def hide_credentials(self, headers: Mapping[str, str]) -> None:
        """Find the credentials in the headers of a request, and replace them in every text from now on."""
        for name, value in headers.items():
            if found := _CREDENTIALS.fullmatch(value):
                self.hide(found[1])
            elif _SENSITIVE_HEADER.search(name) and len(value) >= 8:
                self.hide(value)

    # --- texts -----------------------------------------------------------------------------------------------

    def body(self, text: str, private: Private) -> str:
        """Return the body of a request or a reply with placeholders in place of private values.

        JSON, XML and forms stay valid. A text in which nothing is private is returned unchanged. `private` says what is
        private at this provider.
        """
        start = text.lstrip()[:1]
        if start in ("{", "["):
            if (changed := self._json(text, private, 0)) is not None:
                return changed
        elif start == "<":
            return self._xml(text, private)
        elif _FORM.fullmatch(text):
            return self._form(text, private)
        return self.text(text, private)

    def url(self, url: str, private: Private) -> str:
        """Return the path and the query of a URL with placeholders in place of private values.

        `private` says what is private at this provider.
        """
        path, mark, query = url.partition("?")
        return self.text(path, private) + mark + (self._form(query, private) if query else "")

    def text(self, text: str, private: Private, depth: int = 0) -> str:
        """Return a text with placeholders in place of private values, also those that are encoded in it.

        `private` says what is private at this provider. `depth` counts the encodings around the text that were decoded
        already. Text at a depth above 8 becomes "removed".
        """
        if len(text) < 3:  # too short for all
            return text
        if depth > _DEEPEST:
            return "removed"
        key = (private, text)
        if (known := self._known.get(key)) is not None:
            return known
        made = self._plain(text, private)
        for view in (_in_escapes, _in_url, _in_html):
            made = view(made, lambda inner: self._inner(inner, private, depth + 1))
        made = _BASE64.sub(lambda run: self._in_base64(run[0], private, depth), made)
        for encoded, instead in self._fragments.items():  # last, as texts that could be decoded stay readable
            if encoded in made:
                made = made.replace(encoded, instead)
        if len(self._known) < _REMEMBERED and len(text) < 1000:
            self._known[key] = made
        return made

    def _inner(self, text: str, private: Private, depth: int) -> str:
        """Return a text that was encoded in another one, with placeholders."""
        if text.lstrip()[:1] in ("{", "["):
            changed = self._json(text, private, depth)
            if changed is not None:
                return changed
        return self.text(text, private, depth)

    def _plain(self, text: str, private: Private) -> str:
        """Return a text with placeholders for values that were found private before, or whose form is private."""
        for encoded, instead in self._hidden.items():
            if encoded in text:
                text = text.replace(encoded, instead)
        for pattern, kinds in _compiled(private):
            text = pattern.sub(lambda found, kinds=kinds: self._matched(found, kinds), text)  # type: ignore[misc]
        if self._words:
            text = re.sub(r"[A-Za-z0-9][\w-]+", lambda word: self._words.get(word[0], word[0]), text)
        return text

    def _matched(self, found: re.Match[str], kinds: tuple[Kind, ...]) -> str:
        """Return the text of a match with its groups replaced. A pattern without groups gives one placeholder."""
        if not found.re.groups:
            return self._placeholder(kinds[0], found[0])
        text, offset = found[0], found.start()
        for number in range(len(kinds), 0, -1):
            value = found[number]
            if value:
                start, end = found.start(number) - offset, found.end(number) - offset
                text = text[:start] + self._learned(kinds[number - 1], value) + text[end:]
        self._issued.add(text)  # a later pattern that matches the same text leaves it
        return text

    def _in_base64(self, run: str, private: Private, depth: int) -> str:
        """Return a run of base64 characters, with placeholders if private text is encoded in it, compressed or not."""
        bare = run.rstrip("=")
        for offset in range(4):
            coded = bare[offset:]
            coded = coded[: len(coded) - (len(coded) % 4 == 1)]
            urlsafe = "-" in coded or "_" in coded
            try:
                data = base64.b64decode(coded + "=" * (-len(coded) % 4), b"-_" if urlsafe else None, validate=True)
            except (binascii.Error, ValueError):
                continue
            packed = data[:2] == b"\x1f\x8b"
            text = _text_of(data, packed)
            if text is None:
                continue
            if len(text) >= _BIGGEST:
                return "removed"
            changed = self._inner(text, private, depth + 1)
            if changed != text:
                data = gzip.compress(changed.encode(), mtime=0) if packed else changed.encode()
                made = base64.b64encode(data, b"-_" if urlsafe else None).decode()
                return bare[:offset] + (made if run != bare or packed or not offset else made.rstrip("="))
        return run

    # --- structures ------------------------------------------------------------------------------------------

    def _json(self, text: str, private: Private, depth: int) -> str | None:
        """Return JSON text with placeholders, the text itself if nothing is private, or None if it is not JSON."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        changed = self._walk(value, "", private, depth)
        return text if changed == value else json.dumps(changed, ensure_ascii=False)

    def _walk(self, value: Any, name: str, private: Private, depth: int) -> Any:
        """Return a value of JSON with placeholders. `name` is the field that holds it, "" for none."""
        match value:
            case dict():
                return self._object(value, _normal(name) in _VARIABLES, private, depth)
            case [str(key), str()] if _normal(name) in _VARIABLES:
                return [key, self._variable(key, value[1], private, depth)]
            case list():
                return [self._walk(each, name, private, depth) for each in value]
            case str():
                return self._field(name, value, private, depth)
            case bool() | None:
                return value
            case _:
                return self._number(name, value, private)

    def _object(self, value: Mapping[str, Any], variables: bool, private: Private, depth: int) -> dict[str, Any]:
        """Return an object of JSON with placeholders. `variables` is True if it holds environment variables."""
        names = {_normal(key) for key in value}
        person = not names.isdisjoint(_PEOPLE | private.accounts)
        label = next((value[key] for key in ("key", "Key", "name", "Name") if isinstance(value.get(key), str)), "")
        made: dict[str, Any] = {}
        for key, inner in value.items():
            normal = _normal(key)
            if person and normal in ("id", "name") and isinstance(inner, (str, int)):
                new = self._learned("account" if normal == "id" else "person", str(inner))
                made[key] = int(new) if isinstance(inner, int) else new
            elif variables and isinstance(inner, str) and not (label and normal in ("key", "name")):
                made[key] = self._variable(label if normal == "value" else key, inner, private, depth)
            elif normal == "value" and label and len(value) <= 3:
                made[key] = self._walk(inner, label, private, depth)
            else:
                made[self.text(key, private, depth)] = self._walk(inner, key, private, depth)
        return made

    def _field(self, name: str, value: str, private: Private, depth: int) -> str:
        """Return a field's value with placeholders, or as one placeholder if the field's name says it is private."""
        kind = _kind(name, private)
        if kind is None or not value or value.lower() in _COMMON:
            return self._inner(value, private, depth) if value else value
        if kind == "money":
            return self._placeholder(kind, value) if _is_number(value) else self.text(value, private, depth)
        return self._learned(kind, value)

    def _variable(self, name: str, value: str, private: Private, depth: int) -> str:
        """Return the value of an environment variable with placeholders. A value that looks random is private."""
        made = self._field(name, value, private, depth)
        if made == value and _RANDOM.fullmatch(value) and _text_of_base64(value) is None:
            return self._learned("secret", value)
        return made

    def _number(self, name: str, value: float, private: Private) -> int | float:
        kind = _kind(name, private)
        text = str(value)
        if kind == "money" or (kind is not None and isinstance(value, int)):
            made = self._placeholder("money" if kind == "money" else "account", text)
        elif isinstance(value, int) and len(text) >= _SHORTEST:
            made = self.text(text, private)
        else:
            return value
        return type(value)(made) if _is_number(made) else value

    def _xml(self, text: str, private: Private) -> str:
        """Return XML with placeholders in the texts of its elements."""

        def element(found: re.Match[str]) -> str:
            name, attributes, inner = found[1], found[2], found[3]
            plain = html.unescape(inner)
            made = self._field(name, plain, private, 0)
            told = inner if made == plain else html.escape(made, quote=False)
            return f"<{name}{self.text(attributes, private)}>{told}</{name}>"

        parts: list[str] = []
        end = 0
        for found in _LEAF.finditer(text):
            parts += [self.text(text[end : found.start()], private), element(found)]
            end = found.end()
        return "".join([*parts, self.text(text[end:], private)])

    def _form(self, text: str, private: Private) -> str:
        """Return a query or a form with placeholders: "a=1&b=2"."""
        pairs = parse_qsl(text, keep_blank_values=True)
        made = [(self.text(name, private), self._field(_last_word(name), each, private, 0)) for name, each in pairs]
        return text if made == pairs else urlencode(made)

    # --- the table -------------------------------------------------------------------------------------------

    def _learned(self, kind: Kind, value: str) -> str:
        """Return the placeholder of a value, and replace the value in other texts from now on."""
        made = self._placeholder(kind, value)
        searched = len(value) >= _SHORTEST and value not in self._words and value.lower() not in _COMMON
        if made != value and searched and kind != "money" and re.fullmatch(r"[A-Za-z0-9][\w-]+", value):
            self._words[value] = made
            self._known.clear()
        return made

    def _placeholder(self, kind: Kind, value: str) -> str:
        """Return the placeholder of a value; the value itself if it is a placeholder or a non-public address."""
        if value in self._issued or (kind == "address" and not self._is_public(value)):
            return value
        if value not in self._made:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            made = placeholder(kind, number, value)
            self._made[value] = made
            self._issued.add(made)
        return self._made[value]

    def _is_public(self, address: str) -> bool:
        """Return True if a text is an IP address that can be reached from anywhere."""
        try:
            return ipaddress.ip_address(address).is_global
        except ValueError:
            return False


# --- helpers -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _compiled(private: Private) -> list[tuple[re.Pattern[str], tuple[Kind, ...]]]:
    """Return the compiled patterns of one provider, followed by those that apply to all providers."""
    both = [*private.patterns.items(), *_PATTERNS.items()]
    return [(re.compile(pattern, re.DOTALL), kinds) for pattern, kinds in both]


@lru_cache(maxsize=4096)
def _normal(name: str) -> str:
    """Return the letters of a field's name, in lower case."""
    return re.sub(r"[^a-z]", "", name.lower())


def _last_word(name: str) -> str:
    """Return the last part of a form field's name that is not a number: "Value" for "Filter.1.Value.2"."""
    words = [each for each in name.split(".") if not each.isdigit()]
    return words[-1] if words else name


def _kind(name: str, private: Private) -> Kind | None:
    """Return the kind of private value that a field of this name holds; None if the name does not suggest one."""
    normal = _normal(name)
    if not normal or normal in _PUBLIC:
        return None
    for fields in (private.fields, _FIELDS):
        if normal in fields:
            return fields[normal]
    return next((kind for end, kind in _ENDS if normal.endswith(end)), None)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _text_of(data: bytes, packed: bool) -> str | None:
    """Return the text that bytes encode, compressed by gzip if `packed`; None if they are no text."""
    try:
        if packed:
            data = zlib.decompressobj(wbits=31).decompress(data, _BIGGEST)
        text = data.decode()
    except (UnicodeDecodeError, zlib.error):
        return None
    return text if text and all(each.isprintable() or each in "\r\n\t" for each in text) else None


def _text_of_base64(value: str) -> str | None:
    """Return the text that a base64 text encodes, compressed or not; None if it encodes none."""
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return None
    return _text_of(data, data[:2] == b"\x1f\x8b")


def _labelled(value: str) -> str:
    """Encode a text for a provider's label: each byte but a-z, 0-9 and "-" becomes "_" and two hex digits."""
    return re.sub("[^a-z0-9-]", lambda found: "".join(f"_{byte:02x}" for byte in bytes_of(found[0])), value)


Inner = Callable[[str], str]
"""A function that gets a decoded text, and returns it with placeholders."""


def _in_escapes(text: str, scrub: Inner) -> str:
    r"""Return a text with placeholders, also for values with escapes such as "\u0041". A change drops all escapes."""
    if "\\" not in text:
        return text
    plain = _ESCAPE.sub(lambda found: chr(int(found[1] or found[2], 16)) if not found[3] else found[3], text)
    made = scrub(plain) if plain != text else plain
    return text if made == plain else made


def _in_url(text: str, scrub: Inner) -> str:
    """Return a text with placeholders, also for values that are encoded for a URL. A changed text is encoded again."""
    if "%" not in text:
        return text
    plain = unquote(text)
    made = scrub(plain) if plain != text else plain
    return text if made == plain else quote(made, safe=_SAFE)


def _in_html(text: str, scrub: Inner) -> str:
    """Return a text with placeholders, also for values with HTML entities. A changed text is encoded again."""
    if "&" not in text or ";" not in text:
        return text
    plain = html.unescape(text)
    made = scrub(plain) if plain != text else plain
    return text if made == plain else html.escape(made)
