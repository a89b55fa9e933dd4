"""Types of the optional C module; see ``_native.c``."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def read_checked(
    fd: int,
    seed: int,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    checks: NDArray[np.uint64],
    places: NDArray[np.int64],
    out: NDArray[np.uint8],
    threads: int,
) -> int: ...
def read_mapped(
    mapping: Any,
    seed: int,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    checks: NDArray[np.uint64],
    places: NDArray[np.int64],
    out: NDArray[np.uint8],
    threads: int,
) -> int: ...
def resident(mapping: Any, samples: int, random: int) -> bool: ...
def xxh3(data: Any, seed: int) -> int: ...
def permute(
    positions: NDArray[np.int64], n: int, high: int, low: int, keys: NDArray[np.uint64], out: NDArray[np.int64], inverse: bool
) -> int: ...

class Reading:
    def finish(self) -> int: ...

def start_mapped(
    mapping: Any,
    seed: int,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    checks: NDArray[np.uint64],
    places: NDArray[np.int64],
    out: NDArray[np.uint8],
    threads: int,
) -> Reading: ...
