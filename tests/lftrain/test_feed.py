"""The feed gives the same steps whoever makes the batches."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import trainkit

from lfdata import DeviceLoader
from lftrain import Runtime
from lftrain.runtime.feed import Feed

CPU = torch.device("cpu")


def steps(loader: Any, accumulate: int, count: int, state: Any = None) -> list[Any]:
    """Samples of each step, the state after it, and its epoch."""
    feed = Feed(loader, accumulate, CPU, 2)
    if state is not None:
        feed.load_state_dict(state)
    found = []
    for _ in range(count):
        feed.look_ahead()
        step = feed.next()
        feed.arrive(step)
        values = [value.clone() for batch in step.batches for value in batch.values()]
        found.append(([batch["__index__"].tolist() for batch in step.host], step.state, step.epoch, values))
    feed.close()
    return found


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        a[:3] == b[:3] and all(torch.equal(x, y) for x, y in zip(a[3], b[3], strict=True))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_device_loader_gives_the_steps_of_its_loader(tmp_path: Path, accumulate: int) -> None:
    data = trainkit.write_points(tmp_path / "d")
    plain = steps(trainkit.make_loader(data, accumulate=accumulate), accumulate, 20)
    loader = DeviceLoader(trainkit.make_loader(data, accumulate=accumulate), "cpu")
    assert same(steps(loader, accumulate, 20), plain)
    for taken in (3, 8, 9):
        again = DeviceLoader(trainkit.make_loader(data, accumulate=accumulate), "cpu")
        assert same(steps(again, accumulate, 20 - taken, plain[taken - 1][1]), plain[taken:])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_in_parts_is_one_batch_of_the_step(tmp_path: Path, accumulate: int) -> None:
    data = trainkit.write_points(tmp_path / "d", 4096)
    plain = steps(trainkit.make_loader(data, 1024, accumulate), accumulate, 9)
    split = {"max_bytes": "60KB", "over": "split"}
    parts = steps(trainkit.make_loader(data, 1024, accumulate, **split), accumulate, 9)
    assert max(len(step[0]) for step in parts) > accumulate
    assert [list(itertools.chain(*step[0])) for step in parts] == [list(itertools.chain(*step[0])) for step in plain]
    assert [step[1:3] for step in parts] == [step[1:3] for step in plain], "a step's state is that between whole batches"
    device = DeviceLoader(trainkit.make_loader(data, 1024, accumulate, **split), "cpu")
    assert same(steps(device, accumulate, 9), parts)
    again = trainkit.make_loader(data, 1024, accumulate, **split)
    assert same(steps(again, accumulate, 6, plain[2][1]), parts[3:])


def test_training_on_parts_is_training_on_the_batch(tmp_path: Path) -> None:
    data = trainkit.write_points(tmp_path / "d", 4096)

    def trained(name: str, **split: Any) -> Any:
        model = trainkit.make_model(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = trainkit.make_loader(data, 1024, **split)
        runtime = Runtime(model, trainkit.loss, loader, optimizer, trainkit.options(tmp_path / name, 6))
        result = runtime.run()
        return [value.detach() for value in model.parameters()], result.loss

    whole, loss = trained("whole")
    parts, same_loss = trained("parts", max_bytes="60KB", over="split")
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert same_loss == pytest.approx(loss, rel=1e-5)
