"""Calls on the client: from `train(10) >> pool` to a node, and the result back to the caller.

- `call`: `@compute`, `Call`, and the operators that send a call to a pool.
- `arguments`: pickles the arguments of a call; `upstream`: feeds iterator arguments item by item.
- `options`: how a call is to run: timeout, retries, output and the others that `@compute` takes.
- `pending`: what the client keeps for a call until it ends.
- `dispatch`: chooses a node for each call, sends it there, and sends it again when the node is lost.
- `waiting`: the calls that wait for a node; `progress`: what nodes say about calls that run there.
- `node_queue`: the queue of one node: the calls sent there, its free slots, and the frames that calls become.
- `futures`: `CallFuture` and `Stream`, which the caller waits for; `map`: `pool.map`.
"""

__all__ = [
    "arguments",
    "call",
    "dispatch",
    "futures",
    "map",
    "node_queue",
    "options",
    "pending",
    "progress",
    "upstream",
    "waiting",
]
