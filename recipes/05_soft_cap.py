"""Soft-capped scores, as in Gemma 2, alone and after ALiBi: score mods joined with >> run one after the other."""

import torch
from common import best_device, compare_with_fp64, draw

from composattn.mods import alibi, causal, softcap

torch.manual_seed(0)
device, dtype = best_device()
H = 4
q, k, v = (draw(2, H, 600, 64, device=device, dtype=dtype) for _ in range(3))

for score in (softcap(20.0), alibi(H) >> softcap(20.0)):
    print(f"{score!r}: ", end="")
    compare_with_fp64(q, k, v, score_mod=score, mask_mod=causal())
