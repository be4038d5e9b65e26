"""What the recipes share: the best device there is, the error against fp64, and where pictures go."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
OUT = HERE / "out"
if importlib.util.find_spec("composattn") is None:
    sys.path.insert(0, str(HERE.parent))  # not installed: from the source tree

import composattn as ca  # noqa: E402
from composattn.testing import Case, check  # noqa: E402


def best_device() -> tuple[torch.device, torch.dtype]:
    """A GPU with bf16 where there is one, else the CPU with fp32."""
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.bfloat16
    return torch.device("cpu"), torch.float32


def draw(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """N(0, 1), a leaf that wants a gradient."""
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_()


def draw_mask(mask: ca.Mask, name: str, length: int, what: str = "the mask") -> None:
    """Its picture, `name` in `OUT`, of `length` queries and keys."""
    OUT.mkdir(exist_ok=True)
    mask.picture(OUT / name, length)
    print(f"{what} is drawn in {OUT / name}")


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """‖got - truth‖ / ‖truth‖, in fp64."""
    got, truth = got.detach().double(), truth.detach().double()
    return float((got - truth).norm() / truth.norm())


def compare_with_fp64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    captured: dict[str, torch.Tensor] | None = None,
    varlen: ca.Varlen | None = None,
) -> None:
    """Attention forward and backward; prints how far it is from fp64, and stops if that is too far.

    `captured`: the tensors that the mods read and that want gradients, by name.
    """
    captured = captured or {}
    mods: dict[str, Any] = {"score_mod": score_mod, "mask_mod": mask_mod}
    out = ca.attention(q, k, v, **mods, varlen=varlen)
    upstream = torch.randn_like(out)
    gradients = torch.autograd.grad(out, [q, k, v, *captured.values()], upstream)

    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    truth = ca.attention(*wide, **mods, varlen=varlen, backend="reference")
    true_gradients = torch.autograd.grad(truth, [*wide, *captured.values()], upstream.double())

    errors = {"output": relative_error(out, truth)}
    for name, got, true in zip(("q", "k", "v", *captured), gradients, true_gradients, strict=True):
        errors[f"d{name}"] = relative_error(got, true)
    print(f"{str(out.dtype)[6:]} on {out.device.type}, relative error against fp64:")
    print("  " + "   ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    # Twice the error of plain PyTorch at the same precision is the most that composattn.testing lets pass.
    case = Case(q, k, v, **mods, dout=upstream, varlen=varlen)
    check(ca.attention, case)
