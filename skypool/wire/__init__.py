"""The protocol between a client and its nodes (rented machines), and the commands that carry it.

- `frames`: the binary message format.
- `codec`, `exceptions`: serialize values and exceptions with the pickler of `pickling`.
- `pickling`: cloudpickle, with what scripts define made once in each process. `definitions` pickles functions and
  classes, `named` type variables, caches and the like, `rebuilt` exceptions. `identity` tells what exists already, and
  `fingerprint` whether it has changed; `class_pickles` keeps pickles of classes. `namespaces` keeps the globals of
  scripts on nodes.
- `blame`: finds the part of a value that cannot be pickled.
- `handshake`: the configuration that a client sends to an agent (the program on a node that runs calls), and the
  agent's answer about its machine.
- `transport`: builds and starts the command that reaches a node (`ssh`, `docker exec` or local).
- `keys`: makes the SSH keys of a pool; `host_keys`: verifies host keys.
"""

__all__ = [
    "blame",
    "class_pickles",
    "codec",
    "definitions",
    "exceptions",
    "fingerprint",
    "frames",
    "handshake",
    "host_keys",
    "identity",
    "keys",
    "named",
    "namespaces",
    "pickling",
    "rebuilt",
    "transport",
]
