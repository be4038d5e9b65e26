"""Documents packed into one sequence, none seeing another: no padding, and the pairs between them cost nothing."""

import torch
from common import best_device, compare_with_fp64, draw, draw_mask

import composattn as ca
from composattn.mods import causal, document

torch.manual_seed(0)
device, dtype = best_device()
lengths = torch.tensor([100, 37, 300, 5, 214, 368])
S = int(lengths.sum())
doc_id = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)
q, k, v = (draw(1, 4, S, 64, device=device, dtype=dtype) for _ in range(3))

mask = document(doc_id) & causal()
print(ca.Attention(mask_mod=mask).explain(q, k, v), "\n")
compare_with_fp64(q, k, v, mask_mod=mask)

# The same as every document alone:
with torch.no_grad():
    packed = ca.attention(q, k, v, mask_mod=mask)
    parts = zip(*(t.split(lengths.tolist(), dim=2) for t in (q, k, v)), strict=True)
    alone = torch.cat([ca.attention(*one, mask_mod=causal()) for one in parts], dim=2)
print(f"largest difference from one call a document: {(packed - alone).abs().max():.1e}")

draw_mask(mask, "documents.svg", S)
