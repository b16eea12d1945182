"""Helpers that send many requests at once, or repeat a request until it succeeds or a time limit is over.

All of them block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from skypool import tracebacks
from skypool.errors import NoAnswer, ProviderError, RateLimitError

tracebacks.install()
T = TypeVar("T")
V = TypeVar("V")

# The most calls that `at_once` runs at a time.
_THREADS = 16


def at_once(do: Callable[[T], V], items: Iterable[T]) -> list[V | Exception]:
    """Call `do` for all items in parallel, and return the results in the order of the items.

    An exception of a call takes the place of its result; it is not raised. Returns when all calls have ended. At most
    16 threads run at a time. A single item is handled in the calling thread. If no thread can be started, for example
    while the interpreter exits, the calls run one after the other. Without items, the result is [].
    """

    def outcome(item: T) -> V | Exception:
        try:
            return do(item)
        except Exception as e:  # noqa: BLE001 - the caller gets it as a result
            return e

    several = list(items)
    if len(several) > 1:
        try:
            with ThreadPoolExecutor(min(_THREADS, len(several))) as threads:
                return list(threads.map(outcome, several))
        except RuntimeError:
            pass  # the interpreter exits and starts no more threads
    return list(map(outcome, several))


def in_turn(do: Callable[[T], V], items: Iterable[T]) -> list[V | Exception]:
    """Call `do` for the items one after the other until one fails, and return the results in order.

    The exception of the failed call is the last element of the list; it is not raised. Later items are not
    tried. Use this for scarce resources, so that the first items are served first.
    """
    outcomes: list[V | Exception] = []
    for item in items:
        try:
            outcomes.append(do(item))
        except Exception as e:  # noqa: BLE001 - the caller gets it as a result
            return [*outcomes, e]
    return outcomes


def patiently(do: Callable[[], V], seconds: float, *codes: str) -> V:
    """Call `do` until it succeeds, and return its result. Blocks meanwhile.

    The call is repeated after RateLimitError, after NoAnswer, and after a ProviderError with one of the given codes.
    Pauses are random and grow up to 10 s. If a RateLimitError says how long to wait, the pause has that length, but at
    most `seconds`. A stated wait of 0 s is ignored.

    Args:
        do: the request.
        seconds: time limit for all attempts. After a failure beyond it, `do` is not called again. A running attempt or
            pause is not cut short.
        codes: error codes of the provider after which the call is repeated, too.

    Raises:
        Exception: the last error when the time limit is over, or at once any other error of `do`.
    """
    from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

    passes = retry_if_exception(
        lambda e: isinstance(e, (RateLimitError, NoAnswer)) or (isinstance(e, ProviderError) and e.code in codes)
    )
    jitter = wait_random_exponential(0.5, max=10)

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked = error.retry_after if isinstance(error, RateLimitError) else None
        return min(asked, seconds) if asked else jitter(state)  # pause even if the provider asks for 0 s

    return Retrying(retry=passes, stop=stop_after_delay(seconds), wait=wait, reraise=True)(do)


def quietly(do: Callable[[], V], *codes: str) -> V | None:
    """Call `do` once and return its result, or None if it raises a ProviderError with one of the given codes.

    Any other error is raised. Without codes, every error is raised.
    """
    try:
        return do()
    except ProviderError as e:
        if e.code not in codes:
            raise
    return None


def soon(look: Callable[[], V], seconds: float, first: float = 0.1, most: float = 2.0) -> V | None:
    """Call `look` until its result is true, and return that result. Returns None if the time limit is over first.

    Blocks meanwhile. `look` is always called at least once. An exception of `look` is raised at once.

    Args:
        look: called at once, and again after each pause.
        seconds: time limit. A running call or pause is not cut short.
        first: length of the first pause in seconds. Each pause is twice as long as the one before.
        most: longest pause in seconds.
    """
    from tenacity import Retrying, retry_if_result, stop_after_delay, wait_exponential

    wait = wait_exponential(first, max=most)
    again = retry_if_result(lambda seen: not seen)
    over = stop_after_delay(seconds)
    return Retrying(retry=again, stop=over, wait=wait, retry_error_callback=lambda _: None)(look)
