"""Parquet: values are what pyarrow reads, rows are found at random, and damaged or hostile files give named errors."""

from __future__ import annotations

import datetime
import decimal
import functools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import _kinds
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _build import flip, picture
from _kinds import FIXTURES, TABLE_FIELDS, table
from _tars import scan, values

import lfdata
from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.convert import convert
from shard_builder.options import ConvertOptions
from shard_builder.sources import guess_kind, open_source, source_from_config
from shard_builder.sources.parquet import GroupRows, ParquetFile

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5\n"


def write(folder: Path, rows: pa.Table, name: str = "a.parquet", **options: Any) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path, **{"write_page_checksum": True} | options)
    return str(path)


source = functools.partial(_kinds.source, None)


def one(rows: pa.Table, tmp_path: Path, *fields: str, **options: str) -> dict[bytes, dict[str, Any]]:
    return values(source(write(tmp_path, rows), *fields, **options), tmp_path / "w")


def test_rows_come_back_from_shards_as_pyarrow_reads_them(tmp_path: Path) -> None:
    rows = table(50)
    location = write(tmp_path, rows, row_group_size=9)
    summary = convert(source(location, *TABLE_FIELDS), tmp_path / "out", ConvertOptions(workers=1))
    assert (summary.samples, summary.errors) == (50, 0)
    stored = {sample["__key__"]: sample for sample in lfdata.open(tmp_path / "out")}
    for row in pq.read_table(location).to_pylist():
        sample = stored[row["id"].encode()]
        assert sample["text"] == row["text"]
        assert int(sample["label"]) == row["label"]
        assert sample["boxes"] == row["boxes"]
        assert sample["vector"].tolist() == row["vector"]
        assert ("image" in sample and sample["image"] is not None) == (row["image"] is not None)


def test_every_type_has_its_rule(tmp_path: Path) -> None:
    moment = datetime.datetime(2024, 2, 29, 23, 59, 58, 123456)
    rows = pa.table(
        {
            "dec": pa.array([decimal.Decimal("-12.340"), None], pa.decimal128(12, 3)),
            "date": pa.array([moment.date(), None]),
            "stamp": pa.array([1_709_251_198_123_456_789, None], pa.timestamp("ns")),
            "zoned": pa.array([moment, None], pa.timestamp("s", "Europe/Paris")),
            "time": pa.array([moment.time(), None], pa.time64("us")),
            "span": pa.array([-5, None], pa.duration("ms")),
            "half": pa.array(np.array([0.5, 1.0], np.float16)),
            "dict": pa.array(["x", None]).dictionary_encode(),
            "map": pa.array([[("a", 1), ("b", 2)], None], pa.map_(pa.string(), pa.int64())),
            "pairs": pa.array([[(1, "a")], None], pa.map_(pa.int64(), pa.string())),
            "fixed": pa.array([b"abc", None], pa.binary(3)),
            "large": pa.array(["ü", None], pa.large_string()),
            "deep": [{"a": [{"b": {"c": decimal.Decimal("1.5"), "d": moment}}]}, None],
            "grid": pa.array([[[1, 2], [3, 4]], None], pa.list_(pa.list_(pa.uint8(), 2))),
            "empty": pa.nulls(2),
        }
    )
    kinds = {"dec": "text", "date": "text", "stamp": "text", "zoned": "text", "time": "text", "half": "scalar", "dict": "text"}
    more = {"map": "json", "pairs": "json", "fixed": "bytes", "large": "text", "deep": "json", "grid": "array", "empty": "text"}
    fields = [f"{name}:{kind}={name}" for name, kind in (kinds | more).items()]
    fields += ["span:scalar=span", "stamp_number:scalar=stamp", "date_number:scalar=date", "inner:json=deep.a", "all:json=*"]
    found = list(one(rows, tmp_path, *fields[:-1]).values())
    assert found[1] == {"half": 1.0}
    first = found[0]
    assert first.pop("grid").tolist() == [[1, 2], [3, 4]]
    assert first == {
        "dec": "-12.340",
        "date": "2024-02-29",
        "stamp": "2024-02-29T23:59:58.123456789",
        "zoned": "2024-02-29T23:59:58.000Z",
        "time": "23:59:58.123456",
        "half": 0.5,
        "dict": "x",
        "map": {"a": 1, "b": 2},
        "pairs": [[1, "a"]],
        "fixed": b"abc",
        "large": "ü",
        "deep": {"a": [{"b": {"c": "1.5", "d": "2024-02-29T23:59:58.123456"}}]},
        "inner": [{"b": {"c": "1.5", "d": "2024-02-29T23:59:58.123456"}}],
        "span": -5,
        "stamp_number": 1_709_251_198_123_456_789,
        "date_number": 19782,
    }


