"""MoBA and NSA: each query picks blocks of keys by their means. The pick is a tensor that the mask reads.

MoBA attends to its own block and to the picked ones. NSA adds two branches, a window and the means themselves as keys,
and joins the three by gates.
"""

import torch
from common import best_device, compare_with_fp64, draw

import composattn as ca
from composattn.mods import causal, sliding_window

torch.manual_seed(0)
device, dtype = best_device()
B, HQ, HKV, S, D, BLOCK, K = 1, 4, 2, 384, 64, 32, 3
BLOCKS = S // BLOCK

q = draw(B, HQ, S, D, device=device, dtype=dtype)
k, v = (draw(B, HKV, S, D, device=device, dtype=dtype) for _ in range(2))


def picks(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The K blocks before its own that each query likes most, int32 (B, HQ, S, K); -1 where there are fewer."""
    with torch.no_grad():
        means = k.float().unflatten(2, (BLOCKS, BLOCK)).mean(3).repeat_interleave(HQ // HKV, dim=1)
        past = torch.arange(S, device=q.device)[:, None] // BLOCK > torch.arange(BLOCKS, device=q.device)
        liking = (q.float() @ means.mT).masked_fill(~past, float("-inf"))
        best = liking.topk(K)
        return torch.where(best.values.isinf(), -1, best.indices).to(torch.int32)


picked = picks(q, k)

# What a query sees, exactly: it is one of at most 32 numbers per row, which are unrolled.
by_query = ca.mask(lambda b, h, q_idx, kv_idx: (picked[b, h, q_idx] == kv_idx // BLOCK).any(-1))
own = ca.mask(lambda b, h, q_idx, kv_idx: q_idx // BLOCK == kv_idx // BLOCK)

# Which tiles are visited at all: blocks that any query of a block picks.
chosen = torch.nn.functional.one_hot(picked.long() + 1, BLOCKS + 1)[..., 1:].amax(3)  # (B, HQ, S, BLOCKS)
visited = ca.BlockSparse(chosen.unflatten(2, (BLOCKS, BLOCK)).amax(3).to(torch.int8), BLOCK, partial=by_query)

moba = causal() & (own | visited)
print("MoBA, ", end="")
compare_with_fp64(q, k, v, mask_mod=moba)
print(next(line for line in str(ca.Attention(mask_mod=moba).explain(q, k, v)).splitlines() if line.startswith("tiles")))

# NSA: blocks that ended before the query, as one key and one value each. Learned there; means here.
short_k, short_v = (t.unflatten(2, (BLOCKS, BLOCK)).mean(3).detach().requires_grad_() for t in (k, v))


def ended(b, h, q_idx, kv_idx):
    return (kv_idx + 1) * BLOCK <= q_idx + 1


near = causal() & sliding_window(63)
gates = torch.nn.Linear(D, 3).to(device, dtype)
shares = gates(q).sigmoid().unbind(-1)
out = torch.zeros_like(q)
for share, mask in zip(shares, (ca.mask(ended), moba, near), strict=True):
    keys, values = (short_k, short_v) if mask.name == "ended" else (k, v)
    out = out + share[..., None] * ca.attention(q, keys, values, mask_mod=mask)
    print(f"NSA, {mask}: ", end="")
    compare_with_fp64(q, keys, values, mask_mod=mask)
(learned,) = torch.autograd.grad(out.square().mean(), gates.weight)
print(f"the gates learn too: a gradient of norm {learned.norm():.1e}")
