"""Token sequences of one length are read in the background while the consumer has the slot before: the same batches, the same errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import batchkit
import numpy as np
import pytest

import lfdata.transforms as T
from benchmarks.synthetic import write_tokens_dataset
from lfdata import Loader
from lfdata.errors import CorruptError, StorageError
from lfdata.format import gather

pytestmark = pytest.mark.skipif(gather.native is None, reason="the native module is not built")
LENGTH, ROWS = 1024, 9000
FIELDS: dict[str, Any] = {"tokens": [T.Tokens(LENGTH)]}


@pytest.fixture(scope="module")
def rows() -> Any:
    return np.random.default_rng(0).integers(0, 1 << 16, (ROWS, LENGTH), dtype=np.uint16)


@pytest.fixture(scope="module")
def data(rows: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "d"
    write_tokens_dataset(path, rows)
    return path


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Reads that were begun."""
    found: list[Any] = []
    start = gather.native.start_mapped  # type: ignore[union-attr]

    def counted(*arguments: Any) -> Any:
        found.append(start(*arguments))
        return found[-1]

    monkeypatch.setattr(gather.native, "start_mapped", counted)
    return found


def _loader(path: Path, **options: Any) -> Loader:
    return Loader(path, 16, FIELDS, **{"threads": 2, "tail": "pad", "seed": 3} | options)


def test_batches_are_those_of_the_source(data: Path, rows: Any, begun: list[Any]) -> None:
    loader = _loader(data)
    for _ in range(2):
        for batch in loader:
            assert np.array_equal(batch["tokens"].numpy(), rows[batch["__index__"].numpy()])
            assert batch["tokens.count"].eq(LENGTH).all()
    assert loader.stats()["steps_a_slot"] == 64 and len(begun) >= 2 * 9 and loader.stats()["bad"] == 0


def test_moving_about_leaves_nothing_of_what_was_begun(data: Path, rows: Any, begun: list[Any]) -> None:
    loader = _loader(data)
    states = {}
    for number, batch in enumerate(loader):
        states[number] = (loader.state_dict(), batch["__index__"].tolist())
        if number == 200:
            break
    for number in (3, 150, 64, 63, 199, 0):
        loader.load_state_dict(states[number][0])
        batch = next(iter(loader))
        assert batch["__index__"].tolist() == states[number + 1][1]
        assert np.array_equal(batch["tokens"].numpy(), rows[batch["__index__"].numpy()])
    loader.set_epoch(5)
    assert all(np.array_equal(batch["tokens"].numpy(), rows[batch["__index__"].numpy()]) for batch in loader)
    loader.close()
    # Held batches outlive the loader and what it had begun.
    held = [batch["tokens"] for _, batch in zip(range(130), _loader(data, shuffle="sequential"), strict=False)]
    assert np.array_equal(np.concatenate([one.numpy() for one in held]), rows[: 130 * 16])
    assert begun


def test_damage_is_named_as_if_it_was_read_in_turn(data: Path, rows: Any, tmp_path: Path, begun: list[Any]) -> None:
    path = tmp_path / "d"
    write_tokens_dataset(path, rows[:3000])
    batchkit.spoil(path, [2001], "tokens")
    seen = 0
    with pytest.raises(CorruptError, match=r"index 2001, key b'2001', field 'tokens'"):
        for batch in _loader(path, shuffle="sequential"):
            assert np.array_equal(batch["tokens"].numpy(), rows[batch["__index__"].numpy()])
            seen += 16
    assert seen == 2000 and begun
    loader = _loader(path, bad_samples="mask")
    for batch in loader:
        good = batch["__mask__"].numpy()
        assert np.array_equal(batch["tokens"].numpy()[good], rows[batch["__index__"].numpy()[good]])
    assert [event.index for event in loader.stats()["events"]] == [2001]


def test_one_thread_reads_in_turn(data: Path, begun: list[Any]) -> None:
    assert sum(1 for _ in _loader(data, threads=1)) == -(-ROWS // 16) and not begun


def test_planning_ahead_that_fails_is_told_in_its_turn(data: Path, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = _loader(data, shuffle="sequential")
    plan = loader._producer.plan
    work = plan.work

    def failing(epoch: int, first: int, steps: int) -> Any:
        if first >= 128:
            raise StorageError("index", "read", 5, "the index cannot be read")
        return work(epoch, first, steps)

    monkeypatch.setattr(plan, "work", failing)
    batches = iter(loader)
    # The second slot is begun with the first; the third, with the second, fails.
    got = [next(batches)["tokens"].numpy() for _ in range(128)]
    assert np.array_equal(np.concatenate(got), rows[: 128 * 16])
    with pytest.raises(StorageError, match="the index cannot be read"):
        next(batches)
    monkeypatch.setattr(plan, "work", work)
    assert sum(1 for _ in loader) == len(loader)
