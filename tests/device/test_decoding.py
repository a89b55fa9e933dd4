"""Who decodes pictures, where DALI is not installed: what is said then, and what the automatic choice goes by."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import lfdata.transforms as T
from lfdata import DeviceLoader, Loader
from lfdata.device import decoding
from lfdata.device.decoding import Measured, measured, runs
from lfdata.errors import MissingExtraError, OptionError


def loader(path: Path) -> Loader:
    return Loader(path, 8, {"image": [T.RandomResizedCrop(24)], "label": None}, engine="inline")


def test_without_dali_the_error_names_the_extra(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    plain = loader(pictures)
    with pytest.raises(MissingExtraError, match=r"lfdata\[dali\]"):
        DeviceLoader(plain, "cpu", decode="dali")
    assert "image" in next(iter(plain)) and "image.stored" not in next(iter(plain)), "the loader is as it was"


@pytest.mark.parametrize("decode", ["cpu", "auto"])
def test_without_a_gpu_the_loader_decodes(pictures: Path, decode: str) -> None:
    ours, found = loader(pictures), DeviceLoader(loader(pictures), "cpu", decode=decode)
    assert all(torch.equal(a["image"], b["image"]) for a, b in zip(ours, found, strict=True))
    assert found.stats()["decoding"] is None


def test_options_are_checked(pictures: Path) -> None:
    with pytest.raises(OptionError, match="'cpu', 'dali', 'auto'"):
        DeviceLoader(loader(pictures), "cpu", decode="gpu")
    with pytest.raises(OptionError, match="decode_threads"):
        DeviceLoader(loader(pictures), "cpu", decode_threads=0)


def test_the_automatic_choice_goes_by_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured("a GPU that nobody measured", 16) == "cpu"
    monkeypatch.setattr(
        decoding, "MEASURED", (Measured("GPU X", (1, 4), "dali", "x.json"), Measured("GPU", (8, 8), "cpu", "y.json"))
    )
    assert [measured("GPU X 80GB", cores) for cores in (1, 4, 5, 8)] == ["dali", "dali", "cpu", "cpu"]


def test_every_line_of_the_table_has_its_record_and_is_in_the_docs() -> None:
    root = Path(__file__).parents[2]
    table = (root / "docs/scheduler.md").read_text()
    for one in decoding.MEASURED:
        assert (root / "benchmarks/results" / one.record).is_file() and one.record in table and one.gpu in table


def test_stretches_of_rows() -> None:
    assert runs([True, True, False, True]) == [(0, 2), (3, 4)]
    assert runs([False]) == [] and runs([]) == []


def test_a_budget_of_the_loader_counts_pixels_it_decodes(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lfdata.device.decoding.version", lambda: "2.4")
    loader = Loader(pictures, 4, {"image": [T.CenterCrop(16)]}, max_bytes="64MiB")
    with pytest.raises(OptionError, match="max_bytes counts pixels"):
        DeviceLoader(loader, "cpu", decode="dali")
