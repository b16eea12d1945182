"""Code that the client sends to nodes, because skypool is not installed there.

- `package_zip`: packs skypool and cloudpickle into one zip, with the shell and Python code that unpacks and starts it.
- `pure_packages`: libraries that skypool's client code needs where it runs on a node, as another zip.
- `sources`: sends the text of scripts, which tracebacks show.
- `wheels`: compiled libraries for the kind of machine that a node is.
- `user_modules`: finds the user's own modules and their source.

The client is the user's process, and a node is a machine that runs calls. The loader is the program that unpacks the
zip on a node and starts the agent, the node's main process. A unit is a module of the user's own with all its files.
"""

__all__ = [
    "package_zip",
    "pure_packages",
    "sources",
    "user_modules",
    "wheels",
]
