"""Source: token files of Megatron-LM (``PREFIX.bin`` and ``PREFIX.idx``). Ids go on exactly as they are.

The index, little-endian: ``MMIDIDX\\0\\0``, uint64 version 1, uint8 dtype, uint64 sequences, uint64 documents and one more, int32
lengths of the sequences, int64 places of the sequences in bytes, int64 first sequence of each document and of the end, and where
there are several modalities int8 of each sequence.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.fields import check_unique
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.common import PlainSource, open_regular, read_exactly, refuse_columns
from shard_builder.sources.files import show

MAGIC = b"MMIDIDX\0\0"
COLUMNS = ("tokens", "lengths", "modes")

_VALID = {
    "samples": "documents|sequences",
    "floats": "<codes 6 and 7 as Megatron has them now, float64 and float32, or as it once had: new|old>",
    "max_sample_bytes": "<largest document or sequence; default 1G>",
}
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_OLD = {6: "<f4", 7: "<f8"}
# How many ids a dtype can hold: negative ones are none.
_VOCAB = {"u1": 1 << 8, "i1": 1 << 7, "<i2": 1 << 15, "<u2": 1 << 16, "<i4": 1 << 31, "<i8": 1 << 63}
_HEAD = struct.Struct("<9sQBQQ")
_BLOCK = 1 << 16
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, int, int, int]).decode
"""(digest of the index, sample, first sequence, sequences)"""


class Megatron(PlainSource):
    """The source of kind ``megatron``: one sample a document, or a sequence.

    Args:
        location: ``PREFIX``, ``PREFIX.idx`` or ``PREFIX.bin``.
        fields: of :data:`COLUMNS`; by default ``tokens`` with the vocabulary that the ids' type can hold.

    Raises:
        SourceError: a file that is missing, or an index that cannot be, or does not belong to the data. OptionError: fields or options
            that make no sense.
    """

    kind = "megatron"

    def __init__(
        self, location: str, fields: Sequence[FieldSpec] | None = None, stage_dir: Path | None = None, **options: str
    ) -> None:
        del stage_dir
        super().__init__(location, options, _VALID)
        self._documents = self._options.choice("samples", ("documents", "sequences"), "documents") == "documents"
        self._old = self._options.choice("floats", ("new", "old"), "new") == "old"
        self._limit = self._options.size("max_sample_bytes", 1 << 30)
        prefix = location[:-4] if location.lower().endswith((".idx", ".bin")) else location
        self._prefix = os.path.abspath(prefix)
        self.name = show(os.path.basename(prefix))
        self._index = _Index(self._prefix + ".idx", self.name + ".idx")
        self._dtype = np.dtype(((_DTYPES | _OLD) if self._old else _DTYPES)[self._index.code])
        self._bin = open_regular(self._prefix + ".bin")
        self._bin_size = os.fstat(self._bin).st_size
        if fields is None:
            fields = [self._guess()]
        refuse_columns(fields, COLUMNS, "a Megatron data set")
        check_unique(fields)
        self.fields = tuple(fields)
        if any(spec.column == "modes" for spec in self.fields) and not self._index.has_modes:
            raise SourceError(f"{self.name}.idx: has no modes: it is of one modality")

    def __del__(self) -> None:
        descriptor, self._bin = getattr(self, "_bin", -1), -1
        if descriptor >= 0:
            os.close(descriptor)

    def _guess(self) -> FieldSpec:
        code = self._dtype.str.replace("|", "")
        if code not in _VOCAB:
            example = f"--field values:array=tokens,dtype={self._dtype.name},ndim=1"
            raise OptionError(f"{self.name}.idx: holds {self._dtype.name}, which are no ids; declare for example {example}")
        return FieldSpec("tokens", "tokens", "tokens", "inline", {"vocab": str(_VOCAB[code])})

    # -- protocol -----------------------------------------------------------------------------------------------------

    def absolute_location(self) -> str:
        """The prefix from any working directory."""
        return self._prefix

    def describe(self) -> dict[str, Any]:
        """See :class:`shard_builder.sources.base.Source`."""
        return super().describe() | {"index": f"{self._index.digest:016x}", "dtype": self._dtype.name, "bytes": self._bin_size}

    def notes(self) -> dict[str, Any]:
        """Numbers of sequences and documents, and the type of the ids."""
        return {"sequences": self._index.sequences, "documents": self._index.documents, "dtype": self._dtype.name}

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every document or sequence, in blocks of the index; nothing else is read.

        Raises:
            SourceError: places, lengths or documents that cannot be, or data of another size than the index describes.
        """
        self._check()
        index, width = self._index, self._dtype.itemsize
        count = index.documents if self._documents else index.sequences
        for start in range(0, count, _BLOCK):
            stop = min(count, start + _BLOCK)
            bounds = index.document_starts(start, stop + 1) if self._documents else np.arange(start, stop + 1)
            first, last = int(bounds[0]), int(bounds[-1])
            sizes = self._sizes(bounds, first, last) * width
            for number in range(start, stop):
                place = number - start
                yield self._record(number, int(bounds[place]), int(bounds[place + 1]), int(sizes[place]))

    def _sizes(self, bounds: NDArray[np.int64], first: int, last: int) -> NDArray[np.int64]:
        """Tokens of each sample between ``bounds``, summed in blocks: a document may have any number of sequences."""
        totals = np.zeros(len(bounds) - 1, np.int64)
        for at in range(first, last, _BLOCK):
            lengths = self._index.lengths(at, min(last, at + _BLOCK)).astype(np.int64)
            owners = np.searchsorted(bounds, np.arange(at, at + len(lengths)), side="right") - 1
            np.add.at(totals, owners, lengths)
        return totals

    def _record(self, number: int, first: int, stop: int, size: int) -> Record | BadRecord:
        key = b"%012d" % number
        if size > self._limit:
            reason = f"a sample of {size} bytes; the limit is {self._limit} (option max_sample_bytes)"
            return BadRecord(key, self._place(number), "too-large", reason)
        return Record(key, _encode((self._index.digest, number, first, stop - first)), size)

    def _check(self) -> None:
        """Everything that the index claims, in blocks."""
        index, width, shown = self._index, self._dtype.itemsize, f"{self.name}.idx"
        end = 0
        for start in range(0, index.sequences, _BLOCK):
            stop = min(index.sequences, start + _BLOCK)
            lengths, places = index.lengths(start, stop).astype(np.int64), index.places(start, stop)
            stops = places + lengths * width
            wrong = np.flatnonzero(
                (lengths < 0) | (places < 0) | (stops > self._bin_size) | (stops < places) | (places % width != 0)
            )
            if wrong.size:
                one = int(wrong[0])
                raise SourceError(
                    f"{shown}: sequence {start + one} of {int(lengths[one])} tokens at byte {int(places[one])} lies outside "
                    f"{self.name}.bin, which has {self._bin_size} bytes: the two do not belong together, or the copy is incomplete"
                )
            end = max(end, int(stops.max()))
        if end != self._bin_size:
            raise SourceError(
                f"{self.name}.bin: has {self._bin_size} bytes, the index describes {end}: the two do not belong together"
            )
        before = 0
        for start in range(0, index.documents + 1, _BLOCK):
            starts = index.document_starts(start, min(index.documents + 1, start + _BLOCK))
            if int(starts[0]) < before or bool((np.diff(starts) < 0).any()) or (start == 0 and int(starts[0]) != 0):
                raise SourceError(f"{shown}: its documents are out of order, or do not begin with the first sequence")
            before = int(starts[-1])
        if before != index.sequences:
            raise SourceError(f"{shown}: its documents end at sequence {before} of {index.sequences}")

    # -- workers ------------------------------------------------------------------------------------------------------

    def _place(self, number: int) -> str:
        return f"{self.name}: {'document' if self._documents else 'sequence'} {number}"

    def place(self, locator: bytes) -> str:
        """Document or sequence."""
        return self._place(_decode(locator)[1])

    def load(self, locator: bytes) -> RawSample:
        """One document or sequence. Raises :class:`SampleError`."""
        digest, number, first, count = _decode(locator)
        path = self._place(number)
        values: dict[str, Any] = {}
        try:
            if digest != self._index.digest:
                raise SampleError("changed", "the index changed after it was scanned")
            lengths = self._index.lengths(first, first + count)
            for spec in self.fields:
                if spec.column == "tokens":
                    values[spec.name] = self._tokens(first, lengths)
                elif spec.column == "lengths":
                    values[spec.name] = lengths.astype(np.int32)
                else:
                    values[spec.name] = self._index.modes(first, first + count)
        except SampleError as error:
            error.path = path
            raise
        return RawSample(values, path)

    def _tokens(self, first: int, lengths: NDArray[Any]) -> NDArray[Any]:
        width = self._dtype.itemsize
        places = self._index.places(first, first + len(lengths))
        sizes = lengths.astype(np.int64) * width
        if not len(places):
            return np.zeros(0, self._dtype)
        if bool((places[1:] == places[:-1] + sizes[:-1]).all()):
            data = read_exactly(self._bin, int(sizes.sum()), int(places[0]))
        else:
            data = b"".join(
                read_exactly(self._bin, size, place) for place, size in zip(places.tolist(), sizes.tolist(), strict=True)
            )
        return np.frombuffer(data, self._dtype)


