"""Other ways to share a sequence, as torch ships them, and flash-attn-4 on gathered keys: what ours is timed beside.

    torch ring    torch.distributed.tensor.experimental.context_parallel and scaled_dot_product_attention; causal alone
    torch flex    torch's context parallel of FlexAttention: a block mask for the rank's queries, all keys gathered
    fa4 gathered  flash-attn-4 on the same rows and keys: per rank two runs of queries, documents as packed sequences

Rows lie head and tail on every rank, as torch's own load balancer lays them.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.context_parallel_cases import WINDOW, Case, Contestant, contestant, here

T = torch.Tensor


def mesh_of_all() -> Any:
    return torch.distributed.init_device_mesh(here().type, (dist.get_world_size(),))


def torch_ring(case: Case) -> Contestant:
    """Keys are repeated for their query heads: torch's ring takes as many of both."""
    import torch.nn.functional as F
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.mask != "causal":
        raise NotImplementedError("torch's ring knows causal alone")
    mesh = mesh_of_all()
    buffers = [t.contiguous() for t in case.tensors(here())]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)):
        q, k, v, grad = (t.clone() for t in buffers)
    group = case.heads // case.kv_heads
    rows = torch.zeros(dist.get_world_size() * 2, device=here())
    qkv = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())

    class Ring(Contestant):
        def step(self) -> tuple[T, ...]:
            with (
                context_parallel(mesh, buffers=[rows.clone()], buffer_seq_dims=[0]),
                sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            ):
                return super().step()

    def forward() -> T:
        k_all, v_all = (t.repeat_interleave(group, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k_all, v_all, is_causal=True)

    return Ring(forward, qkv, grad)


def torch_cp(name: str) -> Any:
    """A name of torch's context parallel, which is not public and moves between versions. Raises: `ImportError`."""
    for place in ("_context_parallel._attention", "_context_parallel", "_attention"):
        try:
            module = importlib.import_module(f"torch.distributed.tensor.experimental.{place}")
        except ImportError:
            continue
        if hasattr(module, name):
            return getattr(module, name)
    raise ImportError(f"torch {torch.__version__} has no {name} in torch.distributed.tensor.experimental")


def torch_flex(case: Case, compiled: bool = True) -> Contestant:
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.attention.flex_attention import flex_attention

    mesh, ids = mesh_of_all(), case.ids(here()) if case.mask == "documents" else None

    def mask_mod(b: T, h: T, q: T, kv: T) -> T:
        if case.mask == "causal":
            return q >= kv
        if case.mask == "window":
            return (q >= kv) & (q - kv < WINDOW)
        assert ids is not None
        return (q >= kv) & (ids[q] == ids[kv])

    attend = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention

    class Attend(torch.nn.Module):
        def forward(self, q: T, k: T, v: T) -> T:
            return attend(q, k, v, block_mask=block_mask, enable_gqa=True)  # type: ignore[no-any-return]

    kind = torch_cp("_ContextParallel").AttentionType.FLEX
    module = parallelize_module(Attend(), mesh, torch_cp("_ContextParallel")(seq_dim=2, attention_type=kind))
    balancer = torch_cp("_HeadTailLoadBalancer")(case.seq_len, dist.get_world_size(), here())
    make = torch_cp("_create_cp_block_mask")
    block_mask = make(mask_mod, 1, 1, case.seq_len, case.seq_len, mesh, balancer)
    mine = torch_cp("_context_parallel_shard")(mesh, list(case.tensors(here())), [2] * 4, balancer)
    q, k, v, grad = (t.contiguous() for t in mine)
    qkv = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    return Contestant(lambda: module(*qkv), qkv, grad)


class _Gathered(torch.autograd.Function):
    """All ranks' rows of (1, H, rows, D), one after the other; gradients are reduced and scattered."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        rows = x.permute(2, 0, 1, 3).contiguous()
        found = rows.new_empty((dist.get_world_size() * rows.shape[0], *rows.shape[1:]))
        dist.all_gather_into_tensor(found, rows)
        return found.permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx: Any, grad: T) -> T:
        rows = grad.permute(2, 0, 1, 3).contiguous()
        found = rows.new_empty((rows.shape[0] // dist.get_world_size(), *rows.shape[1:]))
        dist.reduce_scatter_tensor(found, rows)
        return found.permute(1, 2, 0, 3)


def head_and_tail(case: Case, device: torch.device) -> tuple[T, T]:
    """Positions of this rank's rows, and of all ranks' one after the other."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = torch.arange(case.seq_len, device=device).view(2 * ranks, -1)
    each = [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)]
    return each[rank], torch.cat(each)


def fa4_gathered(case: Case) -> Contestant:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    device = here()
    mine, everyone = head_and_tail(case, device)
    back = torch.empty_like(everyone)
    back[everyone] = torch.arange(case.seq_len, device=device)
    starts = torch.tensor([0, *case.lengths]).cumsum(0)
    half = len(mine) // 2

    def of_run(q_run: T, k_all: T, v_all: T, first: int) -> T:
        stop = first + half
        if case.mask == "causal":
            return flash_attn_func(q_run, k_all[:, :stop], v_all[:, :stop], causal=True)[0]
        if case.mask == "window":
            low = max(0, first - WINDOW + 1)
            window = (WINDOW - 1, 0)
            return flash_attn_func(q_run, k_all[:, low:stop], v_all[:, low:stop], causal=False, window_size=window)[0]
        inside = starts[(starts > first) & (starts < stop)]
        low = int(starts[starts <= first].max())
        q_ends, k_ends = (
            torch.cat([torch.tensor([0]), inside - at, torch.tensor([stop - at])]).int() for at in (first, low)
        )
        out = flash_attn_varlen_func(
            q_run[0], k_all[0, low:stop], v_all[0, low:stop], cu_seqlens_q=q_ends.to(device),
            cu_seqlens_k=k_ends.to(device), max_seqlen_q=int(q_ends.diff().max()),
            max_seqlen_k=int(k_ends.diff().max()), causal=True,
        )  # fmt: skip
        return (out[0] if isinstance(out, tuple) else out).unsqueeze(0)

    firsts = [int(mine[0]), int(mine[half])]

    def forward(q: T, k: T, v: T) -> T:
        k_all, v_all = (_Gathered.apply(x).transpose(1, 2).index_select(1, back) for x in (k, v))
        rows = q.transpose(1, 2)
        runs = [of_run(rows[:, i * half : (i + 1) * half], k_all, v_all, first) for i, first in enumerate(firsts)]
        return torch.cat(runs, 1).transpose(1, 2)

    return contestant(forward, [t.index_select(2, mine) for t in case.tensors(device)])


PEERS = {"torch flex": torch_flex, "torch ring": torch_ring, "fa4 gathered": fa4_gathered}
