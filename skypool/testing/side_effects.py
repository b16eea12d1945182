"""A program that checks that constructing a driver has no side effects, such as network access or opened files.

Run it in a new process, as `python -m skypool.testing.side_effects`. It reads a pickled tuple from stdin: the name of
the driver's module, the name of its class, and the pickled dictionary of the constructor's arguments. It prints a line
for each side effect. If there is none, it prints only empty lines.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import threading
from importlib import resources

_ASKS = ("socket.", "subprocess.", "os.system", "os.posix_spawn", "os.fork", "os.exec", "os.mkdir", "os.listdir",
         "os.scandir", "os.remove", "os.rename", "sqlite3.", "shutil.", "urllib.", "http.", "ftplib.")  # fmt: skip
_CATALOGUE = str(resources.files("skypool"))
"""The folder of skypool, whose data files may be read: the catalogue of accelerators reads its tables on first use."""
_OURS = ("skypool", "cloudpickle", "platformdirs", "rich", "tenacity", "typer")


def main() -> None:
    """Construct the driver that stdin describes, and print a line for each side effect.

    Side effects are opened files, network access, new processes, new threads, and imports of packages other than the
    driver's own, skypool and those that skypool needs. Python and skypool may read their own files. An error of the
    driver's constructor is raised.
    """
    module, qualname, settings = pickle.load(sys.stdin.buffer)
    before = set(sys.modules)  # with what Python itself imports at its start, such as Debian's sitecustomize
    made: object = importlib.import_module(module)
    for name in qualname.split("."):
        made = getattr(made, name)
    seen: list[str] = []
    watching = True

    def watch(event: str, args: tuple[object, ...]) -> None:
        if not watching:
            return
        imported = event == "os.listdir" and str(args[0]).startswith((sys.prefix, sys.base_prefix))
        if event.startswith(_ASKS) and not imported:
            seen.append(f"{event} {args!r:.200}")
        is_code = str(args[0]).endswith((".py", ".pyc", ".so")) or str(args[0]).startswith(_CATALOGUE)
        if event == "open" and not is_code:
            seen.append(f"opens {args[0]}")

    sys.addaudithook(watch)
    assert callable(made)
    made(**pickle.loads(settings))
    watching = False
    own = {*_OURS, module.partition(".")[0]}
    new = {name: each for name, each in sys.modules.items() if name not in before}
    tops = {name.partition(".")[0] for name, each in new.items() if getattr(each, "__file__", None)}
    foreign = sorted(top for top in tops - own if top not in sys.stdlib_module_names and not top.startswith("_"))
    print("\n".join([*seen, *(f"imports {top}" for top in foreign if not top.startswith("skypool"))]))
    print("\n".join(f"starts the thread {each.name}" for each in threading.enumerate()[1:]))


if __name__ == "__main__":
    main()
