"""Samples: measures devices, nodes (rented machines) and running calls, and keeps the measurements on the client.

`skypool.devices.sample` has the values of a sample, and `skypool.devices.health` judges devices by them.

- `nvml`: reads NVIDIA GPUs through NVML; `tools`: reads other devices with their vendors' tools.
- `sampler`: the program that reads devices, in a process of its own on the node; `machine`: reads `/proc`.
- `session_file`: opens the SQLite file of a session, one run of a pool, on the client.
- `store`: keeps samples in that file; `journal`: keeps events, ended calls and working times of the pool in it.
- `sample_file`: the watch that writes the samples of a pool to that file.
- `reader`: `Samples`, the user's object for the measurements of a pool.

Values are "claimed" if the node is not trusted (`trust="data"`): its owner may have made them up. The agent is the main
process of a node. The ledger is the client's database of rented machines.
"""

__all__ = ["journal", "machine", "nvml", "reader", "sample_file", "sampler", "session_file", "store", "tools"]
