"""`in_thread`: runs a function in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(act: Callable[[], T], name: str) -> Future[T]:
    """Run a function in a thread that ends with this process."""
    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(act())
        except BaseException as e:  # noqa: BLE001 - it is raised where the result is asked for
            done.set_exception(e)

    threading.Thread(target=work, name=name, daemon=True).start()
    return done
