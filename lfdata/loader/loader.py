"""``lfdata.Loader``: batches of torch tensors in exact order, from any number of ranks, continued at any step."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

import lfdata.transforms as T
from lfdata.codecs.pil_versions import pil_report
from lfdata.codecs.pixels import native_report
from lfdata.dataset import ShardDataset
from lfdata.errors import BadSamplesError, LfdataError, OptionError, StateError
from lfdata.loader.batch import tensors
from lfdata.loader.engine import MOST_DECODERS
from lfdata.loader.jobs import Event
from lfdata.loader.pipeline import Pipeline, start, stop
from lfdata.loader.produce import Producer
from lfdata.loader.spec import BadSpec, FieldSpec, OrderSpec, SourceSpec, Spec, differences

STATE_VERSION = 1
MOST_EVENTS = 1000
MOST_NAMED = 8
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
        source: path of a data set, or a sequence of paths that are mixed (see ``mixture``).
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
        native: bool | None = None,
        isolate: bool = False,
        _steps: tuple[int, int] = (0, 1),
    ) -> None:
        rank, world = this_rank(rank, world_size)
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
        sources = tuple(source_spec(Path(path), one) for path, one in zip(paths, filters, strict=True))
        asked = ShardDataset(Path(os.fsdecode(sources[0].path))).fields if fields is None else fields
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
        )
        self._options = (engine, processes, prefetch, stall_seconds, isolate)
        self._accumulate = accumulate
        self._producer = Producer(self._spec)
        shares = {self._producer.plan.batches(0).share(one, world) for one in range(world)}
        if uneven := sorted(share for share in shares if share % accumulate):
            raise OptionError(f"{uneven[0]} rows of a rank are not {accumulate} equal micro-batches")
        self._pipelines: list[Pipeline] = []
        weakref.finalize(self, stop, self._pipelines)
        self._owner = os.getpid()
        self._epoch, self._done, self._loaded, self._generation = 0, 0, False, 0
        self._bad, self._rows, self._copied = 0, 0, 0
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
        if epoch < 0:
            raise OptionError(f"epoch {epoch}; epochs count from 0")
        self._move(epoch, 0, loaded=False)

    @property
    def sources(self) -> list[ShardDataset]:
        """The opened data sets, for keys and columns."""
        return self._producer.sources

    def stats(self) -> dict[str, Any]:
        """Rows delivered to this rank, bad samples met, batches that were copied since the consumer kept others, bytes of the slots, and the
        last events (:class:`lfdata.loader.jobs.Event`)."""
        slots = self._pipelines[0].slots if self._pipelines else None
        return {
            "rows": self._rows,
            "bad": self._bad,
            "copied": self._copied,
            "slots": slots.count if slots else 0,
            "slot_bytes": slots.size if slots else 0,
            "steps_a_slot": self._producer.steps,
            "events": list(self._events),
        }

    # -- iteration ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """One epoch: from a loaded state on if one was loaded since, from its start otherwise. Ends any iteration that is under way."""
        self._move(self._epoch, self._done if self._loaded else 0, loaded=False)
        return self._iterate(self._generation)

    def _move(self, epoch: int, done: int, loaded: bool) -> None:
        self._epoch, self._done, self._loaded = epoch, done, loaded
        self._generation += 1

    def _iterate(self, generation: int) -> Iterator[dict[str, torch.Tensor]]:
        epoch, total = self._epoch, len(self)
        try:
            while self._done < total and generation == self._generation:
                step, micro = divmod(self._done, self._accumulate)
                for batch in self._batches(epoch, step, micro):
                    if generation != self._generation:
                        return
                    self._done += 1
                    yield batch
            if generation == self._generation:
                self._move(epoch + 1, 0, loaded=False)
                generation = self._generation
        except BaseException:
            # Broken off: by the consumer (GeneratorExit), a signal, or a failure. Nothing stays.
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
        accumulate, arrays, parts = self._accumulate, filled.arrays, self._producer.parts
        share, count = self._producer.share // accumulate, filled.done.steps * accumulate
        noted = -1
        for number in range(micro, count):
            if number // accumulate != noted:
                noted = number // accumulate
                self._rows += self._producer.share
                if filled.done.events:
                    at = self._producer.plan.step(step + noted)
                    self._note([event for event in filled.done.events if event.step == at])
            yield tensors(arrays, parts, number * share, (number + 1) * share)

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
        """End the decoder and free the slots; tensors that are held stay valid. Iterating again starts anew."""
        self._generation += 1
        stop(self._pipelines)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration is: JSON-able, the same on every rank. The batch just yielded counts as consumed."""
        return {
            "version": STATE_VERSION,
            "epoch": self._epoch,
            "samples": self._done * self._spec.batch // self._accumulate,
            "batch_size": self._spec.batch,
            # Within a step they say which of its rows are consumed; between steps they do not matter.
            "world_size": self._spec.world,
            "accumulate": self._accumulate,
            "identity": self._spec.identity,
            "build": dict(build()),
        }

    def end_of(self, epoch: int) -> dict[str, Any]:
        """The state after the last batch of an epoch."""
        steps = len(self._producer.plan.batches(epoch))
        return {**self.state_dict(), "epoch": epoch, "samples": steps * self._spec.batch}

    def load_state_dict(self, state: Mapping[str, Any], *, allow_batch_change: bool = False) -> None:
        """Go on from a state: the next iteration gives the batch after it.

        Raises:
            StateError: not a state, or one of other data, order, transforms, or batch size (see docs/loader.md).
        """
        if state.get("version") != STATE_VERSION:
            raise StateError(f"state version {state.get('version')!r}; this loader reads version {STATE_VERSION}")
        try:
            epoch, samples, batch, world, micro = (
                int(state[name]) for name in ("epoch", "samples", "batch_size", "world_size", "accumulate")
            )
            theirs, built = dict(state["identity"]), dict(state["build"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not a state of a Loader: {error!r}") from error
        if min(epoch, samples) < 0 or min(batch, world, micro) < 1:
            raise StateError(f"not a state of a Loader: epoch {epoch}, {samples} samples, batches of {batch}")
        if differing := differences(theirs, self._spec.identity):
            raise StateError(f"the state belongs to another loader: it differs in {', '.join(differing[:MOST_NAMED])}")
        if batch != self._spec.batch:
            if not allow_batch_change:
                raise StateError(
                    f"the state's batch size is {batch}, this loader's {self._spec.batch}; allow_batch_change=True goes on from the same sample"
                )
            if self._spec.order.packing is not None or self._spec.order.buckets is not None:
                raise StateError("the batch size of packed or bucketed data cannot change within an epoch")
        now, then = (self._spec.world, self._accumulate, self._spec.batch), (world, micro, batch)
        if samples % batch and now != then and max(world, self._spec.world) > 1:
            raise StateError(
                f"the state is within a step, after {samples % batch} of {batch} samples: which ones depends on ranks and micro-batches "
                f"({world} and {micro} in the state, {self._spec.world} and {self._accumulate} here). Save it after a whole step"
            )
        done, rest = divmod(samples * self._accumulate, self._spec.batch)
        if rest:
            raise StateError(
                f"{samples} samples of the epoch are consumed: no whole number of batches of {self._spec.batch} "
                f"in {self._accumulate} micro-batches"
            )
        changed = [
            f"{name}: {built.get(name)} then, {value} now" for name, value in build().items() if built.get(name) != value
        ]
        if changed:
            warnings.warn(
                f"the decoders have changed since the state was saved, pixels may differ slightly: {'; '.join(changed)}",
                stacklevel=2,
            )
        self._move(epoch, done, loaded=True)


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


def source_spec(path: Path, where: Where | None) -> SourceSpec:
    """A source with its fingerprint and selection."""
    dataset = ShardDataset(path)
    digest = hashlib.sha256(
        msgspec.json.encode([(shard.id, shard.rows, shard.sha256, shard.sidecars) for shard in dataset.manifest.shards])
    )
    bitmap = None
    if where is not None:
        mask = np.asarray(where(dataset) if callable(where) else where)
        if mask.dtype != bool or mask.shape != (len(dataset),):
            raise OptionError(f"{path}: where is bool of shape ({len(dataset)},), not {mask.dtype} of {mask.shape}")
        bitmap = np.packbits(mask, bitorder="little").tobytes()
        digest.update(bitmap)
    return SourceSpec(os.fsencode(dataset.path.resolve()), digest.hexdigest(), bitmap, printable(dataset.path.name))


@cache
def build() -> Mapping[str, str]:
    """What decodes: libraries and versions. Not the vector instructions, which change no pixel."""
    return {name: str(value) for name, value in native_report().items() if name not in ("why", "simd")} | {
        "pil": str(pil_report())
    }


def printable(text: str) -> str:
    """A file name as text, whatever its bytes."""
    return text.encode("utf-8", "backslashreplace").decode()


def event_fields(event: Event) -> tuple[Any, ...]:
    """For the log."""
    return event.path, event.shard, event.index, event.key, event.field, event.reason, event.action


def _dict(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if options is None else dict(options)
