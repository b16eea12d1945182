"""Protects this process from other users of the same computer, and the terminal from texts of other machines.

docs/trust.md lists what other users can reach, and what each part does about it.

- `book`: a connection to SQLite that takes any text.
- `private`: folders and files that only this user can change.
- `text`: removes terminal control sequences from texts of nodes (rented machines), servers and programs, and makes
  texts encodable.
"""

__all__ = ["book", "private", "text"]
