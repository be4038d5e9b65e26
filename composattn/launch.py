"""Tensors → launch of a compiled kernel on torch's current stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .captured import read_by
from .compile import Launchable, compile_plan
from .errors import UnsupportedLayout
from .plan import ForwardPlan

Pair = tuple[torch.Tensor, torch.Tensor | None]


class ForwardLauncher:
    """A plan's compiled kernel with what a launch needs; make it once, call it often."""

    def __init__(self, plan: ForwardPlan) -> None:
        self.plan = plan
        self.compiled: Launchable = compile_plan(plan)
        self.head_dim_v = plan.head_dim_v
        self.return_lse = plan.return_lse

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        captured: Sequence[torch.Tensor] = (),
        scalars: Sequence[float | int] = (),
    ) -> Pair:
        """(out (B, Hq, Sq, Dv), lse (B, Hq, Sq) or None). Raises `UnsupportedLayout`."""
        out = _empty_like_queries(q, self.head_dim_v)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32) if self.return_lse else None
        if not q.shape[2]:
            return out, lse
        if not k.shape[2]:
            return out.zero_(), None if lse is None else lse.fill_(-torch.inf)
        device = q.device.index
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(q, k, v, out, lse, scale, captured, scalars)
        else:
            self._launch(q, k, v, out, lse, scale, captured, scalars)
        return out, lse

    def _launch(self, q, k, v, out, lse, scale, captured, scalars) -> None:  # type: ignore[no-untyped-def]
        reads = tuple([_at_least_1d(t) for t in read_by(self.plan, captured, scalars)]) or None
        numbers = tuple(scalars) or None
        try:
            self.compiled(q, k, v, out, lse, scale, reads, numbers)
        except (ValueError, TypeError):
            # strides of sizes 0 and 1 are arbitrary and may offend; others are refused here by name
            self.compiled(tidy(q, "q"), tidy(k, "k"), tidy(v, "v"), out, lse, scale, reads, numbers)


def _empty_like_queries(q: torch.Tensor, head_dim_v: int) -> torch.Tensor:
    """O in q's order of dimensions, so that a (B, S, H, D) caller gets (B, S, H, Dv) memory back."""
    batch, heads, length, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty((batch, length, heads, head_dim_v)).transpose(1, 2)
    return q.new_empty((batch, heads, length, head_dim_v))


def _at_least_1d(t: torch.Tensor) -> torch.Tensor:
    return t if t.ndim else t.reshape(1)


def tidy(t: torch.Tensor, name: str) -> torch.Tensor:
    """`t` with harmless strides in its dimensions of size 1.

    Raises `UnsupportedLayout` where the last dimension is not contiguous or rows don't start at whole 16 bytes.
    """
    unit = 16 // t.element_size()
    strides = [8 if size == 1 else stride for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
    if t.shape[-1] != 1 and t.stride(-1) != 1:
        raise UnsupportedLayout(
            f"{name} has strides {t.stride()}; the last dimension must be contiguous: pass {name}.contiguous()"
        )
    if any(s % unit for s in strides) or t.data_ptr() % 16:
        raise UnsupportedLayout(
            f"{name} has strides {t.stride()} and starts at {t.data_ptr() % 16} bytes past a multiple of 16; "
            f"bulk copies need data and strides in whole 16 bytes ({unit} elements): pass {name}.contiguous()"
        )
    return t.as_strided(t.shape, (*strides, 1))
