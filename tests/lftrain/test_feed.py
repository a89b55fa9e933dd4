"""The feed gives the same steps whoever makes the batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trainkit

from lfdata import DeviceLoader
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
