"""The client's end of one node: a connection that may break and comes back, and loses nothing in between.

`connection` connects, reconnects and reads; `outbox` sends; `chunks` and `buffers` receive large values; `inbound`
checks every message of an agent; `reports` turns what nodes print and report into events; `turns` decides which
thread reads.
"""

__all__ = ["buffers", "chunks", "connection", "inbound", "outbox", "reports", "turns"]
