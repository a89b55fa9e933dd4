"""What the native module offers; see lfdata/codecs/pixels.py, which is the only caller."""

from collections.abc import Sequence
from typing import Any

def decode(
    payloads: Sequence[Any] | tuple[Any, Any, Any],
    codecs: Any,
    sizes: Any,
    boxes: Any,
    flips: Any,
    out: Any,
    places: Any,
    shape: tuple[int, int, int],
    refuse_icc: int,
    threads: int,
    turn: int,
    status: Any,
) -> float: ...
def watch_width(buffer: Any) -> None: ...
def report() -> dict[str, str]: ...
def use_simd(wanted: bool) -> bool: ...
