"""The live display of a pool in a notebook: `Widget` shows it below a cell, and updates it while the pool runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from skypool.report import words
from skypool.report.elements import Element, element

_EVERY = 1.0
"""Seconds between two updates."""
_MOST_NODES = 32
"""The most nodes that are shown."""
_BAR = "#388bfd"
"""The colour of bars. Its contrast is above 3 on white and on black, because a notebook's theme is unknown."""
_CELL = "padding: 0.15rem 0.75rem 0.15rem 0; text-align: left; vertical-align: top"


@dataclass(frozen=True, slots=True)
class Now:
    """The state of a pool at one moment.

    `info` has what other processes, such as `skypool ps`, can see of the pool; None before the pool's start.
    """

    info: Mapping[str, Any] | None = None

    @property
    def is_over(self) -> bool:
        """True if the pool has ended."""
        return self.info is not None and self.info["phase"] == "ended"


def picture(pool: str, now: Now) -> str:
    """Return the state `now` of a pool as HTML, in the colours of the page around it."""
    info = now.info
    if info is None:
        return str(element("div", element("strong", f"Pool {pool}"), ": not started"))
    told = [
        str(info["phase"]),
        f"{words.known(info['usd'], words.usd)} USD",
        f"{words.known(info['usd_per_hour'], words.usd)} USD/h",
        f"idle {words.known(info['idle_usd'], words.usd)} USD",
        f"{words.several(info['done'], 'call')} done, {info['failed']:,} failed, {info['waiting']:,} waiting",
    ]
    nodes = [each for each in info["nodes"] if each["state"] != "ended"]
    rest = len(nodes) - _MOST_NODES
    return str(
        element(
            "div",
            element("div", element("strong", f"Pool {pool}"), f": {' · '.join(told)}"),
            _table(nodes[:_MOST_NODES]) if nodes else None,
            element("div", f"and {words.several(rest, 'more node')}") if rest > 0 else None,
        )
    )


_HEADINGS = ("node", "state", "machine", "calls", "use", "memory", "running")


def _table(nodes: Sequence[Mapping[str, Any]]) -> Element:
    head = [element("th", each, scope="col", style=_CELL) for each in _HEADINGS]
    return element(
        "table",
        element("thead", element("tr", *head)),
        element("tbody", *map(_row, nodes)),
        style="border-collapse: collapse; margin: 0.35rem 0; font-size: 0.9em",
    )


def _row(node: Mapping[str, Any]) -> Element:
    use, memory = _measured(node["sample"])
    machine = " ".join(filter(None, (str(node["type"]), str(node["place"]), str(node["hardware"]))))
    cells: list[Element | str] = [
        str(node["state"]),
        machine or words.UNKNOWN,
        f"{node['busy']} of {node['slots']} slots, {node['done']:,} done",
        _bar(use),
        _bar(memory),
        ", ".join(dict.fromkeys(map(str, node["running"])))[:80],
    ]
    first = element("th", str(node["node"]), scope="row", style=_CELL)
    return element("tr", first, *(element("td", each, style=_CELL) for each in cells))


def _measured(sample: Mapping[str, Any] | None) -> tuple[float | None, float | None]:
    """Return mean utilisation and used memory in percent, each None if unknown. `sample` is a NodeSample as JSON."""
    if sample is None:
        return None, None
    devices = sample.get("devices") or []
    if not devices:
        return sample.get("cpu_percent"), _share(sample)
    return _mean([each.get("utilization_percent") for each in devices]), _mean([_share(each) for each in devices])


def _share(sample: Mapping[str, Any]) -> float | None:
    used, total = sample.get("memory_used_mib"), sample.get("memory_total_mib")
    return None if used is None or not total else 100 * used / total


def _mean(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) / len(known) if known else None


def _bar(percent: float | None) -> Element:
    if percent is None:
        return element("em", words.UNKNOWN)
    inner = element("span", style=f"display: block; height: 100%; width: {min(percent, 100):.0f}%; background: {_BAR}")
    outer = "display: inline-block; width: 4rem; height: 0.6em; border: 1px solid currentColor; margin-right: 0.4em"
    return element("span", element("span", inner, style=outer, aria_hidden="true"), words.percent(round(percent)))


class Widget:
    """A display of a pool below a cell of a notebook. A thread of its own updates it until the pool has ended.

    `look` returns the state of the pool, or None to stop the updates, because nothing refers to the pool any more.
    """

    def __init__(self, pool: str, look: Callable[[], Now | None]) -> None:
        self._pool = pool
        self._look = look
        self._stopped = threading.Event()
        self._shown = ""

    def show(self) -> bool:
        """Show the pool, and start to update the display. Outside of a notebook, show nothing and return False."""
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if shell is None or getattr(shell, "kernel", None) is None:
            return False
        display: Any = import_module("IPython.display").display
        now = self._look()
        self._shown = picture(self._pool, now or Now())
        handle: Any = display(_html(self._shown), raw=True, display_id=True)
        if handle is not None and now is not None and not now.is_over:
            threading.Thread(target=self._follow, args=(handle,), name="skypool widget", daemon=True).start()
        return True

    def stop(self) -> None:
        """Stop the updates. The display stays as it is."""
        self._stopped.set()

    def _follow(self, handle: Any) -> None:
        while not self._stopped.wait(_EVERY):
            now = self._look()
            if now is None:
                return
            html = picture(self._pool, now)
            if html != self._shown:
                self._shown = html
                handle.update(_html(html), raw=True)
            if now.is_over:
                return


def _html(html: str) -> dict[str, str]:
    return {"text/html": html, "text/plain": "a pool, in HTML"}
