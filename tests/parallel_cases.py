"""What ranks do in the tests of context parallel: cases against one device, and input that is refused."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import composattn as ca
from composattn.mods import causal, document, sliding_window
from composattn.testing.cases import draw_mask, draw_score
from composattn.testing.site import site_of

T = torch.Tensor
METHODS = ("exchange", "gather", "auto", "heads")


class Drawn:
    """A call on one device, drawn by a seed: tensors, mods, and what flows back."""

    def __init__(self, seed: int, ranks: int) -> None:
        choices = random.Random(seed)
        kv_heads = choices.choice((1, 2, ranks))
        heads = kv_heads * choices.choice((1, 2))
        rows = choices.choice((8, 12, 16, 24, 30))
        length = rows * ranks
        site = site_of(seed, choices.choice((1, 2)), heads, kv_heads, length, length, torch.float64, "cpu")
        self.batch, self.heads, self.length = site.batch, heads, length
        dim, width = 8, choices.choice((8, 16))
        self.mask = draw_mask(site) if choices.randint(0, 7) else None
        self.score = draw_score(site) if choices.randint(0, 1) else None
        self.q = site.normal(site.batch, heads, length, dim).double()
        self.k = site.normal(site.batch, kv_heads, length, dim).double()
        self.v = site.normal(site.batch, kv_heads, length, width).double()
        self.dout = site.normal(site.batch, heads, length, width).double()
        self.dlse = site.normal(site.batch, heads, length).double()
        methods = METHODS if kv_heads % ranks == 0 else METHODS[:3]
        self.sinks = site.normal(heads).double().requires_grad_() if choices.randint(0, 3) == 0 else None
        self.options = {
            "method": choices.choice(methods),
            "parts": choices.choice((None, 1, 2, 3)),
            "keep_fetched": bool(choices.randint(0, 1)),
        }
        self.name = f"seed {seed}: {self.mask}, {self.score}, {self.options}, {length} on {ranks}"

    @property
    def captured(self) -> list[T]:
        leaves = (*(() if self.score is None else self.score.leaves), self.sinks)
        return list({id(t): t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad}.values())

    def results(self, shard: Any = None) -> list[T]:
        """out, lse and gradients of q, k, v and captured tensors; of a rank's rows where there is a shard."""

        def mine(t: T) -> T:
            return t if shard is None else shard.scatter(t, 2)

        q, k, v = (mine(t).clone().requires_grad_() for t in (self.q, self.k, self.v))
        out, lse = ca.attention(
            q, k, v, score_mod=self.score, mask_mod=self.mask, sinks=self.sinks, return_lse=True, context_parallel=shard
        )
        lse = torch.where(lse == -torch.inf, 0.0, lse)
        inputs = [q, k, v, *self.captured]
        grads = torch.autograd.grad([out, lse], inputs, [mine(self.dout), mine(self.dlse)], allow_unused=True)
        return [out, lse, *(torch.zeros_like(t) if g is None else g for t, g in zip(inputs, grads, strict=True))]


def differences(rank: int, ranks: int, seeds: list[int]) -> list[tuple[str, float, bool]]:
    """For each seed its name, the largest difference from one device, and whether a second run gave the same bits."""
    found = []
    for seed in seeds:
        case = Drawn(seed, ranks)
        whole = case.results()
        cp = ca.ContextParallel(dist.group.WORLD, timeout=30, **case.options)
        shard = cp.plan(case.mask, case.length, batch=case.batch, heads=case.heads)
        once, twice = case.results(shard), case.results(shard)
        same = all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
        wanted = [shard.scatter(t, 2) for t in whole[:5]] + whole[5:]
        apart = max(float(((a - b).abs() / (1 + b.abs())).max()) for a, b in zip(once, wanted, strict=True))
        found.append((case.name, apart, same))
    return found


# --- one thing each ---------------------------------------------------------------------------------------------


