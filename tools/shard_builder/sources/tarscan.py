"""The scan of one tar: groups become records, and whatever is wrong with them becomes bad records at their place."""

from __future__ import annotations

import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import xxhash

from shard_builder.sources.base import BadRecord, Record
from shard_builder.sources.files import show
from shard_builder.sources.grouping import Group, Grouper, Splitter, sparse_reason
from shard_builder.sources.tarstream import ByteStream, Member, NoEnd, TarFault, members
from shard_builder.tarkeys import EMPTY, unescape_key

NO_END = ("check", "error", "accept")

_SPOOL_BYTES = 8 << 20
_LISTED = 20
_MAX_EXTENSIONS = 1000

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bool, bytes, int, bytes, int, str, str]).decode


@dataclass(slots=True)
class TarNotes:
    """What a scan learns beside the records; bounded and deterministic."""

    whole: int = 0
    faults: int = 0
    without_fields: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    extensions: Counter[str] = field(default_factory=Counter)
    present: Counter[int] = field(default_factory=Counter)
    taken: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)

    def warn(self, text: str) -> None:
        """Keep a warning, unless there are many already."""
        if len(self.warnings) < _LISTED:
            self.warnings.append(text)

    def count(self, extension: str) -> None:
        """Count a member of a sample."""
        if extension in self.extensions or len(self.extensions) < _MAX_EXTENSIONS:
            self.extensions[extension] += 1

    def listing(self) -> str:
        """The extensions there are, most frequent first."""
        common = sorted(self.extensions.items(), key=lambda pair: (-pair[1], pair[0]))[:_LISTED]
        return ", ".join(show(name) for name, _ in common) or "none"

    def summary(self, names: Sequence[str]) -> dict[str, Any]:
        """JSON-able notes."""
        unmapped = {show(name): count for name, count in sorted(self.extensions.items()) if name not in self.taken}
        return {
            "present": {name: self.present[number] for number, name in enumerate(names)},
            "skipped": dict(sorted(self.skipped.items())),
            "skipped_samples_without_fields": self.without_fields,
            "unmapped_extensions": dict(list(unmapped.items())[:_LISTED]),
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, slots=True)
class TarRules:
    """How members become samples: ``columns`` holds each field's extensions in order of preference. ``escaped``: keys are written as ``export``
    writes them, and so are samples without values."""

    columns: list[tuple[str, ...]]
    split: str
    duplicates: str
    no_end: str
    max_member_bytes: int
    escaped: bool = False


