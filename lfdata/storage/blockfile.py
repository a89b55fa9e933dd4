"""One cached block as a file: its data, a check of each page, a footer."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lfdata.format.layout import xxh3
from lfdata.storage.options import PAGE

_FOOTER = struct.Struct("<8s16sQQQQQ")
_MAGIC = b"LFBLOCK1"
Piece = tuple[memoryview, int]
"""Where bytes of a block are wanted, and where in the block they begin."""


@dataclass(frozen=True, slots=True)
class Block:
    """Which bytes: ``number`` of the object ``identity`` (16 bytes), cut into blocks of ``size``; ``length`` is less at the object's end."""

    identity: bytes
    size: int
    number: int
    length: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.identity.hex()}-{self.size:x}-{self.number:x}-{self.length:x}"

    @property
    def file_bytes(self) -> int:
        """Bytes of its file."""
        return self.length + 8 * _pages(self.length) + _FOOTER.size


def parse(name: str) -> Block | None:
    """The block that a file's name stands for; ``None`` for other names."""
    parts = name.split("-")
    if len(parts) != 4 or len(parts[0]) != 32:
        return None
    try:
        block = Block(bytes.fromhex(parts[0]), *(int(part, 16) for part in parts[1:]))
    except ValueError:
        return None
    return block if block.name == name and 0 < block.length <= block.size else None


def _pages(length: int) -> int:
    return -(-length // PAGE)


def _checks(block: Block, data: memoryview) -> bytes:
    # The block's number is the seed: a page of another block does not match.
    found = [xxh3(data[at : at + PAGE], block.number) for at in range(0, block.length, PAGE)]
    return np.array(found, "<u8").tobytes()


def _footer(block: Block, table: bytes) -> bytes:
    return _FOOTER.pack(_MAGIC, block.identity, block.size, block.number, block.length, 0, xxh3(table, block.number))


def write(descriptor: int, block: Block, data: memoryview) -> None:
    """The whole file. Raises ``OSError``."""
    table = _checks(block, data)
    rest = memoryview(table + _footer(block, table))
    os.ftruncate(descriptor, 0)
    at = 0
    for part in (data, rest):
        while len(part):
            count = os.pwrite(descriptor, part, at)
            at, part = at + count, part[count:]


def read(descriptor: int, block: Block, pieces: Sequence[Piece]) -> bool:
    """Fill the pieces; false if the file is damaged, in a page that is wanted or in its table. Raises ``OSError``."""
    end = block.length
    tail = os.pread(descriptor, block.file_bytes - end + 1, end)
    table = tail[: 8 * _pages(end)]
    if tail[len(table) :] != _footer(block, table):
        return False
    checks = np.frombuffer(table, "<u8")
    for into, offset in pieces:
        first, last = offset // PAGE, (offset + len(into) - 1) // PAGE
        begin = first * PAGE
        # Straight into its place where whole pages are wanted.
        whole = offset == begin and offset + len(into) == min(end, (last + 1) * PAGE)
        pages = into if whole else memoryview(bytearray(min(end, (last + 1) * PAGE) - begin))
        if os.preadv(descriptor, [pages], begin) != len(pages):
            return False
        for page in range(first, last + 1):
            at = page * PAGE - begin
            if xxh3(pages[at : at + PAGE], block.number) != checks[page]:
                return False
        if not whole:
            into[:] = pages[offset - begin : offset - begin + len(into)]
    return True
