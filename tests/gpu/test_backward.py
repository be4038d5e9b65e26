"""The fused backward on a GPU against fp64: dQ, dK, dV and captured gradients, for every kind of mod and shape.

The bar is the DESIGN rule: at most twice the error of the same computation in plain PyTorch at the same precision,
plus the rounding of the output type, of the parts of a sum where they cancel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.backends import reference
from composattn.mods.mask import Mask
from composattn.mods.score import Score
from tests.support import gpu_backend, needs_backward, outlier_normal, poison_cuda_memory, uncancelled_sizes

BACKEND = gpu_backend()
LENGTH = 700  # longest in the cases below: tables are made for it


@pytest.fixture(autouse=True)
def backward() -> None:
    needs_backward(BACKEND)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    q_len: int = 300
    kv_len: int = 300
    d: int = 128
    dv: int = 128
    dtype: torch.dtype = torch.bfloat16


SHAPES = {
    "d128": Shape(),
    "d64": Shape(d=64, dv=64),
    "d32-fp16": Shape(d=32, dv=32, dtype=torch.float16),
    "d96": Shape(d=96, dv=96),
    "d80-dv128": Shape(d=80, dv=128),
    "d64-dv128": Shape(d=64, dv=128),
    "d256": Shape(d=256, dv=256),
    "d192-dv128-gqa2": Shape(kv_heads=2, d=192, dv=128),
    "gqa4": Shape(kv_heads=1),
    "gqa8": Shape(heads=8, kv_heads=1),
    "gqa6-d96": Shape(heads=12, kv_heads=2, d=96, dv=96),
    "gqa2-d64-fp16": Shape(kv_heads=2, d=64, dv=64, dtype=torch.float16),
    "ragged": Shape(q_len=129, kv_len=523),
    "more-queries": Shape(q_len=577, kv_len=65),
    "one-query": Shape(q_len=1, kv_len=700),
    "one-key": Shape(q_len=333, kv_len=1),
}

ScoreMod = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Mods:
    """A mask and a score mod over captured tensors made for the call."""

    score: Callable[[dict[str, torch.Tensor]], ScoreMod] | None = None
    mask: Callable[[dict[str, torch.Tensor]], ScoreMod] | None = None


def causal(t: dict[str, torch.Tensor]) -> ScoreMod:
    return lambda b, h, q, kv: q >= kv


MODS = {
    "plain": Mods(),
    "causal": Mods(mask=causal),
    "causal-and-odd": Mods(mask=lambda t: lambda b, h, q, kv: (q >= kv) & ((q + kv) % 3 != 1)),
    "window": Mods(mask=lambda t: lambda b, h, q, kv: (q >= kv) & (q - kv < 70)),
    "document": Mods(mask=lambda t: lambda b, h, q, kv: t["document"][q] == t["document"][kv]),
    "alibi-causal": Mods(lambda t: lambda s, b, h, q, kv: s - t["slopes"][h] * (q - kv), causal),
    "softcap-causal": Mods(lambda t: lambda s, b, h, q, kv: 20.0 * torch.tanh(s / 20.0), causal),
    "relative": Mods(lambda t: lambda s, b, h, q, kv: s + t["relative"][h, q - kv + LENGTH]),
    "relative-softcap-window": Mods(
        lambda t: lambda s, b, h, q, kv: 15.0 * torch.tanh((s + t["relative"][h, q - kv + LENGTH]) / 15.0),
        lambda t: lambda b, h, q, kv: (q >= kv) & (q - kv < 130),
    ),
    "read-twice": Mods(
        lambda t: lambda s, b, h, q, kv: s * t["gain"][h] + t["gain"][h] * t["row"][q] * t["column"][kv]
    ),
    "log-distance": Mods(
        lambda t: lambda s, b, h, q, kv: s - torch.log((q - kv).abs().float() + 1.0) * t["slopes"][h], causal
    ),
}


def tables(shape: Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).cuda().requires_grad_()

    ends = torch.randint(1, LENGTH, (5,), generator=generator).sort().values
    return {
        "slopes": torch.rand(shape.heads, generator=generator).cuda().requires_grad_(),
        "relative": normal(shape.heads, 2 * LENGTH + 1),
        "gain": normal(shape.heads),
        "row": normal(LENGTH),
        "column": normal(LENGTH),
        "document": torch.bucketize(torch.arange(LENGTH), ends, right=True).cuda(),
    }


def gradients(
    out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor, wrt: list[torch.Tensor]
) -> list[torch.Tensor]:
    loss = (out * dout.to(out.dtype)).sum() + torch.where(lse == -math.inf, 0.0, lse * dlse.to(lse.dtype)).sum()
    found = torch.autograd.grad(loss, wrt, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(w) if g is None else g for g, w in zip(found, wrt, strict=True)]


def plain_gradients(
    leaves: list[torch.Tensor],
    mods: tuple[ScoreMod | None, ScoreMod | None],
    scale: float,
    dout: torch.Tensor,
    dlse: torch.Tensor,
    captured: list[torch.Tensor],
) -> list[torch.Tensor]:
    """The fused computation in plain PyTorch at the inputs' precision.

    P and dS rounded as operands of tensor cores are, D = rowsum(dO·O) - dLSE of the rounded O: its error, the same in
    a whole row, is what a sum over rows with large weights (a slope's, of distances) is left with.
    """
    q, k, v = leaves
    (score, mask), dout, group = mods, dout.to(q.dtype), q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    raw = ((q @ wide_k.mT).float() * scale).requires_grad_()
    b, h, qi, ki = torch.meshgrid(*(torch.arange(n, device=q.device) for n in raw.shape), indexing="ij")
    s = raw if score is None else score(raw, b, h, qi, ki)
    seen = torch.ones_like(b, dtype=torch.bool) if mask is None else mask(b, h, qi, ki).expand_as(b)
    hidden = s.detach().masked_fill(~seen, -math.inf)
    lse = hidden.logsumexp(-1)
    p = torch.exp(hidden - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    out = p.to(v.dtype) @ wide_v
    delta = (dout.float() * out.float()).sum(-1) - torch.where(lse == -math.inf, 0.0, dlse)
    ds = p * ((dout @ wide_v.mT).float() - delta.unsqueeze(-1))
    found = torch.autograd.grad(s, [raw, *captured], ds, allow_unused=True)
    draw = found[0].masked_fill(~seen, 0.0).to(q.dtype)
    dk, dv = draw.mT @ q * scale, p.to(v.dtype).mT @ dout
    grads = [draw @ wide_k * scale, *(g.unflatten(1, (-1, group)).sum(2) for g in (dk, dv))]
    return grads + [torch.zeros_like(t) if g is None else g for g, t in zip(found[1:], captured, strict=True)]


@pytest.mark.parametrize("mods", MODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_match_fp64(shape: str, mods: str, generator: torch.Generator) -> None:
    s, m = SHAPES[shape], MODS[mods]

    def draw(heads: int, length: int, d: int) -> torch.Tensor:
        return outlier_normal(s.batch, heads, length, d, generator=generator, dtype=s.dtype, device="cuda")

    q, k, v = draw(s.heads, s.q_len, s.d), draw(s.kv_heads, s.kv_len, s.d), draw(s.kv_heads, s.kv_len, s.dv)
    dout = draw(s.heads, s.q_len, s.dv)
    dlse = torch.randn(s.batch, s.heads, s.q_len, generator=generator).cuda()
    captured = tables(s, generator)
    score = None if m.score is None else m.score(captured)
    mask = None if m.mask is None else m.mask(captured)
    floats = [t for t in captured.values() if t.requires_grad]
    scale = s.d**-0.5

    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    poison_cuda_memory()
    out, lse = ca.attention(*leaves, score_mod=score, mask_mod=mask, return_lse=True, backend=BACKEND)
    ours = gradients(out, lse, dout, dlse, leaves + floats)

    exact_leaves = [t.double().requires_grad_() for t in (q, k, v)]
    exact_out, exact_lse = reference.attention(
        *exact_leaves,
        score=None if score is None else Score.of(score).expr,
        mask=None if mask is None else Mask.of(mask).expr,
        scale=scale,
    )
    exact = gradients(exact_out, exact_lse, dout.double(), dlse.double(), exact_leaves + floats)
    sizes = uncancelled_sizes(
        lambda signs: gradients(exact_out, exact_lse, dout * signs[..., None], dlse * signs, exact_leaves + floats),
        dlse,
        generator,
    )

    plain = plain_gradients([q, k, v], (score, mask), scale, dout, dlse, floats)

    rounding = torch.finfo(s.dtype).eps
    names = ["dq", "dk", "dv", *(n for n, t in captured.items() if t.requires_grad)]
    for name, got, want, other, size in zip(names, ours, exact, plain, sizes, strict=True):
        want = want.double()
        assert torch.isfinite(got).all(), name
        error, allowed = (got.double() - want).norm(), 2 * (other.nan_to_num().double() - want).norm() + rounding * size
        assert error <= allowed + 1e-6, f"{name}: error {error:.2e}, allowed {allowed:.2e}, size {size:.2e}"


def test_fully_masked_rows_give_zero_gradients(generator: torch.Generator) -> None:
    q, k, v = (torch.randn(1, 2, 200, 64, generator=generator).cuda().bfloat16().requires_grad_() for _ in range(3))
    out, lse = ca.attention(
        q, k, v, mask_mod=lambda b, h, q, kv: (q >= 100) & (kv < 50), return_lse=True, backend=BACKEND
    )
    dq, dk, dv = torch.autograd.grad([out, lse], (q, k, v), [torch.randn_like(out), torch.randn_like(lse)])
    assert (dq[:, :, :100] == 0).all() and (dk[:, :, 50:] == 0).all() and (dv[:, :, 50:] == 0).all()
    assert (dq[:, :, 100:] != 0).any()


@pytest.mark.parametrize("form", ["transposed", "expanded", "sliced"])
def test_any_strides_of_the_incoming_gradient(form: str, generator: torch.Generator) -> None:
    q, k, v = (torch.randn(2, 2, 150, 64, generator=generator).cuda().bfloat16().requires_grad_() for _ in range(3))
    base = torch.randn(2, 150, 2, 66, generator=generator).cuda().bfloat16()
    dout = {
        "transposed": base[..., :64].contiguous().transpose(1, 2),
        "expanded": base[:1, :1, :1, :1].expand(2, 2, 150, 64),
        "sliced": base[..., 1:65].transpose(1, 2),
    }[form]
    results = []
    for given in (dout, dout.contiguous()):
        out = ca.attention(q, k, v, backend=BACKEND)
        results.append(torch.autograd.grad(out, (q, k, v), given))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * float(b.abs().max()))  # dQ is summed in any order


def test_dk_and_dv_are_bitwise_repeatable(generator: torch.Generator) -> None:
    q, k, v = (torch.randn(2, 4, 1000, 128, generator=generator).cuda().bfloat16().requires_grad_() for _ in range(3))
    dout = torch.randn_like(q)
    first = torch.autograd.grad(ca.attention(q, k, v, mask_mod=ca.mods.causal(), backend=BACKEND), (k, v), dout)
    for _ in range(20):
        again = torch.autograd.grad(ca.attention(q, k, v, mask_mod=ca.mods.causal(), backend=BACKEND), (k, v), dout)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# dQ written by who comes first, or added to by all, in blocks that stay and that leave
@pytest.mark.parametrize(("causal", "length"), [(False, 1021), (True, 2039), (True, 12347), (True, 24601)])
@pytest.mark.parametrize("batch", [1, 2])
def test_long_calls_match_fp64_again_and_again(
    batch: int, causal: bool, length: int, generator: torch.Generator
) -> None:
    """Two key/value heads of four; fp64 of some queries, whose dO alone is not 0 in a second call."""
    q, k, v, dout = (
        torch.randn(batch, heads, length, 128, generator=generator).cuda().bfloat16() for heads in (4, 2, 2, 4)
    )
    rows = torch.arange(0, length, max(1, length // 97), device="cuda")
    some = torch.zeros_like(dout)
    some[:, :, rows] = dout[:, :, rows]

    exact = [t.double().requires_grad_() for t in (q[:, :, rows], k, v)]
    wide_k, wide_v = (t.repeat_interleave(2, 1) for t in exact[1:])
    scores = exact[0] @ wide_k.mT * 128**-0.5
    if causal:
        scores = scores.masked_fill(torch.arange(length, device="cuda") > rows[:, None], -math.inf)
    wanted = torch.autograd.grad(scores.softmax(-1) @ wide_v, exact, dout[:, :, rows].double())

    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = ca.attention(*leaves, mask_mod=ca.mods.causal() if causal else None, backend=BACKEND)
    first = None
    for _ in range(5):
        poison_cuda_memory()
        whole = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        found = torch.autograd.grad(out, leaves, some, retain_graph=True)
        for got, want in ((whole[0][:, :, rows], wanted[0]), (found[0][:, :, rows], wanted[0]),
                          (found[1], wanted[1]), (found[2], wanted[2])):  # fmt: skip
            assert (got.double() - want).norm() <= 2**-7 * want.norm()
        assert first is None or all(map(torch.equal, first, whole[1:]))
        first = whole[1:]


def test_claims_are_empty_in_each_replay_of_a_graph(generator: torch.Generator) -> None:
    q, k, v, dout = (torch.randn(2, 4, 1021, 128, generator=generator).cuda().bfloat16() for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = ca.attention(*leaves, backend=BACKEND)
        wanted = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(10):
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.02 * float(want.abs().max()))


@pytest.mark.parametrize("mods", ["plain", "causal", "window", "document", "relative-softcap-window"])
@pytest.mark.parametrize("shape", ["d128", "gqa2-d64-fp16", "d256"])
def test_deterministic_gradients_are_bitwise_repeatable(shape: str, mods: str, generator: torch.Generator) -> None:
    s, m = dataclasses.replace(SHAPES[shape], q_len=LENGTH, kv_len=LENGTH), MODS[mods]
    captured = {name: t.detach() for name, t in tables(s, generator).items()}
    attention = ca.Attention(
        score_mod=None if m.score is None else m.score(captured),
        mask_mod=None if m.mask is None else m.mask(captured),
        backend=BACKEND,
    )
    sizes = ((s.heads, s.d), (s.kv_heads, s.d), (s.kv_heads, s.dv))
    q, k, v = (
        torch.randn(s.batch, h, LENGTH, d, generator=generator).cuda().to(s.dtype).requires_grad_() for h, d in sizes
    )
    dout = torch.randn_like(q)
    by_default = torch.autograd.grad(attention(q, k, v), (q, k, v), dout)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(100):
            poison_cuda_memory()
            runs.append(torch.autograd.grad(attention(q, k, v), (q, k, v), dout))
    finally:
        torch.use_deterministic_algorithms(False)
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))
    for a, b in zip(runs[0], by_default, strict=True):
        assert (a - b).norm() <= torch.finfo(s.dtype).eps * b.norm()


def test_double_backward_is_refused_by_name(generator: torch.Generator) -> None:
    q, k, v = (torch.randn(1, 1, 64, 64, generator=generator).cuda().bfloat16().requires_grad_() for _ in range(3))
    out = ca.attention(q, k, v, backend=BACKEND)
    assert isinstance(out, torch.Tensor)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(ca.errors.GradientUnsupported, match="streaming"):
        torch.autograd.grad(dq.float().pow(2).sum(), q)
