"""Code that the client sends to nodes, because nothing of skypool is installed there.

- `bundle`: skypool and cloudpickle in one zip, and the lines of shell and Python that unpack and start it.
- `user_modules`: finds the user's own modules and their source.
"""

__all__ = ["bundle", "user_modules"]
