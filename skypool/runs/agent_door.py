"""Gives stdin and stdout to the agent of this machine. A node runs this text, as `files.transfer.node_program` says.

It needs no skypool on the node, so it works for a later version on the client, too.
"""

import os

from skypool.agent.holder import connect


def main(folder: str) -> None:
    """Connect to the agent whose folder this is, and wait until it closes the connection.

    Prints "ready" before that, or "gone" if no agent runs. None is started.
    """
    try:
        connect({"folder": folder}, start=False)
    except FileNotFoundError:  # not even its folder is there
        os.write(1, b"gone\n")
