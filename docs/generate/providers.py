"""The table of providers and their abilities, in docs/providers.md and README.md.

    python -m docs.generate.providers

writes the table between `<!-- providers -->` and `<!-- end -->` in both files. A test compares what stands there.
"""

from __future__ import annotations

import importlib
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from skypool.drivers.contract import Abilities

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "providers.md", ROOT / "README.md")
START, END = "<!-- providers -->", "<!-- end -->"
HEADINGS = (
    "provider",
    "install",
    "spot market",
    "machines end themselves",
    "private network",
    "billed from",
)
ORDER = ("aws", "gcp", "runpod", "vastai", "verda", "ssh", "container", "local")
"""Providers in the order of the table; others come behind them."""

FREE = {"ssh", "container", "local"}
"""Providers whose machines cost nothing."""


def table(page: Path) -> str:
    """Return the table of providers, with links that work in `page`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    homes: dict[str, str] = project["entry-points"]["skypool.providers"]
    extras = project["optional-dependencies"]
    names = [*ORDER, *sorted(homes.keys() - set(ORDER))]
    rows = [_row(name, homes[name], name in extras, page) for name in names if name in homes]
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(name: str, home: str, has_extra: bool, page: Path) -> tuple[str, ...]:
    module, _, attribute = home.partition(":")
    driver: Any = getattr(importlib.import_module(module), attribute)
    can: Abilities = getattr(driver, "abilities", Abilities())
    target = posixpath.relpath(f"docs/providers/{name}.md", page.parent.relative_to(ROOT).as_posix())
    extra = f"skypool[{name}]" if has_extra else "skypool"
    return (
        f"[`{attribute}`]({target})",
        f"`{extra}`",
        "yes" if can.spot else "no",
        "yes" if can.ends_itself else "**no**",
        "yes" if can.private_network else "no",
        "free" if name in FREE else {"create": "the request", "running": "when it runs"}[can.billed_from],
    )


def written(text: str, page: Path) -> str:
    """Return the text of a page with its table written anew; a page without the two marks stays as it is."""
    between = re.compile(f"{re.escape(START)}\n.*?{re.escape(END)}", re.DOTALL)
    return between.sub(lambda _: f"{START}\n{table(page)}\n{END}", text, count=1)


def main() -> None:
    """Write the table into all pages that have the two marks."""
    for page in PAGES:
        page.write_text(written(page.read_text(), page))


if __name__ == "__main__":
    main()
