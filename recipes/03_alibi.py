"""ALiBi: a penalty that grows with the distance, with one slope per head (Press et al., 2022)."""

import torch
from common import best_device, compare_with_fp64, draw

import composattn as ca
from composattn.mods import alibi, causal

torch.manual_seed(0)
device, dtype = best_device()
B, H, S, D = 1, 8, 500, 64
q, k, v = (draw(B, H, S, D, device=device, dtype=dtype) for _ in range(3))

print(ca.Attention(score_mod=alibi(H), mask_mod=causal()).explain(q, k, v), "\n")
print("the paper's slopes: ", end="")
compare_with_fp64(q, k, v, score_mod=alibi(H), mask_mod=causal())

slopes = torch.exp2(-8.0 * torch.arange(1, H + 1, device=device) / H).requires_grad_()
print("learned slopes: ", end="")
compare_with_fp64(q, k, v, score_mod=alibi(slopes), mask_mod=causal(), captured={"slopes": slopes})
