"""Machines from the first create to the proof that they ended, and what they cost.

`request` is what a pool was asked to be; `launch` rents the best offer that is in stock; `rental` holds the machines
of one pool and renews them; `ledger` writes down each create before it is sent (`records` reads it, `ledger_damage`
repairs it); `budget` computes costs and the receipt; `reaper` ends machines and proves it; `gc` finds and ends what
pools left behind.
"""

__all__ = ["budget", "gc", "launch", "ledger", "ledger_damage", "reaper", "records", "rental", "request"]
