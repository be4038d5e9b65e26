"""A sliding window with a few global tokens: two ready masks and one of your own, joined with & and |."""

import torch
from common import best_device, compare_with_fp64, draw

import composattn as ca
from composattn.mods import causal, sliding_window

torch.manual_seed(0)
device, dtype = best_device()
q, k, v = (draw(1, 4, 1000, 64, device=device, dtype=dtype) for _ in range(3))

mask = causal() & (sliding_window(256) | (lambda b, h, q_idx, kv_idx: kv_idx < 4))

print(ca.Attention(mask_mod=mask).explain(q, k, v), "\n")
compare_with_fp64(q, k, v, mask_mod=mask)
