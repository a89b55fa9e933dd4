"""lftrain: trains models from the shards of ``lfdata``. Imports ``lfdata``, never the other way round.

``lftrain run CONFIG``, or from Python::

    options = lftrain.Options(run=lftrain.RunOptions(folder="run", steps=100))
    lftrain.Runtime(model, loss, loader, optimizer, options).run()
"""

import importlib
from typing import TYPE_CHECKING, Any

from lftrain import errors
from lftrain.options import (
    ActivationOptions,
    CheckpointOptions,
    CompileOptions,
    Config,
    DdpOptions,
    GraphOptions,
    MetricsOptions,
    Options,
    PrecisionOptions,
    RunOptions,
)

if TYPE_CHECKING:
    from lftrain.compute.adamw import AdamW
    from lftrain.runtime.loop import Result, Runtime

__all__ = [
    "ActivationOptions",
    "AdamW",
    "CheckpointOptions",
    "CompileOptions",
    "Config",
    "DdpOptions",
    "GraphOptions",
    "MetricsOptions",
    "Options",
    "PrecisionOptions",
    "Result",
    "RunOptions",
    "Runtime",
    "errors",
]


def __getattr__(name: str) -> Any:
    # Imported when asked for: torch takes seconds, and reading a configuration needs none of it.
    modules = {"AdamW": "lftrain.compute.adamw", "Result": "lftrain.runtime.loop", "Runtime": "lftrain.runtime.loop"}
    if name not in modules:
        raise AttributeError(f"module 'lftrain' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(modules[name]), name)
    return found
