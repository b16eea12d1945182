"""Helpers that send several requests in parallel or in turn, ignore certain refusals, or repeat a request.

All functions of this module block until they have their result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from skypool import tracebacks
from skypool.errors import NoAnswer, ProviderError, RateLimitError

tracebacks.install()
T = TypeVar("T")
V = TypeVar("V")

# The largest number of calls that `at_once` runs at the same time.
_THREADS = 16


def at_once(do: Callable[[T], V], items: Iterable[T]) -> list[V | Exception]:
    """Call `do` for all items in parallel, and return the results in the order of the items when all calls have ended.

    If a call raises an Exception, the Exception is put into the list in place of a result.

    At most 16 calls run at the same time, each in its own thread. If there is only one item, `do` runs in the calling
    thread. If no thread can be started, for example because the interpreter exits, the calls run one after the other.
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
                contexts = [copy_context() for _ in several]
                return list(threads.map(lambda context, item: context.run(outcome, item), contexts, several))
        except RuntimeError:
            pass  # the interpreter exits and starts no more threads
    return list(map(outcome, several))


def in_turn(do: Callable[[T], V], items: Iterable[T]) -> list[V | Exception]:
    """Call `do` for the items one after the other until a call fails, and return the results in order.

    If a call raises an Exception, the Exception becomes the last element of the list, and the items after it are left
    out. Use this function instead of `at_once` if the provider may have too little stock for all items, so that the
    first items are served first.
    """
    outcomes: list[V | Exception] = []
    for item in items:
        try:
            outcomes.append(do(item))
        except Exception as e:  # noqa: BLE001 - the caller gets it as a result
            return [*outcomes, e]
    return outcomes


def patiently(do: Callable[[], V], seconds: float, *codes: str) -> V:
    """Call `do` until it succeeds, and return its result.

    The call is repeated after RateLimitError, after NoAnswer, and after a ProviderError with one of the given codes.
    The pauses between the calls are random and grow up to 10 s. If a RateLimitError has `retry_after`, the pause has
    that length instead, but at most `seconds`. A `retry_after` of 0 s is ignored.

    Args:
        do: a function that sends the request.
        seconds: time limit for all attempts together. If an attempt fails after this time, `do` is not called again.
            An attempt or a pause that has begun is not cut short.
        codes: error codes of the provider (`ProviderError.code`) after which the call is repeated, too.

    Raises:
        Exception: any other error of `do`, at once. When the time limit is over, the error of the last attempt.
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

    Use it for codes that mean no failure, such as the code for a machine that is already gone.
    """
    try:
        return do()
    except ProviderError as e:
        if e.code not in codes:
            raise
    return None


def soon(look: Callable[[], V], seconds: float, first: float = 0.1, most: float = 2.0) -> V | None:
    """Call `look` until its result is true, and return that result; None if the time limit is over first.

    Args:
        look: called at once, and again after each pause. Its exceptions are raised at once.
        seconds: time limit for all calls and pauses together. A call or a pause that has begun is not cut short.
        first: length of the first pause in seconds. Each pause is twice as long as the one before.
        most: length of the longest pause in seconds.
    """
    from tenacity import Retrying, retry_if_result, stop_after_delay, wait_exponential

    wait = wait_exponential(first, max=most)
    again = retry_if_result(lambda seen: not seen)
    over = stop_after_delay(seconds)
    return Retrying(retry=again, stop=over, wait=wait, retry_error_callback=lambda _: None)(look)
