"""``data.max_bytes`` from the command line: what it does, what does not go with it, what is wrong."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import trainkit
from click.testing import CliRunner, Result
from latedevice import LateBackend
from torch import nn

from lfdata import DeviceLoader
from lfdata.errors import BudgetError
from lfdata.loader.budget import FEWEST_SLOTS
from lfdata.loader.slots import PAGE
from lftrain import ActivationOptions, CheckpointOptions
from lftrain.cli import main
from lftrain.comm.group import Group
from lftrain.errors import ConfigError
from lftrain.runtime.loop import Runtime

SPLIT = ("data.max_bytes=16384", "data.over=split")
CONFIG = """
[run]
folder = "run"
steps = 6
device = "cpu"
[data]
path = "rows"
batch_size = 8
engine = "inline"
[held_out]
path = "held"
batch_size = 16
[model]
kind = "trainkit:ragged"
[optimizer]
warmup = 0
lr = 1e-2
[metrics]
every = 1
live = "off"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    for name in ("rows", "held"):
        trainkit.write_lengths(tmp_path / name, [(1, 30, 400, 700, 250)[number % 5] for number in range(40)])
    path = tmp_path / "train.toml"
    path.write_text(CONFIG)
    return path


def run(config: Path, *values: str) -> Result:
    return CliRunner().invoke(main, ["run", str(config), *(f"--set={value}" for value in values)])


