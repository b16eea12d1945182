"""The limits on rates of the lab's AWS."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.lab.aws_wire import ApiError, Call
from tests.lab.world import Bucket

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
