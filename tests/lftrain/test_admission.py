"""Peak bytes foretold from shapes, and micro-batches cut by them."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trainkit
from hypothesis import given, settings
from hypothesis import strategies as st
from shardkit import Part, write_dataset
from shardkit import tokens as stored

from benchmarks.gpu.activations import MODELS, compare
from lfdata import Loader
from lfdata.format.meta import FieldMeta
from lftrain import ActivationOptions, GraphOptions, Runtime
from lftrain.errors import ConfigError
from lftrain.memory.admission import MOST_PARTS, Admission, cut, on_host, rows_of, shape_of
from lftrain.memory.measure import kept
from lftrain.memory.model import ActivationModel, MaxSoFar, nnls
from lftrain.memory.parts import fewest
from lftrain.runtime import feed

CPU = torch.device("cpu")


# -- the fit --------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans())
def test_the_fit_is_the_best_without_a_negative_coefficient(seed: int, count: int, alike: bool) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.random((30, count)) + (10 * rng.random((30, 1)) if alike else 0)
    aim = rows @ rng.normal(size=count) + rng.normal(size=30)
    found = nnls(rows.T @ rows, rows.T @ aim)
    assert (found >= 0).all()
    best = float(aim @ aim)
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            part = np.linalg.lstsq(rows[:, chosen], aim, rcond=None)[0]
            if (part >= 0).all():
                best = min(best, float(np.square(rows[:, chosen] @ part - aim).sum()))
    assert float(np.square(rows @ found - aim).sum()) <= best * (1 + 1e-6) + 1e-9


def test_features_that_are_multiples_of_each_other_and_features_that_are_always_0() -> None:
    model = ActivationModel(["rows", "twice", "never"])
    for rows in range(1, 20):
        model.observe({"rows": rows, "twice": 2 * rows, "never": 0}, 1000.0 * rows + 50)
    found = model.predict({"rows": 40, "twice": 80, "never": 0})
    assert found is not None and found.bytes == pytest.approx(40_050, rel=1e-4) and found.band < 40
    # Of what was never seen nothing is known.
    unknown = model.predict({"rows": 1, "twice": 2, "never": 1})
    assert unknown is not None and unknown.band == math.inf


def test_nothing_is_said_before_enough_was_seen() -> None:
    model = ActivationModel(["rows"])
    for rows in (1, 2, 3):
        assert not model.ready and model.predict({"rows": 5}) is None and model.admits({"rows": 10**9}, 1)
        model.observe({"rows": rows}, 100.0 * rows)
    model.observe({"rows": 4}, 400.0)
    assert model.ready and model.admits({"rows": 5}, 501) and not model.admits({"rows": 5}, 499)
    # What cannot be bytes is not learnt from.
    for wrong in (0.0, -1.0, math.inf, math.nan):
        model.observe({"rows": 5}, wrong)
    assert model.seen == 4


def test_the_band_holds_what_the_fit_missed_and_grows_beyond_what_was_seen() -> None:
    rng, model = random.Random(0), ActivationModel(["rows"])
    for _ in range(100):
        rows = rng.randrange(1, 100)
        model.observe({"rows": rows}, 1000 * rows * rng.uniform(0.8, 1.2))
    inside, outside = model.predict({"rows": 50}), model.predict({"rows": 990})
    assert inside is not None and outside is not None
    assert 0.1 < inside.band / inside.bytes < 0.6
    assert outside.band / outside.bytes == pytest.approx(10 * inside.band / inside.bytes, rel=0.02)
    report = model.report()
    assert report["error"] < 0.2 < report["error_max_so_far"] and report["seen"] == 100


def test_many_shapes_are_admitted_as_each_of_them() -> None:
    rng, model = np.random.default_rng(0), ActivationModel(["rows", "squares", "never"])
    shapes = {"rows": rng.integers(1, 30, 50) * 1.0, "squares": rng.integers(0, 900, 50) * 1.0, "never": np.zeros(50)}
    assert model.admits_each(shapes, 1.0).all()
    for rows, squares in itertools.product((1, 2, 4, 8), (10, 300, 500)):
        model.observe({"rows": rows, "squares": squares, "never": 0}, 500 + 100 * rows + 4.0 * squares * rng.uniform(0.9, 1.1))
    shapes["never"][7] = 1.0
    each = [{name: float(values[place]) for name, values in shapes.items()} for place in range(50)]
    assert model.admits_each(shapes, 2500).tolist() == [model.admits(shape, 2500) for shape in each]
    assert 0 < model.admits_each(shapes, 2500).sum() < 50 and model.admits_each(shapes, 1.0).nonzero()[0].tolist() == [7]
    with pytest.raises(ConfigError, match="lacks the feature 'never'"):
        model.admits_each({"rows": shapes["rows"], "squares": shapes["squares"]}, 1.0)


def test_shapes_that_make_no_sense() -> None:
    for wrong in ([], ["rows", "rows"]):
        with pytest.raises(ConfigError, match="names, each once"):
            ActivationModel(wrong)
    model = ActivationModel(["rows"])
    with pytest.raises(ConfigError, match="lacks the feature 'rows'"):
        model.observe({"tokens": 1}, 1.0)
    for value in (-1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="from 0 on"):
            model.predict({"rows": value})
    baseline = MaxSoFar()
    for one in (3.0, 7.0, 5.0):
        baseline.observe(one)
    assert baseline.bytes == 7


@pytest.mark.parametrize("name", MODELS)
def test_shapes_that_were_never_seen_are_foretold_several_times_better_than_by_the_largest(name: str) -> None:
    found = compare(name, CPU, 1, seen=30, held_out=40)
    model, baseline = (found["error"][who]["median"] for who in ("model", "max_so_far"))
    worst, worst_baseline = (found["error"][who]["max"] for who in ("model", "max_so_far"))
    assert model < baseline / 5 and worst < worst_baseline / 5 and model < 0.05
    assert found["beyond_the_band"] <= 4


def test_what_experts_get_is_a_feature_that_matters() -> None:
    """Without it the number of tokens says little."""
    network, make = MODELS["experts"](CPU, 1)
    rng, models = np.random.default_rng(1), (ActivationModel(["tokens", "first expert"]), ActivationModel(["tokens"]))
    for _ in range(40):
        shape, forward = make(rng)
        with kept(network.parameters()) as taken:
            forward()
        for model in models:
            model.observe(shape, taken.bytes)
    with_it, without = (model.report()["error"] for model in models)
    assert with_it < without / 5


def test_bytes_kept_count_each_storage_once_and_no_parameters() -> None:
    x = torch.randn(10, 4, requires_grad=True)
    with kept([x]) as taken:
        y = x * 2
        z = (y.exp() + y.view(4, 10).t()[:10].exp().sum()).square()
    # exp keeps its result, twice; square its input; nothing keeps y.
    assert taken.bytes == 4 * (40 + 40 + 40)
    del z


# -- cutting --------------------------------------------------------------------------------------------------------------


def batch_of(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(len(lengths), 4, generator=made),
        "y": torch.randn(len(lengths), generator=made),
        "ids": torch.randint(0, 99, (sum(lengths),), generator=made),
        "ids.offsets": torch.tensor([0, *itertools.accumulate(lengths)]),
        "__index__": torch.arange(len(lengths)),
        "__mask__": torch.ones(len(lengths), dtype=torch.bool),
    }


def test_cut_rows_are_the_rows() -> None:
    batch = batch_of([3, 0, 5, 1, 2])
    assert rows_of(batch) == 5
    parts = [cut(batch, 0, 2), cut(batch, 2, 5)]
    for name in ("x", "y", "ids", "__index__"):
        assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
    assert parts[1]["ids.offsets"].tolist() == [0, 5, 6, 8] and [rows_of(part) for part in parts] == [2, 3]
    assert rows_of({**batch, "scale": torch.tensor(1.0)}) is None and rows_of({**batch, "other": torch.ones(3)}) is None
    shape = shape_of(batch)
    assert shape == {"rows": 5, "x": 20, "x^2/rows": 80, "ids": 11, "ids^2/rows": 121 / 5}


def test_packed_rows_of_several_sources_are_cut_with_their_samples(tmp_path: Path) -> None:
    fields = (FieldMeta("ids", "tokens", {"dtype": "uint16", "vocab": 1000}),)
    paths = [tmp_path / name for name in "ab"]
    for seed, path in enumerate(paths):
        rows = [(b"%d-%d" % (seed, one), {"ids": stored([one] * (2 + one % 7), "uint16")}) for one in range(40)]
        write_dataset(path, fields, [Part(rows)], name=f"tokens-{seed}")
    loader = Loader(paths, 6, packing={"field": "ids", "capacity": 20, "window": 16}, mixture={}, engine="inline")
    batch = next(iter(loader))
    assert rows_of(batch) == 6 and len(batch["__source__"]) == len(batch["__index__"]) > 6
    parts = [cut(batch, 0, 1), cut(batch, 1, 4), cut(batch, 4, 6)]
    assert [rows_of(part) for part in parts] == [1, 3, 2]
    for name in ("ids", "ids.boundaries", "__index__", "__source__"):
        assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
    assert parts[1]["__index__.offsets"].tolist() == (batch["__index__.offsets"][1:5] - batch["__index__.offsets"][1]).tolist()
    assert {*batch} == {*parts[0]}
    # What is left of a batch once it is on a device is cut alike.
    known = feed._samples(batch)
    assert rows_of(known) == 6 and torch.equal(cut(known, 1, 4)["__source__"], parts[1]["__source__"])


def test_a_step_is_cut_once_it_is_known_to_be_too_large(tmp_path: Path) -> None:
    told: list[str] = []
    model = trainkit.make_model(dropout=0.0)
    admission = Admission(3_000, model, CPU, told.append)
    sizes = [4, 9, 2, 12, 7, 20, 3, 6, 64, 5, 1]
    found = []
    for size in sizes:
        batch = batch_of([1] * size)
        parts, host = admission.admit([batch], [batch])
        assert all(one is other for one, other in zip(parts, host, strict=True))
        found.append([len(one["x"]) for one in parts])
        for part in parts:
            with admission.watching(part):
                trainkit.loss(model, part)[0].backward()
    assert [sum(one) for one in found] == sizes
    assert admission.model is not None and admission.report()["split"] >= 1
    # Five features and a constant: eight are needed.
    assert [len(one) for one in found[:8]] == [1] * 8 and len(found[8]) == 2
    largest = admission.model.predict(shape_of(batch_of([1] * 64)))
    assert largest is not None and largest.bytes > 3_000
    again, _ = admission.admit([batch_of([1] * 64)], [batch_of([1] * 64)])
    assert 1 < len(again) <= MOST_PARTS
    for part in again:
        with kept((*model.parameters(), *part.values())) as taken:
            trainkit.loss(model, part)
        assert taken.bytes <= 3_000
    whole = {**batch_of([1] * 64), "scale": torch.tensor(2.0)}
    assert len(admission.admit([whole], [whole])[0]) == 1 and len(told) == 1
    # What is known of the samples follows; of packed rows it is told once.
    rows = {"__index__": torch.arange(64)}
    _, known = admission.admit([batch_of([1] * 64)], [rows])
    assert torch.cat([one["__index__"] for one in known]).tolist() == list(range(64))
    packed = {"__index__": torch.arange(100)}
    _, known = admission.admit([batch_of([1] * 64)], [packed])
    assert known[0] is packed and all(one == {} for one in known[1:])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(1, 60), st.sampled_from(["sum", "square", "mean"]))
def test_no_fewer_parts_fit(sizes: list[int], budget: int, kind: str) -> None:
    """Against all ways to cut. Also where a part may take less with one more row (a square over the rows)."""

    def bytes_of(part: list[int]) -> float:
        return {"sum": sum(part), "square": sum(one * one for one in part) / 9, "mean": sum(part) ** 2 / len(part) / 9}[kind]

    def reach(first: int) -> np.ndarray:
        return np.array([bytes_of(sizes[first:stop]) <= budget for stop in range(first + 1, len(sizes) + 1)])

    rows = len(sizes)
    ways = []
    for count in range(rows):
        for inner in itertools.combinations(range(1, rows), count):
            bounds = [0, *inner, rows]
            if all(bytes_of(sizes[first:stop]) <= budget for first, stop in itertools.pairwise(bounds)):
                ways.append(count + 1)
    found = fewest(rows, reach, rows)
    assert found is not None
    bounds, alone = found
    assert bounds[0] == 0 and bounds[-1] == rows and bounds == sorted(set(bounds))
    for first, stop in itertools.pairwise(bounds):
        assert bytes_of(sizes[first:stop]) <= budget or (stop == first + 1 and first in alone)
    if ways:
        assert not alone and len(bounds) - 1 == min(ways)
        assert fewest(rows, reach, min(ways)) == found and (min(ways) == 1 or fewest(rows, reach, min(ways) - 1) is None)
    if kind != "mean":
        # Where parts never take less with one more row, those alone are all that are too large.
        assert alone == [row for row in range(rows) if bytes_of(sizes[row : row + 1]) > budget]


def _learnt(network: torch.nn.Module, told: list[str], weight: float = 8.0) -> Admission:
    """Bytes that are ``weight`` an element of "ids", and 100 a row."""
    admission, rng = Admission(1e12, network, CPU, told.append), np.random.default_rng(0)
    for _ in range(40):
        batch = batch_of(rng.integers(1, 300, int(rng.integers(2, 9))).tolist())
        shape = admission._shape(batch)
        if admission.model is None:
            admission.model = ActivationModel(tuple(shape))
        admission.model.observe(shape, 100.0 * len(batch["y"]) + weight * len(batch["ids"]))
    return admission


class Declared(torch.nn.Linear):
    """Says itself what counts."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def activation_features(self, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        return {"rows": len(batch["y"]), "tokens": len(batch["ids"])}


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([500] * 8, [[500] * 4, [500] * 4]),
        # By number of rows, one half would have nearly all.
        ([1900, 1900, 10, 10, 10, 10], [[1900], [1900, 10, 10, 10, 10]]),
        ([10, 10, 10, 1900, 1900], [[10, 10, 10, 1900], [1900]]),
        ([900, 1000, 50, 2, 2, 2, 1990, 9], [[900, 1000, 50, 2, 2, 2], [1990, 9]]),
        ([10] * 6, [[10] * 6]),
    ],
)
def test_parts_are_cut_where_their_rows_fit(declared: bool, lengths: list[int], parts: list[list[int]]) -> None:
    told: list[str] = []
    admission = _learnt(Declared() if declared else trainkit.make_model(), told)
    assert admission.model is not None
    # What 2,000 elements in four rows take.
    admission.budget = 100.0 * 4 + 8 * 2000 + 700
    batch = batch_of(lengths)
    got, host = admission.admit([batch], [batch])
    assert [one["ids.offsets"].diff().tolist() for one in got] == parts and not told
    assert torch.equal(torch.cat([one["ids"] for one in got]), batch["ids"])
    assert all(one is other for one, other in zip(got, host, strict=True))
    for one in got:
        assert admission.model.admits(admission._shape(one), admission.budget)


