"""A program for rented machines that waits until the cloud's metadata service announces the end of the machine.

`skypool.drivers.ssh_machine.notice_program` sends the text of this file to the node, with a call of `wait` appended.
The node runs it with nothing but the standard library.
"""

import datetime  # noqa: F401 - for the expressions by which drivers read the notice
import json  # noqa: F401
import os
import time
import urllib.request
from collections.abc import Callable

PAUSE = 5
"""Seconds between two questions to the metadata service, and the most that each wait for an answer may take."""

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, method: str, headers: dict[str, str]) -> str:
    request = urllib.request.Request(url, headers=headers, method=method)
    answer: bytes = _direct.open(request, timeout=PAUSE).read()
    return answer.decode()


def wait(
    base: str, variable: str, path: str, headers: dict[str, str], token: tuple[str, ...], when: Callable[[str], object]
) -> None:
    """Request the spot notice from the metadata service every 5 s until there is one, and print its time.

    The function blocks until then. It prints one line: the time at which the provider takes the machine back, in
    seconds since 1970. Network errors, missing pages and answers that `when` refuses with ValueError count as no
    notice.

    Args:
        base, variable, path, headers, token: as in `ssh_machine.notice_program`; `token` is () for no token.
        when: returns the announced time for the text of an answer; None if the answer is no notice.
    """
    base = (os.environ.get(variable) or base).rstrip("/")
    at = None
    while at is None:
        try:
            asked = dict(headers)
            if token:
                where, name, value, shown = token
                asked[shown] = ask(base + where, "PUT", {name: value})
            at = when(ask(base + path, "GET", asked))
        except (OSError, ValueError):  # 404 until there is a notice
            pass
        if at is None:
            time.sleep(PAUSE)
    print(at, flush=True)
