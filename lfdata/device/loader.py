"""``lfdata.DeviceLoader``: a loader's batches on the GPU, copied ahead."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch

from lfdata.device.ahead import Ahead
from lfdata.device.backend import Backend, backend_of
from lfdata.device.decoding import decoding_of
from lfdata.device.forecast import Sizes, on_device, on_host
from lfdata.device.images import Op
from lfdata.device.ring import Ring
from lfdata.device.transfer import Batch, Transfer, about_rows
from lfdata.errors import OptionError
from lfdata.loader.forecast import Forecast
from lfdata.loader.loader import Loader
from lfdata.loader.options import MOST_AHEAD, MOST_THREADS, size, whole
from lfdata.loader.spec import DrawSpec
from lfdata.loader.taker import Taker
from lfdata.loader.turn import CLOSE_SECONDS, Batches, Turn

WANTED = "a mapping from names of fields to what is made of them, such as {'image': lfdata.device.Images()}"


class DeviceLoader:
    """Iterates over a loader's epochs, as it does, with the tensors on a device.

    Batches are copied ahead, on a stream of their own, from the loader's slots (page-locked, once) into memory that is reserved once; the
    current stream waits for a batch's copy when it is handed out. What a consumer holds never changes, but memory that it does not give
    back is not there for the next batches. Use this one's ``state_dict``, ``set_epoch`` and ``close``, not the loader's. One thread uses a
    DeviceLoader, and one DeviceLoader a loader, made before that is iterated: others of other ``ops`` can be made once it is closed.

    Args:
        loader: what makes the batches.
        device: ``"cuda"``, ``"cuda:1"``, ...; on ``"cpu"`` these are the loader's own batches, with ``ops``.
        ahead: batches copied, or being copied, beyond the one the consumer has.
        hold: batches that the consumer keeps at a time before it gives them back: micro-batches of a step, say.
        max_bytes: memory on the device, at most, as a number or as ``"1GiB"``; fewer batches are ahead then.
        ops: by field, what is made of it on the device: :class:`lfdata.device.Images`. What is random about that, the loader draws.
        decode: who decodes pictures: ``"cpu"``, the loader; ``"dali"``, NVIDIA DALI (extra ``dali``) does the JPEGs, on the GPU if that is the
            device, and the loader does the others; ``"auto"``, whichever was measured to be faster on such a machine (docs/scheduler.md).
        decode_threads: of the processor, for DALI; by default as many as the loader decodes with.

    Raises:
        DeviceError: there is no such GPU. OptionError: options that make no sense. MissingExtraError: DALI is not installed.
    """

    def __init__(
        self,
        loader: Loader,
        device: torch.device | str = "cuda",
        *,
        ahead: int = 2,
        hold: int = 1,
        max_bytes: int | str | None = None,
        ops: Mapping[str, Op] | None = None,
        decode: str = "cpu",
        decode_threads: int | None = None,
        _backend: Backend | None = None,
    ) -> None:
        ahead, hold = whole("ahead", ahead, 0, MOST_AHEAD), whole("hold", hold, 1, MOST_AHEAD)
        most = None if max_bytes is None else size("max_bytes", max_bytes, 1)
        if not isinstance(loader, Loader):
            raise OptionError(f"loader is an lfdata.Loader, which makes the batches, not {loader!r}")
        if loader.output != "torch":
            raise OptionError(
                f"{type(loader).__name__} gives arrays of {loader.output}; a DeviceLoader takes the tensors of a Loader"
            )
        backend = _backend or backend_of(device)
        self.loader, self.device = loader, torch.device("cpu") if backend is None else backend.device
        self._taker, self._ops, self._ahead = Taker(loader), _checked(ops), ahead
        self._turn = Turn("DeviceLoader")
        drawn: list[DrawSpec] = []
        for name, op in self._ops.items():
            declared = self._taker.declared(name)
            if declared is None:
                raise OptionError(
                    f"ops: the batches have no field {name!r} of fixed shape; there are {', '.join(loader.forecast(1).bytes)}"
                )
            op.check(name, *declared)
            if (draws := op.draws(name, declared[1], self._taker.rows)) is not None:
                drawn.append(draws)
        if decode_threads is not None:
            decode_threads = whole("decode_threads", decode_threads, 1, MOST_THREADS)
        before = self._taker.asked
        try:
            self._taker.draw(drawn)
            there = self._taker.names
            for name, op in self._ops.items():
                if missing := [(what, field) for what, field in op.fields(name).items() if field not in there]:
                    what, field = missing[0]
                    raise OptionError(
                        f"ops of field {name!r}: {what}={field!r} is the name of a field, and the batches have none of that name; there are "
                        f"{', '.join(there)}"
                    )
            self._decoding = decoding_of(decode, self._taker, self.device, 1 if backend is None else ahead + 2, decode_threads)
        except BaseException:
            self._taker.put_back(before)
            raise
        self._taker.join()
        self._taker.aim(self.device.index)
        self._transfer: Transfer | None = None
        if backend is not None:
            # What the consumer has while it asks, what it gets, and what is ahead of that.
            self._transfer = Transfer(backend, self._taker, Ring(backend, ahead + hold + 1, most), self._ops, self._decoding)
        self._under_way: Ahead | None = None
        # The epoch after, once the one under way is ahead to its end.
        self._after: Ahead | None = None
        self.rows: Batch = {}

    def __repr__(self) -> str:
        return f"DeviceLoader({self.loader!r}, {str(self.device)!r})"

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.loader)

    @property
    def epoch(self) -> int:
        """The epoch that is iterated, or comes next."""
        ahead = self._under_way or self._after
        return self.loader.epoch if ahead is None else ahead.spot.epoch

    @property
    def sources(self) -> list[Any]:
        """The opened data sets."""
        return self.loader.sources

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        with self._turn.held():
            self._leave(end=False)
            self.loader.set_epoch(epoch)

    def forecast(self, batches: int = 128) -> Forecast:
        """The loader's, from the first batch that is not copied yet, with the bytes of its tensors on the device, and of all memory that is
        reserved for them. Of batches that a consumer keeps, and of DALI's own memory, nobody knows before.

        Raises:
            LimitError: one of these batches is beyond ``max_bytes``, the loader's or this one's.
        """
        found, transfer = self.loader.forecast(batches), self._transfer
        if transfer is None:
            beside = () if self._decoding is None else self._decoding.beside
            return on_host(found, self._taker, Sizes.of(self._taker, self._ops, beside))
        ahead, known = self._after or self._under_way, transfer.registered
        begun = self._taker.spot.epoch if ahead is not None and ahead.begun else None
        refused = known is not None and bool(known.refused)
        return on_device(found, self._taker, transfer.sizes, transfer.ring, transfer.staging, begun, refused)

    def stats(self) -> dict[str, Any]:
        """The loader's, and under ``"device"``: bytes registered, or why that was refused; places of the ring, their size and bytes; bytes of
        the staging area; how often places were reserved (once, and for a later epoch whose largest batch has no room), and how often the ring
        had to grow for a batch beyond that; batches that got memory of their own since the consumer kept others; batches and
        bytes copied, batches copied from pageable memory; seconds the device waited for copies (with feedback). Under ``"decoding"``, if
        DALI decodes: pictures that it got, how often it ended with an error, batches that the loader made in its place then."""
        device = None if self._transfer is None else self._transfer.report()
        return {
            **self.loader.stats(),
            "device": device,
            "decoding": None if self._decoding is None else self._decoding.report(),
        }

    # -- iteration ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """One epoch, which one as :meth:`Loader.__iter__` has it. Ends any iteration that is under way."""
        with self._turn.held():
            self._taker.join_again()
            if self._transfer is None:
                return Batches(self._on_host(iter(self.loader)), self._turn)
            if self._under_way is None and self._after is not None:
                self._under_way, self._after = self._after, None
                self._turn.move()
            else:
                self._leave(end=False)
                self._under_way = Ahead(self._taker, self._transfer, self._ahead)
            return Batches(self._iterate(self._under_way, self._transfer), self._turn)

    def _iterate(self, ahead: Ahead, transfer: Transfer) -> Generator[Batch]:
        try:
            while self._under_way is ahead:
                found = ahead.next()
                if found is None:
                    self._under_way = None
                    return
                if ahead.exhausted:
                    if self._after is None:
                        self._after = Ahead(self._taker, transfer, self._ahead)
                    self._after.fill(self._ahead - ahead.batches)
                self.rows = found.rows or {}
                yield transfer.hand_out(found)
            self._turn.ended()
        except BaseException:
            # Left, or broken off by a signal or a failure. Nothing stays.
            if self._under_way is ahead:
                self._leave(end=True)
            raise

    def _on_host(self, batches: Batches) -> Generator[Batch]:
        try:
            for batch in batches:
                if self._decoding is not None:
                    batch = self._decoding.on_host(batch)
                self.rows = about_rows(batch)
                yield self._operated(batch) if self._ops else batch
        finally:
            batches.close()

    def _operated(self, batch: Batch) -> Batch:
        found = dict(batch)
        for name, op in self._ops.items():
            rows = batch[name]
            size = op.bytes(rows.nbytes, rows.shape[1:])
            found[name] = op.out(torch.empty(size, dtype=torch.uint8), rows.shape)
            op.run(name, rows, found[name], batch)
        return found

    def _leave(self, end: bool) -> None:
        self._turn.move()
        after, self._after = self._after, None
        ahead, self._under_way = self._under_way, None
        if after is not None:
            after.leave(end and ahead is None)
        if ahead is not None:
            ahead.leave(end)

    def close(self) -> None:
        """Free everything and close the loader; tensors that are held stay valid. Iterating again starts anew.

        A thread that awaits a batch meanwhile gets an :class:`LfdataError`.
        """
        with self._turn.closing():
            if not self._turn.take():
                self._turn.move()
                self.loader.close()
                if not self._turn.take(CLOSE_SECONDS):
                    self._turn.begin()
            try:
                if self._turn.at_the_end(self._close):
                    # A handler of signals, while a batch is taken: what is under way ends soon, and then closes.
                    self.loader.close()
                else:
                    self._close()
            finally:
                self._turn.over()

    def _close(self) -> None:
        self._taker.leave()
        try:
            self._leave(end=True)
        finally:
            try:
                if self._transfer is not None:
                    self._transfer.close()
                elif self._decoding is not None:
                    self._decoding.close()
            finally:
                self.loader.close()

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The loader's state at the batch last handed out; those that are ahead do not count."""
        ahead = self._under_way or self._after
        return self.loader.state_dict() if ahead is None else self._taker.state(ahead.spot)

    def end_of(self, epoch: int) -> dict[str, Any]:
        """The state after the last batch of an epoch."""
        return self.loader.end_of(epoch)

    def load_state_dict(self, state: Mapping[str, Any], *, allow_batch_change: bool = False) -> None:
        """Go on from a state, which may be one of a Loader, too. Raises :class:`StateError`."""
        with self._turn.held():
            self._leave(end=False)
            self.loader.load_state_dict(state, allow_batch_change=allow_batch_change)


def _checked(ops: Any) -> dict[str, Op]:
    """Operations by field. Raises :class:`OptionError`."""
    if ops is None:
        return {}
    if not isinstance(ops, Mapping):
        raise OptionError(f"ops is {WANTED}, not {ops!r}")
    for name, op in ops.items():
        if isinstance(op, type) or not isinstance(op, Op):
            raise OptionError(f"ops[{name!r}] is {op!r}; ops is {WANTED}")
    return dict(ops)
