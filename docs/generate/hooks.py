"""Hooks that mkdocs calls while it builds the site (mkdocs.yml names this file).

- The reference of the command line is generated from the program.
- Files of the repository outside docs/ that pages link to become pages of the site, so that the links work there, too.
- A pattern in the navigation, such as "guides/*", stands for all pages that match it and are not named before.
- A page that would load something from the network to be read ends the build.
"""

from __future__ import annotations

import functools
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # `mkdocs` as a program does not look for modules in the current folder

from docs.generate import command_line  # noqa: E402

DOCS = "docs/"
OUTSIDE = "repository/"
"""Folder of the site with the files from outside docs/."""

LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
BADGE = re.compile(r"^!\[[^\]\n]*\]\(https?:[^)\n]*\)\n", re.MULTILINE)
"""A line with a picture from the network, such as the badges of README.md. The site leaves it out."""
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1[^\n]*$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json", ".yaml": "yaml"}


# --- what mkdocs calls ---------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the patterns of the navigation."""
    config.nav = list(_filled(config.nav or [], set()))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and a page for each file outside docs/ that a page links to."""
    files.append(File.generated(config, "reference/command-line.md", content=command_line.page()))
    waiting = [_source(file.src_uri) for file in files.documentation_pages()]
    waiting += [path for path in _named_in(config.nav or []) if not path.startswith(DOCS)]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith(DOCS):
            files.append(File.generated(config, _page_of(path), content=_shown(path)))
        for target in _targets(path):
            if target not in seen and not target.startswith(DOCS):
                seen.add(target)
                waiting.append(target)
    config.nav = _renamed(config.nav or [])
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside docs/ lead to their pages."""
    return _relinked(markdown, _source(page.file.src_uri), page.file.src_uri)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that loads scripts, styles or pictures from the network.

    Raises:
        PluginError: the page does.
    """
    loaded = re.search(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(https?:)?//[^>]*>", output)
    loaded = loaded or re.search(r"<link\b(?=[^>]*\bstylesheet)[^>]*\bhref=\"?(https?:)?//[^>]*>", output)
    if loaded:
        raise PluginError(f"{page.file.src_uri} would load this from the network: {loaded.group()}")
    return output


# --- navigation ----------------------------------------------------------------------------------------------


def _filled(nav: list[Any], seen: set[str]) -> Iterator[Any]:
    """Yield the entries of a navigation, with the pages that match in the place of each pattern.

    Args:
        seen: pages that earlier patterns stand for; the new ones are added.
    """
    for entry in nav:
        if isinstance(entry, str) and "*" in entry:
            pages = map(_below_docs, ROOT.glob("docs/**/*.md"))
            found = sorted(page for page in pages if fnmatch(page, f"{entry}.md") and page not in seen)
            seen.update(found)
            yield from found
        elif isinstance(entry, dict):
            for title, below in entry.items():
                inner = list(_filled(below, seen)) if isinstance(below, list) else below
                if inner:
                    yield {title: inner}
        elif not entry.startswith("../") or (ROOT / "docs" / entry).exists():
            yield entry


def _below_docs(path: Path) -> str:
    return path.relative_to(ROOT / "docs").as_posix()


def _named_in(nav: Any) -> Iterator[str]:
    """Yield the files of the repository that a navigation names."""
    if isinstance(nav, list):
        for entry in nav:
            yield from _named_in(entry)
    elif isinstance(nav, dict):
        for entry in nav.values():
            yield from _named_in(entry)
    else:
        yield posixpath.normpath(DOCS + nav)


def _renamed(nav: Any) -> Any:
    """Return a navigation that names files outside docs/ by their pages."""
    if isinstance(nav, list):
        return [_renamed(entry) for entry in nav]
    if isinstance(nav, dict):
        return {title: _renamed(entry) for title, entry in nav.items()}
    path = posixpath.normpath(DOCS + nav)
    return nav if path.startswith(DOCS) else _page_of(path)


# --- files outside docs/ -------------------------------------------------------------------------------------


def _page_of(path: str) -> str:
    """Return the page of the site for a file of the repository."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    return OUTSIDE + (path if path.endswith(".md") else f"{path}.md")


def _source(page: str) -> str:
    """Return the file of the repository that a page of the site is made from."""
    if not page.startswith(OUTSIDE):
        return DOCS + page
    path = page.removeprefix(OUTSIDE)
    return path if (ROOT / path).exists() else path.removesuffix(".md")


@functools.cache
def _shown(path: str) -> str:
    """Return a file outside docs/ as Markdown: itself if it is that, else its text; a folder as a list of its files."""
    whole = ROOT / path
    if whole.is_dir():
        names = sorted(each.name for each in whole.iterdir() if each.is_file() and not each.name.startswith("."))
        base = posixpath.basename(path)
        return _unsearched(f"# {path}/\n\n" + "".join(f"- [{name}]({base}/{name})\n" for name in names))
    text = whole.read_text()
    if path.endswith(".md"):
        return BADGE.sub("", text)
    language = LANGUAGES.get(whole.suffix, "text")
    return _unsearched(f"# {path}\n\n`````{language}\n{text}\n`````\n")


def _unsearched(markdown: str) -> str:
    return f"---\nsearch:\n  exclude: true\n---\n{markdown}"


def _targets(path: str) -> Iterator[str]:
    """Yield the files of the repository that a Markdown file, or the list of a folder, links to."""
    whole = ROOT / path
    if not whole.is_dir() and (whole.suffix != ".md" or not whole.exists()):
        return
    text = _shown(path) if not path.startswith(DOCS) else whole.read_text()
    for _, link in _links(text):
        target = _target(link, path)
        if target is not None:
            yield target


def _links(markdown: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield the links of a page, none of those in code."""
    code = [match.span() for match in FENCE.finditer(markdown)]
    for match in LINK.finditer(markdown):
        if not any(start <= match.start() < end for start, end in code):
            yield match, match.group()


def _target(link: str, path: str) -> str | None:
    """Return the file or folder of the repository that a link in the file `path` leads to; None for other links."""
    where = link.partition("#")[0]
    if not where or re.match(r"[a-z]+:", where):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), where))
    return target if not target.startswith("..") and (ROOT / target).exists() else None


def _relinked(markdown: str, path: str, page: str) -> str:
    """Return a page's Markdown with links that lead to pages of the site.

    Args:
        path: the file of the repository that the text is from.
        page: the page of the site that it becomes.
    """
    pieces = []
    end = 0
    for match, link in _links(markdown):
        target = _target(link, path)
        if target is None or (path.startswith(DOCS) and target.startswith(DOCS)):
            continue
        _, mark, anchor = link.partition("#")
        pieces += [markdown[end : match.start()], os.path.relpath(_page_of(target), posixpath.dirname(page) or ".")]
        pieces.append(mark + anchor)
        end = match.end()
    return "".join([*pieces, markdown[end:]])
