"""What may go wrong between a client and the lab's AWS: errors, delays, replies that get lost, and limits on rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tests.lab.aws_wire import ApiError, Call


class Clock:
    """Seconds since 1970 that a test can speed up and put forward, never back.

    Attributes:
        speed: seconds of this clock in a real one.
    """

    def __init__(self) -> None:
        self._began = self._set = time.time()
        self._speed = 1.0

    def now(self) -> float:
        return self._set + (time.time() - self._began) * self._speed

    @property
    def speed(self) -> float:
        return self._speed

    @speed.setter
    def speed(self, speed: float) -> None:
        self._set, self._began = self.now(), time.time()
        self._speed = speed

    def advance(self, seconds: float) -> None:
        """What is due meanwhile happens with the next call or within 20 ms."""
        self._set += seconds

    def real(self, at: float) -> float:
        """When, as time.time() counts, this clock will show `at`."""
        return time.time() + (at - self.now()) / self._speed


@dataclass
class Fault:
    """Something that happens to calls. Made by the methods of `AWS`.

    Attributes:
        action, region: which calls, as patterns of the shell.
        times: so many of them; None for all.
        when: only those of which this is true.
        error: the refusal; the call takes no effect.
        drop: "before" or "after": no reply comes, and the call took effect only in the second case.
        delay: seconds until it is looked at.
    """

    action: str = "*"
    region: str = "*"
    service: str = "*"
    times: int | None = 1
    when: Callable[[Call], bool] = lambda call: True
    error: ApiError | None = None
    drop: str = ""
    delay: float = 0.0
    seen: int = field(default=0, init=False)

    def takes(self, call: Call) -> bool:
        """Whether this call is one of them; counts it."""
        patterns = ((self.action, call.action), (self.region, call.region), (self.service, call.service))
        if self.times is not None and self.seen >= self.times:
            return False
        if not all(fnmatchcase(value, pattern) for pattern, value in patterns) or not self.when(call):
            return False
        self.seen += 1
        return True


@dataclass
class Bucket:
    """A token bucket: `size` at most, `refill` a second of the lab's clock."""

    size: float
    refill: float
    tokens: float = -1.0
    at: float = 0.0

    def take(self, now: float, tokens: float) -> bool:
        """Whether there were so many; only then they are gone."""
        if self.tokens < 0:
            self.tokens, self.at = self.size, now
        self.tokens = min(self.size, self.tokens + (now - self.at) * self.refill)
        self.at = now
        if self.tokens < tokens:
            return False
        self.tokens -= tokens
        return True


REQUESTS: dict[str, tuple[float, float]] = {
    "RunInstances": (5, 2), "TerminateInstances": (100, 5), "DescribeSpotPriceHistory": (100, 20),
    "Describe": (100, 20), "Get": (100, 20), "": (50, 5),
}  # fmt: skip
"""Requests: size and refill of the bucket by action, else by its first word, else of calls that change something.

Only the 1000 and 2 of launched instances were read in the documentation; the other figures are from general knowledge.
"""
INSTANCES: dict[str, tuple[float, float]] = {
    "RunInstances": (1000, 2), "StartInstances": (1000, 2), "StopInstances": (1000, 20),
    "TerminateInstances": (1000, 20),
}  # fmt: skip
"""Instances: the buckets of resources."""


@dataclass
class Throttle:
    """The limits of an account, by region and action.

    Attributes:
        requests: whether requests are limited; launches of instances always are, as nobody meets that limit by
            accident.
    """

    requests: bool = False
    buckets: dict[tuple[str, str, str], Bucket] = field(default_factory=dict[tuple[str, str, str], Bucket])

    def request(self, call: Call) -> None:
        """Raises:
        ApiError: RequestLimitExceeded.
        """
        if self.requests and call.service == "ec2":
            word = next((word for word in ("Describe", "Get") if call.action.startswith(word)), "")
            size = REQUESTS.get(call.action, REQUESTS[word])
            self._take(("requests", call.region, call.action), size, call.at, 1)

    def instances(self, call: Call, number: int) -> None:
        """The same for the instances that a call concerns."""
        if self.requests or call.action == "RunInstances":
            self._take(("instances", call.region, call.action), INSTANCES[call.action], call.at, number)

    def _take(self, key: tuple[str, str, str], limits: tuple[float, float], now: float, tokens: float) -> None:
        bucket = self.buckets.setdefault(key, Bucket(*limits))
        if not bucket.take(now, tokens):
            raise ApiError("RequestLimitExceeded")
