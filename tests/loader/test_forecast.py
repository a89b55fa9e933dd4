"""The bytes of the next batches, before they are made: none too many, none too few."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import batchkit
import numpy as np
import pytest

import lfdata.transforms as T
from lfdata import Loader


def _made(loader: Loader, count: int) -> list[dict[str, int]]:
    """Bytes of the next batches, as they come."""

    def epochs() -> Any:
        while True:
            yield from loader

    return [{name: array.nbytes for name, array in batch.items()} for batch in itertools.islice(epochs(), count)]


def _told(forecast: Any) -> list[dict[str, int]]:
    return [{name: int(values[n]) for name, values in forecast.bytes.items()} for n in range(len(forecast))]


ORDERS: dict[str, dict[str, Any]] = {
    "full": {},
    "sequential": {"shuffle": "sequential"},
    "pad": {"tail": "pad"},
    "accumulate": {"accumulate": 2},
    "rank": {"rank": 1, "world_size": 3},
    "mixture": {"mixture": {"weights": [3, 1], "block": 12}},
    "buckets": {"buckets": {"field": "ids", "window": 12}},
}


@pytest.mark.parametrize("how", ORDERS)
def test_every_byte_of_two_epochs_is_foretold(tmp_path: Path, how: str) -> None:
    sources = [batchkit.write_all_kinds(tmp_path / name, 41, seed=seed) for seed, name in enumerate("ab")]
    options = {"batch_size": 6, "seed": 3, "engine": "thread", "threads": 2} | ORDERS[how]
    loader = Loader(sources if how == "mixture" else sources[0], **options)
    count = 2 * len(loader) + 1
    told = loader.forecast(count)
    assert len(told) == count
    made = _made(loader, count)
    assert _told(told) == made
    assert told.total.tolist() == [sum(batch.values()) for batch in made]
    assert told.epoch.tolist() == [0] * len(loader) + [1] * len(loader) + [2] and told.batch[-1] == 0
    # Batches that differ: a forecast that always says the same would fail.
    assert len(set(told.total.tolist())) > 3
    loader.close()


def test_from_the_middle_and_after_a_state(tmp_path: Path) -> None:
    path = batchkit.write_all_kinds(tmp_path / "a", 41)
    loader = Loader(path, 4, seed=1, engine="inline")
    whole = _told(loader.forecast(len(loader)))
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert _told(loader.forecast(4)) == whole[3:7]
    other = Loader(path, 4, seed=1, engine="inline")
    other.load_state_dict(loader.state_dict())
    assert _told(other.forecast(4)) == whole[3:7] == _made(other, 4)
    assert len(loader.forecast(0)) == 0 and loader.forecast(0).total.tolist() == []


def test_packed_rows(tmp_path: Path) -> None:
    path = batchkit.write_all_kinds(tmp_path / "a", 60)
    loader = Loader(path, 3, {"ids": None}, packing={"field": "ids", "capacity": 40, "window": 16}, tail="pad", engine="inline")
    count = 2 * len(loader)
    told = _told(loader.forecast(count))
    assert told == _made(loader, count) and len({batch["ids.boundaries"] for batch in told}) > 1


def test_transforms_of_a_fixed_shape_and_partners(tmp_path: Path) -> None:
    path = batchkit.write_all_kinds(tmp_path / "a", 24)
    fields = {"image": [T.RandomResizedCrop(16)], "sound": [T.AudioWindow(32)], "ids": [T.Tokens(8)], "label": None}
    loader = Loader(path, 8, fields, batch_transforms=[T.MixUp(field="image", labels=["label"])], engine="thread", threads=1)
    told = _told(loader.forecast(3))
    assert told == _made(loader, 3) and told[0]["image"] == 8 * 16 * 16 * 3
    loader.close()


def test_bad_samples_take_less_and_no_samples_take_nothing(tmp_path: Path) -> None:
    path = batchkit.write_all_kinds(tmp_path / "a", 24)
    batchkit.spoil(path, [3], "caption")
    loader = Loader(path, 8, shuffle="sequential", bad_samples="mask", engine="inline")
    told, made = _told(loader.forecast(3)), _made(loader, 3)
    assert told[1:] == made[1:] and told[0]["caption"] > made[0]["caption"] and told[0]["label"] == made[0]["label"]
    empty = Loader(batchkit.write_all_kinds(tmp_path / "none", 0), 8, {"label": None})
    assert len(empty.forecast(5)) == 0


def test_many_rows_are_looked_up_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = batchkit.write_all_kinds(tmp_path / "a", 41)
    loader = Loader(path, 4, engine="inline")
    whole = loader.forecast(25)
    monkeypatch.setattr("lfdata.loader.forecast.ROWS_AT_ONCE", 12)
    parts = loader.forecast(25)
    assert _told(parts) == _told(whole) and np.array_equal(parts.epoch, whole.epoch)
