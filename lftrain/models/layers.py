"""Parts that the models share: attention, feed-forward, experts, positions."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from lftrain.errors import ConfigError

Waves = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Multi-head attention; queries, keys and values of self-attention from one matrix.

    Args:
        width: of the queries. heads: a divisor of it. context: width of what keys and values come from; ``None`` is self-attention.
        rotary: positions by rotation, for self-attention.
    """

    def __init__(self, width: int, heads: int, context: int | None = None, rotary: bool = False) -> None:
        super().__init__()
        if width % heads or (rotary and width // heads % 2):
            raise ConfigError(f"a width of {width} cannot be cut into {heads} heads{' of even width' if rotary else ''}")
        self.heads, self.cross, self.rotary = heads, context is not None, rotary
        self.qkv = nn.Linear(width, width if self.cross else 3 * width, bias=False)
        self.kv = nn.Linear(context, 2 * width, bias=False) if context is not None else None
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        causal: bool = False,
        waves: Waves | None = None,
    ) -> torch.Tensor:
        """``x`` (B, N, width), ``context`` (B, M, its width), ``mask`` bool, spread to (B, heads, N, M): true where a query may look.
        ``waves``: of :func:`rotary`, if positions are rotations; 0, 1, ... without them."""
        if self.kv is not None and context is not None:
            q = self._split(self.qkv(x))
            k, v = (self._split(part) for part in self.kv(context).chunk(2, -1))
        else:
            q, k, v = (self._split(part) for part in self.qkv(x).chunk(3, -1))
        if self.rotary:
            waves = rotary(x.shape[1], x.shape[2] // self.heads, x.device) if waves is None else waves
            q, k = rotated(q, waves), rotated(k, waves)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.out(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)


def rotary(length: int, size: int, device: torch.device, position: torch.Tensor | None = None) -> Waves:
    """Cosines and sines of rotary positions, float32 (B or 1, 1, N, size / 2), for heads of ``size``. Made once a forward pass: within
    each layer they would cost more than its attention. ``position`` (B, N): 0, 1, ... to ``length`` if ``None``."""
    half = size // 2
    rates = 10_000.0 ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    if position is None:
        position = torch.arange(length, device=device)[None]
    angles = position[:, None, :, None].float() * rates
    return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, waves: Waves) -> torch.Tensor:
    """``x`` (B, heads, N, even), rotated by its positions."""
    cos, sin = (wave.to(x.dtype) for wave in waves)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class RMSNorm(nn.RMSNorm):
    """In the wider of its input's and its weight's type: torch has no kernel for two types, and takes them apart into many."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As wide as before."""
        kind = torch.promote_types(x.dtype, self.weight.dtype)
        return F.rms_norm(x.to(kind), self.normalized_shape, self.weight.to(kind), self.eps)


class LayerNorm(nn.LayerNorm):
    """In the wider of its input's and its weight's type, likewise: on a CPU torch refuses a wider input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As wide as before."""
        if self.weight is None:
            return super().forward(x)
        kind = torch.promote_types(x.dtype, self.weight.dtype)
        return F.layer_norm(x.to(kind), self.normalized_shape, self.weight.to(kind), self.bias.to(kind), self.eps)


class SwiGLU(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As wide as before."""
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A mixture of SwiGLU experts, ``top`` of them for a token.

    Every expert runs, on no rows if no token chose it: its gradients are zeros then, on every rank, and never ``None``.

    Attributes:
        balance: of the last forward pass: 1 if all experts are used alike, up to the number of experts. A loss adds it, times something small.
    """

    def __init__(self, width: int, hidden: int, experts: int, top: int) -> None:
        super().__init__()
        if not 1 <= top <= experts:
            raise ConfigError(f"{top} of {experts} experts for a token")
        self.top = top
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(width, hidden) for _ in range(experts))
        self.balance: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, width) -> the same."""
        rows = x.reshape(-1, x.shape[-1])
        chances = self.router(rows).float().softmax(-1)
        weights, chosen = chances.topk(self.top, -1)
        if self.top > 1:
            # The chance of a single one stays what it is: divided by itself it would teach the router nothing.
            weights = weights / weights.sum(-1, keepdim=True)
        found = torch.zeros_like(rows)
        used = []
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            part = expert(rows[token]) * weights[token, place, None].to(rows.dtype)
            found = found.index_add(0, token, part.to(found.dtype))
            used.append(token.numel())
        share = torch.tensor(used, device=x.device, dtype=torch.float32) / max(1, chosen.numel())
        self.balance = len(self.experts) * (share * chances.mean(0)).sum()
        return found.view_as(x)


class Block(nn.Module):
    """A causal decoder layer: attention and a feed-forward layer, or experts, each after RMSNorm."""

    def __init__(self, width: int, heads: int, hidden: int, experts: int = 0, top: int = 1) -> None:
        super().__init__()
        self.before, self.after = RMSNorm(width, eps=1e-6), RMSNorm(width, eps=1e-6)
        self.attention = Attention(width, heads, rotary=True)
        self.feed: nn.Module = Experts(width, hidden, experts, top) if experts else SwiGLU(width, hidden)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, waves: Waves | None = None) -> torch.Tensor:
        """(B, N, width) -> the same. ``mask`` replaces the causal one; ``waves``: of :func:`rotary`."""
        x = x + self.attention(self.before(x), mask=mask, causal=mask is None, waves=waves)
        return x + self.feed(self.after(x))  # type: ignore[no-any-return]


def balance(model: nn.Module) -> torch.Tensor | None:
    """Mean of what all experts say of their last forward pass; ``None`` without experts."""
    found = [module.balance for module in model.modules() if isinstance(module, Experts) and module.balance is not None]
    return torch.stack(found).mean() if found else None


def counted(batch: dict[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Which rows count, as 0 and 1 like ``rows`` (B,)."""
    mask = batch.get("__mask__")
    return torch.ones_like(rows) if mask is None else mask.to(rows.dtype)


def taken(batch: dict[str, torch.Tensor], name: str, shape: tuple[int | None, ...]) -> torch.Tensor:
    """A field of a batch: (rows, *shape), ``None`` for any size. Raises :class:`ConfigError` for what is not there or has another shape."""
    if name not in batch:
        there = ", ".join(one for one in batch if not one.startswith("__"))
        raise ConfigError(f"the model needs a field {name!r} and gets {there}: name it in model.options, read it (data.fields)")
    got = tuple(batch[name].shape)
    if len(got) != len(shape) + 1 or any(size not in (None, one) for size, one in zip(shape, got[1:], strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ConfigError(
            f"field {name!r} comes as {got} and the model takes (rows, {wanted}): see data.fields and model.options"
        )
    return batch[name]
