"""Kind ``tokens``: text as token ids, or ready-made ids, in the smallest unsigned dtype that holds the vocabulary."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.codecs._common import OptionReader, as_bytes, encode_utf8, refuse_lfs_pointer
from lfdata.codecs._npy import NPY_MAGIC, parse_npy
from lfdata.codecs._tokenizers import HuggingFace, Tiktoken, Tokenizer
from lfdata.codecs.base import Buffer, Encoded
from lfdata.codecs.text import decode_utf8
from lfdata.errors import OptionError, SampleError

_DTYPES = ("uint8", "uint16", "uint32", "uint64")

_VALID = {
    "tokenizer": "<path of a Hugging Face tokenizer.json>",
    "tiktoken": "<name of a tiktoken encoding, such as cl100k_base>",
    "vocab": "<number of ids; required for ready-made ids>",
    "add_special": "yes|no",
    "special_text": "ordinary|special",
    "eos": "<id, or with a tokenizer the token's text, appended to every sequence>",
    "max_tokens": "<longest sequence stored; longer ones are cut, with a warning>",
}


def token_dtype(vocab: int) -> np.dtype[Any]:
    """The smallest unsigned little-endian dtype that holds ids 0 to ``vocab - 1``."""
    for name in _DTYPES:
        dtype = np.dtype(name).newbyteorder("<")
        if vocab - 1 <= int(np.iinfo(dtype).max):
            return dtype
    raise OptionError(f"tokens: a vocabulary of {vocab} ids does not fit 64 bits")


class TokensEncoder:
    """Tokenises text, or checks ready-made ids.

    Args:
        options: see below.
        root: directory that a relative ``tokenizer`` path is relative to; the working directory by default.

    Options:
        tokenizer or tiktoken: how text becomes ids. With neither, values are ids already: lists, one-dimensional integer arrays
            or ``.npy`` bytes.
        vocab: number of ids. Required without a tokenizer; with one it may only enlarge the tokenizer's own.
        add_special: whether the Hugging Face file's own template (BOS, EOS, ...) is applied; default ``no``.
        special_text: text that spells a special token (``<|endoftext|>``) is ``ordinary`` text by default, so that data cannot
            forge control tokens; ``special`` makes it that token.
        eos: id (or token) appended to every sequence.
        max_tokens: longer sequences are cut to this length, ``eos`` included and kept; the cut is in ``Encoded.warnings``.

    Truncation and padding that a tokenizer file may ask for are switched off. ``Encoded.sizes``: tokens.
    """

    kind = "tokens"

    def __init__(self, options: Mapping[str, str], *, root: str | Path | None = None) -> None:
        reader = OptionReader(self.kind, options, _VALID)
        self._arguments = (dict(options), None if root is None else str(root))
        self._add_special = reader.choice("add_special", ("yes", "no"), "no") == "yes"
        special_text = reader.choice("special_text", ("ordinary", "special"), "ordinary") == "special"
        self._tokenizer = _open_tokenizer(reader, root, special_text)
        self._vocab = self._read_vocab(reader)
        self._dtype = token_dtype(self._vocab)
        self._eos = self._read_eos(reader)
        self._max_tokens = reader.integer("max_tokens", None, 1, 2**62)
        self.params: dict[str, Any] = {
            "vocab": self._vocab,
            "dtype": self._dtype.name,
            "tokenizer": self._tokenizer.identity if self._tokenizer else None,
            "add_special": self._add_special,
            "special_text": "special" if special_text else "ordinary",
            "eos": self._eos,
            "max_tokens": self._max_tokens,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._arguments

    def _read_vocab(self, reader: OptionReader) -> int:
        vocab = reader.integer("vocab", None, 1, 2**64)
        if self._tokenizer is None:
            if vocab is None:
                raise OptionError("tokens: give tokenizer=, tiktoken=, or vocab=<number of ids> for ready-made ids")
            return vocab
        if vocab is not None and vocab < self._tokenizer.vocab:
            raise reader.bad("vocab", f"the tokenizer has {self._tokenizer.vocab} ids")
        return vocab or self._tokenizer.vocab

    def _read_eos(self, reader: OptionReader) -> int | None:
        text = reader.text("eos")
        if text is None:
            return None
        found = int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None
        if found is None and self._tokenizer is not None:
            found = self._tokenizer.token_id(text)
        if found is None or found >= self._vocab:
            raise reader.bad("eos", f"not an id below {self._vocab} or a known token")
        return found

    def encode(self, raw: Any) -> Encoded:
        """Encode text (with a tokenizer) or ids (without).

        Raises ``SampleError``: ``type``, ``range`` (an id is negative or not below the vocabulary; ids never wrap), ``shape``,
        ``utf8``, ``surrogate``, ``tokenizer``, ``lfs-pointer``, and what an ``.npy`` file may raise.
        """
        warnings: tuple[str, ...] = ()
        if self._tokenizer is None:
            ids = _ready_made(raw)
        else:
            found = self._tokenizer.encode(_text(raw), self._add_special)
            ids = np.array(found, dtype=np.uint64)
            unknown = sum(1 for one in found if one == self._tokenizer.unknown) if self._tokenizer.unknown is not None else 0
            if unknown:
                warnings = (f"{unknown} of {len(found)} tokens are the unknown token",)
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self._vocab):
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise SampleError("range", f"token id {bad} is outside the vocabulary of {self._vocab}")
        stored = ids.astype(self._dtype)
        total = stored.size + (self._eos is not None)
        if self._max_tokens is not None and total > self._max_tokens:
            warnings = (*warnings, f"cut from {total} to {self._max_tokens} tokens")
            stored = stored[: self._max_tokens - (self._eos is not None)]
        if self._eos is not None:
            stored = np.append(stored, np.array([self._eos], dtype=self._dtype))
        return Encoded(stored.tobytes(), {"tokens": int(stored.size)}, warnings=warnings)

    def decode_text(self, ids: NDArray[Any]) -> str:
        """Text of ``ids``. Raises ``OptionError`` for fields of ready-made ids."""
        if self._tokenizer is None:
            raise OptionError("tokens: this field has no tokenizer")
        return self._tokenizer.decode([int(one) for one in ids])


def _rebuild(options: dict[str, str], root: str | None) -> TokensEncoder:
    return TokensEncoder(options, root=root)


def _open_tokenizer(reader: OptionReader, root: str | Path | None, special_text: bool) -> Tokenizer | None:
    path, name = reader.text("tokenizer"), reader.text("tiktoken")
    if path is not None and name is not None:
        raise OptionError("tokens: give only one of tokenizer= and tiktoken=")
    if path is not None:
        return HuggingFace(Path(root or ".") / path, special_text)
    if name is not None:
        if reader.text("add_special") == "yes":
            raise reader.bad("add_special", "tiktoken encodings have no template; use eos=")
        return Tiktoken(name, special_text)
    for option in ("add_special", "special_text"):
        if option in reader:
            raise reader.bad(option, "it needs a tokenizer")
    return None


def _text(raw: Any) -> str:
    if isinstance(raw, str):
        encode_utf8(raw)  # refuses lone surrogates with a proper error
        return raw
    data = as_bytes(raw, "text or UTF-8 bytes")
    refuse_lfs_pointer(data)
    return decode_utf8(data.removeprefix(codecs.BOM_UTF8))


def _ready_made(raw: Any) -> NDArray[Any]:
    if isinstance(raw, bytes | bytearray | memoryview) and bytes(raw[:6]) == NPY_MAGIC:
        ids = parse_npy(bytes(raw))
    elif isinstance(raw, np.ndarray):
        ids = raw
    elif isinstance(raw, list | tuple):
        try:
            ids = np.array(raw) if raw else np.zeros(0, np.uint64)
        except (ValueError, OverflowError, TypeError, RecursionError):
            raise SampleError("shape", "token ids must be one flat list") from None
        if ids.dtype.kind in "fO" and all(type(one) is int for one in raw):
            # NumPy falls back to doubles or objects when ids do not share a 64-bit type
            low, high = min(raw), max(raw)
            if low < 0 or high >= 2**64:
                raise SampleError("range", f"token id {low if low < 0 else '2**64 or more'} does not fit any vocabulary")
            ids = np.array(raw, dtype=np.uint64)
    else:
        raise SampleError("type", f"a list or array of token ids expected, got {type(raw).__name__}; text needs a tokenizer")
    if ids.ndim != 1:
        raise SampleError("shape", f"token ids of shape {ids.shape}; one dimension expected")
    if ids.dtype.kind not in "iu":
        raise SampleError("type", f"token ids must be integers, got {ids.dtype}")
    return ids


class TokensDecoder:
    """Payload -> owned, writable one-dimensional array of the field's unsigned dtype."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        vocab, name = params.get("vocab"), params.get("dtype")
        if name not in _DTYPES or not isinstance(vocab, int) or vocab < 1 or token_dtype(vocab).name != name:
            raise OptionError(f"tokens: the schema's vocabulary {vocab!r} and dtype {name!r} do not go together")
        self._vocab = vocab
        self._dtype = token_dtype(vocab)

    def decode(self, payload: Buffer, sizes: Mapping[str, Any]) -> NDArray[Any]:
        """Decode one sequence. Raises ``SampleError`` (``corrupt``): length or an id disagrees with index or vocabulary."""
        tokens = int(sizes["tokens"])
        if tokens * self._dtype.itemsize != len(payload):
            raise SampleError("corrupt", f"{tokens} tokens of {self._dtype.name} do not match {len(payload)} stored bytes")
        ids = np.frombuffer(payload, dtype=self._dtype).astype(self._dtype.newbyteorder("="), copy=True)
        if ids.size and int(ids.max()) >= self._vocab:
            raise SampleError("corrupt", f"token id {int(ids.max())} is outside the vocabulary of {self._vocab}")
        return ids