def documents_of(length: int, count: int = 5) -> T:
    """Ids of documents of mixed lengths."""
    generator = torch.Generator().manual_seed(length)
    ends = (torch.rand(count, generator=generator).cumsum(0) / count * 2 * length).long().clamp(max=length)
    return torch.searchsorted(ends, torch.arange(length), right=True).int()


def tensors(length: int, heads: int = 2, kv_heads: int = 1, seed: int = 0) -> tuple[T, T, T]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(1, h, length, 8, generator=generator, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)
    )


def planned(mask: Any, length: int, **options: Any) -> tuple[ca.ContextParallel, Any]:
    cp = ca.ContextParallel(dist.group.WORLD, timeout=20, **options)
    return cp, cp.plan(mask, length)


def usage(rank: int, ranks: int) -> dict[str, Any]:
    """What a user does, once each; True or a number per promise."""
    length, found = 48 * ranks, {}
    q, k, v = tensors(length)
    mask = causal() & document(documents_of(length))
    whole = ca.Attention(mask_mod=mask)(q, k, v)
    cp, shard = planned(mask, length)
    mine = [shard.scatter(t, 2) for t in (q, k, v)]
    layer = ca.nn.Attention(mask_mod=mask)
    with cp:
        found["with"] = torch.allclose(ca.attention(*mine, mask_mod=mask), shard.scatter(whole, 2))
        found["module"] = torch.allclose(layer(*mine), shard.scatter(whole, 2))
        top = ca.attention(*mine, mask_mod=mask, return_max_scores=True)[1]
    found["max scores"] = torch.allclose(
        top, shard.scatter(ca.attention(q, k, v, mask_mod=mask, return_max_scores=True)[1], 2)
    )
    found["outside"] = ca.attention(*mine).shape == mine[0].shape
    hidden = torch.arange(length * 3.0).view(1, length, 3).requires_grad_()
    again = shard.gather(shard.scatter(hidden))
    found["there and back"] = torch.equal(again, hidden)
    weights = torch.arange(length * 3.0).view(1, length, 3) + rank
    (grad,) = torch.autograd.grad((again * weights).sum(), hidden)
    everyone = sum(weights - rank + r for r in range(ranks))
    found["gather's gradient"] = torch.equal(shard.scatter(grad), shard.scatter(everyone))
    order = [t.tolist() for t in _of_all(shard.positions)]
    found["each token once"] = sorted(n for each in order for n in each) == list(range(length))
    found["text"] = "imbalance" in str(shard.explain()) and len(shard.explain().rows) == ranks
    found |= _partial(rank, ranks)
    found |= _negated(rank, ranks)
    found |= _packed(rank, ranks) | _written(rank, ranks) | _checkpointed(rank, ranks) | _counted(rank, ranks)
    return found


def _of_all(t: T) -> list[T]:
    found = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(found, t)
    return found


def _partial(rank: int, ranks: int) -> dict[str, Any]:
    """On a dimension of a mesh: gradients of captured tensors are whole, or add up to that."""
    length = 24 * ranks
    mesh = torch.distributed.init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "cp"))
    bias = torch.zeros(length, dtype=torch.float64, requires_grad=True)
    grads = []
    for gradients in ("whole", "partial"):
        shard = ca.ContextParallel(mesh, dim="cp", captured_gradients=gradients).plan(causal(), length)
        mine = [shard.scatter(t, 2) for t in tensors(length)]
        out = ca.attention(
            *mine, mask_mod=causal(), score_mod=lambda s, b, h, i, j: s + bias[j], context_parallel=shard
        )
        grads += torch.autograd.grad(out.square().sum(), bias)
    whole, part = grads
    total = sum(_of_all(part))
    return {"partial": torch.allclose(total, whole) and not torch.allclose(part, whole)}


