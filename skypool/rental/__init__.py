"""Machines from the order to the proof that they ended, and their cost.

- `request`: the checked arguments of a pool.
- `launch`: rents the best offer that is in stock, and tries the next one when it is not.
- `rental`: the machines of one pool: keeps the lease in their tags and the ledger current, watches the budget.
- `ledger`: records each machine before it is rented; `ledger_file`: the SQLite file that it is in; `ledger_schema`: its
  tables; `records`: what is read from them; `ledger_damage`: sets a damaged file aside.
- `budget`: costs, budgets and receipts.
- `reaper`: ends all machines of a pool and proves it; `gc`: finds and ends what pools left behind.
"""

__all__ = [
    "budget",
    "gc",
    "launch",
    "ledger",
    "ledger_damage",
    "ledger_file",
    "ledger_schema",
    "reaper",
    "records",
    "rental",
    "request",
]
