"""What a client's script tells the test: which functions were called, what they returned, how they refused.

This file is run by the Python of a client's environment, which has neither skypool nor the tests.
"""

import contextlib
import json
import sys


class Report:
    """The calls of one script, by operation: list, create, get, tag, log, end, bad key, no stock, bad id.

    Printed as JSON when its block ends, also by an exception.
    """

    def __init__(self):
        self.called, self.shown, self.refusals = {}, {}, {}

    def call(self, operation, function, *args, as_=None, **options):
        """Return what a client's function returns.

        Args:
            as_: its name, where the function does not know it.
        """
        self._note(operation, as_ or name(function))
        return function(*args, **options)

    def refused(self, operation, function, *args, as_=None, **options):
        """Call a client's function that must raise; the report has type and text of the exception and its causes."""
        called = as_ or name(function)
        self._note(operation, called)
        try:
            returned = function(*args, **options)
        except Exception as error:  # noqa: BLE001 - which one it is, the test says
            self.refusals.setdefault(operation, []).append(" < ".join(_chain(error)))
            return error
        raise AssertionError(f"{called} was not refused: {returned!r}")

    def show(self, **values):
        """Values for the test to compare."""
        self.shown |= values

    def _note(self, operation, called):
        names = self.called.setdefault(operation, [])
        if called not in names:
            names.append(called)

    def __enter__(self):
        # Clients print what they like; only the report goes to stdout.
        self._stdout = contextlib.redirect_stdout(sys.stderr)
        self._stdout.__enter__()
        return self

    def __exit__(self, *about):
        self._stdout.__exit__(*about)
        json.dump({"called": self.called, "shown": self.shown, "refusals": self.refusals}, sys.stdout, default=str)


def _chain(error):
    """Yield type and text of an exception, of its cause, and so on."""
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__


def name(function):
    """Return the name of a function as a reader finds it: with its class, or with its module."""
    owner = getattr(function, "__self__", None)
    if owner is None:
        return f"{function.__module__}.{function.__qualname__}"
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__name__}.{function.__name__}"
