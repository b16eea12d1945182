"""The pages of docs/: links lead somewhere, programs pass the type checker, and tables are up to date."""

from __future__ import annotations

import ast
import builtins
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import typer.core
import typer.main

import skypool
from docs.generate import command_line, providers
from skypool import cli, errors

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md"), ROOT / "providers" / "README.md", *ROOT.glob("*.md")],
    key=lambda page: page.relative_to(ROOT).as_posix(),
)
GENERATED = {DOCS / "reference" / "command-line.md"}
"""Pages that the site is built with, and that are no files."""

NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
FENCE = re.compile(r"^( *)(```+|~~~+)([^\n]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)


@cache
def text(page: Path) -> str:
    return page.read_text()


# --- links ---------------------------------------------------------------------------------------------------


def prose(page: Path) -> str:
    """Return a page without its code."""
    return re.sub(r"`[^`\n]+`", "", FENCE.sub("", text(page)))


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's titles, as GitHub and the site make them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.+?) *#*$", FENCE.sub("", text(page)), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        found.add(next(each for each in (slug, *(f"{slug}-{n}" for n in range(1, 100))) if each not in found))
    return found


def broken_links(page: Path) -> Iterator[str]:
    """Yield the relative links of a page that lead nowhere."""
    for link in re.findall(r"\]\(<?([^)\s>]+)", prose(page)):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        where, _, anchor = link.partition("#")
        target = (page.parent / where).resolve() if where else page
        known = not anchor or target.suffix != ".md" or target in GENERATED
        if not (target.exists() or target in GENERATED) or not (known or anchor in anchors(target) | named(target)):
            yield link


def named(page: Path) -> set[str]:
    """Return the anchors that only the site has: those of names in the reference."""
    return set(re.findall(r"^::: ([\w.]+)$", text(page), re.MULTILINE))


@pytest.mark.parametrize("name", NAMES)
def test_every_link_of_a_page_leads_somewhere(name: str) -> None:
    assert list(broken_links(ROOT / name)) == []


def test_links_that_lead_nowhere_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `title` of it\n\n[a](other.md) [b](#a-title-of-it) [c](#nowhere) `[d](gone.md)` [e](https://e.org)\n"
    )
    assert list(broken_links(page)) == ["other.md", "#nowhere"]


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    entries = re.findall(r"- (?:[\w .]+: )?\"?([\w/.*-]+)\"?$", nav, re.MULTILINE)
    pages = [page.relative_to(DOCS) for page in DOCS.rglob("*.md")]
    missing = [
        str(page) for page in pages if not any(page.match(f"{each}.md" if "*" in each else each) for each in entries)
    ]
    assert missing == []


# --- programs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A fenced block of Python on a page. `module` is the name of the file that mypy sees."""

    page: str
    line: int
    words: str
    code: str

    @property
    def module(self) -> str:
        return re.sub(r"\W", "_", f"{self.page}_{self.line}")

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def programs(page: Path) -> list[Program]:
    """Return the blocks of Python of a page, in order."""
    found = []
    for match in FENCE.finditer(text(page)):
        indent, _, words, code = match.groups()
        if words.split()[:1] == ["python"]:
            line = text(page).count("\n", 0, match.start()) + 1
            code = re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
            found.append(Program(page.relative_to(ROOT).as_posix(), line, words.strip(), code))
    return found


def bound(tree: ast.Module) -> set[str]:
    """Return all names that a program binds somewhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return found


def wanted(tree: ast.Module) -> set[str]:
    """Return the names that a program uses and binds nowhere."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return used - bound(tree) - set(vars(builtins))


def completed(each: Program, earlier: list[tuple[Program, ast.Module]]) -> tuple[str, int]:
    """Return a program with imports of what it takes from earlier programs of its page, and how many lines they are."""
    lines = []
    for name in sorted(wanted(ast.parse(each.code))):
        source = next((program for program, tree in reversed(earlier) if name in bound(tree)), None)
        if name == "sky":
            lines.append("import skypool as sky")
        elif source is not None:
            lines.append(f"from {source.module} import {name}")
    return "\n".join([*lines, each.code]), len(lines)


RUN_ELSEWHERE = {"docs/driver-tutorial.md": "tests/test_driver_kit.py puts its methods together and runs them"}
SETTINGS = """
[mypy]
python_version = 3.11
check_untyped_defs = True
ignore_missing_imports = True
follow_imports = silent
implicit_reexport = True
disable_error_code = empty-body, func-returns-value, import-untyped
"""
"""Programs on pages need no annotations, and leave out the bodies of functions."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_type_checker_accepts_every_program_of_every_page(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    offset, files = {}, []
    for page in PAGES:
        earlier: list[tuple[Program, ast.Module]] = []
        for each in programs(page):
            if "no-check" in each.words or each.page in RUN_ELSEWHERE:
                continue
            code, added = completed(each, earlier)
            file = tmp_path / f"{each.module}.py"
            file.write_text(code)
            files.append(file.name)
            offset[file.name] = (each, added)
            earlier.append((each, ast.parse(each.code)))
    assert len(files) > 50
    path = os.pathsep.join([str(tmp_path), *(str(ROOT / each) for each in (".", "providers", "images"))])
    argv = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary", *files]
    env = {**os.environ, "MYPYPATH": path}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=580)
    told = []
    for line in done.stdout.splitlines():
        file_name, number, rest = (*line.split(":", 2), "", "")[:3]
        if file_name in offset and number.isdigit():
            each, added = offset[file_name]
            line = f"{each.page}:{each.line + int(number) - added}:{rest}"
        told.append(line)
    assert done.returncode == 0, "\n".join([*told, done.stderr])


@pytest.mark.parametrize("name", NAMES)
def test_a_program_that_is_not_checked_says_why(name: str) -> None:
    unsaid = [each.where for each in programs(ROOT / name) if re.search(r"no-check$", each.words)]
    assert unsaid == [], "write: ```python no-check: why"


# --- reference and tables ------------------------------------------------------------------------------------


def documented() -> set[str]:
    """Return the names that pages of the reference document, by themselves or under a title of their own."""
    found = set()
    for page in (DOCS / "reference").glob("*.md"):
        found.update(re.findall(r"^::: ([\w.]+)$", text(page), re.MULTILINE))
        found.update(f"skypool.{title}" for title in re.findall(r"^## (\w+)$", text(page), re.MULTILINE))
    return found


def test_the_reference_has_every_public_name() -> None:
    of_errors = {f"skypool.errors.{name}" for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    names = {f"skypool.{name}" for name in dir(skypool) if not hasattr(errors, name)} - {"skypool.accelerators"}
    assert sorted((names | of_errors) - documented()) == []


def test_every_error_of_the_reference_says_what_to_do() -> None:
    sections = re.split(r"^::: ", text(DOCS / "reference" / "errors.md"), flags=re.MULTILINE)[1:]
    assert [each.partition("\n")[0] for each in sections if "**What to do.** " not in each] == []


def test_the_reference_of_the_command_line_has_every_command_and_option() -> None:
    page = command_line.page()
    for name in ("skypool offers", "skypool gc", "skypool doctor", "skypool accelerators compare"):
        assert f"\n## {name}\n" in page
    assert "| `--provider`, `-p` `PROVIDER` |" in page
    shown = subprocess.run(
        [sys.executable, "-m", "skypool", "gc", "--help"], capture_output=True, text=True, check=True
    )
    section = page.partition("## skypool gc\n")[2].partition("\n## ")[0]
    options = set(re.findall(r"--[a-z][a-z-]+", shown.stdout)) - {"--help"}
    assert options
    assert options <= set(re.findall(r"`(--[a-z-]+)`", section)) | set(re.findall(r"--[a-z-]+", section))


def test_a_command_of_the_program_loads_no_other_and_all_are_there_without_one() -> None:
    names = {name for commands in cli._COMMANDS.values() for name in commands}
    whole = typer.main.get_command(cli.build())
    assert isinstance(whole, typer.core.TyperGroup)
    assert whole.commands.keys() == names
    for name in names:
        alone = typer.main.get_command(cli.build(name))
        assert isinstance(alone, typer.core.TyperGroup)
        assert name in alone.commands
    code = (
        "import sys; from skypool.cli import build; build('ps')\n"
        "print(sorted({'skypool.cli.run', 'skypool.cli.prove', 'skypool.pool.engine'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("page", providers.PAGES, ids=lambda page: page.name)
def test_the_table_of_providers_is_up_to_date(page: Path) -> None:
    assert providers.written(text(page), page) == text(page), "run: python -m docs.generate.providers"


def test_every_provider_has_a_row_and_a_page() -> None:
    homes = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["skypool.providers"]
    table = providers.table(DOCS / "providers.md")
    for name in homes:
        assert f"](providers/{name}.md)" in table
        assert (DOCS / "providers" / f"{name}.md").is_file()
