"""The program that begins a node's end of a transfer: it reads the modules from stdin, and runs `node_end.main`.

It runs after `shipping.package_zip.NOT_FROM_HERE`.
"""

import json
import os
import sys
import types
import zlib


def main(size: int, *words: str) -> None:
    """Read `size` bytes of modules, and call `node_end.main` with the other arguments."""
    text = b""
    while len(text) < size:
        text += os.read(0, size - len(text)) or sys.exit(1)
    for name, source in json.loads(zlib.decompress(text)).items():
        sys.modules[name] = module = types.ModuleType(name)
        exec(compile(source, name, "exec"), module.__dict__)
    sys.modules["skypool.files.node_end"].main(*words)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