def _packed(rank: int, ranks: int) -> dict[str, Any]:
    total = 36 * ranks
    offsets = torch.tensor([0, 5, 5, total // 2 + 3, total], dtype=torch.int32)
    used = torch.tensor([5, 0, total // 2 - 9, total - total // 2 - 3], dtype=torch.int32)
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in tensors(total))
    slopes = torch.tensor([0.1, 0.3], dtype=torch.float64)
    attn = ca.Attention(mask_mod=causal("bottom_right"), score_mod=lambda s, b, h, i, j: s + slopes[h] * (b + i - j))
    found = {}
    for name, varlen in (("packed", ca.Varlen(offsets)), ("packed, used", ca.Varlen(offsets, seqused_q=used))):
        out, lse = attn(q, k, v, varlen=varlen, return_lse=True)
        cp = ca.ContextParallel(dist.group.WORLD, timeout=20)
        shard = cp.plan(attn, varlen=varlen)
        got, got_lse = attn(
            *(shard.scatter(t, 0) for t in (q, k, v)), varlen=varlen, return_lse=True, context_parallel=shard
        )
        found[name] = torch.allclose(got, shard.scatter(out, 0)) and torch.allclose(got_lse, shard.scatter(lse, 1))
    return found


def _written(rank: int, ranks: int) -> dict[str, Any]:
    """New documents in the same tensor: the plan stays right."""
    length = 40 * ranks
    ids = documents_of(length)
    attn = ca.Attention(mask_mod=document(ids))
    _, shard = planned(attn, length)
    q, k, v = tensors(length)
    mine = [shard.scatter(t, 2) for t in (q, k, v)]
    attn(*mine, context_parallel=shard)
    ids.copy_(documents_of(length, 3).flip(0))
    return {"written": torch.allclose(attn(*mine, context_parallel=shard), shard.scatter(attn(q, k, v), 2))}


def _checkpointed(rank: int, ranks: int) -> dict[str, Any]:
    """Recomputed in the backward, by what was planned in the forward."""
    from torch.utils.checkpoint import checkpoint

    length = 40 * ranks
    attn = ca.Attention(mask_mod=causal() & sliding_window(9))
    cp, shard = planned(attn, length)
    q, k, v = (shard.scatter(t, 2).requires_grad_() for t in tensors(length))
    with cp:
        once = torch.autograd.grad(attn(q, k, v).sum(), (q, k, v))
        made = shard._last
        out = checkpoint(attn, q, k, v, use_reentrant=False)
        again = torch.autograd.grad(out.sum(), (q, k, v))
        out = checkpoint(attn, q, k, v, use_reentrant=False)
    same = all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    try:
        out.sum().backward()
        refused = False
    except ca.errors.OutsideContextParallel:
        refused = True
    return {"checkpoint": same and shard._last is made, "a checkpoint computed again outside": refused}


def _negated(rank: int, ranks: int) -> dict[str, Any]:
    """Views that torch negates as they are read, as imaginary parts of conjugates: what moves has their sign."""
    length, found = 40 * ranks, {}
    table = torch.linspace(-1, 1, length, dtype=torch.float64)
    for method in METHODS:
        q, k, v = tensors(length, 2 * ranks, ranks)
        _, shard = planned(causal(), length, method=method)
        q, k, v, dout = (shard.scatter(t, 2) for t in (q, k, v, q.sin()))
        sinks = torch.linspace(-1, 1, 2 * ranks, dtype=torch.float64)
        results = []
        for form in (torch.Tensor.clone, negated_later):
            given = [form(t).requires_grad_() for t in (q, k, v, table, sinks)]
            of_keys, marks = given[3], given[3].detach()
            out, lse = ca.attention(
                *given[:3],
                score_mod=lambda s, b, h, i, j, of_keys=of_keys: s * of_keys[j],
                mask_mod=lambda b, h, i, j, marks=marks: (i >= j) & (marks[j] > -0.5),
                sinks=given[4],
                return_lse=True,
                context_parallel=shard,
            )
            grads = torch.autograd.grad([out, lse], given, [form(dout), form(dout[..., 0])])
            results.append((out, lse, shard.gather(given[0], 2), *grads))
        found[f"negated, {method}"] = all(map(torch.allclose, *results))
    marks = torch._neg_view(torch.linspace(-1, 1, length))
    _, shard = planned(None, length)
    q, k, v = (shard.scatter(t, 2) for t in tensors(length))
    seen = [
        ca.attention(q, k, v, mask_mod=lambda b, h, i, j, of=of: of[j] > -0.5, context_parallel=shard)
        for of in (marks, torch._neg_view(marks), marks)
    ]
    found["a tensor and the view that negates it"] = torch.equal(seen[0], seen[2]) and not torch.equal(*seen[:2])
    return found


def negated_later(t: T) -> T:
    """`t` as a view of memory that holds -t."""
    return torch._neg_view(-t)


def negated_in_kernels(rank: int, ranks: int) -> list[bool]:
    """Whether ranks that call emulated kernels read such views as torch does: out, lse, dq, dk and dv."""
    length, results = 32 * ranks, []
    q, k, v = (torch.cat([t, t.cos()], -1).bfloat16() for t in tensors(length, 1))
    _, shard = planned(causal(), length)
    q, k, v, dout = (shard.scatter(t, 2) for t in (q, k, v, q.sin()))
    for form in (torch.Tensor.clone, negated_later):
        given = [form(t).requires_grad_() for t in (q, k, v)]
        attn = ca.Attention(mask_mod=causal(), backend="hopper-emulated")
        out, lse = attn(*given, return_lse=True, context_parallel=shard)
        grads = torch.autograd.grad([out, lse], given, [form(dout), form(dout[..., 0].float())])
        results.append((out, lse, *grads))
    return list(map(torch.equal, *results))


def _counted(rank: int, ranks: int) -> dict[str, Any]:
    """Bytes that came, over those of the rows that the mask needs."""
    length = 96 * ranks
    mask = causal() & document(documents_of(length, 7))
    cp, shard = planned(mask, length, method="exchange")
    q, k, v = (shard.scatter(t, 2) for t in tensors(length))
    seen = mask.dense(length, length)[0, 0][shard.positions].any(0)
    seen[shard.positions] = False
    before = cp.ranks.moved_bytes
    ca.attention(q, k, v, mask_mod=mask, context_parallel=shard)
    return {"bytes": (cp.ranks.moved_bytes - before, int(seen.sum()) * 2 * 8 * 8)}


# --- what is refused ---------------------------------------------------------------------------------------------


def refusals(rank: int, ranks: int) -> dict[str, str]:
    """The error of each bad input, by name; every rank must have one, and none may hang."""
    length = 32 * ranks
    q, k, v = tensors(length)
    group, odd = dist.group.WORLD, rank == ranks - 1
    _, shard = planned(None, length)
    mine = [shard.scatter(t, 2) for t in (q, k, v)]
    ids, bias = documents_of(length), torch.zeros(length).requires_grad_()
    some = bias.detach() if odd else bias
    other = ids + int(odd) * (torch.arange(length) // 7)

    def attend(*given: T, on: Any = None, **options: Any) -> Any:
        return ca.attention(*(given or mine), context_parallel=on or shard, **options)

    mesh = torch.distributed.init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "cp"))
    inputs: dict[str, Callable[[], Any]] = {
        "mesh of no kind": lambda: ca.ContextParallel([0, 1]),
        "mesh of two dimensions": lambda: ca.ContextParallel(mesh),
        "unknown dimension": lambda: ca.ContextParallel(mesh, dim="tp"),
        "method": lambda: ca.ContextParallel(group, method="ring"),
        "parts": lambda: ca.ContextParallel(group, parts=0),
        "timeout": lambda: ca.ContextParallel(group, timeout=-1),
        "not planned": lambda: ca.ContextParallel(group).__enter__(),
        "indivisible": lambda: planned(None, length + 1),
        "tile": lambda: ca.ContextParallel(group, timeout=20).plan(None, length, tile=7),
        "no length": lambda: ca.ContextParallel(group).plan(None),
        "no attention": lambda: planned(3.5, length),
        "lengths differ": lambda: planned(None, length * (1 + odd)),
        "masks differ": lambda: planned(sliding_window(3 + odd), length),
        "documents differ": lambda: planned(document(other), length),
        "captured on one rank": lambda: attend(score_mod=(lambda s, b, h, i, j: s + bias[i]) if odd else None),
        "gradient on one rank": lambda: attend(score_mod=lambda s, b, h, i, j: s + some[i]),
        "dtypes differ": lambda: attend(*(t.float() if odd else t for t in mine)),
        "options differ": lambda: attend(scale=0.5 + odd),
        "shares of another shard": lambda: attend(*(t[:, :, 1:] for t in mine)),
        "scatter of a share": lambda: shard.scatter(mine[0], 2),
        "gather of all": lambda: shard.gather(q, 2),
        "heads": lambda: attend(on=planned(None, length, method="heads")[1]),
        "pages": lambda: attend(paged=ca.Paged(torch.zeros(1, 1, dtype=torch.int32), 16, torch.ones(1).int())),
        "varlen not planned": lambda: attend(varlen=ca.Varlen(torch.tensor([0, length], dtype=torch.int32))),
        "transform": lambda: torch.func.vmap(attend)(*(t[None] for t in mine)),
        "twice differentiable": lambda: _twice(shard, mine),
    }
    found = {}
    for name, bad in inputs.items():
        try:
            bad()
            found[name] = "nothing was raised"
        except Exception as error:
            found[name] = type(error).__name__
    return found


def _twice(shard: Any, mine: list[T]) -> None:
    q = mine[0].clone().requires_grad_()
    out = ca.attention(q, *mine[1:], context_parallel=shard)
    torch.autograd.grad(out.sum(), q, create_graph=True)


def one_leaves(rank: int, ranks: int) -> tuple[str, float]:
    """What the others raise, and after how long, where a rank fails before its attention."""
    length = 32 * ranks
    q, k, v = tensors(length)
    cp = ca.ContextParallel(dist.group.WORLD, timeout=2)
    shard = cp.plan(causal(), length)
    mine = [shard.scatter(t, 2) for t in (q, k, v)]
    ca.attention(*mine, mask_mod=causal(), context_parallel=shard)
    begin = time.monotonic()
    if rank == ranks - 1:
        time.sleep(5)
        return "left", 0.0
    try:
        ca.attention(*mine, mask_mod=causal(), context_parallel=shard)
    except ca.ComposattnError as error:
        return type(error).__name__, time.monotonic() - begin
    return "nothing was raised", time.monotonic() - begin


def compiled(rank: int, ranks: int) -> tuple[float, int]:
    """The largest difference between compiled and eager results, and how many graphs were made."""
    length = 40 * ranks
    ids, bias = documents_of(length), tensors(length)[0][0, :, :, 0].clone().requires_grad_()
    attn = ca.Attention(mask_mod=causal() & document(ids), score_mod=lambda s, b, h, i, j: s + bias[h, i])
    _, shard = planned(attn, length)
    q, k, v = (shard.scatter(t, 2).requires_grad_() for t in tensors(length))
    graphs = 0

    def count(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def step(q: T, k: T, v: T) -> T:
        return attn(q * 2, k, v, context_parallel=shard).sin()

    def results(run: Callable[..., T]) -> list[T]:
        out = run(q, k, v)
        return [out, *torch.autograd.grad((out * out).sum(), (q, k, v, bias))]

    from torch._dynamo.backends.common import aot_autograd

    wanted, found = results(step), results(torch.compile(step, backend=aot_autograd(fw_compiler=count), fullgraph=True))
    return max(float((a - b).abs().max()) for a, b in zip(wanted, found, strict=True)), graphs
