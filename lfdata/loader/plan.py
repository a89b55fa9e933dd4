"""From a spec to its order: which samples are a rank's in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset import ShardDataset
from lfdata.loader.spec import Spec
from lfdata.order.mixture import Mixture
from lfdata.order.order import Batches, Order
from lfdata.order.packing import Buckets, Packing, Row
from lfdata.order.permutation import make_key, mix
from lfdata.order.samples import Samples
from lfdata.order.selection import Selection

# Third number of the keys of replacements (docs/order.md).
REPLACE = 8


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


def selection_of(bitmap: bytes | None, rows: int) -> Selection | None:
    """A source's selection from its bitmap in the spec."""
    if bitmap is None:
        return None
    return Selection.of(np.unpackbits(np.frombuffer(bitmap, np.uint8), count=rows, bitorder="little").astype(bool))


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
        self.base: Any = self._orders[0] if order.mixture is None else Mixture(self._orders, seed=spec.seed, **order.mixture)
        self.packing: Packing | None = None
        if order.buckets is not None:
            options = dict(order.buckets)
            field = options.pop("field")
            self.base = Buckets(self.base, self._lengths(field), group=spec.batch, seed=spec.seed, **options)
        if order.packing is not None:
            options = dict(order.packing)
            field = options.pop("field")
            digest = "".join(source.fingerprint for source in spec.sources) + spec.identity["order"] + str(spec.seed)
            self.packing = Packing(self.base, self._lengths(field), seed=spec.seed, digest=digest, **options)
        self._batches: dict[int, Batches] = {}

    def _lengths(self, field: str) -> Any:
        role = {"tokens": "tokens", "audio": "frames"}.get(self.sources[0].schema[field].kind, "bytes")
        columns = [source.column(f"{field}.{role}") for source in self.sources]

        def lengths(samples: Samples) -> NDArray[np.int64]:
            if len(columns) == 1:
                return columns[0][samples.index].astype(np.int64)
            found = np.zeros(len(samples.index), np.int64)
            for number, column in enumerate(columns):
                where = samples.source == number
                found[where] = column[samples.index[where]]
            return found

        return lengths

    def units(self, epoch: int) -> int:
        """Samples of an epoch, or packed rows."""
        return int(self.base.n if self.packing is None else self.packing.rows(epoch))

    def batches(self, epoch: int) -> Batches:
        """The global batches of an epoch."""
        found = self._batches.get(epoch)
        if found is None:
            found = Batches(self.units(epoch), self.spec.batch, self.spec.tail, self.spec.static)
            self._batches = {epoch: found}
        return found

    def work(self, epoch: int, first: int, steps: int) -> Work:
        """This rank's rows of steps ``first`` to ``first + steps - 1``."""
        batches = self.batches(epoch)
        found = [batches.positions(step, self.spec.rank, self.spec.world) for step in range(first, first + steps)]
        positions = np.concatenate([one for one, _ in found])
        mask = np.concatenate([one for _, one in found])
        if self.packing is None:
            return Work(self.base.samples(epoch, positions), positions, mask)
        bins = self.packing.row(epoch, positions)
        joined = Samples(
            *(
                np.concatenate([getattr(one.samples, name) for one in bins])
                for name in ("source", "epoch", "index", "occurrence")
            )
        )
        return Work(joined, positions, mask, bins)

    def rows_of(self, epoch: int, step: int, rows: NDArray[np.int64]) -> Work:
        """Any rows of a global batch, whichever rank's they are."""
        positions = step * self.spec.batch + rows
        mask, positions = positions < self.base.n, positions % self.base.n
        return Work(self.base.samples(epoch, positions), positions, mask)

    def substitute(self, epoch: int, position: int, source: int, attempt: int) -> int:
        """The sample that takes a bad one's place: an index of the same source."""
        order = self._orders[source]
        chosen = mix(make_key(self.spec.seed, REPLACE, epoch, position, attempt)) % order.n
        return chosen if order.selection is None else int(order.selection.select(np.array([chosen]))[0])
