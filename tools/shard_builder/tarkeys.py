"""Keys as names of tar members: escaped reversibly where a name cannot carry them.

A WebDataset key ends at the first dot of the last path component, and readers leave out hidden, absolute, empty and ``__meta__`` names. Bytes
that would change or lose a key are written ``%XX``; so is ``%`` itself, and every byte beyond ASCII of a key that is not UTF-8.
A key of ordinary characters stays as it is. The empty key is ``%`` alone.
"""

from __future__ import annotations

import itertools
import re

# The ending of the one member of a sample without any value: without a member it would not be there.
EMPTY = "empty"
_ESCAPED = re.compile(rb"%([0-9A-F]{2})")
_CONTROL = frozenset([*range(0x20), 0x7F, ord("%")])


def escape_key(key: bytes) -> bytes:
    """The member name (without ending) that carries a key."""
    if not key:
        return b"%"
    try:
        key.decode("utf-8")
        refused = _CONTROL
    except UnicodeDecodeError:
        refused = _CONTROL | frozenset(range(0x80, 0x100))
    parts = key.split(b"/")
    # Components of the name. A slash beside nothing (leading, doubled, trailing) would be lost or refused: it is written %2F inside one.
    components = [[parts[0]]]
    for before, after in itertools.pairwise(parts):
        if before and after:
            components.append([after])
        else:
            components[-1].append(after)
    found = []
    for number, pieces in enumerate(components):
        dots = number == len(components) - 1 or pieces in ([b"."], [b".."])
        codes = refused | {ord(".")} if dots else refused
        found.append(b"%2F".join(_escaped(piece, codes) for piece in pieces))
    name = b"/".join(found)
    return b"%5F" + name[1:] if name.startswith(b"__") else name


def _escaped(piece: bytes, codes: frozenset[int]) -> bytes:
    return b"".join(b"%%%02X" % byte if byte in codes else bytes([byte]) for byte in piece)


def unescape_key(name: bytes) -> bytes:
    """The key that :func:`escape_key` wrote. Raises ``ValueError`` for what it never writes."""
    if name == b"%":
        return b""
    if name.count(b"%") != len(_ESCAPED.findall(name)):
        raise ValueError("a percent sign that is not followed by two hexadecimal capitals")
    return _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), name)
