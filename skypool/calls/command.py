"""`cmd`: makes a call that runs a program, such as `sky.cmd("nvidia-smi") >> pool`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from string import Template

from skypool.calls.call import Call, ComputeFunction
from skypool.calls.options import Options
from skypool.calls.program import Program
from skypool.errors import UsageError

Word = str | os.PathLike[str]


_LONGEST = 131_000
"""The most bytes of an argument or a variable. Linux allows 128 KiB, with a variable's name and a null byte."""


def cmd(
    program: Word,
    *arguments: Word,
    env: Mapping[str, str] | None = None,
    cwd: Word | None = None,
    check: bool = True,
    expand: bool = False,
) -> Call[int]:
    """Return a call that runs a program on a node (a rented machine): `sky.cmd("nvidia-smi", "-L") >> pool`.

    It is a call like any other: operators, options and services take it. What the program prints is the output of the
    call. Its stdin is empty. No shell is involved; for one, write `sky.cmd("bash", "-c", "a | b")`. Programs in the
    Python environment of the node's image, such as `torchrun`, are found by name.

    When the call is cancelled or exceeds its `timeout`, the program and its process group get SIGTERM. They get SIGKILL
    when the call's `grace` is over.

    Args:
        program: the name of the program, which is looked up on `PATH`, or its path on the node.
        arguments: the arguments of the program.
        env: variables that are added to the environment of the program. Default None: none.
        cwd: the folder on the node in which the program starts. Default None: the folder in which calls run.
        check: True raises CommandFailed if the exit status is not 0. Default True.
        expand: True replaces `$NAME` and `${NAME}` in the words of the command and in `cwd` by variables. They are
            those of the program's environment on its node, such as `$RANK` in a gang (a call with `procs=`). `$$`
            stands for a dollar sign. If a variable is not set there, the call fails. Default False: words are passed
            on as they are.

    Returns:
        a call whose value is the exit status: always 0 with `check=True`. For a program that a signal ended, it is the
            negative number of the signal.

    Raises:
        UsageError: an argument is not valid.
    """
    words = [_word("the program", program), *(_word("an argument", each) for each in arguments)]
    if not words[0]:
        raise UsageError("cmd() takes the name of a program, not an empty text")
    if not isinstance(check, bool):
        raise UsageError(f"check must be True or False, not {check!r}")
    if not isinstance(expand, bool):
        raise UsageError(f"expand must be True or False, not {expand!r}")
    options: dict[str, object] = {} if check else {"check": False}
    if expand:
        options["expand"] = True
        for word in (*words, *([] if cwd is None else [_word("cwd", cwd)])):
            _check_placeholders(word)
    if cwd is not None:
        options["cwd"] = _word("cwd", cwd)
    if env is not None:
        options["env"] = _variables(env)
    return Call(ComputeFunction(Program(words[0]), Options()), tuple(words[1:]), options, Options())


def _word(what: str, value: object) -> str:
    """Return a word of a command line as text. Raises UsageError unless it is text or a path that Linux takes."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(text, str):
        advice = f"; write str({value!r:.40})" if isinstance(value, (int, float)) else ""
        advice = advice or ("; write *words" if isinstance(value, (list, tuple)) else "")
        raise UsageError(f"{what} of cmd() must be text or a path, not {value!r:.80}{advice}")
    if "\0" in text:
        raise UsageError(f"{what} of cmd() must not contain a null character: {text!r:.80}")
    if len(text.encode(errors="surrogateescape")) > _LONGEST:
        raise UsageError(f"{what} of cmd() has more than {_LONGEST:,} bytes, which Linux refuses; write it into a file")
    return text


def _check_placeholders(word: str) -> None:
    """Raise UsageError if a word has a dollar sign without the name of a variable after it. `$$` is allowed."""
    if not Template(word).is_valid():
        raise UsageError(
            "with expand=True, a dollar sign must begin the name of a variable, as in $RANK or ${RANK}, and $$ stands "
            f"for the sign itself: {word!r:.80}"
        )


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables of an environment as a new dict. Raises UsageError if they are not valid."""
    if not isinstance(env, Mapping):
        raise UsageError(f"env must be a dict of names and values, not {env!r:.80}")
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name:
            raise UsageError(f"env has {name!r:.40}, which is not the name of a variable")
        _word(f"the value of {name} in env", value)
    return {name: os.fspath(value) for name, value in env.items()}
