"""MDS: every encoding and compression of MosaicML Streaming's own files, hashes, and shards that lie about themselves."""

from __future__ import annotations

import functools
import gzip
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import _kinds
import numpy as np
import pytest
import zstandard
from _build import flip, picture
from _kinds import FIXTURES, mds, mds_directory, mds_entry, mds_shard
from _tars import scan, values
from PIL import Image

import lfdata
from lfdata.errors import MissingExtraError, OptionError, SampleError, SourceError
from shard_builder.convert import convert
from shard_builder.options import ConvertOptions
from shard_builder.sources import guess_kind, source_from_config

MOSAIC = FIXTURES / "mosaic"
FIELDS = [
    "blob:bytes=blob",
    "text:text=text",
    "number:scalar=number,dtype=int64",
    "small:scalar=small,dtype=uint8",
    "real:scalar=real,dtype=float32",
    "digits:text=digits",
    "decimal:scalar=decimal,dtype=float64",
    "any:array=any,dtype=float64,ndim=2",
    "typed:array=typed,dtype=int16,ndim=2",
    "fixed:array=fixed,dtype=float32,ndim=2",
    "picture:image=picture,codec=png",
    "photo:image=photo,codec=keep",
    "canvas:image=canvas,codec=png",
    "about:json=about",
    "second:image=photos.1,codec=png",
    "frame:image=frames.0,codec=keep",
]
ONE = {"t": ("str", None)}


source = functools.partial(_kinds.source, "mds")


def pixels(number: int) -> Any:
    rows, columns = np.mgrid[0:6, 0:8]
    return np.stack([rows * 20, columns * 20, rows * 0 + number], axis=2).astype(np.uint8)


@pytest.mark.parametrize("compression", sorted(path.name for path in MOSAIC.iterdir()))
def test_every_encoding_of_every_compression_comes_back(compression: str, tmp_path: Path) -> None:
    summary = convert(source(MOSAIC / compression, *FIELDS), tmp_path / "out", ConvertOptions(workers=1))
    assert (summary.samples, summary.errors) == (8, 0)
    for n, sample in enumerate(lfdata.open(tmp_path / "out")):
        assert sample["__key__"] == b"%012d" % n
        assert sample["blob"] == bytes([n, 255, 0])
        assert sample["text"] == f"line {n} ü"
        assert (int(sample["number"]), int(sample["small"]), float(sample["real"])) == (n - 5, n, np.float32(n / 3))
        assert (sample["digits"], float(sample["decimal"])) == (str(10**20 + n), n / 8)
        assert sample["any"].tolist() == [list(range(n + 1))]
        assert np.array_equal(sample["typed"], np.full((2, n + 1), n, np.int16))
        assert sample["fixed"].tolist() == (np.arange(6).reshape(2, 3) + n).tolist()
        assert np.array_equal(sample["picture"], pixels(n))
        gray = np.asarray(Image.fromarray(pixels(n)).convert("L"))
        assert np.array_equal(np.squeeze(sample["canvas"]), gray if n % 2 else pixels(n))
        assert sample["about"] == {"n": n, "list": [1.5, None, "x"]}
        assert (sample.get("second") is not None) == (n % 3 == 2)
        assert sample["photo"].shape == sample["frame"].shape == (6, 8, 3)


def test_fields_are_guessed_from_encodings(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MOSAIC / "none", tmp_path / "m"))
    assert guess_kind(str(folder)) == "mds"
    with pytest.raises(OptionError, match=r"list\[png\]|jpeg_array"):
        source(folder)
    entries = json.loads((folder / "index.json").read_text())["shards"]
    for entry in entries:
        for number, encoding in enumerate(entry["column_encodings"]):
            if encoding in ("list[png]", "jpeg_array"):
                entry["column_encodings"][number] = "pkl"
    mds_directory(folder, entries)
    opened = source(folder)
    kinds = {spec.name: (spec.kind, spec.options) for spec in opened.fields}
    assert kinds["typed"] == ("array", {"dtype": "int16", "ndim": "2"})
    assert kinds["picture"] == ("image", {"codec": "keep"})
    assert (kinds["digits"][0], kinds["about"][0], kinds["small"][1]) == ("text", "json", {"dtype": "uint8"})
    assert [warning.split()[1] for warning in opened.notes()["warnings"]] == ["'frames'", "'photos'"]
    with pytest.raises(OptionError, match="never opened"):
        source(folder, "x:bytes=photos")
    assert convert(opened, tmp_path / "out", ConvertOptions(workers=1)).samples == 8


def test_keys_and_splits(tmp_path: Path) -> None:
    (tmp_path / "root" / "train").mkdir(parents=True)
    mds(tmp_path / "root" / "train")
    assert guess_kind(str(tmp_path / "root")) == "mds"
    with pytest.raises(SourceError, match="split=NAME takes one of train"):
        source(tmp_path / "root")
    found = values(source(tmp_path / "root", split="train"), tmp_path / "w")
    assert list(found)[:2] == [b"0", b"1"]
    assert found[b"59"] == {"image": picture(59), "text": "row 59"}
    assert list(values(source(tmp_path / "root", split="train", key="text"), tmp_path / "w"))[-1] == b"row 59"
    with pytest.raises(SourceError, match="no column 'image' of texts"):
        source(tmp_path / "root", split="train", key="image")
    with pytest.raises(OptionError, match="no name of a directory"):
        source(tmp_path / "root", split="../x")


