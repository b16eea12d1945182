"""What runs on a node: the agent and its workers. The standard library and cloudpickle only.

    client ── link ── holder         `start.connect`: hands its stdin and stdout to the agent and waits
                        │ file descriptors over a Unix socket
             keeper ── agent         `start`: outlives the link; `node.Agent`: the one loop
                        ├─ worker    `worker.Worker`: runs calls, one at a time
                        └─ worker

The agent is one thread on `epoll`: it forks its workers, and a process with one thread forks safely. It never
unpickles anything that a user sent. Calls that have not begun wait in one packet socket that all workers read,
so that the kernel gives each to the next free worker; a worker tells which it took in a shared page of memory.
"""
