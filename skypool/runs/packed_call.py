"""Packs a call of a `@compute` function into a file, which its own machine runs when nobody else is there."""

from __future__ import annotations

import contextlib
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skypool.calls.call import Call, packed
from skypool.errors import UsageError
from skypool.files.project import Project
from skypool.runs.call_program import CALL_FILE
from skypool.runs.target import Target
from skypool.shipping import user_modules
from skypool.wire.pickling import PROTOCOL


def check(call: Call[Any]) -> None:
    """Raise UsageError if a call cannot belong to its machine, or has an option that would have no effect there."""
    options, function = call.options, call.function
    name = function.name
    if function.is_generator:
        raise UsageError(
            f"{name} is a generator function, whose items come while its machines run; use a ComputePool, or have it "
            "write them into a file"
        )
    refused = {
        "procs": options.procs is not None,
        "node": options.node not in (None, 0),
        "timeout": options.timeout is not None,
        "retry_on": bool(options.retry_on),
        "grace": options.own_grace is not None,
        "on_interruption": options.on_interruption is not None,
        "devices": options.devices is not None,
        f"output={options.output!r}": options.output in ("silent", "capture"),
    }
    for option, is_given in refused.items():
        if is_given:
            hint = "; max_lifetime= ends it" if option == "timeout" else ""
            raise UsageError(
                f"{name} has the option {option}, which a call that belongs to its machine does not support{hint}; "
                f"leave {option.partition('=')[0]} out, as by with_options, or leave detach=True out"
            )


@contextlib.contextmanager
def as_target(call: Call[Any]) -> Iterator[Target]:
    """Yield the target that runs a call: a project with one file. It is removed at the end of the `with` block.

    Raises:
        UsageError: an argument of the call is an iterator.
        PickleError: the call cannot be packed.
    """
    made = packed(call)
    if made.feeds:
        raise UsageError(
            f"{call.function.name} has an iterator as argument, whose items come from this process; pass a list, or "
            "leave detach=True out"
        )
    *pickled, _ = made.code.buffers
    texts = {each.file: each.data for each in made.code.sources}
    units = user_modules.own_units(texts.values())
    said = {
        "name": call.function.name,
        "code": [bytes(each) for each in pickled],
        "arguments": [bytes(each) for each in made.payload],
        "sources": texts,
        "modules": {path: data for each in units for path, data in each.files.items()},
    }
    with tempfile.TemporaryDirectory(prefix="skypool-call-") as folder:  # for this user only
        (Path(folder) / CALL_FILE).write_bytes(pickle.dumps(said, PROTOCOL))
        name = call.function.name.rpartition(".")[2]
        yield Target(Project(Path(folder).resolve(), "", ""), (name,), ".", name)
