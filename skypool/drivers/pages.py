"""`whole_list`: reads a list of a provider to its end, page after page.

A machine that a list lacks counts as ended. So a list that may be incomplete must raise an error instead: every driver
reads its lists with this function, with `Rest.ask_all`, or with the paginator of its SDK.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from skypool.errors import ProviderError

T = TypeVar("T")

MOST_PAGES = 10_000
"""Largest number of pages of one list. A list with more pages counts as incomplete."""


class WholeList(list[T]):
    """A list that was read to its end.

    Attributes:
        pages: number of pages from which the list was read. Several pages do not show the state at one moment, because
            they are read one after the other: an element that moves to a page already read is missing.
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
        page: requests one page, and returns its elements and the token of the next page. The argument is the token of
            the page, "" for the first one. The returned token is "" if there are no more pages.
        incomplete: returns the error for a list that cannot be read to its end. The argument says why.

    Raises:
        Exception: the error of `page`, or the error of `incomplete` if the pages do not end.
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
