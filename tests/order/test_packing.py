"""Buckets and packing: the published vectors, the second implementation, every sample once, and the cache of row counts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import independent_order
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import digest, table

from lfdata.errors import OptionError
from lfdata.order.mixture import Mixture
from lfdata.order.order import Batches, Order
from lfdata.order.packing import TOO_LONG, Buckets, Packing, Row, pack
from lfdata.order.samples import Samples

TABLE = np.array([independent_order.mix(index) % 700 for index in range(5000)], np.int64)
numbers = st.lists(st.integers(0, 60), max_size=80)


def lengths(samples: Samples) -> Any:
    return TABLE[samples.index]


def flat(rows: list[Row]) -> list[int]:
    return [
        number
        for row in rows
        for part in ([len(row.samples)], row.samples.index, row.begin, row.starts)
        for number in np.asarray(part).tolist()
    ]


@pytest.mark.parametrize("row", table("Buckets"), ids=lambda row: "-".join(row[:5]))
def test_the_published_buckets(row: list[str]) -> None:
    seed, epoch, n, window, group = map(int, row[:5])
    order = Order(n, seed)
    found = Buckets(order, lengths, window, group, seed).samples(epoch, np.arange(n)).index
    assert found[:8].tolist() == [int(index) for index in row[5].split()] and digest(found) == row[6]
    below = independent_order.epoch_of(n, seed, epoch, "full")
    places = independent_order.buckets([int(TABLE[index]) for index in below], seed, epoch, window, group)
    assert [below[place] for place in places] == found.tolist()


@pytest.mark.parametrize("row", table("Packing"), ids=lambda row: "-".join(row[:7]))
def test_the_published_rows(row: list[str]) -> None:
    seed, epoch, n, window, capacity = map(int, row[:5])
    most = None if row[6] == "-" else int(row[6])
    packing = Packing(Order(n, seed), lengths, window, capacity, too_long=row[5], max_samples_per_row=most, seed=seed)
    rows = packing.row(epoch, np.arange(packing.rows(epoch)))
    assert (len(rows), sum(int(each.starts[-1]) for each in rows)) == (int(row[7]), int(row[8])) and digest(flat(rows)) == row[
        9
    ]
    below = independent_order.epoch_of(n, seed, epoch, "full")
    plain = independent_order.packing([int(TABLE[index]) for index in below], seed, epoch, window, capacity, row[5], most)
    again: list[int] = []
    for items in plain:
        ends = np.cumsum([0] + [item[2] for item in items]).tolist()
        again += [len(items), *(below[item[0]] for item in items), *(item[1] for item in items), *ends]
    assert digest(again) == row[9]


@settings(deadline=None, max_examples=60)
@given(numbers, st.integers(1, 12), st.integers(1, 4), st.integers(0, 5))
def test_buckets_are_a_permutation_of_each_window(tokens: list[int], group: int, times: int, epoch: int) -> None:
    order, window = Order(len(tokens), 1), group * times
    held = np.array(tokens, np.int64)
    buckets = Buckets(order, lambda samples: held[samples.index], window, group, 2)
    found = buckets.samples(epoch, np.arange(buckets.n)).index
    below = order.indices(epoch, np.arange(order.n))
    for start in range(0, order.n, window):
        assert sorted(found[start : start + window].tolist()) == sorted(below[start : start + window].tolist())
    places = independent_order.buckets(held[below].tolist(), 2, epoch, window, group)
    assert below[places].tolist() == found.tolist() if len(tokens) else not len(found)
    alone = Buckets(order, lambda samples: held[samples.index], window, group, 2)
    for position in range(0, order.n, 7):
        assert alone.samples(epoch, [position]).index.tolist() == [found[position]]


def test_global_batches_of_buckets_are_of_like_length_and_in_random_order() -> None:
    order = Order(4096 + 100, 0)
    buckets = Buckets(order, lengths, 1024, 64)
    batches = Batches(buckets.n, 64)
    spread, middle = [], []
    for step in range(len(batches)):
        of = lengths(buckets.samples(0, batches.positions(step)[0]))
        spread.append(int(of.max() - of.min()))
        middle.append(int(np.median(of)))
    assert max(spread[:64]) < 120 and np.mean(spread[:64]) < 60, "all are below 700"
    assert abs(np.corrcoef(middle[1:64], middle[:63])[0, 1]) < 0.4, "neither rising nor falling"


@settings(deadline=None, max_examples=100)
@given(
    numbers,
    st.integers(1, 30),
    st.integers(1, 50),
    st.sampled_from(TOO_LONG),
    st.one_of(st.none(), st.integers(1, 5)),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_rows_hold_every_sample_once_and_both_implementations_agree(
    tokens: list[int], window: int, capacity: int, too_long: str, most: int | None, epoch: int, random: Any
) -> None:
    order, held = Order(len(tokens), 1), np.array(tokens, np.int64)

    def make() -> Packing:
        options = {"too_long": too_long, "max_samples_per_row": most}
        return Packing(order, lambda samples: held[samples.index], window, capacity, seed=4, **options)  # type: ignore[arg-type]

    packing = make()
    rows = packing.row(epoch, np.arange(packing.rows(epoch)))
    seen: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        taken = np.diff(row.starts)
        assert row.starts[0] == 0 and row.starts[-1] <= capacity and len(row.samples) == len(taken) == len(row.begin) >= 1
        assert most is None or len(taken) <= most
        ids = [place for count in taken for place in range(count)]
        assert row.position_ids().tolist() == ids
        for index, begin, count in zip(row.samples.index.tolist(), row.begin.tolist(), taken.tolist(), strict=True):
            seen.setdefault(index, []).append((begin, begin + count))
    for index, count in enumerate(tokens):
        pieces = sorted(seen.pop(index, []))
        if too_long == "drop" and count > capacity:
            assert not pieces
        elif too_long == "split":
            assert [piece[0] for piece in pieces[1:]] == [piece[1] for piece in pieces[:-1]]
            assert pieces[0][0] == 0 and pieces[-1][1] == count
        else:
            assert pieces == [(0, min(count, capacity))]
    assert not seen
    below = order.indices(epoch, np.arange(order.n))
    plain = independent_order.packing(held[below].tolist(), 4, epoch, window, capacity, too_long, most)
    mine = [
        list(zip(row.samples.index.tolist(), row.begin.tolist(), np.diff(row.starts).tolist(), strict=True)) for row in rows
    ]
    assert mine == [[(int(below[item[0]]), *item[1:]) for item in items] for items in plain]
    total = sum(item[2] for items in plain for item in items)
    assert packing.efficiency(epoch) == (total / (len(rows) * capacity) if rows else 1.0)
    asked = [random.randrange(len(rows)) for _ in range(6)] if rows else []
    assert flat(make().row(epoch, asked)) == flat([rows[number] for number in asked])


def test_packing_is_quick_and_wastes_little() -> None:
    tokens = np.random.default_rng(0).lognormal(5.5, 1, 4096).astype(np.int64).clip(1, 2048)
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        _, rows = pack(tokens, 2048)
        best = min(best, time.perf_counter() - start)
    assert rows <= 1.01 * tokens.sum() / 2048
    assert best < 0.05


def test_the_cache_is_used_and_repaired(tmp_path: Path) -> None:
    asked: list[int] = []

    def counted(samples: Samples) -> Any:
        asked.append(len(samples))
        return lengths(samples)

    def rows(digest: str = "one", epoch: int = 0, **options: Any) -> int:
        asked.clear()
        return Packing(Order(1000), counted, 128, 1024, cache=tmp_path / "cache", digest=digest, **options).rows(epoch)

    expected = rows()
    assert asked and rows() == expected and not asked
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:-1], b"", whole[:8] + bytes([whole[8] ^ 1]) + whole[9:], whole + b"x"):
        file.write_bytes(damaged)
        assert rows() == expected and asked and file.read_bytes() == whole
    for other in ({"digest": "two"}, {"epoch": 1}, {"too_long": "drop"}, {"max_samples_per_row": 2}):
        rows(**other)  # type: ignore[arg-type]
        assert asked, other
    assert len(list((tmp_path / "cache").iterdir())) == 5, "no temporary file is left"
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    assert Packing(Order(1000), lengths, 128, 1024, cache=blocked / "below", digest="one").rows(0) == expected


def test_mixtures_can_be_packed_and_put_in_buckets() -> None:
    mixture = Mixture([Order(300, 1), Order(100, 2)], weights=[1, 1], block=16)
    packing = Packing(Buckets(mixture, lengths, 64, 16), lengths, 64, 1400)
    found = [
        (source, epoch, index)
        for row in packing.row(0, np.arange(packing.rows(0)))
        for source, epoch, index in zip(row.samples.source, row.samples.epoch, row.samples.index, strict=True)
    ]
    all_samples = mixture.samples(0, np.arange(mixture.n))
    assert sorted(found) == sorted(zip(all_samples.source, all_samples.epoch, all_samples.index, strict=True))


def test_what_makes_no_sense_is_refused() -> None:
    order = Order(10)
    wrong: list[Any] = [
        lambda: Buckets(order, lengths, 100, 32),
        lambda: Buckets(order, lengths, 0, 0),
        lambda: Packing(order, lengths, 0, 10),
        lambda: Packing(order, lengths, 10, 0),
        lambda: Packing(order, lengths, 10, 10, max_samples_per_row=0),
        lambda: Packing(order, lengths, 10, 10, too_long="wrap"),
        lambda: Packing(order, lengths, 10, 10, cache="somewhere"),
        lambda: Packing(order, lambda samples: -TABLE[: len(samples)] - 1, 10, 10).rows(0),
        lambda: Packing(order, lambda samples: TABLE[:3], 10, 10).rows(0),
        lambda: Buckets(order, lambda samples: TABLE[: len(samples)] / 2, 10, 10).samples(0, [0]),
    ]
    for call in wrong:
        with pytest.raises(OptionError):
            call()
    with pytest.raises(OptionError, match="such as 96"):
        Buckets(order, lengths, 100, 32)
    packing = Packing(order, lengths, 10, 1000)
    for number in (-1, packing.rows(0)):
        with pytest.raises(IndexError):
            packing.row(0, [number])
    with pytest.raises(IndexError):
        Buckets(order, lengths, 10, 10).samples(0, [10])
    empty = Packing(Order(0), lengths, 10, 10)
    assert empty.rows(0) == 0 and empty.row(0, []) == [] and empty.efficiency(0) == 1
