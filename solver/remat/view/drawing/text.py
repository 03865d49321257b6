"""Names as text that is safe to write anywhere.

A bare `Graph` may call its operations what it likes: markup, line breaks, characters that turn the
direction of writing. What is shown is first made plain, then escaped for where it goes.
"""

from __future__ import annotations

_ENTITIES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"},
)


def plain(text: str) -> str:
    """`text` on one line: white space becomes a blank, and characters that do not print (control
    characters, lone surrogates, marks that turn the direction of writing) become U+FFFD."""
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


def shorten(text: str, limit: int) -> str:
    """`text` in at most `limit` characters; what is left out of the middle is an ellipsis. Ends of
    names tell more than their beginnings."""
    if len(text) <= limit:
        return text
    head = (limit - 1) // 3
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


def escape(text: str) -> str:
    """`text` made plain and escaped for XML and HTML, inside elements and attributes."""
    return plain(text).translate(_ENTITIES)


def escape_lines(text: str) -> str:
    """As `escape`, but line feeds stay: for preformatted text."""
    return "\n".join(escape(line) for line in text.split("\n"))
