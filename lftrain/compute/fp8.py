"""Frozen linear layers in float8 (e4m3): a scale for each row of the weights, and one for each row of activations, found as they come."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from lftrain.errors import ConfigError

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
TINY = 1e-12
SIZES = 16
"""Both sizes of a layer are multiples of it: what the GPU's kernels take."""
CAPABILITY = (8, 9)


class Fp8Linear(nn.Linear):
    """A linear layer made by :func:`convert`.

    Attributes:
        weight: float8 as bytes, uint8 (out, in). As float8 autocast would take it for any number and cast it without its scale, where
            somebody else multiplies by it; bytes are refused.
        scale: float32 (out,). kind: the compute type, which the output has.
        original: the weights before, in the compute type, on the host: what ``state_dict`` has and loading changes.
    """

    scale: nn.Parameter
    kind: torch.dtype
    original: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        rows = input.reshape(-1, input.shape[-1])
        found = product(rows.detach(), self.weight, self.scale, self.bias, self.kind)
        if torch.is_grad_enabled() and rows.requires_grad:
            found = _passing(found, rows, self.weight, self.scale)
        return found.view(*input.shape[:-1], self.out_features)

    def take(self, original: torch.Tensor) -> None:
        """Compute with these weights from now on."""
        self.original = original.to("cpu", self.kind)
        values, scale = quantized(self.original.to(self.scale.device))
        if self.weight.dtype is torch.uint8:
            self.weight.data.copy_(values.view(torch.uint8))  # in place: a graph may hold it
        else:
            self.weight.data = values.view(torch.uint8)
        self.scale.data.copy_(scale[:, 0])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.original
        del destination[f"{prefix}scale"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        scale, values = self._parameters.pop("scale"), self.weight.data
        self.weight.data = self.original
        try:
            super()._load_from_state_dict(state_dict, prefix, *more)
        finally:
            original, self.weight.data = self.weight.data, values
            self._parameters["scale"] = scale
        self.take(original)


# Operators that the compiler does not look into. As a torch.autograd.Function it traces them to gradients of zero, whatever the backend
# (torch 2.11).
@torch.library.custom_op("lftrain::fp8_passing", mutates_args=())
def _passing(found: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - for the gradient
    """The product where a layer before is trained: its gradient is that of the quantised weights, and activations as if they were not."""
    return found.clone()


@torch.library.custom_op("lftrain::fp8_back", mutates_args=())
def _back(gradient: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(N, M) times the layer's (M, K): (N, K)."""
    return gradient @ (weight.view(FLOAT8).float() * scale[:, None]).to(gradient.dtype)


@_passing.register_fake
def _(found: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(found)


@_back.register_fake
def _(gradient: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return gradient.new_empty(len(gradient), weight.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    _, rows, weight, scale = inputs
    ctx.save_for_backward(weight, scale)
    ctx.kind = rows.dtype


def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
    return None, _back(gradient, *ctx.saved_tensors).to(ctx.kind), None, None


torch.library.register_autograd("lftrain::fp8_passing", _backward, setup_context=_keep)


def quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, K) -> float8 (N, K) and its scales, float32 (N, 1). A row with inf or NaN becomes NaN."""
    # Times, not divided: GPUs divide by a number by way of its reciprocal, processors do not.
    scale = rows.abs().amax(-1, keepdim=True).float().clamp(min=TINY) * (1 / LARGEST)
    return (rows / scale).to(FLOAT8), scale


def product(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, kind: torch.dtype
) -> torch.Tensor:
    """``rows`` (N, K), quantised, times the layer's (M, K): (N, M) in ``kind``."""
    values, scales = quantized(rows)
    weights = weight.view(FLOAT8).t()
    if rows.is_cuda:
        # bf16 is what the kernels with scales by row give on every GPU.
        told = None if bias is None else bias.to(torch.bfloat16)
        found = torch._scaled_mm(values, weights, scales, scale[None], told, out_dtype=torch.bfloat16, use_fast_accum=True)
        return found.to(kind)
    with torch.autocast(rows.device.type, enabled=False):
        found = (values.float() @ weights.float()) * scales * scale
        return (found if bias is None else found + bias.float()).to(kind)


def convert(model: nn.Module, kind: torch.dtype, device: torch.device) -> str:
    """Have the frozen linear layers compute in float8, in place. Modules and parameters stay the objects that they are.

    Returns:
        How many do, and which do not and why.

    Raises:
        ConfigError: a GPU, or a compute type, without float8; no layer that it fits.
    """
    if kind is torch.float32:
        raise ConfigError('precision.frozen = "fp8" goes with precision.mode = "bf16" or "fp16", which is what the layers give')
    if why := lacking(device):
        raise ConfigError(f'precision.frozen = "fp8" {why}: take "compute"')
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    owners = Counter(id(one) for module in model.modules() for one in module._parameters.values())
    done, left = 0, []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not isinstance(module._parameters.get("weight"), nn.Parameter):
            continue
        if isinstance(module, Fp8Linear):
            done += 1
        elif not module.weight.requires_grad:
            shared = places[id(module)] > 1 or owners[id(module.weight)] > 1
            if why := _hindrance(module, shared):
                left.append(f"{name} ({why})")
            else:
                _convert(module, kind)
                done += 1
    if not done:
        reason = (
            f"left out: {_few(left)}" if left else "no linear layer is frozen (requires_grad_(False), or model.options.freeze)"
        )
        raise ConfigError(f'precision.frozen = "fp8" fits no layer of this model; {reason}. Take "compute"')
    return f"{done} of {done + len(left)} frozen linear layers compute in fp8" + (f"; not {_few(left)}" if left else "")


def lacking(device: torch.device) -> str:
    """Why there is no float8 on this device, or ""."""
    if device.type != "cuda" or (have := torch.cuda.get_device_capability(device)) >= CAPABILITY:
        return ""
    return f"needs a GPU of compute capability 8.9 or more (Ada, Hopper), and this one has {have[0]}.{have[1]}"


def refresh(model: nn.Module) -> None:
    """After the originals were changed in place, by a checkpoint."""
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module.take(module.original)


def _hindrance(module: nn.Linear, shared: bool) -> str:
    if type(module) is not nn.Linear or "forward" in vars(module):
        return "not a plain nn.Linear"
    if shared:
        return "shared"
    if module.bias is not None and module.bias.requires_grad:
        return "its bias is trained"
    if module.in_features % SIZES or module.out_features % SIZES:
        return f"{module.in_features} x {module.out_features}: sizes must be multiples of {SIZES}"
    if module.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"stored as {module.weight.dtype}"
    return ""


def _convert(linear: nn.Linear, kind: torch.dtype) -> None:
    module: Any = linear
    module.__class__ = Fp8Linear
    module.kind = kind
    module.scale = nn.Parameter(torch.empty(module.out_features, device=module.weight.device), requires_grad=False)
    module.take(module.weight.data)


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
