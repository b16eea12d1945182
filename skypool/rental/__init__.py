"""Rented machines from the order to the proof that they ended, and their cost.

An order is a request to a provider to create machines.

- `request`: the checked arguments of a pool.
- `launch`: rents machines on the best offer, or on the next one if the best is out of stock.
- `rental`: rents for one pool, keeps the lease in the tags of its machines, and watches the budget.
- `planning`: what a pool would rent now.
- `holdings`: the machines that a pool has.
- `ledger`: the local database of pools, orders and machines. It records each order before the order is sent.
- `ledger_file`: the SQLite file of the ledger.
- `ledger_schema`: the tables of the ledger.
- `records`: the objects that are read from these tables.
- `ledger_damage`: detects a damaged ledger file and gives it a new name.
- `budget`: costs, budgets and receipts.
- `reaper`: terminates all machines of a pool, and proves that they have ended.
- `reaper_process`: runs the reaper in a process of its own.
- `gc`: finds and terminates machines and other resources that pools left behind.
"""

__all__ = [
    "budget",
    "gc",
    "holdings",
    "launch",
    "ledger",
    "ledger_damage",
    "ledger_file",
    "ledger_schema",
    "planning",
    "reaper",
    "reaper_process",
    "records",
    "rental",
    "request",
]
