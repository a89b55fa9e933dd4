"""One shard of a data set: its base file and sidecars seen as one set of fields, and reading values from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.codecs.base import Decoder
from lfdata.codecs.registry import make_decoder
from lfdata.errors import ChangedError, CorruptError, KeyMissingError, OptionError
from lfdata.format.cache import IndexCache
from lfdata.format.files import RangeFile, ScatterFile
from lfdata.format.forking import importing
from lfdata.format.gather import gather, start
from lfdata.format.layout import HEADER_BYTES, MAX_TAIL_BYTES, SIZE_ROLES, xxh3
from lfdata.format.meta import FieldMeta, ShardEntry
from lfdata.format.reader import ShardFile
from lfdata.format.schema import chunk_frames


class Shard:
    """A base shard with its sidecars, all open.

    Args:
        entry: the shard's manifest entry.
        open_file: opens a file of the data set by name and expected size.
        fields: the data set's effective schema by name.
        remote: open by tail offset alone (one range request a file).
    """

    def __init__(
        self,
        entry: ShardEntry,
        open_file: Callable[[str, int], RangeFile],
        fields: Mapping[str, FieldMeta],
        cache: IndexCache,
        remote: bool = False,
    ) -> None:
        self.entry = entry
        self.name = entry.file
        identity = bytes.fromhex(entry.id)
        parts = [(entry.file, entry.bytes, entry.tail, bytes(16))]
        parts += [(side.file, side.bytes, side.tail, bytes.fromhex(side.part)) for side in entry.sidecars]
        self.files: list[ShardFile] = []
        for name, size, tail, part in parts:
            file = open_file(name, size)
            if file.size != size:
                raise ChangedError(file.name, None, f"the file has {file.size} bytes; the manifest says {size}")
            self.files.append(open_shard_file(file, tail if remote else None, (identity, part, entry.rows), cache))
        self.base = self.files[0]
        self.rows = entry.rows
        self._of_field: dict[str, ShardFile] = {}
        for shard_file in self.files:
            for field in shard_file.fields:
                self._of_field[field.name] = shard_file
        for name, field in fields.items():
            self._check_field(self.field(name), field)
        self._decoders: dict[str, Decoder] = {}

    def file_of(self, field: str) -> ShardFile:
        """The file that holds a field: the last sidecar that has it, else the base."""
        found = self._of_field.get(field)
        if found is None:
            raise KeyMissingError(f"{self.name}: no field {field!r}; there are {sorted(self._of_field)}")
        return found

    def field(self, name: str) -> FieldMeta:
        """A field as this shard stores it."""
        file = self.file_of(name)
        return file.fields[file.ordinal(name)]

    def _check_field(self, stored: FieldMeta, stated: FieldMeta) -> None:
        """A field must be to every shard what it is to the manifest, or values of one shard would be read as those of another."""
        name = stored.name
        if stored.kind != stated.kind:
            raise CorruptError(self.name, None, f"field {name!r} is of kind {stored.kind}; the manifest says {stated.kind}")
        for param in ("dtype", "ndim"):
            if stored.params.get(param) != stated.params.get(param):
                raise CorruptError(
                    self.name,
                    None,
                    f"field {name!r} has {param} {stored.params.get(param)!r}; the manifest says {stated.params.get(param)!r}",
                )

    def decoder(self, name: str) -> Decoder:
        """The decoder of a field, made once."""
        decoder = self._decoders.get(name)
        if decoder is None:
            field = self.field(name)
            dictionary = self.file_of(name).dictionaries.get(name)
            try:
                with importing:  # the registry imports a codec at its first use
                    decoder = self._decoders[name] = make_decoder(field.kind, field.params, dictionary)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
                raise CorruptError(self.name, None, f"field {name!r} cannot be decoded as its schema says: {error}") from error
        return decoder

    def present(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the rows have the field."""
        found = self.file_of(name).gather(name, "present", rows)
        return np.ones(len(rows), bool) if found is None else found.astype(bool)

    def sizes(self, name: str, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Size columns of a field by role, one element a row (``dims``: one row of ndim a row)."""
        file = self.file_of(name)
        found = {role: file.gather(name, role, rows) for role in SIZE_ROLES[self.field(name).kind] if role != "value"}
        return {role: data for role, data in found.items() if data is not None}

    def scalars(self, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Values of a scalar field."""
        found = self.file_of(name).gather(name, "value", rows)
        if found is None:
            raise CorruptError(self.name, None, f"field {name!r} has no values")
        return found

    def lengths(self, name: str, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
        """Offset, length and check of payloads."""
        return self.file_of(name).locate(name, rows)

    def read(
        self,
        name: str,
        rows: NDArray[np.int64],
        located: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]],
        out: NDArray[np.uint8],
        places: NDArray[np.int64],
        threads: int = 1,
    ) -> None:
        """Read payloads into ``out`` at ``places`` and compare each with its check; absent rows have length 0 and are skipped."""
        offsets, lengths, checks = located
        file = self.file_of(name)
        row = gather(file.file, file.identity.seed, offsets, lengths, checks, out, places, threads)
        if row >= 0:
            raise CorruptError(
                file.name, int(offsets[row]), f"field {name!r}, row {int(rows[row])}: the payload does not match its check"
            )

    def start_read(
        self,
        name: str,
        located: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]],
        out: NDArray[np.uint8],
        places: NDArray[np.int64],
    ) -> Any:
        """:meth:`read` in the background (see :func:`lfdata.format.gather.start`)."""
        file = self.file_of(name)
        return start(file.file, file.identity.seed, *located, out, places)

    def mcu_rows(self, name: str, rows: NDArray[np.int64]) -> list[NDArray[np.uint64] | None]:
        """Byte offsets of the MCU rows of JPEGs stored with ``restart=rows``; ``None`` for pictures without."""
        file = self.file_of(name)
        first, count, aux = file.gather(name, "aux_first", rows), file.gather(name, "aux_count", rows), file.entry(name, "aux")
        if first is None or count is None or aux is None:
            return [None] * len(rows)
        found: list[NDArray[np.uint64] | None] = []
        for row, begin, number in zip(rows.tolist(), first.tolist(), count.tolist(), strict=True):
            if begin + number > aux.count:
                raise CorruptError(
                    file.name, aux.offset, f"field {name!r}, row {row}: its row offsets lie outside their section"
                )
            found.append(file.take(aux, np.arange(begin, begin + number)) if number else None)
        return found

    def read_pixel_rows(self, name: str, rows: NDArray[np.int64], start: int, stop: int) -> NDArray[np.uint8]:
        """Pixel rows of one restart-marked JPEG."""
        self.file_of(name)
        # By name: importing the picture codec here would load PIL for everybody.
        decode_rows = getattr(self.decoder(name), "decode_rows", None)
        if decode_rows is None:
            raise OptionError(f"{self.name}: field {name!r} holds no pictures")
        sizes = {role: int(data[0]) for role, data in self.sizes(name, rows).items()}
        located = self.lengths(name, rows)
        out = np.empty(int(located[1][0]), np.uint8)
        self.read(name, rows, located, out, np.zeros(1, np.int64))
        (offsets,) = self.mcu_rows(name, rows)
        if offsets is None:
            raise OptionError(f"{self.name}: field {name!r} was stored without restart=rows")
        pixels: NDArray[np.uint8] = decode_rows(out.data, sizes, offsets, start, stop)
        return pixels

    def read_frames(self, name: str, rows: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int16]:
        """Frames of one recording, from the chunks that cover them."""
        file = self.file_of(name)
        sizes = self.sizes(name, rows)
        frames, channels = int(sizes["frames"][0]), int(sizes["channels"][0])
        start, stop = max(0, min(start, frames)), max(0, min(stop, frames))
        if start >= stop:
            return np.empty((0, channels), np.int16)
        chunk = chunk_frames(file.name, self.field(name))
        offset, length, _ = self.lengths(name, rows)
        width = channels * 2
        if int(length[0]) != frames * width:
            raise CorruptError(
                file.name, int(offset[0]), f"field {name!r}, row {int(rows[0])}: {int(length[0])} bytes for {frames} frames"
            )
        first, last = start // chunk, -(-stop // chunk)
        aux_first, aux = file.gather(name, "aux_first", rows), file.entry(name, "aux")
        if aux_first is None or aux is None or int(aux_first[0]) + last > aux.count:
            raise CorruptError(file.name, int(offset[0]), f"field {name!r}, row {int(rows[0])}: its chunk checks are missing")
        checks = file.take(aux, np.arange(int(aux_first[0]) + first, int(aux_first[0]) + last))
        begin, end = first * chunk * width, min(last * chunk, frames) * width
        data = np.empty(end - begin, np.uint8)
        view = data.data
        source = file.file
        for again in (True, False):
            source.read_into(view, int(offset[0]) + begin)
            marks = [view[at : at + chunk * width] for at in range(0, end - begin, chunk * width)]
            wrong = next((n for n, part in enumerate(marks) if xxh3(part, file.identity.seed) != int(checks[n])), None)
            if wrong is None:
                break
            at = int(offset[0]) + begin + wrong * chunk * width
            if not again or not isinstance(source, ScatterFile):
                reason = f"field {name!r}, row {int(rows[0])}: chunk {first + wrong} does not match its check"
                raise CorruptError(file.name, at, reason)
            source.distrust(at, len(marks[wrong]))
        samples = data.view("<i2").reshape(-1, channels)
        return samples[start - first * chunk : stop - first * chunk].astype(np.int16)


def open_shard_file(file: RangeFile, tail: int | None, expect: tuple[bytes, bytes, int] | None, cache: IndexCache) -> ShardFile:
    """A file opened and checked; one whose kept copy is wrong is read anew, once."""
    try:
        return ShardFile(file, tail, expect, cache)
    except CorruptError:
        if not isinstance(file, ScatterFile):
            raise
        file.distrust(0, min(file.size, HEADER_BYTES))
        start = file.size - min(file.size, MAX_TAIL_BYTES) if tail is None else tail
        file.distrust(start, file.size - start)
        return ShardFile(file, tail, expect, cache)
