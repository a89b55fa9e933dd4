"""PIL at its first use: a decoder process that decodes natively never needs it, and would take a tenth of its start to import it."""

from __future__ import annotations

from functools import cache
from typing import Any

from lfdata.format.forking import importing


@cache
def pil() -> Any:
    """The package, with ``Image``, ``ImageEnhance`` and ``ImageOps``."""
    with importing:
        import PIL.Image
        import PIL.ImageEnhance
        import PIL.ImageOps

    return PIL