def test_all_other_columns_as_one_object(tmp_path: Path) -> None:
    rows = pa.table({"id": ["k"], "t": ["x"], "n": [1], "none": pa.nulls(1), "list": [[1.5]]})
    assert one(rows, tmp_path, "t:text=t", "rest:json=*") == {b"k": {"t": "x", "rest": {"n": 1, "list": [1.5]}}}


def test_pictures_are_bytes_structs_paths_or_base64(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "1.png").write_bytes(picture(1))
    rows = pa.table(
        {
            "a": [picture(1)],
            "b": [{"bytes": picture(1), "path": "x"}],
            "c": [{"bytes": None, "path": "p/1.png"}],
            "d": ["p/1.png"],
        }
    )
    found = one(rows, tmp_path, *(f"{name}:image={name}" for name in "abcd"))[b"000000000000"]
    assert set(found.values()) == {picture(1)}
    rows = pa.table({"d": ["../out.png"], "e": ["gone.png"]})
    for column, code in (("d", "outside-root"), ("e", "missing-file")):
        _, bad = scan(source(write(tmp_path, rows), f"x:image={column}"))
        assert [record.code for record in bad] == [code]


def test_rows_are_found_at_random_and_each_group_is_decoded_once_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = table(60)
    location = write(tmp_path, rows, row_group_size=20)
    opened = source(location, "text:text=text")
    records, _ = scan(opened)
    worker = source_from_config(opened.config(), tmp_path)
    started: list[int] = []
    restart = GroupRows._restart

    def counted(self: GroupRows) -> None:
        started.append(self.group)
        restart(self)

    monkeypatch.setattr(GroupRows, "_restart", counted)
    monkeypatch.setattr("shard_builder.sources.parquet._BATCH_ROWS", 3)
    for number, record in enumerate(records):
        assert worker.load(record.locator).values == {"text": f"row {number} ü"}
    assert started == [0, 1, 2]
    for number in random.Random(0).sample(range(60), 60):
        assert worker.load(records[number].locator).values == {"text": f"row {number} ü"}


def test_keys_are_a_column_a_row_number_or_file_and_row(tmp_path: Path) -> None:
    rows = pa.table({"id": [3, 4], "n": [1.5, 2.5], "t": ["x", "y"], "none": pa.array(["q", None])})
    assert list(one(rows, tmp_path, "t:text=t")) == [b"3", b"4"]
    assert list(one(rows, tmp_path, "t:text=t", key="#")) == [b"000000000000", b"000000000001"]
    assert list(one(rows, tmp_path, "k:text=t", key="t")) == [b"x", b"y"]
    with pytest.raises(OptionError, match="double"):
        one(rows, tmp_path, "t:text=t", key="n")
    with pytest.raises(SourceError, match="'id'.*'t'"):
        one(rows, tmp_path, "t:text=t", key="name")
    _, bad = scan(source(write(tmp_path, rows), "t:text=t", key="none"))
    assert [(record.code, record.path) for record in bad] == [("no-key", "a.parquet: row 1")]
    write(tmp_path / "d", rows, "train-00000.parquet")
    write(tmp_path / "d", rows, "sub/test-00000.parquet")
    keys = values(source(str(tmp_path / "d"), "t:text=t", key="#"), tmp_path / "w")
    assert list(keys) == [b"%s-00000.parquet#%012d" % (name, row) for name in (b"sub/test", b"train") for row in range(2)]
    assert len(values(source(str(tmp_path / "d"), "t:text=t", key="#", split="train"), tmp_path / "w")) == 2
    with pytest.raises(SourceError, match="split"):
        source(str(tmp_path / "d"), "t:text=t", split="val")


