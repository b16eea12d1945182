"""The client's connection to one node. It may break and be made again without losing results or calls.

- `connection`: connects, reconnects, and gives up a node that is silent for too long.
- `handshake`: the first messages between client and agent (the program that runs on the node).
- `outbox`: the send queue; small frames (messages) overtake large values.
- `inbox`: reads what arrives, in the engine's thread or in the thread of a waiting caller.
- `inbound`: parses and checks every message of an agent.
- `chunks`: reassembles large values that arrive in pieces; `buffers`: memory for them.
- `reports`: turns the output and the status of nodes into events.
- `turns`: decides which thread reads: the engine's or that of a waiting caller.
"""

__all__ = ["buffers", "chunks", "connection", "handshake", "inbound", "inbox", "outbox", "reports", "turns"]
