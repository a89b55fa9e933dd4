"""The training loop: ``Runtime(model, loss, loader, optimizer, options).run()``."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from lfdata.errors import BudgetError, LfdataError, StateError
from lftrain.comm.checksum import compare
from lftrain.comm.ddp import Parallel
from lftrain.comm.group import Group, join
from lftrain.comm.pulse import Pulse, is_collective_error
from lftrain.compute import masters
from lftrain.compute.compile import CompiledBlocks
from lftrain.compute.fp8 import refresh
from lftrain.compute.graph import GraphedStep
from lftrain.errors import CheckpointError, ConfigError, DamagedCheckpointError
from lftrain.health.live import Live
from lftrain.health.meter import Meter
from lftrain.health.records import Records
from lftrain.health.trace import Trace
from lftrain.memory.activations import MB, prepare
from lftrain.memory.admission import Admission
from lftrain.memory.ledger import Ledger
from lftrain.memory.measure import undisturbed
from lftrain.options import Options
from lftrain.runtime.checkpoint import Checkpoints
from lftrain.runtime.environment import environment
from lftrain.runtime.evaluate import held_out_loss
from lftrain.runtime.export import export
from lftrain.runtime.feed import Feed, LoaderLike
from lftrain.runtime.precision import Precision
from lftrain.runtime.rates import Rates, Schedule
from lftrain.runtime.seed import be_deterministic, derive, random_state, seed_all, set_random_state
from lftrain.runtime.state import HOOK, check_state, collect, restore
from lftrain.runtime.step import Loss, StepRunner, check_parameters
from lftrain.runtime.storage import Reader, read_tensor
from lftrain.runtime.watch import Watch


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        step: steps done, over all restarts; ``began`` of them by earlier lives of the run.
        finished: whether all steps are done; if not, a signal ended it.
        loss: the last that is known, NaN without any. held_out: likewise of held-out data. skipped: steps that changed nothing.
    """

    step: int
    finished: bool
    loss: float
    held_out: float | None
    skipped: int
    began: int = 0


