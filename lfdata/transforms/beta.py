"""Beta(alpha, alpha) from one uniform number: the inverse of its distribution function, the same bits on every machine."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.transforms.portable import exp, log

Floats = NDArray[np.float64]

LOWEST, HIGHEST = 0.001, 10.0  # of alpha
_NODES = 1025


@lru_cache(maxsize=64)
def _table(alpha: float) -> tuple[Floats, Floats, Floats]:
    """For x from 0 to 1/2: w(x), x and dx/dw, where w is the incomplete beta integral, times alpha, to the power of 1 / alpha.

    With the all-positive series T(x) = sum over k of (2 alpha)(2 alpha + 1)... x^k / (alpha + 1)(alpha + 2)... the integral is
    x^alpha (1 - x)^alpha T / alpha. So w = x (1 - x) T^(1 / alpha) is smooth and nearly x, however steep the distribution is.
    """
    x = np.linspace(0.0, 0.5, _NODES)
    series, term, k = np.ones(_NODES), np.ones(_NODES), 0
    while term[-1] > 1e-18 * series[-1]:
        term = term * ((2 * alpha + k) / (alpha + 1 + k)) * x
        series = series + term
        k += 1
    root = exp(log(series) / alpha)
    return x * (1.0 - x) * root, x, series / root


def quantile(alpha: float, u: Any) -> Floats:
    """The number below which Beta(alpha, alpha) lies with probability ``u``.

    Cubic interpolation in a table of 1,025 points; the error is below 1e-11 (tests compare with closed forms). A number and
    1 - u give opposite results.

    Args:
        alpha: 0.001 to 10.
        u: in [0, 1), any shape.

    Returns:
        float64 of that shape, within [0, 1].
    """
    given: Floats = np.asarray(u, np.float64)
    upper = given > 0.5
    tail = np.where(upper, 1.0 - given, given)
    nodes, values, slopes = _table(alpha)
    w = nodes[-1] * exp(log(2.0 * tail) / alpha)
    at = np.clip(np.searchsorted(nodes, w, "right") - 1, 0, _NODES - 2)
    width = nodes[at + 1] - nodes[at]
    t = np.clip((w - nodes[at]) / width, 0.0, 1.0)
    s = 1.0 - t
    found = s * s * ((1.0 + 2.0 * t) * values[at] + t * width * slopes[at])
    found += t * t * ((1.0 + 2.0 * s) * values[at + 1] - s * width * slopes[at + 1])
    found = np.clip(found, 0.0, 0.5)
    result: Floats = np.where(upper, 1.0 - found, found)
    return result
