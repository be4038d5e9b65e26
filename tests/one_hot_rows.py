"""Rows whose largest score, of thousands, has nearly all of the sum: their gradients are what a rounded output leaves.

dS = P (dP - rowsum(dO·O)) of one key is 0 where the output is that key's value. So the sum that it is divided by has to
have the largest probability as it was rounded, or dQ and dK are off by all of their norm.
"""

from __future__ import annotations

import math

import torch

import composattn as ca


def gradient_errors(
    backend: str, size: float = 60.0, length: int = 64, d: int = 64, device: str = "cpu"
) -> list[float]:
    """Errors of dq and dk beside their norms, of scores whose standard deviation is `size`²."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(1, 2, length, d, generator=generator) * scale for scale in (size, size, 1.0, 1.0)]
    *x, dout = (t.half().to(device) for t in x)
    exact, ours = ([t.to(dtype).requires_grad_() for t in x] for dtype in (torch.float64, torch.float16))
    q, k, v = exact
    found = torch.autograd.grad(ca.attention(*ours, backend=backend), ours, dout)
    wanted = torch.autograd.grad((q @ k.mT / math.sqrt(d)).softmax(-1) @ v, exact, dout.double())
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found[:2], wanted[:2], strict=True)]
