"""Every tar of the shared odd files has the outcome that its manifest row asks for; none can be forgotten."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from _tars import scan, values

from lfdata.errors import SourceError
from shard_builder.fields import parse_field
from shard_builder.sources import open_source


def sparse(path: str, _work: Path) -> None:
    """Clear refusal, sample by sample."""
    records, bad = scan(open_source(path))
    assert not records
    assert [b.key for b in bad] == [b"sparse_begin", b"sparse_end", b"sparse_ext", b"sparse"]
    assert {b.code for b in bad} == {"sparse"}
    assert "45061 bytes" in bad[2].reason


def sparse_large(path: str, _work: Path) -> None:
    """12 GB of nothing in 10 KB: refused by name; a name without extension is no excuse to be silent."""
    source = open_source(path, fields=[parse_field("x:bytes=bin")])
    records, bad = scan(source)
    assert not records
    assert [(b.key, b.code) for b in bad] == [(b"huge", "sparse")]
    assert "12626929280" in bad[0].reason


def link(path: str, _work: Path) -> None:
    """The link is counted, never followed; the file beside it has no extension, so there is no sample."""
    source = open_source(path, fields=[parse_field("x:bytes=bin")])
    assert scan(source) == ([], [])
    notes = source.notes()
    assert notes["skipped"] == {"link": 1, "no-extension": 1}
    assert "lnk" in notes["warnings"][0]
    with pytest.raises(SourceError, match="link"):
        open_source(path)


def msgpack(path: str, work: Path) -> None:
    """Grouped by key, the unknown extension kept as bytes."""
    source = open_source(path)
    assert [(f.name, f.kind, f.column) for f in source.fields] == [("mp", "bytes", "mp")]
    found = values(source, work)
    assert list(found) == [b"%06d" % n for n in range(100)]
    assert all(msgspec.msgpack.decode(sample["mp"]) for sample in found.values())


def gz_members(path: str, work: Path) -> None:
    """The extension ``txt.gz`` is the column; the bytes stay gzip unless gunzip=yes."""
    kept = open_source(path)
    assert [(f.kind, f.column) for f in kept.fields] == [("bytes", "txt.gz")]
    raw = values(kept, work)
    assert len(raw) == 1000
    opened = open_source(path, gunzip="yes")
    assert [(f.name, f.kind, f.column) for f in opened.fields] == [("text", "text", "txt.gz")]
    text = values(opened, work)
    assert all(text[key]["text"] == gzip.decompress(next(iter(sample.values()))) for key, sample in raw.items())


def compressed(path: str, work: Path) -> None:
    """Read as any other shard."""
    source = open_source(path)
    assert [(f.name, f.kind) for f in source.fields] == [("image", "image"), ("cls", "scalar")]
    found = values(source, work)
    assert len(found) == 90
    assert all(sample["image"].startswith(b"\x89PNG") and sample["cls"].isdigit() for sample in found.values())
    assert not list(work.iterdir())


def plain(path: str, work: Path) -> None:
    """A hundred members of one kind."""
    found = values(open_source(path), work)
    assert len(found) == 100
    assert {len(sample["ten"]) for sample in found.values()} == {12736}


OUTCOMES: dict[str, Callable[[str, Path], None]] = {
    "tar-rs__sparse.tar": sparse,
    "tar-rs__sparse-large.tar": sparse_large,
    "tar-rs__link.tar": link,
    "webdataset__mpdata.tar": msgpack,
    "webdataset__testgz.tar": gz_members,
    "webdataset__sample.tgz": compressed,
    "webdataset__tendata.tar": plain,
}


def test_no_tar_of_the_manifest_is_without_a_test(shared_data: Path) -> None:
    with open(shared_data / "odd" / "manifest.tsv", newline="") as file:
        names = {
            row["file"] for row in csv.DictReader(file, delimiter="\t") if row["file"].endswith((".tar", ".tgz", ".tar.gz"))
        }
    assert names == set(OUTCOMES)


@pytest.mark.parametrize("name", OUTCOMES)
def test_odd_tar(name: str, shared_data: Path, tmp_path: Path) -> None:
    OUTCOMES[name](str(shared_data / "odd" / name), tmp_path / "work")
