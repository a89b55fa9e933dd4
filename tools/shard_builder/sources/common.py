"""What sources share: their fields, their options, files that are readable as they are, values that name files."""

from __future__ import annotations

import base64
import binascii
import importlib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import MissingExtraError, OptionError, SampleError, SourceError
from shard_builder.sources.base import FieldSpec
from shard_builder.sources.files import MAX_FILE_BYTES, read_file, refuse_pointer, show
from shard_builder.sources.options import SourceOptions

ROW_NUMBER = "#"
KEY_COLUMNS = ("key", "__key__", "id")

_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def import_extra(module: str, extra: str, kind: str) -> Any:
    """An optional library. Raises :class:`MissingExtraError` naming the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(f"{kind} needs the package {package}: pip install 'lfdata[{extra}]' ({error})") from error


def open_regular(path: str | Path | bytes) -> int:
    """A descriptor of a regular file that is no Git LFS pointer. Raises :class:`SourceError`."""
    shown = show(os.fspath(path))
    try:
        descriptor = os.open(path, _OPEN)
    except (OSError, ValueError) as error:
        raise SourceError(f"{shown}: cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise SourceError(f"{shown}: not a regular file")
        refuse_pointer(os.pread(descriptor, 1024, 0), shown)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, SampleError):
            raise SourceError(f"{shown}: {error.reason}") from None
        raise
    return descriptor


def read_small(path: str | Path, limit: int) -> bytes:
    """A whole file of at most ``limit`` bytes, such as a description of the others. Raises :class:`SourceError`."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise SourceError(f"{show(os.fspath(path))}: more than {limit} bytes")
    return data


def read_exactly(descriptor: int, size: int, offset: int) -> bytes:
    """``size`` bytes at ``offset``. Raises :class:`SampleError` (``changed``, ``unreadable``)."""
    data = bytearray()
    try:
        while len(data) < size and (part := os.pread(descriptor, min(size - len(data), 64 << 20), offset + len(data))):
            data += part
    except OSError as error:
        raise SampleError("unreadable", error.strerror or str(error)) from error
    if len(data) != size:
        raise SampleError("changed", f"the file ends at byte {offset + len(data)}, within what was scanned")
    return bytes(data)


def as_key(value: Any, column: str) -> bytes:
    """A key out of a column. Raises :class:`SampleError` (``no-key``)."""
    if isinstance(value, bytes) and value:
        return value
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        reason = f"column {column!r} holds no key but {str(value)[:80]!r}; a key is a text that is not empty, or an integer"
        raise SampleError("no-key", reason)
    try:
        return str(value).encode()
    except UnicodeEncodeError:
        raise SampleError("no-key", f"column {column!r} holds a lone surrogate") from None


def reference(value: Any) -> str:
    """A path as a column holds it. Raises :class:`SampleError` (``not-a-path``)."""
    if not isinstance(value, str):
        raise SampleError("not-a-path", f"a path is a text, not {str(value)[:80]!r}")
    return value


def from_base64(value: Any) -> bytes:
    """Bytes out of base64. Raises :class:`SampleError` (``base64``)."""
    if not isinstance(value, str):
        raise SampleError("base64", f"base64 is a text, not {str(value)[:80]!r}")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SampleError("base64", f"not base64: {error}") from None


class PlainSource:
    """What sources have in common whose files are readable as they are: nothing is staged, options and fields describe them.

    A source sets ``fields`` once it knows them.
    """

    kind = ""
    fields: Sequence[FieldSpec] = ()
    local_options: tuple[str, ...] = ("root",)
    """Options that hold a directory of this machine: they are not part of what determines bytes."""

    def __init__(self, location: str, options: Mapping[str, str], valid: Mapping[str, str]) -> None:
        self.location = location
        self._options = SourceOptions(self.kind, options, valid)
        self._max_file = self._options.size("max_file_bytes", MAX_FILE_BYTES) if "max_file_bytes" in valid else MAX_FILE_BYTES
        self.root = Path(".")

    def directory_option(self, name: str, default: Path) -> Path:
        """An option that names a directory. Raises :class:`SourceError`."""
        path = Path(os.path.abspath(self._options.text(name) or default))
        if not path.is_dir():
            raise SourceError(f"{path}: the directory of option {name} does not exist or is none")
        return path

    def describe(self) -> dict[str, Any]:
        """Provenance: kind, options (less directories) and fields."""
        options = {name: value for name, value in self._options.given.items() if name not in self.local_options}
        fields = [msgspec.structs.asdict(spec) for spec in self.fields]
        for field in fields:
            field["options"] = {n: Path(v).name if n == "tokenizer" else v for n, v in field["options"].items()}
        return {"kind": self.kind, "options": options, "fields": fields}

    def config(self) -> dict[str, Any]:
        """Arguments that rebuild this source."""
        given = self._options.given
        options = given | {name: os.path.abspath(given[name]) for name in self.local_options if name in given}
        fields = [msgspec.structs.asdict(spec) for spec in self.fields]
        return {"kind": self.kind, "location": self.absolute_location(), "fields": fields, "options": options}

    def absolute_location(self) -> str:
        """The location from any working directory; several may be joined by ``::``."""
        return "::".join(os.path.abspath(part) for part in self.location.split("::"))

    def stage(self, unit: int, directory: Path) -> None:
        """Files are readable as they are."""

    def unstage(self, unit: int, directory: Path) -> None:
        """Nothing was staged."""

    def taken(self, spec: FieldSpec, value: Any, files: dict[str, str]) -> Any:
        """A column's value as its field takes it: bytes are the value itself; a text may be a path or base64 by the origin.

        Raises :class:`SampleError` with the field's name.
        """
        if isinstance(value, bytes) or spec.origin == "inline":
            return value
        try:
            if spec.origin == "base64":
                return from_base64(value)
            path = reference(value)
            files[spec.name] = show(path)
            return read_file(self.root, path, self._max_file)
        except SampleError as error:
            error.field = spec.name
            raise


def refuse_columns(fields: Sequence[FieldSpec], columns: Sequence[str], what: str) -> None:
    """Refuse fields whose column ``what`` does not have. Raises :class:`OptionError` listing those there are."""
    for spec in fields:
        if spec.column not in columns:
            raise OptionError(f"field {spec.name!r}: {what} has no column {spec.column!r}; it has {', '.join(columns)}")