def test_patterns_and_lists_of_files(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        write(tmp_path, pa.table({"t": [str(number)]}), f"t-{number}.parquet")

    def texts(location: str) -> list[str]:
        return [sample["t"] for sample in values(source(location, "t:text=t"), tmp_path / "w").values()]

    assert texts(f"{tmp_path}/t-*.parquet") == ["0", "1", "2"]
    assert texts(f"{tmp_path}/t-{{0..1}}.parquet") == ["0", "1"]
    assert texts(f"{tmp_path}/t-2.parquet::{tmp_path}/t-0.parquet") == ["2", "0"]
    with pytest.raises(SourceError, match="no file fits"):
        texts(f"{tmp_path}/x-*.parquet")
    with pytest.raises(SourceError, match="more than once"):
        texts(f"{tmp_path}/t-2.parquet::{tmp_path}/t-2.parquet")


@pytest.mark.parametrize("place", ["saved", "parquet"])
def test_hugging_face_data_is_guessed_and_comes_back(place: str, tmp_path: Path) -> None:
    opened = open_source(str(FIXTURES / "hugging_face" / place))
    assert guess_kind(str(FIXTURES / "hugging_face" / place)) == {"saved": "arrow", "parquet": "parquet"}[place]
    assert opened.notes()["class_names"] == {"label": ["cat", "dog"]}
    convert(opened, tmp_path / "out", ConvertOptions(workers=1))
    found = {sample["caption"]: sample for sample in lfdata.open(tmp_path / "out")}
    assert len(found) == 10
    for path in sorted((FIXTURES / "hugging_face" / "parquet" / "data").glob("*")):
        for row in pq.read_table(path).to_pylist():
            sample = found[row["caption"]]
            assert sample["raw"] == row["raw"]
            assert sample["ids"].tolist() == row["ids"]
            assert sample["grid"].tolist() == row["grid"]
            assert sample["boxes"] == row["boxes"]
            assert float(sample["score"]) == row["score"]
            assert int(sample["label"]) == row["label"]
            assert sample["about"]["tags"] == row["about"]["tags"]
            assert sample["about"]["when"] == row["about"]["when"].isoformat(timespec="milliseconds")
            assert sample["image"].shape == (6, 8, 3)
            assert (sample.get("sound") is None) == (row["sound"] is None)
    assert open_source(str(FIXTURES / "hugging_face" / place), split="test").kind
    assert len(scan(open_source(str(FIXTURES / "hugging_face" / place), split="test"))[0]) == 3


def features(**found: Any) -> dict[bytes, bytes]:
    return {b"huggingface": json.dumps({"info": {"features": found}}).encode()}


def test_several_pictures_are_kept_and_lists_of_files_must_be_declared(tmp_path: Path) -> None:
    picture_type = {"_type": "Image"}
    rows = pa.table({"a": [{"bytes": picture(0), "path": None}], "b": [{"bytes": picture(1), "path": None}]})
    location = write(tmp_path, rows.replace_schema_metadata(features(a=picture_type, b=picture_type)))
    assert [spec.options for spec in open_source(location).fields] == [{"codec": "keep"}] * 2
    location = write(tmp_path, rows.replace_schema_metadata(features(a={"_type": "List", "feature": picture_type})))
    with pytest.raises(OptionError, match="declare the fields"):
        open_source(location)
    location = write(tmp_path, rows.replace_schema_metadata({b"huggingface": b"{"}))
    with pytest.raises(SourceError, match="metadata is no JSON"):
        open_source(location)
    with pytest.raises(OptionError, match=r"--field.*'a' \(struct"):
        open_source(write(tmp_path, rows))


# -- what is wrong ------------------------------------------------------------------------------------------------------


def test_a_page_with_a_wrong_checksum_spoils_its_rows_only_and_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pa.table({"id": [str(n) for n in range(30)], "t": [f"text {n}" * 20 for n in range(30)]})
    location = write(tmp_path, rows, row_group_size=10, compression="NONE", use_dictionary=False)
    data = Path(location).read_bytes()
    flip(Path(location), data.index(b"text 15"))
    opened = source(location, "t:text=t")
    records, bad = scan(opened)
    assert (len(records), bad) == (30, [])
    tries: list[int] = []
    batches = ParquetFile.batches
    monkeypatch.setattr(ParquetFile, "batches", lambda self, group, *rest: tries.append(group) or batches(self, group, *rest))
    worker = source_from_config(opened.config(), tmp_path)
    good = []
    for number, record in enumerate(records):
        try:
            assert worker.load(record.locator).values == {"t": f"text {number}" * 20}
            good.append(number)
        except SampleError as error:
            assert (error.code, "row" in error.path) == ("checksum", True)
    assert good == [*range(10), *range(20, 30)]
    assert tries == [0, 1, 2]


def test_a_spoiled_key_column_is_one_bad_record_for_its_rows(tmp_path: Path) -> None:
    rows = pa.table({"id": [f"key {n:04d}" for n in range(30)], "t": ["x"] * 30})
    location = write(tmp_path, rows, row_group_size=10, compression="NONE", use_dictionary=False)
    flip(Path(location), Path(location).read_bytes().index(b"key 0015"))
    records, bad = scan(source(location, "t:text=t"))
    assert len(records) == 20
    assert [(record.code, record.path) for record in bad] == [("checksum", "a.parquet: rows 10 to 19")]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused_at_once(tmp_path: Path, share: float) -> None:
    location = write(tmp_path, table(20))
    data = Path(location).read_bytes()
    Path(location).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(SourceError, match=r"truncated|empty file|not a Parquet"):
        source(location, "t:text=text")


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bytes_of_the_footer_never_pass_silently(tmp_path: Path, seed: int) -> None:
    location = write(tmp_path, table(20), row_group_size=10)
    data = bytearray(Path(location).read_bytes())
    length = int.from_bytes(data[-8:-4], "little")
    rng = random.Random(seed)
    for _ in range(3):
        data[len(data) - 8 - rng.randrange(length + 4)] ^= 1 << rng.randrange(8)
    wanted = values(source(location, *TABLE_FIELDS[1:3]), tmp_path / "w")
    Path(location).write_bytes(data)
    try:
        found = source(location, *TABLE_FIELDS[1:3], max_group_rows="1M")
        records, _ = scan(found)
    except (SourceError, OptionError):
        return
    worker = source_from_config(found.config(), tmp_path)
    for record in records:
        try:
            sample = worker.load(record.locator)
        except SampleError:
            continue
        assert set(sample.values) <= set(next(iter(wanted.values())))


def test_other_files_in_the_place_of_parquet_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for data, reason in (
        (POINTER, "git lfs pull"),
        (b"PK\3\4" + bytes(100), "not a Parquet"),
        (b"PARE" + bytes(90), "encrypted"),
    ):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=reason):
            source(str(path), "t:text=t")
    path.unlink()
    with pytest.raises(SourceError, match="no such file"):
        source(str(path), "t:text=t")


