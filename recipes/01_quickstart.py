"""A mask and a score mod as two plain functions, run forward and backward on the best device there is."""

import torch
from common import best_device, compare_with_fp64, draw, draw_mask

import composattn as ca

torch.manual_seed(0)
device, dtype = best_device()
B, H, S, D = 1, 4, 1024, 64

q, k, v = (draw(B, H, S, D, device=device, dtype=dtype) for _ in range(3))
slopes = torch.linspace(0.5, 0.01, H, device=device).requires_grad_()  # learned: its gradient comes with the others


def recent_or_first(b, h, q_idx, kv_idx):
    """The last 128 keys, and the first 16, never the future."""
    return (q_idx >= kv_idx) & ((q_idx - kv_idx < 128) | (kv_idx < 16))


def fade(score, b, h, q_idx, kv_idx):
    """Far keys count less, by a factor per head."""
    return score - slopes[h] * (q_idx - kv_idx)


attn = ca.Attention(score_mod=fade, mask_mod=recent_or_first)
print(attn.explain(q, k, v), "\n")
compare_with_fp64(q, k, v, score_mod=fade, mask_mod=recent_or_first, captured={"slopes": slopes})

draw_mask(ca.mask(recent_or_first), "quickstart-mask.svg", S)
