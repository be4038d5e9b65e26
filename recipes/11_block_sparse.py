"""Blocks of keys that the model picks as it runs: top-k indices, maps and torch's BlockMask as one kind of mask."""

import torch
from common import best_device, compare_with_fp64, draw

import composattn as ca
from composattn.mods import causal, sliding_window, softcap

torch.manual_seed(0)
device, dtype = best_device()
B, H, S, D, BLOCK, K = 1, 4, 512, 64, 64, 3

q, k, v = (draw(B, H, S, D, device=device, dtype=dtype) for _ in range(3))

# Every block of queries picks the K blocks of keys whose means look most like its own.
tiles = S // BLOCK
means_q, means_k = (t.detach().float().unflatten(2, (tiles, BLOCK)).mean(3) for t in (q, k))
picked = (means_q @ means_k.mT).topk(K).indices.to(torch.int32)  # (B, H, tiles, K), one set per head
chosen = ca.BlockSparse.topk(picked, BLOCK, S, S)

# Blocks are a mask like any other: here the picked past, and always the nearest 64 keys.
mask = causal() & (chosen | sliding_window(64))
compare_with_fp64(q, k, v, mask_mod=mask, score_mod=softcap(20.0))

attend = ca.Attention(mask_mod=mask, score_mod=softcap(20.0))
before = attend(q, k, v)
print(next(line for line in str(attend.explain(q, k, v)).splitlines() if line.startswith("tiles")))

# Other picks, written into the same tensor: the next call sees them, with nothing planned or compiled again.
picked.copy_(torch.randint(0, tiles, picked.shape, device=device))
print(f"with other picks the output moves by {(attend(q, k, v) - before).abs().max():.2f}")

# A map of blocks as `Mask.tiles` gives it: 0 hidden, 1 as the mask says, 2 visible whole.
window = causal() & sliding_window(100)
again = ca.BlockSparse(window.tiles(S, S, (BLOCK, BLOCK)).to(device), BLOCK, partial=window)
assert torch.equal(again.dense(S, S), window.dense(S, S).to(device))
try:
    ca.attention(q[:, :, :100], k, v, mask_mod=again)
except ca.errors.BlockMaskMismatch as refusal:
    print(f"BlockMaskMismatch: {refusal}")
