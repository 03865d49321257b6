"""Names of operations and modules as text that is safe to display.

A bare `Graph` may have operations with any name: markup, line breaks, characters that change the
direction of writing. Text is first made plain, then escaped for XML and HTML.
"""

from __future__ import annotations

_ENTITIES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"},
)


def plain_text(text: str) -> str:
    """Return `text` on one line: white space becomes a blank, and characters that do not print
    (control characters, lone surrogates, marks that change the direction of writing) become
    U+FFFD."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable()
        else " "
        if character.isspace()
        else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )


def shorten_name(text: str, limit: int) -> str:
    """Return `text` in at most `limit` characters, with an ellipsis for what is cut. More of the
    end than of the beginning is left, because the ends of names distinguish them better."""
    if len(text) <= limit:
        return text
    head = (limit - 1) // 3
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


def escape_markup(text: str) -> str:
    """Return `text` made plain and escaped for XML and HTML, for elements and attributes."""
    return plain_text(text).translate(_ENTITIES)


def escape_markup_lines(text: str) -> str:
    """Return preformatted text escaped as by `escape_markup`, with its line feeds."""
    return "\n".join(escape_markup(line) for line in text.split("\n"))
