"""Calls on the client's side: how `train(10) >> pool` gets to a node, and its result back to the caller.

Words that this package uses:

- node: a rented machine that runs calls. Its agent is the main process of skypool there; workers run the calls.
- slot: the part of a node that runs one call at a time. Calls that need no device (accelerator) use CPU slots.
- lane: the slots of one kind on a node.
- frame: one message to or from a node. Several small calls may share a frame.
- under way: sent to a node and not ended.
- leaving node: it gets no new calls, because it was retired, is unhealthy, or its provider takes the machine back.
- gang: one call that runs as several processes. Each process has a number, its rank.
- part: one node's run of a call that runs on several nodes.
- effect: a report to a caller or to the user that is decided under a lock, and made after the lock is released.
- service: a call that takes no slot and runs until it is stopped.
- former client: a process that had the same pool before this one.
- engine: the thread that drives the pools.

Modules:

- `call`: `@compute`, `Call`, and the operators that send a call to a pool.
- `command`: `cmd`, which makes a call that runs a program of the node; `program`: runs it there.
- `arguments`: pickles the arguments of a call; `upstream`: sends the items of iterator arguments one by one.
- `entered`: the pool that `await call` uses.
- `options`: the options that `@compute` takes, such as timeout, retries and output.
- `pending_calls`: the client's record of a call until it ends.
- `dispatch`: takes calls and the messages of nodes, and sends calls again when their node is lost.
- `roster`: the nodes, and what is known about them; `placement`: chooses a node for each call and sends it there.
- `call_events`: reports calls that fail or run again to the user.
- `effects`: actions that are decided under the lock and performed after it; `values`: the values of `pool.put`.
- `waiting_calls`: the calls that wait for a node; `call_messages`: handles messages of nodes about running calls.
- `node_queue`: the queue of one node: the calls sent there, its free slots, and the frames to it.
- `idle_time`: sums up the time in which a node ran no call.
- `tally`: counts the calls that have ended, and records them.
- `futures`: `CallFuture` and `Stream`, which the caller waits for; `map`: `pool.map`.
- `callbacks`: threads that call functions that users add to futures. These functions may block.
- `gangs`: starts, stops and reruns the processes of a gang together. `skypool.gangs` decides what happens.
- `gang_steps`: has the ranks of a gang hear of a notice at one step.
- `broadcast`: one call that runs on several nodes, and stops on all of them when it fails on one.
- `groups`: several calls that run at the same time.
"""

__all__ = [
    "arguments",
    "broadcast",
    "call",
    "call_events",
    "call_messages",
    "callbacks",
    "command",
    "dispatch",
    "effects",
    "entered",
    "futures",
    "gang_steps",
    "gangs",
    "groups",
    "idle_time",
    "map",
    "node_queue",
    "options",
    "pending_calls",
    "placement",
    "program",
    "roster",
    "tally",
    "upstream",
    "values",
    "waiting_calls",
]
