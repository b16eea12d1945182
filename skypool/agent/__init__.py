"""The agent and its workers, which run on a node. They need the standard library and cloudpickle only.

    client ── link ── holder         `start.connect`: hands its stdin and stdout to the agent and waits
                        │ file descriptors over a Unix socket
             keeper ── agent         `start`: outlives the link; `node.Agent`: the one loop
                        ├─ worker    `worker.Worker`: runs calls, one at a time
                        └─ worker

The agent is one thread on `epoll`: it forks its workers, and a process with one thread forks safely. It never
unpickles anything that a user sent. Calls that have not begun wait in one packet socket that all workers read,
so that the kernel gives each to the next free worker; a worker tells which it took in a shared page of memory.

Every connection begins with `loader`, which brings skypool to the node.

In the agent's process:

- `start`: starts keeper and agent, and kills everything when the agent ends.
- `plan`: the node's configuration, and how its devices are split among slots.
- `node`: the agent's event loop: takes calls in, returns outcomes, handles deaths of workers.
- `stops`, `answers`: calls that are cancelled, run too long or lose their worker, and how they are answered.
- `client`, `connection`: the connected client, and its frames; `unacknowledged`: outcomes it has not confirmed.
- `call_queue`, `call`, `batch`, `batch_watch`: the queue of calls, one call, small calls that share a frame, and
  their watch.
- `slots`: forks the worker processes, signals and watches them, reaps those that died.
- `processes`: the processes of a node: their names and CPUs, and those that live below another one.
- `lease`: how long the node may live; extended at each sign of life from the client.
- `notice`: waits for the provider's spot notice, and tells the running call.
- `call_output`: output of calls: limits it and sends it to the client.
- `store`: functions and `pool.put` objects; `value_storage`: large values in memory or in files.
- `health`: report of the node's hardware at its start; `own_name`: the host name resolves to the right address.
- `shared_page`: memory of agent, keeper and workers: which worker runs which call.

In a worker's process:

- `worker`: takes calls, unpickles and runs them, sends their outcomes; `worker_channel`, `packets`: how they travel
  between worker and agent.
- `capture`: everything that a call prints, where it asks for that.
- `output_stream`: `sys.stdout` and `sys.stderr`; `streams`: items of generators; `modules`: imports the user's own
  modules.
"""

__all__ = [
    "answers",
    "batch",
    "batch_watch",
    "call",
    "call_output",
    "call_queue",
    "capture",
    "client",
    "connection",
    "health",
    "lease",
    "loader",
    "modules",
    "node",
    "notice",
    "output_stream",
    "own_name",
    "packets",
    "plan",
    "processes",
    "shared_page",
    "slots",
    "start",
    "stops",
    "store",
    "streams",
    "unacknowledged",
    "value_storage",
    "worker",
    "worker_channel",
]
