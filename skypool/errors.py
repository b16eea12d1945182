"""All exceptions that skypool raises, in one tree.

    SkypoolError
    ├── UsageError (ValueError)            an invalid value, rejected where it was passed
    │   └── UnknownAccelerator             an unknown name; carries the nearest names
    ├── ProviderError                      a cloud refused or failed; carries its code and text
    │   ├── CredentialsError               credentials are missing, wrong or expired
    │   ├── AccessError                    the account lacks a permission
    │   ├── CapacityError                  out of stock in this place now
    │   ├── QuotaError                     a limit of the account
    │   ├── RateLimitError                 too many requests
    │   ├── FundsError                     the account has no money left
    │   ├── NoAnswer                       the reply was lost: the request may have taken effect
    │   └── OfferGone                      another customer took the offer
    ├── NoOffers                           no offer matches the need; carries the plan
    ├── LaunchError                        all offers were tried and failed
    ├── BootstrapError                     a setup step on a node failed; carries step, command, tail, advice
    ├── HostBusy                           the machine serves another pool
    ├── BudgetExceeded                     the budget is spent
    ├── LedgerError                        the ledger cannot be read or written, so nothing is rented
    ├── StillRunning                       instances that may not have ended; carries them
    ├── ConnectionLost                     a node is gone or does not respond; carries the node
    │   ├── ProtocolError                  the received bytes are not a valid frame
    │   ├── LoginRefused                   the machine answers but rejects the login
    │   ├── NodeInterrupted                the provider took the machine back, for example a spot machine
    │   └── HostKeyMismatch                the machine has another host key than expected; nothing was sent
    ├── PoolClosed                         a call on a pool that has ended
    ├── PickleError (TypeError)            an object cannot be pickled; carries the path to it
    ├── PythonMismatch                     client and node run different minor versions of Python
    ├── WorkerDied                         the process of the call died; carries signal or exit code, and tail
    ├── CallTimeout (TimeoutError)         the call ran longer than its timeout
    ├── SpoolFull (OSError)                the node has no room for an argument or a result
    ├── UntrustedResult                    a result that could be rebuilt only by running its code
    ├── RemoteError                        a remote exception of a type unknown here; carries name and text
    └── ErrorGroup (ExceptionGroup)        several of these errors at once, for example one for each region

An exception that a call's own function raises is not in this tree. It is raised on the client as it is, with the
remote traceback as its cause.
"""

from __future__ import annotations

__all__ = [
    "AccessError",
    "BootstrapError",
    "BudgetExceeded",
    "CallTimeout",
    "CapacityError",
    "ConnectionLost",
    "CredentialsError",
    "ErrorGroup",
    "FundsError",
    "HostBusy",
    "HostKeyMismatch",
    "LaunchError",
    "LedgerError",
    "LoginRefused",
    "NoAnswer",
    "NoOffers",
    "NodeInterrupted",
    "OfferGone",
    "PickleError",
    "PoolClosed",
    "ProtocolError",
    "ProviderError",
    "PythonMismatch",
    "QuotaError",
    "RateLimitError",
    "RemoteError",
    "SkypoolError",
    "SpoolFull",
    "StillRunning",
    "UnknownAccelerator",
    "UntrustedResult",
    "UsageError",
    "WorkerDied",
    "nearest",
    "not_ended",
    "together",
]

TYPE_CHECKING = False  # every module imports this one, so modules that few errors need are imported late
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class SkypoolError(Exception):
    """Base class of all errors that skypool raises. Exceptions of the user's own functions are not among them."""


class UsageError(SkypoolError, ValueError):
    """An invalid value, rejected on the line that passed it."""


class UnknownAccelerator(UsageError):
    """A name that is neither in the catalogue nor registered.

    Attributes:
        name: the unknown name.
        nearest: up to three known names, the most similar first.
    """

    def __init__(self, name: str, nearest: Sequence[str] = ()) -> None:
        self.name, self.nearest = name, tuple(nearest)
        hint = f"; did you mean {' or '.join(self.nearest)}?" if self.nearest else ""
        super().__init__(f"no accelerator is called {name!r}{hint} (`skypool accelerators` lists them all)")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.nearest)


class ProviderError(SkypoolError):
    """A request that a provider refused or failed to perform.

    Attributes:
        provider: the driver's name, such as "aws".
        code: the provider's own error code, "" if it gave none.
        text: the provider's own error text.
    """

    def __init__(self, message: str, *, provider: str = "", code: str = "", text: str = "") -> None:
        self.provider, self.code, self.text = provider, code, text
        super().__init__(message)


class CredentialsError(ProviderError):
    """Missing, wrong or expired credentials: the provider does not know who sent the request."""


class AccessError(ProviderError):
    """A permission that the account lacks: the provider knows who sent the request and refuses it."""


class CapacityError(ProviderError):
    """Lack of capacity in this place at this moment. Another offer may have capacity."""


