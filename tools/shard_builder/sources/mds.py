"""Source: MDS directories of MosaicML Streaming, read without it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.fields import check_unique
from shard_builder.sources import mds_values
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.common import KEY_COLUMNS, ROW_NUMBER, PlainSource, as_key
from shard_builder.sources.mds_shards import INDEX, Shard, ShardEntry, read_index

_VALID = {
    "split": "<name of a directory below SOURCE>",
    "key": f"<column of the keys, or {ROW_NUMBER} for row numbers; default: {', '.join(KEY_COLUMNS)}, else {ROW_NUMBER}>",
    "root": "<directory that paths in columns are relative to; default: the source's own>",
    "hashes": "check|skip",
    "max_shard_bytes": "<largest compressed shard, decompressed; default 1G>",
    "max_file_bytes": "<largest file that a column names, such as 512M; default 4G>",
}
_KEYS = ("str", "int", "str_int", "bytes", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, int, int, int, int]).decode
"""(digest of the index, shard, sample in it, offset, size)"""


class Mds(PlainSource):
    """The source of kind ``mds``: one sample a sample, shards in the order of the index.

    Args:
        location: a directory with ``index.json``.
        fields: columns by name; of a list of pictures ``NAME.N`` is the one at place N. Without fields the encodings decide.

    Raises:
        SourceError: no index, or a damaged one; no such column. OptionError: fields or options that make no sense.
    """

    kind = "mds"

    def __init__(
        self, location: str, fields: Sequence[FieldSpec] | None = None, stage_dir: Path | None = None, **options: str
    ) -> None:
        del stage_dir
        super().__init__(location, options, _VALID)
        self._limit = self._options.size("max_shard_bytes", 1 << 30)
        self._verify = self._options.choice("hashes", ("check", "skip"), "check") == "check"
        self.folder = _folder(location, self._options.text("split"))
        self.root = self.directory_option("root", self.folder)
        self._shards, self._digest = read_index(self.folder)
        self._open: tuple[int, Shard | SampleError | None] = (-1, None)
        self._warnings: list[str] = []
        if not self._shards:
            raise SourceError(f"{location}: its {INDEX} names no shards")
        first = self._shards[0]
        self._encodings = dict(zip(first.column_names, first.column_encodings, strict=True))
        self._key = self._key_column()
        if fields is None:
            fields = self._guess()
        check_unique(fields)
        self.fields = tuple(fields)
        self._columns = [self._column(spec) for spec in self.fields]
        self._check_shards()

    def _listing(self) -> str:
        return "its columns: " + ", ".join(f"{name!r} ({encoding})" for name, encoding in self._encodings.items())

    def _key_column(self) -> str:
        key = self._options.text("key")
        if key is None:
            return next((name for name in KEY_COLUMNS if self._encodings.get(name) in _KEYS), ROW_NUMBER)
        if key != ROW_NUMBER and self._encodings.get(key) not in _KEYS:
            raise SourceError(f"{INDEX}: no column {key!r} of texts or integers for the keys; {self._listing()}")
        return key

    def _column(self, spec: FieldSpec) -> tuple[str, str, int | None]:
        """Name, encoding, and the place in a list of pictures."""
        name, place = spec.column, None
        if name not in self._encodings:
            base, _, number = name.rpartition(".")
            if number.isascii() and number.isdigit() and mds_values.is_list(self._encodings.get(base, "")):
                name, place = base, int(number)
        if name not in self._encodings:
            raise SourceError(f"{INDEX}: field {spec.name!r} needs the column {spec.column!r}; {self._listing()}")
        encoding = self._encodings[name]
        if encoding == mds_values.PICKLE:
            raise OptionError(f"field {spec.name!r}: column {name!r} holds pickles, which are never opened")
        mds_values.check_encoding(encoding)
        if mds_values.is_list(encoding) and place is None and spec.kind != "bytes":
            raise OptionError(f"field {spec.name!r}: column {name!r} is a list of pictures; name one of them, such as {name}.0")
        return name, encoding, place

    def _guess(self) -> list[FieldSpec]:
        names = [name for name in self._encodings if name != self._key]
        pictures = sum(self._encodings[name] in ("png", "jpeg", "pil") for name in names)
        first = self._first_sample() if any(self._encodings[name].startswith("ndarray") for name in names) else {}
        fields = []
        for name in names:
            encoding = self._encodings[name]
            if encoding == mds_values.PICKLE:
                self._warnings.append(f"column {name!r} is left out: it holds pickles, which are never opened")
                continue
            mds_values.check_encoding(encoding)
            value = mds_values.decode(encoding, first[name], "array") if encoding.startswith("ndarray") and first else None
            found = mds_values.guess(encoding, value, pictures > 1)
            if found is None:
                raise OptionError(
                    f"{INDEX}: column {name!r} ({encoding}) makes no field by itself; declare the fields with --field"
                )
            fields.append(FieldSpec(name.lstrip("_") or "column", found[0], name, "inline", found[1]))
        return fields

    def _first_sample(self) -> dict[str, bytes]:
        number = next((number for number, shard in enumerate(self._shards) if shard.samples), None)
        if number is None:
            return {}
        try:
            shard = self._shard(number)
            offsets = shard.offsets()
            return shard.columns(shard.read(int(offsets[0]), int(offsets[1] - offsets[0])))
        except SampleError as error:
            raise SourceError(f"the first sample, from which fields are guessed, cannot be read: {error}") from None

    def _check_shards(self) -> None:
        """Refuse shards whose columns differ from the first one's, as far as they are used."""
        used = [name for name, _, _ in self._columns] + ([self._key] if self._key != ROW_NUMBER else [])
        for number, shard in enumerate(self._shards):
            there = dict(zip(shard.column_names, shard.column_encodings, strict=True))
            for name in used:
                if there.get(name) != self._encodings[name]:
                    raise SourceError(
                        f"{INDEX}: in shard {number} column {name!r} is {there.get(name, 'not there')}, in shard 0 "
                        f"{self._encodings[name]}"
                    )
            for name, encoding, size in zip(shard.column_names, shard.column_encodings, shard.column_sizes, strict=True):
                fixed = mds_values.fixed_size(encoding)
                if fixed is not None and size is not None and fixed != size:
                    raise SourceError(f"{INDEX}: in shard {number} column {name!r} ({encoding}) has a size of {size}")

    # -- protocol -----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """See :class:`shard_builder.sources.base.Source`."""
        return super().describe() | {"key": self._key, "shards": len(self._shards), "index": f"{self._digest:016x}"}

    def config(self) -> dict[str, Any]:
        """Arguments that rebuild this source."""
        found = super().config()
        options = {name: value for name, value in found["options"].items() if name != "split"}
        return found | {"location": str(self.folder), "options": options}

    def notes(self) -> dict[str, Any]:
        """Columns that were left out."""
        return {"warnings": list(self._warnings)} if self._warnings else {}

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every sample. Each shard is read once for its hashes; of the samples only keys are looked at."""
        row = 0
        for number, entry in enumerate(self._shards):
            try:
                shard = self._shard(number)
                if self._verify:
                    shard.verify()
                offsets = shard.offsets().tolist()
            except SampleError as error:
                reason = f"its {entry.samples} samples cannot be read: {error.reason}"
                yield BadRecord(b"", self._name(entry), error.code, reason)
                row += entry.samples
                continue
            for sample in range(entry.samples):
                offset, size = offsets[sample], offsets[sample + 1] - offsets[sample]
                try:
                    key = b"%012d" % row if self._key == ROW_NUMBER else self._key_of(shard, offset, size)
                    yield Record(key, _encode((self._digest, number, sample, offset, size)), size)
                except SampleError as error:
                    yield BadRecord(b"", f"{self._name(entry)}: sample {sample}", error.code, error.reason)
                row += 1
        self._open = (-1, None)

    def _key_of(self, shard: Shard, offset: int, size: int) -> bytes:
        data = shard.columns(shard.read(offset, size))[self._key]
        return as_key(mds_values.decode(self._encodings[self._key], data, "text"), self._key)

    def _name(self, entry: ShardEntry) -> str:
        return entry.raw_data.basename

    def _shard(self, number: int) -> Shard:
        """A shard, of which one is kept open; one that cannot be read is not tried again for every sample."""
        if self._open[0] != number:
            self._open = (-1, None)
            try:
                self._open = (number, Shard(self.folder, self._shards[number], self._limit))
            except SampleError as error:
                self._open = (number, error)
        found = self._open[1]
        if isinstance(found, Shard):
            return found
        assert isinstance(found, SampleError)
        raise SampleError(found.code, found.reason)

    def place(self, locator: bytes) -> str:
        """Shard and sample."""
        _, number, sample, _, _ = _decode(locator)
        return f"{self._name(self._shards[number])}: sample {sample}"

    def load(self, locator: bytes) -> RawSample:
        """One sample. Raises :class:`SampleError`."""
        digest, number, _, offset, size = _decode(locator)
        if digest != self._digest:
            raise SampleError("changed", f"{INDEX} changed after it was scanned", path=INDEX)
        path = self.place(locator)
        values: dict[str, Any] = {}
        files: dict[str, str] = {}
        field = ""
        try:
            shard = self._shard(number)
            columns = shard.columns(shard.read(offset, size))
            for spec, (name, encoding, place) in zip(self.fields, self._columns, strict=True):
                field = spec.name
                value = mds_values.decode(encoding, columns[name], spec.kind)
                if place is not None:
                    value = value[place] if place < len(value) else None
                if value is not None:
                    values[spec.name] = self.taken(spec, value, files) if isinstance(value, str) else value
        except SampleError as error:
            error.field = error.field or field
            error.path = f"{path}: {error.path}" if error.path and not error.path.startswith(path) else path
            raise
        return RawSample(values, path, files)


def _folder(location: str, split: str | None) -> Path:
    folder = Path(os.path.abspath(location))
    if split is not None:
        if split != os.path.basename(split) or split in ("", ".", ".."):
            raise OptionError(f"mds: split={split!r} is no name of a directory below SOURCE")
        folder /= split
    if not folder.is_dir():
        raise SourceError(f"{folder}: not a directory")
    if not (folder / INDEX).exists():
        below = sorted(path.parent.name for path in folder.glob(f"*/{INDEX}"))
        hint = f"; the option split=NAME takes one of {', '.join(below)}" if below else ""
        raise SourceError(f"{folder}: has no {INDEX}{hint}")
    return folder
