"""Cuts streamed output into whole lines. Of a line that redraws itself, such as a progress bar, keeps the last state.

Other functions of this module remove control codes of terminals from text, or put a mark before each line.
"""

from __future__ import annotations

import re

LONGEST = 1 << 20
"""Maximum number of characters of an unfinished line. A longer line gets a newline, and a new line begins."""
_LONGEST_REDRAWN = 4096
"""The same for a line that redraws itself, because each further piece of it takes as long as the line is long."""
_MANY_PIECES = 500
"""The number of pieces of a line that are put together, so that they take less memory."""

_NOT_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-ln-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[^\[\]])")
_ANY_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[^\[\]])")


class Lines:
    """Splitter of one stream of text into whole lines. The unfinished line is kept until its newline comes.

    Attributes:
        redrawn: True if the unfinished line contains a carriage return, as lines of progress bars do.
        size: the number of characters of the unfinished line.
    """

    __slots__ = ("_pieces", "redrawn", "size")

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.size = 0
        self.redrawn = False
        """True if the unfinished line contains a carriage return, as lines of progress bars do."""

    def feed(self, text: str) -> str:
        """Add text to the stream. Return the lines that are complete now, each with its newline; "" if there are none.

        Of a line with carriage returns, only the text after the last carriage return is returned. An unfinished line of
        more than a million characters (`LONGEST`) is returned, too, with a newline added.
        """
        if self.redrawn or "\r" in text:
            text = self._redraw(text)
        cut = text.rfind("\n") + 1
        whole = self._take() + text[:cut] if cut else ""
        self._keep(text[cut:])
        return whole if self.size <= (_LONGEST_REDRAWN if self.redrawn else LONGEST) else whole + self.finish()

    def finish(self) -> str:
        """End the stream. Return the unfinished line with a newline added; "" if there is none.

        After that, this object can be used for another stream.
        """
        text = self._take().rstrip("\r")
        self.redrawn = False
        return f"{text}\n" if text else ""

    @property
    def unfinished(self) -> str:
        """Return the line that has no newline yet, and keep it; "" if there is none.

        Of a line with carriage returns, only the text after the last carriage return is returned.
        """
        text = "".join(self._pieces).rstrip("\r")
        return text[text.rfind("\r") + 1 :]

    def _redraw(self, text: str) -> str:
        """Return the unfinished line followed by the new text, with every line in its last state.

        The last state of a line is the text after its last carriage return. A carriage return at the end of a line does
        not count. The unfinished line is taken out of this object.
        """
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
    """Return whole lines with `mark` before each; "" for no lines.

    Args:
        lines: text in which every line ends with a newline.
        mark: the text to put before each line.
    """
    return f"{mark}{lines[:-1].replace(chr(10), chr(10) + mark)}\n" if lines else ""


def harmless(text: str) -> str:
    """Return text without control codes that move a terminal's cursor or change its modes.

    Carriage returns and colours are kept. If the text contains an escape code, a code that resets the colours is added
    at the end of the text.
    """
    text = text.replace("\b", "").replace("\f", "").replace("\v", "")
    if "\x1b" not in text:
        return text
    return _NOT_COLOUR.sub("", text) + "\x1b[0m"


def bare(text: str) -> str:
    """Return a line of text without colours and control characters, for a cell of a table. Tabs become spaces."""
    text = _ANY_ESCAPE.sub("", text).expandtabs(4)
    return text if text.isprintable() else "".join(c for c in text if c.isprintable())


def last_line(tail: str) -> str:
    """Return the last line of a text that is not blank, without colours, control characters and surrounding spaces.

    A carriage return counts as the end of a line. Returns "" if all lines are blank.
    """
    for line in reversed(tail.replace("\r", "\n").split("\n")):
        if line.strip():
            return bare(line).strip()
    return ""