class QuotaError(ProviderError):
    """A limit of the account. Other offers under the same quota fail in the same way."""


class RateLimitError(ProviderError):
    """Too many requests in a short time.

    Attributes:
        retry_after: seconds to wait before the next request, None if the provider does not say.
    """

    def __init__(
        self,
        message: str,
        *,
        provider: str = "",
        code: str = "",
        text: str = "",
        retry_after: float | None = None,
    ) -> None:
        self.retry_after = retry_after
        super().__init__(message, provider=provider, code=code, text=text)


class FundsError(ProviderError):
    """An account without money: the provider refuses to rent until it is topped up."""


class NoAnswer(ProviderError):
    """A request whose reply was lost, so that it may or may not have taken effect. Repeat it with the same token."""


class OfferGone(ProviderError):
    """An offer that another customer took between the listing and the launch."""


class NoOffers(SkypoolError):
    """A need that no offer matches.

    Attributes:
        plan: the plan, which has the reason for rejecting each offer; None if no plan was made.
    """

    def __init__(self, message: str, plan: object = None) -> None:
        self.plan = plan
        super().__init__(message)


class LaunchError(SkypoolError):
    """A launch that failed at every offer. The message lists the attempts and their reasons.

    Attributes:
        is_short: True if at least one attempt failed only for lack of capacity, so that a later launch may succeed.
    """

    def __init__(self, message: str, *, is_short: bool = False) -> None:
        self.is_short = is_short
        super().__init__(message)


class BootstrapError(SkypoolError):
    """A setup step that failed on a node.

    Attributes:
        step: name of the step.
        command: the command that failed.
        status: exit status of the command, None if it has none.
        tail: last lines of the command's output.
        advice: what the user can do about it.
    """

    def __init__(
        self,
        message: str,
        *,
        step: str = "",
        command: str = "",
        status: int | None = None,
        tail: str = "",
        advice: str = "",
    ) -> None:
        self.step, self.command, self.status = step, command, status
        self.tail, self.advice = tail, advice
        super().__init__(message)


class BudgetExceeded(SkypoolError):
    """A budget that is spent, or that is too small for the plan. Nothing more is rented for the pool."""


class LedgerError(SkypoolError):
    """A ledger that cannot be read or written. Nothing is rented without it, but machines are still ended."""


class StillRunning(SkypoolError):
    """Instances that are not proved to have ended.

    Attributes:
        instances: the instances. They may still cost money.
        unreachable: the instances that are machines of the user's own and cannot be reached. They cost nothing, and
            the processes there end themselves when the lease is over.
    """

    def __init__(self, message: str, instances: Sequence[object] = (), unreachable: Sequence[object] = ()) -> None:
        self.instances, self.unreachable = tuple(instances), tuple(unreachable)
        super().__init__(message)


class ConnectionLost(SkypoolError):
    """A node that is gone, or that did not respond for longer than `liveness`.

    Attributes:
        node: the node's number, -1 if unknown.
    """

    def __init__(self, message: str, node: int = -1) -> None:
        self.node = node
        super().__init__(message)


class ProtocolError(ConnectionLost):
    """Received bytes that are not a valid frame. The connection that carried them is closed."""


class NodeInterrupted(ConnectionLost):
    """A node whose provider took the machine back, as a provider may on a spot market."""


class LoginRefused(ConnectionLost):
    """A machine that answers but rejects the login. Another user name or key is needed."""


class HostKeyMismatch(ConnectionLost):
    """A machine whose host key differs from the known one. The connection was closed before anything was sent."""


class HostBusy(SkypoolError):
    """A machine that serves one pool at a time and already serves another one."""


class PoolClosed(SkypoolError, RuntimeError):
    """A call that was sent to a pool after its end, or that had no result when the pool ended."""


class PickleError(SkypoolError, TypeError):
    """An object that cannot be sent to another machine, or a result that cannot be rebuilt here.

    Attributes:
        path: where the object is, such as `train.<closure>.cfg.lock` or "the result of train".
    """

    def __init__(self, message: str, path: str = "") -> None:
        self.path = path
        super().__init__(message)


class PythonMismatch(SkypoolError):
    """A difference in minor Python versions between client and node. Functions travel as bytecode, which must match."""


class WorkerDied(SkypoolError):
    """A worker process that died before its call returned.

    Attributes:
        call: name of the call.
        signal: number of the signal that killed the process, or None.
        exitcode: exit code of the process, or None.
        tail: last lines of its output.
        node: the node's number, -1 if unknown.
        hint: a likely reason, "" if none is known.
    """

    def __init__(
        self,
        call: str,
        *,
        signal: int | None = None,
        exitcode: int | None = None,
        tail: str = "",
        node: int = -1,
        hint: str = "",
    ) -> None:
        self.call, self.signal, self.exitcode = call, signal, exitcode
        self.tail, self.node, self.hint = tail, node, hint
        how = f"killed by {_signal_name(signal)}" if signal else f"exited with code {exitcode}"
        message = (
            f"the worker running {call} on node {node} was {how}"
            if signal
            else (f"the worker running {call} on node {node} {how}")
        )
        if hint:
            message += f": {hint}"
        if tail:
            message += "\nlast output of the worker:\n" + "\n".join(f"  {line}" for line in tail.splitlines())
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return died, (self.call, self.signal, self.exitcode, self.tail, self.node, self.hint)


