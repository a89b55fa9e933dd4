"""``lfdata.Loader``: batches of torch tensors (or numpy arrays) in exact order, from any number of ranks, continued at any step."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lfdata.dataset import ShardDataset
from lfdata.errors import LfdataError, OptionError
from lfdata.loader import options
from lfdata.loader.batch import maker
from lfdata.loader.budget import LEAST_BYTES, OVER, Budget
from lfdata.loader.engine import MOST_DECODERS
from lfdata.loader.feedback import Own, Wanted, checked
from lfdata.loader.follow import EpochSampler
from lfdata.loader.forecast import Forecast, forecast
from lfdata.loader.given import Where, filters_of, source_spec, this_rank
from lfdata.loader.iteration import Iteration
from lfdata.loader.pipeline import stop_in_turn
from lfdata.loader.produce import Producer
from lfdata.loader.spec import BadSpec, FieldSpec, OrderSpec, Spec
from lfdata.loader.state import build, parts_of, position_of, state_of
from lfdata.loader.trace import Trace
from lfdata.order.order import MODES, TAILS
from lfdata.order.permutation import MAX_SAMPLES
from lfdata.storage import Cache
from lfdata.storage.options import as_cache

REMOTE_STALL_SECONDS = 60.0


class Loader(Iteration):
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
            ``nvml``); ``True`` takes the best there is. Or a :class:`lfdata.schedule.sensors.Sensor` of your own, closed with the loader.
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
        spec = Spec(
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
        isolate, watching = options.flag("isolate", isolate), checked(feedback)
        producer, make = Producer(spec), maker(self.output)
        shares = {producer.plan.batches(0).share(one, world) for one in range(world)}
        if uneven := sorted(share for share in shares if share % accumulate):
            raise OptionError(f"{uneven[0]} rows of a rank are not {accumulate} equal micro-batches")
        budget = None if limit is None else Budget(producer, limit, over, accumulate)
        if budget is not None:
            budget.epoch(0)
        if why := producer.plan.nothing():
            warnings.warn(f"the loader has no batches: {why}", stacklevel=2)
        # Nothing fails after this: an error that somebody keeps would keep the file.
        self._trace = None if written is None else Trace(written, rank, world)
        self._options = (engine, processes, prefetch, stall_seconds, isolate, self._trace, watching)
        super().__init__(producer, accumulate, budget, make)
        if self._trace is not None:
            weakref.finalize(self, self._trace.close)
        if isinstance(watching, Own):
            weakref.finalize(self, watching.close)
        # By how much the epoch is beyond that of a trainer that tells its own.
        self._told = 0
        # What decodes stored pictures in place of this loader, if somebody does.
        self._decoder = ""
        # Those who take batches before the consumer does, as long as they live and are not closed.
        self._takers: weakref.WeakSet[Any] = weakref.WeakSet()

    def __repr__(self) -> str:
        paths = ", ".join(os.fsdecode(source.path) for source in self._spec.sources)
        return f"Loader({paths}: {len(self)} batches of epoch {self._epoch}, rank {self._spec.rank} of {self._spec.world})"

    def __reduce__(self) -> NoReturn:
        raise LfdataError(
            "a Loader cannot be pickled or copied: make it in the process that uses it (LoaderDataset goes into DataLoader's workers)"
        )

    # -- size and place -----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that is iterated, or comes next."""
        return self._epoch

    @staticmethod
    def check(
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        mixture: Mapping[str, Any] | None = None,
        buckets: Mapping[str, Any] | None = None,
        packing: Mapping[str, Any] | None = None,
        max_bytes: int | str | None = None,
    ) -> None:
        """Look at options that are no plain numbers or words, without opening data. Raises :class:`OptionError`."""
        options.mixture(mixture, len(options.sources(source)))
        options.buckets(buckets)
        options.packing(packing)
        if max_bytes is not None:
            options.size("max_bytes", max_bytes, 1)

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
        whether their pages may be huge, the last events (:class:`lfdata.loader.jobs.Event`).

        And of the engine, or of the last one there was, since its start (docs/scheduler.md): time by stage, waits of the consumer, slots that
        were ready when it asked, occupancy of the lanes, page faults."""
        # Another thread may be ending it.
        pipeline = next(iter(self._pipelines), None)
        slots = pipeline.slots if pipeline else None
        return {
            "rows": self._rows,
            "bad": self._bad,
            "copied": self._copied,
            "slots": slots.count if slots else 0,
            "slot_bytes": slots.size if slots else 0,
            "pages": "huge" if slots and slots.huge else "normal",
            "steps_a_slot": pipeline.steps if pipeline else self._producer.steps,
            "events": list(self._events),
            "width": int(slots.width[0]) if slots else 0,
            **self._statistics.report(),
            "feedback": pipeline.feedback.report() if pipeline and pipeline.feedback else None,
        }

    def forecast(self, batches: int = 128) -> Forecast:
        """What the next batches will take, from where the iteration is (:meth:`state_dict`), over the ends of epochs.

        Bytes of every tensor, from index and order alone. That of a whole epoch has its largest batch.
        """
        batches = options.whole("batches", batches, 0, MAX_SAMPLES)
        return forecast(self._producer, self._epoch, self._done, batches, self._accumulate, self._cuts)

    def close(self) -> None:
        """End the decoder and free the slots; tensors that are held stay valid. Iterating again starts anew, without a trace, and without a
        sensor of your own, which is closed.

        A thread that awaits a batch meanwhile gets an :class:`LfdataError`.
        """
        self._generation += 1
        self._turn.move()
        with self._turn.closing():
            stop_in_turn(self._pipelines, self._turn)
        if self._trace is not None:
            self._trace.close()
        if isinstance(sensor := self._options[-1], Own):
            sensor.close()

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
        share = self._cuts.share if self._cuts is not None else 0
        parts = parts_of(state, self._spec, self._accumulate, share, self._producer.drawn)
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
