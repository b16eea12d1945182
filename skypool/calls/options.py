"""`Options`: how a call runs (timeout, retries, node, output, …), checked where the user writes it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

from skypool.calls.arguments import takes_one
from skypool.checks import Duration, number, seconds, whole
from skypool.errors import UsageError, nearest
from skypool.runtime import Interruption
from skypool.wire.frames import members

OutputMode = Literal["show", "head", "silent", "capture"]
_OPTIONS = (
    "timeout",
    "retries",
    "retry_on",
    "node",
    "output",
    "grace",
    "window",
    "on_interruption",
    "fresh",
    "devices",
)


class Options:
    """How a call is to run. Made by keyword, checked at once; see `ComputeFunction` for what each means.

    Attributes:
        on_cpu: True if the call needs no device, and runs on a CPU slot where its node has such.
        header: what the header of a CALL frame says of these options, as `frames.members` writes it.
    """

    __slots__ = (*_OPTIONS, "header", "on_cpu")

    def __init__(
        self,
        *,
        timeout: Duration | None = None,
        retries: int = 0,
        retry_on: type[BaseException] | tuple[type[BaseException], ...] = (),
        node: int | None = None,
        output: OutputMode = "show",
        grace: Duration = 5.0,
        window: int = 1 << 20,
        on_interruption: Callable[[Interruption], Any] | None = None,
        fresh: bool = False,
        devices: Literal[0] | None = None,
    ) -> None:
        self.timeout = seconds("timeout", timeout) if isinstance(timeout, (str, timedelta)) else timeout
        self.retries, self.node, self.output = retries, node, output
        self.retry_on = retry_on if isinstance(retry_on, tuple) else (retry_on,)
        self.grace = seconds("grace", grace) if isinstance(grace, (str, timedelta)) else grace
        self.window, self.fresh = window, fresh
        self.on_interruption, self.devices = on_interruption, devices
        self._check()
        self.header = self._header()
        self.on_cpu = devices == 0

    def _header(self) -> str:
        """Return what the header of a CALL frame says of these options. A node assumes the default of the others."""
        said: dict[str, Any] = {} if self.timeout is None else {"timeout": self.timeout}
        if self.output in ("silent", "capture"):
            said["output"] = self.output
        if self.fresh:
            said["fresh"] = True
        if self.devices is not None:
            said["devices"] = self.devices
        return members(said)

    def _check(self) -> None:
        number("timeout", self.timeout, "seconds the call may run", optional=True, above=0)
        number("grace", self.grace, "seconds between SIGTERM and SIGKILL", least=0)
        whole("retries", self.retries, "how often the call may run again", least=0)
        whole("window", self.window, "bytes of a stream under way", least=1)
        if not isinstance(self.fresh, bool):
            raise UsageError(f"fresh is True or False, not {self.fresh!r}")
        if self.node is not None:
            whole("node", self.node, "the rank of a node", least=0)
        if self.output not in ("show", "head", "silent", "capture"):
            raise UsageError(f"output must be 'show', 'head', 'silent' or 'capture', not {self.output!r}")
        if self.devices is not None and (isinstance(self.devices, bool) or self.devices != 0):
            raise UsageError(
                f"devices is 0 for a call that needs no device, or left out for one that gets those of its slot, not "
                f"{self.devices!r}; ComputePool(slots=…) says how many devices a slot has"
            )
        for kind in self.retry_on:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise UsageError(f"retry_on takes exception classes, not {kind!r}")
        told = self.on_interruption
        if told is not None and not (callable(told) and takes_one(told)):
            raise UsageError(f"on_interruption is a function of one argument, an Interruption, not {told!r}")

    def but(self, **changes: Any) -> Options:
        """Return these options with some changed.

        Raises:
            UsageError: an option that does not exist, or a value that cannot be meant.
        """
        for name in changes:
            if name not in _OPTIONS:
                close = nearest(name, _OPTIONS)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                raise UsageError(f"a call has no option {name!r}{hint} (it has {', '.join(_OPTIONS)})")
        return Options(**{name: getattr(self, name) for name in _OPTIONS} | changes)
