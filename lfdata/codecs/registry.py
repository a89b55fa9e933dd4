"""Encoders and decoders by kind. Codecs are imported when first asked for, so optional libraries stay optional."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lfdata.codecs.base import KINDS, Decoder, Encoder
from lfdata.errors import OptionError


def make_encoder(
    kind: str, options: Mapping[str, str], *, dictionary: bytes | None = None, root: str | Path | None = None
) -> Encoder:
    """The encoder of one field.

    Args:
        kind: one of :data:`lfdata.codecs.base.KINDS`.
        options: the field's codec options, as text.
        dictionary: for ``json``: the trained dictionary.
        root: for ``tokens``: directory that a relative tokenizer path is relative to (default: the working directory).

    Raises:
        OptionError: unknown kind, option or value; the message lists the valid ones.
        MissingExtraError: a library the field needs is not installed.
    """
    match kind:
        case "image":
            from lfdata.codecs.image import make_image_encoder

            return make_image_encoder(options)
        case "tokens":
            from lfdata.codecs.tokens import TokensEncoder

            return TokensEncoder(options, root=root)
        case "audio":
            from lfdata.codecs.audio import AudioEncoder

            return AudioEncoder(options)
        case "json":
            from lfdata.codecs.structured import JsonEncoder

            return JsonEncoder(options, dictionary)
        case "array":
            from lfdata.codecs.array import ArrayEncoder

            return ArrayEncoder(options)
        case "text":
            from lfdata.codecs.text import TextEncoder

            return TextEncoder(options)
        case "bytes":
            from lfdata.codecs.raw import BytesEncoder

            return BytesEncoder(options)
        case "scalar":
            from lfdata.codecs.scalar import ScalarEncoder

            return ScalarEncoder(options)
    raise _unknown(kind)


def make_decoder(kind: str, params: Mapping[str, Any], dictionary: bytes | None = None) -> Decoder:
    """The decoder of one field of one shard.

    Args:
        kind: the field's kind.
        params: the encoder's ``params``, as the schema stores them.
        dictionary: for ``json``: the shard's dictionary.

    Raises:
        OptionError: unknown kind, or ``params`` this version cannot read.
    """
    match kind:
        case "image":
            from lfdata.codecs.image import ImageDecoder

            return ImageDecoder(params)
        case "tokens":
            from lfdata.codecs.tokens import TokensDecoder

            return TokensDecoder(params)
        case "audio":
            from lfdata.codecs.pcm import AudioDecoder

            return AudioDecoder(params)
        case "json":
            from lfdata.codecs.structured import JsonDecoder

            return JsonDecoder(params, dictionary)
        case "array":
            from lfdata.codecs.array import ArrayDecoder

            return ArrayDecoder(params)
        case "text":
            from lfdata.codecs.text import TextDecoder

            return TextDecoder(params)
        case "bytes":
            from lfdata.codecs.raw import BytesDecoder

            return BytesDecoder(params)
        case "scalar":
            from lfdata.codecs.scalar import ScalarDecoder

            return ScalarDecoder(params)
    raise _unknown(kind)


def _unknown(kind: str) -> OptionError:
    return OptionError(f"unknown kind {kind!r}; valid kinds: {', '.join(KINDS)}")


# Libraries that shape stored bytes, by the kind of field they serve. PIL's own are in an image field's params.
_LIBRARIES = {
    "json": ("msgspec", "zstandard"),
    "audio": ("soundfile", "soxr"),
    "tokens": ("tokenizers", "tiktoken"),
}


def library_versions(kinds: Collection[str]) -> dict[str, str]:
    """Versions of the installed libraries that determine the stored bytes of these kinds of field, by name; for provenance.

    ``zstd`` and ``libsndfile`` are the C libraries bundled with their Python packages.
    """
    from importlib import metadata  # late: a worker that never needs it starts sooner

    versions = {}
    for name in ("numpy", *(name for kind, names in _LIBRARIES.items() if kind in kinds for name in names)):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if "zstandard" in versions:
        versions["zstd"] = ".".join(map(str, importlib.import_module("zstandard").ZSTD_VERSION))
    if "soundfile" in versions:
        versions["libsndfile"] = str(importlib.import_module("soundfile").__libsndfile_version__)
    return dict(sorted(versions.items()))
