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
    ├── NetworkError                       nodes cannot reach each other; carries the pair, the port and advice
    ├── BudgetExceeded                     the budget is spent
    ├── LifetimeExceeded                   the pool's `max_lifetime` is over
    ├── NotPrivate (PermissionError)       another user can change a folder or file that must be this user's alone
    ├── LedgerError                        the list of rented machines cannot be read or written: nothing is rented
    ├── StillRunning                       instances that may not have ended; carries them
    ├── ConnectionLost                     a node is gone or does not respond; carries the node
    │   ├── ProtocolError                  the received bytes are not a valid message
    │   ├── LoginRefused                   the machine answers but rejects the login
    │   ├── NodeInterrupted                the provider took the machine back, for example a spot machine
    │   ├── NodeRetired                    the node was retired, so that the pool has fewer nodes
    │   ├── NodeUnhealthy                  a device of the node is broken
    │   ├── HostKeyMismatch                the machine has another host key than expected; nothing was sent
    │   └── TakenOver                      another process owns the pool now; this one has given it up
    ├── PoolClosed (RuntimeError)          a call on a pool that has ended
    ├── PickleError (TypeError)            an object cannot be pickled; carries the path to it
    ├── PythonMismatch                     client and node run different minor versions of Python
    ├── WorkerDied                         the process of the call died; carries signal or exit code, and tail
    ├── CommandFailed                      a program of `skypool.cmd` failed or could not start; carries status
    ├── CallTimeout (TimeoutError)         the call ran longer than its timeout
    ├── SpoolFull (OSError)                the node has no room for an argument or a result
    ├── TransferError                      files that could not be sent or fetched; carries the node and their paths
    ├── UntrustedResult                    a result that only code from an untrusted machine could rebuild
    ├── RemoteError                        a remote exception of a type unknown here; carries name and text
    └── ErrorGroup (ExceptionGroup)        several of these errors at once, for example one for each region

An exception that a call's own function raises is not in this tree. Such an exception is raised on the client unchanged,
with the remote traceback as its cause.
"""

from __future__ import annotations

__all__ = [
    "AccessError",
    "BootstrapError",
    "BudgetExceeded",
    "CallTimeout",
    "CapacityError",
    "CommandFailed",
    "ConnectionLost",
    "CredentialsError",
    "ErrorGroup",
    "FundsError",
    "HostBusy",
    "HostKeyMismatch",
    "LaunchError",
    "LedgerError",
    "LifetimeExceeded",
    "LoginRefused",
    "NetworkError",
    "NoAnswer",
    "NoOffers",
    "NodeInterrupted",
    "NodeRetired",
    "NotPrivate",
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
    "TakenOver",
    "TransferError",
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
    """Base class of all errors that skypool raises. Exceptions of the user's own functions are not among them.

    Error texts quote servers, nodes and programs. Control characters, such as those that move the cursor of a
    terminal, are therefore removed from the texts.
    """

    _colours = False
    """True for errors that quote output of calls: their texts keep colours."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_plain(each, self._colours) if type(each) is str else each for each in args))


def _plain(text: str, colours: bool = False) -> str:
    """Return a text without control characters other than tabs and newlines. Keep colours if `colours` is True."""
    if text.isascii() and text.isprintable():
        return text
    from skypool.text import plain, printable

    return printable(text, colours=True) if colours else plain(text)


class UsageError(SkypoolError, ValueError):
    """The error for an invalid value, such as a wrong argument. The error is raised where the value was passed."""


class UnknownAccelerator(UsageError):
    """The error for an accelerator name that is neither in skypool's catalogue nor registered by the user.

    Attributes:
        name: the unknown name.
        nearest: known names that are similar, the most similar first; () if there are none.
    """

    def __init__(self, name: str, nearest: Sequence[str] = ()) -> None:
        self.name, self.nearest = name, tuple(nearest)
        hint = f"; did you mean {' or '.join(self.nearest)}?" if self.nearest else ""
        super().__init__(f"no accelerator is called {name!r}{hint} (`skypool accelerators` lists them all)")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.nearest)


