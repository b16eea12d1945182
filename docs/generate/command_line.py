"""The reference of the command line, generated from the program itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer.main

from skypool.cli import build

TOP = """# Command line

`skypool` is installed with the package. `skypool COMMAND --help` prints what this page has. Commands that print tables
take `--json` for programs. What skypool refuses is one line on standard error and exit status 2.

"""


def page() -> str:
    """Return the page with all commands and their options."""
    program = typer.main.get_command(build())
    names = list(_commands(program, "skypool"))
    table = ["| command | what it does |", "|---|---|"]
    table += [f"| [`{name}`](#{_anchor(name)}) | {_cell(_first_line(command))} |" for name, command in names]
    sections = [_section(name, command) for name, command in names]
    return TOP + "\n".join(table) + "\n\n" + "\n".join(sections)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield all commands below a group of them, with their full names."""
    for below in getattr(command, "commands", {}).values():
        if below.hidden:
            continue
        full = f"{name} {below.name}"
        if not getattr(below, "commands", None) or getattr(below, "invoke_without_command", False):
            yield full, below
        yield from _commands(below, full)


def _section(name: str, command: Any) -> str:
    """Return the section of one command: usage, help text, arguments and options."""
    words = [name, "[OPTIONS]"]
    rows: dict[str, list[str]] = {"argument": [], "option": []}
    for parameter in command.params:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        if parameter.opts[0].startswith("-"):
            kind = "option"
            spelled = ", ".join(f"`{each}`" for each in [*parameter.opts, *parameter.secondary_opts])
            spelled += "" if parameter.is_flag else f" `{_word(parameter)}`"
        else:
            kind = "argument"
            spelled = f"`{_word(parameter)}`"
            word = _word(parameter) if parameter.required else f"[{_word(parameter)}]"
            words.append(word if parameter.nargs == 1 else f"{word}...")
        rows[kind].append(f"| {spelled} | {_cell(parameter.help or '')}{_default(parameter)} |")
    parts = [f"## {name}\n", f"```text\n{' '.join(words)}\n```\n", inspect.cleandoc(command.help or "") + "\n"]
    for kind, lines in rows.items():
        if lines:
            parts.append("\n".join([f"| {kind} | meaning |", "|---|---|", *lines]) + "\n")
    return "\n".join(parts)


def _word(parameter: Any) -> str:
    """Return the word that stands for the value of an argument or option."""
    return str(parameter.metavar or parameter.name).upper()


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or value == () or callable(value) or not isinstance(value, (str, int, float)):
        return ""
    return f" Default: `{value}`." if value not in ("", True) else ""


def _first_line(command: Any) -> str:
    return inspect.cleandoc(command.help or "").partition("\n\n")[0].replace("\n", " ")


def _cell(text: str) -> str:
    """Return text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _anchor(name: str) -> str:
    return name.replace(" ", "-")
