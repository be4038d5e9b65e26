"""Sequences of different lengths in one call, packed with no padding: the same masks and gradients, any lengths."""

import torch
from common import best_device, compare_with_fp64, draw

import composattn as ca
from composattn.mods import alibi, causal, sliding_window

torch.manual_seed(0)
device, dtype = best_device()
H, D = 4, 64

lengths = torch.tensor([100, 37, 300, 0, 5, 214])  # one is empty
offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
total = int(lengths.sum())
q, k, v = (draw(total, H, D, device=device, dtype=dtype) for _ in range(3))

# Masks and score mods see the positions inside of each sequence, b is its number.
attend = ca.Attention(mask_mod=causal() & sliding_window(128), score_mod=alibi(H))
out, lse = attend(q, k, v, varlen=ca.Varlen(offsets), return_lse=True)
print(f"{len(lengths)} sequences of {lengths.tolist()}: out {tuple(out.shape)}, lse {tuple(lse.shape)}")
compare_with_fp64(q, k, v, mask_mod=causal() & sliding_window(128), score_mod=alibi(H), varlen=ca.Varlen(offsets))

# Keys of other lengths than the queries: cross attention, or new tokens behind those of a cache.
kv_lengths = torch.tensor([40, 512, 3, 90, 0, 64])  # the last but one sees nothing: out 0, lse -inf
kv_offsets = torch.nn.functional.pad(kv_lengths.cumsum(0), (1, 0)).to(device, torch.int32)
k, v = (draw(int(kv_lengths.sum()), H, D, device=device, dtype=dtype) for _ in range(2))
print(f"keys of {kv_lengths.tolist()}, ", end="")
compare_with_fp64(q, k, v, varlen=ca.Varlen(offsets, kv_offsets))

# The same as every sequence alone:
with torch.no_grad():
    packed = ca.attention(q, k, v, varlen=ca.Varlen(offsets, kv_offsets))
    alone = [
        ca.attention(*(t.transpose(0, 1).unsqueeze(0) for t in one))[0].transpose(0, 1)
        for one in zip(
            q.split(lengths.tolist()), k.split(kv_lengths.tolist()), v.split(kv_lengths.tolist()), strict=True
        )
    ]
print(f"largest difference from one call a sequence: {(packed - torch.cat(alone)).abs().max():.1e}")

# Lengths are read when the call runs: others need no new plan. What they hold is checked where you ask for it.
with ca.debug_checks():
    try:
        attend(q, q, q, varlen=ca.Varlen(offsets.flip(0)))
    except ca.errors.InvalidArgument as refusal:
        print(f"{type(refusal).__name__}: {refusal}")
