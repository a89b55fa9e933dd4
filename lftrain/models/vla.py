"""A vision-language-action model in the shape of GR00T N1.6: a ViT, a language model over its patches and the instruction, and a diffusion
transformer that turns noise into a chunk of actions by flow matching.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from torch import nn
from torch.nn import functional as F

from lftrain.errors import ConfigError
from lftrain.models.layers import Attention, Block, LayerNorm, RMSNorm, SwiGLU, balance, counted, rotary, taken

# Flow times are drawn as S * (1 - Beta(A, 1)): more of them where there is most noise (pi-0, arXiv 2410.24164, and GR00T N1, arXiv 2503.14734).
S, A = 0.999, 1.5


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Of the vision-language-action model. Fields of the data: ``cameras``, ``text``, ``state``, ``action``."""

    cameras: Annotated[list[str], Meta(description="fields of pictures, uint8 (height, width, 3)", min_length=1)] = (
        msgspec.field(default_factory=lambda: ["image"])
    )
    text: Annotated[str, Meta(description="field of the instruction's ids, of one length")] = "tokens"
    state: Annotated[str, Meta(description="field of the robot's state (state_size,)")] = "state"
    action: Annotated[str, Meta(description="field of the actions (horizon, action_size)")] = "action"
    image_size: Annotated[int, Meta(description="side of a picture", ge=1)] = 32
    patch: Annotated[int, Meta(description="side of a patch", ge=1)] = 8
    vision_width: Annotated[int, Meta(description="width of the ViT", ge=1)] = 64
    vision_layers: Annotated[int, Meta(description="layers of the ViT", ge=1)] = 2
    vision_heads: Annotated[int, Meta(description="heads of the ViT", ge=1)] = 4
    vocab: Annotated[int, Meta(description="number of different ids", ge=1)] = 256
    pad: Annotated[int, Meta(description="id that fills up an instruction", ge=0)] = 0
    language_width: Annotated[int, Meta(description="width of the language model", ge=1)] = 64
    language_layers: Annotated[int, Meta(description="layers of the language model", ge=1)] = 2
    language_heads: Annotated[int, Meta(description="heads of the language model", ge=1)] = 4
    experts: Annotated[int, Meta(description="experts of each of the language model's feed-forward layers; 0: none", ge=0)] = 0
    top: Annotated[int, Meta(description="experts of a token", ge=1)] = 1
    balance: Annotated[float, Meta(description="weight of the experts' balance in the loss", ge=0)] = 0.01
    state_size: Annotated[int, Meta(description="numbers of a state", ge=1)] = 2
    action_size: Annotated[int, Meta(description="numbers of an action", ge=1)] = 2
    horizon: Annotated[int, Meta(description="actions of a chunk", ge=1)] = 8
    action_width: Annotated[int, Meta(description="width of the diffusion transformer", ge=2, multiple_of=2)] = 64
    action_layers: Annotated[int, Meta(description="its layers: every second one looks at picture and instruction", ge=1)] = 4
    action_heads: Annotated[int, Meta(description="its heads", ge=1)] = 4
    freeze: Annotated[list[Literal["vision", "language"]], Meta(description="parts that are not trained")] = msgspec.field(
        default_factory=list
    )


SIZES: dict[str, dict[str, Any]] = {
    "small": {},
    "large": {
        "image_size": 224,
        "patch": 14,
        "vision_width": 1024,
        "vision_layers": 24,
        "vision_heads": 16,
        "vocab": 151_936,
        "language_width": 2048,
        "language_layers": 16,
        "language_heads": 16,
        "state_size": 64,
        "action_size": 32,
        "horizon": 16,
        "action_width": 1024,
        "action_layers": 32,
        "action_heads": 16,
        "freeze": ["vision", "language"],
    },
}


class VisionBlock(nn.Module):
    """A layer of the ViT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.after = LayerNorm(width), LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, patches, width) -> the same."""
        x = x + self.attention(self.before(x))
        return x + self.feed(self.after(x))  # type: ignore[no-any-return]


