"""Manifests that lie, with a right checksum: refused with a typed error."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from lfdata.errors import FormatError
from lfdata.format.meta import encode_manifest, parse_manifest


def manifest(**changes: Any) -> bytes:
    """A manifest of one shard, changed, with its checksum right."""
    shard_entry = {
        "file": "a.lfd", "id": "0" * 31 + "1", "rows": 3, "bytes": 10_000, "tail": 5000, "sha256": "0" * 64, "segment": 0, "ordinal": 0,
        "sidecars": [],
    }  # fmt: skip
    shard_entry |= changes.pop("shard", {})
    value = {"rows": 3, "fields": [{"name": "x", "kind": "text", "params": {}}], "format": "lfdata", "version": [1, 0]}
    value |= {"shards": [shard_entry]} | changes
    text = json.dumps(value | {"checksum": "0" * 64}).encode()
    return text.replace(b'"checksum": "' + b"0" * 64, b'"checksum": "' + hashlib.sha256(text).hexdigest().encode())


def test_the_manifest_of_these_tests_is_good() -> None:
    assert parse_manifest("m", manifest()).rows == 3
    assert parse_manifest("m", manifest(later={"anything": 1})).rows == 3
    again = parse_manifest("m", encode_manifest(parse_manifest("m", manifest())))
    assert again.shards[0].id.endswith("1")


BAD_MANIFESTS: dict[str, dict[str, Any]] = {
    "format": {"format": "tar"},
    "version 2": {"version": [2, 0]},
    "version empty": {"version": []},
    "version text": {"version": "1.0"},
    "rows wrong": {"rows": 4},
    "rows negative": {"rows": -3, "shard": {"rows": -3}},
    "rows huge": {"rows": 2**63, "shard": {"rows": 2**63}},
    "rows beyond the limit": {"rows": 2**41, "shard": {"rows": 2**41}},
    "rows fraction": {"rows": 3.5},
    "bytes negative": {"shard": {"bytes": -1}},
    "bytes huge": {"shard": {"bytes": 2**64}},
    "tail beyond": {"shard": {"tail": 10_001}},
    "tail negative": {"shard": {"tail": -1}},
    "id short": {"shard": {"id": "00"}},
    "id not hexadecimal": {"shard": {"id": "g" * 32}},
    "id a number": {"shard": {"id": 5}},
    "digest": {"shard": {"sha256": "x" * 64}},
    "file empty": {"shard": {"file": ""}},
    "file above": {"shard": {"file": ".."}},
    "file elsewhere": {"shard": {"file": "../a.lfd"}},
    "file absolute": {"shard": {"file": "/etc/passwd"}},
    "file with NUL": {"shard": {"file": "a\0.lfd"}},
    "file twice": {
        "shard": {"sidecars": [{"file": "a.lfd", "part": "1" * 32, "bytes": 1, "tail": 0, "sha256": "0" * 64, "fields": []}]}
    },
    "part": {"shard": {"sidecars": [{"file": "b.lfd", "part": "?", "bytes": 1, "tail": 0, "sha256": "0" * 64, "fields": []}]}},
    "sidecars a number": {"shard": {"sidecars": 4}},
    "field kind": {"fields": [{"name": "x", "kind": "hologram"}]},
    "field twice": {"fields": [{"name": "x", "kind": "text"}] * 2},
    "fields a million": {"fields": [{"name": str(n), "kind": "text"} for n in range(100_000)]},
    "shards null": {"shards": None},
}


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_hostile_manifests(case: str) -> None:
    with pytest.raises(FormatError):
        parse_manifest("m", manifest(**BAD_MANIFESTS[case]))


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[" * 100_000, b'{"format":"lfdata"}', b"\xff", b'{"rows":' + b"1" * 10_000 + b"}", b"null"]
)
def test_manifests_that_are_no_manifests(text: bytes) -> None:
    with pytest.raises(FormatError):
        parse_manifest("m", text)
