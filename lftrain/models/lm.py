"""A plain causal language model for token shards: sequences of one length, or packed rows."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import nn
from torch.nn import functional as F

from lftrain.models.layers import Block, RMSNorm, balance, counted, rotary, taken


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Of the language model."""

    vocab: Annotated[int, Meta(description="number of different ids", ge=1)]
    field: Annotated[str, Meta(description="field of the ids")] = "tokens"
    pad: Annotated[
        int, Meta(description="id that is no token; -1: none. Packed rows say themselves what is padding", ge=-1)
    ] = -1
    width: Annotated[int, Meta(description="width", ge=1)] = 64
    layers: Annotated[int, Meta(description="layers", ge=1)] = 2
    heads: Annotated[int, Meta(description="heads", ge=1)] = 4
    hidden: Annotated[int, Meta(description="width of the feed-forward layer", ge=1)] = 192
    experts: Annotated[int, Meta(description="experts of each feed-forward layer; 0: none", ge=0)] = 0
    top: Annotated[int, Meta(description="experts of a token", ge=1)] = 1
    balance: Annotated[float, Meta(description="weight of the experts' balance in the loss", ge=0)] = 0.01


SIZES: dict[str, dict[str, Any]] = {
    "small": {},
    "large": {"width": 2048, "layers": 24, "heads": 16, "hidden": 5632},
}


class LanguageModel(nn.Module):
    """Embedding, blocks, and the next token's logits from the same matrix."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.embedding = nn.Embedding(options.vocab, options.width)
        nn.init.normal_(self.embedding.weight, std=options.width**-0.5)
        self.layers = nn.ModuleList(
            Block(options.width, options.heads, options.hidden, options.experts, options.top) for _ in range(options.layers)
        )
        self.norm = RMSNorm(options.width, eps=1e-6)

    def blocks(self) -> list[nn.Module]:
        """What is compiled and checkpointed."""
        return list(self.layers)

    def forward(
        self, ids: torch.Tensor, position: torch.Tensor | None = None, segment: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits (B, N, vocab) for ids (B, N). ``position``, ``segment`` (B, N): of packed rows, where a token sees its own segment only."""
        mask = None
        if segment is not None:
            causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
            mask = ((segment[:, :, None] == segment[:, None]) & causal)[:, None]
        x = self.embedding(ids)
        waves = rotary(ids.shape[1], self.options.width // self.options.heads, ids.device, position)
        for block in self.layers:
            x = block(x, mask, waves)
        return F.linear(self.norm(x), self.embedding.weight)


class Loss:
    """Next-token cross-entropy, by tokens that have a next one."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def __call__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean over the tokens of this micro-batch, and how many."""
        name = self.options.field
        ids = taken(batch, name, (None,)).long()
        segment, position = batch.get(f"{name}.segment"), batch.get(f"{name}.position")
        logits = model(ids, position, segment)
        target = ids[:, 1:]
        keep = counted(batch, torch.ones(len(ids), device=ids.device))[:, None].expand_as(target) > 0
        if segment is not None:
            keep = keep & (segment[:, 1:] == segment[:, :-1]) & (segment[:, 1:] > 0)
        elif self.options.pad >= 0:
            keep = keep & (target != self.options.pad)
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target.flatten(), reduction="none").view_as(target)
        count = keep.sum()
        mean = torch.where(keep, losses, 0.0).sum() / count.clamp(min=1)
        extra = balance(model) if self.options.experts else None
        return (mean if extra is None else mean + self.options.balance * extra), count


def make(options: Options) -> tuple[LanguageModel, Loss]:
    """Model and loss."""
    return LanguageModel(options), Loss(options)
