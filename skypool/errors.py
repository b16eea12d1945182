"""All exceptions that skypool raises, in one tree.

SkypoolError
├── UsageError (ValueError)            a value that cannot mean anything; refused where it was written
│   └── UnknownAccelerator             a name no catalogue knows; carries the nearest names
├── ProviderError                      a cloud said no; carries the provider's own code and text
│   ├── CredentialsError               who are you
│   ├── AccessError                    you may not
│   ├── CapacityError                  out of stock here and now
│   ├── QuotaError                     your account's limit
│   ├── RateLimitError                 too fast
│   ├── FundsError                     no money left
│   ├── NoAnswer                       the reply was lost: what was asked for may have been done
│   └── OfferGone                      somebody else took it
├── NoOffers                           nothing sold matches the need; carries the plan
├── LaunchError                        every offer was tried
├── BootstrapError                     a step on a node failed; carries step, command, tail, advice
├── HostBusy                           the machine serves another pool
├── BudgetExceeded                     the money asked for is spent
├── LedgerError                        what is rented cannot be written down, or read: nothing is rented then
├── StillRunning                       an end that could not be proved; carries the instances
├── ConnectionLost                     a node went away or fell silent; carries the node
│   ├── ProtocolError                  bytes that are no frame of ours
│   ├── LoginRefused                   the machine answers and does not let us in
│   ├── NodeInterrupted                its provider took the machine back, as it may on a spot market
│   └── HostKeyMismatch                the machine is not the one whose key is known: nothing was sent to it
├── PoolClosed                         a call on a pool that has ended
├── PickleError (TypeError)            something cannot travel; carries the path to it
├── PythonMismatch                     functions travel as bytecode: the minor versions must agree
├── WorkerDied                         the process running the call died; carries signal or exit code, and tail
├── CallTimeout (TimeoutError)         the call ran longer than its timeout
├── SpoolFull (OSError)                no room on the node for an argument or a result
├── UntrustedResult                    a result that only running code could rebuild
├── RemoteError                        the remote exception's own type could not be rebuilt; carries name and text
└── ErrorGroup (ExceptionGroup)        several of these at once, as of several regions; carries them as they were

A call's own exception is not in this tree: it comes back as itself, with the remote traceback as its cause.
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

TYPE_CHECKING = False  # every module imports this one: what only some errors need is imported there
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class SkypoolError(Exception):
    """The root: `except SkypoolError` catches what skypool says, and nothing your own function raised."""


class UsageError(SkypoolError, ValueError):
    """A value that cannot mean anything, refused on the line that wrote it."""


class UnknownAccelerator(UsageError):
    """A name that no catalogue and no registration knows.

    Attributes:
        name: what was asked for.
        nearest: up to three names that exist, closest first.
    """

    def __init__(self, name: str, nearest: Sequence[str] = ()) -> None:
        self.name, self.nearest = name, tuple(nearest)
        hint = f"; did you mean {' or '.join(self.nearest)}?" if self.nearest else ""
        super().__init__(f"no accelerator is called {name!r}{hint} (`skypool accelerators` lists them all)")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.nearest)


class ProviderError(SkypoolError):
    """A provider refused or failed.

    Attributes:
        provider: the driver's name, such as "aws".
        code: the provider's own error code, "" if it gave none.
        text: the provider's own words.
    """

    def __init__(self, message: str, *, provider: str = "", code: str = "", text: str = "") -> None:
        self.provider, self.code, self.text = provider, code, text
        super().__init__(message)


class CredentialsError(ProviderError):
    """The provider does not know who is asking: missing, wrong or expired credentials."""


class AccessError(ProviderError):
    """The provider knows who is asking and says this account may not."""


class CapacityError(ProviderError):
    """Out of stock at this place and moment; the next offer may have it."""


class QuotaError(ProviderError):
    """The account's own limit; no other offer under the same quota will do either."""


class RateLimitError(ProviderError):
    """Too many requests; `retry_after` is in seconds, None when the provider did not say."""

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
    """The account has no money left with this provider."""


class NoAnswer(ProviderError):
    """The provider did not answer: whether it did what it was asked for is open. Ask again with the same token."""


class OfferGone(ProviderError):
    """The offer was taken by somebody else between the listing and the launch."""


class NoOffers(SkypoolError):
    """Nothing that is sold matches the need. `plan` says for each offer why not."""

    def __init__(self, message: str, plan: object = None) -> None:
        self.plan = plan
        super().__init__(message)


class LaunchError(SkypoolError):
    """No machine could be had; the attempts and their reasons are in the message.

    Attributes:
        is_short: whether some of it was merely out of stock, so that it may be had later.
    """

    def __init__(self, message: str, *, is_short: bool = False) -> None:
        self.is_short = is_short
        super().__init__(message)


class BootstrapError(SkypoolError):
    """A step that makes a machine ready failed.

    Attributes:
        step: the step's name; command: what ran; status: its exit status, None if it had none.
        tail: its last lines; advice: what to do.
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
    """The money the user allowed is spent."""


class LedgerError(SkypoolError):
    """The ledger cannot be written or read. Nothing is rented without it; what is rented is ended without it, too."""


class StillRunning(SkypoolError):
    """An end that could not be proved. `instances` may still cost money.

    Attributes:
        unreachable: those of `instances` that are machines of the user's own and cannot be reached. They cost nothing,
            and what is left there ends itself with its lease.
    """

    def __init__(self, message: str, instances: Sequence[object] = (), unreachable: Sequence[object] = ()) -> None:
        self.instances, self.unreachable = tuple(instances), tuple(unreachable)
        super().__init__(message)


class ConnectionLost(SkypoolError):
    """A node went away, or was silent for longer than `liveness`. `node` is its number, -1 if unknown."""

    def __init__(self, message: str, node: int = -1) -> None:
        self.node = node
        super().__init__(message)


class ProtocolError(ConnectionLost):
    """Bytes arrived that are no frame of ours; the link that carried them is closed."""


class NodeInterrupted(ConnectionLost):
    """The provider took a node's machine back, as it may on a spot market."""


