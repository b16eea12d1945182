"""Machines from the order to the proof that they ended, and their cost.

- `request`: the checked arguments of a pool.
- `launch`: rents the best offer that is in stock, and tries the next one when it is not.
- `rental`: rents for one pool, keeps the lease in the tags of its machines, and watches the budget; `planning`: what it
  would rent now; `holdings`: the machines that it has.
- `ledger`: records each machine before it is rented; `ledger_file`: the SQLite file that it is in; `ledger_schema`: its
  tables; `records`: what is read from them; `ledger_damage`: sets a damaged file aside.
- `budget`: costs, budgets and receipts.
- `reaper`: terminates all machines of a pool and proves it; `reaper_process`: does so in a process of its own.
- `gc`: finds and terminates what pools left behind.
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
