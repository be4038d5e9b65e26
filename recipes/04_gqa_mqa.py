"""Grouped-query and multi-query attention: fewer key/value heads than query heads; nothing else changes."""

import torch
from common import best_device, compare_with_fp64, draw

import composattn as ca
from composattn.mods import causal

torch.manual_seed(0)
device, dtype = best_device()
B, H, S, D = 2, 8, 512, 64

for kv_heads in (8, 2, 1):
    q = draw(B, H, S, D, device=device, dtype=dtype)
    k, v = (draw(B, kv_heads, S, D, device=device, dtype=dtype) for _ in range(2))
    print(f"{H} query heads on {kv_heads} key/value heads: ", end="")
    compare_with_fp64(q, k, v, mask_mod=causal())

# Tensors laid out (B, S, H, D) pass as views, uncopied.
q = torch.randn(B, S, H, D, device=device, dtype=dtype)
k, v = (torch.randn(B, S, 2, D, device=device, dtype=dtype) for _ in range(2))
out = ca.attention(*(t.transpose(1, 2) for t in (q, k, v)), mask_mod=causal())
print(f"(B, S, H, D) tensors in, {tuple(out.shape)} out")
