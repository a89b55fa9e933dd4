"""The optimiser's kernel against torch's AdamW in float64. As a script: by Triton's interpreter."""

from __future__ import annotations

import itertools

import torch

from lftrain.compute import kernels

COUNTS = (1, 2048, 5001)
STEPS = 12


def worst(count: int, device: str = "cpu", scaled: bool = True, half: bool = False) -> float:
    """Largest relative difference of parameter and averages after some steps, of which two are skipped; ``half``: of a master."""
    made = torch.Generator().manual_seed(count)
    start = torch.randn(count, generator=made)
    exact = torch.nn.Parameter(start.double().clone())
    options = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    reference = torch.optim.AdamW([exact], **options)  # type: ignore[arg-type]
    ours, average, square = start.to(device), torch.zeros(count, device=device), torch.zeros(count, device=device)
    copy = ours.bfloat16()
    lr, done = torch.tensor(3e-3, device=device), 0
    for number in range(STEPS):
        gradient, bad, scale = torch.randn(count, generator=made), number in (0, 5), 2.0**number
        if half:
            gradient = gradient.bfloat16().float()
        if not bad:
            exact.grad, done = gradient.double(), done + 1
            reference.step()
        if bad:
            gradient[0] = float("nan")
        correction = torch.tensor([1 - 0.9**done, (1 - 0.95**done) ** 0.5], device=device)
        given = (gradient * scale if scaled else gradient).to(device, torch.bfloat16 if half else torch.float32)
        before = given.clone()
        flags = (torch.tensor(scale, device=device) if scaled else None, torch.tensor(float(bad), device=device))
        kernels.update(
            *((copy, ours) if half else (ours, None)), given, average, square, correction, *flags, lr, (0.9, 0.95), 1e-8, 0.1
        )
        assert torch.equal(given.nan_to_num(), before.nan_to_num()), "gradients are only read"
    # Triton's interpreter cuts where a GPU rounds.
    near = torch.equal(copy, ours.bfloat16()) if device != "cpu" else bool(((copy - ours).abs() <= ours.abs() * 2**-7).all())
    assert not half or near, "the copy is not that of the master"
    state = reference.state[exact]
    pairs = ((ours, exact.detach()), (average, state["exp_avg"]), (square, state["exp_avg_sq"]))
    return max(float((one.cpu().double() - other).norm() / other.norm()) for one, other in pairs)


if __name__ == "__main__":
    for count in COUNTS:
        for scaled, half in itertools.product((True, False), repeat=2):
            found = worst(count, scaled=scaled, half=half)
            assert found < 1e-6, (count, scaled, half, found)