def lines(config: Path, folder: str, kind: str) -> list[dict[str, Any]]:
    told = [json.loads(line) for line in (config.parent / folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in told if line["kind"] == kind]


def test_a_run_in_parts_is_the_run(config: Path) -> None:
    assert run(config, "run.folder=whole").exit_code == 0
    done = run(config, "run.folder=parts", *SPLIT)
    assert done.exit_code == 0, done.output
    for kind, count in (("step", 6), ("held_out", 1)):
        whole, parts = ([line["loss"] for line in lines(config, folder, kind)] for folder in ("whole", "parts"))
        assert len(whole) == count and parts == pytest.approx(whole, rel=1e-4)
    # A run goes on with any budget.
    assert run(config, "run.folder=parts", "run.steps=8").exit_code == 0
    assert len(lines(config, "parts", "step")) == 8


def test_held_out_data_stay_within_the_budget_too(config: Path) -> None:
    done = run(config, "data.max_bytes=60KB", "data.batch_size=4")
    assert done.exit_code == 1
    assert "held: step 2 of epoch 0 takes" in done.output and "Raise max_bytes to" in done.output
    assert run(config, "data.max_bytes=60KB", "data.batch_size=4", "held_out.batch_size=4").exit_code == 0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["data.max_bytes=16384"], "rows: step 2 of epoch 0 takes 13,248 bytes"),
        (["data.max_bytes=8192", "data.over=split"], "whole number from 16384"),
        (["data.max_bytes=4GiBs"], "'4GB' or '3.5GiB', not '4GiBs'"),
        (["data.max_bytes=1.5"], "data.max_bytes"),
        (["data.max_bytes=true"], "data.max_bytes"),
        (["data.over=split"], "give max_bytes"),
        (["data.over=drop"], "data.over"),
        ([*SPLIT, 'data.accumulate="auto"'], "data.accumulate"),
        ([*SPLIT, "activations.admit_mb=1", "graph.enabled=true"], "leave one of them out"),
        ([*SPLIT, "activations.admit_mb=0"], "admit_mb"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_trained(config: Path, values: list[str], said: str) -> None:
    done = run(config, *values)
    assert done.exit_code == 1 and said in done.output, done.output
    assert not (config.parent / "run" / "checkpoints").exists()


def test_a_graph_that_cannot_be_is_told_and_parts_are_trained_without(config: Path) -> None:
    assert run(config, *SPLIT, "graph.enabled=true").exit_code == 0
    (event,) = [line for line in lines(config, "run", "event") if line["name"] == "no graph"]
    assert "not captured" in event["message"]


def test_layers_that_wait_for_other_ranks_are_refused_where_ranks_cut_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = trainkit.write_points(tmp_path / "d")
    chosen = trainkit.options(tmp_path / "run", 2, activations=ActivationOptions(admit_mb=1))
    model = nn.Sequential(nn.Linear(4, 8), nn.SyncBatchNorm(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runtime = Runtime(model, trainkit.loss, trainkit.make_loader(data), optimizer, chosen)
    assert runtime.admission is not None, "one rank waits for none"
    runtime.group = Group(0, 2, 0, torch.device("cpu"))
    with pytest.raises(ConfigError, match="SyncBatchNorm waits for the other ranks"):
        runtime._admission(1.0)
    runtime.close()


# -- an epoch beyond the budget -------------------------------------------------------------------------------------------


def rows(path: Path, count: int = 64) -> Path:
    chance = random.Random(4)
    return trainkit.write_lengths(path, [chance.randrange(20, 3000) for _ in range(count)])


def needs(data: Path, **options: Any) -> list[int]:
    """Budgets with which each of the first epochs just fits."""
    found = []
    for epoch in range(12):
        loader = trainkit.make_loader(data, max_bytes="1GiB", **options)
        found.append(PAGE + FEWEST_SLOTS * -(-loader._budget.epoch(epoch).slot(1) // PAGE) * PAGE)  # type: ignore[union-attr]
    return found


class Trained:
    """A run, or its rest: samples of each step, what the parameters are then, and how it ended."""

    def __init__(self, folder: Path, loader: Any, steps: int, every: int = 0, before: Any = None) -> None:
        self.seen: list[list[int]] = []
        self.error: BudgetError | None = None

        def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
            if before is not None:
                before()
            self.seen.append(batch["__index__"].tolist())
            return trainkit.ragged_loss(model, batch)

        model = trainkit.make_ragged_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        chosen = trainkit.options(folder, steps, checkpoint=CheckpointOptions(every=every))
        self.runtime = Runtime(model, loss, loader, optimizer, chosen)
        try:
            self.runtime.run()
        except BudgetError as error:
            self.error = error
        finally:
            loader.close()
        self.bits = trainkit.bits(model)


@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("how", ["loader", "device", "on its way"])
def test_a_later_epoch_beyond_the_budget_costs_nothing(tmp_path: Path, every: int, how: str) -> None:
    """A checkpoint of the step before it, then the error; with a larger budget the run goes on as if nothing had been."""
    data = rows(tmp_path / "d")
    least = needs(data)
    worse = next(epoch for epoch, need in enumerate(least) if need > least[0])
    small, enough, steps = max(least[:worse]), max(least), 8 * (worse + 2) + 3
    backend = LateBackend()

    def loader(budget: int) -> Any:
        made = trainkit.make_loader(data, max_bytes=budget)
        if how == "loader":
            return made
        return DeviceLoader(made, "cpu") if how == "device" else DeviceLoader(made, ahead=3, _backend=backend)

    def train(folder: str, budget: int) -> Trained:
        return Trained(tmp_path / folder, loader(budget), steps, every, backend.copies.finish)

    whole = train("whole", enough)
    assert whole.error is None and len(whole.seen) == steps
    for _ in range(2):
        first = train("run", small)
        assert first.error is not None and f"of epoch {worse} takes" in str(first.error)
        assert f"goes on from step {8 * worse}" in " ".join(first.error.__notes__)
        kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir())
        assert (
            kept[-1] == f"step-{8 * worse:08d}"
            and (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == kept[-1]
        )
        # The second time it ends at once.
        assert first.seen in (whole.seen[: 8 * worse], [])
    rest = train("run", enough)
    assert rest.error is None and rest.seen == whole.seen[8 * worse :]
    assert rest.bits == whole.bits
    backend.end()


def test_a_sample_beyond_the_share_that_comes_in_a_later_epoch(tmp_path: Path) -> None:
    """In parts, too: the epochs before leave it out, since they are no whole number of batches."""
    plain = trainkit.make_loader(rows(tmp_path / "plain", 15))
    epochs = [set(itertools.chain(*(batch["__index__"].tolist() for batch in plain))) for _ in range(4)]
    large = next(iter(epochs[2] - epochs[0] - epochs[1]))
    data = trainkit.write_lengths(tmp_path / "d", [9000 if number == large else 300 for number in range(15)])

    def train(folder: str, budget: int) -> Trained:
        backend = LateBackend()
        loader = DeviceLoader(trainkit.make_loader(data, max_bytes=budget, over="split"), ahead=2, _backend=backend)
        try:
            return Trained(tmp_path / folder, loader, 4, before=backend.copies.finish)
        finally:
            backend.end()

    first = train("run", 30_000)
    assert first.error is not None and f"key b'point-{large}'" in str(first.error) and "epoch" not in str(first.error)
    assert {index for batch in first.seen for index in batch} == epochs[0] | epochs[1]
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == "step-00000002"
    rest = train("run", 200_000)
    assert rest.error is None and [set(batch) for batch in rest.seen] == epochs[2:]


def test_the_command_says_from_where_it_goes_on(config: Path) -> None:
    """Until it is done, with the budget that the error asks for."""
    rows(config.parent / "more")
    more, budget, went_on = ("data.path=more", "run.steps=90"), 65536, list[int]()
    for _ in range(20):
        done = run(config, *more, f"data.max_bytes={budget}")
        if done.exit_code == 0:
            break
        found = re.search(
            r"BudgetError: .*more: step \d of epoch (\d+) takes .*Raise max_bytes to ([\d,]+), lower", done.output
        )
        assert done.exit_code == 1 and found, done.output
        epoch, budget = int(found[1]), int(found[2].replace(",", ""))
        if epoch:
            assert f"with a larger max_bytes the run goes on from step {8 * epoch}" in done.output
            went_on.append(8 * epoch)
    assert done.exit_code == 0 and went_on == sorted(set(went_on)) and went_on
    assert [line["step"] for line in lines(config, "run", "step")] == list(range(1, 91))
    resumed = [line["step"] for line in lines(config, "run", "event") if line["name"] == "resume"]
    assert resumed == went_on
