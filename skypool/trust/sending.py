"""Writes results and exceptions in skypool's data format, or explains why that fails.

It runs in a worker process on a node (a rented machine) that may not run code on its client.
"""

from __future__ import annotations

from collections.abc import Sequence

from skypool.errors import UntrustedResult
from skypool.trust.classes import Allowed
from skypool.trust.refusals import WriteError
from skypool.trust.writing import write
from skypool.wire.frames import Buffer


class DataWriter:
    """A writer of results and exceptions for a client that reads skypool's data format only; see `codec.result_writer`.

    Args:
        node: the number of this node (rented machine), for messages.
        allowed: names of additional classes of which the client makes instances. Default: none.
    """

    def __init__(self, node: int, allowed: Sequence[str] = ()) -> None:
        self._node, self._allowed = node, Allowed(frozenset(allowed))

    def value(self, value: object, what: str) -> list[Buffer]:
        """Return the buffers of a value in skypool's data format: the encoded value, then its large arrays' memory.

        Args:
            value: the value. It is not changed.
            what: its name in error messages, such as "the result of train".

        Raises:
            UntrustedResult: the client would not read it. The message names the part, its path, and what to do.
        """
        try:
            return write(value, self._allowed)
        except WriteError as e:
            where = f" (at {e.path})" if e.path else ""
            raise UntrustedResult(
                f"{what} was rejected: {e.why}{where}. Node {self._node} is trusted with data only; {_advice(e)}",
                refused=e.kind,
                what=what,
                node=self._node,
            ) from None

    def error(self, error: BaseException) -> tuple[bytes | None, str]:
        """Return the data of one exception without its causes, and "".

        Does not raise if the exception cannot be written, for example because it holds a large array. It then returns
        None and the reason in words.
        """
        try:
            (data,) = write(error, self._allowed)
        except WriteError as e:
            return None, e.why
        except ValueError:
            return None, "the exception contains a large array"
        return bytes(data), ""


def _advice(error: WriteError) -> str:
    full = 'trust="full" would let the node run code here'
    if not error.allowable:
        return f"return plain data instead; {full}"
    return (
        f"return plain data, or, if instances of this class may safely be built from any data: "
        f"ComputePool(allow_results=[{error.kind!r}]); {full}"
    )
