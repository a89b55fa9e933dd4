"""A small MessagePack decoder: nil, booleans, integers, floats, strings, binary, arrays, maps; no extension types."""

from __future__ import annotations

import struct
from typing import Any

_FIXED = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_SIZED = {
    0xC4: (">B", "bin"), 0xC5: (">H", "bin"), 0xC6: (">I", "bin"), 0xD9: (">B", "str"), 0xDA: (">H", "str"), 0xDB: (">I", "str"),
    0xDC: (">H", "array"), 0xDD: (">I", "array"), 0xDE: (">H", "map"), 0xDF: (">I", "map"),
}  # fmt: skip


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise ValueError("MessagePack ends early")
        part = self.data[self.at : end]
        self.at = end
        return part

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]


def _body(cursor: _Cursor, what: str, count: int, depth: int) -> Any:
    if what == "bin":
        return cursor.take(count)
    if what == "str":
        return cursor.take(count).decode("utf-8")
    if depth > 64:
        raise ValueError("nested more than 64 deep")
    if what == "array":
        return [_value(cursor, depth) for _ in range(count)]
    return {_value(cursor, depth): _value(cursor, depth) for _ in range(count)}


def _value(cursor: _Cursor, depth: int) -> Any:
    tag = cursor.take(1)[0]
    if tag < 0x80:
        return tag
    if tag >= 0xE0:
        return tag - 256
    if tag < 0xC0:
        what = "map" if tag < 0x90 else "array" if tag < 0xA0 else "str"
        return _body(cursor, what, tag & (0x1F if what == "str" else 0x0F), depth + 1)
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag]
    if tag in _FIXED:
        return cursor.number(_FIXED[tag])
    if tag in _SIZED:
        code, what = _SIZED[tag]
        return _body(cursor, what, cursor.number(code), depth + 1)
    raise ValueError(f"tag {tag:#x} is not allowed")


def unpack(data: bytes) -> Any:
    """The one value that ``data`` holds."""
    cursor = _Cursor(data)
    value = _value(cursor, 0)
    if cursor.at != len(data):
        raise ValueError("bytes after the MessagePack value")
    return value