def test_files_with_other_columns_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    write(tmp_path / "d", pa.table({"t": ["x"], "n": [1]}), "0.parquet")
    for rows, reason in (
        (pa.table({"t": ["x"]}), r"1\.parquet: has no column 'n', which 0\.parquet has"),
        (pa.table({"t": ["x"], "n": ["1"]}), r"column 'n' holds string, in 0\.parquet int64"),
    ):
        write(tmp_path / "d", rows, "1.parquet")
        with pytest.raises(SourceError, match=reason):
            convert(
                source(str(tmp_path / "d"), "t:text=t", "n:scalar=n,dtype=int64"), tmp_path / "out", ConvertOptions(workers=1)
            )
        assert not list((tmp_path / "out").glob("*"))
    write(tmp_path / "d", pa.table({"n": pa.nulls(1), "more": [2], "t": pa.array(["x"]).dictionary_encode()}), "1.parquet")
    found = values(source(str(tmp_path / "d"), "t:text=t", "n:scalar=n,dtype=int64"), tmp_path / "w")
    assert list(found.values()) == [{"t": "x", "n": 1}, {"t": "x"}]


def test_declared_columns_must_be_there_and_storable(tmp_path: Path) -> None:
    location = write(tmp_path, pa.table({"t": ["x"], "s": [{"a": 1}]}))
    for field, kind in (
        ("x:text=no", SourceError),
        ("x:text=s.b", SourceError),
        ("x:text=t.a", SourceError),
        ("x:text=*", OptionError),
    ):
        with pytest.raises(kind):
            source(location, field)
    assert values(source(location, "x:scalar=s.a"), tmp_path / "w")[b"000000000000"] == {"x": 1}


