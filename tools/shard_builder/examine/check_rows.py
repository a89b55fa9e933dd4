"""Every value of some rows of one file: located, compared with its check, decoded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from lfdata.codecs import jpeg
from lfdata.errors import CorruptError, LfdataError
from lfdata.format.layout import xxh3
from lfdata.format.schema import chunk_frames
from shard_builder.examine.damage import Damage, DamageList, of_error, place
from shard_builder.examine.opened import DataSet, Member
from shard_builder.examine.values import FieldReader, Located
from shard_builder.examine.worker import Progress

BATCH = 256


def rows(data: DataSet, task: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Operation ``rows``: ``member`` (ordinal), ``start``, ``stop``, ``skip`` (field ordinals, of a single row)."""
    member = data.members[task["member"]]
    found = DamageList()
    try:
        file = data.file(member)
    except LfdataError:
        return {"damage": [], "values": 0}  # the operation "file" reports it, once
    checks = [
        _FieldCheck(data, member, FieldReader(file, field.name), ordinal, progress)
        for ordinal, field in enumerate(file.fields)
        if field.kind != "scalar" and ordinal not in task.get("skip", ())
    ]
    for start in range(task["start"], task["stop"], BATCH):
        for check in checks:
            for item in check.run(start, min(start + BATCH, task["stop"])):
                found.add(item)
    values = sum(check.values for check in checks)
    return {"damage": msgspec.to_builtins(found.listed), "unlisted": found.unlisted, "values": values}


class _FieldCheck:
    def __init__(self, data: DataSet, member: Member, reader: FieldReader, ordinal: int, progress: Progress) -> None:
        self.data = data
        self.member = member
        self.reader = reader
        self.ordinal = ordinal
        self.progress = progress
        self.values = 0
        self._last: tuple[Any, ...] | None = None

    def run(self, start: int, stop: int) -> Iterator[Damage]:
        self.progress.beat()
        try:
            located = self.reader.locate(start, stop)
        except LfdataError as error:
            if stop - start == 1:
                yield of_error(self.member, error, field=self.reader.name, **place(self.data, self.member, start))
                return
            for row in range(start, stop):
                yield from self.run(row, row + 1)
            return
        for position in range(stop - start):
            if located.present[position]:
                yield from self._value(located, position)

    def _value(self, located: Located, position: int) -> Iterator[Damage]:
        row = located.first + position
        self.values += 1
        identity = located.identity(position)
        if identity == self._last:
            return  # one payload stored for several rows: decoded a moment ago
        self.progress.at(row, self.ordinal)
        try:
            payload = self.reader.payload(located, position)
            self.reader.decode(located, position, payload)
            self._auxiliary(located, position, payload)
            self._last = identity
        # A decoder may fail in any way on hostile bytes: that is what is being looked for.
        except Exception as error:
            where = place(self.data, self.member, row)
            item = of_error(self.member, error, field=self.reader.name, section=self._section(), **where)
            if item.offset is None:
                item.offset = located.offsets[position]
            yield item

    def _section(self) -> str:
        return "TOKN" if self.reader.kind == "tokens" else "GRUP"

    def _auxiliary(self, located: Located, position: int, payload: bytearray) -> None:
        """Chunk checks of audio and MCU row offsets of images are what the payload says they are."""
        kind = self.reader.kind
        if kind not in ("audio", "image") or self.reader.file.entry(self.reader.name, "aux") is None:
            return
        row = located.first + position
        stored = self.reader.aux(row)
        if kind == "image":
            wanted = [int(x) for x in jpeg.row_offsets(bytes(payload))] if stored else []
        else:
            sizes = located.sizes_of(position)
            step = chunk_frames(self.reader.file.name, self.reader.meta) * int(sizes["channels"]) * 2
            seed = self.reader.file.identity.seed
            wanted = [xxh3(payload[at : at + step], seed) for at in range(0, len(payload), step)]
        if stored != wanted:
            what = "chunk checks do" if kind == "audio" else "MCU row offsets do"
            raise CorruptError(
                self.reader.file.name,
                located.offsets[position],
                f"field {self.reader.name!r}, row {row}: its {what} not fit the payload",
            )
