"""Pictures of a batch that somebody else than the loader decodes (docs/scheduler.md, "GPU decode"): which decoder, and what goes where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lfdata.device.dali import Decoder, Pictures, Refused, Ticket, available, version
from lfdata.errors import OptionError
from lfdata.loader.options import choice
from lfdata.loader.stored import beside
from lfdata.loader.taker import Taker

DECODERS = ("cpu", "dali", "auto")
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a record says is faster. ``gpu``: how the GPU's name begins; ``cores``: of the processor for each GPU, at least and at most."""

    gpu: str
    cores: tuple[int, int]
    decoder: str
    record: str


# docs/scheduler.md, "Which decoder": only what was measured; with anything else the processor decodes.
MEASURED = (Measured("NVIDIA H200", (16, 16), "cpu", "gpu-starved.json"),)


def measured(gpu: str, cores: int) -> str:
    """What ``"auto"`` is on a machine."""
    found = [one.decoder for one in MEASURED if gpu.startswith(one.gpu) and one.cores[0] <= cores <= one.cores[1]]
    return found[0] if found else "cpu"


def decoding_of(wanted: str, taker: Taker, device: torch.device, ahead: int, threads: int | None) -> Decoding | None:
    """``None``: the loader decodes.

    Raises:
        OptionError: fields that only the loader can decode. MissingExtraError: DALI is not installed.
    """
    wanted = choice("decode", wanted, DECODERS)
    auto = wanted == "auto"
    if auto:
        wanted = "cpu"
        if device.type == "cuda" and available():
            wanted = measured(torch.cuda.get_device_name(device), taker.threads)
    if wanted == "cpu":
        taker.store((), "")
        return None
    decoder, names = f"dali {version()}", list(taker.pictures)
    try:
        if not names:
            raise OptionError("decode='dali': the loader has no field of pictures that could be decoded by it")
        taker.store(names, decoder)
    except OptionError:
        if auto:
            taker.store((), "")
            return None
        raise
    return Decoding(taker, device, ahead, threads or taker.threads)


@dataclass(slots=True)
class Piece:
    """Pictures of one field: pixels that the loader made, those that come, and the rows of each."""

    made: torch.Tensor
    made_rows: list[tuple[int, int]]
    ticket: Ticket | None
    rows: list[tuple[int, int]]


class Decoding:
    """Of the batches of one loader, in their order.

    Args:
        device: where pictures are decoded to.
        ahead: batches under way at a time.
        threads: of the processor.
    """

    def __init__(self, taker: Taker, device: torch.device, ahead: int, threads: int) -> None:
        self._taker = taker
        self.decoders = {
            name: Decoder(rows, size, channels, device, ahead, threads)
            for name, (rows, size, channels) in taker.pictures.items()
            if size is not None and rows
        }
        self._beside = {name: beside(name) for name in taker.pictures}
        self.beside = frozenset(one for names in self._beside.values() for one in names)
        self.pictures = self.remade = 0

    def begin(self, batch: Batch) -> tuple[Batch, dict[str, Piece]]:
        """Begin to decode what is stored in a batch; the batch without that. Nothing of the batch is needed any more for these fields."""
        pieces = {name: self._begin(batch, name, decoder) for name, decoder in self.decoders.items()}
        return {name: value for name, value in batch.items() if name not in self.beside}, pieces

    def _begin(self, batch: Batch, name: str, decoder: Decoder) -> Piece:
        stored, offsets, boxes, sides, flips = (batch[one].numpy() for one in self._beside[name])
        there = np.diff(offsets) > 0
        rows = np.flatnonzero(there)
        ticket = None
        if len(rows):
            ends = zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True)
            found = Pictures([stored[start:stop] for start, stop in ends], boxes[rows], sides[rows], flips[rows])
            ticket = decoder.submit(found)
            self.pictures += len(rows)
        made = batch[name][torch.from_numpy(~there)] if len(rows) < len(there) else batch[name][:0]
        return Piece(made, runs(~there), ticket, runs(there))

    def collect(self, name: str, piece: Piece, target: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Wait for a field's pictures: what is to be copied where. Raises :class:`Refused`."""
        pairs = _pairs(target, piece.made_rows, piece.made)
        if piece.ticket is not None:
            pairs += _pairs(target, piece.rows, self.decoders[name].collect(piece.ticket))
        return pairs

    def drop(self, pieces: Mapping[str, Piece]) -> None:
        """Nobody wants them."""
        for piece in pieces.values():
            if piece.ticket is not None:
                piece.ticket.wanted, piece.ticket.found = False, None

    def again(self, spot: Any, why: Refused, begin: Callable[[Batch], Any]) -> Any:
        """Another begin with a batch that was refused, decoded by the loader, which finds what is bad in it."""
        self.remade += 1
        try:
            return begin(self._taker.again(spot))
        except Exception as error:
            error.add_note(f"DALI had refused this batch: {why}")
            raise

    def on_host(self, batch: Batch) -> Batch:
        """A batch at once, in its own memory."""
        spot = self._taker.spot
        rest, pieces = self.begin(batch)
        try:
            for name, piece in pieces.items():
                # Rows that the loader made are there.
                piece.made_rows = []
                for target, source in self.collect(name, piece, rest[name]):
                    target.copy_(source)
        except Refused as why:
            self.drop(pieces)
            return self.again(spot, why, lambda made: made)  # type: ignore[no-any-return]
        return rest

    def close(self) -> None:
        """End the decoders."""
        for decoder in self.decoders.values():
            decoder.close()

    def report(self) -> dict[str, Any]:
        """For :meth:`DeviceLoader.stats`."""
        failures = sum(decoder.failures for decoder in self.decoders.values())
        return {"decoder": "dali", "pictures": self.pictures, "failures": failures, "remade": self.remade}


def runs(chosen: Any) -> list[tuple[int, int]]:
    """Rows that are chosen, as stretches: first and end of each."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _pairs(
    target: torch.Tensor, stretches: list[tuple[int, int]], source: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs, at = [], 0
    for first, end in stretches:
        pairs.append((target[first:end], source[at : at + end - first]))
        at += end - first
    return pairs
