"""What happens to values between decoder and batch: declared, JSON-able, and random only by the numbers that are handed in.

``from lfdata import transforms as T``; a field's list is, in this order, geometry or a window, then pixels or gain, then
:class:`Map`, then :class:`MixUp`, :class:`CutMix` or :class:`Mosaic`. :func:`declared` says what comes out.
"""

from lfdata.transforms.audio import AudioWindow, Gain
from lfdata.transforms.base import Declared, Transform, Uniform, declared, operation
from lfdata.transforms.batch import BatchTransform, CutMix, MixUp, Mosaic, partners
from lfdata.transforms.geometry import (
    CenterCrop,
    Crop,
    Geometry,
    Placed,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    output_size,
    place,
)
from lfdata.transforms.pixels import ColorJitter, PixelTransform, RandAugment, RandomGrayscale
from lfdata.transforms.spec import from_spec, to_spec
from lfdata.transforms.tokens import Tokens
from lfdata.transforms.user import Map
from lfdata.transforms.window import Window

# Classes by what they are, for isinstance.
GEOMETRY = (Geometry,)
PIXELS = (PixelTransform,)
BATCH = (BatchTransform,)

__all__ = [
    "BATCH",
    "GEOMETRY",
    "PIXELS",
    "AudioWindow",
    "BatchTransform",
    "CenterCrop",
    "ColorJitter",
    "Crop",
    "CutMix",
    "Declared",
    "Gain",
    "Geometry",
    "Map",
    "MixUp",
    "Mosaic",
    "PixelTransform",
    "Placed",
    "RandAugment",
    "RandomCrop",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Resize",
    "Tokens",
    "Transform",
    "Uniform",
    "Window",
    "declared",
    "from_spec",
    "operation",
    "output_size",
    "partners",
    "place",
    "to_spec",
]