class ProviderError(SkypoolError):
    """The error for a request that a provider (a cloud) refused or failed to perform.

    Subclasses stand for common reasons.

    Attributes:
        provider: the driver's name, such as "aws"; "" if not given.
        code: the provider's own error code; "" if the provider gave none.
        text: the provider's own error text; "" if the provider gave none.
    """

    def __init__(self, message: str, *, provider: str = "", code: str = "", text: str = "") -> None:
        self.provider, self.code, self.text = provider, _plain(code), _plain(text)
        super().__init__(message)


class CredentialsError(ProviderError):
    """The error for missing, wrong or expired credentials: the provider does not know who sent the request."""


class AccessError(ProviderError):
    """The error for a permission that the account lacks: the provider knows who sent the request and refuses it."""


class CapacityError(ProviderError):
    """The error for a provider that has no free machine for an offer at this moment. Another offer may have one."""


class QuotaError(ProviderError):
    """The error for a request that exceeds a quota: a limit of the account, such as 8 GPUs in one region.

    Other offers with the same quota fail, too.
    """


class RateLimitError(ProviderError):
    """The error for too many requests to a provider in a short time.

    Attributes:
        retry_after: seconds to wait before the next request; None if the provider does not say.
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
    """The error for an account without money. The provider rents nothing until money is paid into the account."""


class NoAnswer(ProviderError):
    """The error for a request whose reply was lost. The request may or may not have taken effect.

    Repeat the request with the same idempotency token, so that it takes effect only once.
    """


class OfferGone(ProviderError):
    """The error for an offer that another customer took between the listing of offers and the launch."""


class NoOffers(SkypoolError):
    """The error if no offer of any provider meets the requirements of a pool.

    Attributes:
        plan: the plan that was made, with the reason why each offer was rejected; None if no plan was made.
    """

    def __init__(self, message: str, plan: object = None) -> None:
        self.plan = plan
        super().__init__(message)


class LaunchError(SkypoolError):
    """The error for a launch that failed at every offer that it tried. The message lists the attempts and reasons.

    Attributes:
        is_short: True if at least one attempt failed only for lack of capacity. A later launch may then succeed.
    """

    def __init__(self, message: str, *, is_short: bool = False) -> None:
        self.is_short = is_short
        super().__init__(message)


class BootstrapError(SkypoolError):
    """The error for a setup step that failed on a node.

    Attributes:
        step: name of the step; "" if not known.
        command: the command that failed; "" if there is none.
        status: exit status of the command; None if there is no command.
        tail: last lines of the command's output; "" if there are none.
        advice: what the user can do about it; "" if there is no advice.
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
    """The error for a budget that is spent, or that is too small for the plan. Nothing more is rented for the pool."""


class LifetimeExceeded(SkypoolError):
    """The error for a pool whose `max_lifetime` is over. All of its machines are ended, and nothing more is rented."""


class NotPrivate(SkypoolError, PermissionError):
    """The error for a folder or file that skypool would trust, but that another user of this computer can change.

    The folder or file was neither read nor written.

    Attributes:
        path: the path of the folder or file, or of the folder on the way to it that others can change.
        owner: the id of the user to whom it belongs; -1 if unknown.
        mode: its permissions, such as 0o777.
    """

    def __init__(self, message: str, *, path: str = "", owner: int = -1, mode: int = 0) -> None:
        self.path, self.owner, self.mode = path, owner, mode
        super().__init__(message)


class LedgerError(SkypoolError):
    """The error for a ledger, the local database of rented machines, that cannot be read or written.

    Nothing is rented without the ledger, but machines can still be ended.
    """


