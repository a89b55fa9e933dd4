"""exp and log of additions and multiplications only: the same bits on every machine, which libraries do not promise.

Errors are a few units of the last place; the tests compare with ``math``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_LN2_HIGH = 0.6931471803691238  # its last 32 bits are zero: a multiple by a small integer is exact
_LN2_LOW = 1.9082149292705877e-10
LN10 = 2.302585092994046
_TERMS = [1.0 / math.factorial(k) for k in range(14)]
_SQRT_HALF = 0.7071067811865476


def exp(x: Any) -> Floats:
    """e to the power of ``x``: float64, of its shape; 0 for what is too small."""
    given: Floats = np.clip(np.asarray(x, np.float64), -800.0, 700.0)
    twos = np.rint(given * 1.4426950408889634)
    rest = (given - twos * _LN2_HIGH) - twos * _LN2_LOW
    found: Floats = np.full(rest.shape, _TERMS[-1])
    for term in reversed(_TERMS[:-1]):
        found *= rest
        found += term
    result: Floats = np.ldexp(found, twos.astype(np.int32))
    return result


def log(x: Any) -> Floats:
    """Natural logarithm of positive numbers: float64, of the shape of ``x``; -inf for 0."""
    given: Floats = np.asarray(x, np.float64)
    part, twos = np.frexp(given)
    low = part < _SQRT_HALF
    part = np.where(low, part + part, part)
    twos = twos - low
    # log(part) = 2 artanh(z); |z| < 0.1716, so the terms fall by 34 and more.
    z = (part - 1.0) / (part + 1.0)
    square = z * z
    found: Floats = np.zeros(z.shape)
    for k in range(23, 0, -2):
        found *= square
        found += 1.0 / k
    result: Floats = twos * _LN2_HIGH + (twos * _LN2_LOW + 2.0 * z * found)
    return np.where(given > 0, result, -np.inf)