class _Index:
    """An index file, read by parts. Raises :class:`SourceError`: its counts must account for its size to the byte."""

    def __init__(self, path: str, name: str) -> None:
        self._descriptor = open_regular(path)
        size = os.fstat(self._descriptor).st_size
        head = os.pread(self._descriptor, _HEAD.size, 0)
        if not size:
            raise SourceError(f"{name}: an empty file")
        if head[: len(MAGIC)] != MAGIC:
            raise SourceError(f"{name}: not an index of Megatron: it begins with {head[: len(MAGIC)]!r}")
        if len(head) < _HEAD.size:
            raise SourceError(f"{name}: truncated: {size} bytes")
        _, version, self.code, self.sequences, starts = _HEAD.unpack(head)
        if version != 1 or self.code not in _DTYPES:
            raise SourceError(f"{name}: version {version} and dtype {self.code}; version 1 and dtypes 1 to 8 are read")
        self.documents = starts - 1
        plain = _HEAD.size + 12 * self.sequences + 8 * starts
        self.has_modes = self.sequences > 0 and size == plain + self.sequences
        if starts < 1 or size not in (plain, plain + self.sequences):
            raise SourceError(
                f"{name}: {size} bytes; {self.sequences} sequences and {self.documents} documents take {plain}, or with modes "
                f"{plain + self.sequences}: the file is truncated or damaged"
            )
        self._places = _HEAD.size + 4 * self.sequences
        self._starts = self._places + 8 * self.sequences
        self._modes = self._starts + 8 * starts
        ends = os.pread(self._descriptor, 1 << 16, 0) + os.pread(self._descriptor, 1 << 16, max(0, size - (1 << 16)))
        self.digest = xxhash.xxh64_intdigest(ends, size & (2**64 - 1))

    def __del__(self) -> None:
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)

    def _part(self, base: int, dtype: str, first: int, stop: int) -> NDArray[Any]:
        width = np.dtype(dtype).itemsize
        return np.frombuffer(read_exactly(self._descriptor, (stop - first) * width, base + first * width), dtype)

    def lengths(self, first: int, stop: int) -> NDArray[Any]:
        """Tokens of sequences."""
        return self._part(_HEAD.size, "<i4", first, stop)

    def places(self, first: int, stop: int) -> NDArray[Any]:
        """Offsets of sequences in the data, in bytes."""
        return self._part(self._places, "<i8", first, stop)

    def document_starts(self, first: int, stop: int) -> NDArray[Any]:
        """First sequences of documents."""
        return self._part(self._starts, "<i8", first, stop)

    def modes(self, first: int, stop: int) -> NDArray[Any]:
        """Modalities of sequences."""
        return self._part(self._modes, "i1", first, stop)