class Vision(nn.Module):
    """A ViT: pictures uint8 (B, size, size, 3) -> (B, patches, width)."""

    def __init__(self, size: int, patch: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        if size % patch:
            raise ConfigError(f"pictures of {size} cannot be cut into patches of {patch}")
        self.size, self.patch = size, patch
        self.embed = nn.Linear(3 * patch * patch, width)
        self.position = nn.Parameter(torch.randn((size // patch) ** 2, width) * 0.02)
        self.layers = nn.ModuleList(VisionBlock(width, heads) for _ in range(layers))
        self.norm = LayerNorm(width)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if tuple(pictures.shape[1:]) != (self.size, self.size, 3):
            raise ConfigError(
                f"pictures come as {tuple(pictures.shape)}; the model takes (rows, {self.size}, {self.size}, 3): bring them to one size in "
                f'data.fields, as {{ transform = "Resize", size = [{self.size}, {self.size}] }}'
            )
        side, patch = self.size // self.patch, self.patch
        x = pictures.float() / 127.5 - 1.0
        x = x.view(-1, side, patch, side, patch, 3).permute(0, 1, 3, 2, 4, 5).reshape(len(pictures), side * side, -1)
        x = self.embed(x) + self.position
        for block in self.layers:
            x = block(x)
        return self.norm(x)  # type: ignore[no-any-return]


class ActionBlock(nn.Module):
    """A layer of the diffusion transformer: attention among the actions, or at the context, shifted and scaled by the flow time."""

    def __init__(self, width: int, heads: int, context: int | None) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 2 * width)
        self.before = LayerNorm(width, elementwise_affine=False)
        self.after = LayerNorm(width)
        self.attention = Attention(width, heads, context)
        self.feed = SwiGLU(width, 4 * width)

    def forward(self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """``x`` (B, 1 + horizon, width), ``context`` (B, M, ...), ``mask`` (B, 1, 1, M), ``time`` (B, width)."""
        shift, scale = self.modulation(F.silu(time))[:, None].chunk(2, -1)
        y = self.before(x) * (1 + scale) + shift
        x = x + (self.attention(y, context, mask) if self.attention.cross else self.attention(y))
        return x + self.feed(self.after(x))  # type: ignore[no-any-return]


class ActionHead(nn.Module):
    """From context, state, noisy actions and flow time to the velocity of the actions."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width = options.action_width
        self.width = width
        self.state = nn.Sequential(nn.Linear(options.state_size, width), nn.SiLU(), nn.Linear(width, width))
        self.action_in = nn.Linear(options.action_size, width)
        self.action_time = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.position = nn.Parameter(torch.randn(1 + options.horizon, width) * 0.02)
        self.layers = nn.ModuleList(
            ActionBlock(width, options.action_heads, None if number % 2 else options.language_width)
            for number in range(options.action_layers)
        )
        self.norm = LayerNorm(width)
        self.out = nn.Linear(width, options.action_size)

    def forward(
        self, context: torch.Tensor, mask: torch.Tensor, state: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        """``noisy`` (B, horizon, action_size) and ``time`` (B,) from 0 (noise) to 1 (actions) -> velocity like ``noisy``."""
        waves = sinusoid(time, self.width)
        actions = self.action_in(noisy)
        actions = self.action_time(torch.cat([actions, waves[:, None].expand_as(actions).to(actions.dtype)], -1))
        x = torch.cat([self.state(state)[:, None], actions], 1) + self.position
        moment = self.time(waves)
        for block in self.layers:
            x = block(x, context, mask, moment)
        return self.out(self.norm(x[:, 1:]))  # type: ignore[no-any-return]


class VisionLanguageAction(nn.Module):
    """The whole model."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        width = options.language_width
        self.vision = Vision(
            options.image_size, options.patch, options.vision_width, options.vision_layers, options.vision_heads
        )
        self.project = nn.Sequential(
            LayerNorm(options.vision_width), nn.Linear(options.vision_width, width), nn.GELU(), nn.Linear(width, width)
        )
        self.embedding = nn.Embedding(options.vocab, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.language = nn.ModuleList(
            Block(width, options.language_heads, 3 * width, options.experts, options.top)
            for _ in range(options.language_layers)
        )
        self.norm = RMSNorm(width, eps=1e-6)
        self.head = ActionHead(options)
        parts: dict[str, list[nn.Module]] = {
            "vision": [self.vision],
            "language": [self.project, self.embedding, self.language, self.norm],
        }
        for name in options.freeze:
            for module in parts[name]:
                module.requires_grad_(False)

    def blocks(self) -> list[nn.Module]:
        """What is compiled and checkpointed: those that are trained first cost and gain most."""
        return [*self.vision.layers, *self.language, *self.head.layers]

    def context(self, pictures: list[torch.Tensor], ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the head looks at: (B, M, language_width), and which of it is no padding: bool (B, 1, 1, M)."""
        seen = torch.cat([self.project(self.vision(one)) for one in pictures], 1)
        x = torch.cat([seen, self.embedding(ids).to(seen.dtype)], 1)
        waves = rotary(x.shape[1], self.options.language_width // self.options.language_heads, x.device)
        for block in self.language:
            x = block(x, None, waves)
        there = torch.ones(seen.shape[:2], dtype=torch.bool, device=ids.device)
        return self.norm(x), torch.cat([there, ids != self.options.pad], 1)[:, None, None]

    def forward(
        self, pictures: list[torch.Tensor], ids: torch.Tensor, state: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        """Velocity of ``noisy`` (B, horizon, action_size) at ``time`` (B,)."""
        context, mask = self.context(pictures, ids)
        return self.head(context, mask, state, noisy, time)  # type: ignore[no-any-return]

    @torch.no_grad()
    def act(self, pictures: list[torch.Tensor], ids: torch.Tensor, state: torch.Tensor, steps: int = 4) -> torch.Tensor:
        """Actions (B, horizon, action_size) from noise, in ``steps`` Euler steps."""
        context, mask = self.context(pictures, ids)
        actions = torch.randn(len(ids), self.options.horizon, self.options.action_size, device=ids.device)
        for number in range(steps):
            time = torch.full((len(ids),), number / steps, device=ids.device)
            actions = actions + self.head(context, mask, state, actions, time).float() / steps
        return actions


class Loss:
    """Flow matching: mean squared error of the velocity, by rows that count."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def __call__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean over the rows of this micro-batch, and how many."""
        options = self.options
        actions = taken(batch, options.action, (options.horizon, options.action_size)).float()
        state = taken(batch, options.state, (options.state_size,)).float()
        ids = taken(batch, options.text, (None,)).long()
        pictures = [taken(batch, name, (None, None, 3)) for name in options.cameras]
        time = S * (1 - torch.rand(len(actions), device=actions.device) ** (1 / A))
        noise = torch.randn_like(actions)
        noisy = torch.lerp(noise, actions, time[:, None, None])
        velocity = model(pictures, ids, state, noisy, time)
        rows = (velocity.float() - (actions - noise)).square().flatten(1).mean(1)
        keep = counted(batch, rows)
        mean = torch.where(keep > 0, rows, 0.0).sum() / keep.sum().clamp(min=1)
        extra = balance(model) if options.experts else None
        return (mean if extra is None else mean + options.balance * extra), keep.sum()


def sinusoid(time: torch.Tensor, width: int) -> torch.Tensor:
    """Waves of flow times (B,) -> float32 (B, width)."""
    rates = torch.exp(-math.log(10_000.0) * torch.arange(width // 2, device=time.device) / (width // 2))
    angles = 1000.0 * time.float()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


def make(options: Options) -> tuple[VisionLanguageAction, Loss]:
    """Model and loss."""
    return VisionLanguageAction(options), Loss(options)
