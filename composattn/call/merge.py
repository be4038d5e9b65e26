"""Results of calls on different keys made one, exactly and with gradients: by their LSE."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from ..errors import DeviceMismatch, DTypeMismatch, InvalidArgument, NotATensor, ShapeMismatch
from ..graph.expr import refuse_lazy


def merge_states(parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of all keys, from the (out, lse) of calls on some of them each: `ca.attention(..., return_lse=True)`.

        out, lse = ca.merge_states([local, remote, sink_tokens])

    parts: at least one, of one shape, dtype and device: out (B, H, S, Dv) and lse (B, H, S), or packed out (total, H,
    Dv) and lse (H, total). No key may be in two of them, nor sinks. out comes back in its dtype, lse in its own.

    A part weighs exp(lse) of the sum of all exp(lse), each weight computed by itself and never as what others leave of
    1, so that a light part keeps its digits. Sums run in lse's dtype. A row that a part sees nothing of (lse -inf)
    weighs 0 there, and what out holds of it is not read; one of which no part sees anything gives out 0, lse -inf, zero
    gradients. A row whose lse is NaN or +inf in any part is NaN.

    Differentiable through both results, any number of times, forward mode and torch.compile included.

    Source: Dao et al. 2023, Flash-Decoding; Ye et al. 2025, FlashInfer, section 2.2.

    Raises: `InvalidArgument` for no part, `NotATensor`, `ShapeMismatch`, `DTypeMismatch`, `DeviceMismatch`,
    `UnsupportedLayout` of a lazy parameter.
    """
    try:
        pairs = [tuple(part) for part in parts]
    except (TypeError, ValueError):
        kind = type(parts).__name__
        raise InvalidArgument(f"parts is a {kind}; give a list of (out, lse), one of each part") from None
    outs, lses = _checked(pairs)
    weights, lse = merge_weights(lses)
    merged: torch.Tensor | None = None
    for out, weight, own in zip(outs, weights, lses, strict=True):
        if out.ndim == 3:
            weight, own = weight.transpose(0, 1), own.transpose(0, 1)
        seen = out.masked_fill((own == -math.inf).unsqueeze(-1), 0.0)
        term = seen.to(weight.dtype) * weight.unsqueeze(-1)
        merged = term if merged is None else merged + term
    assert merged is not None
    return merged.to(outs[0].dtype), lse


def merge_weights(lses: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """How much of each row each part is, 0 where no part sees anything, and the LSE of all; all of one shape."""
    top = lses[0].detach()
    for lse in lses[1:]:
        top = torch.maximum(top, lse.detach())
    none = top == -math.inf
    top = top.masked_fill(none, 0.0)
    shares = [torch.exp(lse - top) for lse in lses]
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    total = total.masked_fill(none, 1.0)
    return [share / total for share in shares], (top + total.log()).masked_fill(none, -math.inf)


def _check_alike(name: str, of: list[torch.Tensor]) -> None:
    """Whether all parts have one floating-point dtype, and lie on one device."""
    for tensor in of:
        refuse_lazy(f"{name} of a part", tensor)
    dtypes, devices = {t.dtype for t in of}, {t.device for t in of}
    if len(dtypes) > 1 or not of[0].is_floating_point() or of[0].dtype.itemsize == 1:
        raise DTypeMismatch(
            f"{name} is {', '.join(map(str, dtypes))}; parts have one floating-point dtype of 16 bits or more"
        )
    if len(devices) > 1:
        raise DeviceMismatch(f"{name} lies on {', '.join(map(str, devices))}; move the parts to one device with .to()")


def _checked(parts: list[tuple[torch.Tensor, ...]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    if not parts:
        raise InvalidArgument("there is no part to merge; give at least one (out, lse)")
    for part in parts:
        if len(part) != 2 or not all(isinstance(t, torch.Tensor) for t in part):
            kinds = ", ".join(type(t).__name__ for t in part)
            raise NotATensor(f"a part is ({kinds}); give (out, lse), what ca.attention(..., return_lse=True) returns")
    outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
    _check_alike("out", outs)
    _check_alike("lse", lses)
    shape = outs[0].shape
    rows = {3: (shape[1], shape[0]), 4: shape[:3]}.get(len(shape)) if len(shape) > 1 else None
    if any(out.shape != shape or lse.shape != rows for out, lse in parts):
        raise ShapeMismatch(
            f"parts have out {[tuple(o.shape) for o in outs]} and lse {[tuple(s.shape) for s in lses]}; all must be "
            "alike: (B, H, S, Dv) and (B, H, S), or packed (total, H, Dv) and (H, total)"
        )
    return outs, lses
