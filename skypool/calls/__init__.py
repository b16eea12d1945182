"""Calls on the client's side: how `train(10) >> pool` gets to a node, and its result back to the caller.

- `call`: `@compute`, `Call`, and the operators that send a call to a pool.
- `command`: `cmd`, which makes a call that runs a program of the node; `program`: runs it there.
- `arguments`: pickles the arguments of a call; `upstream`: sends the items of iterator arguments one by one.
- `entered`: the pool that `await call` uses.
- `options`: the options that `@compute` takes, such as timeout, retries and output.
- `pending`: the client's record of a call until it ends.
- `dispatch`: chooses a node for each call, sends it there, and sends it again when the node is lost.
- `waiting`: the calls that wait for a node; `progress`: handles messages of nodes about running calls.
- `node_queue`: the queue of one node: the calls sent there, its free slots, and the frames (messages) to it.
- `idle`: sums up the time in which a node ran no call; `tally`: counts the calls that have ended, and records them.
- `futures`: `CallFuture` and `Stream`, which the caller waits for; `map`: `pool.map`.
- `callbacks`: threads that call what users add to futures, which may block.
- `gangs`: one call that runs as several processes, which start, fail and run again together; the note of its error.
  `skypool.gangs` decides what happens.
- `parts`: one call that runs on several nodes, and stops on all of them when it fails on one.
- `groups`: several calls that run at the same time.
"""

__all__ = [
    "arguments",
    "call",
    "callbacks",
    "command",
    "dispatch",
    "entered",
    "futures",
    "gangs",
    "groups",
    "idle",
    "map",
    "node_queue",
    "options",
    "parts",
    "pending",
    "program",
    "progress",
    "tally",
    "upstream",
    "waiting",
]
