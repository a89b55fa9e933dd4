"""Export to WebDataset tars: one member a field, named ``KEY.ENDING``."""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lfdata.codecs.base import Encoded
from lfdata.errors import OptionError, SampleError
from lfdata.format.durable import OutputFile
from lfdata.format.meta import FieldMeta
from shard_builder.sinks.base import ExportOptions
from shard_builder.sinks.values import IMAGE_ENDINGS, FileForms, npy, scalar_text, tokens, wav
from shard_builder.tarkeys import EMPTY, escape_key

_BLOCK = 512
_RECORD = 20 * _BLOCK  # tar files end at a multiple of this
_PLAIN = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\Z")
_KIND_ENDINGS = {"audio": "wav", "json": "json", "array": "npy", "text": "txt", "bytes": "bin", "tokens": "npy"}


class WebDatasetSink:
    """See :class:`shard_builder.sinks.base.Sink`.

    Raises:
        OptionError: two fields of one ending, or an ending that a reader would not find again.
    """

    suffix = ".tar"

    def __init__(self, fields: Sequence[FieldMeta], options: ExportOptions) -> None:
        self._fields = tuple(fields)
        self._options = options
        unknown = options.endings.keys() - {field.name for field in fields}
        if unknown:
            raise OptionError(f"an ending is given for {sorted(unknown)[0]!r}, which is not exported")
        common = Counter(_last(field) for field in fields)
        self.stems: dict[str, str] = {}
        for field in fields:
            self.stems[field.name] = self._stem(field, common[_last(field)] == 1)
        self._check()

    def _stem(self, field: FieldMeta, alone: bool) -> str:
        """What comes between the key and a value's own ending (or, where it is given, the ending itself)."""
        given = self._options.endings.get(field.name)
        if given is not None:
            return given.lower().lstrip(".")
        return "" if self._options.short and alone else field.name.lower()

    def _check(self) -> None:
        seen: dict[str, str] = {EMPTY: "samples without values"}
        for field in self._fields:
            for ending in self.endings(field):
                if not _PLAIN.match(ending):
                    raise OptionError(
                        f"field {field.name!r}: {ending!r} is no ending of a tar member (letters, digits, - and _, joined by dots); "
                        f"give one with --ending {field.name}=ENDING"
                    )
                if seen.setdefault(ending, field.name) != field.name:
                    raise OptionError(
                        f"fields {seen[ending]!r} and {field.name!r} would both end in .{ending}; give one of them another with --ending"
                    )

    def endings(self, field: FieldMeta) -> list[str]:
        """Every ending that values of a field may have."""
        if field.name in self._options.endings:
            return [self.stems[field.name]]
        pictures = [*IMAGE_ENDINGS.values()] + ["npy"] * (self._options.raw_images == "npy")
        last = pictures if field.kind == "image" else [_last(field)]
        return [self._ending(field, part) for part in last]

    def _ending(self, field: FieldMeta, last: str) -> str:
        stem = self.stems[field.name]
        if field.name in self._options.endings:
            return stem
        return f"{stem}.{last}" if stem else last

    def open(self, output: Any) -> TarWriter:
        """See :class:`shard_builder.sinks.base.Sink`."""
        return TarWriter(self, output, self._options)

    def row_overhead(self) -> int:
        """A header and half a block of padding a member."""
        return (_BLOCK + _BLOCK // 2) * max(1, len(self._fields))

    def describe(self) -> list[dict[str, Any]]:
        """Endings, and the declaration with which ``convert`` reads the field back as it was."""
        return [
            {"name": field.name, "kind": field.kind, "endings": self.endings(field), "declare": self._declare(field)}
            for field in self._fields
        ]

    def _declare(self, field: FieldMeta) -> str:
        options = reading_options(field)
        text = ",".join(f"{name}={value}" for name, value in options.items())
        column = ";".join(self.endings(field))
        name = f'"{field.name.replace(chr(34), chr(34) * 2)}"' if set(field.name) & set(':=@,"') else field.name
        return f"{name}:{field.kind}={column}" + (f",{text}" if text else "")

    def ending(self, field: FieldMeta, last: str) -> str:
        """The ending of one value."""
        return self._ending(field, last)


def _last(field: FieldMeta) -> str:
    if field.kind == "scalar":
        return "cls" if str(field.params.get("dtype", "")).startswith(("int", "uint")) else "txt"
    return "image" if field.kind == "image" else _KIND_ENDINGS[field.kind]


def reading_options(field: FieldMeta) -> dict[str, str]:
    """Options of ``convert`` under which a file that was exported becomes the value it was."""
    params = field.params
    match field.kind:
        case "image":
            if params.get("codec") != "keep":
                return {"codec": "keep", "icc": "ignore", "bits16": "keep"}
            found = {name: str(params[name]) for name in ("role", "icc", "bits16", "alpha") if params.get(name)}
            return {"codec": "keep", **found}
        case "tokens":
            return {"vocab": str(params["vocab"])}
        case "array":
            shape = params.get("shape") or [None] * int(params["ndim"])
            return {"dtype": str(params["dtype"]), "shape": "x".join("*" if n is None else str(n) for n in shape)}
        case "scalar":
            return {"dtype": str(params["dtype"])}
        case "audio":
            return {"chunk_frames": str(params["chunk_frames"])}
        case "text":
            return {"bom": "keep"}
        case "bytes":
            return {"lfs_pointer": "keep"}
    return {}


class TarWriter:
    """Writes one tar. Times, owners and modes are constants: the same samples give the same bytes."""

    def __init__(self, sink: WebDatasetSink, output: OutputFile, options: ExportOptions) -> None:
        self._sink, self._out, self._options = sink, output, options
        self.forms = FileForms(options.raw_images)

    def add(self, key: bytes, fields: Mapping[str, FieldMeta], values: Mapping[str, Encoded]) -> None:
        """See :class:`shard_builder.sinks.base.Writer`."""
        name = escape_key(key)
        if name != key and self._options.keys == "refuse":
            raise SampleError("key", "a tar member cannot carry this key; --keys escape writes it reversibly")
        for field in fields.values():
            value = values.get(field.name)
            if value is None:
                continue
            try:
                last, data = self._file(field, value)
            except SampleError as error:
                error.field = field.name
                raise
            self._member(name, self._sink.ending(field, last), data)
        if not values:
            self._member(name, EMPTY, b"")

    def _file(self, field: FieldMeta, value: Encoded) -> tuple[str, Any]:
        match field.kind:
            case "image":
                return self.forms.image(field, value)
            case "audio":
                return "wav", wav(value)
            case "json":
                return "json", self.forms.json(field, value)
            case "array":
                return "npy", npy(self.forms.decode(field, value))
            case "tokens":
                return "npy", npy(tokens(field, value))
            case "scalar":
                return _last(field), scalar_text(field, value)
        return _KIND_ENDINGS[field.kind], value.payload

    def _member(self, name: bytes, ending: str, data: Any) -> None:
        info = tarfile.TarInfo(name.decode("utf-8") + "." + ending)
        info.size = len(data)
        info.mode = 0o644
        head = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
        self._out.write(head)
        if len(data):
            self._out.write(data)
        self._pad(_BLOCK)

    def _pad(self, step: int) -> None:
        rest = -self._out.position % step
        if rest:
            self._out.write(bytes(rest))

    def finish(self) -> None:
        """Two blocks of zeros, and more up to a whole record."""
        self._out.write(bytes(2 * _BLOCK))
        self._pad(_RECORD)

    def abandon(self) -> None:
        """Nothing is held back."""
