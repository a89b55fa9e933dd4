"""What the journal of a killed conversion proves to be done (docs/convert.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lfdata.format.meta import ShardEntry
from shard_builder.plan import Segment
from shard_builder.target import Target

Line = dict[str, Any]


@dataclass(slots=True)
class Done:
    """One segment as far as it is committed: its shards with their journal lines, and where to go on."""

    record: int
    shards: list[tuple[ShardEntry, Line]] = field(default_factory=list)
    closing: Line | None = None


def done_segments(
    target: Target, lines: Sequence[Line], segments: Sequence[Segment], replaced: Sequence[str]
) -> dict[int, Done]:
    """What is committed of every segment that the journal mentions.

    A shard may be announced twice, once before a kill and once after it: the last line of a place counts. A shard that is not there
    ends what counts of its segment: everything behind it is made again, under the same names.
    """
    announced: dict[int, dict[int, Line]] = {}
    closing: dict[int, Line] = {}
    for line in lines:
        if "shard" in line:
            announced.setdefault(line["shard"]["segment"], {})[line["shard"]["ordinal"]] = line
        else:
            closing[line["segment"]] = line
    old = frozenset(replaced)
    return {
        number: _segment(target, segments[number].first, announced.get(number, {}), closing.get(number), old)
        for number in sorted(announced.keys() | closing.keys())
    }


def _segment(target: Target, first: int, announced: Mapping[int, Line], closing: Line | None, old: frozenset[str]) -> Done:
    done = Done(first)
    for ordinal in range(len(announced)):
        line = announced.get(ordinal)
        if line is None or line["source"][0] != done.record:
            return done
        shard = target.committed(line, old)
        if shard is None:
            return done  # announced, but its commit never happened
        done.shards.append((shard, line))
        done.record = line["source"][1]
    done.closing = closing
    return done