def died(call: str, signal: int | None, exitcode: int | None, tail: str, node: int, hint: str) -> WorkerDied:
    """Return the WorkerDied that was pickled with these values."""
    return WorkerDied(call, signal=signal, exitcode=exitcode, tail=tail, node=node, hint=hint)


def _signal_name(number: int | None) -> str:
    import signal

    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


class CallTimeout(SkypoolError, TimeoutError):
    """A call that ran longer than its `timeout`. It was ended on the node."""


class SpoolFull(SkypoolError, OSError):
    """Lack of room on a node, in memory or on disk, for an argument or a result."""


class UntrustedResult(SkypoolError):
    """A result of an untrusted machine that could be rebuilt only by running code of its choice.

    Attributes:
        refused: the name that the result refers to, such as "os.system"; "" if another rule was broken.
        what: what was being read, such as "the result of train".
        node: number of the node that sent it, -1 if unknown.
    """

    def __init__(self, message: str, *, refused: str = "", what: str = "", node: int = -1) -> None:
        self.refused, self.what, self.node = refused, what, node
        super().__init__(message)


class RemoteError(SkypoolError):
    """A remote exception whose own type cannot be rebuilt here.

    Attributes:
        type_name: qualified name of the exception's class.
        text: the exception's `str()`.
        traceback: the remote traceback as text.
        why: the reason why the type cannot be rebuilt.
    """

    def __init__(self, type_name: str, text: str, traceback: str = "", why: str = "") -> None:
        self.type_name, self.text, self.traceback, self.why = type_name, text, traceback, why
        message = f"{type_name}: {text}"
        if why:
            message += f"\n({type_name} could not be rebuilt on the client: {why})"
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.type_name, self.text, self.traceback, self.why)


class ErrorGroup(SkypoolError, ExceptionGroup[Exception]):
    """Several errors at once, for example one for each region of a provider.

    `exceptions` has the errors unchanged, and `str()` lists their messages.
    """

    def __str__(self) -> str:
        import textwrap

        told = (textwrap.indent(str(each) or type(each).__name__, "  ") for each in self.exceptions)
        return "\n".join([f"{self.message}:", *told])

    def derive(self, errors: Sequence[Exception], /) -> ErrorGroup:  # type: ignore[override]
        return ErrorGroup(self.message, errors)


def together(what: str, errors: Iterable[Exception]) -> Exception:
    """Return one exception for errors of an operation that failed in several places.

    Errors with the same text count as one. A single error is returned unchanged.

    Args:
        what: message of the group if there are several errors.
        errors: the errors, at least one.
    """
    several = [*{str(each) or repr(each): each for each in errors}.values()]
    return several[0] if len(several) == 1 else ErrorGroup(what, several)


def not_ended(
    why: Mapping[str, object], instances: Sequence[object], unreachable: Sequence[object] = ()
) -> StillRunning:
    """Return the error for instances whose end is not proved.

    Args:
        why: the reason for each instance, by the name that users see.
        instances: instances that may still run.
        unreachable: those of `instances` that are the user's own machines and cannot be reached.
    """
    lines = "".join(f"\n  {what}: {reason}" for what, reason in why.items())
    return StillRunning(f"it is not confirmed that these instances have ended:{lines}", instances, unreachable)


def taken_back(node: int, cause: BaseException | None = None) -> NodeInterrupted:
    """Return the error for a node whose machine its provider takes back. `cause` becomes the error's cause."""
    error = NodeInterrupted(f"the provider took node {node} back", node)
    error.__cause__ = cause
    return error


def gone_with(lost: int, node: int, error: BaseException) -> ConnectionLost:
    """Return the error for a node that ends because another host of its slice was lost.

    Args:
        lost: number of the host that was lost. A slice ends as a whole.
        node: number of the node that ends with it.
        error: the error of the lost host. If it was interrupted, the result is a `NodeInterrupted`, too.
    """
    if isinstance(error, NodeInterrupted):
        return taken_back(node, error)
    gone = ConnectionLost(
        f"node {node} was ended because node {lost}, a host of the same slice, was lost: {error}", node
    )
    gone.__cause__ = error
    return gone


def nearest(word: str, choices: Iterable[str], n: int = 3) -> list[str]:
    """Return up to `n` of `choices` that a mistyped `word` may stand for, the most similar first.

    Case is ignored. The result is empty if no choice is similar.
    """
    import difflib

    by_fold = {choice.casefold(): choice for choice in choices}
    return [by_fold[match] for match in difflib.get_close_matches(word.casefold(), by_fold, n, 0.5)]
