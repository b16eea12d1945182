"""Shortens the tracebacks of errors that skypool raises, and issues warnings at the line of the user's code.

A traceback has the user's lines, the error, and one line for each cause. An exception of a user's function on a node is
shown by Python as usual, with the remote traceback, but without the frames of skypool. `SKYPOOL_DEBUG=1` in the
environment shows all frames.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import Any

from skypool.errors import RemoteError, SkypoolError
from skypool.text import plain, printable

_HERE = os.path.dirname(__file__)
_CHECKOUT = os.path.dirname(_HERE)
"""The folder that contains the package skypool. In a checkout, the folders of drivers and images are in it, too."""
_OURS = (
    _HERE + os.sep,
    *(os.path.join(_CHECKOUT, name, "skypool_") for name in ("providers", "images")),
    os.path.join(_CHECKOUT, "skypool_"),
)
"""Beginnings of the paths of skypool, its drivers and its images, in a checkout and where they are installed."""
SITE_FOLDERS = ("site-packages", "dist-packages")
"""The names of the folders in which Python environments have their installed packages."""
_LIBRARIES = (
    *_OURS,
    os.path.dirname(os.__file__) + os.sep,
    *(os.path.join(each, "") for each in sys.path if os.path.basename(each) in SITE_FOLDERS),
)
"""Beginnings of the paths of skypool, the standard library and installed packages."""
_LONGEST_CHAIN = 50
"""The most causes of an error that are looked at."""
_installed = threading.Lock()
_hear: ContextVar[Callable[[str], object] | None] = ContextVar("skypool_hear", default=None)
"""A function that gets the texts of warnings in place of `warnings.warn`; None if `warnings.warn` gets them."""


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
            _leave_out_own_frames(error)
            for_main(kind, error, error.__traceback__ or trace)

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and is_plain(args.exc_value):
            name = args.thread.name if args.thread is not None else "?"
            sys.stderr.write(f"Exception in thread {name}:\n{told(args.exc_value)}")
        else:
            if args.exc_value is not None:
                _leave_out_own_frames(args.exc_value)
            for_threads(args)

    sys.excepthook, threading.excepthook = in_main, in_thread
    if (ipython := sys.modules.get("IPython")) and (shell := ipython.get_ipython()) is not None:
        shell.set_custom_exc((Exception, KeyboardInterrupt), _in_ipython)


def _in_ipython(shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any = None) -> None:
    if is_plain(error):
        shell._showtraceback(kind, error, told(error).splitlines())
    else:
        _leave_out_own_frames(error)
        shell.showtraceback(
            (kind, error, error.__traceback__ or trace), tb_offset=tb_offset, running_compiled_code=True
        )


def is_plain(error: BaseException) -> bool:
    """Return True if an error is shown in short form: it was raised by skypool, and not by a function on a node.

    Always False if the environment variable SKYPOOL_DEBUG is set to anything but "0" or "".
    """
    images = sys.modules.get("skypool_images.errors")  # if it is loaded: it takes long
    own = (SkypoolError,) if images is None else (SkypoolError, images.ImageError)
    return isinstance(error, own) and not _is_remote(error) and not _shows_all()


def _shows_all() -> bool:
    return os.environ.get("SKYPOOL_DEBUG", "") not in ("", "0")


def _is_remote(error: BaseException) -> bool:
    for _ in range(_LONGEST_CHAIN):
        if isinstance(error, RemoteError) or type(error).__name__ == "RemoteTraceback":
            return True
        if error.__cause__ is None:
            break
        error = error.__cause__
    return False


def _leave_out_own_frames(error: BaseException) -> None:
    """Remove frames of skypool, and of libraries that it called, from tracebacks. Keep them if they may show a bug."""
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [] if _shows_all() else [error]
    while todo:
        each = todo.pop()
        if each is None or any(each is one for one in seen):
            continue
        seen.append(each)
        todo += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions
        if _is_users(each):
            each.__traceback__ = _without_own_frames(each.__traceback__)


def _is_users(error: BaseException) -> bool:
    """Return True if an error comes from the user's code or input, and so cannot show a bug of skypool."""
    if isinstance(error, BaseExceptionGroup) and not _is_remote(error):
        return all(map(_is_users, error.exceptions))
    is_no_name = isinstance(error, AttributeError) and error.obj is sys.modules["skypool"]
    return _is_remote(error) or isinstance(error, (SkypoolError, KeyboardInterrupt)) or is_no_name


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without frames of skypool and libraries that it called; unchanged if no frame is left."""
    kept: list[TracebackType] = []
    is_inside = False
    each = trace
    while each is not None:
        is_inside = _is_ours(each.tb_frame) or (is_inside and _is_library(each.tb_frame))
        if not is_inside:
            kept.append(each)
        each = each.tb_next
    made = None
    for each in reversed(kept):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made or trace


def told(error: BaseException) -> str:
    """Return the short form of an error: the user's frames, the error with its notes, and one line for each cause.

    A cause gets no line if its text is empty or is part of the earlier lines.
    """
    walked = [each for each in traceback.walk_tb(error.__traceback__) if not _is_library(each[0])]
    frames = traceback.StackSummary.extract(iter(walked))
    lines = ["Traceback (most recent call last):\n", *frames.format()] if walked else []
    own = f"{type(error).__module__}.{type(error).__qualname__}: {error}\n"
    lines += [own, *(printable(f"{note}\n", colours=True) for note in getattr(error, "__notes__", ()))]
    said, cause = own, error.__cause__
    while cause is not None:
        words = plain(str(cause).strip())  # a library may quote a server
        if words and words not in said:
            lines.append(f"  caused by {type(cause).__module__}.{type(cause).__qualname__}: {words}\n")
        said, cause = said + words, cause.__cause__
    return "".join([*lines, "(set SKYPOOL_DEBUG=1 to see the frames of libraries, too)\n"])


def _is_library(frame: FrameType) -> bool:
    filename = frame.f_code.co_filename
    return filename.startswith((*_LIBRARIES, "<frozen ")) or _is_ours(frame)


def _is_ours(frame: FrameType) -> bool:
    """Return True for a frame of skypool. The `__init__` of a dataclass has no file, so its module decides."""
    filename = frame.f_code.co_filename
    if filename == "<string>":
        return str(frame.f_globals.get("__name__", "")).startswith(("skypool.", "skypool_"))
    return filename.startswith(_OURS)


def warn(text: str, category: type[Warning] = RuntimeWarning, source: object = None) -> None:
    """Tell the user something that is not an error. Any thread may call this.

    In code that works for a pool, in a block of `heard_by`, the text becomes an event of the pool. Elsewhere, a warning
    is issued at the line of the user's program that has called skypool.

    Args:
        text: what is wrong, and what to do about it.
        category: class of the warning. Only a RuntimeWarning without `source` can become an event.
        source: the collected object that the warning is about. Python shows where it was made if `tracemalloc` is on.
    """
    hear = _hear.get()
    if hear is not None and category is RuntimeWarning and source is None:  # what is collected may be of others
        hear(text)
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame):
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
    """Call `hear` with the text of each warning that `warn` gets in this block, in place of issuing a warning.

    This also applies to asyncio tasks that are started in the block, and to threads that `asyncio.to_thread` or
    `drivers.retry` starts there.
    """
    token = _hear.set(hear)
    try:
        yield
    finally:
        _hear.reset(token)


@contextlib.contextmanager
def warned_here() -> Iterator[None]:
    """Collect the warnings of this block and of its threads. At the end, issue each text once, at the user's line."""
    told: dict[str, None] = {}
    try:
        with heard_by(told.setdefault):
            yield
    finally:
        for text in told:
            warn(text)
