"""``lfdata.Loader``: batches of torch tensors in exact order, from any number of ranks, continued at any step."""

from __future__ import annotations

import logging
import operator
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import lfdata.transforms as T
from lfdata.dataset import ShardDataset
from lfdata.errors import BadSamplesError, LfdataError, OptionError
from lfdata.loader.batch import Names, tensors
from lfdata.loader.engine import MOST_DECODERS
from lfdata.loader.feedback import Wanted, checked
from lfdata.loader.forecast import Forecast, forecast
from lfdata.loader.jobs import Event
from lfdata.loader.pipeline import Pipeline, start, stop
from lfdata.loader.plan import fingerprint
from lfdata.loader.produce import Producer
from lfdata.loader.spec import BadSpec, FieldSpec, OrderSpec, SourceSpec, Spec
from lfdata.loader.state import build, position_of, state_of
from lfdata.loader.statistics import Statistics
from lfdata.loader.trace import Trace
from lfdata.storage import Cache
from lfdata.storage.options import as_cache

MOST_EVENTS = 1000
REMOTE_STALL_SECONDS = 60.0
# The rate of bad samples means nothing before this many rows.
FEWEST_ROWS = 1000
log = logging.getLogger("lfdata")
Where = NDArray[np.bool_] | Callable[[ShardDataset], NDArray[np.bool_]]


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
        shuffle: ``"full"``, ``"block"`` or ``"sequential"``. block, window: see docs/order.md.
        seed: 0 to 2^64 - 1.
        tail: ``"drop_last"`` or ``"pad"``: what becomes of an incomplete last global batch.
        where: which samples take part: a bool array (n,), or a function of the opened data set that gives one; one a source where several are.
        mixture: options of :class:`lfdata.order.mixture.Mixture` (weights, block, exhaustion, ...).
        buckets, packing: options of :class:`lfdata.order.packing.Buckets` and ``Packing``, with ``field`` for the field whose lengths count.
        batch_transforms: MixUp, CutMix or Mosaic over the global batch.
        accumulate: micro-batches a step; a rank's rows of a global batch are cut into that many.
        rank, world_size: this process; by default from torch.distributed or the environment (``RANK``, ``WORLD_SIZE``).
        bad_samples: ``"stop"``, ``"replace"`` or ``"mask"``; most_bad and most_bad_rate: limits of the latter two.
        engine: ``"process"``, ``"thread"`` or ``"inline"``; ``"auto"`` takes the last for fields that need no decoding.
        processes, threads, prefetch: decoder processes; threads of each for decoding (by default the cores of this process over the
            ranks of the node and the processes); slots being filled ahead.
        native: ``False``: decode pictures by PIL alone; ``True``: refuse to work without the native decoder.
        isolate: decode nothing in this process, not even the first batches: for pictures that nobody has looked at.
        stall_seconds: how long a batch may take before the decoder is taken for hung.
        feedback: decode with no more threads, and no further ahead, than the consumer needs: for consumers that need the processor
            themselves. ``"wait"`` goes by the consumer's waits; ``"gpm"`` and ``"utilisation"`` look at the GPU too, by NVML (extra
            ``nvml``); ``True`` takes the best there is. Or a :class:`lfdata.schedule.sensors.Sensor` of your own.
        cache: where data that are not local are kept (docs/remote.md): :class:`lfdata.Cache` or a directory; the default one for URLs.
            With one, paths are read through it too.
        trace: a file for what happens when, stage by stage: ui.perfetto.dev and chrome://tracing show it. Of several ranks each writes
            its own: ``trace-1.json`` of rank 1.

    Raises:
        OptionError, KeyMissingError: options that make no sense, fields that are not there. FormatError: a damaged data set.
        LimitError: the batches do not fit into memory.
    """

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
        stall_seconds: float = 60.0,
        feedback: Wanted = False,
        trace: str | os.PathLike[str] | None = None,
        native: bool | None = None,
        isolate: bool = False,
        cache: Cache | str | os.PathLike[str] | None = None,
        _steps: tuple[int, int] = (0, 1),
    ) -> None:
        rank, world = this_rank(rank, world_size)
        batch_size, seed, block, window = whole(batch_size=batch_size, seed=seed, block=block, window=window)
        accumulate, processes, prefetch, most_bad = whole(
            accumulate=accumulate, processes=processes, prefetch=prefetch, most_bad=most_bad
        )
        (threads,) = whole(threads=threads) if threads is not None else (None,)
        if not 0 <= most_bad_rate <= 1:
            raise OptionError(f"most_bad_rate is a share, 0 to 1, not {most_bad_rate}")
        if engine not in ("auto", "process", "thread", "inline"):
            raise OptionError(f"engine {engine!r}; there are auto, process, thread and inline")
        if bad_samples not in ("stop", "replace", "mask"):
            raise OptionError(f"bad_samples {bad_samples!r}; there are stop, replace and mask")
        if bad_samples == "replace" and tail == "pad":
            raise OptionError(
                "tail='pad' is for seeing every sample once, which a replacement would spoil: use bad_samples='mask' or 'stop'"
            )
        if min(accumulate, processes, prefetch) < 1 or processes > MOST_DECODERS or (threads is not None and threads < 1):
            raise OptionError(
                f"accumulate ({accumulate}), prefetch ({prefetch}) and threads ({threads}) are at least 1, "
                f"processes ({processes}) 1 to {MOST_DECODERS}"
            )
        paths = [source] if isinstance(source, str | os.PathLike) else list(source)
        if len(paths) > 1 and mixture is None:
            raise OptionError("several sources need mixture=: {'weights': [...]}, {'temperature': T} or {} (in proportion)")
        filters = [where] * len(paths) if where is None or isinstance(where, np.ndarray) or callable(where) else list(where)
        if len(filters) != len(paths):
            raise OptionError(f"{len(filters)} filters for {len(paths)} sources")
        opened = [ShardDataset(path, cache=cache) for path in paths]
        sources = tuple(source_spec(dataset, one) for dataset, one in zip(opened, filters, strict=True))
        asked = opened[0].fields if fields is None else fields
        for store in (dataset.store for dataset in opened if dataset.store is not None):
            # A server may be away for so long before that is an error, which must come from who reads.
            stall_seconds = max(stall_seconds, store.options.deadline + REMOTE_STALL_SECONDS)
        named = dict(asked) if isinstance(asked, Mapping) else dict.fromkeys(asked)
        self._spec = Spec(
            sources,
            tuple(FieldSpec(name, tuple(T.to_spec(ops or ()))) for name, ops in named.items()),
            OrderSpec(shuffle, block, window, _dict(mixture), _dict(buckets), _dict(packing)),
            tuple(T.to_spec(batch_transforms)),
            seed,
            batch_size,
            tail,
            static,
            BadSpec(bad_samples, most_bad, most_bad_rate),
            rank,
            world,
            threads if threads is not None else max(1, default_threads(world) // processes),
            native,
            False,
            *_steps,
            None if cache is None else as_cache(cache),
            this_node(rank, world),
        )
        self._trace = None if trace is None else Trace(trace, rank, world)
        self._options = (engine, processes, prefetch, stall_seconds, isolate, self._trace, checked(feedback))
        self._accumulate = accumulate
        self._producer = Producer(self._spec)
        self._names = Names(self._producer.parts)
        shares = {self._producer.plan.batches(0).share(one, world) for one in range(world)}
        if uneven := sorted(share for share in shares if share % accumulate):
            raise OptionError(f"{uneven[0]} rows of a rank are not {accumulate} equal micro-batches")
        self._pipelines: list[Pipeline] = []
        weakref.finalize(self, stop, self._pipelines)
        if self._trace is not None:
            weakref.finalize(self, self._trace.close)
        self._owner = os.getpid()
        self._epoch, self._done, self._loaded, self._generation = 0, 0, False, 0
        self._bad, self._rows, self._copied = 0, 0, 0
        # Batches that the slot handed out last still has.
        self._left = 0
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)

    def __repr__(self) -> str:
        paths = ", ".join(os.fsdecode(source.path) for source in self._spec.sources)
        return f"Loader({paths}: {len(self)} batches of epoch {self._epoch}, rank {self._spec.rank} of {self._spec.world})"

    # -- size and place -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return len(self._producer.plan.batches(self._epoch)) * self._accumulate

    @property
    def epoch(self) -> int:
        """The epoch that is iterated, or comes next."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        (epoch,) = whole(epoch=epoch)
        if not 0 <= epoch < 1 << 63:
            raise OptionError(f"epoch {epoch}; epochs count from 0 to 2^63 - 1")
        # Going to the epoch of a state that was just loaded, as loops over epochs do, does not lose its place in it.
        if not self._loaded or epoch != self._epoch:
            self._move(epoch, 0, loaded=False)

    @property
    def sources(self) -> list[ShardDataset]:
        """The opened data sets, for keys and columns."""
        return self._producer.sources

    def stats(self) -> dict[str, Any]:
        """Rows delivered to this rank, bad samples met, batches that were copied since the consumer kept others, bytes of the slots, the
        last events (:class:`lfdata.loader.jobs.Event`); and of the engine since it started (docs/scheduler.md): time by stage, waits of
        the consumer, slots that were ready when it asked, occupancy of the lanes, page faults."""
        slots = self._pipelines[0].slots if self._pipelines else None
        engine = self._pipelines[0].statistics if self._pipelines else Statistics(1)
        return {
            "rows": self._rows,
            "bad": self._bad,
            "copied": self._copied,
            "slots": slots.count if slots else 0,
            "slot_bytes": slots.size if slots else 0,
            "steps_a_slot": self._producer.steps,
            "events": list(self._events),
            "width": int(slots.width[0]) if slots else 0,
            **engine.report(),
            "feedback": self._pipelines[0].feedback.report() if self._pipelines and self._pipelines[0].feedback else None,
        }

    def forecast(self, batches: int = 128) -> Forecast:
        """What the next batches will take, from where the iteration is (:meth:`state_dict`), over the ends of epochs.

        Bytes of every tensor, from index and order alone. That of a whole epoch has its largest batch.
        """
        if batches < 0:
            raise OptionError(f"{batches} batches; a forecast has 0 or more")
        return forecast(self._producer, self._epoch, self._done, batches, self._accumulate)

    # -- iteration ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """One epoch: from a loaded state on if one was loaded since, from its start otherwise; the next one if all batches of this one were
        taken. Ends any iteration that is under way."""
        if self._loaded:
            self._move(self._epoch, self._done, loaded=True)
        elif self._done >= len(self) > 0:
            self._move(self._epoch + 1, 0, loaded=False)
        else:
            self._move(self._epoch, 0, loaded=False)
        return self._iterate(self._generation)

    def _move(self, epoch: int, done: int, loaded: bool) -> None:
        self._epoch, self._done, self._loaded = epoch, done, loaded
        self._generation, self._left = self._generation + 1, 0

    def _iterate(self, generation: int) -> Iterator[dict[str, torch.Tensor]]:
        epoch, total = self._epoch, len(self)
        try:
            while self._done < total and generation == self._generation:
                step, micro = divmod(self._done, self._accumulate)
                for batch in self._batches(epoch, step, micro):
                    if generation != self._generation:
                        return
                    self._done += 1
                    # A state that was loaded is used up with its first batch, not by asking for an iterator.
                    self._loaded = False
                    yield batch
            if generation == self._generation:
                self._move(epoch + 1, 0, loaded=False)
                generation = self._generation
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

    def _batches(self, epoch: int, step: int, micro: int) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of the slot that begins with a step, from a micro-batch on."""
        if os.getpid() != self._owner:
            raise LfdataError("a Loader cannot be used in a process forked from the one that made it: make one there")
        if not self._pipelines:
            self._pipelines.append(start(self._producer, *self._options))
        pipeline = self._pipelines[0]
        filled = pipeline.get(epoch, step)
        self._copied += filled.copied
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
            yield tensors(arrays, names, number * share, (number + 1) * share)

    def _note(self, events: Sequence[Event]) -> None:
        """A step's bad samples, and whether there are too many by now."""
        self._bad += len(events)
        self._events.extend(events)
        for event in events:
            log.warning("%s/%s, index %d, key %r, field %s: %s: %s", *event_fields(event))
        limits = self._spec.bad
        if events and (self._bad > limits.most or self._bad > limits.rate * max(self._rows, FEWEST_ROWS)):
            last = events[-1]
            where = f"{last.path}/{last.shard}, index {last.index}, key {last.key!r}, field {last.field!r}"
            raise BadSamplesError(
                f"{self._bad} bad samples in {self._rows} rows; the limits are {limits.most} (most_bad) and {limits.rate:g} of the rows "
                f"(most_bad_rate). The last: {where}: {last.reason}"
            )

    def close(self) -> None:
        """End the decoder and free the slots; tensors that are held stay valid. Iterating again starts anew, without a trace."""
        self._generation += 1
        stop(self._pipelines)
        if self._trace is not None:
            self._trace.close()

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration is: JSON-able, the same on every rank. The batch just yielded counts as consumed."""
        return state_of(self._spec, self._accumulate, self._epoch, self._done, self._build())

    def end_of(self, epoch: int) -> dict[str, Any]:
        """The state after the last batch of an epoch."""
        steps = len(self._producer.plan.batches(epoch))
        return {**self.state_dict(), "epoch": epoch, "samples": steps * self._spec.batch}

    def load_state_dict(self, state: Mapping[str, Any], *, allow_batch_change: bool = False) -> None:
        """Go on from a state: the next iteration gives the batch after it.

        Raises:
            StateError: not a state, or one of other data, order, transforms, or batch size (see docs/loader.md).
        """
        epoch, done = position_of(state, self._spec, self._accumulate, self._build(), allow_batch_change)
        if done >= len(self._producer.plan.batches(epoch)) * self._accumulate:
            # After the last batch of an epoch comes the first of the next.
            epoch, done = epoch + 1, 0
        self._move(epoch, done, loaded=True)

    def _build(self) -> dict[str, str]:
        """What decodes here: with ``native=False`` it is PIL, whatever else there is."""
        return dict(build()) | ({"native": "False"} if self._spec.native is False else {})


def this_rank(rank: int | None, world: int | None) -> tuple[int, int]:
    """Rank and world size: as given, else of torch.distributed, else of the environment, else 0 of 1."""
    if (rank is None) != (world is None):
        raise OptionError("rank and world_size go together")
    if rank is not None and world is not None:
        return rank, world
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def default_threads(world: int) -> int:
    """Cores of this process, shared with the other ranks of the node."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world > 1 else 1
    return max(1, len(os.sched_getaffinity(0)) // local)


def this_node(rank: int, world: int) -> tuple[int, int]:
    """The first of the ranks of this node and their number, as torchrun says; this rank alone where nobody does."""
    try:
        local, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return rank, 1
    first = rank - local
    return (first, count) if local >= 0 and count > local and first >= 0 and first + count <= world else (rank, 1)


def source_spec(dataset: ShardDataset, where: Where | None) -> SourceSpec:
    """A source with its fingerprint and selection."""
    path, bitmap = dataset.path, None
    if where is not None:
        mask = np.asarray(where(dataset) if callable(where) else where)
        if mask.dtype != bool or mask.shape != (len(dataset),):
            raise OptionError(f"{path}: where is bool of shape ({len(dataset)},), not {mask.dtype} of {mask.shape}")
        bitmap = np.packbits(mask, bitorder="little").tobytes()
    name = printable(Path(dataset.path).name)
    return SourceSpec(os.fsencode(dataset.absolute), fingerprint(dataset, bitmap), bitmap, name)


def printable(text: str) -> str:
    """A file name as text, whatever its bytes."""
    return text.encode("utf-8", "backslashreplace").decode()


def event_fields(event: Event) -> tuple[Any, ...]:
    """For the log."""
    return event.path, event.shard, event.index, event.key, event.field, event.reason, event.action


def whole(**given: Any) -> list[int]:
    """Options that are whole numbers, whatever integer type they have. Raises :class:`OptionError`: one is not."""
    try:
        return [operator.index(value) for value in given.values()]
    except TypeError:
        name, value = next((name, value) for name, value in given.items() if not hasattr(value, "__index__"))
        raise OptionError(f"{name} is a whole number, not {value!r}") from None


def _dict(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if options is None else dict(options)