def test_groups_that_claim_too_much_are_refused_before_they_are_read(tmp_path: Path) -> None:
    location = write(tmp_path, pa.table({"t": ["x" * 1000] * 5000}))
    for option, value in (("max_group_rows", "4999"), ("max_group_bytes", "1K")):
        with pytest.raises(SourceError, match=option):
            scan(source(location, "t:text=t", **{option: value}))


def test_a_file_that_changes_after_the_scan_is_no_sample(tmp_path: Path) -> None:
    location = write(tmp_path, table(20))
    opened = source(location, "text:text=text")
    records, _ = scan(opened)
    write(tmp_path, table(20, 5))
    with pytest.raises(SampleError, match="changed"):
        source_from_config(opened.config(), tmp_path).load(records[0].locator)
    worker = source_from_config(opened.config(), tmp_path)
    Path(location).unlink()
    with pytest.raises(SampleError, match="unreadable"):
        worker.load(records[0].locator)


def test_bad_texts_nulls_in_arrays_and_ragged_lists_are_bad_samples(tmp_path: Path) -> None:
    raw = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"\xff"]).buffers())
    rows = pa.table({"t": raw, "v": [[1, 2], [1, None]], "g": [[[1], [2]], [[1], [2, 3]]]})
    location = write(tmp_path, rows)
    for field, code in (
        ("x:text=t", "utf8"),
        ("x:array=v,dtype=int64,ndim=1", "null"),
        ("x:array=g,dtype=int64,ndim=2", "ragged"),
    ):
        opened = source(location, field)
        records, _ = scan(opened)
        worker = source_from_config(opened.config(), tmp_path)
        worker.load(records[0].locator)
        with pytest.raises(SampleError) as caught:
            worker.load(records[1].locator)
        assert (caught.value.code, caught.value.field) == (code, "x")


def test_a_directory_of_pictures_with_a_parquet_of_metadata_stays_an_image_folder(tmp_path: Path) -> None:
    write(tmp_path, table(1), "metadata.parquet")
    (tmp_path / "a.jpg").touch()
    assert guess_kind(str(tmp_path)) == "image-folder"
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    write(tmp_path, table(1), "data/train.parquet")
    assert guess_kind(str(tmp_path)) == "parquet"
