"""Which sample is where: docs/order.md, by the second implementation; the same for any number of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import independent_order
import numpy as np
import pytest
from batchkit import epoch_of, indices, same, write_numbers

from lfdata import Loader, ShardDataset
from lfdata.errors import OptionError

N = 103
INLINE: dict[str, Any] = {"engine": "inline"}
PACKING = {"field": "ids", "window": 32, "capacity": 9}


def ranks(source: Any, size: int, world: int, *args: Any, **options: Any) -> list[Loader]:
    return [Loader(source, size, *args, rank=rank, world_size=world, **{**INLINE, **options}) for rank in range(world)]


@pytest.mark.parametrize("mode", ["sequential", "full", "block"])
def test_keys_of_each_epoch_are_those_of_the_definition(numbers: Path, mode: str) -> None:
    data = ShardDataset(numbers)
    loader = Loader(numbers, 10, ["label"], shuffle=mode, block=8, window=3, seed=5, **INLINE)
    for epoch in range(3):
        assert loader.epoch == epoch and len(loader) == 10
        found = indices(loader)
        expected = independent_order.epoch_of(N, 5, epoch, mode, 8, 3)[:100]
        assert data.keys(found) == [b"0-%d" % index for index in expected]
    loader.set_epoch(1)
    assert indices(loader) == independent_order.epoch_of(N, 5, 1, mode, 8, 3)[:100]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": "sequential"},
        {"shuffle": "full", "tail": "pad"},
        {"shuffle": "block", "block": 8, "window": 3},
        {"buckets": {"field": "ids", "window": 24}, "tail": "pad"},
        {"mixture": {"weights": [0.7, 0.3], "block": 16}},
        {"mixture": {"block": 16, "exhaustion": "drop"}, "packing": PACKING, "tail": "pad"},
    ],
    ids=lambda options: "-".join(options),
)
def test_the_global_sequence_is_the_same_for_any_world(
    numbers: Path, more_numbers: Path, options: dict[str, Any], world: int
) -> None:
    source = [numbers, more_numbers] if "mixture" in options else numbers
    fields = ["ids"] if "packing" in options else ["ids", "label"]
    (one,) = ranks(source, 8, 1, fields, **options)
    for epoch in range(2):
        loaders = ranks(source, 8, world, fields, **options)
        for loader in [*loaders, one]:
            loader.set_epoch(epoch)
        steps = {len(loader) for loader in [*loaders, one]}
        expected = epoch_of([one])
        found = epoch_of(loaders)
        assert {len(found), len(expected)} == steps and len(found) > 3
        assert all(same(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_a_world_that_does_not_divide_the_batch_is_refused_with_those_that_do(numbers: Path) -> None:
    with pytest.raises(OptionError, match=r"3 ranks do not divide a global batch of 8; these do: 1, 2, 4, 8"):
        Loader(numbers, 8, rank=0, world_size=3, **INLINE)
    with pytest.raises(OptionError, match="go together"):
        Loader(numbers, 8, rank=0, **INLINE)
    with pytest.raises(OptionError, match="rank is a whole number from 0 to 1, not 2"):
        Loader(numbers, 8, rank=2, world_size=2, **INLINE)


@pytest.mark.parametrize(("size", "world"), [(8, 3), (7, 2), (2, 4)])
def test_unequal_shares_where_shapes_may_differ(numbers: Path, size: int, world: int) -> None:
    loaders = ranks(numbers, size, world, ["label", "ids"], static=False, tail="pad")
    assert len({len(loader) for loader in loaders}) == 1
    whole, parts = epoch_of(ranks(numbers, size, 1, ["label", "ids"], tail="pad")), [list(loader) for loader in loaders]
    for rank, batches in enumerate(parts):
        share = size * (rank + 1) // world - size * rank // world
        assert len(batches) == len(whole) and all(len(batch["label"]) == share for batch in batches)
    for step, expected in enumerate(whole):
        assert np.concatenate([batches[step]["label"].numpy() for batches in parts]).tolist() == expected["label"].tolist()


def test_unequal_shares_with_pictures_have_room_for_no_rows(complete: Path) -> None:
    fields = ("picture", "ids", "sound", "points", "caption", "about")
    for loader in ranks(complete, 2, 3, fields, static=False):
        assert all(len(batch["__index__"]) == len(batch["ids.offsets"]) - 1 <= 1 for batch in loader)


@pytest.mark.parametrize("n", [0, 1, 7])
def test_few_samples_on_many_ranks(tmp_path: Path, n: int) -> None:
    path = write_numbers(tmp_path / "d", n)
    for tail, steps in (("drop_last", n // 4), ("pad", -(-n // 4))):
        loaders = ranks(path, 4, 4, tail=tail)
        batches = [list(loader) for loader in loaders]
        assert [len(found) for found in batches] == [steps] * 4 == [len(loader) for loader in loaders]
        seen = [int(batch["label"][0]) for found in batches for batch in found if batch["__mask__"][0]]
        assert sorted(seen) == list(range(n)) if tail == "pad" else len(seen) == n // 4 * 4


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_exact_once_evaluation_gives_every_rank_the_same_number_of_steps(numbers: Path, world: int) -> None:
    loaders = ranks(numbers, 16, world, ["label"], shuffle="sequential", tail="pad", bad_samples="mask")
    batches = [list(loader) for loader in loaders]
    assert {len(found) for found in batches} == {7}
    seen = [int(label) for found in batches for batch in found for label in batch["label"][batch["__mask__"]]]
    assert sorted(seen) == list(range(N))
    padding = [int(label) for found in batches for batch in found for label in batch["label"][~batch["__mask__"]]]
    assert sorted(padding) == list(range(9))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("accumulate", [2, 4])
def test_micro_batches_are_slices_of_a_ranks_share(numbers: Path, world: int, accumulate: int) -> None:
    for rank in range(world):
        whole = Loader(numbers, 8, rank=rank, world_size=world, **INLINE)
        parts = Loader(numbers, 8, rank=rank, world_size=world, accumulate=accumulate, **INLINE)
        assert len(parts) == len(whole) * accumulate
        micro = list(parts)
        for step, batch in enumerate(whole):
            mine = micro[step * accumulate : (step + 1) * accumulate]
            for name in ("label", "ids", "__index__", "__mask__"):
                assert [value for part in mine for value in part[name].tolist()] == batch[name].tolist()
            for part in mine:
                assert part["ids.offsets"][0] == 0 and part["ids.offsets"][-1] == len(part["ids"])
                assert len(part["label"]) == 8 // world // accumulate


def test_micro_batches_that_are_not_equal_are_refused_on_every_rank(numbers: Path) -> None:
    for rank in range(2):
        with pytest.raises(OptionError, match="equal micro-batches"):
            Loader(numbers, 7, rank=rank, world_size=2, static=False, accumulate=2, **INLINE)


@pytest.mark.parametrize("mode", ["sequential", "full", "block"])
def test_where_leaves_out_what_is_not_wanted(numbers: Path, mode: str) -> None:
    chosen = [index for index in range(N) if index % 3 == 1]
    order = independent_order.epoch_of(len(chosen), 0, 0, mode, 8, 3)
    expected = [chosen[place] for place in order]
    for where in (np.arange(N) % 3 == 1, lambda data: data.column("label") % 3 == 1):
        loader = Loader(numbers, 4, ["label"], shuffle=mode, block=8, window=3, where=where, tail="pad", **INLINE)
        found = [int(index) for batch in loader for index in batch["__index__"][batch["__mask__"]]]
        assert found == expected
    assert len(Loader(numbers, 4, where=np.zeros(N, bool), **INLINE)) == 0


def test_where_of_the_wrong_shape_is_refused(numbers: Path, more_numbers: Path) -> None:
    with pytest.raises(OptionError, match=r"shape \(103,\)"):
        Loader(numbers, 4, where=np.ones(5, bool), **INLINE)
    with pytest.raises(OptionError, match="1 filters for 2 sources"):
        Loader([numbers, more_numbers], 4, mixture={}, where=[None], **INLINE)


def test_a_filter_of_one_source_of_a_mixture(numbers: Path, more_numbers: Path) -> None:
    few = np.arange(37) < 5
    loader = Loader(
        [numbers, more_numbers], 4, mixture={"block": 16, "exhaustion": "drop"}, where=[None, few], tail="pad", **INLINE
    )
    pairs = [
        pair
        for batch in loader
        for pair in zip(
            batch["__source__"][batch["__mask__"]].tolist(), batch["__index__"][batch["__mask__"]].tolist(), strict=True
        )
    ]
    assert sorted(pairs) == [(0, index) for index in range(N)] + [(1, index) for index in range(5)]


@pytest.mark.parametrize("exhaustion", ["stop", "repeat", "drop"])
def test_mixtures_are_those_of_the_definition(numbers: Path, more_numbers: Path, exhaustion: str) -> None:
    loader = Loader([numbers, more_numbers], 4, mixture={"weights": [3, 2], "block": 16, "exhaustion": exhaustion}, **INLINE)
    for epoch in range(2):
        expected = independent_order.mixture([N, 37], [3, 2], 16, exhaustion, 0, epoch)
        seeds = [0, independent_order.mix(independent_order.key(0, 1))]
        sizes = [N, 37]
        found = [
            (int(source), int(index))
            for batch in loader
            for source, index in zip(batch["__source__"], batch["__index__"], strict=True)
        ]
        orders: dict[Any, list[int]] = {}
        wanted = []
        for source, of, place in expected[: len(expected) // 4 * 4]:
            if (source, of) not in orders:
                orders[source, of] = independent_order.epoch_of(sizes[source], seeds[source], of, "full")
            wanted.append((source, orders[source, of][place]))
        assert found == wanted


def test_options_of_a_mixture_that_make_no_sense_are_refused(numbers: Path, more_numbers: Path) -> None:
    both = [numbers, more_numbers]
    with pytest.raises(OptionError, match="several sources need mixture="):
        Loader(both, 4, **INLINE)
    with pytest.raises(OptionError, match="mixture: .*weight"):
        Loader(both, 4, mixture={"weight": [1, 2]}, **INLINE)
    with pytest.raises(OptionError, match="packing needs the option 'window'"):
        Loader(numbers, 4, ["ids"], packing={"field": "ids", "capacity": 9}, **INLINE)
    with pytest.raises(OptionError, match="buckets: field is 'nothing'"):
        Loader(numbers, 4, buckets={"field": "nothing", "window": 8}, **INLINE)


def test_buckets_are_those_of_the_definition(numbers: Path) -> None:
    loader = Loader(numbers, 4, ["ids"], buckets={"field": "ids", "window": 24}, seed=2, **INLINE)
    for epoch in range(2):
        below = independent_order.epoch_of(N, 2, epoch, "full")
        places = independent_order.buckets([index % 5 for index in below], 2, epoch, 24, 4)
        batches = list(loader)
        assert indices(batches) == [below[place] for place in places][:100]
        spread = [np.diff(batch["ids.offsets"].numpy()) for batch in batches]
        assert np.mean([lengths.max() - lengths.min() for lengths in spread]) < 1


# -- packing --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long(sets: Path) -> Path:
    """Rows of 0 to 29 tokens."""
    return write_numbers(sets / "long", N, lengths=[index * 7 % 30 for index in range(N)])


def rows_of(loader: Loader) -> list[tuple[list[int], list[int], list[int], list[int], list[int]]]:
    """Rows that count: indices, boundaries, ids, position ids and segments."""
    found = []
    for batch in loader:
        for number in np.flatnonzero(batch["__mask__"].numpy()).tolist():
            at, bounds = batch["__index__.offsets"], batch["ids.boundaries.offsets"]
            mine = batch["__index__"][at[number] : at[number + 1]].tolist()
            starts = batch["ids.boundaries"][bounds[number] : bounds[number + 1]].tolist()
            assert int(batch["ids.samples"][number]) == len(mine) == len(starts) - 1
            found.append((mine, starts, *(batch[f"ids{part}"][number].tolist() for part in ("", ".position", ".segment"))))
    return found


@pytest.mark.parametrize("too_long", ["split", "truncate", "drop"])
@pytest.mark.parametrize("most", [None, 3])
def test_packed_rows_are_those_of_the_definition(long: Path, too_long: str, most: int | None) -> None:
    capacity = 20
    how = {"field": "ids", "window": 32, "capacity": capacity, "too_long": too_long, "max_samples_per_row": most}
    loader = Loader(long, 4, ["ids"], packing=how, tail="pad", **INLINE)
    for epoch in range(2):
        rows = rows_of(loader)
        below = independent_order.epoch_of(N, 0, epoch, "full")
        expected = independent_order.packing([index * 7 % 30 for index in below], 0, epoch, 32, capacity, too_long, most)
        assert len(rows) == len(expected)
        tokens = []
        for (mine, starts, ids, position, segment), items in zip(rows, expected, strict=True):
            assert mine == [below[place] for place, _, _ in items]
            assert starts == [0, *itertools.accumulate(count for _, _, count in items)]
            for number, (index, (_, first, count)) in enumerate(zip(mine, items, strict=True)):
                part = slice(starts[number], starts[number + 1])
                assert ids[part] == [index * 1000 + place for place in range(first, first + count)]
                assert position[part] == list(range(count)) and segment[part] == [number + 1] * count
                tokens += ids[part]
            rest = slice(starts[-1], None)
            assert len(ids) == capacity and not any(ids[rest] + position[rest] + segment[rest])
        if too_long == "split":
            every = [index * 1000 + place for index in range(N) for place in range(index * 7 % 30)]
            assert sorted(tokens) == every


@pytest.mark.parametrize("world", [1, 2])
def test_packing_over_a_mixture_has_every_token_once(long: Path, more_numbers: Path, world: int) -> None:
    how: dict[str, Any] = {
        "mixture": {"block": 16, "exhaustion": "drop"},
        "packing": {"field": "ids", "window": 32, "capacity": 20, "too_long": "split"},
    }
    tokens = []
    for loader in ranks([long, more_numbers], 4, world, ["ids"], tail="pad", **how):
        for batch in loader:
            rows = batch["__mask__"]
            tokens += batch["ids"][rows][batch["ids.segment"][rows] > 0].tolist()
            at = batch["__index__.offsets"].tolist()
            for number in range(len(rows)):
                part = slice(at[number], at[number + 1])
                for place, (source, index) in enumerate(
                    zip(batch["__source__"][part].tolist(), batch["__index__"][part].tolist(), strict=True)
                ):
                    mine = batch["ids"][number][batch["ids.segment"][number] == place + 1].tolist()
                    assert all(token // 1000 == source * 100_000 + index for token in mine)
    first = [index * 1000 + place for index in range(N) for place in range(index * 7 % 30)]
    second = [100_000_000 + index * 1000 + place for index in range(37) for place in range(index % 5)]
    assert sorted(tokens) == first + second


def test_packing_takes_its_field_alone(numbers: Path) -> None:
    with pytest.raises(OptionError, match="packing gives the field 'ids' alone"):
        Loader(numbers, 4, ["ids", "label"], packing=PACKING, **INLINE)
