"""Statistics of a whole LeRobot data set out of those of its episodes, as v2.1 keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Stats = dict[str, dict[str, Any]]
_NAMES = ("min", "max", "mean", "std", "count")


def joined(episodes: Iterable[Any]) -> Stats:
    """One set of statistics: ``min``, ``max``, ``mean``, ``std`` (of the population) and ``count``, by feature.

    Mean and variance are those of all values together. Two parts with shares p and q of the values, means m and k and variances v and w
    have the mean p m + q k and the variance p v + q w + p q (m - k)^2.

    Raises:
        ValueError, TypeError: statistics that are not numbers, or of shapes that differ.
    """
    found: dict[str, dict[str, NDArray[np.float64]]] = {}
    for episode in episodes:
        if not isinstance(episode, dict):
            raise TypeError("statistics of an episode are an object")
        for feature, given in episode.items():
            if not isinstance(given, dict) or any(name not in given for name in _NAMES):
                raise ValueError(f"statistics of {feature!r} need {', '.join(_NAMES)}")
            try:
                one = {name: np.array(given[name], np.float64) for name in _NAMES}
            except (TypeError, ValueError):
                raise ValueError(f"statistics of {feature!r} are not numbers") from None
            found[feature] = one if feature not in found else _both(feature, found[feature], one)
    return {
        feature: {name: (values.astype(np.int64) if name == "count" else values).tolist() for name, values in one.items()}
        for feature, one in found.items()
    }


def _both(
    feature: str, one: dict[str, NDArray[np.float64]], other: dict[str, NDArray[np.float64]]
) -> dict[str, NDArray[np.float64]]:
    if any(one[name].shape != other[name].shape for name in _NAMES):
        raise ValueError(f"statistics of {feature!r} have other shapes from one episode to the next")
    count = one["count"] + other["count"]
    share = np.divide(other["count"], count, out=np.zeros_like(count), where=count > 0)
    apart = other["mean"] - one["mean"]
    variance = (1 - share) * one["std"] ** 2 + share * other["std"] ** 2 + share * (1 - share) * apart**2
    return {
        "min": np.minimum(one["min"], other["min"]),
        "max": np.maximum(one["max"], other["max"]),
        "mean": one["mean"] + share * apart,
        "std": np.sqrt(variance),
        "count": count,
    }
