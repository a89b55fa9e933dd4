"""Bad samples: counted against the policy, listed for people and machines, quarantined if asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import LfdataError, SampleError
from lfdata.format.durable import Files
from shard_builder.options import ConvertOptions


class TooManyErrors(LfdataError):
    """The limit on bad samples was exceeded."""


class StoppedError(LfdataError):
    """A bad sample under ``--on-error stop``."""


def text(data: bytes) -> str:
    """Bytes of a key or path as JSON-safe text."""
    return data.decode("utf-8", "backslashreplace")


class Report:
    """Collects bad samples and warnings of the shard in the making; :meth:`take` hands them to the journal."""

    def __init__(self, options: ConvertOptions) -> None:
        self._options = options
        self.count = 0
        self._pending: list[dict[str, Any]] = []

    def restore(self, entries: list[dict[str, Any]]) -> None:
        """Count what an earlier run has journaled."""
        self.count += sum(entry["action"] in ("skip", "quarantine") for entry in entries)

    def error(self, ordinal: int, error: SampleError) -> None:
        """One bad sample. Raises :class:`StoppedError` or :class:`TooManyErrors` by policy."""
        action = self._options.on_error
        if action == "stop":
            raise StoppedError(
                f"{error}. Use --on-error skip or quarantine to go on without bad samples, with --resume to keep what is done"
            )
        self._add(ordinal, error, action)
        self.count += 1
        limit = self._options.max_errors
        if limit is not None and self.count > limit:
            raise TooManyErrors(f"{self.count} bad samples, more than --max-errors {limit}; the last one: {error}")

    def warning(self, ordinal: int, key: bytes, path: str, field: str, reason: str) -> None:
        """Something odd about a sample that was stored all the same."""
        self._add(ordinal, SampleError("warning", reason, key=key, path=path, field=field), "stored")

    def dropped(self, ordinal: int, key: bytes, path: str) -> None:
        """A record that the duplicates policy leaves out."""
        error = SampleError("duplicate-key", f"--duplicates {self._options.duplicates}", key=key, path=path)
        self._add(ordinal, error, "dropped")

    def _add(self, ordinal: int, error: SampleError, action: str) -> None:
        self._pending.append(
            {
                "record": ordinal,
                "key": text(error.key),
                "path": _shown(error.path),
                "field": error.field,
                "code": error.code,
                "reason": _shown(error.reason),
                "action": action,
            }
        )

    def take(self, stop: int | None = None) -> list[dict[str, Any]]:
        """Entries of records before ``stop`` (all, by default), removed from the report."""
        taken = [entry for entry in self._pending if stop is None or entry["record"] < stop]
        self._pending = self._pending[len(taken) :]
        return taken


def lines(entries: list[dict[str, Any]]) -> bytes:
    """Entries as JSON lines."""
    return b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)


def quarantine(
    files: Files, directory: Path, ordinal: int, error: SampleError, values: Sequence[tuple[str, bool, Any]]
) -> None:
    """Keep a bad sample's source values: ``RECORD/field-NNN.bin`` (or ``.json``) and ``sample.json``. Names never come from the source.

    Args:
        ordinal: the record's number in the source: its place, since bad records may share a key.
        values: ``(field, whether bytes, contents)``; none where the sample could not be loaded, or killed the worker that did.
    """
    place = directory / f"{ordinal:012d}"
    files.make_directory(directory)
    files.make_directory(place)
    stored = {}
    for number, (field, is_bytes, contents) in enumerate(values):
        name = f"field-{number:03d}.{'bin' if is_bytes else 'json'}"
        files.write_file(place / name, contents)
        stored[text(field.encode("utf-8", "surrogateescape"))] = name
    about = {
        "record": ordinal,
        "key": text(error.key),
        "path": _shown(error.path),
        "code": error.code,
        "reason": _shown(error.reason),
    }
    files.write_file(place / "sample.json", msgspec.json.encode(about | {"field": error.field, "files": stored}))


def _shown(value: str) -> str:
    return text(value.encode("utf-8", "surrogateescape"))
