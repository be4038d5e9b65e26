"""A call with 8-bit tensors as all roads take it: scales become reads of mods, see `call.scales`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .. import errors
from ..graph.expr import Dep, const, has_no_shape
from ..graph.gradient import derivative
from ..graph.sizes import differ, surely
from ..mods.score import Score
from . import checks
from .eight_bits import EIGHT_BITS, NEGATIVE, Quantized, refuse_narrow_gradient, scale_tensor
from .problem import Problem, check_ranks, refuse_unreadable, softmax_scale
from .scales import Rows, Scale, Values, rows_of, scaled_scores, scaled_values
from .sequences import Paged, Varlen

MOST_OF_FP16 = 128.0
"""What a weight of fp16 may be multiplied by: it may be 2^8 itself."""

WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What 8-bit queries may be widened to; both 8-bit types fit into each."""


Multiplies = Callable[[Problem], bool]
"""Whether 8-bit queries of a call are multiplied as such."""


class InEightBits(NamedTuple):
    """A call with quantised tensors as all roads take it: 8-bit k and v as they are, scales as mods.

    `out_dtype`: where q has 8 bits too; None where it is wide, and out is like it.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    score_mod: Any
    values: Values | None
    out_dtype: torch.dtype | None


def in_eight_bits(
    tensors: tuple[Any, Any, Any],
    scales: tuple[Any, Any, Any],
    out_dtype: torch.dtype | None,
    where: tuple[Varlen | None, Paged | None],
    score_mod: Callable[..., Any] | None,
    scale: float | None,
    sums_are_seen: bool,
    multiplies: Multiplies | None = None,
) -> InEightBits:
    """The call that `tensors` (q, k, v, each a tensor or `Quantized`) and their `scales` say.

    sums_are_seen: by sinks, or who asks for LSE or the largest scores. They get k's mean back then, as a score mod does
        that does more than add: what a row's scores share changes nothing else, and takes a pass over q.

    q of 8 bits is widened to `out_dtype`, which is exact, unless who computes `multiplies` such. Where a quantised
    tensor asks for a gradient, all are dequantised, so that it flows straight through.

    Raises: `NotATensor`, `UnsupportedOption`, `UnsupportedDType`, `ShapeMismatch`, `GradientUnsupported`,
    `InvalidScale` of a negative number; under `debug_checks` also in a tensor, and where weights of fp16 overflow.
    """
    given = [_quantized(*each) for each in zip(("q", "k", "v"), tensors, scales, strict=True)]
    _check_rotation(given[0], given[1])
    dtype = _out_dtype(given[0], out_dtype)
    if torch.is_grad_enabled() and any(x.wide is not None for x in given):
        given = [Quantized(x.dequantised(dtype), None, x.mean) for x in given]
    q, k, v = given
    queries = q.data
    check_ranks(queries, k.data, v.data, *where)
    of_q, of_k, of_v = rows_of(queries, k.data, v.data, *where)
    before, behind = _factor(of_k, k), _factor(of_q, q)
    shift = None
    if k.mean is not None and (sums_are_seen or _bends(score_mod)) and not surely(queries.numel() == 0):
        shift = of_q, softmax_scale(scale, queries.shape[-1]) * _times_mean(queries.to(dtype), k.mean, k.data.shape[1])
    read = scaled_scores(before, shift, behind)
    if read is not None:
        score_mod = read if score_mod is None else read >> Score.of(score_mod)
    values = None if v.scale is None else scaled_values(of_v, v.scale)
    call = _widened(InEightBits(queries, k.data, v.data, score_mod, values, dtype), where, multiplies)
    _check_scales(call, (q.scale, k.scale, v.scale))
    return call


def _check_rotation(q: Quantized, k: Quantized) -> None:
    """Raises `UnsupportedOption`: products of a turned tensor and of one that is not mean nothing."""
    if q.rotated != k.rotated:
        turned, other = ("q", "k") if q.rotated else ("k", "q")
        raise errors.UnsupportedOption(
            f"{turned} was rotated by ca.quantize, and {other} was not; pass q and k of ca.quantize both, or quantise "
            "with hadamard=False"
        )


def _widened(
    call: InEightBits, where: tuple[Varlen | None, Paged | None], multiplies: Multiplies | None
) -> InEightBits:
    """The call with q of the output's type, unless it has 8 bits and is multiplied so."""
    narrow = multiplies is not None and call.q.dtype in EIGHT_BITS
    if multiplies is not None and narrow:
        narrow = multiplies(Problem.of(*call[:3], *where, out_dtype=call.out_dtype))
    return call if narrow else call._replace(q=call.q.to(call.out_dtype), out_dtype=None)


