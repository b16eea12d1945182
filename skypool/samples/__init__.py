"""Samples: measurements of devices, nodes (rented machines) and running calls, and what they say about health.

- `values`: `NodeSample`, `DeviceSample` and `CallSample`, and the bounds that are checked when a node sends them.
- `nvml`: reads NVIDIA GPUs through NVML; `tools`: reads other devices with their vendors' tools.
- `sampler`: the program that reads devices, in a process of its own on the node; `machine`: reads `/proc`.
- `health`: judges devices by their samples; `xid`: the XID codes of NVIDIA's driver by severity.
- `session_file`: opens the SQLite file of a session, one run of a pool, on the client.
- `store`: keeps samples in that file; `journal`: keeps events, ended calls and working times of the pool in it.

Values are "claimed" if the node is not trusted (`trust="data"`): its owner may have made them up. The agent is the main
process of a node. The ledger is the client's database of rented machines.
"""

__all__ = ["health", "journal", "machine", "nvml", "sampler", "session_file", "store", "tools", "values", "xid"]
