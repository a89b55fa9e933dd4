"""Reads a data set as a training script would and prints what is in it and how fast it came.

``python samples/demo.py DATASET``
"""

from __future__ import annotations

import sys
import time

import lfdata

SECONDS = 2.0


def main(path: str) -> None:
    """Print one sample, then samples a second over whole passes that take at least :data:`SECONDS` together."""
    dataset = lfdata.open(path)
    print(f"{path}: {len(dataset)} samples, fields {', '.join(dataset.fields)}")
    for name, value in dataset[dataset.index_of("photo/dogs")].items():
        print(f"  {name:<12}{describe(value)}")

    samples = values = passes = 0
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < SECONDS:
        for sample in dataset:
            samples += 1
            values += sum(value is not None for value in sample.values())
        passes += 1
    rate = f"{samples / elapsed:,.0f} samples/s"
    print(f"read and decoded in one process: {rate} ({passes} passes, {values / samples:.1f} values a sample)")


def describe(value: object) -> str:
    """One line about a value: shape and dtype of an array, else its beginning."""
    if isinstance(value, lfdata.Audio):
        return f"{value.samples.shape[0] / value.rate:.2f} s, {value.rate} Hz, {value.samples.dtype} {value.samples.shape}"
    shape = getattr(value, "shape", ())
    if shape:
        return f"{getattr(value, 'dtype', '')} {shape}"
    text = repr(value)
    return text if len(text) <= 90 else f"{text[:87]}..."


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python samples/demo.py DATASET")
    main(sys.argv[1])
