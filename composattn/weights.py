"""Attention weights of chosen rows, dense: for pictures and debugging, where the kernels form none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import errors
from .analysis.derived import refresh
from .analysis.program import Program
from .call.autograd import without_autocast
from .call.problem import Problem, softmax_scale
from .dispatch.captured import check_captures
from .graph.dynamo import is_traced
from .graph.evaluate import Env, evaluate
from .graph.least_score import LEAST_SCORE
from .mods.mask import Mask
from .mods.mod import Mod
from .mods.score import Score
from .mods.sink import Sink

_WIDENED = (torch.uint16, torch.uint32, torch.uint64)  # of which torch finds no least one


def attention_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    rows: torch.Tensor | Sequence[int],
    *,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The weights that `attention` gives the keys, of these query rows: (B, Hq, len(rows), Skv), fp32, no gradient.

    q (B, Hq, Sq, D), k (B, Hkv, Skv, D); rows: positions of [0, Sq), (R,) integers. Other arguments as of `attention`.
    Dense: memory and time are those of R * Skv weights per head, in fp32 products. A row sums to 1, less what its sink
    takes, or to 0 where it sees nothing. Weights are those in front of dropout.

    Raises: `InvalidArgument` for rows outside of q, `UnsupportedTransform` where torch compiles one graph, and what
    `attention` raises.
    """
    if is_traced():
        raise errors.UnsupportedTransform(
            "attention_weights looks at rows, which no code does that torch compiles as one graph; call it outside"
        )
    problem = Problem.of(q, k, k)
    try:
        at = torch.as_tensor(rows, device=q.device)
        at = at.view(at.shape)  # a lazy parameter has none
        at = at.long() if at.dtype in _WIDENED else at
    except (TypeError, ValueError, RuntimeError) as error:
        raise errors.InvalidArgument(f"rows is {rows!r:.40}; pass positions, (R,) integers") from error
    if at.ndim != 1 or at.is_floating_point() or at.is_complex() or at.dtype is torch.bool:
        raise errors.InvalidArgument(f"rows is {at.dtype} of shape {tuple(at.shape)}; pass positions, (R,) integers")
    if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < problem.q_len:
        raise errors.InvalidArgument(f"rows reach from {int(at.min())} to {int(at.max())}, q has {problem.q_len}")
    given: tuple[tuple[type[Mod], Any], ...] = ((Score, score_mod), (Mask, mask_mod), (Sink, sinks))
    program = Program(*(None if mod is None else kind.of(mod).expr for kind, mod in given))
    check_captures(program, problem)
    with torch.no_grad():
        return without_autocast(q, _weights, program, q, k, at.long(), softmax_scale(scale, problem.head_dim))


def _weights(program: Program, q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, scale: float) -> torch.Tensor:
    working, device = torch.promote_types(q.dtype, torch.float32), q.device
    refresh(program.read_by_mods[0])
    grouped = q[:, :, rows].to(working).unflatten(1, (k.shape[1], -1))
    scores = (grouped @ k.to(working).mT.unsqueeze(2)).flatten(1, 2) * scale
    index: dict[str, torch.Tensor | int] = {
        "b": torch.arange(q.shape[0], device=device).view(-1, 1, 1, 1),
        "h": torch.arange(q.shape[1], device=device).view(-1, 1, 1),
        "q": rows.view(-1, 1), "kv": torch.arange(k.shape[2], device=device),
        "q_len": q.shape[2], "kv_len": k.shape[2],
    }  # fmt: skip
    scalars = {id(s): s.value for s in program.scalars}
    env = Env(index, scores, float_dtype=working, device=device, scalars=scalars, deciding={})
    if program.score is not None:
        scores = evaluate(program.score, env).to(working).expand(scores.shape)
    if program.mask is not None:
        scores = scores.masked_fill(~evaluate(program.mask, env), -torch.inf)
    if program.score is not None and scores.shape[-1]:
        scores = scores.masked_fill(scores.amax(-1, keepdim=True) < LEAST_SCORE, -torch.inf)
    if program.sink is not None:
        scores = torch.cat((scores, evaluate(program.sink, env).to(working).expand(*scores.shape[:-1], 1)), -1)
    unseen = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(unseen, 0.0).softmax(-1).masked_fill(unseen, 0.0)[..., : k.shape[2]].float()
