"""A program for rented machines that waits until the cloud's metadata service announces the end of the machine.

`skypool.drivers.ssh_machine.notice_program` returns the source text of this file, with a call of `wait` appended. The
node runs this text, so the program may import only the standard library.
"""

import datetime  # noqa: F401 - used by the Python expressions with which drivers read the announced time
import json  # noqa: F401
import os
import time
import urllib.request
from collections.abc import Callable

PAUSE = 5
"""Seconds between two requests to the metadata service. Each wait for an answer is limited to the same time."""

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, method: str, headers: dict[str, str]) -> str:
    request = urllib.request.Request(url, headers=headers, method=method)
    answer: bytes = _direct.open(request, timeout=PAUSE).read()
    return answer.decode()


def wait(
    base: str, variable: str, path: str, headers: dict[str, str], token: tuple[str, ...], when: Callable[[str], object]
) -> None:
    """Wait for the spot notice, and print the time at which the provider takes the machine back.

    A spot notice announces that the provider will take a spot machine back. The function requests the notice from the
    metadata service every 5 s, and blocks until there is one. It then prints one line, the announced time in seconds
    since 1970. Network errors, missing pages and answers for which `when` raises ValueError count as no notice.

    Args:
        base: address of the metadata service.
        variable: name of an environment variable that, if set, replaces `base`; "" for none.
        path: path of the notice, appended to `base`.
        headers: headers of the request for the notice.
        token: () if the service needs no access token. Otherwise (path, name, value, carrier): a PUT request to the
            path, with a header of this name and value, gets the token. The header `carrier` then carries the token.
        when: called with the text of an answer. It returns the announced time in seconds since 1970, or None for no
            notice.
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
