"""torch.compile of a model's repeated blocks, counted; a block that cannot be compiled turns eager, with an event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from lftrain.errors import ConfigError
from lftrain.options import CompileOptions

Event = Callable[..., None]


class CompiledBlocks:
    """Compiles blocks in place: the module and its parameters stay what they are, only ``forward`` is replaced.

    Attributes:
        compilations: of all blocks; blocks of one class and one size share theirs. fallbacks: blocks that are eager now, with the reason.
    """

    def __init__(self, blocks: Sequence[nn.Module], options: CompileOptions, event: Event) -> None:
        if not blocks:
            raise ConfigError("compile.blocks needs a model with blocks() -> list of modules; this one has none")
        self._options, self._event = options, event
        self.compilations = 0
        self.fallbacks: dict[str, str] = {}
        try:
            self._backend: Any = torch._dynamo.lookup_backend(options.backend)
        except TorchDynamoException as error:
            known = ", ".join(torch.compiler.list_backends())
            raise ConfigError(f"compile.backend {options.backend!r}; there are {known}") from error
        torch._dynamo.config.recompile_limit = options.limit

        def counting(graph: Any, inputs: Any) -> Any:
            self.compilations += 1
            return self._backend(graph, inputs)

        # One for all: code that was compiled for another backend object is compiled anew.
        self._counting = counting
        for number, block in enumerate(blocks):
            block.forward = self._guarded(f"{type(block).__name__} {number}", block)

    def report(self) -> dict[str, int]:
        """For the metrics."""
        return {"compilations": self.compilations, "fallbacks": len(self.fallbacks)}

    def _guarded(self, name: str, block: nn.Module) -> Callable[..., Any]:
        eager = block.forward
        compiled = torch.compile(eager, backend=self._counting, fullgraph=True, dynamic=self._options.dynamic)

        def forward(*arguments: Any, **more: Any) -> Any:
            if name in self.fallbacks:
                return eager(*arguments, **more)
            try:
                return compiled(*arguments, **more)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                self._fall_back(name, error)
                return eager(*arguments, **more)

        return forward

    def _fall_back(self, name: str, error: Exception) -> None:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        self.fallbacks[name] = reason
        hint = ""
        if isinstance(error, FailOnRecompileLimitHit):
            hint = f". It was compiled {self._options.limit} times: bucket the lengths, or set compile.dynamic or a larger compile.limit"
        self._event("eager block", f"block {name} is not compiled and runs eagerly: {reason}{hint}", block=name)
