"""The programs that run on a node: the agent, which takes calls, and its workers, which run them.

These programs need only the standard library and cloudpickle.

    client ── link ── holder         `holder.connect`: hands its stdin and stdout to the agent and waits
                        │ file descriptors over a Unix socket
             keeper ── agent         `keeper`: outlives the link; `node.Agent`: the only event loop
                        ├─ worker    `worker.Worker`: runs calls, one at a time
                        └─ worker

The agent is one thread on `epoll`. The agent forks its workers, and only a process with one thread can be forked
safely. The agent never unpickles anything that a user sent.

Calls that have not begun wait in a packet socket. All workers of one kind (with devices, or without) read the same
socket, so the kernel gives each call to the next free worker. Each worker writes into a shared page of memory which
call it took.

Every connection begins with the program `loader`, which copies skypool to the node.

The words of this package:

- node: a machine that runs calls. Client: the user's process. Link: the client's connection to the node.
- agent: the node's main process. Keeper: its parent process. Holder: the process at the node's end of a link.
- slot: a place where one call runs at a time. A worker is the process that fills it.
- MAIN slots share out the node's devices, and CPU slots have none. A node without devices has MAIN slots only.
- frame: a message between client and agent. Packet: a message between agent and worker. Both have a JSON header; words
  in capitals, such as HELLO and PONG, are their kinds (`skypool.wire.frames.Kind`).
- outcome: the result or the error of a call.
- large value: one of more than 64 KiB. It is sent in pieces before the frame that refers to it.
- batch: several small calls in one frame, which one worker runs in order.
- gang: a call that runs as several processes on its nodes. Service: a long-lived call beside all others.
- notice: the provider's announcement that it takes the machine back. Interruption: that it does so.
- lease: how long the node may live after the last sign of life from its client.
- guard: the process of root that ends a rented machine; on other machines, the keeper ends the node.
- doomed call: a call that is being stopped, and whose outcome will be an error of the agent.
- stream: the items that a generator call sends. Credit: the client's message that it has taken items, so that the call
  may send more. Iterator argument: an iterator of the client, whose items a call takes one by one.
- linger time: how long the node may live without work. Grace: how long a call may go on after it was asked to stop.
- agent's clock: a monotonic time in seconds, which leaves out pauses of the whole node, such as of a suspended machine.

In the agent's process:

- `holder`: starts the agent if there is none, and gives it the connection of a client.
- `keeper`: starts the agent, and kills everything when it ends; `agent_socket`: the socket at which the agent listens.
- `slot_plan`: the node's configuration, and how its devices are split among slots.
- `agent`: the event loop: receives calls, returns outcomes, handles the deaths of workers.
- `messages`: what clients and workers send, as typed tuples, each made from a frame in one place.
- `call_names`: the calls that the client has not acknowledged, by name; `status`: reports the state of the node.
- `items`: passes items of iterator arguments to workers, and credit for streams.
- `stacks`: reads what the processes of a node are doing; also the program that `skypool stack` runs on a node.
- `stops`: stops calls that are cancelled, that run too long, or whose worker hangs; queues lost calls again.
- `failed_calls`: sends errors for calls that were stopped or lost their worker.
- `client_session`, `connection`: the connected client, and the frames to and from it.
- `unacknowledged`: keeps outcomes, items of generators and output until the client has confirmed them.
- `call_queue`, `call`: the queue of calls, and the record of one call.
- `batch`: keeps batches; `batch_watch`: takes back calls that wait behind a slow one.
- `worker_processes`: forks the workers, sets their environment variables, signals and watches them, and kills what they
  leave.
- `processes`: the processes of a node: their names and CPUs, descendants of a process, and orphans.
- `lease`: computes the node's deadline from its lease and other limits.
- `guard`: asks what ends the machine for a written end, which only comes nearer, and for an end now.
- `gang_steps`: lets the ranks of a gang agree at which step they hear of a notice.
- `stop_notice`: tells calls that the node stops them soon, to save what is left.
- `notice`: waits for the notice, and tells the running call.
- `call_output`: limits the output of calls and sends it to the client.
- `store`: keeps functions and `pool.put()` objects; `value_storage`: large values, in memory or in files.
- `packages`: keeps the user's own modules and packages, as folders.
- `node_facts`: describes the node's hardware at the start of the node.
- `own_name`: makes the host name resolve to the right address.
- `monitor`: measures the node and its calls, and runs the process that measures devices.
- `mover_watch`: runs the mover, the process that saves folders to buckets.
- `ownership`: who owns the machine; `hand_over`: hands a run over from the client to a runner on the machine;
  `runner_watch`: starts and watches the runner.
- `shared_page`: memory of agent, keeper and workers, which shows which worker runs which call.

In a worker's process:

- `worker`: takes calls, unpickles and runs them, and sends their outcomes.
- `worker_channel`, `packets`: send and receive packets between worker and agent.
- `own_notices`: `interruption`, by which a call or a program that it has started asks for a notice.
- `capture`: captures everything that a call prints, if the call's options ask for that.
- `shield`: lets the stop of a call wait while the worker's own code holds a lock.
- `left_processes`: ends the processes that a call has left, so that a new process replaces the worker.
- `restore`: puts back what a call has changed in its process; `broken_devices`: finds a broken CUDA context.
- `import_clock`: measures how long a call imports modules, which does not count towards its timeout.
- `output_stream`: `sys.stdout` and `sys.stderr`; `streams`: sends the items of generators.
- `modules`: imports the user's own modules; `child_imports`: lets processes that calls start import them, too.
"""

__all__ = [
    "agent",
    "agent_socket",
    "batch",
    "batch_watch",
    "broken_devices",
    "call",
    "call_names",
    "call_output",
    "call_queue",
    "capture",
    "child_imports",
    "client_session",
    "connection",
    "failed_calls",
    "gang_steps",
    "guard",
    "hand_over",
    "holder",
    "import_clock",
    "items",
    "keeper",
    "lease",
    "left_processes",
    "loader",
    "messages",
    "modules",
    "monitor",
    "mover_watch",
    "node_facts",
    "notice",
    "output_stream",
    "own_name",
    "own_notices",
    "ownership",
    "packages",
    "packets",
    "processes",
    "restore",
    "runner_watch",
    "shared_page",
    "shield",
    "slot_plan",
    "stacks",
    "status",
    "stop_notice",
    "stops",
    "store",
    "streams",
    "unacknowledged",
    "value_storage",
    "worker",
    "worker_channel",
    "worker_processes",
]
