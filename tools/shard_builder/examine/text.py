"""Text of untrusted origin made fit for terminals, pictures and JSON."""

from __future__ import annotations

import unicodedata

# Cc: controls (terminal escapes); Cf: bidi overrides, zero-width; Cs: lone surrogates; Zl, Zp: line and paragraph separators;
# Co, Cn: no agreed look.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp", "Co", "Cn")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def visible(text: str) -> str:
    """``text`` with every character that a terminal would obey, hide or reorder by written as an escape (``\\x1b``,
    ``\\u202e``)."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if unicodedata.category(c) not in _HIDDEN else c.encode("unicode_escape", "surrogatepass").decode("ascii")
        for c in text
    )


def key_text(key: bytes) -> str:
    """A key for people and JSON: UTF-8, with ``\\xNN`` for bytes that are not, and no control characters."""
    return visible(key.decode("utf-8", "backslashreplace"))


def shorten(text: str, limit: int) -> str:
    """At most ``limit`` characters, the last an ellipsis if any were cut."""
    return text if len(text) <= limit else text[: limit - 1] + "\u2026"


def size_text(count: float) -> str:
    """A number of bytes for people: ``1.5 MiB``."""
    for unit in _UNITS:
        if abs(count) < 1024 or unit == _UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" and count == int(count) else f"{count:.1f} {unit}"


def number_text(value: object) -> str:
    """A number for people: integers with separators, floats with 6 digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return visible(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
