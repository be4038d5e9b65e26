"""The facts of one call: shapes, dtype, device; checked once, frozen, holding no tensor."""

from __future__ import annotations

import dataclasses
import math

import torch

from . import errors


@dataclasses.dataclass(frozen=True)
class Problem:
    """q (batch, q_heads, q_len, head_dim), k (batch, kv_heads, kv_len, head_dim), v (..., kv_len, head_dim_v).

    `deterministic`: gradients are bitwise repeatable; None is as torch is set when they are computed.
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    deterministic: bool | None = None

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.q_heads // self.kv_heads

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    def flops(self, visible_pairs: int | None = None) -> int:
        """Floating-point operations of the forward over `visible_pairs` (q, kv) pairs, summed over batch and heads.

        Two products, a multiply and an add each. None: every pair.
        """
        pairs = self.batch * self.q_heads * self.q_len * self.kv_len if visible_pairs is None else visible_pairs
        return 2 * pairs * (self.head_dim + self.head_dim_v)

    @staticmethod
    def of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Problem:
        """The problem that q, k and v pose.

        Raises: `NotATensor`, `WrongRank`, `ShapeMismatch`, `GroupMismatch`, `EmptyDimension`, `DTypeMismatch`,
        `UnsupportedDType`, `DeviceMismatch`, `UnsupportedLayout`.
        """
        tensors = {"q": q, "k": k, "v": v}
        for name, t in tensors.items():
            if not isinstance(t, torch.Tensor):
                raise errors.NotATensor(f"{name} is a {type(t).__name__}; pass a torch.Tensor of shape (B, H, S, D)")
            if t.ndim != 4:
                raise errors.WrongRank(
                    f"{name} has shape {tuple(t.shape)}; it must be (B, H, S, D): "
                    + ("a (B, S, H, D) tensor passes as x.transpose(1, 2), uncopied" if t.ndim == 4 else
                       "x.unflatten or x.unsqueeze(0) adds what is missing")
                )  # fmt: skip
        _check_types(tensors)
        _check_shapes(q, k, v)
        batch, q_heads, q_len, head_dim = q.shape
        _, kv_heads, kv_len, head_dim_v = v.shape
        return Problem(batch, q_heads, kv_heads, q_len, kv_len, head_dim, head_dim_v, q.dtype, q.device)


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check_types(tensors: dict[str, torch.Tensor]) -> None:
    dtypes = {name: t.dtype for name, t in tensors.items()}
    if len(set(dtypes.values())) > 1:
        raise errors.DTypeMismatch(f"q, k and v must have one dtype, got {dtypes}; cast two of them")
    dtype = dtypes["q"]
    if dtype not in _DTYPES:
        raise errors.UnsupportedDType(f"q, k and v are {dtype}; attention takes {', '.join(map(str, _DTYPES))}")
    devices = {name: str(t.device) for name, t in tensors.items()}
    if len(set(devices.values())) > 1:
        raise errors.DeviceMismatch(f"q, k and v must lie on one device, got {devices}; move two of them with .to()")
    for name, t in tensors.items():
        if t.layout is not torch.strided or t.is_quantized:
            raise errors.UnsupportedLayout(f"{name} is {t.layout}; pass a dense tensor: {name}.to_dense()")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.shape[0] != k.shape[0] or k.shape[0] != v.shape[0]:
        raise errors.ShapeMismatch(f"q, k, v must have one batch size, got {shapes}; .expand({q.shape[0]}, ...) shares")
    if k.shape[1] != v.shape[1]:
        raise errors.ShapeMismatch(f"k and v must have the same number of heads, got {shapes}")
    if k.shape[2] != v.shape[2]:
        raise errors.ShapeMismatch(f"k and v must have the same length, got {shapes}")
    if q.shape[3] != k.shape[3]:
        raise errors.ShapeMismatch(f"q and k must have the same head dimension, got {shapes}")
    for name, t in (("q", q), ("k", k), ("v", v)):
        for dim, size in enumerate(t.shape):
            # no queries or no keys are ordinary: the output is empty, or all rows see nothing
            if size == 0 and dim != 2:
                raise errors.EmptyDimension(f"{name} has shape {tuple(t.shape)}; only the length may be zero")
    if q.shape[1] % k.shape[1]:
        raise errors.GroupMismatch(
            f"{q.shape[1]} query heads can't share {k.shape[1]} key/value heads evenly; "
            "the number of query heads must be a multiple (GQA), or both the same (MHA)"
        )


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """`scale`, by default 1/sqrt(head_dim). Raises `InvalidScale` unless it is a finite Python number."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise errors.InvalidScale(
            f"scale is a {type(scale).__name__}; pass a Python number, or a learned scale as mods.scores.temperature"
        )
    if not math.isfinite(scale):
        raise errors.InvalidScale(f"scale is {scale}; it must be finite")
    return float(scale)
