"""Calls with 16-bit queries beside keys and values of 8 bits, and the same kernels' calls on 16-bit ones."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

import composattn as ca
from composattn.backends.fused.tiles.architecture import ARCHITECTURES
from composattn.backends.fused.tiles.tiling import Chosen
from composattn.backends.hopper.tiling import ByteTiling, HopperTiling
from composattn.backends.hopper.wide_tiling import WideByteTiling, WideTiling
from composattn.call.problem import Problem
from composattn.call.schedule import Schedule
from composattn.dispatch import plan_cache
from composattn.mods import alibi, causal, document, sliding_window, softcap
from composattn.testing import Case, make_case, make_paged_case, make_varlen_case

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def power_of_two(*shape: int) -> torch.Tensor:
    return 2.0 ** torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(1))


def negated(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score * -0.5


def of_bytes(case: Case, kind: torch.dtype = E4M3, k_scale: Any = None, v_scale: Any = None) -> Case:
    """The case with k and v of 8 bits; what pages hold beyond a sequence stays NaN."""
    k, v = (x.float().to(kind) for x in (case.k, case.v))
    scales = [s.to(case.q.device) if isinstance(s, torch.Tensor) else s for s in (k_scale, v_scale)]
    return dataclasses.replace(case, k=k, v=v, scales=(None, *scales), dout=None, dlse=None)


def cases(n: int, device: str) -> dict[str, Callable[[], tuple[Case, dict[str, Any]]]]:
    """By name a call and its options: some `n` queries and keys where there are many."""
    how: dict[str, Any] = {"heads": 4, "kv_heads": 2, "device": device}
    bf16, fp16 = {**how, "dtype": torch.bfloat16}, {**how, "dtype": torch.float16}
    many = {**bf16, "heads": 32, "kv_heads": 1}
    of_32_heads = {**many, "dtype": torch.float16}

    def of_seventy() -> torch.Tensor:
        return (torch.arange(n) // 70).to(device)

    def dense(q_len: int, dim: int, kind: torch.dtype = E4M3, of: Any = bf16, scales: Any = (), **more: Any) -> Case:
        made = make_case(5, batch=2, q_len=q_len, kv_len=n, dim=dim, **more, **of)
        return of_bytes(made, kind, *(power_of_two(*shape) for shape in scales))

    def paged(lengths: list[int], size: int, **more: Any) -> Case:
        made = make_paged_case(7, lengths, page_size=size, dim=64, **more, **bf16)
        return of_bytes(made, E4M3, *(power_of_two(*made.k.shape[:3], 1) for _ in range(2)))

    last, packed = {"mask_mod": causal("bottom_right")}, (n // 2, 0, 33)
    return {
        "one query, D 128": lambda: (dense(1, 128, scales=((2, 2), (2, 2))), {}),
        "one tile of keys": lambda: (of_bytes(make_case(5, batch=3, q_len=1, kv_len=60, dim=128, **bf16)), {}),
        "one query, D 64, e5m2, scales of rows": lambda: (dense(1, 64, E5M2, scales=((2, 2, n, 1),) * 2), {}),
        "one query, fp16, scales of channels": lambda: (dense(1, 128, of=fp16, scales=((), (2, 2, 1, 128))), {}),
        "parts of kv, fp16, e5m2": lambda: (dense(3, 128, E5M2, fp16, **last), {"schedule": Schedule(split_kv=3)}),
        "a batch-invariant query": lambda: (dense(2, 128, **last), {"schedule": Schedule(batch_invariant=True)}),
        "D 256": lambda: (dense(5, 256, **last), {}),
        "D 576 and 512": lambda: (dense(2, 576, v_dim=512, scales=((), (2, 2)), **last), {}),
        "parts of kv, D 576 and 512": lambda: (
            dense(2, 576, v_dim=512, scales=((), (2, 2)), **last),
            {"schedule": Schedule(split_kv=2)},
        ),
        "D 320, scales of rows, e5m2": lambda: (dense(5, 320, E5M2, scales=((2, 2, n, 1),) * 2, **last), {}),
        "D 272 and 16, many rows": lambda: (dense(40, 272, v_dim=16, **last), {}),
        "pages, D 384, 32 heads, fp16": lambda: (of_bytes(make_paged_case(7, [n, 17, 0], dim=384, **of_32_heads)), {}),
        "causal, D 128": lambda: (dense(n, 128, scales=((2, 2), (2, 2)), mask_mod=causal()), {}),
        "scales of rows, D 128": lambda: (dense(n, 128, scales=((2, 2, n, 1),) * 2, mask_mod=causal()), {}),
        "many rows of a key, scales of rows": lambda: (dense(70, 128, of=many, scales=((2, 1, n, 1),) * 2), {}),
        "alibi, D 96": lambda: (dense(n, 96, score_mod=alibi(4), mask_mod=causal()), {}),
        "a soft cap, D 192 and 128": lambda: (dense(n, 192, E5M2, v_dim=128, score_mod=softcap(5.0)), {}),
        "scales, and a factor below 0": lambda: (dense(40, 64, scales=((2, 2),) * 2, score_mod=negated), {}),
        "a window, D 64": lambda: (dense(n, 64, mask_mod=causal() & sliding_window(100)), {}),
        "documents, D 128": lambda: (dense(n, 128, mask_mod=document(of_seventy()) & causal()), {}),
        "blocks that stay": lambda: (dense(n, 128, mask_mod=causal()), {"schedule": Schedule(persistent=True)}),
        "packed": lambda: (of_bytes(make_varlen_case(6, packed, dim=128, mask_mod=causal(), **bf16)), {}),
        "pages": lambda: (paged([n, 17, 0], 16), {}),
        "packed queries, larger pages": lambda: (paged([n, 17, 3], 128, q_lens=(9, 1, 2), mask_mod=causal()), {}),
    }


@contextlib.contextmanager
def tiles_of_bytes() -> Iterator[None]:
    """Inside, Hopper's calls of 16 bits have the tiles of the call before them, that with k and v of 8 bits.

    Those multiply in q's type, however few its rows are. Kept plans are neither taken from outside nor left there.
    """
    hopper, chosen = ARCHITECTURES["hopper"], []

    def choose(problem: Problem, *others: Any) -> Any:
        if problem.narrow is not None:
            tiling = hopper.forward(problem, *others).tiling
            in_own_type = {"scales_queries": False} if isinstance(tiling, (ByteTiling, WideByteTiling)) else {}
            chosen.append(dataclasses.replace(tiling, **in_own_type))
            return Chosen(chosen[-1], "")
        if not chosen:  # many queries: 8 bits are widened before the kernel, which takes 16
            chosen.append(hopper.forward(problem, *others).tiling)
        of_bytes = chosen[-1]
        kind = HopperTiling if isinstance(of_bytes, HopperTiling) else WideTiling
        fields = {f.name: getattr(of_bytes, f.name) for f in dataclasses.fields(kind)}
        if isinstance(of_bytes, WideByteTiling):  # a stage of 16 bits has the room of two
            fields["stages"] //= 2
        return Chosen(kind(**fields), "")

    _forget_plans()
    ARCHITECTURES["hopper"] = dataclasses.replace(hopper, forward=choose)
    try:
        yield
    finally:
        ARCHITECTURES["hopper"] = hopper
        _forget_plans()


def _forget_plans() -> None:
    for key in list(plan_cache._plans):
        plan_cache.forget(key)


def both(case: Case, backend: str, **options: Any) -> tuple[Any, Any]:
    """(out, lse) of the case, and of the same kernel on 16-bit numbers.

    These are what is dequantised where k has a scale of each head, which are powers of two; else its bytes, by scales
    as score mods.
    """
    k_scale = case.scales[1]
    of_heads = not isinstance(k_scale, torch.Tensor) or k_scale.ndim < 3
    k = ca.Quantized(case.k, k_scale if of_heads else None).dequantised(case.q.dtype)
    v = ca.Quantized(case.v, case.scales[2]).dequantised(case.q.dtype)
    of_16_bits = case.score_mod if of_heads else case.wide.score_mod
    given = {"varlen": case.varlen, "paged": case.paged, "return_lse": True}
    with tiles_of_bytes():
        attend, again = (
            ca.Attention(score_mod=score, mask_mod=case.mask_mod, backend=backend, **options)
            for score in (case.score_mod, of_16_bits)
        )
        found = attend(case.q, case.k, case.v, k_scale=case.scales[1], v_scale=case.scales[2], **given)
        return found, again(case.q, k, v, **given)
