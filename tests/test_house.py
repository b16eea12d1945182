"""The rules of the house. Each is a function from a source tree to its violations; each is broken here once."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import skypool
from skypool.shipping import package_zip as ship
from tests.needs import SHELLCHECK

ROOT = Path(__file__).parent.parent

ORDER = """
    text errors safety tracebacks supported events clock checks processes event_loop accelerators devices wire shipping
    model trust runtime head gangs link files buckets data drivers calls offers rental provision pool console logs
    samples metrics observers report compute_pool engines proof agent runs cli testing __main__
""".split()  # noqa: SIM905 - as a list it is 36 lines and says no more
"""The rooms of skypool from the bottom up; a package is one room. Lower never imports higher."""

FRONT_DOOR = "skypool"
NAMES_CLOUDS = {"accelerators", "devices", "never_sent", "buckets"}
"""A cloud may be the maker of hardware, have folders of credentials, and be the namesake of a protocol's settings."""
DOORS = {"skypool.drivers.recording": "proof"}
"""Public modules that also hand on names of a room above them, as the front door does; no other room imports them."""
ENGINES = "engines"
"""The room that may use the front door, and nothing else of skypool."""
MOST_BESIDE = 13
"""How many modules may stand in skypool/ itself, `__init__` and `__main__` among them."""
NO_NAMES = {"util", "utils", "helper", "helpers", "common", "base", "manager", "managers", "misc"}
CLOUDS = {"aws", "gcp", "runpod", "vast", "vastai", "verda"}


@dataclass(frozen=True)
class Source:
    """One module. `name` is dotted; `where` says file:line in a violation."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    def where(self, node: ast.AST | int = 1) -> str:
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return f"{self.path}:{line}"

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @property
    def docstrings(self) -> set[int]:
        """Ids of the nodes of all strings that stand alone as a statement: documentation."""
        return {
            id(node.value)
            for node in nodes(self.tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }


@dataclass(frozen=True)
class Import:
    """One module imported by another; `optional` when its absence is caught."""

    module: str
    node: ast.AST
    optional: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def sources(root: Path, *folders: str) -> list[Source]:
    """The modules of some of the three source roots: skypool, providers, images."""
    found = []
    for folder in folders:
        base = root if folder == FRONT_DOOR else root / folder
        for path in sorted((root / folder).rglob("*.py")):
            name = ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
            text = path.read_text()
            found.append(Source(path.relative_to(root), name, text, parsed(text)))
    return found


parsed = functools.cache(ast.parse)


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All that is in a module."""
    return list(ast.walk(tree))


@functools.cache
def imports(source: Source) -> list[Import]:
    """Everything that is imported, also in functions, under TYPE_CHECKING and by import_module("…")."""
    optional = {
        id(node)
        for attempt in nodes(source.tree)
        if isinstance(attempt, ast.Try)
        and any("ImportError" in ast.unparse(handler.type) for handler in attempt.handlers if handler.type)
        for line in attempt.body
        for node in ast.walk(line)
    }
    return [
        Import(module, node, id(node) in optional) for node in nodes(source.tree) for module in _imported(source, node)
    ]


def _imported(source: Source, node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names):
            return [each.name for each in names]
        case ast.ImportFrom(module, names, level):
            above = source.package.split(".")[: len(source.package.split(".")) - (level or 1) + 1] if level else []
            parts = ".".join([*above, *([module] if module else [])])
            return [f"{parts}.{each.name}" for each in names]
        case ast.Call(ast.Name("__import__") | ast.Attribute(attr="import_module"), [ast.Constant(str(module)), *_]):
            return [module]
    return []


