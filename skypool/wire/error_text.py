"""Makes texts of exceptions for messages, and adds notes to exceptions. The exceptions may come from nodes."""

from __future__ import annotations

from collections.abc import Mapping

from skypool.text import encodable


def text_of(error: BaseException) -> str:
    """Return the text of an exception, `str(error)`, without surrogates. If `__str__` raises, say so instead.

    Only a KeyboardInterrupt that `__str__` raises is passed on.
    """
    try:
        return encodable(str(error))
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # noqa: BLE001 - a broken __str__ must not hide the error, nor end a thread of skypool
        return f"<its text cannot be shown: {type(e).__name__}>"


def told(error: BaseException, most: int = 10_000) -> str:
    """Return the type and the text of an exception, such as "ValueError: too small", cut to `most` characters.

    A node may have sent the exception, so its text may have any length.
    """
    return cut(f"{type(error).__name__}: {text_of(error)}", most)


def cut(text: str, most: int = 10_000) -> str:
    """Return a text, or its beginning with a mark at the end if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 2]} …"


def notes_of(error: object) -> list[str]:
    """Return the notes of an exception that are texts. A node may have sent it with any others."""
    notes = getattr(error, "__notes__", None)
    return [each for each in notes if isinstance(each, str)] if isinstance(notes, (list, tuple)) else []


def annotate(error: BaseException, note: str, attributes: Mapping[str, object], instead_of: str = "") -> None:
    """Add a note and attributes to an exception. If it has the note `instead_of`, that note is removed.

    No code of the exception's class is run, because it may refuse attributes, as a frozen dataclass does.
    """
    own: dict[str, object] = object.__getattribute__(error, "__dict__")
    notes = own.get("__notes__")
    kept = [each for each in notes if each != instead_of] if isinstance(notes, list) else []
    own |= {"__notes__": [*kept, note], **attributes}
