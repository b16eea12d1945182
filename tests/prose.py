"""Figures about the prose of the project, and random samples of it for readers.

python -m tests.prose                                  # sentences over 30 words, docstrings that open badly
python -m tests.prose --list                           # where each of them is
python -m tests.prose --sample 60 --messages 30 --seed 7
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = ("skypool", "providers", "images")
LONG = 30
"""Sentences of more words than this are long."""
OPENERS = re.compile(r"^(what|whatever|whether|those|of|how|where|which|whoever|quiet|by|for|as)\b", re.IGNORECASE)
"""First words of a docstring that does not begin by saying what a thing is or does."""
GENERATED = re.compile(r"-errors\.md$|^CHANGELOG\.md$|/build/")


@dataclass(frozen=True)
class Text:
    """One piece of prose, where it stands, and for a docstring the signature above it."""

    where: str
    text: str
    signature: str = ""


def modules() -> Iterator[tuple[Path, ast.Module]]:
    """Yield the modules of the distribution, parsed."""
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def docstrings() -> list[Text]:
    """Return all docstrings of modules, classes and functions."""
    found = []
    for path, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if text := ast.get_docstring(node):
                found.append(Text(f"{path}:{getattr(node, 'lineno', 1)}", text, signature(node)))
    return found


def signature(node: ast.AST) -> str:
    """Return the line with which a definition begins."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            return f"def {node.name}({ast.unparse(node.args)}){returns}"
        case ast.ClassDef():
            return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"
    return "module"


def messages() -> list[Text]:
    """Return the texts of errors that are raised: string literals of at least five words inside a `raise`."""
    found = []
    for path, tree in modules():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            for argument in node.exc.args[:1]:
                text = literal(argument)
                if len(text.split()) >= 5:
                    found.append(Text(f"{path}:{node.lineno}", text, ast.unparse(node.exc.func)))
    return found


def literal(node: ast.AST) -> str:
    """Return the text of a string or an f-string, with its expressions in braces; "" for anything else."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(values):
            return "".join(
                literal(each) if isinstance(each, ast.Constant) else "{" + ast.unparse(each.value) + "}"  # type: ignore[attr-defined]
                for each in values
            )
        case ast.BinOp(left, ast.Add(), right):
            return literal(left) + literal(right)
    return ""


def pages() -> list[Text]:
    """Return the paragraphs of the pages: no code, no tables, no headings, nothing that is generated."""
    found = []
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "providers" / "README.md"]):
        name = str(path.relative_to(ROOT))
        if GENERATED.search(name):
            continue
        text = re.sub(r"^```.*?^```", "\n", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"^<!--.*?-->$", "\n", text, flags=re.MULTILINE)
        for block in re.split(r"\n\s*\n", text):
            for paragraph in paragraphs(block):
                found.append(Text(f"{name}: {paragraph[:50]!r}", paragraph))
    return found


def paragraphs(block: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a block of Markdown or of a docstring."""
    current: list[str] = []
    for line in block.splitlines():
        if re.match(r"\s*(\||#|    \S)", line) and not current:
            continue
        if re.match(r"\s*([-*]|\d+\.)\s", line) and current:
            yield " ".join(current)
            current = []
        if not re.match(r"\s*(\||#)", line):
            current.append(re.sub(r"^\s*([-*]|\d+\.)\s+", "", line).strip())
    if current:
        yield " ".join(current)


def sentences(text: str) -> list[str]:
    """Return the sentences of a paragraph. Code in backquotes and addresses count as one word."""
    text = re.sub(r"``[^`]+``|`[^`]+`", "CODE", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", "ADDRESS", text)
    text = re.sub(r"\b(e\.g|i\.e|etc|vs|no|cf)\.", r"\1", text)
    return [each for each in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\"(])|(?<=[.!?])$", text) if each.strip()]


def words(sentence: str) -> int:
    """Count the words of a sentence."""
    return sum(1 for each in sentence.split() if re.search(r"\w", each))


def of_docstring(text: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring: its text, and each argument apart. Code blocks are left out."""
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        if lines and all(line.startswith("    ") for line in lines if line.strip()):
            continue
        current: list[str] = []
        for line in lines:
            if re.match(r"\s*(Args|Returns|Raises|Yields|Attributes|Note|Example)s?:\s*$", line):
                continue
            starts = re.match(r"\s*([-*]\s|\w[\w.*, ]*(\([^)]*\))?: )", line)
            if starts and current:
                yield " ".join(current)
                current = []
            current.append(line.strip())
        if current:
            yield " ".join(current)


def long_sentences() -> tuple[list[Text], int]:
    """Return the sentences of more than 30 words in pages and docstrings, and how many sentences there are."""
    found, count = [], 0
    for text in pages():
        for sentence in sentences(text.text):
            count += 1
            if words(sentence) > LONG:
                found.append(Text(text.where, sentence))
    for text in docstrings():
        for paragraph in of_docstring(text.text):
            for sentence in sentences(paragraph):
                count += 1
                if words(sentence) > LONG:
                    found.append(Text(text.where, sentence))
    return found, count


def bad_openers() -> tuple[list[Text], int]:
    """Return the docstrings that do not open with what a thing is or does, and how many docstrings there are."""
    all_ = docstrings()
    return [each for each in all_ if OPENERS.match(each.text)], len(all_)


def main() -> None:
    """Print the figures, or a sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--messages", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    if asked.sample or asked.messages:
        rnd = random.Random(asked.seed)
        for number, each in enumerate(rnd.sample(docstrings(), asked.sample), 1):
            print(f"--- docstring {number}\n{each.signature}\n{each.text}\n")
        for number, each in enumerate(rnd.sample(messages(), asked.messages), 1):
            print(f"--- message {number} ({each.signature})\n{each.text}\n")
        return
    long, count = long_sentences()
    bad, total = bad_openers()
    print(f"sentences over {LONG} words: {len(long)} of {count} ({len(long) / count:.1%})")
    print(f"docstrings that open badly: {len(bad)} of {total} ({len(bad) / total:.1%})")
    if asked.list:
        for each in long:
            print(f"{each.where} ({words(each.text)} words): {each.text}")
        for each in bad:
            print(f"{each.where}: {each.text.splitlines()[0]}")


if __name__ == "__main__":
    main()
