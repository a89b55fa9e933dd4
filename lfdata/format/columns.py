"""Index columns of one field while a shard is being written, and their statistics."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError
from lfdata.format.durable import OutputFile
from lfdata.format.layout import ELEMENTS, LOCATOR, ROLE_CODES, ROLE_ELEMENTS, SIZE_ROLES, align, xxh3
from lfdata.format.meta import FieldMeta

_TYPECODES = {1: "B", 2: "H", 3: "I", 4: "Q"}
_DTYPES = {dtype.name: dtype for dtype in ELEMENTS.values() if dtype.fields is None}
_ABSENT = -1
_STATISTICS_SKIP = ("codec",)


def scalar_dtype(field: FieldMeta) -> np.dtype[Any]:
    """Little-endian numpy dtype of a ``tokens``, ``array`` or ``scalar`` field."""
    name = field.params.get("dtype")
    if isinstance(name, str) and name in _DTYPES:
        return _DTYPES[name]
    raise OptionError(f"field {field.name!r} of kind {field.kind} has no valid dtype in its params: {name!r}")


def column_dtype(field: FieldMeta, role: str) -> np.dtype[Any]:
    """Element type of an index column."""
    return scalar_dtype(field) if role == "value" else ELEMENTS[ROLE_ELEMENTS[ROLE_CODES[role]]]


def _typecode(role: str) -> str:
    return _TYPECODES[ROLE_ELEMENTS[ROLE_CODES[role]]]


class FieldColumns:
    """Everything a shard's index holds of one field, and the payloads of the row group in the making."""

    def __init__(self, field: FieldMeta, seed: int) -> None:
        self.field = field
        self._seed = seed
        self._roles = [role for role in SIZE_ROLES[field.kind] if role not in ("dims", "value")]
        self._sizes = {role: array(_typecode(role)) for role in self._roles}
        self._present = bytearray()
        self._dims = array("Q")
        self._scalars = bytearray()
        self._offsets = array("Q")
        self._checks = array("Q")
        self._aux: list[NDArray[np.uint64]] = []
        self._aux_total = 0
        self._aux_first = array("Q")
        self._aux_count = array("Q")
        # Payloads of the group being filled: bytes and, by row, the ordinal of its payload (or where it already lies).
        self._payloads: list[Any] = []
        self._rows: list[tuple[int, int]] = []
        # (digest, sizes) -> (offset in the file, or ordinal in the group as -1-ordinal; check; first and count of aux)
        self._known: dict[tuple[bytes, tuple[Any, ...]], tuple[int, int, int, int]] = {}
        self._fresh: list[tuple[bytes, tuple[Any, ...]]] = []
        self._ndim = int(field.params.get("ndim", 0)) if field.kind == "array" else 0
        self._dtype = scalar_dtype(field) if field.kind in ("tokens", "array", "scalar") else None
        self.row_bytes = 1 + sum(column.itemsize for column in self._sizes.values())
        self.row_bytes += 8 * self._ndim + (self._dtype.itemsize if field.kind == "scalar" and self._dtype else 16)
        self.row_bytes += 16 if field.kind in ("image", "audio") else 0

    # -- one row ------------------------------------------------------------------------------------------------------

    def add_absent(self) -> None:
        """The row has no value."""
        self._present.append(0)
        for column in self._sizes.values():
            column.append(0)
        self._dims.extend([0] * self._ndim)
        if self.field.kind == "scalar":
            assert self._dtype is not None
            self._scalars += bytes(self._dtype.itemsize)
        elif self.field.kind == "tokens":
            self._offsets.append(0)
            self._checks.append(0)
        else:
            self._rows.append((_ABSENT, 0))
        self._aux_first.append(0)
        self._aux_count.append(0)

    def add_scalar(self, value: Any) -> None:
        """The payload is the little-endian value."""
        assert self._dtype is not None
        if len(value.payload) != self._dtype.itemsize:
            raise OptionError(f"field {self.field.name!r}: {len(value.payload)} bytes for one {self._dtype.name}")
        self._present.append(1)
        self._scalars += value.payload

    def add_tokens(self, value: Any, spool: OutputFile) -> None:
        """Append ids to the field's region; never shared between rows."""
        assert self._dtype is not None
        data = value.payload
        if len(data) != value.sizes["tokens"] * self._dtype.itemsize:
            raise OptionError(f"field {self.field.name!r}: {len(data)} bytes for {value.sizes['tokens']} tokens")
        self._present.append(1)
        self._sizes["tokens"].append(value.sizes["tokens"])
        self._offsets.append(spool.position // self._dtype.itemsize if len(data) else 0)
        self._checks.append(xxh3(data, self._seed))
        spool.write(data)

    def add_payload(self, value: Any, digest: bytes, written: OutputFile) -> int:
        """Add a payload of the group, or refer to an identical one. Returns the bytes added to the group."""
        data = value.payload
        sizes = value.sizes | {"bytes": len(data)}
        self._present.append(1)
        for role, column in self._sizes.items():
            column.append(sizes[role])
        if self._ndim or "dims" in sizes:
            dims = sizes["dims"]
            if len(dims) != self._ndim:
                raise OptionError(f"field {self.field.name!r}: {len(dims)} dimensions; the schema says {self._ndim}")
            self._dims.extend(dims)
        if not len(data):
            self._rows.append((0, xxh3(b"", self._seed)))
            self._append_aux(0, 0)
            return 0
        key = (digest, tuple(sizes[role] for role in self._roles))
        known = self._known.get(key)
        if known is not None and self._same(known[0], data, written):
            self._rows.append((known[0], known[1]))
            self._append_aux(known[2], known[3])
            return 0
        aux = self._aux_of(value, sizes)
        place = (-2 - len(self._payloads), xxh3(data, self._seed), self._aux_total, len(aux))
        self._append_aux(self._aux_total, len(aux))
        if len(aux):
            self._aux.append(aux)
            self._aux_total += len(aux)
        self._known[key] = place
        self._fresh.append(key)
        self._payloads.append(data)
        self._rows.append((place[0], place[1]))
        return len(data)

    def _same(self, place: int, data: Any, written: OutputFile) -> bool:
        if place < 0:
            return bool(self._payloads[-2 - place] == data)
        view = memoryview(data)
        step = 1 << 20
        return all(
            view[at : at + step] == written.pread(min(step, len(view) - at), place + at) for at in range(0, len(view), step)
        )

    def _append_aux(self, first: int, count: int) -> None:
        self._aux_first.append(first)
        self._aux_count.append(count)

    def _aux_of(self, value: Any, sizes: dict[str, Any]) -> NDArray[np.uint64]:
        if self.field.kind == "audio":
            step = int(self.field.params["chunk_frames"]) * sizes["channels"] * 2
            view = memoryview(value.payload)
            return np.array([xxh3(view[at : at + step], self._seed) for at in range(0, len(view), step)], "<u8")
        return np.asarray(value.aux if value.aux is not None else (), "<u8")

    # -- end of a group -----------------------------------------------------------------------------------------------

    def place(self, position: int, step: int) -> Iterator[Any]:
        """Give the group's payloads their offsets from ``position`` on, and yield what has to be written, padding included."""
        offsets = []
        for payload in self._payloads:
            start = align(position, step)
            if start > position:
                yield bytes(start - position)
            offsets.append(start)
            position = start + len(payload)
            yield payload
        for place, check in self._rows:
            absent = place == _ABSENT
            self._offsets.append(0 if absent else offsets[-2 - place] if place < 0 else place)
            self._checks.append(0 if absent else check)
        for key in self._fresh:
            place, check, first, count = self._known[key]
            self._known[key] = (offsets[-2 - place], check, first, count)
        self._payloads.clear()
        self._rows.clear()
        self._fresh.clear()

    # -- end of the shard ---------------------------------------------------------------------------------------------

    def locators(self) -> NDArray[Any]:
        """The LOCR section."""
        table = np.empty(len(self._offsets), LOCATOR)
        table["offset"] = np.frombuffer(self._offsets, np.uint64)
        table["check"] = np.frombuffer(self._checks, np.uint64)
        return table

    def finished(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Role and data of every column, in the order they are written."""
        if 0 in self._present:
            yield "present", np.frombuffer(self._present, "u1")
        if self.field.kind == "scalar":
            assert self._dtype is not None
            yield "value", np.frombuffer(self._scalars, self._dtype)
        for role, column in self._sizes.items():
            yield role, np.frombuffer(column, ELEMENTS[ROLE_ELEMENTS[ROLE_CODES[role]]])
        if self.field.kind == "array":
            yield "dims", np.frombuffer(self._dims, "<u8")
        if self._aux:
            yield "aux_first", np.frombuffer(self._aux_first, "<u8")
            yield "aux_count", np.frombuffer(self._aux_count, "<u8")
            yield "aux", np.concatenate(self._aux)

    def statistics(self) -> dict[str, Any]:
        """Counts and ranges for the manifest."""
        present = np.frombuffer(self._present, "u1").astype(bool)
        found: dict[str, Any] = {"present": int(present.sum())}
        for role, data in self.finished():
            if role in SIZE_ROLES[self.field.kind] and role not in (*_STATISTICS_SKIP, "dims"):
                found[role] = _summary(data[present])
        return found


def _summary(data: NDArray[Any]) -> dict[str, Any]:
    if data.dtype.kind == "f":
        finite = data[np.isfinite(data)].astype(np.float64)
        nan = {"nan": int(data.size - finite.size)}
        if not finite.size:
            return nan
        return nan | {"min": float(finite.min()), "max": float(finite.max()), "sum": float(finite.sum())}
    if not data.size:
        return {}
    if data.dtype.kind == "b":
        data = data.astype(np.uint8)
    # 64-bit sums can overflow: add the halves, which cannot at 2^32 rows.
    wide = data.astype(np.int64 if data.dtype.kind == "i" else np.uint64)
    low, high = wide & np.array(0xFFFFFFFF, wide.dtype), wide >> np.array(32, wide.dtype)
    total = int(low.sum()) + (int(high.sum()) << 32)
    return {"min": int(data.min()), "max": int(data.max()), "sum": total}