def room(module: str) -> str:
    """The room that a module of skypool is in; "" is the front door, which holds whatever is no room."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (parts[1] in ORDER) else ""


# --- the rules -----------------------------------------------------------------------------------------------


def rooms_import_downwards(root: Path) -> Iterator[str]:
    node = {name: place for place, name in enumerate(ORDER)}
    for source in sources(root, "skypool"):
        if source.name == FRONT_DOOR:
            continue
        here = source.name.split(".")[1]
        if here not in node:
            yield f"{source.where()}: {here} has no place in the order of rooms"
            continue
        for each in imports(source):
            if each.top != FRONT_DOOR:
                continue
            there = room(each.module)
            if not there:
                if here != ENGINES:
                    yield f"{source.where(each.node)}: {here} imports {each.module} from the front door"
            elif node[there] > node[here] and DOORS.get(source.name) != there:
                yield f"{source.where(each.node)}: {here} imports {there}, which is above it"
            elif here != there and {each.module, each.module.rpartition(".")[0]} & DOORS.keys():
                yield f"{source.where(each.node)}: {here} imports {each.module}, which is a door for users"


def engines_use_what_every_program_may(root: Path) -> Iterator[str]:
    """The public names of the front door: an engine could stand in a distribution of its own."""
    for source in sources(root, "skypool"):
        if not source.name.startswith(f"{FRONT_DOOR}.{ENGINES}"):
            continue
        for each in imports(source):
            name = each.module.removeprefix(f"{FRONT_DOOR}.")
            is_public = name in (FRONT_DOOR, "events", *skypool.__all__) or room(each.module) == ENGINES
            if each.top == FRONT_DOOR and not is_public:
                yield f"{source.where(each.node)}: an engine imports {each.module}, which is not public"
        for node in nodes(source.tree):
            match node:
                case ast.Attribute(ast.Name("sky" | "skypool"), attr=name) if name not in {*skypool.__all__, *DRIVERS}:
                    yield f"{source.where(node)}: an engine uses skypool.{name}, which is not public"
                case ast.Attribute(ast.Name("pool") | ast.Attribute(attr="pool" | "_pool"), attr=name):
                    if name.startswith("_"):
                        yield f"{source.where(node)}: an engine uses {name} of a pool, which is not public"


def files_import_in_one_direction(root: Path) -> Iterator[str]:
    """No file imports itself back through others, in a package or across them, late imports and types included.

    Engines use the names of the front door, which names them: it imports each at its first use.
    """
    found = sources(root, "skypool", "providers", "images")
    names = [re.sub(r"^(providers|images)\.", "", source.name) for source in found]
    known = dict(zip(names, found, strict=True))
    edges: dict[str, dict[str, Import]] = {name: {} for name in known}
    for name, source in known.items():
        for each in imports(source):
            there = each.module
            while there and there not in known:
                there = there.rpartition(".")[0]
            is_front_door = there == FRONT_DOOR and name.startswith(f"{FRONT_DOOR}.{ENGINES}")
            if there and there != name and not is_front_door:
                edges[name].setdefault(there, each)
    reached = {name: reachable(name, edges) for name in known}
    for name, source in known.items():
        for there, each in edges[name].items():
            if name in reached[there]:
                yield f"{source.where(each.node)}: {name} imports {there}, which imports it back"


def reachable(start: str, edges: Mapping[str, Iterable[str]]) -> set[str]:
    """Return all that a file imports, directly or through others."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        for there in edges[todo.pop()]:
            if there not in seen:
                seen.add(there)
                todo.append(there)
    return seen


def few_modules_stand_beside_the_packages(root: Path) -> Iterator[str]:
    beside = sorted(path.name for path in (root / "skypool").glob("*.py"))
    if len(beside) > MOST_BESIDE:
        yield f"skypool: {len(beside)} modules stand beside the packages, {MOST_BESIDE} at most: {', '.join(beside)}"


def roots_import_downwards(root: Path) -> Iterator[str]:
    """providers → skypool → images → stdlib."""
    drivers = {path.name for path in (root / "providers").iterdir() if path.is_dir()}
    for source in sources(root, "skypool"):
        for each in imports(source):
            if each.top in drivers and source.name != FRONT_DOOR:
                yield f"{source.where(each.node)}: the core imports {each.module}, a driver"
    for source in sources(root, "images"):
        for each in imports(source):
            if each.top not in sys.stdlib_module_names and not each.module.startswith("skypool_images"):
                yield f"{source.where(each.node)}: images import {each.module}, which is not the standard library"
    for source in sources(root, "providers"):
        for each in imports(source):
            if each.top in drivers - {source.name.partition(".")[0]}:
                yield f"{source.where(each.node)}: a driver imports {each.module}, another driver"


