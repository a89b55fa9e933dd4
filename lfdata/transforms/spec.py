"""Lists of transforms as plain values: for other processes, state and digests."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Sequence
from typing import Any

import msgspec

from lfdata.errors import OptionError
from lfdata.transforms.audio import AudioWindow, Gain
from lfdata.transforms.base import Transform
from lfdata.transforms.batch import CutMix, MixUp, Mosaic
from lfdata.transforms.geometry import CenterCrop, Crop, RandomCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from lfdata.transforms.pixels import ColorJitter, RandAugment, RandomGrayscale
from lfdata.transforms.tokens import Tokens
from lfdata.transforms.user import Map
from lfdata.transforms.window import Window

_Any = (
    AudioWindow
    | CenterCrop
    | ColorJitter
    | Crop
    | CutMix
    | Gain
    | Map
    | MixUp
    | Mosaic
    | RandAugment
    | RandomCrop
    | RandomGrayscale
    | RandomHorizontalFlip
    | RandomResizedCrop
    | Resize
    | Tokens
    | Window
)


def to_spec(transforms: Sequence[Transform]) -> list[dict[str, Any]]:
    """As JSON values: every option, defaults too, and the class under ``transform``. Equal lists give equal specs."""
    for transform in transforms:
        if not isinstance(transform, Transform):
            raise OptionError(f"{transform!r} is not a transform of lfdata.transforms; Map takes functions")
    found: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(list(transforms)))
    return found


def from_spec(spec: Any) -> list[Transform]:
    """Back from JSON values.

    Raises:
        OptionError: no such transform, an option it does not have, or a value that makes no sense; the message says where.
    """
    try:
        return list(msgspec.convert(spec, list[_Any]))
    except msgspec.ValidationError as error:
        raise OptionError(f"transforms: {error}{_nearest(spec)}") from error


def _nearest(spec: Any) -> str:
    """What may be meant by the first name that is unknown, in words."""
    kinds = {kind.__name__: kind for kind in typing.get_args(_Any)}
    for one in spec if isinstance(spec, list | tuple) else ():
        if not isinstance(one, dict) or not isinstance(name := one.get("transform"), str):
            continue
        if name not in kinds:
            return _meant(name, kinds)
        options = [option.encode_name for option in msgspec.structs.fields(kinds[name])]
        for key in one:
            if key != "transform" and key not in options:
                return _meant(str(key), options)
    return ""


def _meant(name: str, known: typing.Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f". {name!r}: did you mean {near[0]!r}?" if near else f". {name!r}: there are {', '.join(known)}"
