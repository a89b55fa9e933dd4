"""HDF5: values are what h5py reads, chunks are decompressed once in order, and nothing comes from another file."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import _kinds
import h5py
import numpy as np
import pytest
from _build import picture
from _kinds import hdf5
from _tars import scan, values

import lfdata
from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.convert import convert
from shard_builder.options import ConvertOptions
from shard_builder.sources import source_from_config

source = functools.partial(_kinds.source, "hdf5")


def file(path: Path, **data: Any) -> Path:
    with h5py.File(path, "w") as opened:
        for name, value in data.items():
            opened[name] = value
    return path


def test_rows_come_back_from_shards_as_h5py_reads_them(tmp_path: Path) -> None:
    made = hdf5(tmp_path)
    summary = convert(made.open(), tmp_path / "out", ConvertOptions(workers=1))
    assert (summary.samples, summary.errors) == (60, 0)
    stored = {sample["__key__"].decode(): sample for sample in lfdata.open(tmp_path / "out")}
    with h5py.File(made.location) as opened:
        for n, name in enumerate(opened["names"].asstr()):
            assert np.array_equal(stored[name]["image"], opened["images"][n])
            assert np.array_equal(stored[name]["x"], opened["x"][n])
            assert stored[name]["text"] == opened["text"].asstr()[n]


def test_every_type_has_its_rule(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as opened:
        opened["fixed"] = np.array([b"abc", "ü".encode()], "S3")
        opened.create_dataset("texts", data=[["a", "b"], ["c", "d"]], dtype=h5py.string_dtype())
        opened["big"] = np.array([1, 2], ">i4")
        opened["flag"] = np.array([True, False])
        opened.create_dataset("kind", data=[0, 1], dtype=h5py.enum_dtype({"cat": 0, "dog": 1}, np.int8))
        opened["pair"] = np.array([(1, 2.5, b"x"), (3, 4.5, b"y")], [("a", "i4"), ("b", "f8"), ("c", "S1")])
        opened["opaque"] = np.array([b"a\0b\0", b"\0\0\0\0"], "V4")
        files = opened.create_dataset("files", (2,), h5py.vlen_dtype(np.uint8))
        ragged = opened.create_dataset("ragged", (2,), h5py.vlen_dtype(np.float32))
        for n in range(2):
            files[n] = np.frombuffer(picture(n), np.uint8)
            ragged[n] = np.arange(n + 1)
        opened["wave"] = np.zeros((2, 100), np.int16)
        opened["grid"] = np.arange(12, dtype=">f4").reshape(2, 2, 3)
        opened["fixed"].attrs["unit"] = "m"
        opened.attrs["made"] = np.float64("nan")
    kinds = {
        "fixed": "text",
        "texts": "json",
        "big": "scalar",
        "flag": "scalar",
        "kind": "scalar",
        "pair": "json",
        "opaque": "bytes",
    }
    more = {"files": "image", "ragged": "array", "wave": "audio", "grid": "json"}
    fields = [f"{name}:{kind}={name}" for name, kind in (kinds | more).items()]
    opened = source(path, *fields, "member:scalar=pair.b", audio_rate="8000")
    first, second = values(opened, tmp_path / "w").values()
    assert first.pop("files") == picture(0)
    assert second["ragged"].tolist() == [0, 1]
    first.pop("ragged")
    samples, rate = first.pop("wave")
    assert (samples.shape, rate) == ((100,), 8000)
    assert first == {
        "fixed": "abc",
        "texts": ["a", "b"],
        "big": 1,
        "flag": True,
        "kind": 0,
        "pair": {"a": 1, "b": 2.5, "c": "x"},
        "opaque": b"a\0b\0",
        "grid": [[0, 1, 2], [3, 4, 5]],
        "member": 2.5,
    }
    assert second["fixed"] == "ü"
    assert opened.notes() == {
        "attributes": {"/": {"made": "nan"}, "fixed": {"unit": "m"}},
        "class_names": {"kind": {"0": "cat", "1": "dog"}},
    }


def test_one_group_a_sample(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as opened:
        for n in (10, 2):
            opened[f"data/demo_{n}/obs/x"] = np.arange(n)
            opened[f"data/demo_{n}"].attrs["task"] = f"lift {n}"
        opened["data/demo_2/extra"] = 5
        opened["data/odd"] = 1
        opened.create_group("data/none")
    fields = ["x:array=obs/x,dtype=int64,ndim=1", 'task:text="@task"', "extra:scalar=extra,dtype=int64"]
    opened = source(path, *fields, layout="groups", group="data")
    found = values(opened, tmp_path / "w")
    assert list(found) == [b"demo_10", b"demo_2"]
    assert found[b"demo_2"]["x"].tolist() == [0, 1]
    assert (found[b"demo_2"]["task"], found[b"demo_2"]["extra"], "extra" in found[b"demo_10"]) == ("lift 2", 5, False)
    assert [(record.key, record.code) for record in scan(opened)[1]] == [(b"none", "hdf5"), (b"odd", "hdf5")]


def test_rows_in_order_decompress_each_chunk_once(tmp_path: Path) -> None:
    """The cache holds all chunks of a row, even where they are larger than the default cache."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as opened:
        opened.create_dataset("x", (64, 1 << 16), np.float32, chunks=(64, 1 << 12), compression="gzip")
    made = source(path, "x:array=x,dtype=float32,ndim=1", cache_bytes="1K")
    records, _ = scan(made)
    for limit, wanted in (("1G", 64 * (1 << 16) * 4), ("2M", 2 << 20)):
        config = made.config()
        worker: Any = source_from_config(config | {"options": config["options"] | {"max_chunk_bytes": limit}}, tmp_path)
        worker.load(records[0].locator)
        assert worker._read["x"][0].id.get_access_plist().get_chunk_cache()[1] == wanted
        del worker


