"""Observers: other processes of the same user that look into a running pool, such as `skypool ps` in another terminal.

The owner of a pool (the process that made it) serves them on a Unix socket. Observers read the state and the events of
the pool, forward ports of its nodes (rented machines) and run commands there, using the owner's connection settings.
They cannot send calls, rent or end machines: there is no such request.

- `pool_sockets`: where the sockets are, and how they are put there and removed.
- `protocol`: the messages between an observer and the owner.
- `stacks`: what the processes of the nodes are doing.
- `server`: the owner's side; `observed`: what it shows of a pool; `watch`: opens and closes it with the pool.
- `client`: the observer's side.

A node's agent is the process there that runs calls. A forward is a port of this computer that leads to a port of a
node. A socket is stale if its owner was killed, so that no process serves it.
"""

__all__ = ["client", "observed", "pool_sockets", "protocol", "server", "stacks", "watch"]
