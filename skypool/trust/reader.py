"""Reads what a node sends that may not run code here."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

from skypool.codec import RemoteTraceback
from skypool.errors import RemoteError, UntrustedResult, died
from skypool.trust import arrays, classes, values
from skypool.trust.classes import Allowed
from skypool.trust.machine import Machine, Maker, Name, Refused, is_plain
from skypool.trust.text import plain
from skypool.wire import Buffer

_LONGEST_CHAIN = 50


class DataReader:
    """What one node sends, read as data.

    Args:
        node: its rank, for messages; allowed: classes beyond the usual ones that may be made of what it sends.
    """

    def __init__(self, node: int, allowed: frozenset[str] = frozenset()) -> None:
        self._node, self._allowed = node, Allowed(allowed)
        self._makers: dict[tuple[str, str], Maker] = {
            **values.MAKERS,
            **arrays.MAKERS,
            ("skypool.codec", "rebuild"): classes.rebuilt,
            ("skypool.codec", "_load_one"): self._member,
            ("skypool.errors", "died"): _worker_died,
            ("skypool.trust.sending", "theirs"): _theirs,
            ("cloudpickle.cloudpickle", "_builtin_type"): _types,
        }

    def value(self, buffers: Sequence[Buffer], what: str) -> Any:
        """The value of `codec.dumps`; arrays use the memory of the buffers.

        Args:
            what: how a message calls it: "the result of train".

        Raises:
            UntrustedResult: it is no data.
        """
        try:
            return self._read(buffers)
        except Refused as e:
            raise UntrustedResult(
                f"{what} is refused: {e.why}. Node {self._node} is trusted with data only; {self._advice(e)}",
                refused=e.name,
                what=what,
                node=self._node,
            ) from None

    def error(self, buffers: Sequence[Buffer], call: str) -> BaseException:
        """The exception of `codec.dump_error`, its remote traceback as its cause; or the refusal of what it was.

        An exception whose class is not to be made comes as the RemoteError that has its name and text.
        """
        try:
            got = self.value(buffers, f"the exception of {call}")
            if not _is_chain(got):
                raise UntrustedResult(f"the exception of {call} on node {self._node} is none", node=self._node)
        except UntrustedResult as e:
            return e
        chain, text = got
        errors = [self._one(link, plain(text)) for link in chain]
        for error, cause in itertools.pairwise(errors):
            error.__cause__ = cause
        errors[-1].__cause__ = RemoteTraceback(plain(text))
        return errors[0]

    def _read(self, buffers: Sequence[Buffer], parent: Machine | None = None) -> Any:
        try:
            if len(buffers) == 1 and is_plain(buffers[0]):
                return pickle.loads(buffers[0])
            return Machine(buffers, self._find, parent).read()
        except Refused:
            raise
        except Exception as e:  # noqa: BLE001 - a stranger's bytes raise anything
            raise Refused(f"it is no pickle that a worker writes ({type(e).__name__}: {str(e)[:200]})") from None

    def _find(self, m: Machine, name: Name) -> None:
        if not m.setters:
            m.setters.update(values.SETTERS)
            m.keys.update(values.KEYS)
        key = (name.module, name.name)
        name.call, name.new = self._makers.get(key), values.NEW.get(key)
        if name.call is None and name.new is None and not classes.resolve(m, name, self._allowed):
            raise Refused(f"it names {plain(str(name))[:200]}, which only running code could rebuild", str(name), True)
        if name.module.startswith("numpy"):
            m.keys.update(arrays.scalars())

    def _one(self, link: Any, traceback: str = "", parent: Machine | None = None) -> BaseException:
        data, kind, text, why, notes = link
        error: object = None
        if data is not None:
            try:
                error = self._read([data], parent)
                why = why or "it is something else here"
            except Refused as e:
                why = f"{e.why}; {self._advice(e)}"
        if not isinstance(error, Exception):
            error = RemoteError(plain(kind), plain(text), traceback, plain(why))
        if notes and not getattr(error, "__notes__", None):
            error.__notes__ = list(map(plain, notes))
        return error

    def _member(self, m: Machine, args: tuple[Any, ...]) -> BaseException:
        """One exception of a group."""
        if not _is_link(args):
            raise Refused("an exception of it is none")
        m.charge(len(args[0] or b""))
        return self._one(args, parent=m)

    def _advice(self, refused: Refused) -> str:
        full = 'trust="full" would let it run code here'
        module, _, name = refused.name.rpartition(".")
        if refused.name.startswith("cloudpickle."):
            return f"return data instead of a function or a class, and define classes at the top of a module; {full}"
        if not refused.allowable or classes.locate(module, name) is None:
            return f"return plain data instead; {full}"
        return (
            f"return plain data, or if this class may be made of whatever a stranger sends: "
            f"ComputePool(allow_results=[{refused.name!r}]); {full}"
        )


def _theirs(m: Machine, args: tuple[Any, ...]) -> Name:
    """A class of the client's, that the node named instead of sending its code."""
    module, name = args
    if type(module) is not str or type(name) is not str:
        raise Refused("it names a class by no text")
    return m.named(module, name)


def _types(m: Machine, args: tuple[Any, ...]) -> Name:
    """What cloudpickle writes for a class of the module `types`."""
    if args != ("SimpleNamespace",):
        raise Refused("it names a class of the module types")
    return m.named("types", "SimpleNamespace")


def _worker_died(_: Machine, args: tuple[Any, ...]) -> BaseException:
    call, signal, code, tail, node, hint = args
    texts, numbers = (call, tail, hint), (signal, code, node)
    if not all(type(t) is str for t in texts) or not all(n is None or type(n) is int for n in numbers):
        raise Refused("a worker died in an odd way")
    return died(plain(call), signal, code, plain(tail), node, plain(hint))


def _is_chain(got: Any) -> bool:
    match got:
        case (list(chain), str()) if 0 < len(chain) <= _LONGEST_CHAIN:
            return all(map(_is_link, chain))
    return False


def _is_link(got: Any) -> bool:
    match got:
        case (bytes() | None, str(), str(), str(), list(notes)):
            return type(got) is tuple and all(type(note) is str for note in notes)
    return False
