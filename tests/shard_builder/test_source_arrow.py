"""Arrow data of ``save_to_disk`` and single files: batches are found at random, and damaged or incomplete copies are named."""

from __future__ import annotations

import functools
import json
import random
import shutil
from pathlib import Path

import _kinds
import pyarrow as pa
import pytest
from _kinds import FIXTURES, TABLE_FIELDS, stream, table
from _tars import scan, values

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.convert import convert
from shard_builder.options import ConvertOptions
from shard_builder.sources import source_from_config
from shard_builder.sources.arrow_stream import ArrowFile

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5\n"
SAVED = FIXTURES / "hugging_face" / "saved"


source = functools.partial(_kinds.source, "arrow")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A copy of a saved DatasetDict."""
    return Path(shutil.copytree(SAVED, tmp_path / "saved"))


def test_streams_and_files_give_the_same_rows_in_any_order(tmp_path: Path) -> None:
    rows = table(40)
    stream(rows, tmp_path / "s.arrow")
    with pa.OSFile(str(tmp_path / "f.arrow"), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=11)
    with (
        pa.OSFile(str(tmp_path / "c.arrow"), "wb") as file,
        pa.ipc.new_stream(file, rows.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer,
    ):
        writer.write_table(rows, max_chunksize=5)
    for name in "sfc":
        opened = source(tmp_path / f"{name}.arrow", "text:text=text", "boxes:json=boxes")
        records, bad = scan(opened)
        assert (len(records), bad) == (40, [])
        worker = source_from_config(opened.config(), tmp_path)
        for number in random.Random(1).sample(range(40), 40):
            expected = {"text": f"row {number} ü", "boxes": [{"x": number, "y": [1.5, float(number)]}] * (number % 3)}
            assert worker.load(records[number].locator).values == expected


def test_a_batch_is_read_once_for_rows_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = source(stream(table(30), tmp_path / "s.arrow", 10), "text:text=text")
    records, _ = scan(opened)
    reads: list[int] = []
    read = ArrowFile.read
    monkeypatch.setattr(ArrowFile, "read", lambda self, offset, *rest: reads.append(offset) or read(self, offset, *rest))
    worker = source_from_config(opened.config(), tmp_path)
    for record in records:
        worker.load(record.locator)
    assert len(reads) == 3


def test_splits_in_their_order_or_one_of_them(saved: Path) -> None:
    everything = values(source(saved), saved.parent / "w")
    assert len(everything) == 10
    assert list(values(source(saved, split="test"), saved.parent / "w")) == [b"%012d" % n for n in range(3)]
    assert [sample["caption"] for sample in everything.values()] == [f"picture {n} é" for n in range(10)]
    assert len(values(source(saved / "train"), saved.parent / "w")) == 7
    with pytest.raises(SourceError, match="train, test"):
        source(saved, split="validation")
    with pytest.raises(SourceError, match="no splits"):
        source(saved / "train", split="train")


# -- what is wrong ------------------------------------------------------------------------------------------------------


BROKEN = [b"", b"{", b"[]", POINTER]
NO_NAMES = b'{"splits": 3, "_data_files": 3}'


@pytest.mark.parametrize(
    ("name", "data"),
    [(name, data) for name in ("dataset_dict.json", "train/state.json", "train/dataset_info.json") for data in BROKEN]
    + [(name, NO_NAMES) for name in ("dataset_dict.json", "train/state.json")],
)
def test_descriptions_that_are_empty_or_no_json_are_named(saved: Path, name: str, data: bytes) -> None:
    (saved / name).write_bytes(data)
    with pytest.raises(SourceError, match=rf"{Path(name).name}|git lfs pull"):
        source(saved)


def test_missing_parts_are_named(saved: Path) -> None:
    (saved / "train" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(SourceError, match="data-00001-of-00002"):
        convert(source(saved), saved.parent / "out", ConvertOptions(workers=1))
    assert not list((saved.parent / "out").glob("*"))
    (saved / "train" / "dataset_info.json").unlink()
    with pytest.raises(SourceError, match="dataset_info"):
        source(saved)
    (saved / "train" / "state.json").unlink()
    with pytest.raises(SourceError, match=r"train: no state\.json"):
        source(saved)


def test_names_that_lead_outside_and_indices_are_refused(saved: Path) -> None:
    path = saved / "train" / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"_data_files": [{"filename": "../../secret.arrow"}]}))
    with pytest.raises(SourceError, match="secret"):
        source(saved)
    path.write_text(json.dumps(state | {"_indices_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(SourceError, match="flatten_indices"):
        source(saved)
    (saved / "dataset_dict.json").write_text('{"splits": ["../train"]}')
    with pytest.raises(SourceError, match="inside"):
        source(saved)


def test_a_truncated_stream_keeps_what_lies_before_and_reports_the_rest(tmp_path: Path) -> None:
    path = stream(table(40), tmp_path / "s.arrow", 10)
    whole = path.read_bytes()
    records, _ = scan(source(path, "text:text=text", key="#"))
    starts = sorted({source(path, "text:text=text").place(record.locator) for record in records})
    assert len(starts) == 40
    for cut in (len(whole) - 4, len(whole) - 9, len(whole) // 2):
        path.write_bytes(whole[:cut])
        for key in ("#", "id"):
            records, bad = scan(source(path, "text:text=text", key=key))
            assert [record.code for record in bad] == ["truncated"]
            assert len(records) == {4: 40, 9: 30}.get(len(whole) - cut, 10)  # whole batches
    path.write_bytes(whole[:20])
    with pytest.raises(SourceError, match="truncated"):
        source(path, "text:text=text")


def test_other_files_and_empty_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "s.arrow"
    for data, reason in (
        (b"", "empty"),
        (POINTER, "git lfs pull"),
        (b"x" * 100, "no Arrow message"),
        (b"\xff" * 64, "truncated|head"),
    ):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=reason):
            source(path, "t:text=t")


def test_dictionaries_and_large_batches_are_refused(tmp_path: Path) -> None:
    rows = pa.table({"t": pa.array(["x", "y"]).dictionary_encode()})
    _, bad = scan(source(stream(rows, tmp_path / "s.arrow"), "t:text=t"))
    assert [record.code for record in bad] == ["unsupported"]
    _, bad = scan(source(stream(table(40), tmp_path / "t.arrow"), "t:text=text", max_group_bytes="1K"))
    assert [record.code for record in bad] == ["too-large"]


@pytest.mark.parametrize("seed", range(30))
def test_flipped_bytes_give_rows_or_named_errors(tmp_path: Path, seed: int) -> None:
    """Whatever a head or an offset claims: no crash, no memory by claims, no other exception."""
    path = stream(table(20), tmp_path / "s.arrow", 10)
    data = bytearray(path.read_bytes())
    rng = random.Random(seed)
    for _ in range(4):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    try:
        opened = source(path, *TABLE_FIELDS)
        records, _ = scan(opened)
    except (SourceError, OptionError):
        return
    worker = source_from_config(opened.config(), tmp_path)
    for record in records:
        try:
            worker.load(record.locator)
        except SampleError:
            continue
