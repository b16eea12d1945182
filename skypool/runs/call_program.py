"""The program on a node that runs a call which belongs to its machine, and writes the result into a file."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pickle
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from skypool import runtime
from skypool.agent.modules import ScriptModule, send_script_by_value, take_source
from skypool.safety import removal
from skypool.wire import codec, exceptions, namespaces
from skypool.wire.frames import Buffer
from skypool.wire.pickling import PROTOCOL

CALL_FILE = "call.pickle"
"""The file with the call, in the folder where it runs."""
RESULT = "result"
"""The file with its result, in the folder of its output files."""
_MODULES = "modules"
"""The folder of the user's own modules, below that in which the call runs."""
_BEGIN = (
    "import json, sys; said = json.loads(sys.argv[1]); sys.path[:] = said['path']; "
    "from skypool.runs import call_program; call_program.main(said)"
)


def argv(output: str) -> list[str]:
    """Return the command that runs the call of the current folder, in a worker that may run calls.

    `output` is the folder of its output files, in which it writes the result.
    """
    said = {
        "path": [each for each in sys.path if each],
        "place": runtime.place(),
        "result": os.path.join(output, RESULT),
    }
    return [sys.executable, "-c", _BEGIN, json.dumps(said)]


def main(said: Mapping[str, Any]) -> NoReturn:
    """Run the call in the current folder, write its result, and end the process: with status 0, or 1 if it raised."""
    runtime.enter_again(said["place"])
    module = ScriptModule("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    namespaces.own_main(module.__dict__)
    sys.argv = ["skypool-worker"]
    send_script_by_value()
    is_value, buffers = True, list[Buffer]()
    try:
        buffers = _called()
    except KeyboardInterrupt:  # it was cancelled
        raise
    except BaseException as e:  # noqa: BLE001 - every error is sent to the caller
        is_value, buffers = False, exceptions.dump_error(e)
        _, text = pickle.loads(buffers[0])
        print(text, end="", file=sys.stderr)  # for `skypool logs`
    _write(Path(said["result"]), pickle.dumps((is_value, [bytes(each) for each in buffers]), PROTOCOL))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0 if is_value else 1)  # threads that it has left do not keep its machine


def _called() -> list[Buffer]:
    """Run the call, and return its serialized value."""
    call = pickle.loads(Path(CALL_FILE).read_bytes())
    _unpack(call["modules"])
    for file, text in call["sources"].items():
        take_source(file, text)
    view = namespaces.View()
    with namespaces.loading(view):
        function = codec.loads(call["code"])
    namespaces.enter(view)
    args, kwargs = codec.loads([*map(bytearray, call["arguments"])])
    try:
        value = function(*args, **kwargs)
        if type(value) is types.CoroutineType:
            value = asyncio.run(value)
    except SystemExit as e:
        if e.code not in (None, 0):
            raise
        value = None
    return exceptions.dump_result(value, f"the result of {call['name']}")


def _unpack(files: Mapping[str, bytes]) -> None:
    """Write the user's own modules, and let this process and those that it starts import them."""
    folder = Path(_MODULES).resolve()
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    sys.path.insert(0, str(folder))
    outside = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), outside]))


def _write(path: Path, data: bytes) -> None:
    """Write a file, which appears when it is complete and on the disk."""
    part = path.with_name(f"{path.name}.part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def clean(folder: Path) -> None:
    """Remove the call, whose arguments may be private, and the user's modules, when it is over."""
    (folder / CALL_FILE).unlink(missing_ok=True)
    removal.remove(folder / _MODULES)


def digest_of(path: Path) -> tuple[int, str] | None:
    """Return the size in bytes and the SHA-256 of a file; None if it is not there."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
