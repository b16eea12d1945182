"""The protocol between a client and its nodes, and the commands that carry it.

- `frames`: the binary message format.
- `codec`, `exceptions`: serialize values and exceptions with the pickler of `pickling`; `blame`: what has no pickle.
- `handshake`: what client and agent tell each other when they meet: configuration and health.
- `transport`: builds and starts the command that reaches a node (`ssh`, `docker exec` or local).
- `keys`: makes the SSH keys of a pool; `host_keys`: verifies host keys.
"""

__all__ = ["blame", "codec", "exceptions", "frames", "handshake", "host_keys", "keys", "pickling", "transport"]
