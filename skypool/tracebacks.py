"""Shortens the tracebacks of errors that skypool raises, and gives warnings at the user's lines.

A traceback has the user's lines, the error, and one line for each cause. `SKYPOOL_DEBUG=1` in the environment shows all
frames, as Python does. An exception that a user's function raised on a node (a rented machine) is shown by Python as
usual, with the remote traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from skypool.errors import RemoteError, SkypoolError

_HERE = os.path.dirname(__file__)
_CHECKOUT = os.path.dirname(_HERE)
"""The folder that contains the package skypool. In a checkout, the folders of drivers and images are in it, too."""
_LIBRARIES = tuple(
    {_HERE + os.sep, *(os.path.join(_CHECKOUT, name, "skypool_") for name in ("providers", "images"))}
    | {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
"""Beginnings of the paths of skypool, its drivers, the standard library and installed packages.

Frames (lines of a traceback) in files below these paths are left out.
"""
_installed = threading.Lock()
_hear: ContextVar[Callable[[str], object] | None] = ContextVar("skypool_hear", default=None)
"""Called with the texts of warnings in place of `warnings.warn`, if it is set."""


def install() -> None:
    """Show skypool's errors in short form in the main thread, in other threads and in IPython.

    Replaces `sys.excepthook` and `threading.excepthook`; other errors go to the former hooks. Only the first call in a
    process has an effect.
    """
    if not _installed.acquire(blocking=False):
        return
    for_main, for_threads = sys.excepthook, threading.excepthook

    def in_main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_plain(error):
            sys.stderr.write(told(error))
        else:
            for_main(kind, error, trace)

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and is_plain(args.exc_value):
            name = args.thread.name if args.thread is not None else "?"
            sys.stderr.write(f"Exception in thread {name}:\n{told(args.exc_value)}")
        else:
            for_threads(args)

    sys.excepthook, threading.excepthook = in_main, in_thread
    if (ipython := sys.modules.get("IPython")) and (shell := ipython.get_ipython()) is not None:
        shell.set_custom_exc((SkypoolError,), _in_ipython)


def _in_ipython(shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any = None) -> None:
    if is_plain(error):
        shell._showtraceback(kind, error, told(error).splitlines())
    else:
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


def is_plain(error: BaseException) -> bool:
    """Return True if an error is shown in short form: an error raised by skypool, not by a function on a node.

    A RemoteError, or an error whose cause is a remote traceback, comes from a function on a node. If the environment
    variable SKYPOOL_DEBUG is set to anything but "0" or "", the result is always False.
    """
    if os.environ.get("SKYPOOL_DEBUG", "") not in ("", "0"):
        return False
    is_remote = type(error.__cause__).__name__ == "RemoteTraceback"
    return isinstance(error, SkypoolError) and not isinstance(error, RemoteError) and not is_remote


def told(error: BaseException) -> str:
    """Return the short form of an error: the user's frames, the error with its notes, and one line for each cause.

    A cause gets no line if its text is empty or is part of the lines before. The result ends with a hint that
    SKYPOOL_DEBUG=1 shows all frames, and a newline.
    """
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not _is_library(each.filename)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    own = f"{type(error).__module__}.{type(error).__qualname__}: {error}\n"
    lines += [own, *(f"{note}\n" for note in getattr(error, "__notes__", ()))]
    said, cause = own, error.__cause__
    while cause is not None:
        words = str(cause).strip()
        if words and words not in said:
            lines.append(f"  caused by {type(cause).__module__}.{type(cause).__qualname__}: {words}\n")
        said, cause = said + words, cause.__cause__
    return "".join([*lines, "(set SKYPOOL_DEBUG=1 to see the frames of libraries, too)\n"])


def _is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARIES) or filename.startswith("<frozen ")


def warn(text: str, category: type[Warning] = RuntimeWarning, source: object = None) -> None:
    """Tell the user something that is not an error. Any thread may call this.

    In the work of a pool, the text becomes an event of the pool (see `heard_by`). Elsewhere it is a warning, at the
    line of the user's program that has called skypool.

    Args:
        text: what is wrong, and what to do about it.
        category: the class of the warning.
        source: the object whose origin Python shows if `tracemalloc` is on.
    """
    if (hear := _hear.get()) is not None:
        hear(text)
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
        source=source,
    )


@contextlib.contextmanager
def heard_by(hear: Callable[[str], object]) -> Iterator[None]:
    """Have `hear` called with the texts of warnings in this block, and in tasks and threads that begin in it.

    A thread begins in it if it is started by `asyncio.to_thread` or `drivers.retry`.
    """
    token = _hear.set(hear)
    try:
        yield
    finally:
        _hear.reset(token)


@contextlib.contextmanager
def warned_here() -> Iterator[None]:
    """Give the warnings of other threads that work for this block when it ends, each once, at the user's line."""
    told: dict[str, None] = {}
    try:
        with heard_by(told.setdefault):
            yield
    finally:
        for text in told:
            warn(text)
