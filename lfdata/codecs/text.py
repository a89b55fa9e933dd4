"""Kind ``text``: Unicode text, stored as raw UTF-8 and byte-exact (never normalised)."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Any

from lfdata.codecs._common import OptionReader, as_bytes, check_max_bytes, encode_utf8, refuse_lfs_pointer
from lfdata.codecs.base import Buffer, Encoded
from lfdata.errors import SampleError

_VALID = {
    "errors": "strict|replace",
    "bom": "strip|keep",
    "max_bytes": "<largest text accepted, in bytes of UTF-8; no limit by default>",
}


def decode_utf8(raw: bytes) -> str:
    """``raw`` as text. Raises ``SampleError`` (``utf8``) naming the offset of the first bad byte."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = ""
        if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            hint = "; the text starts with a UTF-16 or UTF-32 byte order mark: convert it to UTF-8 first"
        raise SampleError(
            "utf8", f"not UTF-8: byte 0x{raw[error.start]:02x} at byte offset {error.start} ({error.reason}){hint}"
        ) from None


class TextEncoder:
    """Stores text as UTF-8.

    Options:
        errors: ``strict`` (default) refuses invalid UTF-8 and lone surrogates; ``replace`` stores U+FFFD in their place and
            says so in ``Encoded.warnings``.
        bom: ``strip`` (default) drops one leading byte order mark of *bytes*, where it marks the encoding; ``keep`` stores it.
            In a ``str`` U+FEFF is a character like any other and always stays.
        max_bytes: refuses longer texts.
    """

    kind = "text"

    def __init__(self, options: Mapping[str, str]) -> None:
        reader = OptionReader(self.kind, options, _VALID)
        self._errors = reader.choice("errors", ("strict", "replace"), "strict")
        self._bom = reader.choice("bom", ("strip", "keep"), "strip")
        self._max_bytes = reader.integer("max_bytes", None, 0, 2**63 - 1)
        self.params: dict[str, Any] = {
            "encoding": "utf-8",
            "errors": self._errors,
            "bom": self._bom,
            "max_bytes": self._max_bytes,
        }

    def encode(self, raw: Any) -> Encoded:
        """Encode ``str`` or UTF-8 bytes.

        Raises ``SampleError``: ``utf8``, ``surrogate``, ``type``, ``size-limit``, ``lfs-pointer``.
        """
        warnings: tuple[str, ...] = ()
        if isinstance(raw, str):
            try:
                payload = encode_utf8(raw)
            except SampleError:
                if self._errors == "strict":
                    raise
                payload = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in raw).encode("utf-8")
                warnings = ("lone surrogates replaced by U+FFFD",)
        else:
            payload, warnings = self._from_bytes(as_bytes(raw, "text or UTF-8 bytes"))
        check_max_bytes(len(payload), self._max_bytes)
        return Encoded(payload, warnings=warnings)

    def _from_bytes(self, raw: bytes) -> tuple[bytes, tuple[str, ...]]:
        check_max_bytes(len(raw), self._max_bytes)
        refuse_lfs_pointer(raw)
        if self._bom == "strip":
            raw = raw.removeprefix(codecs.BOM_UTF8)
        try:
            decode_utf8(raw)
        except SampleError as error:
            if self._errors == "strict":
                raise
            return raw.decode("utf-8", "replace").encode("utf-8"), (f"replaced by U+FFFD: {error.reason}",)
        return raw, ()


class TextDecoder:
    """Payload -> ``str``."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        del params  # always UTF-8

    def decode(self, payload: Buffer, sizes: Mapping[str, Any]) -> str:
        """Decode UTF-8. Raises ``SampleError`` (``utf8``) when the stored bytes are not."""
        del sizes
        return decode_utf8(bytes(payload))
