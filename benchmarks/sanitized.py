"""One small call of every kind of generated kernel, forward and backward: what compute-sanitizer watches.

    compute-sanitizer --tool memcheck python -m benchmarks.sanitized
    compute-sanitizer --tool racecheck python -m benchmarks.sanitized

Compile first by a run without the sanitizer: under it the compiler is slow. Results are held to the reference.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch

import composattn as ca
from composattn.mods import alibi, causal, document, sliding_window

Made = tuple[torch.Tensor, ...]


def qkv(batch: int, q_len: int, kv_len: int, dim: int, heads: int = 4, kv_heads: int = 2, v_dim: int = 0) -> Made:
    def tensor(count: int, length: int, width: int) -> torch.Tensor:
        return torch.randn(batch, count, length, width, device="cuda", dtype=torch.bfloat16)

    return tensor(heads, q_len, dim), tensor(kv_heads, kv_len, dim), tensor(kv_heads, kv_len, v_dim or dim)


def calls() -> Iterator[tuple[str, Callable[..., Any], Made, tuple[torch.Tensor, ...]]]:
    """(name, a call that takes a backend, q, k and v, captured tensors with a gradient)."""
    slopes = torch.rand(4, device="cuda", requires_grad=True)
    table = torch.randn(4, 800, device="cuda", requires_grad=True)
    ids = torch.arange(400, device="cuda") // 90

    def dense(**options: Any) -> Callable[..., Any]:
        return lambda q, k, v, backend: ca.attention(q, k, v, backend=backend, **options)

    for dim, v_dim in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        yield f"causal, D {dim}/{v_dim}", dense(mask_mod=causal()), qkv(1, 333, 333, dim, v_dim=v_dim), ()
    yield "causal, a fixed order", dense(mask_mod=causal(), deterministic=True), qkv(1, 333, 333, 128), ()
    yield "ALiBi with its gradient", dense(score_mod=alibi(slopes), mask_mod=causal()), qkv(1, 300, 300, 64), (slopes,)
    relative = dense(score_mod=lambda s, b, h, q, kv: s + table[h, q - kv + 400])
    yield "a table by distance with its gradient", relative, qkv(1, 400, 400, 64), (table,)
    yield "documents, a window", dense(mask_mod=document(ids) & sliding_window(70)), qkv(1, 400, 400, 128), ()
    holes = dense(mask_mod=lambda b, h, q, kv: ((q // 128) + (kv // 128)) % 2 == 0)
    yield "lists of tiles", holes, qkv(1, 700, 700, 128), ()
    starts = torch.tensor([0, 130, 131, 400], dtype=torch.int32, device="cuda")
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in qkv(1, 400, 400, 128))
    varlen = ca.Varlen(starts, max_seqlen_q=270, max_seqlen_k=270)
    yield "packed sequences", dense(mask_mod=causal(), varlen=varlen), (q, k, v), ()


def decoding() -> Iterator[tuple[str, Callable[..., Any], Made]]:
    """Calls that have no gradient."""
    yield (
        "one query, keys in parts",
        lambda q, k, v, backend: ca.attention(q, k, v, backend=backend),
        qkv(1, 1, 3000, 128, 8, 2),
    )
    table = torch.randperm(12, device="cuda").view(2, 6).int()
    paged = ca.Paged(table, 64, torch.tensor([301, 384], dtype=torch.int32, device="cuda"))
    q, k, v = qkv(2, 5, 12 * 64, 128, 8, 2)
    pages = [t[0].unflatten(1, (12, 64)).transpose(0, 1) for t in (k, v)]
    yield (
        "keys in pages",
        lambda q, k, v, backend: ca.attention(q, k, v, mask_mod=causal(), paged=paged, backend=backend),
        (q, *pages),
    )


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within bf16's rounding of values of this size, which is enough to see a race."""
    return bool(((found.double() - wanted.double()).abs() <= 0.05 + 0.05 * wanted.double().abs()).all())


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    wrong = 0
    for name, call, tensors, learned in calls():
        leaves = (*(t.requires_grad_() for t in tensors), *learned)
        found: list[torch.Tensor] = []
        wanted: list[torch.Tensor] = []
        for backend, kept in (("hopper", found), ("reference", wanted)):
            out = call(*tensors, backend)
            grad = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out).to(out.dtype)
            kept += [out, *torch.autograd.grad(out, leaves, grad)]
        right = all(close(a, b) for a, b in zip(found, wanted, strict=True))
        wrong += not right
        print(f"{name}: {'right' if right else 'WRONG'}", flush=True)
    for name, call, tensors in decoding():
        right = close(call(*tensors, "hopper"), call(*tensors, "reference"))
        wrong += not right
        print(f"{name}: {'right' if right else 'WRONG'}", flush=True)
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