class Runtime:
    """Trains a model.

    Args:
        model, loss, loader, optimizer: see docs/runtime.md. The model may be anywhere; the optimiser is made from its parameters.
        options: of the runtime. schedule: factor of the learning rate by step; constant by default.
        accumulate: batches of the loader that make a step; by default what the loader's state says, else 1.
        held_out: loader of data for evaluation, every ``held_out_every`` steps (0: only at the end).
        group: the ranks, if they have been joined already.
        record: more for run.json.

    Raises:
        ConfigError, CheckpointError, RanksError: before anything is trained.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        loader: LoaderLike,
        optimizer: torch.optim.Optimizer,
        options: Options,
        *,
        schedule: Schedule | None = None,
        accumulate: int | None = None,
        held_out: Any = None,
        held_out_every: int = 0,
        group: Group | None = None,
        record: dict[str, Any] | None = None,
    ) -> None:
        run, metrics = options.run, options.metrics
        if run.deterministic:
            be_deterministic()
        self.options, self.group = options, group or join(run)
        self.group.same("the configuration", msgspec.to_builtins(options))
        self.folder, first = Path(run.folder), self.group.rank == 0
        rank = self.group.rank if self.group.world > 1 else None
        self.records = Records(self.folder if first else None, metrics.tensorboard, rank)
        device = self.group.device
        micro = accumulate or int(loader.state_dict().get("accumulate", 1))
        masters.check(options, micro, masters.takes_masters(optimizer))
        self.model, self.optimizer, self.loss = model.to(device), optimizer, loss
        self.precision = Precision(options.precision, device)
        if told := self.precision.prepare(model):
            self.records.event("fp8", told, shared=True)
        self.parallel = Parallel(model, self.group, options.ddp, lambda text: self.records.event("hook", text, shared=True))
        check_parameters(optimizer, self.parallel)
        check_state(model)
        self.meter = Meter(device)
        clip = options.precision.clip or None
        self.runner = StepRunner(loss, self.parallel, optimizer, self.precision, self.group, clip, self.meter.mark)
        self.feed = Feed(loader, micro, device, options.run.copy_ahead)
        self.rates = Rates(optimizer, schedule or (lambda _: 1.0))
        self.live = Live(metrics.live if first else "off", run.steps)
        self.watch = Watch(options, self.runner, self.group, self.meter, self.records, self.live, loader)
        self.ledger = Ledger(model, optimizer, loader, device, metrics.growth_mb)
        self.trace = Trace(self.folder / f"trace-{self.group.rank}.json", metrics.trace_first, metrics.trace_steps, device)
        self.held_out, self.held_out_every = held_out, held_out_every
        self.held_out_loss: float | None = None
        self.blocks: list[nn.Module] = list(model.blocks()) if hasattr(model, "blocks") else []  # type: ignore[operator]
        self.compiled = CompiledBlocks(self.blocks, options.compile, self.records.event) if options.compile.blocks else None
        self.graphed = self._graph() if options.graph.enabled else None
        self.admission = self._admission(options.activations.admit_mb)
        parts = (("compile", self.compiled), ("graph", self.graphed), ("admission", self.admission))
        self.watch.extra = {name: part.report for name, part in parts if part is not None}
        self.step, self._asked, self._place = 0, False, loader.state_dict()
        self._begun, self._first = False, 0
        # Last, since it takes the folder's lock.
        self.checkpoints = Checkpoints(self.folder, options.checkpoint, self.group, self.records.event)
        self._record = {"options": msgspec.to_builtins(options), "environment": environment(device), **(record or {})}

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Train until ``run.steps`` or a signal, from the newest checkpoint on. Can be called once.

        Raises:
            NonFiniteError, DivergenceError, CheckpointError, PeerError, and whatever loader, model and loss raise. Before
                :class:`lfdata.errors.BudgetError` (an epoch is beyond the loader's ``max_bytes``) a checkpoint is written.
        """
        signals = self._catch_signals()
        pulse = Pulse(self.group, self.options.run.peer_seconds)
        try:
            self._begin()
            try:
                while self.step < self.options.run.steps and not self.watch.stop:
                    pulse.note(self.step, "step")
                    self._one()
                    pulse.note(self.step, "checkpoint or evaluation")
                    self._after()
            except BudgetError as error:
                pulse.note(self.step, "checkpoint")
                self._keep(error)
                raise
            self._end()
        except Exception as error:
            others = self.group.world > 1 and is_collective_error(error)
            told = pulse.explain(error) if others else error
            # In the records alone: who is called with the error shows it.
            self.records.write("event", self.step, name="failed", message=f"{type(told).__name__}: {told}")
            pulse.stop(f"{type(told).__name__}: {told}")
            if told is error:
                raise
            raise told from error
        finally:
            self._close(signals)
        pulse.stop()
        self.group.leave()
        finished = self.step >= self.options.run.steps
        return Result(self.step, finished, self.watch.loss, self.held_out_loss, self.watch.skipped, self._first)

    def advance(self, steps: int) -> None:
        """So many steps and nothing around them (evaluation, checkpoint, signals), and wait for them: for measuring. :meth:`close` ends it."""
        if not self._begun:
            self._begin()
        for _ in range(steps):
            self._one()
        self.watch.drain()

    def close(self) -> None:
        """After :meth:`advance`."""
        self._close({})

    def _one(self) -> None:
        """One step."""
        self.trace.before(self.step)
        self.meter.begin()
        step = self.feed.next()
        self.meter.mark("data")
        self.feed.arrive(step)
        self.meter.mark("copy")
        rate = self.rates.set(self.step)
        if self._asked:
            self.runner.stop.fill_(1)
        if self.admission is not None:
            step.batches, step.host = self.admission.admit(step.batches, step.host)
        report = (self.graphed or self.runner)(step.batches)
        if self.graphed is not None and self.graphed.captured:
            self.meter.mark("graph")
        self.step, self._place = self.step + 1, step.state
        self.meter.end()
        self.feed.look_ahead()
        self.trace.after(self.step - 1)
        self.watch.add(self.step, step, report, rate)

    def _after(self) -> None:
        """What is due between two steps."""
        last = self.step == self.options.run.steps
        if _due(self.step, self.options.ddp.checksum_every):
            compare(self.model, self.group, self.step)
        if _due(self.step, self.options.metrics.every * self.options.metrics.memory_every):
            self._look_at_memory()
        if self.held_out is not None and (_due(self.step, self.held_out_every) or last):
            self._evaluate()
        if _due(self.step, self.options.checkpoint.every) or last or self.watch.stop:
            self._save()
            self.meter.interrupt()

    # -- around it ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._begun = True
        seed_all(derive(self.options.run.seed, "rank", self.group.rank))
        self._resume()
        self._first = self.step
        self.records.run(self._record)
        self.records.write("start", self.step, world=self.group.world)
        self.model.train()
        if self.step < self.options.run.steps:
            with undisturbed(self.model):
                plan = prepare(self.blocks, self.options.activations, self.compiled is not None, self._forward)
            if plan:
                self.records.event("plan", plan, step=self.step)

    def _forward(self) -> torch.Tensor:
        """The loss of the first micro-batch to come, for measuring; nothing is consumed."""
        step = self.feed.peek()
        self.feed.arrive(step)
        with self.precision.autocast():
            return self.loss(self.model, step.batches[0])[0]

    def _admission(self, most: float | None) -> Admission | None:
        if most is None:
            return None
        if self.graphed is not None:
            raise ConfigError("activations.admit_mb cuts micro-batches, and a graph has fixed shapes: leave one of them out")
        if self.group.world > 1 and any(isinstance(one, nn.SyncBatchNorm) for one in self.model.modules()):
            raise ConfigError(
                "activations.admit_mb cuts micro-batches on each rank alone, and SyncBatchNorm waits for the other ranks in each of them: "
                'leave one of them out (data.over = "split" cuts alike on all ranks)'
            )
        found = Admission(most * MB, self.model, self.group.device, lambda text: self.records.event("not cut", text))
        self.runner.watching = found.watching
        return found

    def _graph(self) -> GraphedStep:
        def state() -> list[torch.Tensor]:
            kept = [value for one in self.optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
            return [*kept, *self.precision.masters, *self.precision.tensors(), *self.runner.buffers.tensors()]

        return GraphedStep(
            self.runner,
            self.parallel.parameters,
            state,
            self.optimizer,
            self.group.device,
            self.group.world,
            self.options.graph,
            self.records.event,
            lambda paused: setattr(self.meter, "paused", paused),
        )

    def _end(self) -> None:
        self.watch.drain()
        if self.checkpoints.last != self.step:
            self._save()
        self.checkpoints.finish()
        if self.options.checkpoint.export and self.group.rank == 0:
            export(self.model, self.folder / "model.safetensors", self.step)
        finished = self.step >= self.options.run.steps
        self.records.write("end", self.step, finished=finished, loss=self.watch.loss, held_out=self.held_out_loss)

    def _keep(self, error: BudgetError) -> None:
        """An epoch does not fit into the loader's budget, which all ranks learn at the same step: nothing of the run so far is lost."""
        self.watch.drain()
        if self.step and self.checkpoints.last != self.step:
            self._save()
        self.checkpoints.finish()
        error.add_note(f"What was trained is kept: with a larger max_bytes the run goes on from step {self.step}")

    def _close(self, signals: dict[int, Any]) -> None:
        self.trace.close()
        self.feed.close()
        self.checkpoints.close()
        self.live.close()
        self.records.close()
        for number, handler in signals.items():
            signal.signal(number, handler)

    def _evaluate(self) -> None:
        seed = self.options.run.seed
        self.held_out_loss = held_out_loss(self.loss, self.model, self.held_out, self.group, self.precision, seed)
        self.records.write("held_out", self.step, loss=self.held_out_loss)
        self.meter.interrupt()

    def _look_at_memory(self) -> None:
        self.watch.memory = self.ledger.look()
        for owner, grown in self.ledger.grown(self.watch.memory):
            self.records.event("memory grows", f"{owner}: {grown:.0f} MB more, and it never fell", step=self.step, owner=owner)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self.watch.drain()
        tensors, plain = collect(self.model, self.optimizer)
        hook, kept = self.parallel.hook_state()
        state = {
            "loader": self._place,
            "optimizer": plain,
            "precision": self.precision.state_dict(),
            "watch": self.watch.state_dict(),
            "held_out": self.held_out_loss,
            "hook": hook,
            "nominal": self.runner.nominal,
            "world": self.group.world,
            "own": random_state(self.group.device),
        }
        self.checkpoints.save(self.step, tensors, state, {HOOK + name: value for name, value in kept.items()})

    def _resume(self) -> None:
        damaged = ""
        for path in self.checkpoints.candidates():
            try:
                self._load(path)
                error = ""
            except DamagedCheckpointError as found:
                error = str(found)
            if error := next((one for one in self.group.gather_json(error) if one), ""):
                self.checkpoints.set_aside(path, error)
                damaged = error
                continue
            self.records.event("resume", f"from step {self.step}, {path}", step=self.step, shared=True)
            return
        damaged = damaged or self.checkpoints.only_damaged()
        if damaged:
            raise CheckpointError(f"no sound checkpoint is left. The last: {damaged}. Use another run.folder to begin anew")

    def _load(self, path: Path) -> None:
        manifest, state = self.checkpoints.read(path)
        where = str(path)
        try:
            untouched = int(state["watch"].get("skipped", 0)) >= manifest.step
            restore(self.model, self.optimizer, Reader(path, manifest), manifest, state["optimizer"], where, untouched)
            refresh(self.model)
            masters.refresh(self.model)
            self.precision.load_state_dict(state["precision"], where)
            self.watch.load_state_dict(state["watch"])
            self.feed.load_state_dict(state["loader"], self.options.checkpoint.allow_batch_change)
            held_out = state.get("held_out")
            self.held_out_loss = None if held_out is None else float(held_out)
            self.runner.nominal = float(state["nominal"])
            self.parallel.load_hook_state(state.get("hook"), lambda name: read_tensor(path, manifest, HOOK + name))
            owns, self.step, self._place = list(state["own"]), manifest.step, state["loader"]
        except StateError as error:
            error.add_note(f"It is that of the checkpoint {path}")
            if "allow_batch_change" in str(error):
                error.add_note("In a configuration: checkpoint.allow_batch_change = true")
            raise
        except LfdataError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpointError(path / "state.json", None, f"not a state of a run: {error!r}") from error
        self.checkpoints.last = self.step
        if len(owns) == self.group.world:
            set_random_state(owns[self.group.rank], self.group.device, where)
        else:
            seed_all(derive(self.options.run.seed, "resumed", self.step, self.group.rank))

    # -- signals ------------------------------------------------------------------------------------------------------

    def _catch_signals(self) -> dict[int, Any]:
        """SIGTERM and the first Ctrl-C end the run after the step; the handlers that were there."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}

    def _ask(self, number: int, _: Any) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = True


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
