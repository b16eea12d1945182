"""Rented machines from the order to the proof that they ended, and their cost.

- `pool_terms`: the checked arguments of a pool.
- `launch`: rents machines on the best offer, or on the next one if the best is out of stock.
- `supply`: the part of a pool that needs an account of a provider. It rents machines, renews the lease in their
  tags, and ends them.
- `planning`: finds the offers that a pool would rent now.
- `orders`: records what becomes of each order.
- `machine_ends`: ends machines of one pool, and proves that they have ended.
- `pool_account`: the machines that a pool has, what they cost, and its limits. It asks no provider.
- `ledger`: the local database of pools, orders and machines. It records each order before the order is sent.
- `ledger_file`: the SQLite file of the ledger.
- `ledger_schema`: the tables of the ledger.
- `ledger_runs`: the rows of runs that are handed over to their machines.
- `records`: the objects that are read from these tables.
- `lock_holders`: names the process that holds a lock of the ledger.
- `ledger_damage`: detects a damaged ledger file and gives it a new name.
- `run_account`: records a hand-over of a run in the ledger and in the tags of its machine.
- `run_state`: tells the state of such a run.
- `handover`: the data that a process needs to own a pool without an account of a provider.
- `budget`: what a pool may cost, and the checks of its budget and lifetime.
- `receipt`: calculates costs and receipts.
- `reaper`: terminates all machines of a pool, and proves that they have ended.
- `reaper_process`: runs the reaper in a process of its own.
- `gc`: finds and terminates machines and other resources that pools left behind.

The words of this package:

- order: a request to a provider to create machines. Its token identifies it. An order without an answer is open: it may
  have made machines.
- instance: a rented machine. Its node number is its index in the pool.
- slice: several machines that are rented together at one price, such as a TPU slice. Orders, plans and budgets count
  it as one machine.
- session: the id of one run of a pool. Several pools may have the same name one after the other.
- client: the process that runs a pool. It is also called the owner where one process passes a pool on to another.
- driver: the object that talks to one provider. Offer: a machine type that a provider sells, with its price.
- shortage: machines are out of stock. A shortage may pass.
- stay: machines stay for a while after the `with` block of their pool, so that another process can take the pool over.
- lease: the time for which machines live on without a sign of life of their client. Most then end themselves.
- written end: the time at which a machine ends in any case after its run was handed over to it: `skypool.head`.
- receipt: what each instance of a pool cost.
- leftover: a resource of a pool other than an instance, such as a key pair.
"""

__all__ = [
    "budget",
    "gc",
    "handover",
    "launch",
    "ledger",
    "ledger_damage",
    "ledger_file",
    "ledger_runs",
    "ledger_schema",
    "lock_holders",
    "machine_ends",
    "orders",
    "planning",
    "pool_account",
    "pool_terms",
    "reaper",
    "reaper_process",
    "receipt",
    "records",
    "run_account",
    "run_state",
    "supply",
]