class LoginRefused(ConnectionLost):
    """A machine answers and does not let us in: another user or key is needed."""


class HostKeyMismatch(ConnectionLost):
    """A machine's host key is not the one that is known. The connection ended before anything was sent."""


class HostBusy(SkypoolError):
    """A machine that serves one pool at a time serves another one."""


class PoolClosed(SkypoolError, RuntimeError):
    """A call was sent to a pool that has ended, or the pool ended before the call did."""


class PickleError(SkypoolError, TypeError):
    """Something cannot travel between machines. `path` leads to it: `train.<closure>.cfg.lock`."""

    def __init__(self, message: str, path: str = "") -> None:
        self.path = path
        super().__init__(message)


class PythonMismatch(SkypoolError):
    """Client and node run different minor versions of Python, and functions travel as bytecode."""


class WorkerDied(SkypoolError):
    """The process that ran the call died without an answer.

    Attributes:
        signal: the signal that killed it, or None.
        exitcode: the status it left with, or None.
        tail: the last lines it printed.
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
        how = f"killed by {_signal_name(signal)}" if signal else f"left with exit code {exitcode}"
        message = (
            f"the worker running {call} on node {node} was {how}"
            if signal
            else (f"the worker running {call} on node {node} {how}")
        )
        if hint:
            message += f": {hint}"
        if tail:
            message += "\nits last output:\n" + "\n".join(f"  {line}" for line in tail.splitlines())
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return died, (self.call, self.signal, self.exitcode, self.tail, self.node, self.hint)


def died(call: str, signal: int | None, exitcode: int | None, tail: str, node: int, hint: str) -> WorkerDied:
    """What a pickled WorkerDied becomes again."""
    return WorkerDied(call, signal=signal, exitcode=exitcode, tail=tail, node=node, hint=hint)


def _signal_name(number: int | None) -> str:
    import signal

    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


class CallTimeout(SkypoolError, TimeoutError):
    """The call ran longer than its `timeout` and was ended on the node."""


class SpoolFull(SkypoolError, OSError):
    """A node has no room left, in memory or on disk, for an argument or a result."""


class UntrustedResult(SkypoolError):
    """A result from a machine that is not trusted, which only running code could rebuild.

    Attributes:
        refused: what it named, such as "os.system", "" where that is not the point.
        what: whose it was: "the result of train"; node: the number of the machine that sent it.
    """

    def __init__(self, message: str, *, refused: str = "", what: str = "", node: int = -1) -> None:
        self.refused, self.what, self.node = refused, what, node
        super().__init__(message)


class RemoteError(SkypoolError):
    """A remote exception whose own type cannot be rebuilt here.

    Attributes:
        type_name: its qualified class name; text: what `str()` said; traceback: the remote traceback.
    """

    def __init__(self, type_name: str, text: str, traceback: str = "", why: str = "") -> None:
        self.type_name, self.text, self.traceback, self.why = type_name, text, traceback, why
        message = f"{type_name}: {text}"
        if why:
            message += f"\n({type_name} itself could not be brought back: {why})"
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.type_name, self.text, self.traceback, self.why)


class ErrorGroup(SkypoolError, ExceptionGroup[Exception]):
    """Several failures at once, such as those of several regions of a provider. `exceptions` has them as they were."""

    def __str__(self) -> str:
        import textwrap

        told = (textwrap.indent(str(each) or type(each).__name__, "  ") for each in self.exceptions)
        return "\n".join([f"{self.message}:", *told])

    def derive(self, errors: Sequence[Exception], /) -> ErrorGroup:  # type: ignore[override]
        return ErrorGroup(self.message, errors)


def together(what: str, errors: Iterable[Exception]) -> Exception:
    """What is raised for failures of one thing done in several places: those that say the same are one.

    Args:
        what: failed, where they are several; one alone is itself.
    """
    several = [*{str(each) or repr(each): each for each in errors}.values()]
    return several[0] if len(several) == 1 else ErrorGroup(what, several)


def not_ended(
    why: Mapping[str, object], instances: Sequence[object], unreachable: Sequence[object] = ()
) -> StillRunning:
    """Return the error for instances whose end is not proved. `why` maps what a person calls each to the reason."""
    lines = "".join(f"\n  {what}: {reason}" for what, reason in why.items())
    return StillRunning(f"it is not proved that these have ended:{lines}", instances, unreachable)


def taken_back(node: int, cause: BaseException | None = None) -> NodeInterrupted:
    """What is said of a node that its provider takes back."""
    error = NodeInterrupted(f"the provider took node {node} back", node)
    error.__cause__ = cause
    return error


def gone_with(lost: int, node: int, error: BaseException) -> ConnectionLost:
    """What is said of a node that goes because another host of its slice, `lost`, did: a slice goes as a whole."""
    if isinstance(error, NodeInterrupted):
        return taken_back(node, error)
    gone = ConnectionLost(f"node {node} was ended with node {lost}, which is a host of the same slice: {error}", node)
    gone.__cause__ = error
    return gone


def nearest(word: str, choices: Iterable[str], n: int = 3) -> list[str]:
    """Up to `n` of `choices` that a mistyped `word` may have meant, closest first."""
    import difflib

    by_fold = {choice.casefold(): choice for choice in choices}
    return [by_fold[match] for match in difflib.get_close_matches(word.casefold(), by_fold, n, 0.5)]
