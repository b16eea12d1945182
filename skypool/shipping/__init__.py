"""Code that the client (the user's process) sends to nodes, because skypool is not installed there.

- `bundle`: packs skypool and cloudpickle into one zip, with the shell and Python code that unpacks and starts it.
- `sources`: sends the text of scripts, which tracebacks show.
- `user_modules`: finds the user's own modules and their source.
"""

__all__ = ["bundle", "sources", "user_modules"]
