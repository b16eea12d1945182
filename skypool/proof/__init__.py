"""The proof that skypool works with the user's account at a provider, which `skypool prove` performs and shows.

It has three levels: "read" only reads, "write" sends creates that must be refused, and "cents" rents machines for a few
cents. `skypool doctor` shows the level "read", too.

- `report`: the steps of a proof and their results, as JSON and Markdown.
- `report_redaction`: removes secrets, account names and addresses from a report.
- `recording`: writes requests and replies into files, without secrets.
- `recording_scrub`: finds what is private in texts. `placeholders` has the texts that take its place.
- `free_checks`: the levels "read" and "write", and the checks of this computer.
- `selection`: chooses what the level "cents" rents, and computes what that can cost at most. No I/O.
- `comparison`: compares prices and bills with receipts. No I/O.
- `renting`: rents a machine by the usual path, runs a call on it, ends it, and proves its end.
- `self_end_check`: watches the end of a machine whose client was killed; `killed_client` is that client.
- `proof`: performs the levels one after the other.

Words of this package:

- create: a request to make a machine.
- finding: the result of one check, with a title, a text and advice. A step of the report is made of it.
- plan: the offers that fit the user's wish, the best first.
- stage: one machine that the level "cents" rents, and what it is for.
- receipt: a pool's own list of its machines and their costs. It is made from the ledger, a local database.
- guard: a program on a machine that ends the machine when its client is gone. The lease is how long it waits.
- exchange: a request to a provider, and the reply. A recording is a folder with exchanges.
- placeholder: text that takes the place of private text.
"""

__all__ = [
    "comparison",
    "free_checks",
    "killed_client",
    "placeholders",
    "proof",
    "recording",
    "recording_scrub",
    "renting",
    "report",
    "report_redaction",
    "selection",
    "self_end_check",
]
