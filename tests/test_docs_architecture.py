"""docs/architecture.md names what exists, and its stories happen in the order in which they are told."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.test_house import DOORS, ORDER, imports, sources

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGE = (DOCS / "architecture.md").read_text()
STORIES = ("A call", "A pool's start", "A spot notice", "gc", "From an image to a node")
PACKAGES = {path.parent.name for path in (ROOT / "skypool").glob("*/__init__.py")}


@dataclass(frozen=True)
class Named:
    """A function that the page names, and the file that it says the function is in."""

    file: str
    function: str

    @property
    def path(self) -> Path:
        below_skypool = ROOT / "skypool" / self.file
        return below_skypool if below_skypool.exists() else ROOT / self.file


def named(text: str) -> list[Named]:
    """Return the functions that a paragraph or a step names; each is in the file that is named last before it."""
    found, file = [], ""
    for word in re.findall(r"`([^`\s]+)`", text):
        if word.endswith(".py"):
            file = word
        elif re.fullmatch(r"[A-Za-z_][\w.]*\(\)", word):
            found.append(Named(file, word[:-2]))
    return found


def steps(story: str) -> list[str]:
    """Return the numbered steps of a story."""
    section = PAGE.partition(f"\n### {story}\n")[2]
    section = re.split(r"\n##", section)[0]
    return [line for line in section.splitlines() if re.match(r"\d+\. ", line)]


@functools.cache
def defined_in(path: Path) -> frozenset[str]:
    """Return the dotted names of the functions that a file defines."""
    found = set()

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(f"{prefix}{node.name}")

    look(ast.parse(path.read_text()).body, "")
    return frozenset(found)


def test_every_file_that_the_page_names_is_there() -> None:
    files = [Named(word, "") for word in re.findall(r"`([\w/]+\.py)`", PAGE)]
    assert len(files) > 40
    assert [each.file for each in files if not each.path.is_file()] == []


def test_every_function_that_the_page_names_is_in_the_file_before_it() -> None:
    prose = [
        *(step for story in STORIES for step in steps(story)),
        *PAGE.partition("## How a call travels")[2].split("\n\n"),
    ]
    functions = [each for text in prose for each in named(text)]
    assert len(functions) > 50
    assert [each for each in functions if not each.path.is_file() or each.function not in defined_in(each.path)] == []


def test_a_function_that_is_not_there_would_be_found() -> None:
    told = named(
        "1. `compute_pool/compute_pool.py` `ComputePool.start()` and `ComputePool.never()`; "
        "`calls/call.py` `ComputePool.start()`"
    )
    assert [each.function in defined_in(each.path) for each in told] == [True, False, False]


@pytest.mark.parametrize("story", STORIES)
def test_a_story_has_at_most_ten_steps_and_each_names_file_and_function(story: str) -> None:
    told = steps(story)
    assert 5 <= len(told) <= 10
    assert [int(step.partition(".")[0]) for step in told] == list(range(1, len(told) + 1))
    assert [step for step in told if not named(step)] == []


def test_the_page_has_one_line_for_each_package() -> None:
    table = PAGE.partition("## Packages")[2].partition("## Five stories")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(PACKAGES)
    modules = {path.stem for path in (ROOT / "skypool").glob("*.py")} - {"__init__", "__main__"}
    assert set(re.findall(r"`(\w+)`", table.partition("Modules beside")[2])) == modules


def test_links_of_the_page_lead_somewhere() -> None:
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)", PAGE, re.MULTILINE)
    }
    for link in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert link[1:] in anchors if link.startswith("#") else (DOCS / link).is_file(), link


# --- the picture ---------------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def rows() -> list[list[str]]:
    """Return the packages in the picture: rows from the lowest to the highest, each from left to right."""
    picture = ElementTree.parse(DOCS / "architecture.svg").getroot()
    groups = sorted(picture.iter(f"{SVG}g"), key=lambda group: int(group.attrib["id"].removeprefix("row-")))
    found = []
    for group in groups:
        names = [text for text in group.iter(f"{SVG}text") if text.get("class") == "name"]
        found.append([str(text.text) for text in sorted(names, key=lambda text: float(text.attrib["x"]))])
    return found


def test_the_picture_has_every_package_once() -> None:
    picture = ElementTree.parse(DOCS / "architecture.svg").getroot()
    names = [text.text for text in picture.iter(f"{SVG}text") if text.get("class") == "name"]
    assert sorted(map(str, names)) == sorted([*PACKAGES, "modules", "providers/", "images/"])
    assert {name for row in rows() for name in row} == PACKAGES - {"agent"} | {"modules"}


@pytest.mark.slow
def test_packages_import_only_from_rows_below_or_from_their_left() -> None:
    place = {name: (number, column) for number, row in enumerate(rows()) for column, name in enumerate(row)}
    wrong = set()
    for source in sources(ROOT, "skypool"):
        here = source.name.split(".")[1] if "." in source.name else ""
        for each in imports(source):
            there = each.module.split(".")[1] if each.module.startswith("skypool.") else ""
            is_higher = here in place and there in place and here != there and place[here] < place[there]
            if is_higher and DOORS.get(source.name) != there:
                wrong.add((here, there))
    assert wrong == set()


def test_the_agent_imports_the_packages_that_the_picture_says() -> None:
    used = {
        each.module.split(".")[1]
        for source in sources(ROOT, "skypool")
        if source.name.startswith("skypool.agent")
        for each in imports(source)
        if each.module.startswith("skypool.")
    }
    assert used & PACKAGES - {"agent"} == {"wire", "trust", "safety", "devices", "gangs", "head", "samples"}
    assert used - PACKAGES <= set(ORDER)


# --- the stories, as they happen -----------------------------------------------------------------------------

NOT_SEEN_HERE = {
    Named("drivers/contract.py", "Driver.terminate"),  # a protocol
    Named("drivers/tags.py", "owners"),  # FakeCloud finds its machines without tags
    Named("drivers/tags.py", "instance"),
    Named("wire/transport.py", "SSH.argv"),  # and reaches them without ssh
}
"""Functions of the stories that a FakeCloud has no use for. The agent's are not seen either: it is another process."""

