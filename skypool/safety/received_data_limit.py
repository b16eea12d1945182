"""`Quota`: counts what this process keeps of each node of a pool, and refuses what is too much.

A node may be a stranger's, and send as much as the network carries. Code that keeps something of a node, in memory or
on disk, takes its size from the node's quota first, and gives the size back when the thing is no longer kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a node's quota that is for things of one kind.

    Attributes:
        name: the name of the kind of things, such as "samples".
        most: the largest size of these things together, in bytes.
        beyond: what happens to things that exceed `most`, as the end of a sentence for the user.
        strangers: True if only untrusted nodes are limited; False if all are.
    """

    name: str
    most: int
    beyond: str
    strangers: bool = False


class Quota:
    """The quotas of the nodes of one pool. Any thread may use it.

    Args:
        is_stranger: returns True for a node that is not trusted.
        tell: called with a sentence for the user when a node reaches a limit for the first time.
    """

    def __init__(self, is_stranger: Callable[[int], bool], tell: Callable[[str], None] = lambda text: None) -> None:
        self._is_stranger = is_stranger
        self._tell = tell
        self._lock = threading.Lock()  # guards the two below
        self._used: dict[tuple[int, str], int] = {}
        self._told: set[tuple[int, str]] = set()

    def take(self, node: int, share: Share, size: int) -> bool:
        """Count a thing of `size` bytes that is to be kept. Return False, and count nothing, if there is no room.

        The first refusal for a node and kind calls `tell`, which may emit an event. So do not hold a lock that
        listeners of events need. Node -1 is the pool itself, which counts as trusted.
        """
        key = (node, share.name)
        with self._lock:
            used = self._used.get(key, 0) + size
            if used <= share.most or (share.strangers and (node < 0 or not self._is_stranger(node))):
                self._used[key] = used
                return True
            is_first = key not in self._told
            self._told.add(key)
        if is_first and node >= 0:
            self._tell(f"node {node} sends more than is kept of one node: {share.beyond}")
        return False

    def give_back(self, node: int, share: Share, size: int) -> None:
        """Subtract a thing that is no longer kept. `size` is the number of bytes that was passed to `take`."""
        with self._lock:
            self._used[node, share.name] = max(0, self._used.get((node, share.name), 0) - size)

    def set(self, node: int, share: Share, size: int) -> None:
        """Replace the counted size of all things of one kind that are kept of a node by a measured `size`, in bytes."""
        with self._lock:
            self._used[node, share.name] = size

    def used(self, node: int, share: Share) -> int:
        """Return the counted size of all things of one kind that are kept of a node, in bytes."""
        with self._lock:
            return self._used.get((node, share.name), 0)


WAITING = Share(
    "waiting",
    8 << 20,
    "of its output, measurements and events that are not written yet, what is over 8 MiB is dropped",
    strangers=True,
)
"""The share for what waits in memory until it is written to files."""
