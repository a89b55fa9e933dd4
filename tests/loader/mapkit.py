"""Functions for Map, in a module that imports little: decoder processes import it too."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
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


def exits_on_five(value: Any) -> np.ndarray:
    """For Map: ends the program, or would."""
    if int(value) == 5:
        sys.exit(3)
    return np.array([int(value)], np.int64)


def interrupts_on_five(value: Any) -> np.ndarray:
    """For Map: raises what Ctrl-C raises."""
    if int(value) == 5:
        raise KeyboardInterrupt("not from the keyboard")
    return np.array([int(value)], np.int64)


def exits_on_pictures(pixels: np.ndarray) -> np.ndarray:
    """For Map: takes no picture."""
    sys.exit(str(pixels.shape))


def is_interrupted_on_five(value: Any) -> np.ndarray:
    """For Map: Ctrl-C comes meanwhile."""
    if int(value) == 5:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
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


def crashes_on_tens(value: Any) -> np.ndarray:
    """For Map: every tenth ends its process."""
    if int(value) % 10 == 0:
        ctypes.string_at(0)
    return np.array([int(value)], np.int64)


def crashes_on_most(value: Any) -> np.ndarray:
    """For Map: three of the first eight end their process, and stand in for each other."""
    if int(value) in (5, 6, 7):
        ctypes.string_at(0)
    return np.array([int(value)], np.int64)


def crashes_on_one_picture(pixels: np.ndarray) -> np.ndarray:
    """For Map: one picture, known by its sum, ends the process."""
    if int(pixels.sum(dtype=np.int64)) == int(os.environ.get("CRASHING_PICTURE", "-1")):
        ctypes.string_at(0)
    return pixels


def forks_on_five(value: Any) -> np.ndarray:
    """For Map: a process that outlives the decoder's and keeps its descriptors."""
    if int(value) == 5 and not os.fork():
        time.sleep(20)
        os._exit(0)
    return np.array([int(value)], np.int64)


def slow(value: Any) -> np.ndarray:
    """For Map: takes its time."""
    time.sleep(0.15)
    return np.array([int(value)], np.int64)


def forks_and_is_slow(value: Any) -> np.ndarray:
    """For Map: the same, and a process keeps the decoder's descriptors meanwhile."""
    if int(value) == 0 and not os.fork():
        time.sleep(10)
        os._exit(0)
    return slow(value)


def one_more_on_five(value: Any) -> np.ndarray:
    """For Map: not the shape that was declared."""
    return np.array([int(value)] * (2 if int(value) == 5 else 1), np.int64)


def narrower_on_five(value: Any) -> np.ndarray:
    """For Map: not the dtype."""
    return np.array([int(value)], np.int32 if int(value) == 5 else np.int64)


def cut(pixels: np.ndarray) -> np.ndarray:
    """For Map: a row of pixels less."""
    return pixels[1:]


class NoText(Exception):
    """Fails once more when it is told."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


ODD = {"surrogate": ValueError("bad \udcff name"), "none": NoText(), "long": ValueError("z" * 1_000_000)}


def raises_odd(value: Any) -> np.ndarray:
    """For Map: an exception whose text is a trial, at five."""
    if int(value) == 5:
        raise ODD[os.environ["ODD"]]
    return np.array([int(value)], np.int64)
