"""`Connections`: how each node of a pool is reached, and the first message of its agent."""

from __future__ import annotations

import time
from dataclasses import replace

from skypool.link.agent_messages import Welcome
from skypool.link.link import Link
from skypool.model import Access
from skypool.pool import states
from skypool.shipping.user_modules import Lender


class Connections:
    """The connections of one pool to its nodes. The engine's thread changes it. The keys are the numbers of nodes.

    Attributes:
        links: the links to nodes that have not ended.
        ways: how each node is reached, and the path of Python on it ("" if its setup wrote the path to a file there).
        welcomes: the first message of each node's agent.
        lenders: the objects that send the user's modules to each node.
    """

    def __init__(self) -> None:
        self.links: dict[int, Link] = {}
        self.ways: dict[int, tuple[Access, str]] = {}
        self.welcomes: dict[int, Welcome] = {}
        self.lenders: dict[int, Lender] = {}

    def devices(self) -> dict[int, int]:
        """Return the number of accelerators of each node that was reached, by its number. Any thread may call this."""
        return {node: welcome.devices for node, welcome in sorted(self.welcomes.copy().items())}

    def work_in(self, node: int, folder: str, programs: str = "") -> None:
        """Let shells, and relative paths of transfers, begin in this folder of a node. Any thread may call this.

        Shells find what is in the folder `programs` before all other programs; "" for none.
        """
        if node in self.ways:
            access, python = self.ways[node]
            self.ways[node] = replace(access, cwd=folder, programs=programs), python

    def words(self, pool: states.Pool) -> dict[int, str]:
        """Return the state of each node by its number, as a word such as "ready". Any thread may call this.

        A ready node whose connection is down is "unreachable since" a time of day. Nodes that have ended are included.
        """
        return {node: self._word(state) for node, state in sorted(pool.nodes.items())}

    def _word(self, node: states.Node) -> str:
        link = self.links.get(node.node)
        if node.word != "ready" or link is None or link.is_up:
            return node.word
        return f"unreachable since {time.strftime('%H:%M:%S', time.localtime(link.heard_at))}"
