"""Kind ``bytes``: any byte string, stored untouched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lfdata.codecs._common import OptionReader, as_bytes, check_max_bytes, encode_utf8, refuse_lfs_pointer
from lfdata.codecs.base import Buffer, Encoded

_VALID = {
    "max_bytes": "<largest value accepted, in bytes; no limit by default>",
    "lfs_pointer": "reject|keep",
}


class BytesEncoder:
    """Stores bytes as they are; a ``str`` is stored as its UTF-8.

    Options: ``max_bytes`` refuses longer values; ``lfs_pointer=reject`` (default) refuses a Git LFS pointer, since it is almost
    always a missing file; ``keep`` stores it like anything else.
    """

    kind = "bytes"

    def __init__(self, options: Mapping[str, str]) -> None:
        reader = OptionReader(self.kind, options, _VALID)
        self._max_bytes = reader.integer("max_bytes", None, 0, 2**63 - 1)
        self._lfs_pointer = reader.choice("lfs_pointer", ("reject", "keep"), "reject")
        self.params: dict[str, Any] = {"max_bytes": self._max_bytes, "lfs_pointer": self._lfs_pointer}

    def encode(self, raw: Any) -> Encoded:
        """Encode bytes-like or ``str``. Raises ``SampleError``: ``type``, ``size-limit``, ``lfs-pointer``, ``surrogate``."""
        payload = encode_utf8(raw) if isinstance(raw, str) else as_bytes(raw, "bytes")
        check_max_bytes(len(payload), self._max_bytes)
        if self._lfs_pointer == "reject":
            refuse_lfs_pointer(payload)
        return Encoded(payload)


class BytesDecoder:
    """Payload -> ``bytes`` (owned)."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        del params  # nothing stored changes how bytes are read

    def decode(self, payload: Buffer, sizes: Mapping[str, Any]) -> bytes:
        """The payload itself."""
        del sizes
        return bytes(payload)
