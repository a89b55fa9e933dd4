"""Peak bytes of a micro-batch from its shape: fitted from those that were seen (docs/runtime.md)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lftrain.errors import ConfigError

Shape = Mapping[str, float]
"""Features of a micro-batch by name: rows, tokens, pixels, rows * tokens^2, tokens an expert gets, ...; each 0 or more."""

# Errors that the band is taken from: those of so many micro-batches back.
WINDOW = 64
# Of sums of floats that are alike.
ROUNDING = 1e-9


class Prediction(NamedTuple):
    """Bytes that are expected, and what may come on top."""

    bytes: float
    band: float

    @property
    def most(self) -> float:
        """With the band."""
        return self.bytes + self.band


class MaxSoFar:
    """The baseline: every micro-batch may take what the largest took."""

    def __init__(self) -> None:
        self.bytes = 0.0

    def observe(self, bytes_: float) -> None:
        """A micro-batch took so much."""
        self.bytes = max(self.bytes, bytes_)


class ActivationModel:
    """Peak bytes as a sum of features times coefficients that are 0 or more, and a constant.

    A least-squares fit of relative errors, renewed with each micro-batch that is seen; nothing but sums is kept of old ones. Memory never
    falls when a batch grows, so no coefficient is negative; without that rule features that grow together (rows and tokens) take large
    coefficients of both signs, which predict nonsense for other shapes.

    Each micro-batch is predicted before it is added to the fit. The band is the largest of the last :data:`WINDOW` such errors that were
    too low, relative to the prediction; beyond the largest features seen it grows with the distance.

    Args:
        features: names, in any order; a shape has all of them.
        least: micro-batches that must be seen before anything is predicted; by default two more than there are coefficients.
    """

    def __init__(self, features: Sequence[str], least: int | None = None) -> None:
        self.features = tuple(features)
        if not self.features or len(set(self.features)) < len(self.features):
            raise ConfigError(f"features of an activation model are names, each once: {list(features)!r}")
        count = len(self.features) + 1
        self.least = count + 2 if least is None else max(1, least)
        self.seen, self.baseline = 0, MaxSoFar()
        self._gram: NDArray[np.float64] = np.zeros((count, count))
        self._target: NDArray[np.float64] = np.zeros(count)
        self._largest: NDArray[np.float64] = np.zeros(count)
        self._coefficients: NDArray[np.float64] | None = None
        self._low: deque[float] = deque(maxlen=WINDOW)
        self._errors: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    @property
    def ready(self) -> bool:
        """Whether enough was seen."""
        return self.seen >= self.least

    @property
    def coefficients(self) -> dict[str, float]:
        """Bytes a unit of each feature, and of ``""``, the constant."""
        return dict(zip((*self.features, ""), self._fit().tolist(), strict=True))

    def observe(self, shape: Shape, bytes_: float) -> None:
        """A micro-batch of such a shape took so many bytes at its peak. Raises :class:`ConfigError`: a shape that lacks a feature."""
        row = self._row(shape)
        if not (math.isfinite(bytes_) and bytes_ > 0):
            return
        if self.ready:
            expected = float(self._fit() @ row)
            self._low.append(max(0.0, bytes_ / expected - 1) if expected > 0 else 1.0)
            self._errors.append((abs(expected - bytes_) / bytes_, abs(self.baseline.bytes - bytes_) / bytes_))
        self.baseline.observe(bytes_)
        scaled = row / bytes_
        self._gram += np.outer(scaled, scaled)
        self._target += scaled
        self._largest = np.maximum(self._largest, row)
        self.seen, self._coefficients = self.seen + 1, None

    def predict(self, shape: Shape) -> Prediction | None:
        """``None``: not enough was seen."""
        row = self._row(shape)
        if not self.ready:
            return None
        expected, band = self._predict(row[None])
        return Prediction(float(expected[0]), float(band[0]))

    def admits(self, shape: Shape, budget: float) -> bool:
        """Whether such a micro-batch stays within ``budget`` bytes, band included. Before enough was seen every one is admitted: there is
        nothing to go by, and nothing would be learnt. So is one with a feature that was never seen."""
        return bool(self._admits(self._row(shape)[None], budget)[0])

    def admits_each(self, shapes: Mapping[str, NDArray[np.floating]], budget: float) -> NDArray[np.bool_]:
        """The same of many: of each feature an array (n,). Raises :class:`ConfigError`: a feature is not there."""
        try:
            columns = [np.asarray(shapes[name], np.float64) for name in self.features]
        except KeyError as error:
            raise self._lacks(shapes, error) from error
        return self._admits(np.stack([*columns, np.ones_like(columns[0])], 1), budget)

    def _admits(self, rows: NDArray[np.float64], budget: float) -> NDArray[np.bool_]:
        if not self.ready:
            return np.ones(len(rows), bool)
        expected, band = self._predict(rows)
        return ~np.isfinite(band) | (expected + band <= budget * (1 + ROUNDING))

    def _predict(self, rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Bytes and bands of shapes (n, features and the constant)."""
        expected = rows @ self._fit()
        with np.errstate(divide="ignore", invalid="ignore"):
            beyond = np.nanmax(np.where(rows > 0, rows / self._largest, 0.0), 1)
            band = expected * max(self._low, default=0.0) * np.maximum(1.0, beyond)
        # Beyond all is a feature that was never seen.
        return expected, np.where(np.isfinite(beyond), band, math.inf)

    def report(self) -> dict[str, float]:
        """Mean relative errors of the last predictions, made before each micro-batch was seen: the model's, and those of "max so far"."""
        found: dict[str, float] = {"seen": self.seen}
        if self._errors:
            model, baseline = np.mean(np.array(self._errors), 0).tolist()
            found |= {"error": round(model, 5), "error_max_so_far": round(baseline, 5), "band": round(float(max(self._low)), 5)}
        return found

    def _row(self, shape: Shape) -> NDArray[np.float64]:
        try:
            row = np.array([*(float(shape[name]) for name in self.features), 1.0])
        except KeyError as error:
            raise self._lacks(shape, error) from error
        if not (np.isfinite(row).all() and (row >= 0).all()):
            raise ConfigError(f"features of a shape are numbers from 0 on: {dict(shape)}")
        return row

    def _lacks(self, shape: Mapping[str, object], error: KeyError) -> ConfigError:
        return ConfigError(f"the shape {dict(shape)} lacks the feature {error.args[0]!r} of the activation model")

    def _fit(self) -> NDArray[np.float64]:
        if self._coefficients is None:
            self._coefficients = nnls(self._gram, self._target)
        return self._coefficients


