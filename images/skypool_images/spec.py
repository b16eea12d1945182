"""Functions that check an image's fields, and `Spec`, which holds the checked fields.

Equal input gives an equal `Spec`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from skypool_images.errors import ImageError

Pairs = tuple[tuple[str, str], ...]
"""A mapping of texts to texts, as pairs of key and value, sorted by key."""

_LONGEST_VARIABLE = (128 << 10) - 1
"""The most bytes of a variable, with its name and "=", with which Linux starts a program (MAX_ARG_STRLEN)."""
_MOST_IN_ALL = 1_000_000
"""The most characters of all variables. Linux allows 2 MB for these and the arguments of a program."""
_NO_PROGRAM = "with which Linux starts no program"
_AS_FILE = "send it as a file, with files={'data.txt': …}"
_PYTHON = re.compile(r"3\.(\d{1,2})")
_NEWEST = 14
"""Newest minor version of Python 3 when this was written. The client's own version is always accepted."""
_VERSION = re.compile(r"\d+(\.\d+){0,3}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PACKAGE = re.compile(r"[a-z0-9]([a-z0-9+.-]*[a-z0-9+.])?(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+)?")
_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(\[[^\]]*\])?\s*(.*)", re.DOTALL)
_RANGE = re.compile(r"\(?\s*((~=|===?|!=|<=?|>=?)\s*[A-Za-z0-9.*+!_-]+\s*(,\s*|(?=\)|$)))+\)?")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class Spec:
    """The fields of an `Image`, checked and normalized. A mapping is stored as sorted pairs of key and value.

    The class `Image` describes the fields that are not listed here.

    Attributes:
        secrets: the names of all secrets, without values.
        given: pairs of name and value for the secrets with directly given values. The values appear in no text and in
            no hash.
    """

    python: str = "auto"
    pip: tuple[str, ...] = ()
    requirements: str | None = None
    pyproject: str | None = None
    lock: str | None = None
    pip_indexes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    apt: tuple[str, ...] = ()
    env: Pairs = ()
    secrets: tuple[str, ...] = ()
    files: tuple[tuple[str, str | bytes], ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    base: str | Pairs | None = None
    cuda: str | None = None
    neuron: str | None = None
    rocm: str | None = None
    mirror_local: bool = False
    folder: str = "."
    given: Pairs = field(default=(), repr=False, hash=False)


def text(name: str, value: object, such_as: str) -> str:
    """Return a value without surrounding white space, after a check that the value is a text.

    Args:
        name: name of the field, for the message.
        value: the value to check.
        such_as: example of a valid value, for the message.

    Raises:
        ImageError: the value is not a string, is empty or blank, or contains a NUL character or another character that
            no file on the node can hold.
    """
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ImageError(f"{name} must be text such as {such_as}, not {value!r}")
    _check_encodable(name, value)
    return value.strip()


def _check_encodable(name: str, value: str) -> None:
    """Raise ImageError for a surrogate, unless Python has made it of a byte that is not UTF-8: the node gets that byte.

    Args:
        name: name of the field, for the message.
        value: the text to check.
    """
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as e:
        raise ImageError(f"{name} contains the surrogate {e.object[e.start]!r}, which no file can hold") from None


_BETWEEN = re.compile(r"\s*,\s*(?=[A-Za-z])|\s+")
"""Pattern of a separator between requirements: white space, or a comma before a letter (unlike in ">=2,<3")."""


def texts(name: str, value: object, such_as: str) -> tuple[str, ...]:
    """Return several texts in their order, each without surrounding white space. A single string is a list of one.

    An empty list gives (). Duplicates are kept.

    Args:
        name: name of the field, for the message.
        value: the value to check.
        such_as: example of a valid list, for the message.

    Raises:
        ImageError: the value is not a list of texts (bytes and mappings are refused, too), or a text is empty.
    """
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise ImageError(f"{name} must be a list such as [{such_as}], not {value!r}")
    return tuple(text(f"{name}[{n}]", each, such_as) for n, each in enumerate(value))


def once(name: str, value: object, such_as: str) -> tuple[str, ...]:
    """Return several texts in their order, without duplicates. A single string counts as a list of one.

    Args:
        name: name of the field, for the message.
        value: the value to check.
        such_as: example of a valid list, for the message.

    Raises:
        ImageError: the value is not a list of texts, or a text is empty.
    """
    return tuple(dict.fromkeys(texts(name, value, such_as)))


def path(name: str, value: object, such_as: str) -> str | None:
    """Return a path as text, or None for None. The path need not exist.

    Args:
        name: name of the field, for the message.
        value: the value to check: a string or a path object.
        such_as: example of a valid value, for the message.

    Raises:
        ImageError: the value is not a path, or is empty.
    """
    if value is None:
        return None
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return text(name, value, such_as)


def python_asked(value: object) -> str:
    """Return the value of the field `python` after a check: "auto", or the client's minor version such as "3.11".

    No other version is accepted, because functions are sent to nodes as bytecode.

    Raises:
        ImageError: the value is neither "auto" nor the client's minor version.
    """
    mine = "{}.{}".format(*sys.version_info)
    if value == "auto":
        return "auto"
    found = _PYTHON.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ImageError(f"python must be 'auto' or a minor version such as '{mine}', not {value!r}")
    if not 8 <= int(found[1]) <= max(_NEWEST, sys.version_info[1]):
        raise ImageError(f"Python {value} is not available; python='auto' takes this client's version, {mine}")
    if value != mine:
        raise ImageError(
            f"python={value!r} cannot run this client's functions: they travel as bytecode, and bytecode of {mine} "
            f"does not run on {value}; run the client with Python {value}, or write python='auto'"
        )
    return found[0]


def requirement(name: str, value: str) -> str:
    """Return a requirement unchanged after a check that a node can install it: a name with a version range, or a URL.

    Args:
        name: name of the field, for the message.
        value: the requirement, such as "torch>=2.5".

    Raises:
        ImageError: the value is an option of pip, a local file, a URL with a password, or not a requirement at all.
    """
    if value.startswith("-"):
        raise ImageError(
            f"{name} takes requirements, not options of pip: {value!r}; write options into a requirements.txt and pass "
            "its path as requirements="
        )
    is_file = "://" not in value and value.partition(";")[0].strip().endswith((".whl", ".tar.gz", ".zip"))
    if is_file or value.startswith((".", "/", "~", "file:")) or "@ file:" in value:
        raise ImageError(f"{name}: {value!r} exists only on this machine; send it with files= and install it with run=")
    if _URL.match(value):
        return public(name, value)
    found = _REQUIREMENT.fullmatch(value)
    rest = found[3].partition(";")[0].strip() if found else "?"
    if rest.startswith("@") and _URL.match(rest[1:].strip()):
        return public(name, value)
    if rest and not _RANGE.fullmatch(rest):
        words = [each for each in _BETWEEN.split(value) if each]
        several = f"; did you mean {words}?" if len(words) > 1 and all(map(_REQUIREMENT.fullmatch, words)) else ""
        raise ImageError(f"{name}: {value!r} is not a requirement such as 'torch>=2.5'{several}")
    return value


def distribution(line: str) -> str:
    """Return the name of the package that a requirement asks for, such as "my-pkg" for "My_Pkg[extra]>=2".

    The name is in lower case, with dashes in place of "_" and ".". Returns "" for a URL without a name, and for text
    that is no requirement.
    """
    if _URL.match(line):
        return ""
    found = _REQUIREMENT.fullmatch(line)
    return re.sub(r"[-_.]+", "-", found[1]).lower() if found else ""


def public(name: str, url: str) -> str:
    """Return a URL unchanged after a check that the URL contains no password.

    A variable such as ${TOKEN} is accepted as a password.

    Args:
        name: name of the field, for the message.
        url: the URL, or a requirement "NAME @ URL".

    Raises:
        ImageError: the URL contains a password.
    """
    parts = urlsplit(url.partition("@")[2].strip() if not _URL.match(url) else url)
    if parts.password and not parts.password.startswith("${"):
        raise ImageError(
            f"{name}: the URL of {parts.hostname} contains a password, which everybody who reads the image would see; "
            "write a variable such as ${TOKEN} in its place, and add its name to secrets="
        )
    return url


def indexes_asked(value: object) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the value of the field `pip_indexes` as pairs of an index's URL and the requirements for this index.

    The pairs are sorted by URL.

    Raises:
        ImageError: the value is not a mapping of URLs to requirements, a URL contains a password, or one package has
            two indexes.
    """
    such_as = "{'https://download.pytorch.org/whl/cu128': ['torch']}"
    if not isinstance(value, Mapping):
        raise ImageError(
            f"pip_indexes must map the URL of an index to the packages to take from there, such as {such_as}"
        )
    seen: dict[str, str] = {}
    rows = []
    for url, names in value.items():
        if not isinstance(url, str) or not _URL.match(url):
            raise ImageError(f"pip_indexes must have URLs of indexes as keys, such as {such_as}, not {url!r}")
        packages = tuple(requirement("pip_indexes", each) for each in once(f"pip_indexes[{url!r}]", names, "'torch'"))
        for each in packages:
            other = seen.setdefault(distribution(each), url)
            if other != url:
                raise ImageError(f"pip_indexes takes {each} from two indexes: {other} and {url}; remove one of them")
        rows.append((public("pip_indexes", url), packages))
    return tuple(sorted(rows))


def packages_asked(value: object) -> tuple[str, ...]:
    """Return the value of the field `apt`: names of Debian packages without duplicates, in the given order.

    Raises:
        ImageError: a text is not a Debian package as NAME or NAME=VERSION.
    """
    packages = once("apt", value, "'git', 'ffmpeg=7:5.1.6-0+deb12u1'")
    for each in packages:
        if not _PACKAGE.fullmatch(each):
            words = each.split()
            several = f"; did you mean {words}?" if len(words) > 1 else ""
            several = several or ("; apt would remove a package whose name ends with '-'" if each.endswith("-") else "")
            raise ImageError(
                f"apt: {each!r} is not a Debian package such as 'git' or 'git=1:2.39.5-0+deb12u2'{several}"
            )
    return packages


def variables(name: str, value: object) -> Pairs:
    """Return environment variables as pairs of name and value, sorted by name.

    Args:
        name: name of the field, for the message. For "secrets" the message never shows a value.
        value: the mapping to check.

    Raises:
        ImageError: the value is not a mapping of variable names to texts, a name begins with "SKYPOOL_", or a text
            contains a NUL character or a surrogate, or is too long.
    """
    if not isinstance(value, Mapping):
        raise ImageError(f"{name} must map variables to their values, such as {{'SEED': '1'}}, not {value!r}")
    for key, each in value.items():
        _variable(name, key)
        if not isinstance(each, str):
            shown = "a value" if name == "secrets" else f"{each!r}"
            raise ImageError(f"{name}[{key!r}] must be text such as '1', not {shown} of type {type(each).__name__}")
        if "\0" in each:
            raise ImageError(f"{name}[{key!r}] contains a NUL character, which a variable cannot hold")
        _check_encodable(f"{name}[{key!r}]", each)
        check_size(name, key, each)
    if sum(len(key) + len(each) for key, each in value.items()) > _MOST_IN_ALL:
        raise ImageError(f"{name} has more than {_MOST_IN_ALL:,} characters, {_NO_PROGRAM}; {_AS_FILE}")
    return tuple(sorted(value.items()))


def check_size(name: str, variable: str, value: str) -> None:
    """Raise ImageError if an environment variable is too long for Linux to start programs."""
    size = len(f"{variable}={value}".encode(errors="surrogateescape"))
    if size > _LONGEST_VARIABLE:
        raise ImageError(
            f"{name}[{variable!r}] has {size:,} bytes with its name; with a variable of more than "
            f"{_LONGEST_VARIABLE:,}, Linux starts no program: {_AS_FILE}"
        )


def _variable(name: str, key: object) -> str:
    if not isinstance(key, str) or not _VARIABLE.fullmatch(key):
        raise ImageError(f"{name} must name variables such as 'HF_TOKEN', not {key!r}")
    if key.startswith("SKYPOOL_"):
        raise ImageError(f"{name}: {key} is one of skypool's own variables; choose another name")
    return key


def secrets_asked(value: object) -> tuple[tuple[str, ...], Pairs]:
    """Return the sorted names of secrets, and pairs of name and value for the secrets whose values were given.

    Args:
        value: names of environment variables, or a mapping of names to values. Names alone give no pairs.

    Raises:
        ImageError: a name is not valid, or a value is not text.
    """
    if isinstance(value, Mapping):
        given = variables("secrets", value)
        return tuple(key for key, _ in given), given
    return tuple(sorted(_variable("secrets", each) for each in once("secrets", value, "'HF_TOKEN'"))), ()


def files_asked(value: object) -> tuple[tuple[str, str | bytes], ...]:
    """Return the value of the field `files` as pairs of place on the node and local path or bytes, sorted by place.

    A place that ends with "/" is a folder: the local file's name is appended. Local files need not exist yet.

    Raises:
        ImageError: the value is not a mapping of places to paths or bytes, or a place is not valid.
    """
    such_as = "{'data/words.txt': 'words.txt', '~/.netrc': b'…'}"
    if not isinstance(value, Mapping):
        raise ImageError(f"files must map places on the node to local paths or bytes, such as {such_as}, not {value!r}")
    rows: list[tuple[str, str | bytes]] = []
    for target, source in value.items():
        target = text("files", os.fspath(target) if isinstance(target, os.PathLike) else target, such_as)
        if isinstance(source, (bytes, bytearray)):
            if target.endswith("/"):
                raise ImageError(f"files: {target!r} is a folder; to write bytes, add a file name to it")
            rows.append((destination(target), bytes(source)))
            continue
        if target in ("/", "./", "~/"):
            raise ImageError(f"files: {target!r} is not a place for a file; add a file name")
        local = path(f"files[{target!r}]", source, "'words.txt' or b'…'")
        if local is None:
            raise ImageError(f"files[{target!r}] must be a local path or bytes, not None")
        rows.append((destination(target + os.path.basename(local) if target.endswith("/") else target), local))
    return tuple(sorted(rows, key=lambda row: row[0]))


def destination(place: str) -> str:
    """Return the normalized path of a place on the node. The place may be relative, absolute, or below `~`.

    Raises:
        ImageError: the path contains "..", names another user's home, names no file, or contains a line break.
    """
    parts = PurePosixPath(place).parts
    if ".." in parts:
        raise ImageError(f"files: {place!r} leads out of its folder; write an absolute path without '..'")
    if place.startswith("~") and parts[0] != "~":
        raise ImageError(f"files: {place!r} is in another user's home; use '~/…', the home of the node's user")
    if str(PurePosixPath(place)) in (".", "/", "~") or "\n" in place:
        raise ImageError(f"files: {place!r} is not a place for a file; write a path such as 'data/words.txt'")
    return str(PurePosixPath(place))


def globs(name: str, value: object) -> tuple[str, ...]:
    """Return glob patterns of paths in the project's folder, in the given order and without duplicates.

    Args:
        name: name of the field, "include" or "exclude".
        value: the value to check.

    Raises:
        ImageError: a pattern leads out of the project's folder, or is not text. Also if a pattern of `include` has "**"
            next to other text without a slash between them, such as "a**".
    """
    patterns = once(name, value, "'src', '*.py', 'data/**'")
    for each in patterns:
        if each.startswith(("/", "~")) or ".." in each.split("/"):
            raise ImageError(f"{name} takes paths in the project's folder such as 'src/**', not {each!r}")
        if name == "include" and any("**" in part and part != "**" for part in each.split("/")):
            raise ImageError(f"include: ** must stand alone between slashes, as in 'src/**/*.py', unlike in {each!r}")
    return patterns


def base_asked(value: object) -> str | Pairs | None:
    """Return the value of the field `base`: an image for all providers, sorted pairs of provider and image, or None.

    Raises:
        ImageError: the value is not text, a mapping of texts, or None.
    """
    such_as = "'ubuntu-24.04' or {'aws': 'ami-0abc'}"
    if isinstance(value, Mapping):
        return tuple(sorted((text("base", k, such_as), text(f"base[{k!r}]", v, such_as)) for k, v in value.items()))
    return value if value is None else text("base", value, such_as)


def version(name: str, value: object, such_as: str) -> str | None:
    """Return a version such as "12.8" unchanged, or None for None.

    Args:
        name: name of the field, for the message.
        value: the value to check.
        such_as: example of a valid value, for the message.

    Raises:
        ImageError: the value is not a string of one to four numbers with dots.
    """
    if value is None:
        return None
    if not isinstance(value, str) or not _VERSION.fullmatch(value):
        raise ImageError(f"{name} must be a version such as {such_as!r}, not {value!r}")
    return value
