"""The programs that run on a node (a rented machine): the agent, which takes calls, and its workers, which run them.

These programs need only the standard library and cloudpickle. The client is the user's process, and the link is its
connection to the node. The holder is a process at the node's end of each connection. The keeper is the agent's parent
process.

    client ── link ── holder         `start.connect`: hands its stdin and stdout to the agent and waits
                        │ file descriptors over a Unix socket
             keeper ── agent         `start`: outlives the link; `node.Agent`: the only event loop
                        ├─ worker    `worker.Worker`: runs calls, one at a time
                        └─ worker

The agent is one thread on `epoll`. The agent forks its workers, and only a process with one thread can be forked
safely. The agent never unpickles anything that a user sent.

Calls that have not begun wait in a packet socket. All workers of one kind (with devices, or without) read the same
socket, so the kernel gives each call to the next free worker. Each worker writes into a shared page of memory which
call it took.

Every connection begins with the program `loader`, which copies skypool to the node.

In the agent's process:

- `start`: starts keeper and agent, and kills everything when the agent ends.
- `plan`: the node's configuration, and how its devices are split among slots (places where calls run).
- `node`: the agent's event loop: receives calls, returns outcomes (results or errors), handles the deaths of workers.
- `stacks`: what the processes of a node are doing; also the program of `skypool stack` on a node.
- `stops`: stops calls that are cancelled, that run too long, or whose worker hangs; queues lost calls again.
- `answers`: sends errors for calls that were stopped or lost their worker.
- `client`, `connection`: the connected client, and the frames (messages) to and from it.
- `unacknowledged`: outcomes, items of generators and output that the client has not confirmed.
- `call_queue`, `call`: the queue of calls, and one call.
- `batch`: small calls that arrive in one frame; `batch_watch`: takes back calls that wait behind a slow one.
- `slots`: forks the worker processes, also those of gangs, sets their environment variables, signals and watches them.
  When one has died, it kills all that is left of it.
- `processes`: the processes of a node: their names and CPUs, descendants of a process, and orphans.
- `lease`: how long the node may live; each sign of life from the client extends it.
- `notice`: waits for the spot notice (the provider will take the machine back), and tells the running call.
- `call_output`: output of calls: limits it and sends it to the client.
- `store`: functions and `pool.put()` objects; `value_storage`: large values in memory or in files.
- `packages`: the user's own modules and packages, as folders.
- `health`: the report about the node's hardware at the start of the node.
- `own_name`: makes the host name resolve to the right address.
- `monitor`: measures the node and its calls, and runs the process that measures devices.
- `shared_page`: memory of agent, keeper and workers, which shows which worker runs which call.

In a worker's process:

- `worker`: takes calls, unpickles and runs them, and sends their outcomes.
- `worker_channel`, `packets`: the packets between worker and agent.
- `capture`: captures everything that a call prints, if the call's options ask for that.
- `shield`: lets the stop of a call wait while the worker's own code holds a lock.
- `left_behind`: ends the processes that a call has left, so that a new process replaces the worker.
- `call_state`: puts back what a call has changed in its process; `broken_devices`: finds a broken CUDA context.
- `import_clock`: measures how long a call imports modules, which does not count towards its timeout.
- `output_stream`: `sys.stdout` and `sys.stderr`; `streams`: items of generators.
- `modules`: imports the user's own modules; `child_imports`: lets processes that calls start import them, too.
"""

__all__ = [
    "answers",
    "batch",
    "batch_watch",
    "broken_devices",
    "call",
    "call_output",
    "call_queue",
    "call_state",
    "capture",
    "child_imports",
    "client",
    "connection",
    "health",
    "import_clock",
    "lease",
    "left_behind",
    "loader",
    "modules",
    "monitor",
    "node",
    "notice",
    "output_stream",
    "own_name",
    "packages",
    "packets",
    "plan",
    "processes",
    "shared_page",
    "shield",
    "slots",
    "stacks",
    "start",
    "stops",
    "store",
    "streams",
    "unacknowledged",
    "value_storage",
    "worker",
    "worker_channel",
]
