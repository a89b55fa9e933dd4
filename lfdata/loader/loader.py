"""``lfdata.Loader``: batches of torch tensors (or numpy arrays) in exact order, from any number of ranks, continued at any step."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NoReturn

from lfdata.dataset import ShardDataset
from lfdata.errors import BadSamplesError, LfdataError, OptionError
from lfdata.loader import options
from lfdata.loader.batch import Names, cut, maker
from lfdata.loader.budget import LEAST_BYTES, OVER, Budget
from lfdata.loader.decoder import uninterrupted
from lfdata.loader.engine import MOST_DECODERS
from lfdata.loader.feedback import Wanted, checked
from lfdata.loader.follow import EpochSampler
from lfdata.loader.forecast import Forecast, forecast
from lfdata.loader.given import Where, filters_of, source_spec, this_rank
from lfdata.loader.jobs import Event
from lfdata.loader.pipeline import Pipeline, start, stop, stop_in_turn
from lfdata.loader.produce import Producer
from lfdata.loader.spec import BadSpec, FieldSpec, OrderSpec, Spec
from lfdata.loader.state import build, parts_of, position_of, state_of
from lfdata.loader.statistics import Statistics
from lfdata.loader.trace import Trace
from lfdata.loader.turn import Batches, Turn
from lfdata.order.order import MODES, TAILS
from lfdata.order.permutation import MAX_SAMPLES
from lfdata.storage import Cache
from lfdata.storage.options import as_cache

MOST_EVENTS = 1000
REMOTE_STALL_SECONDS = 60.0
# The rate of bad samples means nothing before this many rows.
FEWEST_ROWS = 1000
log = logging.getLogger("lfdata")


class Loader:
    """Iterates over epochs of batches.

    ``for batch in loader`` gives one epoch: dicts of CPU tensors by field name. Ragged fields are all values one after the other, with
    ``NAME.offsets`` (rows + 1,); fields that samples may lack have ``NAME.present``. ``__index__`` (rows,) int64 says which sample of the
    data set a row is (``__source__`` of which, with several), ``__mask__`` (rows,) bool which rows count. Tensors are views of
    shared memory that stays theirs as long as they live.

    Args:
        source: path or URL of a data set, or a sequence of them that are mixed (see ``mixture``).
        batch_size: samples of a global batch: over all ranks and micro-batches.
        fields: by name, the field's transforms (:mod:`lfdata.transforms`) or ``None``; a sequence of names; all fields by default.
        shuffle: ``"full"``, ``"block"`` or ``"sequential"``.
        block, window: samples of a block, and blocks that are shuffled together, of ``"block"`` (docs/order.md).
        seed: 0 to 2^64 - 1.
        tail: ``"drop_last"`` or ``"pad"``: what becomes of an incomplete last global batch.
        where: which samples take part: a bool array (n,), or a function of the opened data set that gives one; one a source where several are.
        mixture: options of :class:`lfdata.order.mixture.Mixture` (weights, block, exhaustion, ...).
        buckets, packing: options of :class:`lfdata.order.packing.Buckets` and ``Packing``, with ``field`` for the field whose lengths count.
        batch_transforms: MixUp, CutMix or Mosaic over the global batch.
        accumulate: micro-batches a step; a rank's rows of a global batch are cut into that many.
        static: every rank has as many rows as every other, so ranks must divide the batch size; ``False``: they may have one row more or less.
        rank, world_size: this process; by default from torch.distributed or the environment (``RANK``, ``WORLD_SIZE``).
        bad_samples: ``"stop"``, ``"replace"`` or ``"mask"``; most_bad and most_bad_rate: limits of the latter two.
        engine: ``"process"``, ``"thread"`` or ``"inline"``; ``"auto"`` takes the last for fields that need no decoding.
        processes, threads, prefetch: decoder processes; threads of each for decoding (by default the cores of this process over the
            ranks of the node and the processes); slots being filled ahead.
        max_bytes: the most that the slots may take, as a number or ``"4GiB"``: they are then reserved for what the epoch really needs
            (docs/scheduler.md).
        over: a batch that is beyond that is an ``"error"`` before the epoch begins; ``"split"``: it comes in several consecutive parts, and
            ``__part__`` (rows, 2) int64 says of each batch which part it is, and of how many.
        native: ``False``: decode pictures by PIL alone; ``True``: refuse to work without the native decoder.
        isolate: decode nothing in this process, not even the first batches: for pictures that nobody has looked at.
        stall_seconds: how long a batch may take before the decoder is taken for hung.
        feedback: decode with no more threads, and no further ahead, than the consumer needs: for consumers that need the processor
            themselves. ``"wait"`` goes by the consumer's waits; ``"gpm"`` and ``"utilisation"`` look at the GPU too, by NVML (extra
            ``nvml``); ``True`` takes the best there is. Or a :class:`lfdata.schedule.sensors.Sensor` of your own.
        cache: where data that are not local are kept (docs/remote.md): :class:`lfdata.Cache` or a directory; the default one for URLs.
            With one, paths are read through it too.
        trace: a file for what happens when, stage by stage: ui.perfetto.dev and chrome://tracing show it. Of several ranks each writes
            its own: ``trace-1.json`` of rank 1. It is JSON at any time, and this loader's alone until it is closed.

    Raises:
        OptionError, KeyMissingError: options that make no sense, fields that are not there. FormatError: a damaged data set.
        LimitError: the batches do not fit into memory, or into ``max_bytes``.
    """

    # What its batches hold: of "torch" or "numpy".
    output = "torch"

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        batch_size: int,
        fields: Mapping[str, Sequence[Any] | None] | Sequence[str] | None = None,
        *,
        shuffle: str = "full",
        block: int = 1024,
        window: int = 16,
        seed: int = 0,
        tail: str = "drop_last",
        where: Where | Sequence[Where | None] | None = None,
        mixture: Mapping[str, Any] | None = None,
        buckets: Mapping[str, Any] | None = None,
        packing: Mapping[str, Any] | None = None,
        batch_transforms: Sequence[Any] = (),
        accumulate: int = 1,
        static: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        bad_samples: str = "stop",
        most_bad: int = 1000,
        most_bad_rate: float = 0.01,
        engine: str = "auto",
        processes: int = 1,
        threads: int | None = None,
        prefetch: int = 2,
        max_bytes: int | str | None = None,
        over: str = "error",
        stall_seconds: float = 60.0,
        feedback: Wanted = False,
        trace: str | os.PathLike[str] | None = None,
        native: bool | None = None,
        isolate: bool = False,
        cache: Cache | str | os.PathLike[str] | None = None,
        _steps: tuple[int, int] = (0, 1),
    ) -> None:
        whole, choice, real = options.whole, options.choice, options.real
        rank, world = this_rank(rank, world_size)
        batch_size = whole("batch_size", batch_size, 1, MAX_SAMPLES)
        order = OrderSpec(
            choice("shuffle", shuffle, MODES),
            whole("block", block, 1, MAX_SAMPLES),
            whole("window", window, 1, MAX_SAMPLES),
            options.mixture(mixture, len(paths := options.sources(source))),
            options.buckets(buckets),
            options.packing(packing),
        )
        bad = BadSpec(
            choice("bad_samples", bad_samples, ("stop", "replace", "mask")),
            whole("most_bad", most_bad, 0, MAX_SAMPLES),
            real("most_bad_rate", most_bad_rate, 0, 1),
        )
        if bad.policy == "replace" and tail == "pad":
            raise OptionError(
                "tail='pad' is for seeing every sample once, which a replacement would spoil: use bad_samples='mask' or 'stop'"
            )
        engine = choice("engine", engine, ("auto", "process", "thread", "inline"))
        processes = whole("processes", processes, 1, MOST_DECODERS)
        prefetch = whole("prefetch", prefetch, 1, options.MOST_AHEAD)
        stall_seconds = real("stall_seconds", stall_seconds, 0, options.MOST_SECONDS, above=True)
        accumulate = whole("accumulate", accumulate, 1, MAX_SAMPLES)
        limit = None if max_bytes is None else options.size("max_bytes", max_bytes, LEAST_BYTES)
        if choice("over", over, OVER) == "split" and limit is None:
            raise OptionError("over='split' cuts batches that are beyond a budget: give max_bytes")
        if threads is None:
            threads = max(1, options.default_threads(world) // processes)
        kept = None if cache is None else as_cache(cache)
        written = options.trace(trace)
        if len(paths) > 1 and order.mixture is None:
            raise OptionError("several sources need mixture=: {'weights': [...]}, {'temperature': T} or {} (in proportion)")
        filters = filters_of(where, len(paths))
        opened = [ShardDataset(path, cache=kept) for path in paths]
        for store in (dataset.store for dataset in opened if dataset.store is not None):
            # A server may be away for so long before that is an error, which must come from who reads.
            stall_seconds = max(stall_seconds, min(store.options.deadline + REMOTE_STALL_SECONDS, options.MOST_SECONDS))
        named = options.named(fields, opened[0].fields)
        self._spec = Spec(
            tuple(source_spec(dataset, one) for dataset, one in zip(opened, filters, strict=True)),
            tuple(FieldSpec(name, tuple(ops)) for name, ops in named.items()),
            order,
            tuple(options.transforms("batch_transforms", batch_transforms)),
            whole("seed", seed, 0, (1 << 64) - 1),
            batch_size,
            choice("tail", tail, TAILS),
            options.flag("static", static),
            bad,
            rank,
            world,
            whole("threads", threads, 1, options.MOST_THREADS),
            None if native is None else options.flag("native", native),
            False,
            *_steps,
            kept,
            options.this_node(rank, world),
            exact=limit is not None,
            parts=over == "split",
        )
        isolate, feedback = options.flag("isolate", isolate), checked(feedback)
        self._accumulate = accumulate
        self._producer = Producer(self._spec)
        self._names, self._make = Names(self._producer.parts), maker(self.output)
        shares = {self._producer.plan.batches(0).share(one, world) for one in range(world)}
        if uneven := sorted(share for share in shares if share % accumulate):
            raise OptionError(f"{uneven[0]} rows of a rank are not {accumulate} equal micro-batches")
        self._budget = None if limit is None else Budget(self._producer, limit, over, accumulate)
        # Where batches are cut, if they may be.
        self._cuts = self._budget if over == "split" else None
        if self._budget is not None:
            self._budget.epoch(0)
        if why := self._producer.plan.nothing():
            warnings.warn(f"the loader has no batches: {why}", stacklevel=2)
        # Nothing fails after this: an error that somebody keeps would keep the file.
        self._trace = None if written is None else Trace(written, rank, world)
        self._options = (engine, processes, prefetch, stall_seconds, isolate, self._trace, feedback)
        self._pipelines: list[Pipeline] = []
        weakref.finalize(self, stop, self._pipelines)
        if self._trace is not None:
            weakref.finalize(self, self._trace.close)
        self._owner, self._turn = os.getpid(), Turn()
        self._epoch, self._done, self._loaded, self._generation = 0, 0, False, 0
        # By how much the epoch is beyond that of a trainer that tells its own.
        self._told = 0
        self._bad, self._rows, self._copied = 0, 0, 0
        # What decodes stored pictures in place of this loader, if somebody does.
        self._decoder = ""
        # Those who take batches before the consumer does, as long as they live and are not closed.
        self._takers: weakref.WeakSet[Any] = weakref.WeakSet()
        # The GPU that somebody copies the batches to.
        self._gpu: int | None = None
        # Batches that the slot handed out last still has.
        self._left = 0
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)

    def __repr__(self) -> str:
        paths = ", ".join(os.fsdecode(source.path) for source in self._spec.sources)
        return f"Loader({paths}: {len(self)} batches of epoch {self._epoch}, rank {self._spec.rank} of {self._spec.world})"

    def __reduce__(self) -> NoReturn:
        raise LfdataError(
            "a Loader cannot be pickled or copied: make it in the process that uses it (LoaderDataset goes into DataLoader's workers)"
        )

    # -- size and place -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of the epoch, parts counted; the same on every rank."""
        return self._length(self._epoch)

    def _length(self, epoch: int) -> int:
        if self._cuts is not None:
            return self._cuts.epoch(epoch).batches
        return len(self._producer.plan.batches(epoch)) * self._accumulate

    @property
    def epoch(self) -> int:
        """The epoch that is iterated, or comes next."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        epoch = options.whole("epoch", epoch, 0, options.MOST_EPOCHS)
        # Going to the epoch of a state that was just loaded, as loops over epochs do, does not lose its place in it.
        if not self._loaded or epoch != self._epoch:
            self._move(epoch, 0, loaded=False)

    @property
    def batch_sampler(self) -> EpochSampler:
        """Where trainers that tell samplers the epoch find who follows it."""
        return EpochSampler(self)

    @property
    def sources(self) -> list[ShardDataset]:
        """The opened data sets, for keys and columns."""
        return self._producer.sources

    def stats(self) -> dict[str, Any]:
        """Rows delivered to this rank, bad samples met, batches that were copied since the consumer kept others, bytes of the slots and
        whether their pages may be huge, the last events (:class:`lfdata.loader.jobs.Event`); and of the engine since it started
        (docs/scheduler.md): time by stage, waits of the consumer, slots that were ready when it asked, occupancy of the lanes, page faults."""
        slots = self._pipelines[0].slots if self._pipelines else None
        engine = self._pipelines[0].statistics if self._pipelines else Statistics(1)
        return {
            "rows": self._rows,
            "bad": self._bad,
            "copied": self._copied,
            "slots": slots.count if slots else 0,
            "slot_bytes": slots.size if slots else 0,
            "pages": "huge" if slots and slots.huge else "normal",
            "steps_a_slot": self._pipelines[0].steps if self._pipelines else self._producer.steps,
            "events": list(self._events),
            "width": int(slots.width[0]) if slots else 0,
            **engine.report(),
            "feedback": self._pipelines[0].feedback.report() if self._pipelines and self._pipelines[0].feedback else None,
        }

    def forecast(self, batches: int = 128) -> Forecast:
        """What the next batches will take, from where the iteration is (:meth:`state_dict`), over the ends of epochs.

        Bytes of every tensor, from index and order alone. That of a whole epoch has its largest batch.
        """
        batches = options.whole("batches", batches, 0, MAX_SAMPLES)
        return forecast(self._producer, self._epoch, self._done, batches, self._accumulate, self._cuts)

    # -- iteration ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Batches:
        """One epoch: from a loaded state on if one was loaded since, from its start otherwise; the next one if all batches of this one were
        taken. Ends any iteration that is under way."""
        if self._loaded:
            self._move(self._epoch, self._done, loaded=True)
        elif self._done and self._done >= len(self) > 0:
            self._move(self._epoch + 1, 0, loaded=False)
        else:
            self._move(self._epoch, 0, loaded=False)
        return Batches(self._iterate(self._generation), self._turn)

    def _move(self, epoch: int, done: int, loaded: bool) -> None:
        self._epoch, self._done, self._loaded = epoch, done, loaded
        self._generation, self._left = self._generation + 1, 0
        self._turn.move()

    def _iterate(self, generation: int) -> Generator[dict[str, Any]]:
        epoch, total = self._epoch, len(self)
        try:
            if self._budget is not None:
                self._budget.epoch(epoch)
            while self._done < total and generation == self._generation:
                step, micro = self._where(epoch, self._done)
                for batch in self._batches(epoch, step, micro):
                    if generation != self._generation:
                        break
                    self._done += 1
                    # A state that was loaded is used up with its first batch, not by asking for an iterator.
                    self._loaded = False
                    yield batch
            if generation == self._generation:
                self._move(epoch + 1, 0, loaded=False)
                generation = self._generation
            else:
                self._turn.ended()
        except GeneratorExit:
            # A consumer that counts batches leaves after the last one: that epoch is over, and the next one comes.
            if generation == self._generation:
                if self._done < total:
                    stop(self._pipelines)
                else:
                    self._move(epoch + 1, 0, loaded=False)
            raise
        except BaseException:
            # Broken off by a signal or a failure. Nothing stays.
            if generation == self._generation:
                stop(self._pipelines)
            raise

    def _where(self, epoch: int, done: int) -> tuple[int, int]:
        """The step of the batch after so many, and its number there."""
        return divmod(done, self._accumulate) if self._cuts is None else self._cuts.epoch(epoch).where(done)

    def _row(self, epoch: int, step: int, number: int) -> int:
        """With which row of a step the slot of one of its batches begins."""
        pieces = () if self._cuts is None else self._cuts.epoch(epoch).cut.get(step, ())
        return pieces[number].low if pieces else 0

    def _batches(self, epoch: int, step: int, micro: int) -> Generator[dict[str, Any]]:
        """The batches of the slot that begins with a step, from a micro-batch on."""
        if os.getpid() != self._owner:
            raise LfdataError("a Loader cannot be used in a process forked from the one that made it: make one there")
        if self._pipelines and not self._pipelines[0].fits(epoch):
            stop(self._pipelines)
        if not self._pipelines:
            with uninterrupted():
                self._pipelines.append(start(self._producer, *self._options, self._budget, epoch))
            if (watching := self._pipelines[0].feedback) is not None:
                watching.device = self._gpu
        pipeline = self._pipelines[0]
        try:
            filled = pipeline.get(epoch, step, self._row(epoch, step, micro))
        finally:
            if pipeline.given_up:
                stop(self._pipelines)
        self._copied += filled.copied
        if filled.job.rows is not None:
            rows, self._left = filled.job.rows[1] - filled.job.rows[0], 0
            self._rows += rows
            self._note(filled.done.events)
            yield cut(filled.arrays, self._names, 0, rows, self._make)
            return
        # Fewer steps than the job has if the next one has failed: it is asked for again then, and raises.
        accumulate, arrays, names = self._accumulate, filled.arrays, self._names
        share, count = self._producer.share // accumulate, filled.done.steps * accumulate
        noted = -1
        for number in range(micro, count):
            if number // accumulate != noted:
                noted = number // accumulate
                self._rows += self._producer.share
                if filled.done.events:
                    at = self._producer.plan.step(step + noted)
                    self._note([event for event in filled.done.events if event.step == at])
            self._left = count - number - 1
            yield cut(arrays, names, number * share, (number + 1) * share, self._make)

    def _note(self, events: Sequence[Event]) -> None:
        """A step's bad samples, and whether there are too many by now."""
        self._bad += len(events)
        self._events.extend(events)
        for event in events:
            log.warning("%s: %s: %s", event.place, event.reason, event.action)
        limits = self._spec.bad
        if events and (self._bad > limits.most or self._bad > limits.rate * max(self._rows, FEWEST_ROWS)):
            raise BadSamplesError(
                f"{self._bad} bad samples in {self._rows} rows; the limits are {limits.most} (most_bad) and {limits.rate:g} of the rows "
                f"(most_bad_rate). The last: {events[-1].place}: {events[-1].reason}"
            )

    def close(self) -> None:
        """End the decoder and free the slots; tensors that are held stay valid. Iterating again starts anew, without a trace.

        A thread that awaits a batch meanwhile gets an :class:`LfdataError`.
        """
        self._generation += 1
        self._turn.move()
        stop_in_turn(self._pipelines, self._turn)
        if self._trace is not None:
            self._trace.close()

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration is: JSON-able, the same on every rank. The batch just yielded counts as consumed."""
        return self._state(self._epoch, self._done)

    def _state(self, epoch: int, done: int) -> dict[str, Any]:
        micro, parts = (done, {}) if self._cuts is None else self._cuts.state(epoch, done)
        return {**state_of(self._spec, self._accumulate, epoch, micro, self._build()), **parts}

    def end_of(self, epoch: int) -> dict[str, Any]:
        """The state after the last batch of an epoch."""
        epoch = options.whole("epoch", epoch, 0, options.MOST_EPOCHS)
        return self._state(epoch, self._length(epoch))

    def load_state_dict(self, state: Mapping[str, Any], *, allow_batch_change: bool = False) -> None:
        """Go on from a state: the next iteration gives the batch after it.

        Raises:
            StateError: not a state, or one of other data, order, transforms, or batch size (see docs/loader.md).
        """
        epoch, done = position_of(state, self._producer.plan, self._accumulate, self._build(), allow_batch_change)
        parts = parts_of(state, self._producer.spec, self._accumulate, self._cuts.share if self._cuts is not None else 0)
        if self._cuts is not None:
            done = self._cuts.done(epoch, done, parts)
        self._move(epoch, done, loaded=True)

    def _build(self) -> dict[str, str]:
        """What decodes here: with ``native=False`` it is PIL, whatever else there is; or a decoder on the device."""
        decoder = self._decoder or ("False" if self._spec.native is False else "")
        return dict(build()) | ({"native": decoder} if decoder else {})


class NumpyLoader(Loader):
    """A :class:`Loader` whose batches are numpy arrays, for frameworks other than torch. Torch is not imported."""

    output = "numpy"
