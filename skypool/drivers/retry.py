"""Helpers to send many requests at once, and to repeat requests until they are answered or a time is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from skypool import tracebacks
from skypool.errors import NoAnswer, ProviderError, RateLimitError

tracebacks.install()
T = TypeVar("T")
V = TypeVar("V")

# The most requests that `at_once` has under way at a time.
_THREADS = 16


def at_once(do: Callable[[T], V], items: Iterable[T]) -> list[V | Exception]:
    """The outcomes, in order. One after the other in an interpreter that exits, as that starts no threads."""

    def outcome(item: T) -> V | Exception:
        try:
            return do(item)
        except Exception as e:  # noqa: BLE001 - it is an outcome, too
            return e

    several = list(items)
    if len(several) > 1:
        try:
            with ThreadPoolExecutor(min(_THREADS, len(several))) as threads:
                return list(threads.map(outcome, several))
        except RuntimeError:
            pass  # no thread can be started any more
    return list(map(outcome, several))


def in_turn(do: Callable[[T], V], items: Iterable[T]) -> list[V | Exception]:
    """The outcomes, in order, up to the first failure: of what is scarce, the first items get what there is."""
    outcomes: list[V | Exception] = []
    for item in items:
        try:
            outcomes.append(do(item))
        except Exception as e:  # noqa: BLE001 - it is an outcome, too
            return [*outcomes, e]
    return outcomes


def patiently(do: Callable[[], V], seconds: float, *codes: str) -> V:
    """The answer, asked for again with jitter where there was none, where that was too often, or for these codes.

    Raises:
        ProviderError: the last one, after so many seconds, or one that does not pass.
    """
    from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

    passes = retry_if_exception(
        lambda e: isinstance(e, (RateLimitError, NoAnswer)) or (isinstance(e, ProviderError) and e.code in codes)
    )
    jitter = wait_random_exponential(0.5, max=10)

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked = error.retry_after if isinstance(error, RateLimitError) else None
        return min(asked, seconds) if asked else jitter(state)  # who says 0 is not to be asked without a pause

    return Retrying(retry=passes, stop=stop_after_delay(seconds), wait=wait, reraise=True)(do)


def quietly(do: Callable[[], V], *codes: str) -> V | None:
    """The answer; None where it is refused with one of these codes."""
    try:
        return do()
    except ProviderError as e:
        if e.code not in codes:
            raise
    return None


def soon(look: Callable[[], V], seconds: float, first: float = 0.1, most: float = 2.0) -> V | None:
    """What is seen, looked for again until it is true; None where it is not within so many seconds.

    Args:
        first, most: seconds from one look to the next, which double.
    """
    from tenacity import Retrying, retry_if_result, stop_after_delay, wait_exponential

    wait = wait_exponential(first, max=most)
    again = retry_if_result(lambda seen: not seen)
    over = stop_after_delay(seconds)
    return Retrying(retry=again, stop=over, wait=wait, retry_error_callback=lambda _: None)(look)
