"""Reference models and their losses. May import options and errors; knows nothing of the runtime.

A model is found by its kind: :func:`make`.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from torch import nn

from lftrain.config import convert, describe, table
from lftrain.errors import ConfigError
from lftrain.models import lm, vla
from lftrain.options import ModelOptions

__all__ = ["check", "make", "reference"]

_KINDS: dict[str, Any] = {"vla": vla, "lm": lm}


def make(options: ModelOptions) -> tuple[nn.Module, Any]:
    """Model and loss.

    Raises:
        ConfigError: no such kind, size or option, or a function of yours that cannot be imported or gives something else.
    """
    if ":" in options.kind:
        return _from_function(options)
    module, chosen = check(options)
    return module.make(chosen)  # type: ignore[no-any-return]


def check(options: ModelOptions) -> tuple[Any, Any]:
    """The module of a kind, and its options (none of your own functions', which are asked when they are called).

    Raises:
        ConfigError: no such kind, size or option.
    """
    if ":" in options.kind:
        return None, None
    if options.kind not in _KINDS:
        near = difflib.get_close_matches(options.kind, _KINDS, 1, 0.5)
        hint = f": {near[0]}?" if near else ""
        raise ConfigError(f"model.kind {options.kind!r}; there are {', '.join(_KINDS)}, and module:function for yours{hint}")
    module = _KINDS[options.kind]
    if options.size not in module.SIZES:
        near = difflib.get_close_matches(options.size, module.SIZES, 1)
        raise ConfigError(
            f"model.size {options.size!r}; there are {', '.join(module.SIZES)}" + (f": {near[0]}?" if near else "")
        )
    return module, convert({**module.SIZES[options.size], **options.options}, module.Options, "model.options")


def reference() -> str:
    """All options of a configuration as Markdown: docs/config.md is this text."""
    lines = [
        "# Options of a configuration",
        "",
        "Of `lftrain run CONFIG`, a TOML or YAML file with a table for each section. `lftrain options` prints this page; paths are relative",
        "to the file's folder. What the runtime does with them: [runtime.md](runtime.md).",
        "",
        describe(),
    ]
    for name, module in _KINDS.items():
        lines.append(table(f'`[model.options]` of `kind = "{name}"`', module.Options))
        lines += [f'- `size = "{size}"`: {_values(values)}' for size, values in module.SIZES.items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _values(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "the defaults"


def _from_function(options: ModelOptions) -> tuple[nn.Module, Any]:
    name, _, attribute = options.kind.partition(":")
    try:
        function = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model.kind {options.kind!r} cannot be imported: {error}") from error
    try:
        found = function(**options.options)
    except TypeError as error:
        raise ConfigError(f"model.kind {options.kind!r} does not take model.options: {error}") from error
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module) and callable(found[1])):
        raise ConfigError(f"model.kind {options.kind!r} gave {type(found).__name__}; it must return (torch.nn.Module, loss)")
    return found
