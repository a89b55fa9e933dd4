"""A slot's arrays as batches of torch tensors, without copying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from lfdata.loader.filler import Part


def tensors(arrays: Mapping[str, NDArray[Any]], parts: Sequence[Part], first: int, stop: int) -> dict[str, torch.Tensor]:
    """Rows of a slot as a batch. Each tensor has a storage of its own: whoever saves or sends it does that with its storage."""
    batch, from_numpy = {}, torch.from_numpy
    for part in parts:
        name, by = part.name, part.by
        array = arrays[name]
        if part.offsets:
            found = array[first : stop + 1]
            batch[name] = from_numpy(found - found[0] if first else found)
        elif by:
            batch[name] = from_numpy(array[arrays[by][first] : arrays[by][stop]])
        else:
            batch[name] = from_numpy(array[first:stop])
    return batch