class StillRunning(SkypoolError):
    """The error for instances that are not proved to have ended.

    Attributes:
        instances: the instances. They may still cost money.
        unreachable: those that are the user's own machines and cannot be reached. They cost nothing. skypool's
            processes there end themselves after the pool's lease time without contact.
    """

    def __init__(self, message: str, instances: Sequence[object] = (), unreachable: Sequence[object] = ()) -> None:
        self.instances, self.unreachable = tuple(instances), tuple(unreachable)
        super().__init__(message)


class ConnectionLost(SkypoolError):
    """The error for a node that is gone, or that was silent for longer than the pool's `liveness` (seconds).

    Attributes:
        node: the node's number, -1 if unknown.
        rank: the number of the lost process in its gang, a call of several processes; None without a gang.
        others: the errors of the gang's other processes, in the order in which they came; () without a gang.
    """

    rank: int | None = None
    others: Sequence[BaseException] = ()

    def __init__(self, message: str, node: int = -1) -> None:
        self.node = node
        super().__init__(message)


class ProtocolError(ConnectionLost):
    """The error for received bytes that are not a valid message. The connection that carried them is closed."""


class NodeInterrupted(ConnectionLost):
    """The error for a node whose provider took the machine back, as a provider may do with spot machines.

    Attributes:
        left: seconds for which the machine goes on, if a program has ended by itself when it was told; 0.0 otherwise.
    """

    left: float = 0.0


class TakenOver(ConnectionLost):
    """The error for a pool that another process has taken over with `ComputePool.attach`.

    This process, which owned the pool before, then sends no more calls and does not end the machines.
    """


class NodeRetired(ConnectionLost):
    """The error for a call that may run on one certain node only, if that node is retired before the call begins."""


class NodeUnhealthy(ConnectionLost):
    """The error for a node with a device that must not be used any more, such as a GPU that has fallen off its bus."""


class LoginRefused(ConnectionLost):
    """The error for a machine that answers but rejects the login. Another user name or key is needed."""


class HostKeyMismatch(ConnectionLost):
    """The error for a machine whose SSH host key differs from the known one. Nothing was sent to it."""


class HostBusy(SkypoolError):
    """The error for a machine that cannot join a pool: it serves one pool at a time, and already serves another."""


class NetworkError(SkypoolError):
    """The error for nodes of a pool that cannot reach each other over the network. A check finds it before any call.

    Attributes:
        source: number of the first node that could not connect.
        target: number of the node that it could not reach.
        address: the address of the target; "" if unknown.
        port: the TCP port on which the target listened. The check uses any free port, as libraries do.
        outcome: how the connection failed: "timeout", "refused", "unreachable" (no route), "broken" (another error),
            "silent" (connected, but no answer), "stranger" (another program answered), "stalled" (few bytes got
            through) or "no address" (that of the target is unknown).
        advice: what to open, and how.
        report: what each node found, as a `skypool.gangs.network_report.NetworkReport`.
    """

    def __init__(
        self,
        message: str,
        *,
        source: int = -1,
        target: int = -1,
        address: str = "",
        port: int = 0,
        outcome: str = "",
        advice: str = "",
        report: object = None,
    ) -> None:
        self.source, self.target, self.address, self.port = source, target, address, port
        self.outcome, self.advice, self.report = outcome, advice, report
        super().__init__(message)


class PoolClosed(SkypoolError, RuntimeError):
    """The error for a call that was sent to a pool after the pool's end, or that had no result when the pool ended."""


class PickleError(SkypoolError, TypeError):
    """The error for an object that cannot be sent to another machine, or for a result that cannot be rebuilt here.

    Attributes:
        path: where the object is, such as `train.<closure>.cfg.lock` or "the result of train"; "" if not known.
    """

    def __init__(self, message: str, path: str = "") -> None:
        self.path = path
        super().__init__(message)


class PythonMismatch(SkypoolError):
    """The error for client and node that run different minor versions of Python, such as 3.11 and 3.12.

    Functions are sent as bytecode, which only the same minor version can run.
    """


