"""Cuts streamed output into whole lines. Keeps only the last state of a line that redraws itself."""

from __future__ import annotations

import re

LONGEST = 1 << 20
"""Maximum number of characters of an unfinished line. A longer line gets a newline, and a new line begins."""
_LONGEST_REDRAWN = 4096
"""Maximum number of characters of an unfinished line with carriage returns, such as a progress bar.

It is lower than `LONGEST`, because each further piece of such a line takes time in proportion to the line's length.
"""
_MANY_PIECES = 500
"""If an unfinished line has more pieces than this, the pieces are joined, so that they take less memory."""

_NOT_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-ln-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[^\[\]])")
_ANY_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[^\[\]])")


class Lines:
    """Splitter of one stream of text into whole lines. The unfinished line is kept until its newline comes.

    `size` is the number of characters of the unfinished line. `redrawn` is True if that line has a carriage return, as
    a progress bar has.
    """

    __slots__ = ("_pieces", "redrawn", "size")

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.size = 0
        self.redrawn = False
        """True if the unfinished line contains a carriage return, as lines of progress bars do."""

    def feed(self, text: str) -> str:
        """Add text to the stream. Return the lines that are complete now, each with its newline.

        Of a line with carriage returns, only the text after the last one is returned. An unfinished line that is too
        long (`LONGEST`, or 4096 characters with carriage returns) is returned, too, with a newline added.
        """
        if self.redrawn or "\r" in text:
            text = self._redraw(text)
        cut = text.rfind("\n") + 1
        whole = self._take() + text[:cut] if cut else ""
        self._keep(text[cut:])
        return whole if self.size <= (_LONGEST_REDRAWN if self.redrawn else LONGEST) else whole + self.finish()

    def finish(self) -> str:
        """End the stream. Return the unfinished line with a newline added; "" if there is none."""
        text = self._take().rstrip("\r")
        self.redrawn = False
        return f"{text}\n" if text else ""

    @property
    def unfinished(self) -> str:
        """The unfinished line, or what follows its last carriage return; "" if there is none."""
        text = "".join(self._pieces).rstrip("\r")
        return text[text.rfind("\r") + 1 :]

    def _redraw(self, text: str) -> str:
        """Return and forget the unfinished line with `text` added. Of each line, keep what follows its last "\\r"."""
        *whole, rest = (self._take() + text).split("\n")
        self.redrawn = "\r" in rest or (self.redrawn and not whole)
        states = [_last_state(line.rstrip("\r")) for line in whole]
        ends = len(rest) - len(rest.rstrip("\r"))  # what comes next may be a newline, or another state
        return "\n".join([*states, _last_state(rest.rstrip("\r")) + ends * "\r"])

    def _keep(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self.size += len(text)
            if len(self._pieces) > _MANY_PIECES:
                self._pieces = ["".join(self._pieces)]

    def _take(self) -> str:
        text = "".join(self._pieces)
        self._pieces = []
        self.size = 0
        return text


def _last_state(line: str) -> str:
    return line[line.rfind("\r") + 1 :]


def marked(lines: str, mark: str) -> str:
    """Return text with `mark` before each line. Every line of `lines` must end with a newline."""
    return f"{mark}{lines[:-1].replace(chr(10), chr(10) + mark)}\n" if lines else ""


def harmless(text: str) -> str:
    """Return text without control codes that move a terminal's cursor or change its modes.

    Carriage returns and colours are kept. If the text has an escape code, a reset of the colours is added at the end.
    """
    text = text.replace("\b", "").replace("\f", "").replace("\v", "")
    if "\x1b" not in text:
        return text
    return _NOT_COLOUR.sub("", text) + "\x1b[0m"


def bare(text: str) -> str:
    """Return a line without colours and control characters, for a cell of a table. Tabs become spaces."""
    text = _ANY_ESCAPE.sub("", text).expandtabs(4)
    return text if text.isprintable() else "".join(c for c in text if c.isprintable())


def last_line(tail: str) -> str:
    """Return the last line of a text that is not blank, without colours and control characters; "" if all are."""
    for line in reversed(tail.replace("\r", "\n").split("\n")):
        if line.strip():
            return bare(line).strip()
    return ""
