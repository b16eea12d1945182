"""The report of a pool of 8 nodes and 5,000 calls, seen in Chromium: its numbers, size, colours and layout."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

import skypool as sky
from skypool.rental.ledger import Ledger
from skypool.rental.records import Record
from skypool.samples.journal import read
from skypool.samples.session_file import path_of
from skypool.samples.store import history
from skypool.testing import Stock
from tests.conftest import eventually
from tests.needs import skip_or_fail
from tests.nvml import FakeNvml, build
from tests.nvml.cloud import CloudWithCards

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow
CALLS = 5000
NODES = 8
EVIL = "<img src=x onerror=alert(1)>"
SIZES = {"wide": 1280, "narrow": 400}
UNFOLD = "document.querySelectorAll('details').forEach(each => each.open = true)"


@dataclass(frozen=True)
class Made:
    """A saved report, and what was kept of its pool.

    Attributes:
        file: the report.
        record: the pool's record in the ledger.
        seconds: how long it took to make the report.
    """

    file: Path
    record: Record
    seconds: float

    @property
    def kept(self) -> Path:
        return path_of(self.record.session)


@sky.compute
def work(x: int) -> int:
    import time

    time.sleep(0.001 * (x % 5))
    if x % 500 == 3:
        raise ValueError(f"{EVIL} {x % 3}")
    return x


@sky.compute
def rest(seconds: float) -> None:
    import time

    time.sleep(seconds)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The report of a pool that has lost a node to its provider. Devices are those of an NVML of our own."""
    folder = tmp_path_factory.mktemp("report")
    build(folder)
    nvml = FakeNvml(folder, folder)
    nvml.say(0, count=4, busy=60, memory=40_000, sm_activity=35)
    nvml.say(1, busy=20, memory=70_000)
    nvml.say(2, busy=-1)
    stock = [Stock("gpu.large", usd_per_hour=12.5, market="spot", accelerator="H100:4")]
    with CloudWithCards(folder / "cloud", stock) as cloud:
        pool = sky.ComputePool(
            cloud, nodes=NODES, accelerator="H100:4", market="spot", name="page", console="off", slots=1, budget=500
        )
        with pool:
            for future in [work(x) > pool for x in range(CALLS)]:
                future.exception()
            resting = [rest(0.5 + 0.1 * n) > pool for n in range(NODES)]
            nvml.say(0, busy=95)
            nvml.say(1, busy=0, memory=10_000)
            [taken] = [each for each in cloud.instances() if each.node == 3]
            cloud.control.interrupt(taken, 2.0)
            for one in resting:
                one.result(60)
            eventually(lambda: pool.nodes.get(3) == "ended" and pool.nodes.get(NODES) == "ready", 60, "another node")
            time.sleep(1.5)
        began = time.monotonic()
        report = pool.report()
        seconds = time.monotonic() - began
    [record] = Ledger.here().pools("page")
    return Made(report.save(folder / "report.html"), record, seconds)


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """Chromium, driven by playwright."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        skip_or_fail("playwright is not installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def page(browser: Browser, made: Made) -> Iterator[Page]:
    """The page at 1280 pixels, with all that can be folded out."""
    opened = browser.new_page(viewport={"width": SIZES["wide"], "height": 900})
    opened.goto(made.file.as_uri())
    opened.evaluate(UNFOLD)
    yield opened
    opened.close()


SHIFT = """() => new Promise(done => {
  new PerformanceObserver(list => done(list.getEntries().reduce((sum, each) => sum + each.value, 0)))
    .observe({type: 'layout-shift', buffered: true});
  setTimeout(() => done(0), 300);
})"""
"""The layout shift so far, as a script; 0 if nothing has moved."""


OUTSIDE = """() => [...document.querySelectorAll('main *')]
  .filter(each => each.getBoundingClientRect().right > innerWidth && !each.closest('svg'))
  .map(each => each.outerHTML.slice(0, 200))"""
"""The elements that are not wholly on a screen of this width, as a script."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_is_small_and_opens_quickly_and_loads_nothing(
    browser: Browser, made: Made, size: str, scheme: Literal["light", "dark"]
) -> None:
    assert made.file.stat().st_size < 3_000_000
    assert made.seconds < 10
    width = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})  # processor time, which a busy machine leaves
    page.goto(made.file.as_uri(), wait_until="load")
    spent = {each["name"]: each["value"] for each in devtools.send("Performance.getMetrics")["metrics"]}
    assert (asked, said) == ([made.file.as_uri()], [])
    assert 0 < spent["TaskDuration"] < 1
    assert page.evaluate(SHIFT) == 0
    page.screenshot(path=made.file.with_name(f"{size}-{scheme}.png"), full_page=True)
    page.evaluate(UNFOLD)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUTSIDE) == []
    page.close()


