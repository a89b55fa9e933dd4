"""What every codec looks like: raw value -> :class:`Encoded` -> value.

An *encoder* is made once per field from the field's options and runs in converter processes; its ``params`` go into the
shard's schema and are all that a *decoder* needs (beside the shard's dictionary, for ``json``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

KINDS = ("image", "tokens", "audio", "json", "array", "text", "bytes", "scalar")

Buffer = bytes | bytearray | memoryview

IMAGE_CODECS = {"webp": 1, "jpeg": 2, "png": 3, "raw": 4, "gif": 5, "tiff": 6, "bmp": 7, "avif": 8}
"""Values of the column ``codec``: fixed for ever, new ones are appended. 0 is an absent value."""

MAX_PIXELS = 200_000_000
"""Default limit of width x height: above every camera, below what would take more than 800 MB decoded."""


@dataclass(frozen=True, slots=True)
class PackedPayloads:
    """Parts of one buffer: part i is ``values[starts[i]:stops[i]]``. ``values``: uint8; ``starts``, ``stops``: int64 (n,), C-contiguous."""

    values: NDArray[np.uint8]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        return self.values[self.starts[index] : self.stops[index]]


@dataclass(slots=True)
class Encoded:
    """One field value ready to be stored.

    Attributes:
        payload: the bytes to store (for ``scalar``: the little-endian value itself).
        sizes: dense index columns by role, all non-negative integers. By kind:
            image: width, height, channels, codec (see ``IMAGE_CODECS``), bits (8 or 16 a sample);
            tokens: tokens; audio: frames, channels, rate; json: raw_bytes (length of the MessagePack before compression);
            array: dims (a tuple of ndim integers). ``bytes`` is added by the writer.
        aux: uint64 values kept beside the payload, or ``None``. image: byte offset of every MCU row of a restart-marked JPEG.
        warnings: short texts for the report ("data shorter than its header says").
    """

    payload: Buffer
    sizes: dict[str, Any] = field(default_factory=dict)
    aux: NDArray[np.uint64] | None = None
    warnings: tuple[str, ...] = ()


class Encoder(Protocol):
    """Encodes one field. ``params`` (JSON-able) determine the bytes and are stored in the schema."""

    kind: str
    params: dict[str, Any]

    def encode(self, raw: Any) -> Encoded:
        """Encode one value as it came from a source. Raises :class:`lfdata.errors.SampleError` for a bad one."""
        ...


class Decoder(Protocol):
    """Decodes one field of one shard."""

    def decode(self, payload: Buffer, sizes: Mapping[str, Any]) -> Any:
        """Decode one stored payload. Raises :class:`lfdata.errors.SampleError`; never allocates by unchecked claims."""
        ...
