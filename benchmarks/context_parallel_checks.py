"""Context parallel held to one GPU on the ranks of a run: errors, the same bits twice, what a rank that fails does."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import composattn as ca
from benchmarks.context_parallel_cases import Case, apart, here, in_rows, settle
from composattn.mods import causal

T = torch.Tensor
TOLERANCE = 1e-2  # of a relative norm in bf16
TIMEOUT = 6.0


@dataclass(frozen=True)
class Check:
    """A call: a mask, rows for each rank, how ranks share it, and whether a learned bias is read.

    deterministic: the same bits are asked for; else they are only written down.
    """

    mask: str
    rows_a_rank: int
    bias: bool = False
    deterministic: bool = True
    options: dict[str, Any] = field(default_factory=dict)


CHECKS = (
    Check("documents", 2048, bias=True, options={"parts": 2}),
    Check("causal", 2048, options={"method": "exchange", "parts": 1}),
    Check("causal", 2368, deterministic=False, options={"parts": 3, "method": "exchange", "keep_fetched": False}),
    Check("window", 2368, options={"parts": 2}),
    Check("documents", 2368, options={"method": "gather"}),
    Check("causal", 2048, bias=True, deterministic=False, options={"method": "heads"}),
)


def biased(check: Check) -> tuple[list[T], Any]:
    """What is learned, and the score mod that reads it."""
    if not check.bias:
        return [], None
    generator = torch.Generator(here()).manual_seed(2)
    bias = torch.randn(8, 2 * 32768, generator=generator, device=here()).requires_grad_()
    return [bias], lambda score, b, h, q, kv: score + bias[h, q - kv]


def results(check: Check, cp: ca.ContextParallel | None, ranks: int) -> tuple[list[T], Any]:
    """out, gradients of q, k and v, and of the bias; of one GPU where there is no context parallel."""
    case = Case(check.mask, check.rows_a_rank * ranks, 8, 4)
    learned, score = biased(check)
    attn = ca.Attention(mask_mod=case.mask_of(here()), score_mod=score, deterministic=check.deterministic)
    shard = None if cp is None else cp.plan(attn, case.seq_len)
    tensors = case.tensors(here()) if shard is None else [shard.scatter(t, 2) for t in case.tensors(here())]
    q, k, v, grad = map(in_rows, tensors)
    inputs = [*(t.requires_grad_() for t in (q, k, v)), *learned]
    out = attn(q, k, v, context_parallel=shard)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)], shard


def compiled(ranks: int, check: Check) -> None:
    """Makes the kernels of one GPU and of a rank, on drawn numbers."""
    results(check, None, ranks)
    results(check, apart(1, ranks, **check.options), ranks)


def held(run: Any, check: Check) -> dict[str, Any]:
    """A row: the relative errors of this rank's rows, whether bits are the same twice, and whether all ranks agree."""
    run.at(f"check {check}")
    row: dict[str, Any] = {
        "check": check.mask, "seq_len": check.rows_a_rank * run.size, "bias": check.bias,
        "deterministic": check.deterministic, **check.options,
    }  # fmt: skip
    try:
        wanted, _ = results(check, None, run.size)
        cp = ca.ContextParallel(dist.group.WORLD, **check.options)
        (found, shard), (again, _) = (results(check, cp, run.size) for _ in range(2))
        row["same_bits"] = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        wanted = [shard.scatter(t, 2) for t in wanted[:4]] + wanted[4:]
        row["errors"] = [
            float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, wanted, strict=True)
        ]
        row["ok"] = max(row["errors"]) < TOLERANCE and (row["same_bits"] or not check.deterministic)
    except Exception as error:
        row |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:600]}
        run.at(traceback.format_exc())
    said: list[Any] = [None] * run.size
    dist.all_gather_object(said, row["ok"])
    return row | {"ok_on": said, "ok_on_all": all(said)}


def one_fails(run: Any) -> None:
    """The last thing of a run: one rank leaves, and the others must hear of it by name, in time."""
    run.at("one rank fails")
    attn = ca.Attention(mask_mod=causal())
    cp = ca.ContextParallel(dist.group.WORLD, timeout=TIMEOUT)
    case = Case("causal", 2048 * run.size, 8, 4)
    shard = cp.plan(attn, case.seq_len)
    q, k, v = (shard.scatter(t, 2) for t in case.tensors(here())[:3])
    attn(q, k, v, context_parallel=shard)
    dist.barrier()
    begin = time.perf_counter()
    said = "nothing was raised"
    if run.rank == run.size - 1:
        time.sleep(2 * TIMEOUT)
        return
    try:
        attn(q, k, v, context_parallel=shard)
        settle()
    except Exception as error:
        said = type(error).__name__
    seconds = time.perf_counter() - begin
    ok = said == "RankUnreachable" and seconds < 3 * TIMEOUT
    run.write({"check": "one rank fails", "raised": said, "seconds": seconds, "ok_on_all": ok})
