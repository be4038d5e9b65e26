"""Ready score mods: how a score changes before the softmax; every one is a `Score`, so `>>` and `+` combine them.

Tensors given here are captured as they are, so gradients reach the caller's own parameters.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import InvalidModArgument
from ..graph.scalar import Scalar
from ..graph.sizes import surely
from .arguments import aligned, counted, integer, positive, shown, tensor
from .ready import ready
from .score import Score


@ready
def alibi(slopes: torch.Tensor | int, symmetric: bool = False, align: str = "top_left") -> Score:
    """A penalty that grows with distance: `score + slope[h] * (kv - q)`.

    `slopes` is a float tensor (H,) or (B, H), learned or not, or the number of heads: then the slopes of the paper, a
    geometric sequence `2^(-8 (h + 1) / H)` (for H that is no power of two, those of the power of two below and
    every other one of the power above). A call of another number of heads is refused; one that has some of H heads, as
    on a rank, takes `alibi(H).shifted(h=first)`. `symmetric=True` takes `-|kv - q|`, for attention that is not causal.
    `align="bottom_right"` puts the last query at the last key (FlashAttention; decoding with a cache), as in `causal`.

    Source: Press et al. 2022, "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation", section 3.

    Raises: `InvalidModArgument` for fewer than one head, slopes that are not a float tensor of these shapes, or
    another `align`.
    """
    at = aligned(align)
    if isinstance(slopes, torch.Tensor):
        table = tensor(slopes, "slopes", "float", ("H",), ("B", "H"))
        slope = (lambda b, h: table[h]) if table.ndim == 1 else (lambda b, h: table[b, h])
    else:
        heads = integer(slopes, "slopes", 1, others=" (how many heads), or a float tensor (H,) or (B, H)")
        one_of_them = counted("h", heads)
        slope = lambda b, h: _paper_slope(one_of_them(h), heads)  # noqa: E731

    def alibi(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = kv - at(q)
        return score + slope(b, h) * (-abs(distance) if symmetric else distance)

    return Score.of(alibi, name="alibi")


def _paper_slope(h: Any, heads: int) -> Any:
    """The slope as an expression of the head, which a kernel computes once per head; no table to move to a device."""
    below = 2 ** (heads.bit_length() - 1)
    first = torch.exp2((h + 1) * (-8.0 / below))
    if below == heads:
        return first
    return torch.where(h < below, first, torch.exp2((2 * (h - below) + 1) * (-4.0 / below)))


@ready
def softcap(cap: float | Scalar | torch.Tensor) -> Score:
    """Scores kept inside (-cap, cap): `cap * tanh(score / cap)`.

    `cap` is a number above 0, a `ca.scalar`, or a 0-d float tensor.

    Source: Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size", section 2.

    Raises: `InvalidModArgument` for a cap that is not a finite number above 0.
    """
    limit = positive(cap, "cap")
    return Score.of(lambda score, b, h, q, kv: limit * torch.tanh(score / limit), name=f"softcap({shown(cap)})")


@ready
def relative_bias(table: torch.Tensor, bidirectional: bool = True) -> Score:
    """A learned number for each distance, clamped at the ends of the table.

    `table` is a float tensor (n,) shared by the heads, or (H, n). Bidirectional, n = 2 r + 1 and the score gets
    `table[h, clamp(q - kv, -r, r) + r]`; otherwise `table[h, clamp(q - kv, 0, n - 1)]`, for causal attention.

    Source: Shaw et al. 2018, "Self-Attention with Relative Position Representations", section 3.2 (clipping), with
    a scalar for each distance as in Raffel et al. 2020, section 2.1.

    Raises: `InvalidModArgument` for a table of another type or rank, or of even length if bidirectional.
    """
    biases = tensor(table, "table", "float", ("n",), ("H", "n"))
    n = biases.shape[-1]
    if bidirectional and not surely(n % 2 == 1):
        raise InvalidModArgument(f"a bidirectional table has 2 * max_distance + 1 entries, an odd number; got {n}")
    low, high = (-(n // 2), n // 2) if bidirectional else (0, n - 1)

    def relative_bias(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        place = (q - kv).clamp(low, high) - low
        return score + (biases[place] if biases.ndim == 1 else biases[h, place])

    return Score.of(relative_bias, name="relative_bias")


@ready
def t5_bucket_bias(table: torch.Tensor, max_distance: int = 128, bidirectional: bool = True) -> Score:
    """T5's learned bias: one bucket for each short distance, then buckets that grow geometrically.

    `score + table[bucket(kv - q), h]` with a float `table` (buckets, H), as T5 checkpoints store it. Let m be the
    number of buckets of one direction (half of them if bidirectional; the upper half is for kv > q) and e = m // 2.
    A distance n = |kv - q| (0 for kv > q if not bidirectional) has bucket n below e, else
    `min(m - 1, e + floor(log(n / e) / log(max_distance / e) * (m - e)))`, in fp32 as in T5's own code: the
    buckets are tabulated once, so boundaries fall where checkpoints expect them on every device.

    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", section 2.1.

    Raises: `InvalidModArgument` for a table of another type or rank, too few or oddly many buckets, or a
    `max_distance` that is not above e.
    """
    biases = tensor(table, "table", "float", ("buckets", "H"))
    maximum = integer(max_distance, "max_distance", 1)
    buckets = t5_buckets(biases.shape[0], maximum, bidirectional).to(biases.device)

    def t5_bucket_bias(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        place = (kv - q).clamp(-maximum, maximum if bidirectional else 0) + maximum
        return score + biases[buckets[place], h]

    return Score.of(t5_bucket_bias, name="t5_bucket_bias")


def t5_buckets(buckets: int, max_distance: int, bidirectional: bool) -> torch.Tensor:
    """Bucket of every relative position kv - q from -max_distance to max_distance (to 0 if not bidirectional), int32.

    Positions beyond are in the bucket of the last one. Raises: as `t5_bucket_bias`.
    """
    if bidirectional and not surely(buckets % 2 == 0):
        raise InvalidModArgument(f"a bidirectional table has an even number of buckets, got {buckets}")
    one_way = buckets // 2 if bidirectional else buckets
    exact = one_way // 2
    if not surely(exact >= 1):
        raise InvalidModArgument(f"{buckets} buckets are too few: at least {4 if bidirectional else 2}")
    if max_distance <= exact:
        raise InvalidModArgument(f"max_distance must be above {exact} with {buckets} buckets, got {max_distance}")
    relative = torch.arange(-max_distance, (max_distance if bidirectional else 0) + 1, device="cpu")
    distance = relative.abs()
    grown = torch.log(distance.float().clamp(min=1) / exact) / math.log(max_distance / exact) * (one_way - exact)
    large = (exact + grown.to(torch.int64)).clamp(max=one_way - 1)
    bucket = torch.where(distance < exact, distance, large)
    return (bucket + (relative > 0) * one_way * bidirectional).to(torch.int32)


@ready
def bias(values: torch.Tensor) -> Score:
    """A full additive bias: `score + values[b, h, q, kv]`.

    `values` is a float tensor (B, H, Sq, Skv), (H, Sq, Skv) or (Sq, Skv); a dimension of size 1 is shared, as in
    broadcasting. It is read in the kernel and never expanded.

    Source: torch's `scaled_dot_product_attention` with a float `attn_mask`.

    Raises: `InvalidModArgument` for another type or rank; a bool tensor is a mask:
    `lambda b, h, q, kv: values[b, h, q, kv]`.
    """
    shapes = ("B", "H", "Sq", "Skv")
    table = tensor(values, "values", "float", shapes, shapes[1:], shapes[2:])
    shared = [surely(size == 1) for size in table.shape]

    def bias(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        where = (b, h, q, kv)[4 - table.ndim :]
        return score + table[tuple(0 if one else i for i, one in zip(where, shared, strict=True))]

    return Score.of(bias)


@ready
def scale_by_head(factors: torch.Tensor) -> Score:
    """A factor for each head: `score * factors[h]`; `factors` is a float tensor (H,), learned or not.

    Source: Henry et al. 2020, "Query-Key Normalization for Transformers" (a learned scale in place of 1/sqrt(D)),
    here one for each head.

    Raises: `InvalidModArgument` for another type or rank.
    """
    table = tensor(factors, "factors", "float", ("H",))
    return Score.of(lambda score, b, h, q, kv: score * table[h], name="scale_by_head")


@ready
def temperature(value: float | Scalar | torch.Tensor) -> Score:
    """A softmax that is sharper (below 1) or flatter (above 1): `score / value`.

    `value` is a number above 0, a `ca.scalar`, or a 0-d float tensor, which gets a gradient.

    Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2.

    Raises: `InvalidModArgument` for a value that is not a finite number above 0.
    """
    divisor = positive(value, "value")
    return Score.of(lambda score, b, h, q, kv: score / divisor, name=f"temperature({shown(value)})")