COLOURS = """() => {
  const behind = each => {
    for (; each; each = each.parentElement) {
      const found = getComputedStyle(each).backgroundColor;
      if (found !== 'rgba(0, 0, 0, 0)') return found;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = new Set();
  for (const each of document.querySelectorAll('body *')) {
    const style = getComputedStyle(each);
    if (each.closest('svg')) {
      if (!['rect', 'path', 'line'].includes(each.tagName) || each.classList.contains('grid')) continue;
      const colour = each.tagName === 'rect' ? style.fill : style.stroke;
      found.add(['plot', each.getAttribute('class') || 'bar', colour, behind(each.closest('svg'))].join('|'));
    } else {
      if ([...each.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()))
        found.add(['text', each.tagName + '.' + each.className, style.color, behind(each)].join('|'));
      if (each.classList.contains('swatch'))
        found.add(['plot', each.className, style.borderTopStyle !== 'none' ? style.borderTopColor
          : style.backgroundColor, behind(each.parentElement)].join('|'));
    }
  }
  return [...found];
}"""
"""Every pair of colours on the page, as a script: kind, element, colour, and the colour behind it."""


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour such as "rgb(31, 35, 40)", by WCAG 2.2."""
    parts = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, from 1 to 21, by WCAG 2.2."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_plots_have_enough_contrast(page: Page, scheme: Literal["light", "dark"]) -> None:
    assert contrast("rgb(118, 118, 118)", "rgb(255, 255, 255)") == pytest.approx(4.54, abs=0.01)
    page.emulate_media(color_scheme=scheme)
    found = [each.split("|") for each in page.evaluate(COLOURS)]
    assert {"text", "plot"} == {kind for kind, *_ in found}
    assert len({name for _, name, *_ in found}) > 20
    weak = [
        (name, colour, behind, round(contrast(colour, behind), 2))
        for kind, name, colour, behind in found
        if contrast(colour, behind) < (4.5 if kind == "text" else 3.0)
    ]
    assert weak == []
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)" if scheme == "light" else "rgb(13, 17, 23)"
    )


def test_the_page_can_be_used_with_the_keyboard_and_is_read_aloud_in_order(browser: Browser, made: Made) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page.goto(made.file.as_uri())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the time line"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#timeline"
    first = page.locator("summary").first
    first.focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert first.evaluate("each => each.parentElement.open")
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.title() == "Pool page – skypool"
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(each => Number(each.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert page.evaluate("document.querySelectorAll('th:not([scope])').length") == 0
    assert page.evaluate("document.querySelectorAll('table:not(:has(caption))').length") == 0
    assert page.evaluate("document.querySelectorAll('svg:not([aria-hidden], [aria-label], :has(> title))').length") == 0
    page.close()


# --- the numbers of the plots are those of the database ------------------------------------------------------


PLOTS = """() => [...document.querySelectorAll('svg[data-device]')].map(each => [
  Number(each.dataset.node), each.dataset.device,
  Object.fromEntries([...each.querySelectorAll('path')].map(path => [path.dataset.series, path.getAttribute('d')]))
])"""
"""Node, device and paths of each plot, as a script."""
ROWS = """() => [...document.querySelectorAll('.timeline svg')].map(each => [
  Number(each.dataset.node),
  [...each.querySelectorAll('rect, line')].map(mark => ({
    kind: mark.getAttribute('class'), x: Number(mark.getAttribute('x') || mark.getAttribute('x1')),
    width: Number(mark.getAttribute('width')), busy: Number(mark.dataset.busy || 0),
    title: mark.textContent
  }))
])"""
"""Node and marks of each row of the time line, as a script."""


def numbers(page: Page, chosen: str, name: str) -> list[float]:
    """Return an attribute of all elements that a selector chooses, as numbers."""
    script = "([chosen, name]) => [...document.querySelectorAll(chosen)].map(each => Number(each.getAttribute(name)))"
    found: list[float] = page.evaluate(script, [chosen, name])
    return found


def test_plots_of_devices_have_the_samples_of_the_database(page: Page, made: Made) -> None:
    start = made.record.started
    wanted = [each for each in history(made.kept) if each.devices]
    plots = page.evaluate(PLOTS)
    assert {(node, device) for node, device, _ in plots} == {
        (node, f"cuda {index}") for node in range(NODES + 1) for index in range(4)
    }
    compared = 0
    for node, device, paths in plots:
        index = int(device.split()[1])
        samples = [(each.time - start, each.devices[index]) for each in wanted if each.node == node]
        assert ("use" in paths) is (index != 2), "a utilisation that is not reported is not drawn"
        for series, path in paths.items():
            drawn = [tuple(map(float, each)) for each in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]
            assert drawn
            for at, height in drawn:
                near = [each for when, each in samples if abs(when - at) < 0.6]
                values = [
                    each.utilization_percent
                    if series == "use"
                    else 100 * (each.memory_used_mib or 0) / (each.memory_total_mib or 1)
                    for each in near
                ]
                known = [each for each in values if each is not None]
                assert min(known) - 0.1 <= 100 - height <= max(known) + 0.1
                compared += 1
    assert compared > 100
    busy = {each.devices[0].utilization_percent for each in wanted}
    assert busy >= {60.0, 95.0}


def test_the_time_line_has_the_phases_the_work_and_the_interruption_of_the_database(page: Page, made: Made) -> None:
    kept = read(made.kept)
    rows = page.evaluate(ROWS)
    assert [node for node, _ in rows] == list(range(NODES + 1))
    start = min(made.record.started, *(each.time for each in kept.events))
    for node, marks in rows:
        phases = [each for each in kept.events if (each.kind, each.node) == ("NodePhase", node)]
        told = {each.data["phase"]: each.time - start for each in phases}
        drawn = {each["kind"]: each for each in marks if each["kind"] in told}
        assert drawn.keys() == told.keys() - {"ended"}
        for phase, since in told.items():
            if phase != "ended":
                assert drawn[phase]["x"] == pytest.approx(since, abs=0.002)
        assert drawn["ready"]["width"] == pytest.approx(told["draining"] - told["ready"], abs=0.005)
        busy = sum(each.busy for each in kept.work if each.node == node)
        assert sum(each["busy"] for each in marks) == pytest.approx(busy, abs=0.05)
        failed = [each for each in kept.calls if (each.node, each.outcome) == (node, "failed")]
        assert sum("work failed" in each["title"] for each in marks) == len(failed)
        slow = [each for each in kept.calls if (each.node, each.outcome) == (node, "ok")]
        assert sum(each["kind"] == "call" for each in marks) == len(slow)
        assert any("takes the machine back" in each["title"] for each in marks) is (node == 3)


def test_the_histogram_the_errors_and_the_money_are_those_of_the_database(page: Page, made: Made) -> None:
    kept = read(made.kept)
    [counts] = [value for name, value in kept.facts.items() if name.startswith("calls ")]
    assert counts["ok"] + counts["failed"] == CALLS + NODES
    bars = numbers(page, "#calls rect", "data-count")
    assert [each for each in bars if each] == [each for each in counts["classes"] if each]
    widths = [pytest.approx(100 * each / max(bars), abs=0.001) for each in bars]
    assert numbers(page, "#calls rect", "width") == widths
    assert page.locator("#calls").get_by_text(EVIL).count() > 0, "it is text"
    assert page.locator("img").count() == 0
    [most] = numbers(page, "path.cost", "data-most")
    assert most == pytest.approx(made.record.receipt(time.time()).usd, rel=0.05)
    cells = page.locator("#money td[data-heading='USD']").all_text_contents()
    receipt = made.record.receipt(time.time())
    lines = sorted(receipt.lines, key=lambda each: (each.node, each.launched))
    assert cells == [*(f"{each.usd:.4f}" for each in lines), f"{receipt.usd:.4f}"]
    day = time.strftime("%Y-%m-%d", time.gmtime(made.record.started))
    assert page.locator("#plan").get_by_text(day).count() > 0
    assert os.environ["XDG_STATE_HOME"] in str(made.kept)
