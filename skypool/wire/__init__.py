"""The protocol between a client and its nodes, and the commands that carry it.

- `frames`: the binary message format.
- `codec`, `exceptions`: serialize values and exceptions with the pickler of `pickling`.
- `unpicklable`: finds the part of a value that cannot be pickled.
- `pickling`: cloudpickle, changed so that each definition of a script exists once in a process. `definitions` pickles
  functions and classes, `named` type variables, caches and the like, `exception_pickles` exceptions. `definition_ids`
  tells which definitions exist already, and `value_hash` whether a value has changed. `class_pickles` keeps pickles
  of classes, and `namespaces` the globals of scripts on nodes.
- `error_text`: the texts of exceptions, for messages.
- `agent_config`: the configuration that a client sends to an agent, and the agent's answer about its machine.
- `save_orders`: what is to be saved on a node, and what the node tells of it.
- `transport`: builds and starts the command that reaches a node (`ssh`, `docker exec` or local).
- `keys`: makes the SSH keys of a pool; `host_keys`: verifies host keys.

The words of this package:

- client: the user's process. Node: a rented machine, or the user's own. Agent: the main process of a node.
- worker: a process of a node that runs calls, one at a time. Slot: the part of a node that a worker uses.
- frame: a message of the protocol. Packet: a frame between an agent and a worker.
- outcome: the result or the error of a call.
- loader: the program that starts the agent. Keeper: the parent process of the agent.
- slice: several TPU machines (hosts) that are rented together.
- definition: a class, a function, or another object that has a name in a script and exists once in a process. Its
  version is a hash of what it is made of. Token: a hash of a value of a global that can change in place.
- sender: the process that has pickled a definition or an exception. Script: the user's module `__main__`.
- by value: a definition is pickled with its contents, not by its name, because the receiver cannot import the script.
- view: the values that the function of a call must find in its globals, which it shares with other functions.
"""

__all__ = [
    "agent_config",
    "class_pickles",
    "codec",
    "definition_ids",
    "definitions",
    "error_text",
    "exception_pickles",
    "exceptions",
    "frames",
    "host_keys",
    "keys",
    "named",
    "namespaces",
    "pickling",
    "save_orders",
    "transport",
    "unpicklable",
    "value_hash",
]
