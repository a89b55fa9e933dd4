"""One fault found in a data set, and the list of them."""

from __future__ import annotations

from typing import Any

import msgspec

from lfdata.errors import (
    ChangedError,
    FormatError,
    LfdataError,
    LimitError,
    SampleError,
    StorageError,
    TruncatedError,
    VersionError,
)
from shard_builder.examine.opened import DataSet, Member
from shard_builder.examine.text import key_text, visible

MAX_LISTED = 10_000
_CODES: tuple[tuple[type[LfdataError], str], ...] = (
    (TruncatedError, "truncated"),
    (VersionError, "version"),
    (LimitError, "limit"),
    (ChangedError, "changed"),
    (StorageError, "storage"),
    (FormatError, "corrupt"),
)


class Damage(msgspec.Struct, omit_defaults=True):
    """One fault.

    Attributes:
        file: name of the file in the data set. code: short and stable. reason: for people. level: ``damage`` or ``warning``.
        offset: byte in the file. section: section type. shard: number of the shard.
        row: first row of the shard that is concerned. rows: how many from there on. index: data-set-wide index of ``row``.
        key: of ``row``, as visible text. field: name.
    """

    file: str
    code: str
    reason: str
    level: str = "damage"
    offset: int | None = None
    section: str | None = None
    shard: int | None = None
    row: int | None = None
    rows: int = 1
    index: int | None = None
    key: str | None = None
    field: str | None = None

    def complete(self, other: Damage) -> None:
        """Take over what the same fault, seen from elsewhere, says more."""
        if self.row is None:
            self.row, self.rows, self.index, self.key = other.row, other.rows, other.index, other.key
        self.section = self.section if self.section is not None else other.section
        self.field = self.field if self.field is not None else other.field

    def line(self) -> str:
        """For people: everything that is known, in one line."""
        parts = [visible(self.file)]
        if self.shard is not None:
            parts.append(f"shard {self.shard}")
        if self.section is not None:
            parts.append(f"section {visible(self.section)}")
        if self.offset is not None:
            parts.append(f"byte {self.offset}")
        if self.row is not None:
            parts.append(f"row {self.row}" if self.rows == 1 else f"rows {self.row} to {self.row + self.rows - 1}")
        if self.index is not None:
            parts.append(f"index {self.index}")
        if self.key is not None:
            parts.append(f"key {self.key!r}")
        if self.field is not None:
            parts.append(f"field {visible(self.field)!r}")
        return f"{self.level}: {', '.join(parts)}: {visible(self.reason)} [{self.code}]"


def code_of(error: BaseException) -> str:
    """The stable code of an error."""
    if isinstance(error, SampleError):
        return error.code
    if isinstance(error, MemoryError):
        return "memory"
    return next((code for kind, code in _CODES if isinstance(error, kind)), "decoder")


def reason_of(error: BaseException) -> str:
    """What is wrong, without the place."""
    if isinstance(error, (FormatError, SampleError, StorageError)):
        return visible(error.reason)
    if isinstance(error, LfdataError):
        return visible(str(error))
    return visible(" ".join(f"{type(error).__name__}: {error}".split()))


def of_error(member: Member, error: BaseException, **where: Any) -> Damage:
    """The damage an exception tells of."""
    offset = error.offset if isinstance(error, FormatError) else None
    return Damage(member.file, code_of(error), reason_of(error), offset=offset, shard=member.number, **where)


def place(data: DataSet, member: Member, row: int) -> dict[str, Any]:
    """Row, index and key of a row, for messages."""
    key = data.key_of(member, row)
    index = None if data.single else data.starts[member.number] + row
    return {"row": row, "index": index, "key": None if key is None else key_text(key)}


class DamageList:
    """Faults in the order found, without repetitions, neighbours joined; at most :data:`MAX_LISTED` are kept, all are
    counted."""

    def __init__(self) -> None:
        self.listed: list[Damage] = []
        self.damaged = 0
        self.warnings = 0
        self._seen: set[tuple[Any, ...]] = set()
        self._placed: dict[tuple[Any, ...], Damage] = {}

    def add(self, item: Damage) -> None:
        """Take one in."""
        place = (item.file, item.code, item.reason, item.offset)
        known = self._placed.get(place)
        if known is not None and (known.row is None or item.row is None):
            known.complete(item)
            return
        what = (item.file, item.code, item.reason, item.offset, item.field)
        last = self.listed[-1] if self.listed else None
        if last is not None and what == (last.file, last.code, last.reason, last.offset, last.field) and _follows(last, item):
            last.rows += item.rows
            self._note((*what, item.row))
            return
        if not self._note((*what, item.row)):
            return
        if item.level == "warning":
            self.warnings += 1
        else:
            self.damaged += 1
        if len(self.listed) < MAX_LISTED:
            self.listed.append(item)
            if item.offset is not None:
                self._placed.setdefault(place, item)

    def _note(self, identity: tuple[Any, ...]) -> bool:
        """Whether this is new, as far as memory goes."""
        if identity in self._seen:
            return False
        if len(self._seen) < 4 * MAX_LISTED:
            self._seen.add(identity)
        return True

    @property
    def unlisted(self) -> int:
        """How many are counted but not kept."""
        return self.damaged + self.warnings - len(self.listed)


def _follows(last: Damage, item: Damage) -> bool:
    return last.row is not None and item.row == last.row + last.rows