def nnls(gram: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 with the least ``x' gram x - 2 x' target``: non-negative least squares of the normal equations, by active sets (Lawson and Hanson,
    Solving Least Squares Problems, 1974, chapter 23)."""
    scale = np.sqrt(np.diag(gram))
    scale = np.where(scale > 0, scale, 1.0)
    matrix, aim = gram / np.outer(scale, scale), target / scale
    # Features that are multiples of each other have no single answer; this picks one.
    matrix = matrix + 1e-12 * np.eye(len(aim))
    tolerance = 1e-10 * max(1.0, float(np.abs(aim).max(initial=0)))
    found, active = np.zeros(len(aim)), np.zeros(len(aim), bool)
    for _ in range(10 * len(aim)):
        slope = np.where(active, -np.inf, aim - matrix @ found)
        if slope.max(initial=-np.inf) <= tolerance:
            break
        # Of features that are alike the first: the constant comes last.
        active[int((slope >= slope.max() * (1 - 1e-9)).argmax())] = True
        while True:
            inner = np.flatnonzero(active)
            solved = np.zeros(len(aim))
            solved[inner] = np.linalg.solve(matrix[np.ix_(inner, inner)], aim[inner])
            below = inner[solved[inner] <= 0]
            if not len(below):
                break
            # As far towards it as all stay positive; those that reach 0 leave.
            step = float((found[below] / (found[below] - solved[below])).min()) if (found[below] > 0).any() else 0.0
            found = found + step * (solved - found)
            active[below[found[below] <= 1e-15]] = False
            found[~active] = 0.0
        found = solved
    return np.asarray(found / scale)
