"""The life of a pool: nodes are started, replaced when they are lost, and ended. Calls are sent to them.

- `lifecycle`: a pure state machine. It decides when to launch, drain, replace and end nodes.
- `states`: the states, events and actions of `lifecycle`, as values.
- `replacement`: decides if a lost node is replaced.
- `shrinking`: decides which nodes are retired when a pool becomes smaller.
- `surface`: `CallSurface`, the ways to send calls to a pool or to some of its nodes.
- `call_routing`: sends these calls to nodes: to one, to each of several, or as a gang.
- `views`: `PoolView`, which `pool[0:4]` returns: some nodes of a pool that calls can be sent to.
- `life`: `Life`, the state of a pool, and the tasks that work on it.
- `engine`: makes the parts of a pool, starts and stops it, and performs what `lifecycle` decides.
- `growth`: rents the machines of new nodes, and lets a pool grow while calls wait.
- `terminations`: ends the machines of nodes.
- `node_count`: changes the number of nodes, and waits until nodes are ready.
- `takeover`: takes a pool over from another process, or gives it up to one.
- `tending`: renews the lease and the prices of a pool, and ends it when its limits are over.
- `call_ends`: ends the calls, streams and services of a pool that ends.
- `call_advice`: tells the user about calls that could run better.
- `watch_closing`: closes the watches of a pool within a limit of time.
- `departures`: all ways in which a pool loses a node.
- `node_startup`: turns rented machines into nodes.
- `agents`: connects to the agents of nodes.
- `connections`: how each node is reached.
- `watch`: `Watch`, the base class of watches; `facts`: what a pool shows to its watches.
- `open_forwards`: ports of this computer that lead to ports of nodes.
- `saving`: has nodes save folders to buckets, and bring them back.
- `renewals`: sends nodes new temporary credentials before the former ones expire.
- `health`: judges nodes by their samples; `new_samples`: the newest samples, until they are written to a file.
- `idle_accounting`: records the idle time of nodes in the ledger.
- `limits`: finds out when a pool must end as planned: budget, lifetime, another process.
- `idle_shutdown`: ends a pool that has had no work for a while.
- `service`: `Service`, the user's object for a long-lived call or program that takes no slot.
- `service_supervisor`: starts the services of a pool, restarts them after their end, and closes them.
- `network`: checks that the nodes reach each other; `skypool.gangs.network_report` writes the error message.
- `node_listener`: passes the messages of a node on.
- `unused_devices`: tells the user about devices that are not used.
- `trust_levels`: decides for each node if its results may be unpickled.
- `interpreter_exit`: ends open pools when the interpreter exits.

The words of this package:

- node: a rented machine that runs calls. Its number is its index in the pool, from 0.
- slice: several hosts that can only be rented together, such as a TPU slice. Each host is a node.
- engine: the part of a pool that acts. Its thread is that of `skypool.event_loop`.
- agent: skypool's main process on a node. It starts a worker process for each slot.
- slot: a place on a node for one call at a time.
- link: the connection to the agent of a node.
- dispatch: the part that queues calls and sends them to nodes.
- gang: the processes of one call with the option `procs`.
- service: a call that runs beside all others and takes no slot.
- linger time: how long a pool may have no work before it ends itself.
- notice: the provider's announcement that it takes a machine back, or a sentence that is shown to the user.
- sample: measurements of a node and its devices (accelerators).
- forward: a port of this computer that leads to a port of a node.
- watch: an object that observes a pool and changes nothing, such as its logs or its metrics.
- client: the process that runs a pool.
- ledger: the local database of pools and rented machines.
- lease: the time after which a machine ends itself, unless it is renewed.
- drain: give a node no more calls, and end it when those that it has are done.
- attach: take a running pool over from a former process.
- stranger: a node that is not trusted. Its results are not unpickled, but read as plain data.
- observer: another process of the user that looks at the pool, such as `skypool ps`.
- leftover: a resource at a provider that a pool made beside its machines, such as a key pair.
"""

__all__ = [
    "agents",
    "call_advice",
    "call_ends",
    "call_routing",
    "connections",
    "departures",
    "engine",
    "facts",
    "growth",
    "health",
    "idle_accounting",
    "idle_shutdown",
    "interpreter_exit",
    "life",
    "lifecycle",
    "limits",
    "network",
    "new_samples",
    "node_count",
    "node_listener",
    "node_startup",
    "open_forwards",
    "renewals",
    "replacement",
    "saving",
    "service",
    "service_supervisor",
    "shrinking",
    "states",
    "surface",
    "takeover",
    "tending",
    "terminations",
    "trust_levels",
    "unused_devices",
    "views",
    "watch",
    "watch_closing",
]
