"""What differs between two conversions is told by name, and no value is cut in its middle."""

from __future__ import annotations

from typing import Any

from shard_builder.differences import told

FIELD: dict[str, Any] = {"name": "image", "kind": "image", "params": {"codec": "jpeg", "quality": 90}}


def test_only_what_differs_is_told_down_to_its_value() -> None:
    before = {"options": {"shard_bytes": 1, "group": 2}, "fields": [FIELD, {"name": "n", "kind": "scalar"}], "conversion": "x"}
    after = {
        "options": {"shard_bytes": 3, "group": 2},
        "fields": [FIELD | {"params": {"codec": "webp", "quality": 90}}, {"name": "m", "kind": "scalar"}],
        "conversion": "y",
    }
    assert told(before, after).split("; ") == [
        'fields[image].params.codec: "jpeg", now "webp"',
        "fields[m]: not there, now " + '{"name":"m","kind":"scalar"}',
        'fields[n]: {"name":"n","kind":"scalar"}, now not there',
        "options.shard_bytes: 1, now 3",
    ]


def test_values_too_long_to_show_are_named_by_size_and_the_order_of_fields_counts() -> None:
    many = {"notes": [{"a": n} for n in range(50)]}
    assert told(many, {"notes": []}) == "notes: a list of 50, now []"
    assert told({"a": "x" * 500}, {"a": "y"}).count("x") < 80
    assert told({"fields": [FIELD, {"name": "n"}]}, {"fields": [{"name": "n"}, FIELD]}) == "fields: another order"
    assert told({str(n): n for n in range(20)}, {}).endswith("; and 12 more")
    assert told({"a": None}, {}) == "a: null, now not there"
