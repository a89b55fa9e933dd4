"""How samples of a data set would be stored: some of them encoded in several ways, with the bytes and the times that take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from lfdata.codecs.base import Encoded
from lfdata.codecs.registry import make_decoder, make_encoder
from lfdata.dataset import ShardDataset
from lfdata.errors import SampleError
from lfdata.format.layout import xxh3
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Source

MAX_SCANNED = 200_000
MAX_SECONDS = 60.0
_SEED = 0x6164_7669_7365  # chooses the sample; any fixed number does

Raw = dict[str, Any]
Drawn = tuple[list[FieldSpec], list[Callable[[], Raw]], int, bool]


def draw(source: Source, count: int) -> Drawn:
    """Fields, ``count`` samples to load (those with the smallest hashes of their keys), how many there are, and whether all were counted."""
    best: list[tuple[int, bytes, int]] = []
    records = 0
    complete = True
    for item in source.scan():
        if isinstance(item, BadRecord):
            continue
        records += 1
        best.append((xxh3(item.key, _SEED), item.locator, item.unit))
        if len(best) > 8 * count:
            best = sorted(best)[:count]
        if records >= MAX_SCANNED:
            complete = False
            break

    def loader(locator: bytes) -> Callable[[], Raw]:
        def load() -> Raw:
            found: RawSample = source.load(locator)
            return found.values

        return load

    return list(source.fields), [loader(locator) for _, locator, _ in sorted(best)[:count]], records, complete


def draw_stored(data: ShardDataset, count: int) -> Drawn:
    """:func:`draw` from a data set of shards: its pictures as the files they are stored as, other values decoded."""
    hashes = [(xxh3(index.to_bytes(8, "little"), _SEED), index) for index in range(min(len(data), MAX_SCANNED))]
    fields = [
        FieldSpec(
            item.name,
            item.kind,
            item.name,
            options={"role": str(item.params.get("role", "picture"))} if item.kind == "image" else {},
        )
        for item in data.manifest.fields
    ]

    def loader(index: int) -> Callable[[], Raw]:
        def load() -> Raw:
            found: Raw = {}
            for item in data.manifest.fields:
                if not data.present_at(item.name, [index])[0]:
                    continue
                if item.kind == "image" and item.params.get("codec") != "raw":
                    found[item.name] = bytes(data.read_many([index], [item.name], decode=False)[item.name][0])
                else:
                    found[item.name] = data.read_many([index], [item.name])[item.name][0]
            return found

        return load

    return fields, [loader(index) for _, index in sorted(hashes)[:count]], len(data), True


def candidates(side: int | None, role: str = "picture") -> list[dict[str, str]]:
    """Ways to store a picture that are compared; with ``side``, its shorter side is brought to so many pixels. Those of masks and depth
    keep every value."""
    ways: list[dict[str, str]] = [{"codec": "keep"}, {"codec": "jpeg", "quality": "90"}, {"codec": "webp", "quality": "80"}]
    if role != "picture":
        ways = [{"codec": codec, "role": role} for codec in ("keep", "png", "webp")]
    if side is None:
        return ways
    return [ways[0], *(way | {"shorter": str(side)} for way in ways[1:])]


def try_images(
    values: Iterator[Any], side: int | None, role: str = "picture", seconds: float = MAX_SECONDS
) -> list[dict[str, Any]]:
    """Bytes and times of every candidate over the same pictures.

    Returns:
        One entry a candidate: ``options``, ``samples``, ``bytes`` (mean), ``encode_ms``, ``decode_ms`` (medians, one thread),
        ``pixels`` (mean, as stored), ``errors`` (pictures it cannot store, with the first reason).
    """
    encoders = [(way, make_encoder("image", way)) for way in candidates(side, role)]
    results: list[dict[str, list[float]]] = [{"bytes": [], "encode": [], "decode": [], "pixels": []} for _ in encoders]
    errors: list[list[str]] = [[] for _ in encoders]
    begun = time.perf_counter()
    for value in values:
        for number, (_, encoder) in enumerate(encoders):
            try:
                start = time.perf_counter()
                encoded: Encoded = encoder.encode(value)
                middle = time.perf_counter()
                make_decoder("image", encoder.params).decode(encoded.payload, encoded.sizes)
                end = time.perf_counter()
            except SampleError as error:
                errors[number].append(str(error))
                continue
            found = results[number]
            found["bytes"].append(len(encoded.payload))
            found["pixels"].append(encoded.sizes["width"] * encoded.sizes["height"])
            found["encode"].append((middle - start) * 1000)
            found["decode"].append((end - middle) * 1000)
        if time.perf_counter() - begun > seconds:
            break
    return [
        {
            "options": way,
            "samples": len(found["bytes"]),
            "bytes": round(statistics.fmean(found["bytes"])) if found["bytes"] else None,
            "pixels": round(statistics.fmean(found["pixels"])) if found["bytes"] else None,
            "encode_ms": round(statistics.median(found["encode"]), 3) if found["bytes"] else None,
            "decode_ms": round(statistics.median(found["decode"]), 3) if found["bytes"] else None,
            "errors": {"count": len(bad), "first": bad[0] if bad else ""},
        }
        for (way, _), found, bad in zip(encoders, results, errors, strict=True)
    ]


def sizes_of(spec: FieldSpec, values: Iterator[Any], stored: bool) -> dict[str, Any]:
    """Bytes of a field that is no picture, encoded as declared (of shards: as they are)."""
    sizes: list[int] = []
    first = ""
    encoder = None if stored else make_encoder(spec.kind, spec.options)
    for value in values:
        try:
            sizes.append(_length(value) if encoder is None else len(encoder.encode(value).payload))
        except SampleError as error:
            first = first or str(error)
    return {"samples": len(sizes), "bytes": round(statistics.fmean(sizes)) if sizes else None, "first_error": first}


def _length(value: Any) -> int:
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if hasattr(value, "samples"):
        return int(value.samples.nbytes)
    if isinstance(value, str):
        return len(value.encode())
    return len(value) if isinstance(value, bytes) else len(repr(value))