class TarScan:
    """One pass over one tar."""

    def __init__(self, tar: int, unit: int, name: str, stream: ByteStream, rules: TarRules, notes: TarNotes) -> None:
        self._tar, self._unit, self._name = tar, unit, name
        self._stream, self._rules, self._notes = stream, rules, notes
        self._taken = {extension for column in rules.columns for extension in column}
        notes.taken |= self._taken
        self._grouper = Grouper(Splitter(rules.split, self._taken), rules.duplicates, self._taken)
        self._hashes = array("Q")
        self._before: frozenset[int] | None = None
        self._spool: Any = None

    def run(self) -> Iterator[Record | BadRecord]:
        """Records in the order of the tar. Held back until its end, since a key that comes back spoils earlier ones."""
        with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as self._spool:
            fault = self._read()
            split = self._split_keys()
            for ordinal, (good, key, start, locator, size, code, reason) in enumerate(self._items()):
                if self._rules.escaped:
                    try:
                        key = unescape_key(key)
                    except ValueError as error:
                        good, code, reason = False, "key", f"{show(key)[:200]!r} is not an escaped key: {error}"
                if good and fault is not None and fault.code == "gzip-crc":
                    yield self._bad(
                        key, start, fault.code, f"{fault.reason}: some byte of the tar is wrong, and nobody knows which"
                    )
                elif ordinal in split:
                    yield self._bad(key, start, "interleaved", split[ordinal])
                elif good:
                    yield Record(key, locator, size, self._unit)
                else:
                    yield self._bad(key, start, code, reason)
        if fault is not None:
            yield BadRecord(b"", f"{self._name}: byte {fault.offset}", fault.code, fault.reason, self._unit)

    def _bad(self, key: bytes, start: int, code: str, reason: str) -> BadRecord:
        return BadRecord(key, f"{self._name}: byte {start}", code, reason, self._unit)

    def _read(self) -> TarFault | None:
        """Spool everything; returns a fault that no sample can carry."""
        try:
            for member in members(self._stream):
                self._feed(member)
        except NoEnd as fault:
            self._notes.faults += 1
            self._without_end(fault)
            return None
        except TarFault as fault:
            self._notes.faults += 1
            return self._cut(fault)
        self._finish(self._grouper.take())
        return None

    def _feed(self, member: Member) -> None:
        done, reason = self._grouper.feed(member)
        self._finish(done)
        if not reason:
            return
        if member.skip == "sparse" and reason == "no-extension":
            self._put(member.name, member.start, b"", 0, "sparse", sparse_reason(member))
            return
        if reason == "unmapped":
            self._notes.skipped["unmapped"] += 1
        elif reason != "directory":
            self._left_out(member, reason)

    def _left_out(self, member: Member, reason: str) -> None:
        self._notes.skipped[reason] += 1
        if reason not in ("meta", "hidden"):
            self._notes.warn(f"{self._name}: byte {member.start}: member {show(member.name)[:200]!r} is left out ({reason})")

    def _without_end(self, fault: NoEnd) -> None:
        """No end-of-archive blocks: whether the last sample is whole, nobody knows."""
        group = self._grouper.take()
        where = f"{self._name}: byte {fault.offset}: {fault.reason}"
        if group is not None and not group.problem and self._rules.no_end != "accept":
            here = self._present(group)
            wanted = self._before if self._before is not None else frozenset(range(len(self._rules.columns)))
            if self._rules.no_end == "error" or not wanted <= here:
                group.problem = ("truncated", f"{fault.reason} (byte {fault.offset}), and its last sample may be cut")
        if group is None or not group.problem:
            self._notes.warn(f"{where}; its last sample is taken as whole")
        self._finish(group)

    def _cut(self, fault: TarFault) -> TarFault | None:
        """The tar ends at a fault: the sample it cuts is bad, those before stay."""
        taken = False
        if fault.member is not None:
            done, left_out = self._grouper.feed(fault.member)
            self._finish(done)
            taken = not left_out
        group = self._grouper.take()
        # Data after the end, or a bad checksum over all of it, cuts no sample; then the fault stands alone, after the samples.
        whole = fault.code in ("trailing-data", "gzip-crc") and fault.member is None
        if group is None or whole:
            self._finish(group)
            return fault
        group.problem = (fault.code, f"{fault.reason} (byte {fault.offset}); nothing after it is read")
        self._finish(group)
        # A bad header may hide any number of samples behind it, so it is reported for itself as well.
        return None if taken or fault.code == "truncated" else fault

    def _present(self, group: Group) -> frozenset[int]:
        columns = enumerate(self._rules.columns)
        return frozenset(number for number, column in columns if any(extension in group.members for extension in column))

    def _finish(self, group: Group | None) -> None:
        if group is None:
            return
        for extension in group.members:
            self._notes.count(extension)
        places, size = [], 0
        for number, column in enumerate(self._rules.columns):
            alternative = next((n for n, extension in enumerate(column) if extension in group.members), None)
            if alternative is None:
                continue
            member = group.members[column[alternative]]
            if member.size > self._rules.max_member_bytes and group.problem is None:
                limit = f"the limit is {self._rules.max_member_bytes} (option max_member_bytes)"
                group.problem = ("too-large", f"member {show(member.name)!r} of {member.size} bytes; {limit}")
            places.append((number, alternative, member.offset, member.size))
            size += member.size
            self._notes.present[number] += 1
        valueless = self._rules.escaped and EMPTY in group.members
        if not places and group.problem is None and not valueless:
            self._notes.without_fields += 1
            return
        self._before = frozenset(number for number, *_ in places)
        self._notes.whole += group.problem is None
        code, reason = group.problem or ("", "")
        self._put(group.key, group.start, b"" if code else _encode((self._tar, group.start, places)), size, code, reason)

    def _put(self, key: bytes, start: int, locator: bytes, size: int, code: str, reason: str) -> None:
        data = _encode((not code, key, start, locator, size, code, reason))
        self._spool.write(len(data).to_bytes(4, "little") + data)
        self._hashes.append(xxhash.xxh64_intdigest(key))

    def _items(self) -> Iterator[tuple[bool, bytes, int, bytes, int, str, str]]:
        self._spool.seek(0)
        while head := self._spool.read(4):
            yield _decode(self._spool.read(int.from_bytes(head, "little")))

    def _split_keys(self) -> dict[int, str]:
        """Ordinals of samples whose key comes back later or came before, with the reason."""
        hashes = np.frombuffer(self._hashes, np.uint64)
        values, counts = np.unique(hashes, return_counts=True)
        suspects = set(np.flatnonzero(np.isin(hashes, values[counts > 1])).tolist())
        if not suspects:
            return {}
        places: dict[bytes, list[tuple[int, int]]] = {}
        for ordinal, item in enumerate(self._items()):
            if ordinal in suspects:
                places.setdefault(item[1], []).append((ordinal, item[2]))
        found = {}
        for same in places.values():
            if len(same) > 1:
                where = ", ".join(str(start) for _, start in same[:4]) + (", ..." if len(same) > 4 else "")
                reason = (
                    f"members of this key lie apart (at bytes {where}), so none of them is a whole sample: sort the tar by name"
                )
                found.update({ordinal: reason for ordinal, _ in same})
        return found
