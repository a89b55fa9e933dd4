"""``advise``: measures a storage and some samples, and says how to store the data, with the figures behind every word.

A candidate's rate is the smaller of what the storage delivers (bytes a second read in sequence, by bytes a sample) and what the cores decode
(cores, by decoding time a sample). The fastest is taken, and among those within a tenth of it the one of fewest bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lfdata.errors import OptionError, SampleError
from shard_builder.operations.inputs import open_input
from shard_builder.operations.storage import SECONDS, list_files, measure
from shard_builder.operations.trial import Raw, draw, draw_stored, sizes_of, try_images
from shard_builder.sources.base import FieldSpec, Source

WITHIN = 0.10
SMALL_FILE = 1 << 20
FAST_RANDOM_MS = 0.3  # what flash answers within; a disk that turns takes several
HDF5_BYTES = 500_000_000_000
MIN_READ = 8 << 20
MIN_GROUP, MAX_GROUP = 1 << 20, 64 << 20
MIN_SHARD, MAX_SHARD = 64 << 20, 2 << 30


@dataclass(frozen=True)
class AdviceOptions:
    """samples: pictures encoded. side: the shorter side to store at, if the training needs no more. cores: that will decode; all by default.

    seconds: what one measurement of the storage may take. storage: where to measure; where the source lies by default.
    """

    samples: int = 48
    side: int | None = None
    cores: int = 0
    seconds: float = SECONDS
    storage: Path | None = None

    def __post_init__(self) -> None:
        if self.samples < 1 or self.cores < 0 or (self.side is not None and self.side < 1) or not self.seconds > 0:
            raise OptionError("samples, side and seconds must be positive, cores not negative")


def advise(location: Path, source: Source | None, options: AdviceOptions | None = None) -> dict[str, Any]:
    """Measure and recommend.

    Args:
        location: where the data lie. source: how they are read; ``None`` for a data set of shards.

    Returns:
        JSON-able: ``storage`` and ``data`` (what was measured), ``recommendation`` (each with ``value`` and ``why``).

    Raises:
        SourceError, OptionError: the source cannot be read, or has no samples.
    """
    options = options or AdviceOptions()
    cores = options.cores or len(os.sched_getaffinity(0))
    listing = list_files(location)
    where = listing if options.storage is None else list_files(options.storage)
    storage = {"place": str(options.storage or location), **measure(where, options.seconds)}
    if source is None:
        fields, loaders, records, complete = draw_stored(open_input(location), options.samples)
    else:
        fields, loaders, records, complete = draw(source, options.samples)
    if not records:
        raise OptionError(f"{location}: no sample that could be read; there is nothing to advise on")
    data = {
        "files": listing.files,
        "bytes": listing.bytes,
        "files_counted": listing.complete,
        "records": records,
        "records_counted": complete,
        "fields": _fields(fields, loaders, options, stored=source is None),
    }
    return {
        "cores": cores,
        "storage": storage,
        "data": data,
        "recommendation": recommend(storage, data, cores, sharded=source is None),
    }


def _fields(
    fields: list[FieldSpec], loaders: list[Callable[[], Raw]], options: AdviceOptions, *, stored: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for spec in fields:
        values = _values(spec, loaders)
        if spec.kind == "image":
            role = spec.options.get("role", "picture")
            role = "mask" if role == "label" else role
            found[spec.name] = {"kind": "image", "role": role, "candidates": try_images(values, options.side, role)}
        else:
            found[spec.name] = {"kind": spec.kind, **sizes_of(spec, values, stored)}
    return found


def _values(spec: FieldSpec, loaders: list[Callable[[], Raw]]) -> Iterator[Any]:
    for load in loaders:
        try:
            values = load()
        except SampleError:
            continue
        if spec.name in values:
            yield values[spec.name]


# -- recommendations ------------------------------------------------------------------------------------------------------


def recommend(storage: dict[str, Any], data: dict[str, Any], cores: int, *, sharded: bool = False) -> dict[str, Any]:
    """What follows from the figures; a pure function of them."""
    rate = _sequential(storage)
    found: dict[str, Any] = {}
    per_sample = sum(field["bytes"] or 0 for field in data["fields"].values() if field["kind"] != "image")
    decode = 0.0
    for name, field in data["fields"].items():
        if field["kind"] != "image":
            continue
        best = _codec(field["candidates"], rate, cores)
        if best is None:
            found[f"codec of {name}"] = {
                "value": None,
                "why": "no picture of the sample could be stored in any way that was tried",
            }
            continue
        if best["options"]["codec"] != "keep" and field.get("role", "picture") == "picture":
            best["why"] += ". This loses detail: keep pictures as they are where that matters"
        found[f"codec of {name}"] = best
        chosen = next(item for item in field["candidates"] if item["options"] == best["options"])
        per_sample += chosen["bytes"]
        decode += chosen["decode_ms"]
    total = per_sample * data["records"]
    found["layout"] = _layout(storage, data, total, sharded)
    found["shard size"] = _shard_size(total, data["records_counted"])
    found["group size"] = _group_size(storage)
    found["workers"] = _workers(rate, per_sample, decode, cores)
    found["staging"] = _staging(rate, per_sample, decode, cores)
    return found


def _sequential(storage: dict[str, Any]) -> float | None:
    """MB a second, or ``None`` if too little was read to say so."""
    found = storage["sequential"]
    return float(found["mb_per_s"]) if found and found["bytes"] >= MIN_READ else None


def _rate(item: dict[str, Any], rate: float | None, cores: int) -> tuple[float, str]:
    """Samples a second of a candidate, and what limits it."""
    decoding = cores * 1000 / max(item["decode_ms"], 1e-6)
    reading = math.inf if rate is None else rate * 1e6 / max(item["bytes"], 1)
    return (reading, "storage") if reading < decoding else (decoding, "decoding")


def _codec(items: list[dict[str, Any]], rate: float | None, cores: int) -> dict[str, Any] | None:
    tried = max((item["samples"] for item in items), default=0)
    usable = [item for item in items if item["samples"] and item["samples"] == tried]
    if not usable:
        return None
    rates = [_rate(item, rate, cores)[0] for item in usable]
    near = [item for item, each in zip(usable, rates, strict=True) if each >= (1 - WITHIN) * max(rates)]
    best = min(near, key=lambda item: item["bytes"])
    speed, limit = _rate(best, rate, cores)
    others = "; ".join(
        f"{_way(item)}: {item['bytes']:,} bytes, {item['decode_ms']:.2f} ms, {_rate(item, rate, cores)[0]:,.0f}/s"
        for item in usable
    )
    return {
        "value": _way(best),
        "options": best["options"],
        "samples_per_s": round(speed, 1),
        "limit": limit,
        "why": f"limited by {limit} at {speed:,.0f} samples/s on {cores} cores; of those within {WITHIN:.0%} of the fastest, "
        f"the fewest bytes ({others})",
    }


def _way(item: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in item["options"].items())


def _layout(storage: dict[str, Any], data: dict[str, Any], total: int, sharded: bool) -> dict[str, Any]:
    mean = data["bytes"] / data["files"] if data["files"] else 0
    small = storage["small_files"]
    arrays = all(field["kind"] in ("array", "scalar") for field in data["fields"].values())
    latency = (storage["random"] or {}).get("median_ms")
    if sharded:
        return {"value": "shards", "why": "the data are shards already"}
    if data["files"] > 1000 and mean < SMALL_FILE:
        speed = f"; opening and reading them gave {small['mb_per_s']:,.1f} MB/s" if small else ""
        sequential = storage["sequential"]
        against = f" against {sequential['mb_per_s']:,.1f} MB/s read in sequence" if small and sequential else ""
        return {"value": "shards", "why": f"{data['files']:,} files of {mean / 1000:,.1f} kB on average{speed}{against}"}
    if arrays and latency is not None and latency <= FAST_RANDOM_MS and total < HDF5_BYTES:
        return {
            "value": "shards or chunked HDF5",
            "why": f"numbers only, {total / 1e9:,.1f} GB, and random reads of {latency:.3f} ms: either serves; shards add checks and "
            "exact resume, HDF5 spares the conversion where the data are in it already",
        }
    return {"value": "shards", "why": "random access by sample and field, a check of every value, and sequential reads"}


def _shard_size(total: int, counted: bool) -> dict[str, Any]:
    size = min(max(_power(total / 64), MIN_SHARD), MAX_SHARD)
    about = f"about {total / 1e9:,.2f} GB" if counted else f"more than {total / 1e9:,.2f} GB (not all samples were counted)"
    size = size if counted else MAX_SHARD // 2
    return {
        "value": f"{size >> 20}M",
        "bytes": size,
        "why": f"{about} as stored; a 64th of it, so that there are shards to deal out, but 64 MiB at least and 2 GiB at most",
    }


def _group_size(storage: dict[str, Any]) -> dict[str, Any]:
    latency, sequential = (storage["random"] or {}).get("median_ms"), _sequential(storage)
    if latency is None or sequential is None:
        return {
            "value": "8M",
            "bytes": 8 << 20,
            "why": "the default: there were no files large enough to measure reads on",
        }
    wanted = 10 * latency / 1000 * sequential * 1e6
    size = min(max(_power(wanted), MIN_GROUP), MAX_GROUP)
    return {
        "value": f"{size >> 20}M",
        "bytes": size,
        "why": f"a read of {latency:.3f} ms to begin and {sequential:,.0f} MB/s after it: of {wanted / 1e6:,.2f} MB nine tenths are transfer",
    }


def _power(size: float) -> int:
    """The power of two that is not below ``size``."""
    return 1 << max(0, math.ceil(math.log2(max(size, 1))))


def _workers(rate: float | None, per_sample: float, decode_ms: float, cores: int) -> dict[str, Any]:
    if not decode_ms:
        return {"value": 1, "why": "nothing here takes decoding"}
    if rate is None or not per_sample:
        return {
            "value": cores,
            "why": f"{decode_ms:.2f} ms of decoding a sample; the storage could not be measured: all {cores} cores",
        }
    wanted = rate * 1e6 / per_sample * decode_ms / 1000
    value = max(1, min(cores, math.ceil(wanted)))
    return {
        "value": value,
        "why": f"the storage delivers {rate * 1e6 / per_sample:,.0f} samples/s and one takes {decode_ms:.2f} ms of a core: {wanted:,.1f} "
        f"threads keep up with it, and there are {cores} cores",
    }


def _staging(rate: float | None, per_sample: float, decode_ms: float, cores: int) -> dict[str, Any]:
    if rate is None or not per_sample or not decode_ms:
        return {"value": "no", "why": "there are not both reading and decoding to compare"}
    decoding, reading = cores * 1000 / decode_ms, rate * 1e6 / per_sample
    why = f"the storage delivers {reading:,.0f} samples/s, {cores} cores decode {decoding:,.0f}"
    if reading < 0.5 * decoding:
        return {"value": "yes", "why": f"{why}: copy the shards to faster local storage, or store smaller samples"}
    return {"value": "no", "why": why}