class WorkerDied(SkypoolError):
    """The error for a worker process on a node that died before its call returned.

    Attributes:
        call: name of the call.
        signal: number of the signal that killed the process; None if the process exited by itself.
        exitcode: exit code of the process; None if a signal killed it.
        tail: last lines that the call printed; "" if there are none.
        node: the node's number; -1 if unknown.
        hint: a likely reason; "" if none is known.
        rank: the number of the process in its gang, a call of several processes; None without a gang.
        others: the errors of the gang's other processes, in the order in which they came; () without a gang.
    """

    _colours = True
    rank: int | None = None
    others: Sequence[BaseException] = ()

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
    """Return a WorkerDied error with these values. Unpickling such an error calls this function."""
    return WorkerDied(call, signal=signal, exitcode=exitcode, tail=tail, node=node, hint=hint)


def _signal_name(number: int | None) -> str:
    import signal

    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


class CommandFailed(SkypoolError):
    """The error for a program, run by `skypool.cmd`, that could not be started or ended with a status other than 0.

    Attributes:
        command: the program and its arguments, as text for a shell.
        returncode: exit status, or the negative number of the signal that killed the program; None if it was not
            started.
        signal: number of the signal that killed the program; None if no signal did.
        tail: last lines that the program printed; "" if there are none.
        node: the node's number; -1 if unknown.
        why: why the program could not be started, and what to do about it; "" if it was started.
    """

    _colours = True

    def __init__(
        self, command: str, returncode: int | None = None, tail: str = "", node: int = -1, why: str = ""
    ) -> None:
        self.command, self.returncode, self.tail, self.node, self.why = command, returncode, tail, node, why
        self.signal = -returncode if returncode is not None and returncode < 0 else None
        where = f" on node {node}" if node >= 0 else ""
        short = command if len(command) <= 200 else f"{command[:199]}…"
        if returncode is None:
            message = f"`{short}` could not be started{where}: {why}"
        elif self.signal is not None:
            message = f"`{short}`{where} was killed by {_signal_name(self.signal)}"
        else:
            message = f"`{short}`{where} exited with status {returncode}"
        if tail:
            message += "\nits last output:\n" + "\n".join(f"  {line}" for line in tail.splitlines())
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.command, self.returncode, self.tail, self.node, self.why)


class CallTimeout(SkypoolError, TimeoutError):
    """The error for a call that ran longer than its `timeout`. The call was ended on the node.

    If it is known what the call was doing when it was stopped, a note on the exception says it.

    Attributes:
        stacks: for a call of several processes, what each process that had not ended was doing, by its rank; "" if
            unknown. An empty dict for other calls.
    """

    stacks: Mapping[int, str] = {}


class SpoolFull(SkypoolError, OSError):
    """The error for a node that has no room, in memory or on disk, for an argument or a result."""


class TransferError(SkypoolError):
    """The error for files that could not be sent to a node, or fetched from it. No file is there in part.

    Attributes:
        node: the number of the node.
        failures: a text for each file that is missing, at most 20 of them: its path, and why. Empty if the transfer
            ended before the files were compared.
    """

    def __init__(self, message: str, node: int = -1, failures: Sequence[str] = ()) -> None:
        self.node = node
        self.failures = list(failures)
        super().__init__(message)


class UntrustedResult(SkypoolError):
    """The error for a result of an untrusted machine that could be rebuilt only by running code of that machine.

    Attributes:
        refused: the name that the result refers to, such as "os.system"; "" if there was another reason.
        what: what was being read or written, such as "the result of train"; "" if not known.
        node: number of the node that sent it, -1 if unknown.
    """

    def __init__(self, message: str, *, refused: str = "", what: str = "", node: int = -1) -> None:
        self.refused, self.what, self.node = refused, what, node
        super().__init__(message)


