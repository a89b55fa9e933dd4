"""Trains the zstandard dictionaries of ``json`` fields before a conversion (docs/convert.md, "Dictionaries")."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from lfdata.codecs.dictionary import MIN_SAMPLES, train_dictionary
from shard_builder.plan import Plan
from shard_builder.pool import Chunk, Pool
from shard_builder.sources.base import Source

CHUNK_RECORDS = 64


def needs_training(source: Source, plan: Plan) -> bool:
    """Whether there is a field that takes a dictionary, and enough samples for one."""
    return any(spec.kind == "json" for spec in source.fields) and len(plan.sample) >= MIN_SAMPLES


def train_dictionaries(source: Source, plan: Plan, stage: Path, pool: Pool) -> dict[str, bytes]:
    """Dictionaries by field. Samples are loaded and packed by workers, like all others: a bad one cannot hurt the converter.

    Bad samples are passed over here and reported when their turn comes.
    """
    samples: dict[str, list[bytes]] = {spec.name: [] for spec in source.fields if spec.kind == "json"}
    kept = (entry for entry in plan.sample if not plan.is_dropped(entry[0]))
    for unit, entries in groupby(kept, key=lambda entry: entry[2]):
        source.stage(unit, stage)
        records = [(ordinal, locator) for ordinal, locator, _ in entries]
        for result in pool.run(_chunks(records), "pack"):
            place = 0
            for _, head in result.heads:
                for name, length in head.get("packed", ()):
                    samples[name].append(bytes(result.payloads[place : place + length]))
                    place += length
        source.unstage(unit, stage)
    trained = {name: train_dictionary(packed) for name, packed in samples.items()}
    return {name: data for name, data in trained.items() if data}


def _chunks(records: Chunk) -> Iterator[Chunk]:
    for first in range(0, len(records), CHUNK_RECORDS):
        yield records[first : first + CHUNK_RECORDS]