def the_agent_needs_only_the_standard_library(root: Path) -> Iterator[str]:
    """And cloudpickle: nothing else is on a node. What it imports of skypool counts too, all the way down."""
    modules = {source.name: source for source in sources(root, "skypool")}
    todo = [name for name in modules if name.startswith("skypool.agent")]
    seen = set(todo)
    while todo:
        source = modules[todo.pop()]
        for each in imports(source):
            if each.top == FRONT_DOOR:
                for name in (each.module, each.module.rpartition(".")[0]):
                    if name in modules and name not in seen and name != FRONT_DOOR:
                        seen.add(name)
                        todo.append(name)
            elif each.top not in {*sys.stdlib_module_names, "cloudpickle"} and not each.optional:
                yield f"{source.where(each.node)}: the agent would need {each.module}"


def the_core_names_no_cloud(root: Path) -> Iterator[str]:
    for source in sources(root, "skypool"):
        if source.name == FRONT_DOOR or NAMES_CLOUDS.intersection(source.name.split(".")):
            continue
        documentation = source.docstrings
        for node, text, named in _clouds(source.tree):
            if id(node) not in documentation:
                yield f"{source.where(node)}: {text!r:.60} names {', '.join(sorted(named))}"


@functools.cache  # the houses that break a rule differ from this one in one file each
def _clouds(tree: ast.Module) -> list[tuple[ast.AST, str, set[str]]]:
    """The identifiers and strings of a module that name clouds, documentation included."""
    return [
        (node, text, named)
        for node in nodes(tree)
        for text in _texts(node)
        if (named := _words(text) & (CLOUDS - {"vast"} if " " in text else CLOUDS))
    ]


def _texts(node: ast.AST) -> list[str]:
    """The identifiers and strings that a node itself holds."""
    match node:
        case ast.Name(text) | ast.Attribute(attr=text) | ast.arg(text) | ast.alias(text) | ast.Constant(str(text)):
            return [text]
        case ast.FunctionDef(text) | ast.AsyncFunctionDef(text) | ast.ClassDef(text) | ast.keyword(str(text)):
            return [text]
        case ast.ImportFrom(str(text)):
            return [text]
    return []