# -- what is wrong ------------------------------------------------------------------------------------------------------


def test_a_wrong_hash_spoils_its_shard_only(tmp_path: Path) -> None:
    mds(tmp_path)
    flip(tmp_path / "shard.00000.mds", 3000)
    flip(tmp_path / "shard.00001.mds.zstd", 3000)
    records, bad = scan(source(tmp_path))
    assert len(records) == 20
    assert records[0].key == b"40"
    assert [record.path for record in bad] == ["shard.00000.mds", "shard.00001.mds"]
    assert bad[0].code == "checksum" and bad[1].code in ("checksum", "compression")
    assert len(scan(source(tmp_path, hashes="skip"))[0]) >= 40


@pytest.mark.parametrize("name", ["shard.00000.mds", "shard.00001.mds.zstd"])
def test_truncated_and_missing_shards_and_pointers_are_named(tmp_path: Path, name: str) -> None:
    mds(tmp_path)
    data = (tmp_path / name).read_bytes()
    for cut, code in ((data[:-1], "truncated"), (b"", "truncated"), (None, "missing-file")):
        if cut is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(cut)
        records, bad = scan(source(tmp_path))
        assert ([record.code for record in bad], len(records)) == ([code], 40)
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert [record.code for record in scan(source(tmp_path))[1]] == ["lfs-pointer"]


@pytest.mark.parametrize(
    ("algorithm", "pack"), [("zstd", zstandard.compress), ("gz", gzip.compress), ("bz2", None), ("br", None), ("snappy", None)]
)
def test_a_shard_that_decompresses_to_more_than_it_says_is_stopped(tmp_path: Path, algorithm: str, pack: Any) -> None:
    import bz2

    import pyarrow as pa

    bomb = bytes(32 << 20)
    if pack is None:
        codec = {"br": "brotli"}.get(algorithm, algorithm)
        pack = bz2.compress if algorithm == "bz2" else lambda data: pa.compress(data, codec=codec, asbytes=True)
    packed = pack(bomb)
    (tmp_path / "s.mds.x").write_bytes(packed)
    entry = mds_entry("s.mds", b"x" * 1000, 1, ONE, compression=algorithm)
    entry["raw_data"]["hashes"] = {}
    entry["zip_data"] = {"basename": "s.mds.x", "bytes": len(packed), "hashes": {}}
    mds_directory(tmp_path, [entry])
    assert [record.code for record in scan(source(tmp_path, "t:text=t"))[1]] in (["compression"], ["too-large"])
    entry["raw_data"]["bytes"] = len(bomb)
    mds_directory(tmp_path, [entry])
    assert [record.code for record in scan(source(tmp_path, "t:text=t", max_shard_bytes="16M"))[1]] == ["too-large"]


def lying(tmp_path: Path, data: bytes, samples: int = 2) -> list[str]:
    (tmp_path / "s.mds").write_bytes(data)
    mds_directory(tmp_path, [mds_entry("s.mds", data, samples, ONE)])
    opened = source(tmp_path, "t:text=t")
    records, bad = scan(opened)
    codes = [record.code for record in bad]
    worker = source_from_config(opened.config(), tmp_path)
    for record in records:
        try:
            worker.load(record.locator)
        except SampleError as error:
            codes.append(error.code)
    return codes


