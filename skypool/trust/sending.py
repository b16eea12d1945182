"""The worker's side of data mode: writes results and exceptions in the data format, or explains the refusal."""

from __future__ import annotations

from collections.abc import Sequence

from skypool.errors import UntrustedResult
from skypool.trust.classes import Allowed
from skypool.trust.refusals import WriteError
from skypool.trust.writing import write
from skypool.wire.frames import Buffer


class DataWriter:
    """Writes values and exceptions for a client that reads data only; see `codec.result_writer`.

    Args:
        node: the number of this node; allowed: names of classes that the client makes of what it is sent.
    """

    def __init__(self, node: int, allowed: Sequence[str] = ()) -> None:
        self._node, self._allowed = node, Allowed(frozenset(allowed))

    def value(self, value: object, what: str) -> list[Buffer]:
        """Return the buffers of a value.

        Raises:
            UntrustedResult: the client would not read it; it says what in it, where, and what to do.
        """
        try:
            return write(value, self._allowed)
        except WriteError as e:
            where = f" (at {e.path})" if e.path else ""
            raise UntrustedResult(
                f"{what} is refused: {e.why}{where}. Node {self._node} is trusted with data only; {_advice(e)}",
                refused=e.kind,
                what=what,
                node=self._node,
            ) from None

    def error(self, error: BaseException) -> tuple[bytes | None, str]:
        """Return one exception without its causes, or None and why it cannot be brought back."""
        try:
            (data,) = write(error, self._allowed)
        except WriteError as e:
            return None, e.why
        except ValueError:
            return None, "it holds a large array"
        return bytes(data), ""


def _advice(error: WriteError) -> str:
    full = 'trust="full" would let it run code here'
    if not error.allowable:
        return f"return plain data instead; {full}"
    return (
        f"return plain data, or if this class may be made of whatever a stranger sends: "
        f"ComputePool(allow_results=[{error.kind!r}]); {full}"
    )
