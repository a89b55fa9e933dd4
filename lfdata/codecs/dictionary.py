"""Deterministic training and identity of zstandard dictionaries for the ``json`` kind."""

from __future__ import annotations

from collections.abc import Sequence

import zstandard

DEFAULT_SIZE = 112640  # zstandard's own default (110 KiB)
MIN_SAMPLES = 8
MIN_SIZE = 256  # ZDICT_DICTSIZE_MIN
SIZE_SHARE = 8  # a dictionary is at most 1/8 of the data it was trained on: below that it repeats the data
TRAINING_SHARE = 100  # zstandard advises some 100 times the dictionary's size; more costs time and gains nothing
MAX_SAMPLE = 128 * 1024  # the part of one sample that is looked at


def train_dictionary(samples: Sequence[bytes], size: int = DEFAULT_SIZE) -> bytes | None:
    """A zstandard dictionary for values like ``samples``.

    The same samples in the same order give the same bytes with one zstandard version: fixed COVER parameters, one thread.

    Args:
        samples: MessagePack of single values (:meth:`lfdata.codecs.structured.JsonEncoder.pack`). The first
            ``100 * size`` bytes are used, and of each sample the first 128 KiB.
        size: largest dictionary wanted, in bytes; less is made from little data.

    Returns:
        The dictionary, or ``None`` when there is too little data for one (fewer than 8 samples, or zstandard refuses).
    """
    used: list[bytes | bytearray | memoryview] = []
    total = 0
    for sample in samples:
        if total >= TRAINING_SHARE * size:
            break
        part = sample[:MAX_SAMPLE]
        if len(part) >= 8:  # shorter ones teach nothing and zstandard rejects sets of them
            used.append(part)
            total += len(part)
    size = min(size, total // SIZE_SHARE)
    if len(used) < MIN_SAMPLES or size < MIN_SIZE:
        return None
    try:
        trained = zstandard.train_dictionary(size, used, k=1024, d=8, threads=0)
    except (zstandard.ZstdError, MemoryError):
        return None
    return trained.as_bytes()


def dictionary_id(dictionary: bytes) -> int:
    """The 32-bit id inside a zstandard dictionary; 0 for one without a header (raw content)."""
    return int(zstandard.ZstdCompressionDict(dictionary).dict_id())
