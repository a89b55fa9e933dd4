"""From a spec to its order: which samples are a rank's in a step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lfdata.dataset import ShardDataset
from lfdata.errors import OptionError
from lfdata.loader.spec import Spec
from lfdata.order.order import Batches, Order
from lfdata.order.packing import Buckets, Packing, Row
from lfdata.order.permutation import make_key, mix
from lfdata.order.samples import Samples, grouped
from lfdata.order.selection import Selection

# Third number of the keys of replacements (docs/order.md).
REPLACE = 8
STRETCH_ROWS = 4096
# Kinds of field whose values have a length, and the index column that says it.
LENGTHS = {"tokens": "tokens", "audio": "frames"} | dict.fromkeys(("image", "array", "text", "bytes", "json"), "bytes")


@dataclass(slots=True)
class Work:
    """A rank's part of some consecutive steps.

    Attributes:
        samples: all samples, row by row (packed: bin by bin).
        positions: global positions (packed: numbers of the packed row), int64, one a row.
        mask: rows that count; the others pad the epoch's end.
        bins: of packed rows: boundaries of each in ``samples``, and what is taken of each sample; ``None`` otherwise.
    """

    samples: Samples
    positions: NDArray[np.int64]
    mask: NDArray[np.bool_]
    bins: list[Row] | None = None


def fingerprint(dataset: ShardDataset, selection: bytes | None) -> str:
    """What a data set holds, and which of it takes part; wherever it lies."""
    entries = [(shard.id, shard.rows, shard.sha256, shard.sidecars) for shard in dataset.manifest.shards]
    return hashlib.sha256(msgspec.json.encode(entries) + (selection or b"")).hexdigest()


def selection_of(bitmap: bytes | None, rows: int) -> Selection | None:
    """A source's selection from its bitmap in the spec."""
    if bitmap is None:
        return None
    return Selection.of(np.unpackbits(np.frombuffer(bitmap, np.uint8), count=rows, bitorder="little").astype(bool))


