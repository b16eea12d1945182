"""Functions that check an image's fields, and `Spec`, which holds the checked fields.

Equal input gives an equal `Spec`. The functions raise ImageError for values that are not valid. Their arguments `name`
(the name of the field) and `such_as` (an example of a valid value) are for its message.
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
"""The most bytes of one environment variable, counted as NAME=VALUE. Linux starts no program with a longer one."""
_MOST_IN_ALL = 1_000_000
"""The most characters of all variables of an image together. Linux allows 2 MB for variables and arguments."""
_NO_PROGRAM = "with which Linux starts no program"
_AS_FILE = "send it as a file, with files={'data.txt': …}"
_PYTHON = re.compile(r"3\.(\d{1,2})")
_NEWEST = 14
"""The newest minor version of Python 3 when this was written. A newer one is refused, unless the client has it."""
_VERSION = re.compile(r"\d+(\.\d+){0,3}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PACKAGE = re.compile(r"[a-z0-9]([a-z0-9+.-]*[a-z0-9+.])?(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+)?")
_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(\[[^\]]*\])?\s*(.*)", re.DOTALL)
_RANGE = re.compile(r"\(?\s*((~=|===?|!=|<=?|>=?)\s*[A-Za-z0-9.*+!_-]+\s*(,\s*|(?=\)|$)))+\)?")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class Spec:
    """The fields of an `Image`, checked and normalized. A mapping is stored as sorted pairs of key and value.

    Each field has the name and the meaning of the argument of `Image`, except:

    Attributes:
        secrets: the names of all secrets, without values.
        given: pairs of name and value of the secrets whose values were given to `Image`, not read from the client's
            environment. The values appear in no text and in no hash.
    """

    python: str = "auto"
    pip: tuple[str, ...] = ()
    requirements: str | None = None
    pyproject: str | None = None
    lock: str | None = None
    project: str | None = None
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
    """Check that a value is a text, and return it without surrounding white space.

    A text must not be blank, nor contain a NUL or another character that no file on the node can hold. The message of
    ImageError has `name`, the image's field, and `such_as`, an example of a valid value.
    """
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ImageError(f"{name} must be text such as {such_as}, not {value!r}")
    _check_encodable(name, value)
    return value.strip()


def _check_encodable(name: str, value: str) -> None:
    """Raise ImageError for a surrogate character, unless Python made it from a byte of a file name that is no UTF-8."""
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as e:
        raise ImageError(f"{name} contains the surrogate {e.object[e.start]!r}, which no file can hold") from None


_BETWEEN = re.compile(r"\s*,\s*(?=[A-Za-z])|\s+")
"""Pattern of a separator between requirements: white space, or a comma before a letter (unlike in ">=2,<3")."""


def texts(name: str, value: object, such_as: str) -> tuple[str, ...]:
    """Check a list of texts, and return them in their order without surrounding white space. Duplicates are kept.

    A single string counts as a list of one. Bytes, mappings and blank texts are refused with ImageError. For its
    message, `name` is the image's field, and `such_as` an example of a valid value.
    """
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise ImageError(f"{name} must be a list such as [{such_as}], not {value!r}")
    return tuple(text(f"{name}[{n}]", each, such_as) for n, each in enumerate(value))


def once(name: str, value: object, such_as: str) -> tuple[str, ...]:
    """Check a list of texts, and return them in their order without surrounding white space and without duplicates.

    A single string counts as a list of one. Bytes, mappings and blank texts are refused with ImageError. For its
    message, `name` is the image's field, and `such_as` an example of a valid value.
    """
    return tuple(dict.fromkeys(texts(name, value, such_as)))


def path(name: str, value: object, such_as: str) -> str | None:
    """Check a path, and return it as text; None stays None. The path need not exist.

    The message of ImageError has `name`, the image's field, and `such_as`, an example of a valid value.
    """
    if value is None:
        return None
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return text(name, value, such_as)


def python_asked(value: object) -> str:
    """Check the field `python`, and return "auto" or the client's minor version such as "3.11".

    No other version is accepted, because functions are sent to nodes as bytecode.
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
    """Check that a node can install a requirement, such as "torch>=2.5", and return it.

    A requirement is a name, perhaps with a version range, or a URL. Options of pip, local files and URLs with a
    password are refused.
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
    """Return a URL, or a requirement "NAME @ URL", unchanged. Raise ImageError if the URL contains a password.

    A variable such as ${TOKEN} in place of the password is accepted. `name` is the image's field, for the message.
    """
    parts = urlsplit(url.partition("@")[2].strip() if not _URL.match(url) else url)
    if parts.password and not parts.password.startswith("${"):
        raise ImageError(
            f"{name}: the URL of {parts.hostname} contains a password, which everybody who reads the image would see; "
            "write a variable such as ${TOKEN} in its place, and add its name to secrets="
        )
    return url


def indexes_asked(value: object) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Check the field `pip_indexes`, and return it as pairs (URL of an index, requirements), sorted by URL.

    A URL with a password is refused. So is a package that is to come from two indexes.
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
    """Check the field `apt`, and return the packages, each NAME or NAME=VERSION, in order without duplicates."""
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
    """Check a mapping of environment variables, and return pairs of name and value, sorted by name.

    Refused are names that begin with "SKYPOOL_", and values that contain a NUL or a surrogate. A variable may have
    131,071 bytes, and all together 1,000,000 characters. `name` is the image's field, for the message of ImageError.
    If it is "secrets", the message shows no value.
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
    """Raise ImageError if an environment variable is so long that Linux starts no program with it.

    The limit is 131,071 bytes for "VARIABLE=VALUE". `name` is the image's field, for the message.
    """
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
    """Check the field `secrets`. Return the sorted names of all secrets, and pairs (name, value) of the given values.

    `value` is a list of names, for which there are no pairs, or a mapping of names to values.
    """
    if isinstance(value, Mapping):
        given = variables("secrets", value)
        return tuple(key for key, _ in given), given
    return tuple(sorted(_variable("secrets", each) for each in once("secrets", value, "'HF_TOKEN'"))), ()


