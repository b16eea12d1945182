"""The client's connection to one node (a rented machine).

The connection can break and be made again without losing calls or results.

- `connection`: connects, reconnects, and gives up a node that has been silent for too long.
- `handshake`: the first messages between the client (the user's process) and the agent (the process on the node that
  manages its workers).
- `outbox`: the send queue. Small frames (messages) overtake large values.
- `inbox`: receives messages, in the thread of the pool's event loop or in the thread of a waiting caller.
- `inbound`: parses and checks every message of an agent.
- `chunks`: reassembles large values that arrive in pieces; `buffers`: memory for them.
- `reports`: turns the output and the status reports of nodes into events.
- `forward`: a port of this computer that leads to a port of the node; `relay`: its program on the node.
- `readings`: lets one thread read the connections to many nodes.
- `turns`: decides which thread reads the connection: the thread of the event loop, or one that waits for a result.
"""

__all__ = [
    "buffers",
    "chunks",
    "connection",
    "forward",
    "handshake",
    "inbound",
    "inbox",
    "outbox",
    "readings",
    "relay",
    "reports",
    "turns",
]
