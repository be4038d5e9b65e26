"""What torch's flex_attention means: dense, in fp64, differentiated by autograd; and the rule that results are held to.

The mods run as PyTorch functions on whole index tensors: no tracing, nothing of composattn takes part in the truth.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import composattn as ca

Mod = Callable[..., Any]
Results = dict[str, torch.Tensor]

FACTOR = {torch.float32: 10.0, torch.float64: 10.0}  # times plain PyTorch's own error in that dtype; halves 1.1
FLOOR = 1e-6  # of the size of a result: where plain PyTorch happens to be exact


@dataclasses.dataclass(frozen=True)
class Mods:
    """A score mod and a mask as functions of the `tensors` they read, so that a copy in fp64 can be read instead.

    `meaning`: the score mod for whole index tensors, where the mod itself takes only one pair at a time.
    """

    score: Callable[..., Mod] | None = None
    mask: Callable[..., Mod] | None = None
    tensors: tuple[torch.Tensor, ...] = ()
    meaning: Callable[..., Mod] | None = None

    @classmethod
    def of(cls, score: Mod | None = None, mask: Mod | None = None) -> Mods:
        """Mods that read no tensor of which a gradient is asked."""
        return cls(score and (lambda: score), mask and (lambda: mask))


def copies(tensors: tuple[torch.Tensor, ...], precision: torch.dtype | None = None) -> list[torch.Tensor]:
    """Leaves of their own, floating point ones in `precision` if given."""
    made = []
    for t in tensors:
        wide = t.detach().clone()
        wide = wide.to(precision) if precision is not None and t.is_floating_point() else wide
        made.append(wide.requires_grad_(t.requires_grad))
    return made


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score: Mod | None,
    mask: Mod | None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, max_scores) by the definition, in q's dtype, scores and softmax at least fp32; keys may be shared."""
    group, working = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    k, v = (x.expand(q.shape[0], -1, -1, -1).repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.mT).to(working) * (q.shape[-1] ** -0.5 if scale is None else scale)
    shapes = (-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1)
    b, h, i, j = (torch.arange(n).view(shape) for n, shape in zip(scores.shape, shapes, strict=True))
    shape = scores.shape
    if score is not None:
        scores = score(scores, b, h, i, j).to(working).expand(shape)
    if mask is not None:
        scores = scores.masked_fill(~mask(b, h, i, j), -math.inf)
    top = scores.detach().amax(-1, keepdim=True)
    shift = top.masked_fill(top == -math.inf, 0.0)
    weight = torch.exp(scores - shift)
    total = weight.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (shift + total.log()).masked_fill(empty, -math.inf)
    return (weight / total).to(q.dtype) @ v, lse.squeeze(-1), top.squeeze(-1)


def check(
    mods: Mods,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    generator: torch.Generator,
    *,
    block_mask: Any = None,
    backend: str | None = None,
    scale: float | None = None,
) -> None:
    """Holds our flex_attention, forward and every gradient, to the truth.

    `block_mask` None: made of the mask, where there is one.
    """
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator)
    dlse = torch.randn(q.shape[:-1], generator=generator)

    def ours(q: Any, k: Any, v: Any, tensors: Any) -> Any:
        blocks = block_mask
        if blocks is None and mods.mask is not None:
            blocks = blocks_of(mods.mask(*tensors), q, k)
        out, aux = ca.flex_attention(
            q, k, v, mods.score and mods.score(*tensors), blocks, scale, enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True, max_scores=True), backend=backend,
        )  # fmt: skip
        return out, aux.lse, aux.max_scores

    def theirs(q: Any, k: Any, v: Any, tensors: Any) -> Any:
        score = mods.meaning or mods.score
        return attention(q, k, v, score and score(*tensors), mods.mask and mods.mask(*tensors), scale)

    def run(function: Mod, precision: torch.dtype | None = None, signs: torch.Tensor | None = None) -> Results:
        leaves = [t.detach().to(precision or t.dtype).requires_grad_() for t in (q, k, v)]
        tensors = copies(mods.tensors, precision)
        out, lse, top = function(*leaves, tensors)
        asked = [*leaves, *(t for t in tensors if t.requires_grad)]
        of_rows = (out * dout.to(out.dtype)).sum(-1) + torch.where(lse == -math.inf, 0.0, lse) * dlse.to(lse.dtype)
        loss = (of_rows if signs is None else of_rows * signs).sum()
        grads = torch.autograd.grad(loss, asked, materialize_grads=True)
        names = ["dq", "dk", "dv", *(f"d captured {n}" for n in range(len(asked) - 3))]
        made = {"out": out, "lse": lse, "max_scores": top, **dict(zip(names, grads, strict=True))}
        return {name: t.detach() for name, t in made.items()}

    exact = run(theirs, torch.float64)
    draws = [torch.randint(0, 2, dlse.shape, generator=generator) * 2 - 1 for _ in range(4 if any_learned(mods) else 0)]
    uncancelled = [run(theirs, torch.float64, signs) for signs in draws]
    hold(run(ours), exact, run(theirs), {name: max(_size(r[name]) for r in (exact, *uncancelled)) for name in exact})


def any_learned(mods: Mods) -> bool:
    """Whether a gradient is asked of a captured tensor."""
    return any(t.requires_grad for t in mods.tensors)


def hold(found: Results, exact: Results, plain: Results, sizes: dict[str, float]) -> None:
    """The rule: the mean error is at most `FACTOR` times plain PyTorch's in the same dtype, and a rounding of it.

    The latter for gradients of few numbers, where luck decides who rounds better; `sizes` are those of results in which
    the parts of different rows do not cancel, as their errors do not. Infinities agree.
    """
    wrong = []
    for name, wanted in exact.items():
        factor = FACTOR.get(found["out"].dtype, 1.1)
        error, own = _error(found[name], wanted), _error(plain[name], wanted)
        rounding = torch.finfo(found[name].dtype).eps / 2 * sizes[name]
        if not error <= factor * own + rounding + FLOOR * max(1.0, sizes[name]):
            wrong.append(f"{name}: mean error {error:.1e}, plain PyTorch's {own:.1e}")
    assert not wrong, "; ".join(wrong)


def _size(value: torch.Tensor) -> float:
    return float(torch.where(value.isinf(), 0.0, value).abs().mean())


def _error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float(torch.where(value.double() == exact, 0.0, value.double() - exact).abs().mean())


def blocks_of(mask: Mod, q: torch.Tensor, k: torch.Tensor, size: Any = 32, heads: int | None = None) -> Any:
    """torch's BlockMask of a mask for these tensors."""
    return create_block_mask(mask, q.shape[0], heads or q.shape[1], q.shape[2], k.shape[2], "cpu", size)


def draw(
    generator: torch.Generator,
    batch: int = 2,
    heads: int = 4,
    q_len: int = 48,
    kv_len: int | None = None,
    dim: int = 16,
    v_dim: int | None = None,
    kv_heads: int | None = None,
    kv_batch: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """q, k and v; what is left out follows from the rest."""
    keys = (kv_batch or batch, kv_heads or heads, kv_len or q_len)
    shapes = (batch, heads, q_len, dim), (*keys, dim), (*keys, v_dim or dim)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