# -- what is wrong ------------------------------------------------------------------------------------------------------


def test_unequal_missing_and_single_data_sets_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    path = file(tmp_path / "a.h5", x=np.zeros((3, 2)), y=np.zeros((4, 2)), one=1.0)
    for field, reason in (("y", "'x' has 3, 'y' has 4"), ("z", "no data set 'z'.*x .3, 2."), ("one", "single value")):
        with pytest.raises(SourceError, match=reason):
            convert(
                source(path, "x:array=x,dtype=float64,ndim=1", f"y:array={field},dtype=float64,ndim=1"),
                tmp_path / "out",
                ConvertOptions(workers=1),
            )
        assert not list((tmp_path / "out").glob("*"))
    with pytest.raises(OptionError, match=r"--field.*x \(3, 2\) float64"):
        source(path)
    with pytest.raises(SourceError, match="no group '/data'"):
        scan(source(path, "x:json=x", group="data"))


def test_values_of_other_files_are_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(80))
    other = file(tmp_path / "other.h5", x=np.zeros(10))
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as opened:
        opened["good"] = np.zeros(10)
        opened["linked"] = h5py.ExternalLink(str(other), "x")
        opened["soft"] = h5py.SoftLink("/linked")
        opened["inside"] = h5py.SoftLink("/good")
        opened["loop"] = h5py.SoftLink("/loop")
        opened.create_dataset("external", (10,), np.float64, external=[(str(secret), 0, 80)])
        layout = h5py.VirtualLayout((10,), np.float64)
        layout[:] = h5py.VirtualSource(str(tmp_path / "gone.h5"), "x", (10,))
        opened.create_virtual_dataset("virtual", layout)
    for name, reason in (
        ("linked", "another file"),
        ("soft", "another file"),
        ("external", "stored outside"),
        ("virtual", "virtual"),
        ("loop", "links on the way"),
    ):
        with pytest.raises(SourceError, match=reason):
            scan(source(path, f"x:scalar={name},dtype=float64"))
    assert len(values(source(path, "x:scalar=inside,dtype=float64"), tmp_path / "w")) == 10


def test_a_filter_that_is_not_installed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as opened:
        space = h5py.h5s.create_simple((10,))
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_chunk((5,))
        creation.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (3,))
        h5py.h5d.create(opened.id, b"x", h5py.h5t.NATIVE_DOUBLE, space, creation)
    with pytest.raises(SourceError, match=r"'x' is compressed with the filter.*32015.*hdf5plugin"):
        scan(source(path, "x:scalar=x,dtype=float64"))


def test_claims_of_rows_values_and_chunks_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as opened:
        opened.create_dataset("rows", (1 << 50,), np.int8, chunks=(1 << 10,))
        opened.create_dataset("wide", (2, 1 << 40), np.int8, chunks=(1, 1 << 10))
        opened.create_dataset("chunk", (2, 3 << 30), np.int8, chunks=(1, 3 << 30))
    for name, option in (("rows", "max_rows"), ("wide", "max_value_bytes"), ("chunk", "max_chunk_bytes")):
        with pytest.raises(SourceError, match=option):
            next(source(path, f"x:array={name},dtype=int8,ndim=1").scan())


def test_damage_is_a_bad_sample_and_other_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as opened:
        data = np.arange(40, dtype=np.int64)
        opened.create_dataset("x", data=data, chunks=(10,), fletcher32=True)
    content = bytearray(path.read_bytes())
    content[content.index(np.int64(15).tobytes() + np.int64(16).tobytes())] ^= 1
    path.write_bytes(content)
    opened = source(path, "x:scalar=x,dtype=int64")
    records, _ = scan(opened)
    worker = source_from_config(opened.config(), tmp_path)
    good = []
    for number, record in enumerate(records):
        try:
            good.append(worker.load(record.locator).values["x"])
        except SampleError as error:
            assert (error.field, error.path) == ("x", f"a.h5: row {number}")
    assert good == [*range(10), *range(20, 40)]
    del worker  # the library would go on with the file that it has open
    for data, reason in (
        (b"", "empty file"),
        (b"x" * 1000, "as HDF5"),
        (content[: len(content) // 2], "as HDF5.*truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=reason):
            scan(source(path, "x:scalar=x,dtype=int64"))


def test_a_file_that_changes_after_the_scan_is_no_sample(tmp_path: Path) -> None:
    opened = source(file(tmp_path / "a.h5", x=np.arange(3)), "x:scalar=x,dtype=int64")
    records, _ = scan(opened)
    file(tmp_path / "a.h5", x=np.arange(4))
    with pytest.raises(SampleError, match="changed"):
        source_from_config(opened.config(), tmp_path).load(records[0].locator)


@pytest.mark.parametrize("seed", range(15))
def test_flipped_bytes_give_rows_or_named_errors(tmp_path: Path, seed: int) -> None:
    made = hdf5(tmp_path)
    content = bytearray(Path(made.location).read_bytes())
    rng = random.Random(seed)
    for _ in range(4):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    Path(made.location).write_bytes(content)
    try:
        opened = made.open()
        records, _ = scan(opened)
    except (SourceError, OptionError):
        return
    worker = source_from_config(opened.config(), tmp_path)
    for record in records:
        try:
            worker.load(record.locator)
        except SampleError:
            continue
