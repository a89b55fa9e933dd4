"""Megatron tokens: ids exactly, documents or sequences, and an index that lies about its data."""

from __future__ import annotations

import functools
import random
import struct
from pathlib import Path
from typing import Any

import _kinds
import numpy as np
import pytest
from _kinds import megatron, megatron_index
from _tars import scan, values

import lfdata
from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.convert import convert
from shard_builder.options import ConvertOptions
from shard_builder.sources import guess_kind, source_from_config

DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}


source = functools.partial(_kinds.source, "megatron")


def write(folder: Path, ids: Any, index: bytes) -> Path:
    (folder / "t.bin").write_bytes(np.asarray(ids).tobytes())
    (folder / "t.idx").write_bytes(index)
    return folder / "t"


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_ids_of_every_type_come_back_exactly(code: int, tmp_path: Path) -> None:
    top = int(np.iinfo(DTYPES[code]).max)
    ids = np.array([0, 1, top, 2, top - 1, 5], DTYPES[code])
    path = write(tmp_path, ids, megatron_index([2, 0, 3, 1], [0, 2, 2, 4], code))
    for ending in ("", ".idx", ".bin"):
        assert guess_kind(f"{path}{ending}") == "megatron"
    assert convert(source(path), tmp_path / "out", ConvertOptions(workers=1)).samples == 3
    stored = [sample["tokens"].tolist() for sample in lfdata.open(tmp_path / "out")]
    assert stored == [[0, 1], [], [top, 2, top - 1, 5]]


def test_sequences_lengths_and_modes(tmp_path: Path) -> None:
    path = write(tmp_path, np.arange(6, dtype="<i4"), megatron_index([2, 0, 3, 1], [0, 3, 4], 4, [0, 1, 0, -1]))
    fields = ["t:tokens=tokens,vocab=10", "n:array=lengths,dtype=int32,ndim=1", "m:array=modes,dtype=int8,ndim=1"]
    documents = values(source(path, *fields), tmp_path / "w")
    assert [[v.tolist() for v in sample.values()] for sample in documents.values()] == [
        [[0, 1, 2, 3, 4], [2, 0, 3], [0, 1, 0]],
        [[5], [1], [-1]],
    ]
    sequences = values(source(path, *fields, samples="sequences"), tmp_path / "w")
    assert [sample["t"].tolist() for sample in sequences.values()] == [[0, 1], [], [2, 3, 4], [5]]
    assert list(sequences)[-1] == b"000000000003"
    plain = write(tmp_path, np.arange(6, dtype="<i4"), megatron_index([6], [0, 1], 4))
    with pytest.raises(SourceError, match="no modes"):
        source(plain, *fields)


def test_sequences_may_lie_in_any_order(tmp_path: Path) -> None:
    path = write(tmp_path, np.arange(6, dtype="<u2"), megatron_index([3, 3], [0, 2], places=[6, 0]))
    assert [sample["tokens"].tolist() for sample in values(source(path), tmp_path / "w").values()] == [[3, 4, 5, 0, 1, 2]]


def test_floats_are_arrays_of_the_stated_reading(tmp_path: Path) -> None:
    path = write(tmp_path, np.array([0.5, -1.5], "<f8"), megatron_index([2], [0, 1], 6))
    with pytest.raises(OptionError, match=r"dtype=float64"):
        source(path)
    found = values(source(path, "v:array=tokens,dtype=float64,ndim=1"), tmp_path / "w")
    assert found[b"000000000000"]["v"].tolist() == [0.5, -1.5]
    path = write(tmp_path, np.array([0.5, -1.5], "<f4"), megatron_index([2], [0, 1], 7))
    assert values(source(path, "v:array=tokens,dtype=float32,ndim=1"), tmp_path / "w")[b"000000000000"]["v"].tolist() == [
        0.5,
        -1.5,
    ]
    with pytest.raises(SourceError, match="outside"):
        scan(source(path, "v:array=tokens,dtype=float64,ndim=1", floats="old"))


