"""One field of one file, value by value: located, compared with its check, decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.codecs.base import Decoder
from lfdata.codecs.registry import make_decoder
from lfdata.errors import CorruptError
from lfdata.format.files import read_range
from lfdata.format.layout import SIZE_ROLES, xxh3
from lfdata.format.reader import ShardFile


@dataclass(slots=True)
class Located:
    """Some rows of one field: where their payloads are and what the index says of them."""

    first: int
    present: list[bool]
    offsets: list[int]
    lengths: list[int]
    checks: list[int]
    sizes: dict[str, Any]
    scalars: NDArray[Any] | None

    def sizes_of(self, position: int) -> dict[str, Any]:
        """Size columns of one row, as decoders want them."""
        mine = {role: data[position] for role, data in self.sizes.items()}
        if "dims" in mine:
            mine["dims"] = tuple(mine["dims"])
        return mine

    def identity(self, position: int) -> tuple[Any, ...]:
        """Two rows with the same identity are the same stored value."""
        return (self.offsets[position], self.lengths[position], self.checks[position], tuple(self.sizes_of(position).items()))


class FieldReader:
    """Reads a field of an open file.

    Raises :class:`lfdata.errors.FormatError` for damage and :class:`lfdata.errors.SampleError` for payloads that cannot be
    decoded.
    """

    def __init__(self, file: ShardFile, name: str) -> None:
        self.file = file
        self.name = name
        self.meta = file.fields[file.ordinal(name)]
        self.kind = self.meta.kind
        self._decoder: Decoder | None = None

    @property
    def decoder(self) -> Decoder:
        """Made at first use. Raises :class:`lfdata.errors.OptionError` for params this version cannot read."""
        if self._decoder is None:
            self._decoder = make_decoder(self.kind, self.meta.params, self.file.dictionaries.get(self.name))
        return self._decoder

    def locate(self, start: int, stop: int) -> Located:
        """Index entries of rows ``start`` to ``stop``."""
        rows = np.arange(start, stop, dtype=np.int64)
        column = self.file.gather(self.name, "present", rows)
        present = [True] * len(rows) if column is None else [bool(x) for x in column.astype(bool)]
        if self.kind == "scalar":
            values = self.file.gather(self.name, "value", rows)
            return Located(start, present, [], [], [], {}, values)
        offsets, lengths, checks = self.file.locate(self.name, rows)
        sizes = {}
        for role in SIZE_ROLES[self.kind]:
            data = self.file.gather(self.name, role, rows)
            if data is not None:
                sizes[role] = data.tolist()
        return Located(start, present, offsets.tolist(), lengths.tolist(), checks.tolist(), sizes, None)

    def payload(self, located: Located, position: int) -> bytearray:
        """Stored bytes of one present value, compared with their check."""
        offset, length = located.offsets[position], located.lengths[position]
        data = read_range(self.file.file, offset, length) if length else bytearray()
        if xxh3(data, self.file.identity.seed) != located.checks[position]:
            row = located.first + position
            raise CorruptError(self.file.name, offset, f"field {self.name!r}, row {row}: the payload does not match its check")
        return data

    def decode(self, located: Located, position: int, payload: bytearray) -> Any:
        """The decoded value of a payload."""
        return self.decoder.decode(payload, located.sizes_of(position))

    def scalar(self, located: Located, position: int) -> Any:
        """A scalar's value: a numpy scalar."""
        assert located.scalars is not None
        return located.scalars[position]

    def aux(self, row: int) -> list[int]:
        """Auxiliary numbers of one row (chunk checks of audio, MCU row offsets of images)."""
        rows = np.array([row], np.int64)
        first, count = self.file.gather(self.name, "aux_first", rows), self.file.gather(self.name, "aux_count", rows)
        entry = self.file.entry(self.name, "aux")
        if first is None or count is None or entry is None:
            return []
        begin, number = int(first[0]), int(count[0])
        if begin > entry.count or number > entry.count - begin:
            raise CorruptError(
                self.file.name, entry.offset, f"field {self.name!r}, row {row}: its auxiliary numbers lie outside their column"
            )
        return [int(x) for x in self.file.take(entry, np.arange(begin, begin + number))]
