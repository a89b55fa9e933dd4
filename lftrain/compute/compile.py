"""torch.compile of a model's repeated blocks, counted; a block that cannot be compiled turns eager, with an event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
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
            _counting(options.backend, options.dynamic, 1.0)
        except TorchDynamoException as error:
            known = ", ".join(sorted({*torch.compiler.list_backends(), "eager", "aot_eager"}))
            raise ConfigError(f"compile.backend {options.backend!r}; there are {known}") from error
        torch._dynamo.config.recompile_limit = options.limit
        for number, block in enumerate(blocks):
            block.forward = self._guarded(f"{type(block).__name__} {number}", block)

    def report(self) -> dict[str, int]:
        """For the metrics."""
        return {"compilations": self.compilations, "fallbacks": len(self.fallbacks)}

    def _guarded(self, name: str, block: nn.Module) -> Callable[..., Any]:
        eager = block.forward
        compiled: Callable[..., Any] | None = None
        backend: _Counting | None = None

        def forward(*arguments: Any, **more: Any) -> Any:
            nonlocal compiled, backend
            if name in self.fallbacks:
                return eager(*arguments, **more)
            if compiled is None or backend is None:
                # Only now, since what is kept for the backward pass may be set after this was made.
                budget = torch._functorch.config.activation_memory_budget
                backend = _counting(self._options.backend, self._options.dynamic, budget)
                compiled = torch.compile(eager, backend=backend, fullgraph=True, dynamic=self._options.dynamic)
            backend.owner = self
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


class _Counting:
    """A backend of torch.compile that tells its owner of each compilation."""

    def __init__(self, name: str) -> None:
        self._backend: Any = torch._dynamo.lookup_backend(name)
        self.owner: CompiledBlocks | None = None

    def __call__(self, graph: Any, inputs: Any) -> Any:
        if self.owner is not None:
            self.owner.compilations += 1
        return self._backend(graph, inputs)


@cache
def _counting(name: str, dynamic: bool | None, budget: float) -> _Counting:
    """One for all blocks and runs of this process that want the same: for another object code is compiled anew, which soon is too often."""
    del dynamic, budget
    return _Counting(name)
