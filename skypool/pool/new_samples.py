"""`NewSamples`: the newest samples of a pool's nodes, and those that wait to be written to a file."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from skypool.devices.sample import NodeSample, to_json
from skypool.safety.received_data_limit import WAITING, Quota, Share

ROW = 100
"""The approximate bytes that a row of the file takes in addition to its text."""
DEVICE = 500
"""The least bytes that a device of a sample counts: however short its text is, it takes time to be read."""
_MOST_WAITING = 16 << 20
"""The most bytes of samples of all nodes that wait in memory, if nobody takes them."""
_LARGEST = Share("sample", 64 << 10, "measurements of more than 64 KiB are dropped", strangers=True)
"""The limit for one sample."""
_SEEN = 64
"""The number of samples of a node that are compared with new ones, to drop those that come a second time."""
_CLOCKS = 2 * 3600.0
"""If a node's clock differs by more than this many seconds, its samples get the time of the client's clock instead.

Files of samples are thinned by their times.
"""


class SampleRow(NamedTuple):
    """A sample as a row of a file.

    Attributes:
        node: the number of the node.
        time: when the sample was taken, in seconds since 1970.
        error: True if the sample has an error of a device's driver, or a lost device.
        data: the sample as JSON, without the node's number.
        size: the bytes that the row counts in quotas.
    """

    node: int
    time: float
    error: bool
    data: str
    size: int


class NewSamples:
    """The samples of one pool that nobody has taken yet, and the newest of each node. Any thread may use it.

    Args:
        quota: limits the bytes that are kept of each node.

    Attributes:
        newest: the newest sample of each node, by the node's number.
    """

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._lock = threading.Lock()  # guards the four below
        self._waiting: deque[SampleRow] = deque()
        self._size = 0
        self.newest: dict[int, NodeSample] = {}
        self._seen: dict[int, deque[float]] = {}

    def add(self, samples: Sequence[NodeSample]) -> list[NodeSample]:
        """Keep samples, and return those that are new. A node may send samples again after a reconnection.

        A sample of over 64 KiB from an untrusted node is dropped. If too many wait, the oldest are dropped.
        """
        new = []
        for each in samples:
            now = time.time()
            with self._lock:
                seen = self._seen.setdefault(each.node, deque(maxlen=_SEEN))
                if each.time in seen:
                    continue
                seen.append(each.time)
            if abs(each.time - now) > _CLOCKS:
                each = replace(each, time=now)
            row = _row(each)
            if row.size > _LARGEST.most and not self._quota.take(each.node, _LARGEST, row.size):
                continue
            new.append(each)
            is_kept = self._quota.take(each.node, WAITING, row.size)
            with self._lock:
                self.newest[each.node] = each
                if is_kept:
                    self._waiting.append(row)
                    self._size += row.size
                while self._size > _MOST_WAITING:
                    dropped = self._waiting.popleft()
                    self._size -= dropped.size
                    self._quota.give_back(dropped.node, WAITING, dropped.size)
        return new

    def take(self) -> Sequence[SampleRow]:
        """Return the samples since the last `take`, in the order in which they came."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            self._size = 0
        for each in waiting:
            self._quota.give_back(each.node, WAITING, each.size)
        return waiting

    def forget(self, node: int) -> None:
        """Forget the newest sample of a node that has ended."""
        with self._lock:
            self.newest.pop(node, None)
            self._seen.pop(node, None)


def _row(sample: NodeSample) -> SampleRow:
    data = json.dumps({name: value for name, value in to_json(sample).items() if name != "node"})
    error = any(each.xids or each.lost for each in sample.devices)
    return SampleRow(sample.node, sample.time, error, data, ROW + max(len(data), DEVICE * len(sample.devices)))
