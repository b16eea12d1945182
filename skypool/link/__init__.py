"""The client's connection to one node. It may break and be made again, and no message is lost.

- `connection`: connects, reconnects, and gives up a node that is silent for too long.
- `handshake`: what client and agent say to each other first.
- `outbox`: the send queue; small frames overtake large values.
- `inbox`: reads what arrives, in the engine's thread or a caller's.
- `inbound`: parses and checks every message of an agent.
- `chunks`: puts together large values that arrive in pieces; `buffers`: memory for them.
- `reports`: turns what nodes print and report into events.
- `turns`: decides which thread reads: the engine's loop or a caller that waits.
"""

__all__ = ["buffers", "chunks", "connection", "handshake", "inbound", "inbox", "outbox", "reports", "turns"]
