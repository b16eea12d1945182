"""Protects this process from other users of the same computer, and from what other machines send.

docs/trust.md lists what other users can reach, and what each part does about it. A node is a rented machine of a pool.

- `sqlite_connection`: a connection to SQLite that takes any text.
- `descriptors`: file descriptors in reserve for the end of machines.
- `never_sent`: the names of files with secrets, which are not sent to nodes.
- `encodings`: the ways in which a secret may be written in texts.
- `peers`: which user a Unix socket is connected to.
- `user_folders`: the folders in which the client keeps files.
- `private`: folders and files that only this user can change.
- `received_data_limit`: counts what this process keeps of each node, and refuses what is too much.
- `durable`: files that stay through a loss of power.
- `removal`: removes folders, but nothing that is mounted in them.

A surrogate is a character that UTF-8 cannot encode. Python uses surrogates for bytes that are not UTF-8.
"""

__all__ = [
    "descriptors",
    "durable",
    "encodings",
    "never_sent",
    "peers",
    "private",
    "received_data_limit",
    "removal",
    "sqlite_connection",
    "user_folders",
]
