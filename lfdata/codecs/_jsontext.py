"""JSON text -> Python value, and the rules every structured value must obey."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Callable
from typing import Any

from lfdata.codecs._common import refuse_lfs_pointer
from lfdata.codecs.text import decode_utf8
from lfdata.errors import SampleError


def parse_json(raw: str | bytes | bytearray | memoryview, duplicates: str, max_bytes: int) -> Any:
    """Parse JSON text strictly.

    Args:
        raw: text, or UTF-8 bytes with or without a byte order mark.
        duplicates: ``error``, ``first`` or ``last``: what a key given twice in one object means.
        max_bytes: longer text is refused.

    Raises:
        SampleError: ``empty``, ``utf8``, ``json``, ``nan``, ``depth``, ``range``, ``duplicate-key``, ``size-limit``,
            ``lfs-pointer``.
    """
    if len(raw) > max_bytes:
        raise SampleError("size-limit", f"{len(raw)} bytes of JSON are more than {max_bytes}")
    text = raw if isinstance(raw, str) else _text(bytes(raw))
    if not text.strip(" \t\r\n"):
        raise SampleError("empty", "empty text where JSON is expected")
    try:
        return json.loads(text, object_pairs_hook=_PAIRS[duplicates], parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise SampleError("json", f"not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise SampleError("depth", "JSON is nested too deeply") from None
    except ValueError:  # Python's own bound on the digits of an integer
        raise SampleError("range", "an integer does not fit 64 bits") from None


def _text(raw: bytes) -> str:
    refuse_lfs_pointer(raw)
    return decode_utf8(raw.removeprefix(codecs.BOM_UTF8))


def _refuse_constant(name: str) -> Any:
    raise SampleError("nan", f"{name} is not JSON")


def _pairs_error(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise SampleError("duplicate-key", f"key {twice[:80]!r} occurs twice in one object")
    return found


def _pairs_first(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        found.setdefault(key, value)
    return found


_PAIRS: dict[str, Callable[[list[tuple[str, Any]]], dict[str, Any]]] = {
    "error": _pairs_error,
    "first": _pairs_first,
    "last": dict,
}


def check_value(value: Any, max_depth: int, *, allow_nan: bool, max_nodes: int) -> None:
    """Check types, depth, finiteness and size of a structured value; depth first, so cycles end at ``max_depth``.

    Raises:
        SampleError: ``type``, ``depth``, ``nan``, ``range`` (a number too large for a double), ``size-limit``.
    """
    stack: list[tuple[Any, int]] = [((value,), 0)]
    nodes = 0
    while stack:
        items, depth = stack.pop()
        nodes += len(items)
        if nodes > max_nodes:
            raise SampleError("size-limit", f"more than {max_nodes} values in one sample")
        for item in items:
            kind = type(item)
            if kind is str or kind is int or kind is bool or item is None:
                continue
            if kind is float:
                if not allow_nan and not math.isfinite(item):
                    raise SampleError("nan", f"{item} (NaN, infinite, or too large for a double) is not JSON")
            elif kind is dict or kind is list or kind is tuple:
                if depth >= max_depth:
                    raise SampleError("depth", f"nested more than {max_depth} levels")
                if kind is dict:
                    _check_keys(item)
                    item = item.values()
                stack.append((item, depth + 1))
            else:
                raise SampleError("type", f"{kind.__name__} is not a JSON type; use dict, list, str, int, float, bool or None")


def _check_keys(item: dict[Any, Any]) -> None:
    for key in item:
        if type(key) is not str:
            raise SampleError("type", f"key {key!r:.80} is a {type(key).__name__}; keys must be text")
