"""Functions for Map, in a module that imports little: decoder processes import it too."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np


def double(value: Any) -> np.ndarray:
    """For Map: the sum of an array, twice."""
    return np.array([2 * float(np.asarray(value).sum())], np.float64)


def noisy(value: Any, generator: np.random.Generator) -> np.ndarray:
    """For Map, random: a value and a draw."""
    return np.array([float(value), generator.random()], np.float64)


def refuses_sevens(value: Any) -> np.ndarray:
    """For Map: fails for every seventh."""
    if int(value) % 7 == 3:
        raise ValueError("a seventh")
    return np.array([int(value)], np.int64)


def crashes_on_five(value: Any) -> np.ndarray:
    """For Map: what a broken codec does to its process."""
    if int(value) == 5:
        ctypes.string_at(0)
    return np.array([int(value)], np.int64)


def always_crashes(value: Any) -> np.ndarray:
    """For Map: no sample survives."""
    os.abort()
    return np.array([int(value)], np.int64)