class RemoteError(SkypoolError):
    """The error that stands for an exception on a node if the exception's own type cannot be rebuilt on the client.

    Attributes:
        type_name: qualified name of the exception's class.
        text: the exception's `str()`.
        traceback: the remote traceback as text; "" if not known.
        why: the reason why the type cannot be rebuilt; "" if not known.
    """

    _colours = True

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

    `exceptions` has the errors. `str()` gives the group's message, and below that those of the errors.
    """

    def __str__(self) -> str:
        import textwrap

        told = (textwrap.indent(str(each) or type(each).__name__, "  ") for each in self.exceptions)
        return "\n".join([f"{self.message}:", *told])

    def derive(self, errors: Sequence[Exception], /) -> ErrorGroup:  # type: ignore[override]
        return ErrorGroup(self.message, errors)


def together(what: str, errors: Iterable[Exception]) -> Exception:
    """Return (not raise) one exception that stands for several errors of one operation.

    Of errors with the same text, only the last is kept. If one error is left, it is returned unchanged. Otherwise the
    result is an ErrorGroup.

    Args:
        what: message of the group if there are several errors.
        errors: the errors, at least one.

    Raises:
        ValueError: there are no errors.
    """
    several = [*{str(each) or repr(each): each for each in errors}.values()]
    return several[0] if len(several) == 1 else ErrorGroup(what, several)


def not_ended(
    why: Mapping[str, object], instances: Sequence[object], unreachable: Sequence[object] = ()
) -> StillRunning:
    """Return (not raise) the StillRunning error for instances whose end is not proved.

    Args:
        why: the reason for each instance, by its name as users see it. The message has one line for each.
        instances: instances that may still run.
        unreachable: those of `instances` that are the user's own machines and cannot be reached.
    """
    lines = "".join(f"\n  {what}: {reason}" for what, reason in why.items())
    return StillRunning(
        f"it is not confirmed that these machines have ended (check with `skypool gc`):{lines}", instances, unreachable
    )


def taken_back(node: int, cause: BaseException | None = None) -> NodeInterrupted:
    """Return (not raise) the error for a node whose machine the provider has taken back, caused by `cause`."""
    error = NodeInterrupted(f"the provider took node {node} back", node)
    error.__cause__ = cause
    return error


def retired(node: int) -> NodeRetired:
    """Return (not raise) the error for a node that was retired, by `pool.retire` or by making the pool smaller."""
    return NodeRetired(f"node {node} was retired", node)


def gone_with(lost: int, node: int, error: BaseException) -> ConnectionLost:
    """Return (not raise) the error for a node that ends because another node of the same slice was lost.

    A slice is a group of machines that are rented and end together.

    Args:
        lost: number of the node that was lost.
        node: number of the node that ends with it.
        error: the error of the lost node, which becomes the cause. The result is a NodeInterrupted or NodeRetired if
            `error` is one, otherwise a ConnectionLost.
    """
    if isinstance(error, NodeRetired):
        return retired(node)
    if isinstance(error, NodeInterrupted):
        return taken_back(node, error)
    gone = ConnectionLost(
        f"node {node} was ended because node {lost} of the same slice (machines rented together) was lost: {error}",
        node,
    )
    gone.__cause__ = error
    return gone


def protocol_violation(what: str) -> ProtocolError:
    """Return (not raise) the error for a message that breaks the protocol between client and node.

    `what` says what was wrong, with the expected and the found value. The error advises to use the same version of
    skypool on both.
    """
    return ProtocolError(
        f"{what}; use the same version of skypool on client and node, and report a bug if the versions are the same"
    )


def nearest(word: str, choices: Iterable[str], n: int = 3) -> list[str]:
    """Return up to `n` of `choices` that a mistyped `word` may stand for, the most similar first. Case is ignored.

    Of choices that differ only in case, the last one is returned.
    """
    import difflib

    by_fold = {choice.casefold(): choice for choice in choices}
    return [by_fold[match] for match in difflib.get_close_matches(word.casefold(), by_fold, n, 0.5)]
