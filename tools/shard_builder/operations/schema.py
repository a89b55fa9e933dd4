"""Whether data sets can be one: the same fields, meaning the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lfdata.dataset import ShardDataset
from lfdata.errors import OptionError
from lfdata.format.meta import FieldMeta

# Parameters that say what a value means. All others say how it was stored, which every shard knows of its own fields.
MEANING: dict[str, tuple[str, ...]] = {
    "image": ("role",),
    "audio": (),
    "json": (),
    "array": ("dtype", "ndim", "shape"),
    "text": (),
    "bytes": (),
    "tokens": ("dtype", "vocab", "tokenizer", "add_special", "special_text", "eos"),
    "scalar": ("dtype",),
}


def common_schema(inputs: Sequence[ShardDataset]) -> tuple[FieldMeta, ...]:
    """The fields of the first data set, if all others have the same.

    Raises:
        OptionError: naming the data sets, the field and what differs.
    """
    first = inputs[0]
    for other in inputs[1:]:
        missing = sorted(first.schema.keys() ^ other.schema.keys())
        if missing:
            has, lacks = (first, other) if missing[0] in first.schema else (other, first)
            raise OptionError(
                f"field {missing[0]!r} is in {has.path} and not in {lacks.path}; data sets that are merged have the same fields"
            )
        for name, field in first.schema.items():
            _compare(first, other, field, other.schema[name])
    return first.manifest.fields


def _compare(first: ShardDataset, other: ShardDataset, mine: FieldMeta, theirs: FieldMeta) -> None:
    pairs: list[tuple[str, Any, Any]] = [("kind", mine.kind, theirs.kind)]
    if mine.kind == theirs.kind:
        pairs += [(name, mine.params.get(name), theirs.params.get(name)) for name in MEANING[mine.kind]]
    for what, ours, others in pairs:
        if ours != others:
            raise OptionError(
                f"field {mine.name!r}: {what} is {str(ours)[:80]!r} in {first.path} and {str(others)[:80]!r} in {other.path}; "
                "convert one of them again, or replace the field by add-field"
            )
