"""Exports: every kind of field, every key and every absence comes back; the same bytes for any number of processes; nothing half-written."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _build import FIELDS, build, flip, rows, tone
from opskit import assert_same
from PIL import Image

import lfdata
from lfdata.errors import CorruptError, OptionError, SampleError, TargetExistsError
from lfdata.format.meta import read_manifest
from shard_builder.convert import convert
from shard_builder.fields import parse_field
from shard_builder.options import ConvertOptions
from shard_builder.sinks.base import ExportOptions
from shard_builder.sinks.job import EXPORT, export, read_export
from shard_builder.sources import open_source

ODD_KEYS = [
    b"a.b/c.d.jpg",
    b"",
    b"\xff\xfe",
    b"/lead//double/",
    b"../up/./x",
    b"__meta__/x",
    b"100%",
    b"%41",
    "schl\u00fcssel \u4e2d".encode(),
    b"nul\0line\n",
    b"long" * 200,
    b".hidden",
]
MORE: dict[str, tuple[str, dict[str, str]]] = {
    **FIELDS,
    "photo": ("image", {"codec": "webp"}),
    "raw": ("image", {"codec": "raw"}),
    "deep": ("image", {"codec": "png", "role": "depth"}),
    "matrix": ("array", {"dtype": "int16", "shape": "*x3"}),
    "half": ("array", {"dtype": "float16", "ndim": "1"}),
    "score": ("scalar", {"dtype": "float32"}),
    "flag": ("scalar", {"dtype": "bool"}),
    "wide": ("tokens", {"vocab": "4294967296"}),
}


def jpeg(seed: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 24, 3), np.uint8)).save(out, "JPEG")
    return out.getvalue()


def everything(count: int) -> list[tuple[bytes, dict[str, Any]]]:
    """Every kind of field, with every field absent somewhere, odd values and odd keys."""
    found = []
    grey, clear = np.full((5, 4, 1), 90, np.uint8), np.full((5, 4, 4), 255, np.uint8)
    for number, (key, values) in enumerate(rows(count)):
        values = dict(values) | {
            "photo": (jpeg(number), grey, clear)[number % 3],
            "raw": np.random.default_rng(number).integers(0, 256, (3, 5, number % 4 + 1), np.uint8),
            "deep": np.random.default_rng(number).integers(0, 65536, (4, 6, 1), np.uint16),
            "matrix": np.arange(number % 3 * 3, dtype=np.int16).reshape(-1, 3),
            "half": np.array([0.1, -0.0, np.nan, np.inf], np.float16)[: number % 5],
            "score": (0.1, float("nan"), -0.0, 1e-30)[number % 4],
            "flag": number % 2 == 0,
            "wide": [0, 2**32 - 1][: number % 3],
        }
        if number == 1:
            values |= {
                "caption": "\ufeffmark \u00e9\n",
                "about": {"f": 1.0, "i": 1, "big": 2**63, "n": None},
                "blob": b"",
                "label": -1,
            }
        if number == 2:
            values |= {"sound": tone(50, 44100, 2), "caption": ""}
        names = list(values)
        if number >= 3:
            values.pop(names[number % len(names)])
        if number == 7:
            values = {}
        key = ODD_KEYS[number - 4] if 4 <= number < 4 + len(ODD_KEYS) else key
        found.append((key, values))
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export") / "data"
    samples = everything(24)
    build(root, [samples[:9], samples[9:10], samples[10:]], MORE, index=True)
    return root


def options(format_: str = "webdataset", **more: Any) -> ExportOptions:
    return ExportOptions(**{"format": format_, "workers": 1, **more})


def files_of(path: Path) -> dict[str, bytes]:
    return {item.name: item.read_bytes() for item in sorted(path.iterdir())}


def back(exported: Path, target: Path) -> Any:
    fields = [parse_field(field["declare"]) for field in read_export(exported)["fields"]]
    convert(open_source(str(exported), fields=fields, keys="escaped"), target, ConvertOptions(workers=1))
    return lfdata.open(target)


@pytest.mark.parametrize("more", [{}, {"shard_bytes": 20_000}, {"endings": {"photo": "jpg"}}])
def test_a_webdataset_export_converted_back_has_the_same_keys_order_values_types_and_absences(
    source: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    found = export(source, tmp_path / "tars", options(**more))
    assert (len(found["files"]) > 3) == ("shard_bytes" in more)
    before, after = lfdata.open(source), back(tmp_path / "tars", tmp_path / "back")
    assert after.fields == before.fields
    assert [f.kind for f in after.manifest.fields] == [f.kind for f in before.manifest.fields]
    assert_same(list(before), list(after))


def test_a_parquet_export_has_the_same_keys_order_values_types_and_absences(source: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    export(source, tmp_path / "p", options("parquet", shard_bytes=30_000, row_group_bytes=8_000))
    names = sorted(item.name for item in (tmp_path / "p").glob("*.parquet"))
    assert len(names) > 1
    assert any(parquet.ParquetFile(tmp_path / "p" / name).num_row_groups > 1 for name in names)
    table = [row for name in names for row in parquet.read_table(tmp_path / "p" / name).to_pylist()]
    data = lfdata.open(source)
    assert len(table) == len(data)
    for row, sample in zip(table, data, strict=True):
        assert row["__key__"] == sample["__key__"]
        assert {n for n in data.fields if row[n] is None} == {n for n in data.fields if sample[n] is None}
        for name in ("caption", "blob"):
            assert row[name] == sample[name]
        for name in ("vector", "half", "ids", "wide"):
            if sample[name] is not None:
                np.testing.assert_array_equal(np.array(row[name], sample[name].dtype), sample[name])
        for name in ("label", "score", "flag"):
            if sample[name] is not None:
                np.testing.assert_array_equal(type(sample[name])(row[name]), sample[name])
        if sample["about"] is not None:
            assert repr(json.loads(row["about"])) == repr(sample["about"])
        if sample["matrix"] is not None:
            matrix = np.load(io.BytesIO(row["matrix"]), allow_pickle=False)
            np.testing.assert_array_equal(matrix, sample["matrix"])
            assert matrix.dtype == sample["matrix"].dtype
        if sample["raw"] is not None:
            pixels = np.asarray(Image.open(io.BytesIO(row["raw"])))
            np.testing.assert_array_equal(pixels.reshape(sample["raw"].shape), sample["raw"])
        if sample["sound"] is not None:
            assert row["sound"][:4] == b"RIFF" and row["sound"][44:] == sample["sound"].samples.tobytes()
    schema = parquet.read_schema(tmp_path / "p" / names[0])
    assert [str(schema.field(n).type) for n in ("label", "score", "flag", "half")] == [
        "int32",
        "float",
        "bool",
        "list<element: halffloat>",
    ]
    assert json.loads(schema.metadata[b"lfdata"])["fields"][0]["name"] == data.fields[0]


@pytest.mark.parametrize("format_", ["webdataset", "parquet"])
def test_one_and_two_processes_give_the_same_bytes_and_a_second_run_changes_nothing(
    source: Path, tmp_path: Path, format_: str
) -> None:
    for workers in (1, 2):
        export(source, tmp_path / str(workers), options(format_, shard_bytes=12_000, workers=workers))
    first = files_of(tmp_path / "1")
    assert first == files_of(tmp_path / "2") and len(first) > 3
    export(source, tmp_path / "1", options(format_, shard_bytes=12_000))
    assert files_of(tmp_path / "1") == first
    with pytest.raises(TargetExistsError):
        export(source, tmp_path / "1", options(format_, shard_bytes=40_000))


@pytest.mark.parametrize("format_", ["webdataset", "parquet"])
@pytest.mark.parametrize("count", [0, 1])
def test_no_and_one_sample(tmp_path: Path, format_: str, count: int) -> None:
    build(tmp_path / "data", [rows(count)])
    found = export(tmp_path / "data", tmp_path / "out", options(format_))
    assert [file["rows"] for file in found["files"]] == [count]
    if format_ == "webdataset":
        with tarfile.open(tmp_path / "out" / found["files"][0]["name"]) as tar:
            assert len(tar.getnames()) == count * len(FIELDS)


def test_a_damaged_payload_is_named_and_nothing_half_written_is_left(source: Path, tmp_path: Path) -> None:
    manifest = build(tmp_path / "data", [rows(4), rows(4, 4)])
    path = tmp_path / "data" / manifest.shards[1].file
    flip(path, 4096 + 50)
    with pytest.raises(CorruptError, match=r"field 'image', row") as caught:
        export(tmp_path / "data", tmp_path / "out", options(shard_bytes=5_000))
    assert str(path) in str(caught.value)
    names = [item.name for item in (tmp_path / "out").iterdir() if item.is_file()]
    assert names and all(name.startswith("data-") for name in names) and EXPORT not in names
    manifest = build(tmp_path / "data", [rows(4), rows(4, 4)])
    found = export(tmp_path / "data", tmp_path / "out", options(shard_bytes=5_000))
    assert sum(file["rows"] for file in found["files"]) == 8, "the repaired source is gone on with"


def test_keys_that_a_tar_cannot_carry_are_refused_on_request_by_name(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SampleError, match=r"a\.b/c\.d\.jpg.*--keys escape"):
        export(source, tmp_path / "out", options(keys="refuse"))
    assert not any(item.suffix == ".tar" for item in (tmp_path / "out").iterdir())


def test_json_that_has_no_text_is_refused_by_name(tmp_path: Path) -> None:
    build(tmp_path / "data", [[(b"k", {"about": {"x": float("nan")}})]], {"about": ("json", {"nan": "keep"})})
    for format_ in ("webdataset", "parquet"):
        with pytest.raises(SampleError, match="key 'k': field 'about'"):
            export(tmp_path / "data", tmp_path / format_, options(format_))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"endings": {"caption": "json", "about": "json"}}, "would both end in"),
        ({"endings": {"nobody": "x"}}, "not exported"),
        ({"endings": {"caption": "a b"}}, "no ending"),
        ({"fields": ("nobody",)}, "no field"),
        ({"format": "zip"}, "unknown format"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_made(
    source: Path, tmp_path: Path, more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(OptionError, match=reason):
        export(source, tmp_path / "out", options(**more))
    assert not (tmp_path / "out").exists()


def test_short_endings_are_those_that_webdataset_knows(tmp_path: Path) -> None:
    build(tmp_path / "data", [rows(2)])
    export(tmp_path / "data", tmp_path / "out", options(short=True, fields=("image", "caption", "label", "vector", "ids")))
    with tarfile.open(tmp_path / "out" / "data-000000.tar") as tar:
        endings = [name.partition(".")[2] for name in tar.getnames()[:5]]
    assert endings == ["png", "txt", "cls", "vector.npy", "ids.npy"]


def test_the_webdataset_library_reads_the_same_samples(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    build(tmp_path / "data", [rows(5)])
    export(tmp_path / "data", tmp_path / "out", options(short=True))
    read: Iterator[Any] = iter(webdataset.WebDataset(str(tmp_path / "out" / "data-000000.tar"), shardshuffle=False).decode())
    for sample, mine in zip(read, lfdata.open(tmp_path / "data"), strict=True):
        assert sample["__key__"].encode() == mine["__key__"] and sample["txt"] == mine["caption"]
        assert sample["cls"] == mine["label"] and sample["json"] == mine["about"]
        np.testing.assert_array_equal(sample["vector.npy"], mine["vector"])


def test_absent_everywhere_is_absent_everywhere_when_it_comes_back(tmp_path: Path) -> None:
    build(tmp_path / "data", [[(b"a", {"label": 1}), (b"b", {})]])
    export(tmp_path / "data", tmp_path / "out", options())
    assert_same(list(lfdata.open(tmp_path / "data")), list(back(tmp_path / "out", tmp_path / "back")))
    assert read_manifest(tmp_path / "back").rows == 2
