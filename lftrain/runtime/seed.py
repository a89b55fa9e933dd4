"""One seed for everything, and the states of all generators as plain values."""

from __future__ import annotations

import base64
import hashlib
import os
import random
from typing import Any

import numpy as np
import torch

from lftrain.errors import DamagedCheckpointError


def derive(seed: int, *words: int | str) -> int:
    """A seed for one purpose, 63 bits: a function of the run's seed and of words that name the purpose."""
    text = "/".join(str(word) for word in (seed, *words))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def seed_all(seed: int) -> None:
    """Seed torch (all devices), numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def be_deterministic() -> None:
    """Only algorithms that give the same bits each time, from here on; cuBLAS must not have been used before."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def random_state(device: torch.device) -> dict[str, Any]:
    """States of all generators of this rank: JSON-able."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }
    if device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(device))
    return state


def set_random_state(state: dict[str, Any], device: torch.device, where: str) -> None:
    """Go on from :func:`random_state`. ``where``: the file it is from, for errors."""
    try:
        torch.set_rng_state(_tensor(state["torch"]))
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.asarray(keys, np.uint32), position, has_gauss, cached))
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(_tensor(state["cuda"]), device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedCheckpointError(where, None, f"not a state of random generators: {error}") from error


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