@pytest.mark.parametrize("declared", [False, True])
def test_a_row_beyond_the_budget_is_named_and_trained_on_alone(declared: bool) -> None:
    told: list[str] = []
    admission = _learnt(Declared() if declared else trainkit.make_model(), told)
    admission.budget = 17_000.0
    batch = batch_of([900, 900, 9000, 900, 8000, 900])
    for _ in range(2):
        got, _ = admission.admit([batch], [batch])
        assert [len(one["ids"]) for one in got] == [1800, 9000, 900, 8000, 900]
    assert told == [
        "row 2 of a micro-batch (index 2) is expected to take more than activations.admit_mb = 0.017 alone: it is trained on alone"
    ]
    one = batch_of([9000])
    assert admission.admit([one], [one])[0][0]["ids"].equal(one["ids"])


def test_more_parts_than_there_may_be_are_of_about_the_same_size() -> None:
    told: list[str] = []
    admission = _learnt(Declared(), told)
    admission.budget = 2_000.0
    batch = batch_of([100] * 100)
    for _ in range(2):
        got, _ = admission.admit([batch], [batch])
        assert 10 < len(got) <= MOST_PARTS and max(len(one["y"]) for one in got) <= 9
    assert told == ["a micro-batch of 100 rows would need more than 16 parts to stay within activations.admit_mb = 0.002"]