def _words(text: str) -> set[str]:
    """`SkypoolAWSDriver`, `skypool_aws` and `aws-driver` all say "aws"."""
    parts = re.split(r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", text)
    joined = {"".join(pair).lower() for pair in itertools.pairwise(parts)} & {"vastai", "runpod"}
    return {part.lower() for part in parts} | joined


def names_say_what_is_inside(root: Path) -> Iterator[str]:
    for source in sources(root, "skypool", "providers", "images"):
        for word in NO_NAMES.intersection(part.strip("_") for part in source.name.split(".")):
            yield f"{source.where()}: {word} says nothing"


def nothing_is_swallowed(root: Path) -> Iterator[str]:
    for source in sources(root, "skypool", "providers", "images"):
        for node in nodes(source.tree):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
                raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                if node.type is None and not raises:
                    yield f"{source.where(node)}: a bare except"
                elif all(_does_nothing(line) for line in node.body):
                    yield f"{source.where(node)}: every error is swallowed"
            elif isinstance(node, ast.Call) and "suppress" in ast.unparse(node.func) and any(map(_is_broad, node.args)):
                yield f"{source.where(node)}: every error is suppressed"


def _is_broad(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    names = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(ast.unparse(name) in ("Exception", "BaseException") for name in names)


def _does_nothing(line: ast.stmt) -> bool:
    return isinstance(line, (ast.Pass, ast.Continue)) or (
        isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
    )


def nothing_is_left_to_do(root: Path) -> Iterator[str]:
    for source in sources(root, "skypool", "providers", "images"):
        for number, line in enumerate(source.text.splitlines(), 1):
            if re.search(r"\b(TODO|FIXME)\b", line):
                yield f"{source.where(number)}: {line.strip()}"


def every_file_says_what_it_is_for(root: Path) -> Iterator[str]:
    for source in sources(root, "skypool", "providers", "images"):
        if not (ast.get_docstring(source.tree) or "").strip():
            yield f"{source.where()}: no docstring"


_STATEMENT = re.compile(r"^ *(import \w|def \w|while |for \w+ in |if \[|case |set -|trap |exec |eval )", re.MULTILINE)
"""How statements of Python and of shell begin."""


def programs_stand_in_files(root: Path) -> Iterator[str]:
    """Shell and Python for other interpreters are files, where ruff, mypy and shellcheck see them."""
    for source in sources(root, "skypool", "providers", "images"):
        parts = {id(part) for node in nodes(source.tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        left_out = parts | source.docstrings
        for node in nodes(source.tree):
            if id(node) not in left_out:
                text = _literal(node)
                if text.count("\n") > 2 and len(_STATEMENT.findall(text)) > 1:
                    yield f"{source.where(node)}: a program of {text.count(chr(10))} lines in a string"


def _literal(node: ast.AST) -> str:
    """Return the text of a string as far as it is written there, "" for other nodes."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(parts):
            return "".join(_literal(part) for part in parts)
    return ""


Rule = Callable[[Path], Iterator[str]]
RULES: list[Rule] = [
    rooms_import_downwards,
    engines_use_what_every_program_may,
    files_import_in_one_direction,
    few_modules_stand_beside_the_packages,
    roots_import_downwards,
    the_agent_needs_only_the_standard_library,
    the_core_names_no_cloud,
    names_say_what_is_inside,
    nothing_is_swallowed,
    nothing_is_left_to_do,
    every_file_says_what_it_is_for,
    programs_stand_in_files,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_this_house_keeps_the_rule(rule: Rule) -> None:
    assert list(rule(ROOT)) == []


# --- each rule, broken once ----------------------------------------------------------------------------------

SWALLOWED = "try:\n    pass\nexcept {}:\n    {}\n"

BREAKS: list[tuple[Rule, str, str, str]] = [
    (
        rooms_import_downwards,
        "skypool/wire/frames.py",
        "import skypool.pool.engine",
        "wire imports pool, which is above it",
    ),
    (rooms_import_downwards, "skypool/wire/frames.py", "from skypool.pool import engine", "wire imports pool"),
    (
        rooms_import_downwards,
        "skypool/wire/frames.py",
        "from skypool.pool.engine import PoolEngine",
        "wire imports pool",
    ),
    (rooms_import_downwards, "skypool/wire/frames.py", "from ..pool import ComputePool", "wire imports pool"),
    (rooms_import_downwards, "skypool/wire/frames.py", "from .. import pool", "wire imports pool"),
    (
        rooms_import_downwards,
        "skypool/wire/frames.py",
        "def f():\n    from skypool.pool import engine",
        "wire imports pool",
    ),
    (
        rooms_import_downwards,
        "skypool/wire/frames.py",
        "if TYPE_CHECKING:\n    import skypool.pool.engine",
        "wire imports pool",
    ),
    (
        rooms_import_downwards,
        "skypool/wire/frames.py",
        "importlib.import_module('skypool.pool.engine')",
        "wire imports pool",
    ),
    (rooms_import_downwards, "skypool/errors.py", "from skypool.agent import agent", "errors imports agent"),
    (rooms_import_downwards, "skypool/agent/shared_page.py", "from skypool.cli import main", "agent imports cli"),
    (rooms_import_downwards, "skypool/agent/shared_page.py", "from ..cli import main", "agent imports cli"),
    (rooms_import_downwards, "skypool/agent/shared_page.py", "from skypool import ComputePool", "the front door"),
    (rooms_import_downwards, "skypool/agent/shared_page.py", "import skypool", "the front door"),
    (rooms_import_downwards, "skypool/drivers/rest.py", "from skypool.proof import recording", "drivers imports proof"),
    (rooms_import_downwards, "skypool/drivers/recording.py", "from skypool.pool import engine", "drivers imports pool"),
    (rooms_import_downwards, "skypool/cli/prove.py", "from skypool.drivers import recording", "is a door"),
    (rooms_import_downwards, "skypool/cli/prove.py", "from skypool.drivers.recording import to", "is a door"),
    (rooms_import_downwards, "skypool/attic.py", "", "attic has no place"),
    (rooms_import_downwards, "skypool/pool/pool.py", "from skypool.engines import joblib", "pool imports engines"),
    (
        engines_use_what_every_program_may,
        "skypool/engines/joblib.py",
        "from skypool.pool.engine import PoolEngine",
        "imports skypool.pool.engine.PoolEngine, which is not public",
    ),
    (
        engines_use_what_every_program_may,
        "skypool/engines/joblib.py",
        "from skypool import wire",
        "skypool.wire, which",
    ),
    (engines_use_what_every_program_may, "skypool/engines/joblib.py", "from ..calls import call", "skypool.calls.call"),
    (engines_use_what_every_program_may, "skypool/engines/joblib.py", "x = sky.wire", "uses skypool.wire"),
    (
        engines_use_what_every_program_may,
        "skypool/engines/_batch_queue.py",
        "def f(self): return self.pool._terms, self._pool.name",
        "uses _terms of a pool",
    ),
    (
        files_import_in_one_direction,
        "skypool/wire/frames.py",
        "from skypool.wire import codec",
        "imports it back",
    ),
    (
        files_import_in_one_direction,
        "skypool/wire/frames.py",
        "from skypool.wire.codec import dumps",
        "imports it back",
    ),
    (
        files_import_in_one_direction,
        "skypool/wire/frames.py",
        "from .codec import dumps",
        "imports it back",
    ),
    (
        files_import_in_one_direction,
        "skypool/wire/frames.py",
        "def f():\n    from skypool.wire import codec",
        "imports it back",
    ),
    (
        files_import_in_one_direction,
        "skypool/wire/frames.py",
        "if TYPE_CHECKING:\n    from skypool.wire import codec",
        "imports it back",
    ),
    (
        files_import_in_one_direction,
        "skypool/devices/device.py",
        "from skypool.devices import detect",
        "imports it back",
    ),
    (
        files_import_in_one_direction,
        "skypool/agent/shared_page.py",
        "from skypool.agent.keeper import start",
        "imports it back",
    ),
    (
        files_import_in_one_direction,
        "providers/skypool_aws/_api.py",
        "from skypool_aws import AWS",
        "imports it back",
    ),
    (
        few_modules_stand_beside_the_packages,
        "skypool/attic.py",
        '"""One more."""',
        "14 modules stand beside the packages, 13 at most",
    ),
    (roots_import_downwards, "skypool/pool/pool.py", "import skypool_local", "the core imports skypool_local"),
    (
        roots_import_downwards,
        "skypool/pool/pool.py",
        "def f():\n    from skypool_local import Local",
        "the core imports",
    ),
    (roots_import_downwards, "images/skypool_images/x.py", "import skypool.errors", "images import skypool.errors"),
    (roots_import_downwards, "images/skypool_images/x.py", "import numpy", "images import numpy"),
    (roots_import_downwards, "providers/skypool_b/__init__.py", "import skypool_local", "another driver"),
    (the_agent_needs_only_the_standard_library, "skypool/agent/shared_page.py", "import numpy", "would need numpy"),
    (
        the_agent_needs_only_the_standard_library,
        "skypool/wire/codec.py",
        "def f():\n    import rich",
        "would need rich",
    ),
    (
        the_agent_needs_only_the_standard_library,
        "skypool/agent/shared_page.py",
        "from skypool.shipping import package_zip as ship",
        "platformdirs",
    ),
    (the_core_names_no_cloud, "skypool/pool/pool.py", "if provider.name == 'aws': pass", "'aws' names aws"),
    (the_core_names_no_cloud, "skypool/pool/pool.py", "def launch_aws(): pass", "'launch_aws' names aws"),
    (the_core_names_no_cloud, "skypool/pool/pool.py", "class GCPPool: pass", "'GCPPool' names gcp"),
    (the_core_names_no_cloud, "skypool/pool/pool.py", "x = RunPod()", "'RunPod' names runpod"),
    (the_core_names_no_cloud, "skypool/pool/pool.py", "f(vast_ai=1)", "'vast_ai' names vast"),
    (the_core_names_no_cloud, "skypool/pool/pool.py", "import skypool_verda", "'skypool_verda' names verda"),
    (the_core_names_no_cloud, "skypool/pool/pool.py", "x = f'ask Vast.ai about {y}'", "names vastai"),
    (names_say_what_is_inside, "skypool/utils.py", "", "utils says nothing"),
    (names_say_what_is_inside, "skypool/agent/_helpers.py", "", "helpers says nothing"),
    (names_say_what_is_inside, "providers/skypool_b/base/__init__.py", "", "base says nothing"),
    (nothing_is_swallowed, "skypool/pool/pool.py", SWALLOWED.format("Exception", "pass"), "swallowed"),
    (nothing_is_swallowed, "skypool/pool/pool.py", SWALLOWED.format("(OSError, Exception)", "..."), "swallowed"),
    (nothing_is_swallowed, "skypool/pool/pool.py", SWALLOWED.format("BaseException as e", "'why'"), "swallowed"),
    (nothing_is_swallowed, "skypool/pool/pool.py", SWALLOWED.replace(" {}", "", 1).format("x = 1"), "bare except"),
    (nothing_is_swallowed, "skypool/pool/pool.py", "with contextlib.suppress(Exception): f()", "suppressed"),
    (nothing_is_left_to_do, "skypool/pool/pool.py", "x = 1  # TODO: later", "TODO: later"),
    (nothing_is_left_to_do, "providers/skypool_b/__init__.py", "# FIXME", "FIXME"),
    (every_file_says_what_it_is_for, "skypool/cli.py", "x = 1", "no docstring"),
    (
        programs_stand_in_files,
        "skypool/pool/pool.py",
        "x = 'import os\\nimport sys\\n\\nprint(os, sys)\\n'",
        "a program of 4 lines in a string",
    ),
    (
        programs_stand_in_files,
        "skypool/pool/pool.py",
        "x = f'cd {y}\\nset -e\\nwhile true; do\\n    sleep 1\\ndone\\n'",
        "a program of 5 lines in a string",
    ),
]


@functools.cache
def kept(rule: Rule) -> set[str]:
    """What the rule says of this house as it is."""
    return set(rule(ROOT))


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of this house."""
    for folder in ("skypool", "providers", "images"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "file", "text", "says"), BREAKS, ids=[f"{r.__name__}-{i}" for i, (r, *_) in enumerate(BREAKS)]
)
def test_a_house_that_breaks_the_rule_is_told_where(house: Path, rule: Rule, file: str, text: str, says: str) -> None:
    before = kept(rule)
    path = house / file
    path.parent.mkdir(parents=True, exist_ok=True)
    was = path.read_text() if path.exists() else ""
    path.write_text(f"{was}\n{text}\n")
    new = set(rule(house)) - before
    assert any(says in violation for violation in new), new
    assert all(violation.startswith(file) or says in violation for violation in new), new


@pytest.mark.parametrize(
    ("rule", "file", "text"),
    [
        (the_core_names_no_cloud, "skypool/pool/pool.py", '"""Such as "aws"."""'),
        (the_core_names_no_cloud, "skypool/pool/pool.py", "def f():\n    '''On AWS.'''"),
        (the_core_names_no_cloud, "skypool/pool/pool.py", "x = 'a vast number of laws'; vaster = jaws = 1"),
        (the_core_names_no_cloud, "skypool/accelerators/catalog.py", "x = 'aws'"),
        (nothing_is_swallowed, "skypool/pool/pool.py", SWALLOWED.format("OSError", "pass")),
        (nothing_is_swallowed, "skypool/pool/pool.py", SWALLOWED.format("Exception as e", "log(e)")),
        (nothing_is_swallowed, "skypool/pool/pool.py", SWALLOWED.replace(" {}", "", 1).format("raise")),
        (
            the_agent_needs_only_the_standard_library,
            "skypool/agent/shared_page.py",
            "try:\n    import x\nexcept ImportError:\n    x = 1",
        ),
        (
            rooms_import_downwards,
            "skypool/pool/pool.py",
            "from skypool import accelerators; from skypool.wire import frames as wire",
        ),
        (roots_import_downwards, "providers/skypool_b/__init__.py", "import skypool, skypool_images, boto3"),
        (files_import_in_one_direction, "skypool/wire/codec.py", "from skypool.wire.frames import Kind"),
        (few_modules_stand_beside_the_packages, "skypool/attic/__init__.py", '"""A package."""'),
        (
            engines_use_what_every_program_may,
            "skypool/engines/joblib.py",
            "import skypool, joblib\nfrom skypool import ComputePool\nfrom skypool.engines import _versions\n"
            "def f(pool): return pool.name, sky.AWS(), self._terms",
        ),
    ],
)
def test_what_is_allowed_is_not_told_of(house: Path, rule: Rule, file: str, text: str) -> None:
    before = kept(rule)
    path = house / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + f"\n{text}\n")
    assert set(rule(house)) - before == set()


# --- programs ------------------------------------------------------------------------------------------------


def test_shellcheck_finds_nothing_in_shell_scripts() -> None:
    scripts = sorted(str(path) for root in ("skypool", "providers", "images") for path in (ROOT / root).rglob("*.sh"))
    got = subprocess.run([SHELLCHECK, "--shell=sh", *scripts], capture_output=True, text=True)
    assert got.stdout == ""


# --- the front door ------------------------------------------------------------------------------------------

LOADED = """
import sys, types
before = set(sys.modules)
import skypool
for name, module in list(sys.modules.items()):
    spec = getattr(module, "__spec__", None) if isinstance(module, types.ModuleType) else None
    if name not in before and spec is not None and spec.origin not in ("frozen", "built-in"):
        print(name)
"""


def test_import_skypool_loads_the_front_door_and_a_little_of_the_standard_library() -> None:
    got = subprocess.run([sys.executable, "-c", LOADED], check=True, capture_output=True, text=True, cwd=ROOT)
    loaded = got.stdout.split()
    assert [name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names] == ["skypool"]
    assert len(loaded) < 30, loaded


DRIVERS = sorted(
    point.partition(":")[2]
    for point in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "skypool.providers"
    ].values()
)
"""The classes of the drivers of this repository, by its entry points."""


def test_the_lists_of_the_front_door_agree() -> None:
    tree = ast.parse((ROOT / "skypool" / "__init__.py").read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {a.asname or a.name for node in checked.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert set(skypool._HOME) == set(skypool.__all__) >= skypool._MODULES
    assert {*skypool.__all__, *DRIVERS} == typed - {"Any"}
    assert skypool.__all__ == sorted(skypool.__all__)
    assert set(dir(skypool)) >= {*skypool.__all__, *DRIVERS}


@pytest.mark.parametrize("name", [*skypool.__all__, *DRIVERS])
def test_every_name_at_the_front_door_leads_somewhere(name: str) -> None:
    if name in ORDER and not (ROOT / "skypool" / name).exists():
        pytest.skip(f"{name} is not built yet")
    assert getattr(skypool, name) is getattr(skypool, name)


@pytest.mark.parametrize("name", ["nothing", "Nothing", "Images", "Aws", "aws", "A b"])
def test_a_name_that_is_not_at_the_front_door_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute {name!r}"):
        getattr(skypool, name)


def test_every_name_at_the_front_door_can_be_imported_on_a_node(tmp_path: Path) -> None:
    """Where there is what the client ships, and the standard library: the user's modules import skypool there, too."""
    bundle = tmp_path / "skypool.zip"
    bundle.write_bytes(ship.bundle().read())
    code = "import sys; sys.path.insert(0, sys.argv[1]); import skypool; [getattr(skypool, n) for n in sys.argv[2:]]"
    argv = [sys.executable, "-I", "-S", "-c", code, str(bundle), *skypool.__all__, *DRIVERS]
    got = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert got.returncode == 0, got.stderr
