"""The program that begins a node's end of a connection: it reads modules from stdin, and calls `main` of the last one.

It runs after `shipping.package_zip.NOT_FROM_HERE`.
"""

import json
import os
import sys
import types
import zlib


def main(size: int, *words: str) -> None:
    """Read `size` bytes of modules, and call `main` of the last one with the other arguments."""
    text = b""
    while len(text) < size:
        text += os.read(0, size - len(text)) or sys.exit(1)
    module = types.ModuleType("")
    for name, source in json.loads(zlib.decompress(text)).items():
        package, _, last = name.rpartition(".")
        sys.modules[name] = module = types.ModuleType(name)
        setattr(sys.modules.setdefault(package, types.ModuleType(package)), last, module)
        exec(compile(source, name, "exec"), module.__dict__)
    module.main(*words)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
