"""What is measured: runs of the runtime with their options, and the plain loop. All train the same model on the same samples."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.gpu import data
from benchmarks.gpu.baseline import PlainLoop, TorchLoader
from lfdata import Loader
from lfdata import transforms as T
from lftrain import (
    ActivationOptions,
    AdamW,
    CheckpointOptions,
    CompileOptions,
    DdpOptions,
    GraphOptions,
    MetricsOptions,
    Options,
    PrecisionOptions,
    RunOptions,
    Runtime,
)
from lftrain.models import make
from lftrain.options import ModelOptions

NEVER = 1 << 30
LR = 1e-4
TOLERANCE = {"compute": 1e-2, "fp8": 5e-2}
"""Of graph and eager step (``graph.tolerance``): what differs by a bit of bf16 may be rounded to another number of three bits."""


class Runs(Protocol):
    """What can be told to go on."""

    def advance(self, steps: int) -> None:
        """So many steps."""
        ...


@dataclass(frozen=True)
class Setting:
    """How something is trained.

    Attributes:
        loader: ``lfdata``, ``torch`` (``workers`` processes, pinned and kept) or ``torch-defaults``. fused, compiled, graph: what they say.
        runtime: false for the plain loop. accumulate: micro-batches of a step. trunk: whether picture and language layers are trained too.
        frozen: how layers that are not trained compute (``precision.frozen``). weights: how trained ones are stored (``precision.weights``).
        feedback: of lfdata's loader. bucket_mb, bucket_view: of DDP, with several ranks.
    """

    loader: str = "lfdata"
    workers: int = 0
    runtime: bool = True
    fused: bool = True
    compiled: bool = False
    graph: bool = False
    precision: str = "bf16"
    accumulate: int = 1
    deterministic: bool = False
    trunk: bool = False
    frozen: str = "compute"
    weights: str = "fp32"
    torch_budget: float | None = None
    feedback: bool = False
    bucket_mb: float = 25.0
    bucket_view: bool = True


@dataclass
class Bench:
    """What all subjects share.

    Attributes:
        folder: made by benchmarks.gpu.data. scratch: for the runs' folders. size: of the model. batch: samples of a step, over all ranks.
    """

    folder: Path
    scratch: Path
    device: torch.device
    size: str
    batch: int
    backend: str = "inductor"
    seed: int = 0
    frozen: dict[torch.dtype, dict[str, torch.Tensor]] = field(default_factory=dict)
    made: int = 0

    def image_size(self) -> int:
        """Side of a picture as the model takes it."""
        return 224 if self.size == "large" else 32

    def model(self, setting: Setting) -> tuple[nn.Module, Any]:
        """The model, made on the device; the same numbers each time."""
        about = data.read(self.folder)
        options = {"vocab": about.vocab, "state_size": about.state, "action_size": about.action, "horizon": about.horizon}
        frozen: list[str] = [] if setting.trunk else ["vision", "language"]
        with torch.device(self.device):
            torch.manual_seed(self.seed)
            return make(ModelOptions(kind="vla", size=self.size, options={**options, "freeze": frozen}))

    def loader(self, setting: Setting) -> Any:
        """Batches of a setting."""
        if setting.loader != "lfdata":
            plain = setting.loader == "torch-defaults"
            workers = 0 if plain else setting.workers
            return TorchLoader(self.folder, self.image_size(), self.batch, workers, not plain and self.device.type == "cuda")
        fields: dict[str, list[Any] | None] = {
            "image": [T.RandomResizedCrop(self.image_size())],
            "tokens": [T.Tokens(data.LENGTH)],
            "state": None,
            "action": None,
        }
        more: dict[str, Any] = {"accumulate": setting.accumulate, "feedback": setting.feedback}
        return Loader(self.folder / data.SHARDS, self.batch, fields, seed=self.seed, **more)

    def share(self, model: nn.Module) -> None:
        """Parameters that nobody changes are held once for all models."""
        for name, one in model.named_parameters():
            if not one.requires_grad:
                one.data = self.frozen.setdefault(one.dtype, {}).setdefault(name, one.data)


class Subject:
    """A setting, built and ready.

    Attributes:
        first_ms: time of each of the first steps, in which things are compiled and captured.
    """

    def __init__(self, name: str, bench: Bench, setting: Setting) -> None:
        self.name, self.bench, self.setting = name, bench, setting
        began = time.perf_counter()
        self.loader = bench.loader(setting)
        model, loss = bench.model(setting)
        self.model = model
        trained = [one for one in model.parameters() if one.requires_grad]
        # Not fused: as torch chooses it where nobody says anything, which on a GPU is foreach.
        kind = AdamW if setting.fused else torch.optim.AdamW
        optimizer = kind(trained, lr=LR, betas=(0.9, 0.95), fused=setting.fused or None)
        self.runs: Runs
        self.runtime: Runtime | None = None
        bench.made += 1
        self.folder = bench.scratch / f"run-{bench.made}"
        if setting.runtime:
            self.runs = self.runtime = Runtime(
                model, loss, self.loader, optimizer, self._options(), accumulate=setting.accumulate
            )
        else:
            self.runs = PlainLoop(model, loss, self.loader, optimizer, bench.device)
        bench.share(model)
        self.built_s = time.perf_counter() - began
        self.first_ms: list[float] = []

    def _options(self) -> Options:
        setting, device = self.setting, self.bench.device.type
        torch_budget = ActivationOptions(mode="torch", torch_budget=setting.torch_budget or 0.0)
        return Options(
            run=RunOptions(
                folder=str(self.folder),
                steps=NEVER,
                seed=self.bench.seed,
                deterministic=setting.deterministic,
                device="cuda" if device == "cuda" else "cpu",
            ),
            precision=PrecisionOptions(mode=setting.precision, frozen=setting.frozen, weights=setting.weights),  # type: ignore[arg-type]
            ddp=DdpOptions(bucket_mb=setting.bucket_mb, bucket_view=setting.bucket_view, checksum_every=0),
            compile=CompileOptions(blocks=setting.compiled, backend=self.bench.backend),
            graph=GraphOptions(enabled=setting.graph, tolerance=TOLERANCE[setting.frozen]),
            activations=ActivationOptions() if setting.torch_budget is None else torch_budget,
            checkpoint=CheckpointOptions(every=0),
            metrics=MetricsOptions(every=NEVER, live="off", memory_every=0),
        )

    def warm_up(self, steps: int) -> None:
        """The first steps, each timed by itself."""
        for _ in range(steps):
            self.first_ms.append(self.timed(1))

    def timed(self, steps: int) -> float:
        """Milliseconds a step, from a device that has nothing to do to one that has nothing to do."""
        settle(self.bench.device)
        began = time.perf_counter()
        self.runs.advance(steps)
        settle(self.bench.device)
        return 1e3 * (time.perf_counter() - began) / steps

    def parts(self) -> dict[str, float]:
        """Milliseconds a step by part, of the steps since this was last asked; nothing for the plain loop."""
        if self.runtime is None:
            return {}
        taken = self.runtime.meter.take()
        names = sorted({name for one in taken for name in one})
        return {name: round(sum(one.get(name, 0.0) for one in taken) / len(taken), 3) for name in names}

    def loss(self) -> float:
        """Of the last step."""
        if isinstance(self.runs, PlainLoop):
            return float(self.runs.losses[-1])
        assert self.runtime is not None
        return self.runtime.watch.loss

    def told(self) -> dict[str, Any]:
        """What became of compilation and capture, with reasons."""
        if self.runtime is None:
            return {}
        found: dict[str, Any] = {name: report() for name, report in self.runtime.watch.extra.items()}
        found["skipped"] = self.runtime.watch.skipped
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        events = [one for one in map(json.loads, lines) if one["kind"] == "event"]
        found["events"] = [f"{one['name']}: {one['message']}" for one in events][:20]
        if isinstance(self.loader, Loader):
            found["copied"] = self.loader.stats()["copied"]
        return found

    def close(self) -> None:
        """End the run and its loader, and let go of everything."""
        if self.runtime is not None:
            self.runtime.close()
        self.loader.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def settle(device: torch.device) -> None:
    """Until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Give unused memory back, so that the next subject finds the same."""
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def on_gpu(event: Any) -> bool:
    """Whether an event is work of the GPU, and no name that somebody gave to a stretch of it."""
    return "CUDA" in str(event.device_type) and not getattr(event, "is_user_annotation", False)


def busy_ms(run: Callable[[], None], device: torch.device, steps: int) -> float | None:
    """Milliseconds a step in which the device does something, by torch's profiler; ``None`` without a GPU."""
    if device.type != "cuda":
        return None
    from torch.autograd.profiler_util import FunctionEvent
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        run()
        settle(device)
    events: list[FunctionEvent] = list(seen.events() or ())
    spans = sorted((one.time_range.start, one.time_range.end) for one in events if on_gpu(one))
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 1e3 / steps
