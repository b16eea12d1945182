"""`whole_list`: reads a list of a provider to its end, page after page.

skypool takes a machine that is missing from a list as ended. So an error must be raised if a list may be incomplete.
Every driver reads its lists with this function, with `Rest.ask_all`, or with the paginator of its SDK.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from skypool.errors import ProviderError

T = TypeVar("T")

MOST_PAGES = 10_000
"""Largest number of pages of one list. A list with more pages counts as incomplete."""


class WholeList(list[T]):
    """A list of a provider that was read to its end.

    Attributes:
        pages: number of pages from which the list was read. Pages are read one after the other. So an element is
            missing if it moved in the meantime to a page that had been read already.
    """

    __slots__ = ("pages",)

    def __init__(self, elements: Iterable[T] = (), pages: int = 1) -> None:
        super().__init__(elements)
        self.pages = pages


def incomplete(provider: str, called: str, what: str, why: str) -> ProviderError:
    """Return (not raise) the error for a list that a provider did not give to its end. Its code is "incomplete".

    Args:
        provider: name of the driver.
        called: name of the provider in messages, such as "Acme Cloud".
        what: name of the request for the list.
        why: why elements may be missing.
    """
    words = (
        f"the answer of {called} to a request ({what}) may be incomplete: {why} (incomplete); machines that it lacks "
        "do not count as ended: look for them in the provider's console, and report this message to skypool's authors"
    )
    return ProviderError(words, provider=provider, code="incomplete", text=why)


def whole_list(page: Callable[[str], tuple[Iterable[T], str]], incomplete: Callable[[str], Exception]) -> WholeList[T]:
    """Return the elements of all pages of a list, in order.

    Args:
        page: called with the token of a page, which is "" for the first one. It requests the page, and returns the
            page's elements and the token of the next page, "" if there is none.
        incomplete: called with a text that says why the list cannot be read to its end. It returns the error to raise.

    Raises:
        Exception: the error of `page`. Or the error of `incomplete`, if a page names an earlier page as the next one,
            or if there are more than 10,000 pages.
    """
    found: list[T] = []
    known = {""}
    token = ""
    while True:
        elements, token = page(token)
        found += elements
        if not token:
            return WholeList(found, len(known))
        if token in known:
            raise incomplete(f"page {len(known)} names a page that was read already as the next one")
        if len(known) >= MOST_PAGES:
            raise incomplete(f"it has more than {MOST_PAGES} pages")
        known.add(token)
