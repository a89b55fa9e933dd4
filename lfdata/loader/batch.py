"""A slot's arrays as batches of torch tensors or numpy arrays, without copying. Torch is imported for the former only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from lfdata.loader.filler import Part


class Names:
    """Names of a slot's arrays by how they are cut: row by row, by offsets (whose name comes second), and the offsets."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.rows = [part.name for part in parts if not part.by and not part.offsets]
        self.ragged = [(part.name, part.by) for part in parts if part.by]
        self.offsets = [part.name for part in parts if part.offsets]


def maker(output: str) -> Callable[[NDArray[Any]], Any]:
    """What makes an array what the consumer gets: ``"torch"`` or ``"numpy"``."""
    if output == "numpy":
        return lambda array: array
    import torch

    return torch.from_numpy


def cut(
    arrays: Mapping[str, NDArray[Any]], names: Names, first: int, stop: int, make: Callable[[NDArray[Any]], Any]
) -> dict[str, Any]:
    """Rows of a slot as a batch. Each tensor has a storage of its own: whoever saves or sends it does that with its storage."""
    batch = {name: make(arrays[name][first:stop]) for name in names.rows}
    for name, by in names.ragged:
        batch[name] = make(arrays[name][arrays[by][first] : arrays[by][stop]])
    for name in names.offsets:
        found = arrays[name][first : stop + 1]
        batch[name] = make(found - found[0] if first else found)
    return batch
