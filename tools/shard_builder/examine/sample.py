"""One sample: its values, each with the error that stands in its way, described for people and written out as files."""

from __future__ import annotations

import io
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lfdata.codecs.image import IMAGE_CODECS
from lfdata.errors import LfdataError, OptionError
from lfdata.format.durable import storage_error
from shard_builder.examine.check_keys import member_of
from shard_builder.examine.damage import code_of, reason_of
from shard_builder.examine.opened import DataSet
from shard_builder.examine.text import key_text, visible
from shard_builder.examine.values import FieldReader

FIRST_IDS = 32
FIRST_ELEMENTS = 8
_EXTENSIONS = {"jpeg": "jpg", "tiff": "tif"}
_CODEC_NAMES = {number: name for name, number in IMAGE_CODECS.items()}


@dataclass(slots=True)
class Value:
    """One field of one sample. ``payload`` and ``value`` are ``None`` where absent or damaged; ``error`` then says why."""

    ordinal: int
    name: str
    kind: str
    present: bool = True
    payload: bytearray | None = None
    sizes: dict[str, Any] | None = None
    value: Any = None
    error: str = ""


@dataclass(slots=True)
class Sample:
    """One sample with all its fields. ``error``: its shard cannot be read at all."""

    index: int
    shard: int
    file: str
    row: int
    key: bytes | None
    values: list[Value]
    error: str = ""

    def first(self, *kinds: str, name: str | None = None) -> Value | None:
        """The first present value of some kinds (of one name)."""
        return next((v for v in self.values if v.present and v.kind in kinds and name in (None, v.name)), None)


def counted(rows: int) -> str:
    """How many samples there are to choose from."""
    return f"there are {rows}, counted from 0" if rows else "the data set has no samples"


def load(data: DataSet, index: int, fields: list[str] | None = None) -> Sample:
    """Read and decode a sample; faults are kept beside the values they concern.

    Args:
        fields: names; all by default.

    Raises:
        OptionError: the data set has no such sample.
    """
    if not 0 <= index < data.manifest.rows:
        raise OptionError(f"{data.path}: no sample {index}; {counted(data.manifest.rows)}")
    member = member_of(data, index)
    row = index - data.starts[member.number]
    sample = Sample(index, member.number, member.file, row, data.key_of(member, row), [])
    try:
        shard = data.shard(member.number)
    except LfdataError as error:
        sample.error = visible(str(error))
        return sample
    for ordinal, name in enumerate(data.schema):
        if fields is None or name in fields:
            sample.values.append(_value(FieldReader(shard.file_of(name), name), ordinal, row))
    return sample


def _value(reader: FieldReader, ordinal: int, row: int) -> Value:
    found = Value(ordinal, reader.name, reader.kind)
    try:
        located = reader.locate(row, row + 1)
        found.present = located.present[0]
        if not found.present:
            return found
        if reader.kind == "scalar":
            found.value = reader.scalar(located, 0)
            return found
        found.sizes = located.sizes_of(0)
        found.payload = reader.payload(located, 0)
        found.value = reader.decode(located, 0, found.payload)
    except Exception as error:  # a decoder may fail in any way on hostile bytes: shown in place of the value
        found.error = visible(f"{reason_of(error)} [{code_of(error)}]")
    return found


def describe(sample: Sample) -> dict[str, Any]:
    """A sample as JSON-able data: large values summarised, text and json in full."""
    key = sample.key
    place = {
        "index": sample.index,
        "key": None if key is None else key_text(key),
        "key_hex": None if key is None else key.hex(),
    }
    fields = {value.name: describe_value(value) for value in sample.values}
    return {**place, "shard": sample.shard, "file": sample.file, "row": sample.row, "error": sample.error, "fields": fields}


