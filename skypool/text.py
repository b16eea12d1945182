"""Removes terminal control sequences from texts that nodes (rented machines), servers and programs send."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

# patterns as texts: `re` compiles each at its first use, and most processes need few of them
_ESCAPES = (
    # a control sequence, with a 7-bit or an 8-bit start
    r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]"
    # an OSC command, such as setting the title or the clipboard
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]{0,512}(?:\x07|\x1b\\|\x9c)?"
    # a string for the terminal (DCS, SOS, PM, APC)
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c\n]{0,512}(?:\x1b\\|\x9c)?"
    r"|\x1b"
)
_CONTROLS = "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
_CONTROLS_OF_FRIENDS = "[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]"
_COLOURS = r"(\x1b\[[0-9;:]{0,64}m)"
_ORDINARY = bytes([*b"\t\n\r", *range(0x20, 0x7F)])
"""The ASCII characters that `printable` keeps."""
_INTRODUCES = "[\x1b\x80-\x9f]"
_ARGUMENTS: Any = BaseException.args  # the descriptor itself, because a user's class may override the attribute
_SURROGATES = "[\ud800-\udfff]"
_UNFINISHED = r"\x1b(?:\[[0-9;:]{0,64})?\Z"


def encodable(text: str) -> str:
    r"""Return a text that UTF-8 can encode: each surrogate is written as an escape, such as "\udce9".

    Surrogates are characters that UTF-8 cannot encode. Python puts them into file names, arguments and environment
    variables that are not UTF-8. Texts from JSON may have them, too.
    """
    return text if text.isascii() else re.sub(_SURROGATES, lambda found: f"\\u{ord(found[0]):04x}", text)


def printable(text: str, colours: bool = False) -> str:
    """Return a text without escape sequences and control characters other than tab, newline and carriage return.

    Characters that change the direction of text are removed, too. Surrogates become escapes. `colours` keeps colours,
    bold, backspace and marks of text direction: pass True for nodes that may run code on the client.
    """
    if text.isascii() and not text.encode().translate(None, _ORDINARY):  # most output, which may be much
        return text
    text = encodable(text)
    if not colours:
        return re.sub(_CONTROLS, "", re.sub(_ESCAPES, "", text))
    parts = re.split(_COLOURS, text)  # every second part is a complete SGR sequence
    parts[::2] = [re.sub(_CONTROLS_OF_FRIENDS, "", re.sub(_ESCAPES, "", part)) for part in parts[::2]]
    return "".join(parts)


def plain(text: str) -> str:
    """Return a text of another machine or program without control characters other than newlines and tabs.

    A carriage return becomes a newline: on a terminal, the text after it would hide the text before it.
    """
    if text.isascii() and text.isprintable():
        return text
    return printable(text).replace("\r\n", "\n").replace("\r", "\n")


def plain_value(value: Any) -> Any:
    """Return a JSON value with `plain` applied to all of its strings and keys. Nothing else is changed."""
    if type(value) is str:
        return plain(value)
    if type(value) is list:
        return [plain_value(each) for each in value]
    if type(value) is dict:
        return {plain(name): plain_value(each) for name, each in value.items()}
    return value


def one_line(text: str, most: int) -> str:
    """Return the first `most` characters of a text as one line without control characters.

    A text with several lines could otherwise imitate lines of another node.
    """
    text = printable(text[:most])
    return text if text.isprintable() else " ".join(text.split())


def plain_error(error: BaseException) -> BaseException:
    """Remove escape sequences other than colours from the texts of an exception, in place. Return the exception.

    This is for errors from nodes that may run code on the client. The texts are the strings among the exception's
    arguments, attributes, lists of attributes, and notes, and those of its causes, contexts and group members. Strings
    inside other containers stay as they are.
    """
    change_texts(error, _harmless)
    return error


def quotable(error: BaseException) -> BaseException | None:
    """Return an exception of a library without control characters from a server, to be the cause of a skypool error.

    Control characters are removed in place from the strings among the arguments, attributes and notes of the exception,
    its causes, contexts and group members. If the `str()` of a cause still has control characters, the cause is cut
    off. If that of `error` itself still has some, the result is None.
    """
    change_texts(error, plain)
    here: BaseException | None = error
    above: BaseException | None = None
    while here is not None:
        text = str(here)
        if plain(text) != text:
            if above is None:
                return None
            above.__cause__ = above.__context__ = None
            return error
        above, here = here, here.__cause__ or (None if here.__suppress_context__ else here.__context__)
    return error


def change_texts(error: BaseException, change: Callable[[str], str]) -> None:
    """Change the strings among the arguments, attributes and notes of an exception, its causes and its members.

    Those in a list that is an attribute are changed, too. The message of a group stays as it is.
    """
    todo = [error]
    seen = set[int]()
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        args = _ARGUMENTS.__get__(each)
        changed = tuple(change(value) if type(value) is str else value for value in args)
        if any(new is not old for new, old in zip(changed, args, strict=True)):
            _ARGUMENTS.__set__(each, changed)
        for name, value in list(vars(each).items()):
            if type(value) is str and (said := change(value)) != value:
                vars(each)[name] = said
            elif type(value) is list:
                vars(each)[name] = [change(one) if type(one) is str else one for one in value]
        for name in ("filename", "filename2") if isinstance(each, OSError) else ():
            if type(value := getattr(each, name)) is str and (said := change(value)) != value:
                setattr(each, name, said)
        todo += [link for link in (each.__cause__, each.__context__) if link is not None]
        todo += each.exceptions if isinstance(each, BaseExceptionGroup) else []


def _harmless(text: str) -> str:
    return printable(text, colours=True) if re.search(_INTRODUCES, text) is not None else text


def unfinished(text: str) -> int:
    """Return how many characters at the end of a text may be the start of a colour sequence (SGR).

    Output of a node arrives in pieces. A piece may end inside a sequence, whose rest comes with the next piece.
    """
    end = text[-70:]
    found = re.search(_UNFINISHED, end)
    return 0 if found is None else len(end) - found.start()
