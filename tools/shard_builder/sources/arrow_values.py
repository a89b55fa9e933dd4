"""Values of Arrow columns as fields take them, by rule (docs/sources.md, "Parquet and Arrow").

Imported only by sources that have pyarrow.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from lfdata.errors import OptionError, SampleError

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_EPOCH = datetime.datetime(1970, 1, 1)
_MAX_DEPTH = 64


def plain_type(kind: Any) -> Any:
    """A type without what makes no difference to values: dictionaries, large offsets, views and registered extensions."""
    if pt.is_dictionary(kind):
        return plain_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pt.is_large_string(kind) or pt.is_string_view(kind):
        return pa.string()
    if pt.is_large_binary(kind) or pt.is_binary_view(kind) or pt.is_fixed_size_binary(kind):
        return pa.binary()
    if pt.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if is_list(kind):
        return pa.list_(pa.field("item", plain_type(kind.value_type)))
    if pt.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        return pa.struct([pa.field(field.name, plain_type(field.type)) for field in fields])
    return kind


def is_list(kind: Any) -> bool:
    """Whether values are lists of whatever kind."""
    return bool(
        pt.is_list(kind)
        or pt.is_large_list(kind)
        or pt.is_fixed_size_list(kind)
        or pt.is_list_view(kind)
        or pt.is_large_list_view(kind)
    )


def is_number(kind: Any) -> bool:
    """Whether values are integers, floats or booleans."""
    return bool(pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind))


def is_media(kind: Any) -> bool:
    """Whether values are structs of ``bytes`` and ``path``, as Hugging Face stores files."""
    if not pt.is_struct(kind) or kind.num_fields < 1:
        return False
    names = {kind.field(place).name: plain_type(kind.field(place).type) for place in range(kind.num_fields)}
    return set(names) <= {"bytes", "path"} and "bytes" in names and names["bytes"] in (pa.binary(), pa.null())


def refuse_unstorable(kind: Any, column: str, depth: int = 0) -> None:
    """Refuse types that no field holds. Raises :class:`OptionError`."""
    if depth > _MAX_DEPTH:
        raise OptionError(f"column {column!r} is nested more than {_MAX_DEPTH} deep")
    kind = plain_type(kind)
    if pt.is_union(kind) or pt.is_interval(kind) or pt.is_run_end_encoded(kind):
        raise OptionError(f"column {column!r}: values of type {kind} are not read; cast the column to another type first")
    if pt.is_struct(kind):
        names = [kind.field(place).name for place in range(kind.num_fields)]
        if len(set(names)) != len(names):
            raise OptionError(f"column {column!r}: a struct with two members of one name")
        for place in range(kind.num_fields):
            refuse_unstorable(kind.field(place).type, f"{column}.{names[place]}", depth + 1)
    elif pt.is_map(kind):
        refuse_unstorable(kind.item_type, column, depth + 1)
        refuse_unstorable(kind.key_type, column, depth + 1)
    elif is_list(kind):
        refuse_unstorable(kind.value_type, column, depth + 1)


def take(value: Any, kind: str) -> Any:
    """One value of a column for a field of a kind; ``None`` where it is null.

    Args:
        value: a ``pyarrow.Scalar``.
        kind: the field's kind. ``scalar`` takes dates and times as integers in the column's unit; ``array`` and ``tokens`` take
            lists of numbers as NumPy arrays; everything else takes what :func:`to_python` gives.

    Raises:
        SampleError: ``null`` inside a numeric list, ``utf8``, ``range``.
    """
    while isinstance(value, pa.ExtensionScalar | pa.DictionaryScalar):
        value = value.value
    if value is None or not value.is_valid:
        return None
    if kind == "scalar" and pt.is_temporal(value.type):
        return int(value.value)
    if kind in ("array", "tokens") and is_list(value.type) and is_number(_leaf(value.type)):
        return _numbers(value)
    return to_python(value)


def _leaf(kind: Any) -> Any:
    while is_list(kind) or isinstance(kind, pa.BaseExtensionType):
        kind = kind.value_type if is_list(kind) else kind.storage_type
    return kind


def _numbers(value: Any) -> Any:
    """Numbers in lists, or in lists of lists of equal lengths, as an array."""
    values, shape = value.values, [len(value.values)]
    while True:
        if isinstance(values, pa.ExtensionArray):
            values = values.storage
        if values.null_count:
            raise SampleError("null", f"a list of numbers with {values.null_count} nulls among {len(values)}")
        if not is_list(values.type):
            return values.to_numpy(zero_copy_only=False).reshape(shape)
        lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
        if len(lengths) and lengths.min() != lengths.max():
            raise SampleError("ragged", f"lists of {lengths.min()} to {lengths.max()} numbers beside each other make no array")
        shape.append(int(lengths[0]) if len(lengths) else 0)
        values = values.flatten()


def to_python(value: Any) -> Any:
    """A value as plain Python: ``None``, bool, int, float, str, bytes, list, dict.

    Decimals become text in plain notation; dates ``YYYY-MM-DD``; times and timestamps ISO 8601 with as many digits as the
    column's unit has, and ``Z`` where the column has a time zone; durations integers in the column's unit; maps objects, or
    lists of pairs where the keys are no texts.

    Raises:
        SampleError: ``utf8``, ``range``, ``depth``.
    """
    return _convert(value, 0)


def _convert(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise SampleError("depth", f"nested more than {_MAX_DEPTH} levels")
    if isinstance(value, pa.ExtensionScalar):
        value = value.value
    if value is None or not value.is_valid:
        return None
    kind = value.type
    if pt.is_dictionary(kind):
        return _convert(value.value, depth)
    if pt.is_struct(kind):
        return {kind.field(place).name: _convert(value[place], depth + 1) for place in range(kind.num_fields)}
    if pt.is_map(kind):
        return _map(value, depth)
    if is_list(kind):
        values = value.values
        if pt.is_integer(kind.value_type) or pt.is_float32(kind.value_type) or pt.is_float64(kind.value_type):
            return values.to_pylist()
        return [_convert(values[place], depth + 1) for place in range(len(values))]
    if pt.is_decimal(kind):
        return format(value.as_py(), "f")
    if pt.is_temporal(kind):
        return _time(value, kind)
    try:
        found = value.as_py()
        return float(found) if pt.is_float16(kind) else found
    except UnicodeDecodeError as error:
        raise SampleError("utf8", f"not UTF-8: byte 0x{error.object[error.start]:02x} at byte {error.start}") from None


def _map(value: Any, depth: int) -> Any:
    pairs = value.values  # a struct array of keys and values
    found = []
    for place in range(len(pairs)):
        key, item = pairs.field(0)[place], pairs.field(1)[place]
        found.append([_convert(key, depth + 1), _convert(item, depth + 1)])
    if not all(isinstance(key, str) for key, _ in found):
        return found
    if len({key for key, _ in found}) != len(found):
        raise SampleError("duplicate-key", "a map with one key twice")
    return dict(found)


def _time(value: Any, kind: Any) -> Any:
    number = int(value.value)
    if pt.is_duration(kind):
        return number
    try:
        if pt.is_date(kind):
            days = number if pt.is_date32(kind) else number // 86_400_000
            return (_EPOCH + datetime.timedelta(days=days)).date().isoformat()
        seconds, rest = divmod(number, _PER_SECOND[kind.unit])
        moment = _EPOCH + datetime.timedelta(seconds=seconds)
    except OverflowError:
        raise SampleError("range", f"a {kind} of {number} lies outside the years 1 to 9999") from None
    digits = _DIGITS[kind.unit]
    fraction = f".{rest:0{digits}d}" if digits else ""
    if pt.is_time(kind):
        return moment.strftime("%H:%M:%S") + fraction
    zone = "Z" if kind.tz is not None else ""
    return moment.isoformat(timespec="seconds") + fraction + zone


def media_bytes(value: Any) -> tuple[bytes | None, str | None]:
    """Bytes and path of a struct that stands for a file."""
    found: Mapping[str, Any] = to_python(value) or {}
    return found.get("bytes"), found.get("path")
