"""Logs: what calls, services and the setup of nodes print, kept in files of this computer for each pool.

The process that runs a pool writes its events here. `skypool logs` reads them, also after the pool or the process has
ended. A run is the life of one pool, from its start to its end. A pool's nodes are rented machines.

- `files`: where the files are, how much of them is kept, and what is removed when.
- `masking`: replaces the values of secrets in what is written.
- `writer`: writes the events of a pool, in a thread of its own.
- `reader`: reads the records of a pool, and makes whole lines of them.
"""

__all__ = ["files", "masking", "reader", "writer"]
