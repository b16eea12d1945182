"""Writes results and exceptions in skypool's data format, or explains why a value cannot be written.

This module runs in a worker process on a node that may not run code on its client.
"""

from __future__ import annotations

from collections.abc import Sequence

from skypool.errors import UntrustedResult
from skypool.trust.classes import Allowed
from skypool.trust.encoding import write
from skypool.trust.refusals import WriteError
from skypool.wire.frames import Buffer

_SETTING = 'trust="data" (set in ComputePool or the default for machines of strangers)'
_INSTEAD = "Return plain values instead (numbers, texts, lists, arrays)"
_LONGEST_PATH = 100
"""The most characters that messages show of the path of a refused part inside a value."""


class DataWriter:
    """A writer of results and exceptions for a client that reads skypool's data format only.

    `node` is the number of the node, for messages. `allowed` are names of classes that the user allows in results:
    "mypkg.Point", or "mypkg.*" for all classes in a package and its subpackages.
    """

    def __init__(self, node: int, allowed: Sequence[str] = ()) -> None:
        self._node, self._allowed = node, Allowed(frozenset(allowed))

    def value(self, value: object, what: str) -> list[Buffer]:
        """Return the buffers of a value in skypool's data format: the encoded value, then its large arrays' memory.

        `what` is the value's name in messages, such as "the result of train". Raises UntrustedResult if the client
        would refuse the value. The message names the refused part, its path in the value, the setting that refuses it,
        and what to do.
        """
        try:
            return write(value, self._allowed)
        except WriteError as e:
            raise UntrustedResult(
                f"{what} was rejected: {self._explained(e, _INSTEAD)}",
                refused=e.kind,
                what=what,
                node=self._node,
            ) from None

    def error(self, error: BaseException) -> tuple[bytes | None, str]:
        """Encode one exception, without its causes, in skypool's data format. Return the pair (bytes, "").

        Return (None, reason in words) if it cannot be encoded, for example because it holds a large array.
        """
        try:
            (data,) = write(error, self._allowed)
        except WriteError as e:
            return None, self._explained(e, "Raise a built-in exception with texts and numbers as arguments instead")
        except ValueError:
            return None, "it contains a large array. Put only small values into exceptions"
        return bytes(data), ""

    def _explained(self, refused: WriteError, instead: str) -> str:
        """Return why a part was refused, where it is, by which setting, and advice: its own, or else `instead`."""
        path = refused.path if len(refused.path) <= _LONGEST_PATH else f"{refused.path[:_LONGEST_PATH]}…"
        why = f"{refused.why} (at {path})" if path else refused.why
        setting = f"Node {self._node} has {_SETTING}"
        if refused.advice:
            return f"{why}. {setting}, which refuses this. {refused.advice}"
        full = f'permit any code of node {self._node} with ComputePool(trust="full")'
        start = f"{why}. {setting}, so it may not run code on your machine. {instead}"
        if not refused.allowable:
            return f"{start}, or {full}"
        return (
            f"{start}. If this class is safe to build from any data, use "
            f"ComputePool(allow_results=[{refused.kind!r}]). Or {full}"
        )
