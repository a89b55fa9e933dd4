"""Batches on the GPU: copied ahead from the loader's slots, made into what a model takes (docs/scheduler.md, "Device path").

Over ``lfdata.loader``, of which it uses the face and ``lfdata.loader.taker``. Imports torch; Triton where it is installed.
"""

from lfdata.device.images import Images
from lfdata.device.loader import DeviceLoader
from lfdata.device.register import RegistrationWarning

__all__ = ["DeviceLoader", "Images", "RegistrationWarning"]
