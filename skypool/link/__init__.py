"""The client's connection to one node.

The connection can break and be made again without losing calls or results. Words that this package uses:

- client: the user's process. node: a rented machine that runs calls.
- agent: the process on a node that manages its workers. loader: the program that starts the agent or connects to it.
- frame: one message, with a small JSON header and a body of bytes.
- WELCOME: the first message of an agent that accepts a client. PING: a request for a status report; PONG: the report.
- large value: pickled data of more than 64 KiB, which travels in pieces of 1 MiB.
- reader: the thread that reads a connection, of the event loop or of a caller that waits for a result.

Modules:

- `link`: connects, reconnects, and gives up a node that has been silent for too long.
- `handshake`: the first messages between the client and the agent.
- `outbox`: the send queue. Small frames overtake large values.
- `inbox`: receives messages, in the thread of the pool's event loop or in the thread of a waiting caller.
- `agent_messages`: parses and checks every message of an agent.
- `chunks`: reassembles large values that arrive in pieces; `buffers`: memory for them.
- `reports`: turns the output and the status reports of nodes into events.
- `forward`: a port of this computer that leads to a port of the node; `relay`: its program on the node.
- `direct_reading`: lets one thread read the connections to many nodes.
- `spares`: connections that are opened before they are needed.
- `reading_turns`: decides which thread reads the connection.
"""

__all__ = [
    "agent_messages",
    "buffers",
    "chunks",
    "direct_reading",
    "forward",
    "handshake",
    "inbox",
    "link",
    "outbox",
    "reach",
    "reading_turns",
    "relay",
    "reports",
    "spares",
]
