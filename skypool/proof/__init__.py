"""The proof of an account, in three levels: what only reads, what must be refused, and machines for a few cents.

The command `skypool prove` shows it, and `skypool doctor` shows the level "read".

- `report`: the steps of a proof and their results, as JSON and Markdown.
- `redaction`: removes secrets, account names and addresses from a report.
- `findings`: the levels "read" and "write", and the checks of this computer.
- `selection`: chooses what the level "cents" rents, and what that can cost at most. Pure.
- `comparison`: compares prices and bills with receipts. Pure.
- `renting`: rents a machine by the usual path, runs a call on it, ends it, and proves its end.
- `guard`: watches the end of a machine whose client was killed; `guard_client` is that client.
- `proof`: performs the levels one after the other.
"""

__all__ = [
    "comparison",
    "findings",
    "guard",
    "guard_client",
    "proof",
    "redaction",
    "renting",
    "report",
    "selection",
]
