"""Video made chunk by chunk, as in Magi-1: a chunk sees itself and the two before it whole, all see the text first."""

import torch
from common import best_device, compare_with_fp64, draw, draw_mask

import composattn as ca

torch.manual_seed(0)
device, dtype = best_device()
TEXT, CHUNKS, FRAMES, PIXELS, BACK = 32, 6, 2, 48, 2
CHUNK = FRAMES * PIXELS  # tokens
S = TEXT + CHUNKS * CHUNK


def video(b, h, q_idx, kv_idx):
    mine, its = (q_idx - TEXT) // CHUNK, (kv_idx - TEXT) // CHUNK  # text is below 0
    return (kv_idx < TEXT) | ((mine >= its) & (mine - its <= BACK))


# Chunks are denoised at the same time, each at its own step: keys of noisier chunks may count less, by a learned share.
noise = torch.linspace(0, 1, CHUNKS + 1, device=device)  # of the text and of each chunk
share = torch.tensor([-0.5, -0.2], device=device).requires_grad_()


def less_of_noise(score, b, h, q_idx, kv_idx):
    chunk = torch.where(kv_idx < TEXT, 0, (kv_idx - TEXT) // CHUNK + 1)
    return score + share[h] * noise[chunk]


q, k, v = (draw(1, 2, S, 64, device=device, dtype=dtype) for _ in range(3))
print(ca.Attention(mask_mod=video, score_mod=less_of_noise).explain(q, k, v), "\n")
compare_with_fp64(q, k, v, mask_mod=video, score_mod=less_of_noise, captured={"share": share})

draw_mask(ca.mask(video), "video.svg", S)