def test_offsets_that_the_host_knows_are_not_asked_of_the_device() -> None:
    admission = _learnt(trainkit.make_model(), [])
    admission.budget = 17_000.0
    whole = batch_of([900, 900, 900, 900])
    known = {name: value.clone() for name, value in whole.items() if name.startswith("__") or name.endswith(".offsets")}
    there = on_host(whole, known)
    assert there["ids.offsets"] is known["ids.offsets"] and there["ids"] is whole["ids"]
    # A device whose tensors have nothing to read.
    away = {name: value.to("meta") for name, value in whole.items()}
    got, host = admission.admit([away], [known])
    assert [len(one["ids"]) for one in got] == [1800, 1800]
    assert [one["__index__"].tolist() for one in host] == [[0, 1], [2, 3]]


def _trained(folder: Path, data: Path, **activations: Any) -> Runtime:
    torch.manual_seed(0)
    model = trainkit.make_model(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = Loader(data, 32, seed=3, engine="inline", threads=1)
    chosen = trainkit.options(folder, 20, activations=ActivationOptions(**activations))
    runtime = Runtime(model, trainkit.loss, loader, optimizer, chosen)
    runtime.run()
    return runtime


def test_training_is_the_same_but_for_rounding(tmp_path: Path) -> None:
    data = trainkit.write_points(tmp_path / "d", 256)
    plain, cut_ = _trained(tmp_path / "plain", data), _trained(tmp_path / "cut", data, admit_mb=0.0015)
    for one, other in zip(plain.model.parameters(), cut_.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert cut_.watch.loss == pytest.approx(plain.watch.loss, rel=1e-4)
    lines = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "step"][-1]["admission"]
    assert last["split"] > 5 and last["error"] < last["error_max_so_far"]
    assert cut_.watch._window.samples == 0 and plain.watch._window.samples == 0


def test_a_graph_is_refused(tmp_path: Path) -> None:
    data = trainkit.write_points(tmp_path / "d")
    chosen = trainkit.options(tmp_path / "run", 2, activations=ActivationOptions(admit_mb=1), graph=GraphOptions(enabled=True))
    with pytest.raises(ConfigError, match="fixed shapes"):
        trainkit.make_runtime(data, chosen)