def _quantized(name: str, given: Any, scale: Any) -> Quantized:
    """What was given as q, k or v; a tensor that is not quantised stands for itself."""
    if isinstance(given, Quantized):
        if scale is not None:
            raise errors.UnsupportedOption(f"{name} is a ca.Quantized, which has a scale; leave {name}_scale out")
        if given.mean is not None and name != "k":
            raise errors.UnsupportedOption(
                f"{name} has a mean, which only k may have; add it to {name}, or leave it out"
            )
        for part, t in (("data", given.data), ("wide", given.data if given.wide is None else given.wide)):
            refuse_unreadable(f"{name}'s {part}", t)
        return given._replace(scale=_number(name, given.scale, given.data))
    if not isinstance(given, torch.Tensor):
        raise errors.NotATensor(f"{name} is a {type(given).__name__}; pass a torch.Tensor or a ca.Quantized")
    refuse_unreadable(name, given)
    if given.dtype not in EIGHT_BITS:
        if scale is not None and given.dtype.itemsize == 1:
            raise errors.UnsupportedDType(
                f"{name} is {given.dtype}; 8 bits are float8_e4m3fn or float8_e5m2: {name}.view(torch.float8_e4m3fn) "
                "of bytes that are such numbers"
            )
        if scale is not None:
            raise errors.UnsupportedOption(
                f"{name}_scale is of 8-bit tensors, and {name} is {given.dtype}; leave it out, or multiply {name} by it"
            )
        return Quantized(given, None, dtype=given.dtype)
    refuse_narrow_gradient(name, given)
    return Quantized(given, _number(name, scale, given))


def _factor(rows: Rows, given: Quantized) -> list[Scale]:
    """What scores are multiplied by for q or k: its scale, or nothing where it has none."""
    return [] if given.scale is None else [(rows, given.scale)]


def _number(name: str, scale: Any, data: torch.Tensor) -> torch.Tensor | None:
    """A scale as mods read it."""
    if scale is None:
        return None
    scale = scale_tensor(name, scale, data.device)
    if name == "v" and scale.requires_grad and torch.is_grad_enabled():
        raise errors.GradientUnsupported("v_scale has no gradient; pass v_scale.detach(), or multiply v by it before")
    return None if surely(scale.numel() == 0) and surely(data.numel() == 0) else scale  # of no rows


def _check_scales(call: InEightBits, scales: tuple[torch.Tensor | None, ...]) -> None:
    """Where `debug_checks` are on, raises `InvalidScale` of what products do not take; waits for the device."""
    if not checks.are_on or torch.compiler.is_compiling() or isinstance(call.q, FakeTensor):
        return
    for name, scale in zip("qkv", scales, strict=True):
        least = 0.0 if scale is None else float(scale.detach().amin())
        if least < 0:
            raise errors.InvalidScale(NEGATIVE.format(name, least))
    by_key = call.values is not None and call.values.expr.deps & Dep.KV
    most = float(scales[2].detach().amax()) if by_key and scales[2] is not None else 0.0
    if most > MOST_OF_FP16 and call.q.dtype is torch.float16:
        raise errors.InvalidScale(
            f"v_scale has {most:g} for a key: beside queries of fp16 weights are multiplied by it, which may be 2^8 "
            f"before, and infinite beyond {MOST_OF_FP16:g}; pass queries of bf16, or scales of heads"
        )


def _out_dtype(q: Quantized, asked: torch.dtype | None) -> torch.dtype:
    """The type of the output, which a wide q has. Raises: `UnsupportedOption`."""
    if q.data.dtype in EIGHT_BITS:
        found = q.dtype if asked is None else asked
        if not isinstance(found, torch.dtype) or found not in WIDE:
            raise errors.UnsupportedOption(f"out_dtype is {found!r:.40}; it must be one of {', '.join(map(str, WIDE))}")
        return found
    if asked is not None and asked is not q.data.dtype:
        raise errors.UnsupportedOption(
            f"out_dtype is of 8-bit q; q is {q.data.dtype}, and so is out: cast it, out.to({asked!r:.40})"
        )
    return q.data.dtype


def _bends(score_mod: Callable[..., Any] | None) -> bool:
    """Whether a score that is larger by 1 may become another one than that, as ALiBi's do not."""
    if score_mod is None or torch.compiler.is_compiling():
        return score_mod is not None
    return derivative(Score.of(score_mod).expr) is not const(1.0)


def _times_mean(q: torch.Tensor, mean: torch.Tensor, heads: int) -> torch.Tensor:
    """q·mean of each query, fp32 (fp64 of fp64 ones): (B, Hq, Sq), or (total, Hq) of packed ones.

    Raises: `ShapeMismatch`.
    """
    shared, wanted = (1, heads, 1, q.shape[-1]), (q.shape[0] if q.ndim == 4 else 1, heads, 1, q.shape[-1])
    found = tuple(mean.shape) if isinstance(mean, torch.Tensor) and not has_no_shape(mean) else ()
    if len(found) != 4 or any(differ(n, a) and differ(n, b) for n, a, b in zip(found, shared, wanted, strict=True)):
        raise errors.ShapeMismatch(f"k's mean has shape {found} beside q {tuple(q.shape)}; it must be {wanted}")
    wide = torch.promote_types(q.dtype, torch.float32)
    mean = mean.to(wide).repeat_interleave(q.shape[1] // mean.shape[1], 1)
    return (q.to(wide) * (mean if q.ndim == 4 else mean[0].transpose(0, 1))).sum(-1)
