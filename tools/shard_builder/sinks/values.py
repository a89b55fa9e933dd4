"""Stored values as files of common formats: what a member of a tar or a cell of a table holds. Nothing is lost on the way, or it is refused."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.codecs.base import IMAGE_CODECS, Decoder, Encoded, Encoder
from lfdata.codecs.registry import make_decoder, make_encoder
from lfdata.errors import SampleError
from lfdata.format.meta import FieldMeta

IMAGE_ENDINGS = {"webp": "webp", "jpeg": "jpg", "png": "png", "gif": "gif", "tiff": "tif", "bmp": "bmp", "avif": "avif"}
_CODEC_NAMES = {number: name for name, number in IMAGE_CODECS.items()}
_WAV_LIMIT = (1 << 32) - 45


class FileForms:
    """Turns stored values of one data set into files. Decoders are made once a field and set of parameters."""

    def __init__(self, raw_images: str) -> None:
        self._raw_images = raw_images
        self._decoders: dict[tuple[str, str, bytes], Decoder] = {}
        self._png: Encoder | None = None
        self.dictionaries: Mapping[str, bytes] = {}

    def decode(self, field: FieldMeta, value: Encoded) -> Any:
        """The decoded value."""
        dictionary = self.dictionaries.get(field.name) if field.kind == "json" else None
        place = (field.name, repr(field.params), dictionary or b"")
        decoder = self._decoders.get(place)
        if decoder is None:
            decoder = self._decoders[place] = make_decoder(field.kind, field.params, dictionary)
        return decoder.decode(value.payload, value.sizes)

    def image(self, field: FieldMeta, value: Encoded) -> tuple[str, Any]:
        """Ending and bytes: the stored file, or one that decodes to the same pixels where there is none."""
        name = _CODEC_NAMES.get(int(value.sizes["codec"]), "")
        if name in IMAGE_ENDINGS and not (
            name == "webp" and _other_channels(bytes(value.payload[:30]), int(value.sizes["channels"]))
        ):
            return IMAGE_ENDINGS[name], value.payload
        pixels = self.decode(field, value)
        if self._raw_images == "npy":
            return "npy", npy(pixels)
        if self._png is None:
            self._png = make_encoder("image", {"codec": "png", "bits16": "keep", "icc": "ignore"})
        return "png", self._png.encode(pixels).payload

    def json(self, field: FieldMeta, value: Encoded) -> bytes:
        """JSON text in UTF-8. Raises :class:`SampleError` for numbers and bytes that JSON does not have."""
        found = self.decode(field, value)
        try:
            return json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise SampleError("json", f"the value has no JSON text: {error}") from None


def _other_channels(head: bytes, channels: int) -> bool:
    """Whether a WebP file by itself decodes to other channels than it was stored with: it has no grey, and drops an alpha that is opaque."""
    form = head[12:16]
    if form == b"VP8X" and len(head) > 20:
        alpha = bool(head[20] & 0x10)
    elif form == b"VP8L" and len(head) >= 25:
        alpha = bool(head[24] & 0x10)
    else:
        alpha = False
    return channels != (4 if alpha else 3)


def npy(array: NDArray[Any]) -> bytes:
    """A ``.npy`` file."""
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def wav(value: Encoded) -> bytes:
    """The stored PCM with a RIFF header. Raises :class:`SampleError` beyond what one can hold."""
    channels, rate, size = int(value.sizes["channels"]), int(value.sizes["rate"]), len(value.payload)
    if size > _WAV_LIMIT or channels * 2 > 0xFFFF or rate * channels * 2 > 0xFFFFFFFF:
        raise SampleError("too-large", f"{size} bytes of {channels} channels at {rate} Hz are beyond what a WAV file can hold")
    head = struct.pack(
        "<4sI8sIHHIIHH4sI",
        b"RIFF",
        36 + size,
        b"WAVEfmt ",
        16,
        1,
        channels,
        rate,
        rate * channels * 2,
        channels * 2,
        16,
        b"data",
        size,
    )
    return head + bytes(value.payload)


def tokens(field: FieldMeta, value: Encoded) -> NDArray[Any]:
    """Ids: one-dimensional, of the field's type."""
    return np.frombuffer(value.payload, np.dtype(field.params["dtype"]).newbyteorder("<"))


def scalar_text(field: FieldMeta, value: Encoded) -> bytes:
    """A number as text that reads back exactly."""
    number = np.frombuffer(value.payload, np.dtype(field.params["dtype"]).newbyteorder("<"))[0].item()
    return (("true" if number else "false") if isinstance(number, bool) else repr(number)).encode()
