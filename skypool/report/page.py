"""Builds the HTML page of a report."""

from __future__ import annotations

from pathlib import Path

from skypool.report.calls import calls
from skypool.report.devices import devices
from skypool.report.elements import Element, element
from skypool.report.facts import PoolFacts
from skypool.report.folders import folders
from skypool.report.money import money
from skypool.report.overview import head
from skypool.report.problems import plan, problems
from skypool.report.timeline import timeline

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The content security policy: a browser may load nothing but what is in the page itself."""
_SECTIONS = (timeline, devices, calls, folders, money, problems, plan)


def page(facts: PoolFacts) -> str:
    """Return the page of a pool as HTML. It has no scripts, and loads nothing."""
    sections = [made for make in _SECTIONS if (made := make(facts)) is not None]
    title = f"Pool {facts.record.pool}"
    links = [element("li", element("a", _title(each), href=f"#{_name(each)}")) for each in sections]
    root = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            Element("meta", (("http-equiv", "Content-Security-Policy"), ("content", _POLICY)), ()),
            element("link", rel="icon", href="data:,"),
            element("title", f"{title} – skypool"),
            element("style", Path(__file__).with_name("style.css").read_text(encoding="utf-8")),
        ),
        element(
            "body",
            element("a", "Skip to the time line", href="#timeline", class_="skip"),
            head(facts),
            element("nav", element("ul", *links), aria_label="Sections"),
            element("main", *sections),
        ),
        lang="en",
    )
    return f"<!doctype html>\n{root}\n"


def _name(section: Element) -> str:
    return dict(section.attributes)["id"] or ""


def _title(section: Element) -> str:
    first = section.children[0]
    return str(first.children[0]) if isinstance(first, Element) else first
