"""A CUDA graph of the whole step, with a contract; what does not keep it runs eagerly, and the reason is told.

Contract: one GPU rank; the same names, shapes and dtypes of tensors in every step; nothing in model, loss and optimiser that reads from
the device; random numbers from the device's default generator, which a graph replays at the place where it is; learning rates in tensors.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lftrain.options import GraphOptions

Batch = dict[str, torch.Tensor]
Event = Callable[..., None]
RunStep = Callable[[Sequence[Batch]], torch.Tensor]


class GraphedStep:
    """Runs steps, from a graph once it is captured.

    Args:
        step: the eager step; returns its report, a tensor. parameters: what it trains. state: further tensors that it changes in place,
            as they are then (optimiser's state, gradient scale, buffers). quiet: called with true before and false after a capture, when no
            clock may be read.

    Attributes:
        captured: whether steps come from the graph. reason: why not, or "". replays, eager: steps of each kind.
    """

    def __init__(
        self,
        step: RunStep,
        parameters: Sequence[torch.nn.Parameter],
        state: Callable[[], list[torch.Tensor]],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        world: int,
        options: GraphOptions,
        event: Event,
        quiet: Callable[[bool], None],
    ) -> None:
        self._step, self._parameters, self._state = step, list(parameters), state
        self._device, self._options, self._event, self._quiet = device, options, event, quiet
        self._static: list[Batch] = []
        self._graph: Any = None
        self._report = torch.empty(0)
        self.replays, self.eager, self._odd = 0, 0, 0
        self.reason = self._hindrance(optimizer, world)
        if self.reason:
            self._tell(f"the step is not captured: {self.reason}")
        else:
            _prepare(optimizer, device)

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return self._graph is not None

    def __call__(self, batches: Sequence[Batch]) -> torch.Tensor:
        """One step."""
        if self._graph is None and not self.reason and self.eager >= self._options.warmup:
            return self._capture(batches)
        if self._graph is not None and self._fits(batches):
            self._fill(batches)
            self._graph.replay()
            self.replays += 1
            return self._report.clone()
        if self._graph is not None:
            self._odd += 1
            if self._odd & (self._odd - 1) == 0:  # the 1st, 2nd, 4th, ...: shapes may differ all the time
                times = f" (so far {self._odd} steps)" if self._odd > 1 else ""
                self._tell(f"a step's shapes are not those of the graph, it ran eagerly: {self._difference(batches)}{times}")
        self.eager += 1
        return self._step(batches)

    def report(self) -> dict[str, int]:
        """For the metrics."""
        return {"replays": self.replays, "eager": self.eager}

    # -- capture ------------------------------------------------------------------------------------------------------

    def _capture(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Capture, compare one replay with an eager step from the same state, and leave the state after that one step."""
        self._static = [{name: value.clone() for name, value in batch.items()} for batch in batches]
        before = self._snapshot()
        self._quiet(True)
        here, pool = torch.cuda.current_stream(self._device), torch.cuda.graph_pool_handle()
        try:
            side = torch.cuda.Stream(self._device)
            side.wait_stream(here)
            with torch.cuda.stream(side), _refused_to_wait():
                self._step(self._static)
            here.wait_stream(side)
            eager = [value.clone() for value in self._gradients()], self._snapshot()
            self._restore(before)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on with what they do on the GPU: torch's DataLoader pins memory from one.
            with _uncollected(), torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                self._report = self._step(self._static)
            graph.replay()
            worst = self._worst(*eager)
        except RuntimeError as error:
            self.reason = _why(error)
            _recover(self._device, here, pool)
            self._restore(before)
        else:
            self.reason = (
                "" if worst <= self._options.tolerance else f"graph and eager step differ by {worst:.2g} (graph.tolerance)"
            )
            if not self.reason:
                self._graph = graph
                self.replays += 1
                self._event("graph", f"the step is captured; it differs from the eager one by {worst:.2g}", difference=worst)
                return self._report.clone()
            self._restore(before)
        finally:
            self._quiet(False)
        self._tell(f"the step is not captured: {self.reason}")
        self.eager += 1
        return self._step(batches)

    def _gradients(self) -> list[torch.Tensor]:
        return [one.grad for one in self._parameters if one.grad is not None]

    def _tensors(self) -> list[torch.Tensor]:
        return [*(one.detach() for one in self._parameters), *self._state()]

    def _snapshot(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        return [value.clone() for value in self._tensors()], torch.cuda.get_rng_state(self._device)

    def _restore(self, snapshot: tuple[list[torch.Tensor], torch.Tensor]) -> None:
        values, random = snapshot
        for value, kept in zip(self._tensors(), values, strict=True):
            value.copy_(kept)
        torch.cuda.set_rng_state(random, self._device)

    def _worst(self, gradients: list[torch.Tensor], after: tuple[list[torch.Tensor], torch.Tensor]) -> float:
        """Largest relative difference of gradients and of what the step changed; infinite where one is not finite and the other is."""
        pairs = [*zip(self._gradients(), gradients, strict=True), *zip(self._tensors(), after[0], strict=True)]
        worst = 0.0
        for one, other in pairs:
            if not one.is_floating_point() or one.element_size() == 1 or not one.numel():
                continue
            if not torch.equal(one.isfinite(), other.isfinite()):
                return float("inf")
            difference = (one - other).nan_to_num().double().norm() / other.nan_to_num().double().norm().clamp(min=1e-12)
            worst = max(worst, float(difference))
        return worst

    # -- the contract -------------------------------------------------------------------------------------------------

    def _hindrance(self, optimizer: torch.optim.Optimizer, world: int) -> str:
        if self._device.type != "cuda":
            return f"there is no GPU (device {self._device})"
        if world > 1:
            return "there are several ranks, and DDP's hooks cannot be captured"
        if not all("capturable" in group for group in optimizer.param_groups):
            return f"{type(optimizer).__name__} cannot be captured (it has no option capturable)"
        if not all(group.get("fused") for group in optimizer.param_groups):
            return "the optimizer is not fused, so that a step to be skipped needs the host"
        return ""

    def _fits(self, batches: Sequence[Batch]) -> bool:
        return not self._difference(batches)

    def _difference(self, batches: Sequence[Batch]) -> str:
        if len(batches) != len(self._static):
            return f"{len(batches)} micro-batches instead of {len(self._static)}"
        for batch, static in zip(batches, self._static, strict=True):
            if batch.keys() != static.keys():
                return f"fields {sorted(batch)} instead of {sorted(static)}"
            for name, value in batch.items():
                if value.shape != static[name].shape or value.dtype != static[name].dtype:
                    return f"{name!r} is {tuple(value.shape)} instead of {tuple(static[name].shape)}"
        return ""

    def _fill(self, batches: Sequence[Batch]) -> None:
        for batch, static in zip(batches, self._static, strict=True):
            for name, value in batch.items():
                static[name].copy_(value, non_blocking=True)

    def _tell(self, message: str) -> None:
        self._event("no graph", message)


def _prepare(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Learning rates in tensors, and kernels that a graph can hold."""
    for group in optimizer.param_groups:
        group["capturable"] = True
        group["lr"] = torch.as_tensor(float(group["lr"]), dtype=torch.float32, device=device)


@contextlib.contextmanager
def _refused_to_wait() -> Iterator[None]:
    """Operations for which the host waits are errors. They are found before the capture: one that they break off leaves torch's allocator
    as if it went on, and memory that several streams use is never freed again."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not all of them are found
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No collection of garbage: what it frees (pinned memory, events) may call CUDA in ways that break a capture off."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _recover(device: torch.device, stream: torch.cuda.Stream, pool: Any) -> None:
    """After a capture that failed. If its end failed too, torch leaves the stream, the allocator and the random generator in it."""
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize(device)
    internal: Any = torch._C
    with contextlib.suppress(RuntimeError, AttributeError):
        internal._cuda_endAllocateToPool(device.index, pool)
        internal._cuda_releasePool(device.index, pool)
    try:
        torch.rand(1, device=device)
    except RuntimeError:
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())


def _why(error: RuntimeError) -> str:
    """What hindered a capture, in a line."""
    first: BaseException = error
    while isinstance(first.__context__, RuntimeError):
        first = first.__context__  # the end of a capture that was broken off fails too
    told = str(first).strip().splitlines()
    line = told[0] if told else type(error).__name__
    if "synchronizing CUDA operation" in line:
        return f"the step waits for the device: {line}. Look for .item(), float(), print, nonzero and tensors made from numbers of the host"
    return f"the capture failed: {line}"