def test_documents_over_many_blocks_are_summed_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard_builder.sources.megatron._BLOCK", 7)
    made = megatron(tmp_path)
    for samples in ("documents", "sequences"):
        opened = source(made.location, samples=samples)
        records, _ = scan(opened)
        worker = source_from_config(opened.config(), tmp_path)
        loaded = [worker.load(record.locator).values["tokens"] for record in records]
        assert [record.size for record in records] == [2 * len(tokens) for tokens in loaded]
        assert np.concatenate(loaded).tobytes() == (tmp_path / "t.bin").read_bytes()


# -- what is wrong ------------------------------------------------------------------------------------------------------


def test_ids_outside_the_vocabulary_are_bad_samples(tmp_path: Path) -> None:
    path = write(tmp_path, np.array([1, -2], "<i4"), megatron_index([1, 1], [0, 1, 2], 4))
    summary = convert(source(path), tmp_path / "out", ConvertOptions(workers=1, on_error="skip"))
    assert (summary.samples, summary.errors) == (1, 1)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (megatron_index([4, 3], [0, 2]), "sequence 1 of 3 tokens"),
        (megatron_index([4, 1], [0, 2]), "has 12 bytes, the index describes 10"),
        (megatron_index([4, -2], [0, 2]), "sequence 1 of -2"),
        (megatron_index([4, 2], [0, 2], places=[0, 2**62]), "lies outside"),
        (megatron_index([4, 2], [0, 2], places=[0, -8]), "lies outside"),
        (megatron_index([4, 2], [0, 2], places=[0, 7]), "lies outside"),
        (megatron_index([4, 2], [1, 2]), "do not begin"),
        (megatron_index([4, 2], [0, 2, 1, 2]), "out of order"),
        (megatron_index([4, 2], [0, 1]), "end at sequence 1 of 2"),
        (megatron_index([4, 2], [0, 5]), "end at sequence 5 of 2"),
        (megatron_index([4, 2], [0, 2])[:-1], "truncated or damaged"),
        (megatron_index([4, 2], [0, 2]) + b"x", "truncated or damaged"),
        (megatron_index([4, 2], [0, 2])[:20], "truncated"),
        (b"", "empty file"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2**60, 2**60), "truncated or damaged"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2**64 - 1, 0), "truncated or damaged"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 2, 8, 0, 1), "version 2"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 9, 0, 1), "dtype 9"),
        (b"TNTIDX\0\0" + bytes(60), "not an index"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
)
def test_an_index_that_does_not_fit_is_named_and_nothing_is_written(index: bytes, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path, np.arange(6, dtype="<u2"), index)
    with pytest.raises(SourceError, match=reason):
        convert(source(path), tmp_path / "out", ConvertOptions(workers=1))
    assert not list((tmp_path / "out").glob("*"))


def test_missing_halves_and_large_samples_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, np.arange(6, dtype="<u2"), megatron_index([4, 2], [0, 1, 2]))
    records, bad = scan(source(path, max_sample_bytes="7"))
    assert (len(records), [record.code for record in bad]) == (1, ["too-large"])
    (tmp_path / "t.bin").unlink()
    with pytest.raises(SourceError, match=r"t\.bin: cannot be opened"):
        source(path)


def test_files_that_change_after_the_scan_are_no_samples(tmp_path: Path) -> None:
    path = write(tmp_path, np.arange(6, dtype="<u2"), megatron_index([4, 2], [0, 1, 2]))
    opened = source(path)
    records, _ = scan(opened)
    worker = source_from_config(opened.config(), tmp_path)
    (tmp_path / "t.bin").write_bytes(b"x")
    with pytest.raises(SampleError, match="changed"):
        worker.load(records[1].locator)
    write(tmp_path, np.arange(6, dtype="<u2"), megatron_index([2, 4], [0, 1, 2]))
    with pytest.raises(SampleError, match="changed"):
        source_from_config(opened.config(), tmp_path).load(records[1].locator)


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bytes_of_the_index_give_ids_or_a_named_error(tmp_path: Path, seed: int) -> None:
    made = megatron(tmp_path)
    content = bytearray((tmp_path / "t.idx").read_bytes())
    rng = random.Random(seed)
    for _ in range(2):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    (tmp_path / "t.idx").write_bytes(content)
    try:
        opened = source(made.location)
        records, _ = scan(opened)
    except (SourceError, OptionError):
        return
    worker = source_from_config(opened.config(), tmp_path)
    for record in records:
        worker.load(record.locator)