def files_asked(value: object) -> tuple[tuple[str, str | bytes], ...]:
    """Check the field `files`, and return pairs (place on the node, local path or bytes), sorted by place.

    A place that ends with "/" is a folder: the local file's name is appended. Local files need not exist yet.
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

    ImageError is raised for a place with ".." or a line break, in another user's home, or that can only be a folder,
    such as "/".
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
    """Check the globs of "include" or "exclude", and return them in order without duplicates.

    Globs must not lead out of the project's folder. In "include", "**" must stand alone between slashes: "a**" is
    refused.
    """
    patterns = once(name, value, "'src', '*.py', 'data/**'")
    for each in patterns:
        if each.startswith(("/", "~")) or ".." in each.split("/"):
            raise ImageError(f"{name} takes paths in the project's folder such as 'src/**', not {each!r}")
        if name == "include" and any("**" in part and part != "**" for part in each.split("/")):
            raise ImageError(f"include: ** must stand alone between slashes, as in 'src/**/*.py', unlike in {each!r}")
    return patterns


def base_asked(value: object) -> str | Pairs | None:
    """Check the field `base`: an image for all providers, a mapping (returned as sorted pairs) by provider, or None."""
    such_as = "'ubuntu-24.04' or {'aws': 'ami-0abc'}"
    if isinstance(value, Mapping):
        return tuple(sorted((text("base", k, such_as), text(f"base[{k!r}]", v, such_as)) for k, v in value.items()))
    return value if value is None else text("base", value, such_as)


def version(name: str, value: object, such_as: str) -> str | None:
    """Check a version of one to four numbers with dots, such as "12.8", and return it. None stays None.

    The message of ImageError has `name`, the image's field, and `such_as`, an example of a valid value.
    """
    if value is None:
        return None
    if not isinstance(value, str) or not _VERSION.fullmatch(value):
        raise ImageError(f"{name} must be a version such as {such_as!r}, not {value!r}")
    return value
