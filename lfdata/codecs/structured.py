"""Kind ``json``: structured annotations, stored as MessagePack under zstandard with an optional trained dictionary."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from typing import Any

import msgspec
import zstandard

from lfdata.codecs._common import OptionReader
from lfdata.codecs._jsontext import check_value, parse_json
from lfdata.codecs.base import Buffer, Encoded
from lfdata.codecs.dictionary import dictionary_id
from lfdata.errors import OptionError, SampleError

DEFAULT_MAX_RAW = 64 * 1024 * 1024  # MessagePack bytes of one sample; Python objects take up to some 20 times that
DECODE_LIMIT = 256 * 1024 * 1024
MAX_DEPTH = 500  # below Python's recursion limit, so that whatever is written can be read
MAX_WINDOW = 128 * 1024 * 1024

_BLOCK = 128 * 1024  # the most that one zstandard block can expand to; the smallest block takes 4 bytes
_BYTES_A_CONTAINER = 64  # what an empty Python list or dict takes
_CONTAINER_BUDGET = 1024 * 1024 * 1024
_NOT_CONTAINERS = bytes(b for b in range(256) if not (0x80 <= b <= 0x9F or 0xDC <= b <= 0xDF))
_TIMESTAMPS = (b"\xd6\xff", b"\xd7\xff", b"\xc7\x0c\xff")  # heads of the extension types msgspec decodes by itself

_VALID = {
    "level": "<zstandard level, 1 to 22; default 6>",
    "max_depth": f"<deepest nesting accepted, 1 to {MAX_DEPTH}; default 64>",
    "max_raw": f"<largest MessagePack accepted, in bytes; default {DEFAULT_MAX_RAW}>",
    "duplicates": "error|first|last",
    "nan": "reject|keep",
}


class _Local(threading.local):
    """One zstandard context a thread: they are not thread-safe and release the GIL while they work."""

    compressor: zstandard.ZstdCompressor | None = None
    decompressor: zstandard.ZstdDecompressor | None = None


def _describe_dictionary(dictionary: bytes | None) -> dict[str, Any] | None:
    if not dictionary:
        return None
    return {"id": dictionary_id(dictionary), "sha256": hashlib.sha256(dictionary).hexdigest()}


class JsonEncoder:
    """Stores JSON text or Python objects as MessagePack under zstandard.

    Args:
        options: see below.
        dictionary: a zstandard dictionary (see :func:`lfdata.codecs.dictionary.train_dictionary`), or ``None``.

    Options:
        level: zstandard level, 1 to 22 (default 6).
        max_depth: deeper nesting is refused (default 64).
        max_raw: larger values are refused, measured as MessagePack; JSON text may be at most twice as long.
        duplicates: a key twice in one object is an error by default; ``first`` or ``last`` keeps that value.
        nan: NaN and infinities in Python objects are refused by default; ``keep`` stores them. In JSON text they are always
            refused, since JSON has no such numbers.

    Rules: keys are text and keep the order of the source. Integers fit 64 bits (-2**63 to 2**64-1); floats are stored as
    doubles, exactly. A UTF-8 byte order mark is accepted and dropped. Lone surrogates are refused. Tuples become lists; bytes,
    dates and other objects are refused.
    """

    kind = "json"

    def __init__(self, options: Mapping[str, str], dictionary: bytes | None = None) -> None:
        reader = OptionReader(self.kind, options, _VALID)
        self._options = dict(options)
        self._dictionary = dictionary or None
        self._level = reader.integer("level", 6, 1, 22) or 6
        self._max_depth = reader.integer("max_depth", 64, 1, MAX_DEPTH) or 64
        self._max_raw = reader.integer("max_raw", DEFAULT_MAX_RAW, 1, DECODE_LIMIT) or DEFAULT_MAX_RAW
        self._duplicates = reader.choice("duplicates", ("error", "first", "last"), "error")
        self._nan = reader.choice("nan", ("reject", "keep"), "reject")
        self._packer = msgspec.msgpack.Encoder()
        self._local = _Local()
        self.params: dict[str, Any] = {
            "serialization": "msgpack",
            "compression": "zstd",
            "level": self._level,
            "max_depth": self._max_depth,
            "max_raw": self._max_raw,
            "duplicates": self._duplicates,
            "nan": self._nan,
            "dictionary": _describe_dictionary(self._dictionary),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._options, self._dictionary)

    def encode(self, raw: Any) -> Encoded:
        """Encode JSON text (``str`` or UTF-8 bytes) or a Python object; see :meth:`pack` for errors."""
        packed = self.pack(raw)
        return Encoded(self._compressor().compress(packed), sizes={"raw_bytes": len(packed)})

    def pack(self, raw: Any) -> bytes:
        """The MessagePack of ``raw`` before compression (what a dictionary is trained on).

        ``str`` and bytes are JSON text; anything else is the value itself.
        Raises ``SampleError``: ``json``, ``empty``, ``utf8``, ``surrogate``, ``nan``, ``range``, ``depth``, ``duplicate-key``,
        ``type``, ``size-limit``, ``lfs-pointer``.
        """
        if isinstance(raw, str | bytes | bytearray | memoryview):
            value = parse_json(raw, self._duplicates, 2 * self._max_raw)
            check_value(value, self._max_depth, allow_nan=False, max_nodes=self._max_raw)
        else:
            value = raw
            check_value(value, self._max_depth, allow_nan=self._nan == "keep", max_nodes=self._max_raw)
        try:
            packed = self._packer.encode(value)
        except UnicodeEncodeError as error:
            raise SampleError("surrogate", f"a string holds a lone surrogate at character {error.start}") from None
        except OverflowError:
            raise SampleError("range", "an integer does not fit 64 bits") from None
        except RecursionError:
            raise SampleError("depth", "nested too deeply for the caller's stack") from None
        if len(packed) > self._max_raw:
            raise SampleError("size-limit", f"{len(packed)} bytes of MessagePack are more than max_raw={self._max_raw}")
        return packed

    def _compressor(self) -> zstandard.ZstdCompressor:
        made = self._local.compressor
        if made is None:
            shared = zstandard.ZstdCompressionDict(self._dictionary) if self._dictionary else None
            made = zstandard.ZstdCompressor(
                level=self._level, dict_data=shared, write_content_size=True, write_checksum=False, threads=0
            )
            self._local.compressor = made
        return made


class JsonDecoder:
    """Payload -> Python object (dict, list, str, int, float, bool, None).

    Args:
        params: the schema's.
        dictionary: the shard's dictionary; required when ``params`` name one.
        limit: largest MessagePack accepted, in bytes; the smaller of this and ``params["max_raw"]`` holds.

    Nothing is allocated before the claimed length, the frame's own length and what so few compressed bytes can hold agree.
    """

    def __init__(self, params: Mapping[str, Any], dictionary: bytes | None = None, *, limit: int = DECODE_LIMIT) -> None:
        if params.get("serialization") != "msgpack" or params.get("compression") != "zstd":
            raise OptionError("json: the schema names another serialization or compression than msgpack under zstd")
        declared = params.get("dictionary")
        if isinstance(declared, Mapping):
            found = hashlib.sha256(dictionary).hexdigest() if dictionary else None
            if found != declared.get("sha256"):
                raise OptionError(f"json: dictionary {declared.get('sha256')} is needed, got {found}")
        self._args = (dict(params), dictionary, limit)
        self._dictionary = dictionary if declared else None
        max_raw = params.get("max_raw", DEFAULT_MAX_RAW)
        self._limit = min(limit, max_raw) if isinstance(max_raw, int) else limit
        self._local = _Local()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_decoder, self._args

    def decode(self, payload: Buffer, sizes: Mapping[str, Any]) -> Any:
        """Decode one value. Raises ``SampleError``: ``corrupt``, ``size-limit``, ``depth``."""
        raw = self.messagepack(payload, sizes)
        if len(raw) * _BYTES_A_CONTAINER > _CONTAINER_BUDGET:
            containers = len(raw.translate(None, _NOT_CONTAINERS))
            if containers * _BYTES_A_CONTAINER > _CONTAINER_BUDGET:
                raise SampleError("size-limit", f"up to {containers} lists and objects in one value")
        try:
            value = msgspec.msgpack.decode(raw, ext_hook=_refuse_extension)
        except RecursionError:
            raise SampleError("depth", "nested too deeply to decode") from None
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
            raise SampleError("corrupt", f"stored MessagePack is malformed: {error}") from None
        if any(mark in raw for mark in _TIMESTAMPS):
            check_value(value, MAX_DEPTH, allow_nan=True, max_nodes=len(raw))
        return value

    def messagepack(self, payload: Buffer, sizes: Mapping[str, Any]) -> bytes:
        """One value as MessagePack, not looked into. Raises ``SampleError``: ``corrupt``, ``size-limit``."""
        return self._decompress(payload, int(sizes["raw_bytes"]))

    def _decompress(self, payload: Buffer, raw_bytes: int) -> bytes:
        if raw_bytes > self._limit:
            raise SampleError("size-limit", f"{raw_bytes} bytes of MessagePack are more than the limit of {self._limit}")
        try:
            frame = zstandard.get_frame_parameters(payload)
        except zstandard.ZstdError as error:
            raise SampleError("corrupt", f"not a zstandard frame: {error}") from None
        if frame.content_size != raw_bytes:
            raise SampleError("corrupt", f"the frame holds {frame.content_size} bytes, the index says {raw_bytes}")
        if frame.window_size > MAX_WINDOW:
            raise SampleError("size-limit", f"a zstandard window of {frame.window_size} bytes is more than {MAX_WINDOW}")
        if raw_bytes > (len(payload) // 4 + 1) * _BLOCK:
            raise SampleError("corrupt", f"{len(payload)} compressed bytes cannot hold {raw_bytes}")
        try:
            raw = self._decompressor().decompress(payload, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise SampleError("corrupt", f"zstandard: {error}") from None
        if len(raw) != raw_bytes:
            raise SampleError("corrupt", f"decompressed to {len(raw)} bytes instead of {raw_bytes}")
        return raw

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        made = self._local.decompressor
        if made is None:
            shared = zstandard.ZstdCompressionDict(self._dictionary) if self._dictionary else None
            made = zstandard.ZstdDecompressor(dict_data=shared, max_window_size=MAX_WINDOW)
            self._local.decompressor = made
        return made


def _rebuild_decoder(params: dict[str, Any], dictionary: bytes | None, limit: int) -> JsonDecoder:
    return JsonDecoder(params, dictionary, limit=limit)


def _refuse_extension(code: int, data: memoryview) -> Any:
    del data
    raise TypeError(f"extension type {code}")
