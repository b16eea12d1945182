"""A call's way from `train(10) >> pool` to a node and back.

`call` has `@compute` and the operators; `arguments` and `upstream` prepare what a call takes along; `dispatch`
chooses the node and sends the call there; `node_queue` is the queue of one node; `pending` and `futures` are what the
caller waits for; `map` is `pool.map`.
"""

__all__ = ["arguments", "call", "dispatch", "futures", "map", "node_queue", "pending", "upstream"]
