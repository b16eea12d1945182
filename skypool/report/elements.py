"""Elements of HTML and SVG as values. All texts and attributes are escaped when they are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_VOID = frozenset({"link", "meta"})
"""Tags without an end tag."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Characters that are replaced: those that HTML does not allow, and those that change the direction of text."""
Value = str | int | float | bool | None
"""The value of an attribute. None and False leave it out; True gives it no value."""


@dataclass(frozen=True, slots=True)
class Element:
    """An element of HTML or SVG, with its attributes, and with the elements and texts that it contains."""

    tag: str
    attributes: tuple[tuple[str, str | None], ...]
    children: tuple[Element | str, ...]

    def __str__(self) -> str:
        return "".join(self.parts())

    def parts(self) -> Iterator[str]:
        """Yield the HTML or SVG text of the element, in pieces."""
        yield f"<{self.tag}"
        for name, value in self.attributes:
            yield f" {name}" if value is None else f' {name}="{escape(_clean(value))}"'
        yield ">"
        if self.tag in _VOID:
            return
        for child in self.children:
            if isinstance(child, Element):
                yield from child.parts()
            elif self.tag == "style":  # its text is no markup, and only skypool's own styles stand there
                yield child.replace("</", "")
            else:
                yield escape(_clean(child), quote=False)
        yield f"</{self.tag}>"


def element(tag: str, *children: Element | str | None, **attributes: Value) -> Element:
    """Return an element of HTML or SVG. Children that are None are left out.

    Raises ValueError if the name of the tag or of an attribute is not valid.

    In names of attributes, "_" becomes "-". A "_" at the end is removed, as in `class_`.
    """
    given: list[tuple[str, str | None]] = []
    for name, value in attributes.items():
        if value is not None and value is not False:
            given.append((name.rstrip("_").replace("_", "-"), None if value is True else _text(value)))
    for name in (tag, *(name for name, _ in given)):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of an element or an attribute")
    return Element(tag, tuple(given), tuple(each for each in children if each is not None))


def _text(value: str | float) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _clean(text: str) -> str:
    return _CONTROL.sub("�", text)
