"""``lftrain run``: what it prints and returns at the end, and going on where something is different."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import trainkit
from click.testing import CliRunner, Result

from lfdata.errors import StateError
from lftrain import CheckpointOptions, Runtime
from lftrain.cli import main
from lftrain.errors import ConfigError

CONFIG = """
[run]
folder = "run"
steps = 4
device = "cpu"
[data]
path = "points"
batch_size = 8
engine = "inline"
[model]
kind = "trainkit:points"
[optimizer]
warmup = 0
[checkpoint]
every = 2
[metrics]
every = 1
live = "off"
"""
HELD_OUT = ('held_out.path="points"', "held_out.batch_size=16")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    trainkit.write_points(tmp_path / "points")
    path = tmp_path / "train.toml"
    path.write_text(CONFIG)
    return path


def run(config: Path, *values: str) -> Result:
    return CliRunner().invoke(main, ["run", str(config), *(f"--set={value}" for value in values)])


def lines(config: Path, kind: str) -> list[dict[str, Any]]:
    told = [json.loads(line) for line in (config.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in told if line["kind"] == kind]


def test_a_finished_run_that_is_started_again_says_so(config: Path) -> None:
    first = run(config, *HELD_OUT)
    assert first.exit_code == 0 and first.stdout.startswith("step 4: loss ")
    again = run(config, *HELD_OUT)
    assert again.exit_code == 0
    told = first.stdout.removeprefix("step 4: ")
    assert again.stdout == f"this run is finished already, nothing was done: step 4: {told}" and "held-out loss" in told
    assert len(lines(config, "step")) == 4
    fewer = run(config, "run.steps=3")
    assert fewer.exit_code == 0 and "step 4 (run.steps is 3)" in fewer.stdout


def test_a_finished_run_without_a_known_loss_prints_none(config: Path) -> None:
    skipped = run(config, "model.kind=trainkit:hopeless", "precision.max_skips=9")
    assert skipped.exit_code == 0 and skipped.stdout.startswith("step 4: 4 skipped;")
    again = run(config, "model.kind=trainkit:hopeless")
    assert again.exit_code == 0 and "step 4: 4 skipped;" in again.stdout


def test_another_batch_size_goes_on_only_where_it_is_allowed(config: Path) -> None:
    assert run(config, "run.steps=2").exit_code == 0
    refused = run(config, "data.batch_size=4")
    assert refused.exit_code == 1
    for said in ("batch size is 8, this loader's 4", "step-00000002", "checkpoint.allow_batch_change = true"):
        assert said in refused.stderr
    assert run(config, "data.batch_size=4", "checkpoint.allow_batch_change=true").exit_code == 0
    assert [line["step"] for line in lines(config, "step")] == [1, 2, 3, 4]


def test_another_batch_size_takes_the_samples_that_come_next(points: Path, tmp_path: Path) -> None:
    seen: list[list[int]] = []

    def watched(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        seen.append(batch["__index__"].tolist())
        return trainkit.loss(model, batch)

    def train(folder: str, steps: int, batch: int, **more: Any) -> None:
        model = trainkit.make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = trainkit.options(tmp_path / folder, steps, checkpoint=CheckpointOptions(every=0, **more))
        Runtime(model, watched, trainkit.make_loader(points, batch), optimizer, chosen).run()

    train("whole", 8, 8)
    whole, seen[:] = list(itertools.chain(*seen)), []
    train("changed", 3, 8)
    with pytest.raises(StateError, match="batch size"):
        train("changed", 13, 4)
    train("changed", 13, 4, allow_batch_change=True)
    assert [len(one) for one in seen] == [8] * 3 + [4] * 10
    assert list(itertools.chain(*seen)) == whole
    with pytest.raises(StateError, match="no whole number of batches of 24"):
        train("changed", 14, 8, allow_batch_change=True)
        train("changed", 15, 24, allow_batch_change=True)


def test_a_loader_of_ones_own_is_not_asked_for_another_batch_size(tmp_path: Path) -> None:
    batches = [{"x": torch.zeros(4, 4), "y": torch.zeros(4)}] * 4

    def train(steps: int) -> None:
        model = trainkit.make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = trainkit.options(tmp_path, steps, checkpoint=CheckpointOptions(allow_batch_change=True))
        Runtime(model, trainkit.loss, trainkit.Batches(batches), optimizer, chosen).run()

    train(2)
    with pytest.raises(ConfigError, match=r"allow_batch_change.*Batches"):
        train(4)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("model.options.fielt='x'", "unknown key 'fielt'; did you mean 'field'?"),
        ("model.kind=vlaa", "there are vla, lm, and module:function for yours: vla?"),
        ("model={kind='vla', options={freeze=['visionn']}}", "did you mean 'vision'?"),
        ("data.mixture={weight=[1]}", "Did you mean 'weights'?"),
        ("data.packing={field='x', window=8, capacityy=9}", "Did you mean 'capacity'?"),
        ("data.accumulate=0", "data.accumulate is 0"),
        ("data.max_bytes='4Gib'", "max_bytes is a number of bytes"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas is [0.9, 1.0]"),
        ("data.fields.x=[{transform='Tokenss', length=4}]", "data.fields.x: transforms: Invalid value 'Tokenss'"),
        ("data.fields.x=[{transform='Tokens', lenght=4}]", "'lenght': did you mean 'length'?"),
        ("data.batch_transforms=[{transform='MixUpp'}]", "did you mean 'MixUp'?"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_a_check_finds_what_a_run_would(config: Path, value: str, said: str, check: bool) -> None:
    words = [*(("model.kind=lm",) if "fielt" in value else ()), value]
    found = CliRunner().invoke(main, ["run", str(config), *(["--check"] if check else []), *(f"--set={one}" for one in words)])
    assert found.exit_code == 1 and said in found.stderr, found.output


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("precision.mode=fp16",), 'and this is "fp16"'),
        (("data.accumulate=2",), "a step has 2 micro-batches"),
        (("data.over=split", "data.max_bytes=1GiB"), 'data.over = "split" gives steps in micro-batches'),
        (("ddp.hook=powersgd",), 'ddp.hook = "powersgd" takes gradients in fp32'),
        (("optimizer.kind=sgd",), "needs lftrain.AdamW"),
        (("optimizer.fused=false",), "needs lftrain.AdamW"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_a_check_finds_what_weights_in_bf16_do_not_go_with(
    config: Path, values: tuple[str, ...], said: str, check: bool
) -> None:
    words = ("precision.mode=bf16", "precision.weights=compute", *values)
    found = CliRunner().invoke(main, ["run", str(config), *(["--check"] if check else []), *(f"--set={one}" for one in words)])
    assert found.exit_code == 1 and said in found.stderr, found.output


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("optimizer.lr=inf",), "optimizer.lr is not a finite number"),
        (("precision.mode=fp16", "precision.scale_init=1e300"), "precision.scale_init"),
        (("optimizer.betas=[0.9, nan]",), "optimizer.betas is not a finite number"),
        (("optimizer.betas=[1.0, 0.9]",), "optimizer.betas is [1.0, 0.9]; each is 0 or more, and less than 1"),
        (("optimizer.kind=sgd", "optimizer.betas=[-1, 0.9]"), "optimizer.betas is [-1.0, 0.9]"),
        (("ddp.bucket_mb=1e300",), "ddp.bucket_mb"),
        (("run.collective_seconds=1e300",), "run.collective_seconds"),
        (("model.kind=:",), "model.kind ':' cannot be imported"),
        (("model.kind=vla",), "the model needs a field 'action' and gets x, y"),
        (
            ("model.kind=lm", "model.options={vocab=9, field='x', width=8, heads=1, hidden=8, layers=1, pad=0.5}"),
            "model.options",
        ),
        (("model.kind=lm", "model.options={vocab=9, field='y'}"), "field 'y' comes as (8,) and the model takes (rows, any)"),
        (("held_out.path='none'",), "held_out.path"),
        (("data.path='none'",), "the loader gives no batch in a whole epoch"),
        (
            ("precision.mode=bf16", "precision.weights=compute", "data.accumulate=auto", "activations.limit_mb=0.0002"),
            "micro-batches, whose gradients precision.weights",
        ),
        (("data.path='none'", "data.accumulate=auto", "activations.limit_mb=1"), "fewer samples than data.batch_size"),
    ],
)
def test_what_cannot_be_used_is_told_in_a_line(config: Path, values: tuple[str, ...], said: str) -> None:
    trainkit.write_points(config.parent / "none", 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loader has no batches")
        found = run(config, *values)
    assert found.exit_code == 1 and isinstance(found.exception, SystemExit)
    assert found.stderr.startswith("lftrain: ") and said in found.stderr
