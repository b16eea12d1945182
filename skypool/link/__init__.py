"""The client's connection to one node. It may break and be made again, and no message is lost.

- `connection`: connects, reads frames, reconnects, and gives up a node that is silent for too long.
- `outbox`: the send queue; small frames overtake large values.
- `inbound`: parses and checks every message of an agent.
- `chunks`: puts together large values that arrive in pieces; `buffers`: memory for them.
- `reports`: turns what nodes print and report into events.
- `turns`: decides which thread reads: the engine's loop or a caller that waits.
"""

__all__ = ["buffers", "chunks", "connection", "inbound", "outbox", "reports", "turns"]