class EveryNth:
    """Some steps of an epoch, counted 0, 1, ...: ``first``, ``first + every`` and so on."""

    def __init__(self, batches: Batches, first: int, every: int) -> None:
        self._batches, self._first, self._every = batches, first, every
        self.rows, self.share = batches.rows, batches.share

    def __len__(self) -> int:
        return max(0, -(-(len(self._batches) - self._first) // self._every))

    def positions(self, step: int, rank: int, world: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """See :meth:`Batches.positions`."""
        return self._batches.positions(self._first + step * self._every, rank, world)


class Plan:
    """The order of a spec's epochs, over open data sets."""

    def __init__(self, spec: Spec, sources: Sequence[ShardDataset]) -> None:
        self.spec, self.sources = spec, sources
        order = spec.order
        self._orders = [
            Order(
                len(source) if (selection := selection_of(about.selection, len(source))) is None else selection,
                spec.seed if number == 0 else mix(make_key(spec.seed, number)),
                order.mode,
                block=order.block,
                window=order.window,
            )
            for number, (about, source) in enumerate(zip(spec.sources, sources, strict=True))
        ]
        self.base: Any = self._orders[0]
        if order.mixture is not None:
            # Most loaders have one source, and a decoder process that starts is waited for.
            from lfdata.order.mixture import Mixture

            self.base = Mixture(self._orders, seed=spec.seed, **order.mixture)
        self.packing: Packing | None = None
        if order.buckets is not None:
            options = dict(order.buckets)
            field = options.pop("field", "")
            lengths = self._lengths("buckets", field)
            self.base = Buckets(self.base, lengths, group=spec.batch, seed=spec.seed, **options)
        if order.packing is not None:
            options = dict(order.packing)
            field = options.pop("field", "")
            digest = "".join(source.fingerprint for source in spec.sources) + spec.identity["order"] + str(spec.seed)
            lengths = self._lengths("packing", field)
            self.packing = Packing(self.base, lengths, seed=spec.seed, digest=digest, **options)
        self._kept: tuple[int, int, int, Work] | None = None
        self._batches: dict[int, EveryNth] = {}

    def _lengths(self, option: str, field: str) -> Any:
        for source in self.sources:
            kind = source.schema[field].kind if field in source.schema else "absent"
            kinds = ("tokens",) if option == "packing" else tuple(LENGTHS)
            fit = [name for name, meta in source.schema.items() if meta.kind in kinds]
            if field not in fit:
                raise OptionError(
                    f"{option}: field is {field!r}, which is {kind} in {source.path}; it is one whose values have a length: "
                    f"{', '.join(fit) or 'the data set has none'}"
                )

        def lengths(samples: Samples) -> NDArray[np.int64]:
            # Read, not mapped: a file that is truncated meanwhile is an error then, and no signal.
            found = np.zeros(len(samples), np.int64)
            for number, where in grouped(samples.source):
                source = self.sources[number]
                found[where] = source.sizes(field, samples.index[where])[LENGTHS[source.schema[field].kind]]
            return found

        return lengths

    @property
    def repeats(self) -> int:
        """How many rows of consecutive steps may be one sample: once an epoch, but for padding and mixtures that repeat."""
        mixture = self.spec.order.mixture
        if mixture is not None and mixture.get("exhaustion", "repeat") == "repeat":
            return 1 << 62
        return 1 if self.spec.tail == "drop_last" else 1 + -(-(self.spec.batch - 1) // max(1, self.base.n))

    def units(self, epoch: int) -> int:
        """Samples of an epoch, or packed rows."""
        return int(self.base.n if self.packing is None else self.packing.rows(epoch))

    def nothing(self) -> str:
        """Why the first epoch has no batch; nothing if it has some."""
        units, what = self.units(0), "samples" if self.packing is None else "packed rows"
        if not units:
            return f"there are no {what} (of {sum(map(len, self.sources))} in the data, as where= and packing= leave them)"
        if units < self.spec.batch and self.spec.tail == "drop_last":
            return (
                f"its {units} {what} are fewer than batch_size={self.spec.batch}, and tail='drop_last' leaves an incomplete batch out. "
                "Take a smaller batch_size, or tail='pad'"
            )
        return ""

    def step(self, number: int) -> int:
        """The step of the epoch that is number 0, 1, ... of those made here."""
        return self.spec.first + number * self.spec.every

    def batches(self, epoch: int) -> EveryNth:
        """The global batches of an epoch that are made here."""
        found = self._batches.get(epoch)
        if found is None:
            found = self._batches_of(epoch, self.spec.batch)
            self._batches = {epoch: found}
        return found

    def _batches_of(self, epoch: int, size: int) -> EveryNth:
        every = Batches(self.units(epoch), size, self.spec.tail, self.spec.static)
        return EveryNth(every, self.spec.first, self.spec.every)

    def end(self, epoch: int, batch: int) -> int:
        """Samples of an epoch after the last batch, if batches had such a size."""
        return len(self._batches_of(epoch, batch)) * batch

    def work(self, epoch: int, first: int, steps: int, rows: tuple[int, int] | None = None) -> Work:
        """This rank's rows of steps ``first`` to ``first + steps - 1``; of a single step, some of them."""
        if self.packing is None:
            return self._stretch(epoch, first, steps, rows)
        positions, mask = self._positions(epoch, first, steps, self._rank_rows(epoch))
        if rows is not None:
            positions, mask = positions[slice(*rows)], mask[slice(*rows)]
        return self._bins(epoch, positions, mask)

    def everyone(self, epoch: int, first: int, steps: int) -> Work:
        """The rows of all ranks in some steps, step by step."""
        positions, mask = self._positions(epoch, first, steps, (0, self.spec.batch))
        if self.packing is not None:
            return self._bins(epoch, positions, mask)
        return Work(self.base.samples(epoch, positions), positions, mask)

    def _bins(self, epoch: int, positions: NDArray[np.int64], mask: NDArray[np.bool_]) -> Work:
        assert self.packing is not None
        bins = self.packing.row(epoch, positions)
        joined = Samples(
            *(
                np.concatenate([getattr(one.samples, name) for one in bins])
                for name in ("source", "epoch", "index", "occurrence")
            )
        )
        return Work(joined, positions, mask, bins)

    def _rank_rows(self, epoch: int) -> tuple[int, int]:
        """Rows of each global batch that are this rank's."""
        rows: tuple[int, int] = self.batches(epoch).rows(self.spec.rank, self.spec.world)
        return rows

    def _positions(
        self, epoch: int, first: int, steps: int, rows: tuple[int, int]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        units, (low, high) = self.units(epoch), rows
        begin = self.step(first) * self.spec.batch
        starts = np.arange(steps)[:, None] * (self.spec.every * self.spec.batch) + begin
        found = (starts + np.arange(low, high)).reshape(-1)
        return found % units, found < units

    def _stretch(self, epoch: int, first: int, steps: int, part: tuple[int, int] | None) -> Work:
        """Worked out for a few thousand rows at a time: an array operation costs about the same for ten and for a thousand."""
        share = self.batches(epoch).share(self.spec.rank, self.spec.world)
        length = max(steps, -(-STRETCH_ROWS // max(1, share)))
        kept = self._kept
        if kept is None or kept[0] != epoch or not kept[1] <= first <= first + steps <= kept[2]:
            stop = min(len(self.batches(epoch)), first + length)
            positions, mask = self._positions(epoch, first, stop - first, self._rank_rows(epoch))
            kept = self._kept = (epoch, first, stop, Work(self.base.samples(epoch, positions), positions, mask))
        begin = (first - kept[1]) * share
        rows = slice(begin, begin + steps * share) if part is None else slice(begin + part[0], begin + part[1])
        work = kept[3]
        return Work(work.samples.take(rows), work.positions[rows], work.mask[rows])

    def of_node(
        self, epoch: int, first: int, steps: int, ranks: tuple[int, int]
    ) -> tuple[Samples, NDArray[np.int64], NDArray[np.bool_]]:
        """Samples that some consecutive ranks (first, number) read in some steps, the step of each (0, 1, ...), whether it is this rank's."""
        batches, spec = self.batches(epoch), self.spec
        if self.packing is not None:
            work = self.work(epoch, first, steps)
            assert work.bins is not None
            rows = np.repeat(np.arange(len(work.bins)), [len(one.samples) for one in work.bins])
            return work.samples, rows // batches.share(spec.rank, spec.world), np.ones(len(rows), bool)
        low, high = batches.rows(ranks[0], spec.world)[0], batches.rows(sum(ranks) - 1, spec.world)[1]
        own = batches.rows(spec.rank, spec.world)
        starts = (self.step(first) + np.arange(steps) * spec.every) * spec.batch
        rows = np.arange(low, high)
        positions = (starts[:, None] + rows).reshape(-1)
        mine = np.tile((rows >= own[0]) & (rows < own[1]), steps)
        return self.base.samples(epoch, positions % self.units(epoch)), np.repeat(np.arange(steps), len(rows)), mine

    def rows_of(self, epoch: int, step: int, rows: NDArray[np.int64]) -> Work:
        """Any rows of a global batch, whichever rank's they are."""
        positions = self.step(step) * self.spec.batch + rows
        mask, positions = positions < self.base.n, positions % self.base.n
        return Work(self.base.samples(epoch, positions), positions, mask)

    def substitute(self, epoch: int, position: int, source: int, attempt: int) -> int:
        """The sample that takes a bad one's place: an index of the same source."""
        order = self._orders[source]
        chosen = mix(make_key(self.spec.seed, REPLACE, epoch, position, attempt)) % order.n
        return chosen if order.selection is None else int(order.selection.select(np.array([chosen]))[0])
