"""What differs between two descriptions of a conversion, as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

_MOST, _LONGEST = 8, 80
_NOTHING = object()


def told(before: Any, now: Any) -> str:
    """Names and both values of what differs, such as ``options.shard_bytes: 65536, now 4096``; the first few."""
    found = sorted(_differences(before, now, ""))
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return "; ".join(found[:_MOST]) + more


def _differences(before: Any, now: Any, path: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in before.keys() | now.keys():
            if name != "conversion":
                yield from _differences(before.get(name, _NOTHING), now.get(name, _NOTHING), f"{path}.{name}" if path else name)
    elif isinstance(before, list) and isinstance(now, list) and (pair := (_named(before), _named(now))) != (None, None):
        first, second = pair
        for name in (first or {}).keys() | (second or {}).keys():
            yield from _differences((first or {}).get(name, _NOTHING), (second or {}).get(name, _NOTHING), f"{path}[{name}]")
        if first and second and list(first) != list(second) and first.keys() == second.keys():
            yield f"{path}: another order"
    elif before != now:
        yield f"{path}: {_value(before)}, now {_value(now)}"


def _named(items: list[Any]) -> dict[str, Any] | None:
    """Items by their names, where they have some."""
    found = {str(item["name"]): item for item in items if isinstance(item, dict) and "name" in item}
    return found if found and len(found) == len(items) else None


def _value(value: Any) -> str:
    """One value. Of what would be cut, only the size is said: half a value helps nobody."""
    if value is _NOTHING:
        return "not there"
    text = msgspec.json.encode(value).decode("utf-8", "backslashreplace")
    if len(text) <= _LONGEST:
        return text
    if isinstance(value, str):
        return f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 4 :]}"
    return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}" if isinstance(value, dict | list) else text
