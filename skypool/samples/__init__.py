"""Samples: measurements of devices, nodes (rented machines) and running calls, and what they say about health.

- `values`: `NodeSample`, `DeviceSample` and `CallSample`, and the bounds that are checked when a node sends them.
- `nvml`: reads NVIDIA GPUs through NVML; `tools`: reads other devices with their vendors' tools.
- `sampler`: the program that reads devices, in a process of its own on the node; `machine`: reads `/proc`.
- `health`: judges devices by their samples; `xid`: the XID codes of NVIDIA's driver by severity.
- `store`: keeps samples on the client, in one SQLite file for each pool, and is the only module that reads them.
"""

__all__ = ["health", "machine", "nvml", "sampler", "store", "tools", "values", "xid"]