def test_offsets_sizes_and_counts_that_cannot_be_are_named(tmp_path: Path) -> None:
    good = mds_shard([[b"one"], [b"two"]], [False])
    assert lying(tmp_path, good) == []
    assert lying(tmp_path, good, 3) == ["mds"]
    assert lying(tmp_path, good, 4_000_000_000) == ["mds"]

    def changed(place: int, value: int) -> bytes:
        return good[:place] + value.to_bytes(4, "little") + good[place + 4 :]

    for place, value in ((0, 1), (4, 0), (8, 2**32 - 1), (12, 5), (12, 2**32 - 1)):
        assert lying(tmp_path, changed(place, value)) == ["mds"]
    first = int.from_bytes(good[4:8], "little")
    for size in (0, 2, 4, 2**32 - 1):
        assert lying(tmp_path, changed(first, size)) == ["mds"]
    assert lying(tmp_path, mds_shard([[b"\xff"], [b"two"]], [False])) == ["utf8"]


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("ndarray", b""),
        ("ndarray", b"\x07\x04\x01\x00"),
        ("ndarray", b"\x08\x07" + b"\xff" * 8),
        ("ndarray", b"\x08\xff" + b"\xff" * 100),
        ("ndarray", b"\x08\x04\x00"),
        ("ndarray:uint8", b"\x04\x05abc"),
        ("pil", b"\0" * 11),
        ("pil", np.array([2**31, 2**31, 3], "<u4").tobytes() + b"RGB"),
        ("pil", np.array([1, 1, 2**32 - 1], "<u4").tobytes() + b"L"),
        ("jpeg_array", b"\xff\xff\xff\xff"),
        ("list[png]", b"\0\0\0\0\x01\0\0\0\x09\0\0\0abc"),
        ("list[png]", b"\0\0\0\0\x01\0\0\0\x01\0\0\0abc"),
    ],
)
def test_values_whose_bytes_do_not_bear_out_their_claims_are_named(tmp_path: Path, encoding: str, data: bytes) -> None:
    shard = mds_shard([[data]], [False])
    (tmp_path / "s.mds").write_bytes(shard)
    mds_directory(tmp_path, [mds_entry("s.mds", shard, 1, {"v": (encoding, None)})])
    column = "v.0" if encoding.startswith(("list", "jpeg_")) else "v"
    opened = source(tmp_path, f"x:image={column}" if column == "v.0" or encoding == "pil" else "x:array=v,dtype=uint8,ndim=1")
    with pytest.raises(SampleError) as caught:
        source_from_config(opened.config(), tmp_path).load(scan(opened)[0][0].locator)
    assert (caught.value.code in ("mds", "unsupported"), caught.value.field) == (True, "x")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "json"}, "MDS of version 2"),
        ({"version": 1}, "MDS of version 2"),
        ({"column_sizes": []}, "do not go together"),
        ({"column_names": ["t", "t"], "column_encodings": ["str"] * 2, "column_sizes": [None] * 2}, "one name"),
        ({"raw_data": {"basename": "../../etc/passwd", "bytes": 1}}, "not a path below"),
        ({"raw_data": {"basename": "s", "bytes": -1}}, "cannot be"),
        ({"samples": 2**40}, "cannot be"),
        ({"column_encodings": ["zip"]}, "is not known"),
        ({"column_encodings": ["ndarray:object"]}, "'object' is not known"),
        ({"column_encodings": ["pkl"]}, "never opened"),
        ({"column_encodings": ["int32"], "column_sizes": [8]}, "has a size of 8"),
    ],
)
def test_an_index_that_cannot_be_is_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    mds_directory(tmp_path, [mds_entry("s.mds", b"", 0, ONE) | change])
    with pytest.raises((SourceError, OptionError), match=reason):
        source(tmp_path, "t:text=t")


def test_missing_empty_and_mixed_indices_are_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"has no index\.json"):
        source(tmp_path)
    for data, reason in (
        (b"", "empty"),
        (b"{}", "not an MDS index"),
        (b'{"shards": []}', "no shards"),
        (b"[" * 10**5, "not an MDS"),
    ):
        (tmp_path / "index.json").write_bytes(data)
        with pytest.raises(SourceError, match=reason):
            source(tmp_path)
    mds_directory(tmp_path, [mds_entry("a", b"", 0, ONE), mds_entry("b", b"", 0, {"t": ("bytes", None)})])
    with pytest.raises(SourceError, match="in shard 1 column 't' is bytes, in shard 0 str"):
        source(tmp_path, "t:text=t")


def test_brotli_without_its_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"lfdata\[arrow\]"):
        scan(source(MOSAIC / "br", "t:text=text"))
    assert len(scan(source(MOSAIC / "zstd", "t:text=text"))[0]) == 8


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bytes_give_samples_or_named_errors(tmp_path: Path, seed: int) -> None:
    folder = Path(shutil.copytree(MOSAIC / "none", tmp_path / "m"))
    path = sorted(folder.glob("*.mds"))[0]
    data = bytearray(path.read_bytes())
    rng = random.Random(seed)
    for _ in range(5):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    opened = source(folder, *FIELDS, hashes="skip")
    records, bad = scan(opened)
    assert bad == [] or len(records) < 8
    worker = source_from_config(opened.config(), tmp_path)
    for record in records:
        try:
            worker.load(record.locator)
        except SampleError:
            continue
    assert len(scan(source(folder, *FIELDS))[1]) == 1


def test_pictures_of_odd_pil_modes(tmp_path: Path) -> None:
    def packed(mode: str, size: tuple[int, int], raw: bytes) -> bytes:
        return np.array([*size, len(mode)], "<u4").tobytes() + mode.encode() + raw

    deep = np.arange(6, dtype="<u2").reshape(2, 3) * 1000
    rows = [
        packed("I;16", (3, 2), deep.tobytes()),
        packed("I;16B", (3, 2), deep.astype(">u2").tobytes()),
        packed("P", (1, 1), b"x"),
    ]
    shard = mds_shard([[row] for row in rows], [False])
    (tmp_path / "s.mds").write_bytes(shard)
    mds_directory(tmp_path, [mds_entry("s.mds", shard, 3, {"v": ("pil", None)})])
    opened = source(tmp_path)
    worker = source_from_config(opened.config(), tmp_path)
    records, _ = scan(opened)
    for record in records[:2]:
        assert np.array_equal(worker.load(record.locator).values["v"], deep)
    with pytest.raises(SampleError, match="mode 'P'"):
        worker.load(records[2].locator)
