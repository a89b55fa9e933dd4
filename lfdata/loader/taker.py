"""A loader as seen by who takes batches before the consumer does: the device path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from lfdata.errors import OptionError
from lfdata.loader.batch import Names, cut, maker
from lfdata.loader.forecast import Forecast, forecast
from lfdata.loader.images import ImageFiller
from lfdata.loader.pipeline import reserve, start, stop
from lfdata.loader.produce import Producer
from lfdata.loader.slots import Slots, mapped
from lfdata.loader.spec import DrawSpec, Spec

if TYPE_CHECKING:
    from lfdata.loader.loader import Loader


class Spot(NamedTuple):
    """Where an iteration is: an epoch, batches done in it, and whether that was loaded and nothing taken since."""

    epoch: int
    done: int
    loaded: bool = False


class Taker:
    """Of one loader."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def begin(self) -> Iterator[dict[str, torch.Tensor]]:
        """An iteration."""
        return iter(self._loader)

    @property
    def spot(self) -> Spot:
        """Where the loader is. The batch it gave last counts."""
        loader = self._loader
        return Spot(loader._epoch, loader._done, loader._loaded)

    @property
    def slots(self) -> Slots | None:
        """The slots there are now."""
        pipelines = self._loader._pipelines
        return pipelines[0].slots if pipelines else None

    @property
    def left(self) -> int:
        """Batches that the slot handed out last still has."""
        return self._loader._left

    def ready(self) -> bool:
        """Whether the next batch, or the end of the epoch, can be had without waiting. Raises what asking for it would."""
        loader = self._loader
        if loader._left or loader._done >= len(loader):
            return True
        step, number = loader._where(loader._epoch, loader._done)
        row = loader._row(loader._epoch, step, number)
        return bool(loader._pipelines) and loader._pipelines[0].ready(loader._epoch, step, row)

    def go_back(self, spot: Spot, end: bool) -> None:
        """Put the loader where its consumer is; ``end``: and end its decoders, unless the consumer has the whole epoch."""
        loader = self._loader
        whole = not spot.loaded and 0 < spot.done >= loader._length(spot.epoch)
        if end and not whole:
            stop(loader._pipelines)
        if whole:
            loader._move(spot.epoch + 1, 0, loaded=False)
        else:
            loader._move(spot.epoch, spot.done, loaded=spot.loaded)

    def state(self, spot: Spot) -> dict[str, Any]:
        """The loader's state, if it were there."""
        return self._loader._state(spot.epoch, spot.done)

    def aim(self, device: int | None) -> None:
        """The batches go to this GPU: feedback looks at it, whichever is current."""
        self._loader._gpu = device

    @property
    def watched(self) -> bool:
        """Whether anybody wants to know of :meth:`copied`."""
        pipelines = self._loader._pipelines
        return bool(pipelines) and pipelines[0].feedback is not None

    def copied(self, seconds: float) -> None:
        """The device waited so long for a copy."""
        pipelines = self._loader._pipelines
        if pipelines and pipelines[0].feedback is not None:
            pipelines[0].feedback.copied(seconds)

    def forecast(self, batches: int, at: tuple[int, int] | None = None) -> Forecast:
        """Of the next batches, or of those after some batches of an epoch."""
        loader = self._loader
        epoch, done = at or (loader._epoch, loader._done)
        return forecast(loader._producer, epoch, done, batches, loader._accumulate, loader._cuts)

    def length(self, epoch: int) -> int:
        """Batches of an epoch."""
        return self._loader._length(epoch)

    def slots_of(self, epochs: Sequence[int]) -> list[int]:
        """Bytes of the slots in each of some epochs, one after the other. Raises :class:`LimitError`: one is beyond the budget."""
        loader, found = self._loader, []
        kind, processes, prefetch, *_ = loader._options
        budget, held = loader._budget, loader._pipelines[0].reserved if loader._pipelines else None
        for epoch in epochs:
            if held is None or (budget is not None and not budget.fits(epoch, held)):
                *_, held = reserve(loader._producer, kind, processes, prefetch, budget, epoch)
            found.append(mapped(held.slots, held.size))
        return found

    # -- pictures decoded by somebody else -----------------------------------------------------------------------------

    @property
    def pictures(self) -> dict[str, tuple[int, tuple[int, int] | None, int]]:
        """Fields of pictures: rows of a batch, (height, width) if all have one, channels."""
        fillers = self._loader._producer.fillers
        return {one.name: (self.rows, one.size, one.channels) for one in fillers if isinstance(one, ImageFiller)}

    @property
    def threads(self) -> int:
        """That decode, in all processes."""
        return self._loader._spec.threads * self._loader._options[1]

    def store(self, names: Sequence[str], decoder: str) -> None:
        """Have stored bytes with rectangles in place of pixels, of the JPEGs of some fields (stored.py). Ends an iteration that is under way.

        Raises:
            OptionError: a field of which something else is asked.
        """
        loader = self._loader
        if loader._budget is not None:
            raise OptionError("max_bytes counts pixels that the loader decodes: leave it out, or take decode='cpu'")
        self._replace(msgspec.structs.replace(loader._spec, stored=tuple(names)))
        loader._decoder = decoder

    def draw(self, drawn: Sequence[DrawSpec]) -> None:
        """Have the batches say what the device is to do to pictures (drawn.py). Ends an iteration that is under way.

        Raises:
            OptionError: such a loader cannot say it.
        """
        loader = self._loader
        if tuple(drawn) == loader._spec.drawn:
            return
        if loader._cuts is not None:
            # Where batches are cut depends on what is in them, and a state between two parts must not.
            raise OptionError(
                f"over='split' cuts batches, and what Images draws for {drawn[0].field!r} belongs to whole ones: leave one of them out"
            )
        self._replace(msgspec.structs.replace(loader._spec, drawn=tuple(drawn)))

    def _replace(self, spec: Spec) -> None:
        """Another spec for the batches to come."""
        loader = self._loader
        producer = Producer(spec)
        budget = None if loader._budget is None else loader._budget.anew(producer)
        if budget is not None:
            budget.epoch(loader._epoch)
        stop(loader._pipelines)
        loader._move(loader._epoch, loader._done, loaded=loader._loaded)
        loader._spec, loader._producer, loader._names = spec, producer, Names(producer.parts)
        loader._budget = budget

    def again(self, spot: Spot) -> dict[str, torch.Tensor]:
        """The batch before a spot, decoded by the loader alone, as it is without :meth:`store`. Raises what making it raises."""
        loader = self._loader
        _, _, _, stall_seconds, isolate, _, _ = loader._options
        step, micro = divmod(spot.done - 1, loader._accumulate)
        producer = Producer(msgspec.structs.replace(loader._spec, stored=()))
        pipelines = [start(producer, "process" if isolate else "inline", 1, 1, stall_seconds, isolate, None, False)]
        try:
            filled = pipelines[0].get(spot.epoch, step)
            at = producer.plan.step(step)
            loader._note([event for event in filled.done.events if event.step == at])
            rows = producer.share // loader._accumulate
            batch = cut(filled.arrays, Names(producer.parts), micro * rows, (micro + 1) * rows, maker("torch"))
            return {name: value.clone() for name, value in batch.items()}
        finally:
            stop(pipelines)

    # -- sizes --------------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows of a batch."""
        return self._loader._producer.share // self._loader._accumulate

    def declared(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """dtype and shape of a row of a field's array; ``None``: there is none, or its rows differ in length."""
        for part in self._loader._producer.parts:
            if part.name == name and not part.by and not part.offsets:
                return part.place.dtype, part.place.shape[1:]
        return None
