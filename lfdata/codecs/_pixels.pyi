"""What the native module offers; see lfdata/codecs/pixels.py, which is the only caller."""

from collections.abc import Sequence
from typing import Any

def decode(
    payloads: Sequence[Any],
    codecs: Any,
    sizes: Any,
    boxes: Any,
    flips: Any,
    out: Any,
    places: Any,
    shape: tuple[int, int, int],
    refuse_icc: int,
    threads: int,
    status: Any,
) -> None: ...
def report() -> dict[str, str]: ...
def use_simd(wanted: bool) -> bool: ...