PROGRAM = r"""
import json, os, sys, threading, time
from datetime import UTC, datetime
from pathlib import Path

wanted = {tuple(each) for each in json.loads(sys.argv[1])}
folder = Path(sys.argv[2])
called, stories = [], {}

def note(frame, event, arg):
    code = frame.f_code
    if event == "call" and (code.co_filename, code.co_qualname) in wanted:
        called.append((code.co_filename, code.co_qualname))

threading.setprofile(note)  # threads that begin from here on
sys.setprofile(note)

def end_of(*names):
    for name in names:
        stories[name] = list(called)
    called.clear()

def until(what):
    limit = time.monotonic() + 60
    while not what():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.02)

import skypool as sky
from skypool.cli import ending
from skypool.model import Need, Order
from skypool.testing import FakeCloud, Stock

@sky.compute
def train(epochs):
    return epochs + 1

@sky.compute
def until_there(path):
    while not os.path.exists(path):
        time.sleep(0.02)
    return sky.instance_info().node

(folder / "settings.txt").write_text("a file of the image")
cloud = FakeCloud(folder / "cloud", stock=[Stock(market="spot")])
image = sky.Image(files={"settings.txt": str(folder / "settings.txt")}, run=["true"])
pool = sky.ComputePool(cloud, image=image, market="spot", name="story", console="off")
with pool:
    end_of("A pool's start", "From an image to a node")
    assert train(1) >> pool == 2
    end_of("A call")
    future = until_there(str(folder / "go")) > pool
    until(lambda: any(lane.underway for each in pool._engine.dispatch.node_queues.values() for lane in each.lanes))
    cloud.control.interrupt(cloud.instances()[0], notice=3)
    until(lambda: list(pool.nodes.values()) == ["ended", "ready"])
    (folder / "go").touch()
    assert future.result(60) == 1
    end_of("A spot notice")

need = Need(market="spot")
lost = Order("lost", "lost-1", (0,), need, until=datetime(2026, 1, 2, tzinfo=UTC))
cloud.launch(next(iter(cloud.offers(need))), lost)
ending.gc(provider=["fake"], everything=False, yes=True, as_json=True)
assert cloud.instances() == []
end_of("gc")
cloud.close()
(folder / "told.json").write_text(json.dumps(stories))
"""


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """Return the functions that were called in each story, in order, when a program lived through all of them."""
    folder = tmp_path_factory.mktemp("stories")
    wanted = [(str(each.path), each.function) for story in STORIES for step in steps(story) for each in named(step)]
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "SKYPOOL_FAKE_CLOUD": str(folder / "cloud")}
    (folder / "program.py").write_text(PROGRAM)
    argv = [sys.executable, str(folder / "program.py"), json.dumps(wanted), str(folder)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    told = json.loads((folder / "told.json").read_text())
    return {story: [(file, function) for file, function in calls] for story, calls in told.items()}


@pytest.mark.skipif(sys.platform != "linux", reason="machines of FakeCloud need Linux")
@pytest.mark.parametrize("story", STORIES)
def test_a_story_happens_as_it_is_told(story: str, happened: dict[str, list[tuple[str, str]]]) -> None:
    calls = happened[story]
    at = 0
    for step in steps(story):
        told = {each for each in named(step) if each not in NOT_SEEN_HERE and not each.file.startswith("agent/")}
        there = {(str(each.path), each.function) for each in told}
        assert there <= set(calls), f"not called: {there - set(calls)} of {step}"
        if there:
            later = [number for number, call in enumerate(calls) if number >= at and call in there]
            assert later, f"not called after the steps before it: {step}"
            at = later[0]
