"""``data.max_bytes`` from the command line: what it does, what does not go with it, what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trainkit
from click.testing import CliRunner, Result
from torch import nn

from lftrain import ActivationOptions
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
