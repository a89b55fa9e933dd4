"""Several frames around a row in place of one value."""

from __future__ import annotations

from typing import ClassVar

from lfdata.order.episodes import EPISODE, FRAME, checked_deltas
from lfdata.transforms.base import WHERE, Transform, put, refuse


class Window(Transform, frozen=True):
    """The values of several frames of the row's episode (docs/windows.md). First among a field's transforms: the others work on every frame,
    with the draws of the row that the window is of. Beside the field comes ``NAME_is_pad``, bool.

    Args:
        deltas: frames before (negative) or after the row.
        episode, frame: the scalar fields that say what belongs together; ``frame=None``: rows are frames, without gaps.
    """

    stage: ClassVar[int] = WHERE

    deltas: tuple[int, ...]
    episode: str = EPISODE
    frame: str | None = FRAME

    def __post_init__(self) -> None:
        put(self, "deltas", checked_deltas(self.deltas, "Window"))
        if not isinstance(self.episode, str) or not self.episode:
            raise refuse(self, "episode", self.episode, "the name of a scalar field")
        if self.frame is not None and (not isinstance(self.frame, str) or not self.frame):
            raise refuse(self, "frame", self.frame, "the name of a scalar field, or None")