def describe_value(value: Value) -> dict[str, Any]:
    """One value: kind, presence, sizes, and a summary that fits its kind."""
    found: dict[str, Any] = {"kind": value.kind, "present": value.present}
    if value.sizes is not None:
        found["sizes"] = {**value.sizes, **({"codec": codec_name(value.sizes)} if "codec" in value.sizes else {})}
    if value.error:
        return found | {"error": value.error}
    if not value.present:
        return found
    match value.kind:
        case "image" | "array":
            found |= _summary(value.value)
        case "audio":
            samples, rate = value.value.samples, value.value.rate
            peak = int(np.abs(samples.astype(np.int32)).max()) if samples.size else 0
            found |= {"seconds": len(samples) / rate, "rate": rate, "channels": samples.shape[1], "peak": peak / 32768}
        case "tokens":
            found |= {"count": len(value.value), "first": value.value[:FIRST_IDS].tolist()}
        case "bytes":
            found |= {"count": len(value.value), "first": bytes(value.value[:FIRST_IDS]).hex(" ")}
        case "scalar":
            found |= {"value": value.value.item()}
        case "json":
            # MessagePack has maps with keys that JSON has not: such a value is shown as Python would.
            found |= {"value": value.value if as_json(value.value) is not None else visible(repr(value.value))}
        case _:
            found |= {"value": value.value}
    return found


def as_json(value: Any) -> bytes | None:
    """Readable JSON, or ``None`` if the value has none."""
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=2)
    except (TypeError, ValueError, RecursionError):
        return None


def _summary(array: NDArray[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"shape": list(array.shape), "dtype": array.dtype.name}
    if array.size and array.dtype.kind in "biuf":
        numbers = array[np.isfinite(array)] if array.dtype.kind == "f" else array
        if numbers.size < array.size:
            found["nonfinite"] = int(array.size - numbers.size)
        if numbers.size:
            found |= {"min": numbers.min().item(), "max": numbers.max().item(), "mean": float(numbers.mean(dtype=np.float64))}
    if array.ndim == 1 and array.dtype.kind in "biuf":
        found["first"] = array[:FIRST_ELEMENTS].tolist()
    return found


def codec_name(sizes: dict[str, Any]) -> str:
    """Name of a stored image's codec."""
    return _CODEC_NAMES.get(sizes["codec"], f"codec {sizes['codec']}")


def extract(sample: Sample, directory: Path) -> list[Path]:
    """Write a sample's stored values as files, and ``sample-INDEX.json`` that says which is which. Names never come from the
    data.

    Pictures and byte strings are written as stored; audio gets a WAV header, arrays and raw pixels a NumPy one, json is
    decoded; token ids are little-endian numbers. Absent and damaged values and scalars have no file.

    Raises:
        OptionError: a file is there already. StorageError: it cannot be written.
    """
    about = describe(sample)
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(directory, "mkdir", error) from error
    for value in sample.values:
        found = _as_file(value)
        if found is not None:
            name = f"sample-{sample.index}-{value.ordinal:03d}.{found[0]}"
            written.append(_write(directory / name, found[1]))
            about["fields"][value.name]["file"] = name
    written.append(_write(directory / f"sample-{sample.index}.json", msgspec.json.format(msgspec.json.encode(about), indent=2)))
    return written


def _write(path: Path, data: Any) -> Path:
    try:
        with path.open("xb") as stream:
            stream.write(data)
    except FileExistsError as error:
        raise OptionError(f"{path}: exists already; choose another directory") from error
    except OSError as error:
        raise storage_error(path, "write", error) from error
    return path


def _as_file(value: Value) -> tuple[str, Any] | None:
    """Extension and content of a value's file, or ``None`` if it has none."""
    if value.payload is None or value.sizes is None:
        return None
    match value.kind:
        case "image":
            name = codec_name(value.sizes)
            if name == "raw":
                return None if value.error else ("npy", _npy(value.value))
            return _EXTENSIONS.get(name, name) if name in IMAGE_CODECS else "bin", value.payload
        case "audio":
            return "pcm" if value.error else "wav", value.payload if value.error else _wav(value)
        case "array":
            return ("bin", value.payload) if value.error else ("npy", _npy(value.value))
        case "json":
            text = None if value.error else as_json(value.value)
            return ("zst", value.payload) if text is None else ("json", text)
        case "text":
            return "txt", value.payload
    return "bin", value.payload


def _npy(array: NDArray[Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def _wav(value: Value) -> bytes:
    assert value.payload is not None
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(value.value.samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(value.value.rate)
        file.writeframes(value.payload)
    return out.getvalue()
