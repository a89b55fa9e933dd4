"""A loader as seen by who takes batches before the consumer does: the device path."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from lfdata.errors import OptionError
from lfdata.loader.batch import Names, cut, maker
from lfdata.loader.feedback import Feedback
from lfdata.loader.forecast import Forecast, forecast
from lfdata.loader.images import ImageFiller
from lfdata.loader.pipeline import reserve, start, stop
from lfdata.loader.produce import Producer
from lfdata.loader.slots import Slots, mapped
from lfdata.loader.spec import DrawSpec, Spec

if TYPE_CHECKING:
    from lfdata.loader.loader import Loader

REPLACED = "a DeviceLoader with ops or a decoder of its own was made over this Loader after this iteration was begun: begin another one"


class Spot(NamedTuple):
    """Where an iteration is: an epoch, batches done in it, and whether that was loaded and nothing taken since."""

    epoch: int
    done: int
    loaded: bool = False


class Asked(NamedTuple):
    """What a loader's batches have beside, or in place of, what its own consumer asked for."""

    drawn: tuple[DrawSpec, ...]
    stored: tuple[str, ...]
    decoder: str


class Taker:
    """Of one loader."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._asked = self.asked

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
        return self._feedback is not None

    def copied(self, seconds: float) -> None:
        """The device waited so long for a copy."""
        if (feedback := self._feedback) is not None:
            feedback.copied(seconds)

    @property
    def _feedback(self) -> Feedback | None:
        pipeline = next(iter(self._loader._pipelines), None)
        return None if pipeline is None else pipeline.feedback

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

    @property
    def asked(self) -> Asked:
        """What the batches have now."""
        spec = self._loader._spec
        return Asked(spec.drawn, spec.stored, self._loader._decoder)

    def put_back(self, asked: Asked) -> None:
        """Have what the batches had."""
        if asked != self.asked:
            self._replace(msgspec.structs.replace(self._loader._spec, drawn=asked.drawn, stored=asked.stored))
            self._loader._decoder = asked.decoder

    def join(self) -> None:
        """Count on what the batches have now: nobody else changes it before :meth:`leave`."""
        self._asked = self.asked
        self._loader._takers.add(self)

    def join_again(self) -> None:
        """After :meth:`leave`. Raises :class:`OptionError`: somebody else has changed it since."""
        if self._asked != self.asked:
            raise OptionError(
                "another DeviceLoader with other ops or another decoder was made over this Loader since this one was closed: "
                "make a new one, or a Loader for each"
            )
        self._loader._takers.add(self)

    def leave(self) -> None:
        """Others may change what the batches have."""
        self._loader._takers.discard(self)

    def _may_change(self) -> None:
        """Raises :class:`OptionError`: somebody would be left with batches that he does not expect, or without."""
        loader = self._loader
        if others := set(loader._takers) - {self}:
            # One that nobody holds may wait for the collector.
            del others
            gc.collect()
            if set(loader._takers) - {self}:
                raise OptionError(
                    "there is another DeviceLoader over this Loader, with other ops or another decoder: one DeviceLoader a Loader. "
                    "Close it first, or make a Loader for each"
                )
        if loader._done and not loader._loaded:
            raise OptionError(
                f"this Loader is in the middle of an epoch ({loader._done} batches of epoch {loader._epoch} are taken): make a DeviceLoader "
                "with ops or a decoder of its own before iterating, or call set_epoch or load_state_dict first"
            )

    def store(self, names: Sequence[str], decoder: str) -> None:
        """Have stored bytes with rectangles in place of pixels, of the JPEGs of some fields (stored.py); of none, pixels.

        Raises:
            OptionError: a field of which something else is asked; not now, or not beside others.
        """
        loader = self._loader
        if (tuple(names), decoder) == self.asked[1:]:
            return
        self._may_change()
        if names and loader._budget is not None:
            raise OptionError("max_bytes counts pixels that the loader decodes: leave it out, or take decode='cpu'")
        self._replace(msgspec.structs.replace(loader._spec, stored=tuple(names)))
        loader._decoder = decoder

    def draw(self, drawn: Sequence[DrawSpec]) -> None:
        """Have the batches say what the device is to do to pictures (drawn.py).

        Raises:
            OptionError: such a loader cannot say it; not now, or not beside others.
        """
        loader = self._loader
        if tuple(drawn) == loader._spec.drawn:
            return
        self._may_change()
        if loader._cuts is not None and (mixed := [one.field for one in drawn if one.mixes]):
            raise OptionError(
                f"over='split' cuts batches where max_bytes says, and MixUp and CutMix of Images take partners out of the same batch: who is "
                f"mixed with whom would depend on max_bytes. Leave the mixing of {mixed[0]!r} out, or over='split'"
            )
        self._replace(msgspec.structs.replace(loader._spec, drawn=tuple(drawn)))

    def _replace(self, spec: Spec) -> None:
        """Another spec for the batches to come."""
        loader = self._loader
        producer = Producer(spec)
        budget = None if loader._budget is None else loader._budget.anew(producer)
        if budget is not None:
            budget.epoch(loader._epoch)
        done = loader._done
        if loader._cuts is not None and budget is not None:
            # The same samples: batches are cut elsewhere now.
            micro, between = loader._cuts.state(loader._epoch, done)
            if between:
                raise OptionError(
                    "the state that was loaded is between the parts of a batch, which are cut elsewhere with other ops: make the DeviceLoader "
                    "first, then load the state into it"
                )
            done = budget.done(loader._epoch, micro, 0)
        stop(loader._pipelines)
        loader._move(loader._epoch, done, loaded=loader._loaded)
        loader._turn.move(REPLACED)
        loader._spec, loader._producer, loader._names = spec, producer, Names(producer.parts)
        loader._budget, loader._cuts = budget, budget if spec.parts else None

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

    @property
    def names(self) -> list[str]:
        """Of the arrays of a batch."""
        return [part.name for part in self._loader._producer.parts]

    def declared(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """dtype and shape of a row of a field's array; ``None``: there is none, or its rows differ in length."""
        for part in self._loader._producer.parts:
            if part.name == name and not part.by and not part.offsets:
                return part.place.dtype, part.place.shape[1:]
        return None
