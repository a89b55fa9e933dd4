"""How well peak bytes are foretold from shapes: ``python -m benchmarks.gpu.activations --output RECORD.json``.

A transformer over ragged batches (padded to the longest), a convolution over pictures of any size, and experts of which each gets what
it gets. The model sees some shapes, in turn, and is asked about others that it never saw; beside it the baseline, "as much as the largest
so far". On a GPU the peak of torch's allocator is measured, on a CPU what is kept for the backward pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.gpu.log import Log, summary
from lftrain.memory.measure import kept, peak
from lftrain.memory.model import ActivationModel, Shape

PART = "activations"
Case = tuple[Shape, Callable[[], torch.Tensor]]


class Attention(nn.Module):
    """A layer that keeps its scores, as attention without a fused kernel does."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.inner, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = (one.view(rows, tokens, self.heads, -1).transpose(1, 2) for one in self.inner(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(rows, tokens, width))
        result: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return result


class Experts(nn.Module):
    """Each token goes to one expert; the first is wider than the others, so who gets what decides what is kept."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, (16 if number == 0 else 2) * width),
                nn.GELU(),
                nn.Linear((16 if number == 0 else 2) * width, width),
            )
            for number in range(count)
        )

    def forward(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return torch.cat([expert(x[to == number]) for number, expert in enumerate(self.experts)])


def transformer(device: torch.device, scale: int) -> tuple[nn.Module, Callable[[np.random.Generator], Case]]:
    """Rows of different lengths, padded."""
    model = nn.Sequential(*(Attention(32 * scale, 4) for _ in range(3))).to(device)

    def case(rng: np.random.Generator) -> Case:
        rows, tokens = int(rng.integers(1, 9)), int(rng.integers(4, 96)) * scale
        x = torch.randn(rows, tokens, 32 * scale, device=device)
        return {"rows": rows, "tokens": rows * tokens, "rows*tokens^2": rows * tokens**2}, lambda: model(x).square().mean()

    return model, case


def convolution(device: torch.device, scale: int) -> tuple[nn.Module, Callable[[np.random.Generator], Case]]:
    """Pictures of their own size."""
    layers = [
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 8, 3),
    ]
    model = nn.Sequential(*layers).to(device)

    def case(rng: np.random.Generator) -> Case:
        rows, height, width = (int(value) for value in rng.integers((1, 16, 16), (6, 96, 96)))
        x = torch.randn(rows, 3, height * scale, width * scale, device=device)
        return {"rows": rows, "pixels": x.numel() / 3}, lambda: model(x).square().mean()

    return model, case


def experts(device: torch.device, scale: int) -> tuple[nn.Module, Callable[[np.random.Generator], Case]]:
    """Tokens by expert: the features have what the first gets, and what the others do."""
    model = Experts(32 * scale, 4).to(device)

    def case(rng: np.random.Generator) -> Case:
        tokens, share = int(rng.integers(64, 1024)), rng.uniform(0.05, 0.9)
        to = torch.from_numpy((rng.random(tokens) > share) * rng.integers(1, 4, tokens)).to(device)
        x = torch.randn(tokens, 32 * scale, device=device)
        first = int((to == 0).sum())
        return {"tokens": tokens, "first expert": first}, lambda: model(x, to).square().mean()

    return model, case


MODELS = {"transformer": transformer, "convolution": convolution, "experts": experts}


def measured(model: nn.Module, forward: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Bytes of a micro-batch, forward and backward."""
    model.zero_grad(set_to_none=True)
    with peak(device) if device.type == "cuda" else kept(model.parameters()) as taken:
        forward().backward()
    return taken.bytes


def cases(make: Callable[[np.random.Generator], Case], seed: int) -> Iterator[Case]:
    """One after the other."""
    rng = np.random.default_rng(seed)
    while True:
        yield make(rng)


def compare(name: str, device: torch.device, scale: int, seen: int, held_out: int, seed: int = 0) -> dict[str, Any]:
    """Relative errors at shapes that were never seen, of the model and of the baseline, and how often each would have been too low."""
    torch.manual_seed(seed)
    network, make = MODELS[name](device, scale)
    found: ActivationModel | None = None
    errors: dict[str, list[float]] = {"model": [], "max_so_far": []}
    low = 0
    for number, (shape, forward) in enumerate(cases(make, seed)):
        if number == seen + held_out:
            break
        taken = measured(network, forward, device)
        found = found or ActivationModel(tuple(shape))
        if number < seen:
            found.observe(shape, taken)
            continue
        expected = found.predict(shape)
        assert expected is not None
        errors["model"].append(abs(expected.bytes - taken) / taken)
        errors["max_so_far"].append(abs(found.baseline.bytes - taken) / taken)
        low += taken > expected.most
    assert found is not None
    return {
        "seen": seen,
        "held_out": held_out,
        "coefficients": {key: round(value, 3) for key, value in found.coefficients.items()},
        "error": {who: summary(values) for who, values in errors.items()},
        "beyond_the_band": low,
        "measure": "peak of the allocator" if device.type == "cuda" else "kept for the backward pass",
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=int, default=1, help="width of the models and size of what they get")
    parser.add_argument("--seen", type=int, default=40)
    parser.add_argument("--held-out", type=int, default=60)
    chosen = parser.parse_args()
    for name in ("scale", "seen", "held_out"):
        if (value := getattr(chosen, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} is a whole number from 1 on, not {value}")
    device = torch.device(chosen.device)
    log = Log(chosen.output, PART, "benchmarks.gpu.activations", device)
    for name in MODELS:
        log.fresh(name)
        found = compare(name, device, chosen.scale, chosen.seen, chosen.held_out)
        log.put(name, **found)
        log.say(
            name,
            {who: values["median"] for who, values in found["error"].items()},
            "beyond the band:",
            found["beyond_the_band"],
        )


if __name__ == "__main__":
    main()
