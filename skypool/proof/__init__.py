"""The proof that skypool works with the user's account at a provider, which `skypool prove` performs and shows.

It has three levels: "read" only reads, "write" sends creates that must be refused, and "cents" rents machines for a few
cents. `skypool doctor` shows the level "read", too.

- `report`: the steps of a proof and their results, as JSON and Markdown.
- `redaction`: removes secrets, account names and addresses from a report.
- `recording`: writes requests and replies into files, without secrets.
- `scrub`: finds what is private in texts. `placeholders` has the texts that take its place.
- `findings`: the levels "read" and "write", and the checks of this computer.
- `selection`: chooses what the level "cents" rents, and what that can cost at most. Pure.
- `comparison`: compares prices and bills with receipts. Pure.
- `renting`: rents a machine by the usual path, runs a call on it, ends it, and proves its end.
- `guard`: watches the end of a machine whose client was killed; `guard_client` is that client.
- `proof`: performs the levels one after the other.

A receipt is a pool's own list of its machines and their costs. The guard is a program on a machine that ends the
machine when its client is gone.
"""

__all__ = [
    "comparison",
    "findings",
    "guard",
    "guard_client",
    "placeholders",
    "proof",
    "recording",
    "redaction",
    "renting",
    "report",
    "scrub",
    "selection",
]
