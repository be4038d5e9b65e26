"""Text with images, as in Gemma 3 and 4: a causal window for the text, and images that see themselves whole."""

import torch
from common import best_device, compare_with_fp64, draw, draw_mask

import composattn as ca
from composattn.mods import causal, sliding_window

torch.manual_seed(0)
device, dtype = best_device()
S, WINDOW = 640, 128

# One number per token: 0 is text, 1, 2, ... are images. It is all that a batch has to bring.
image = torch.zeros(2, S, dtype=torch.int32, device=device)
image[0, 40:296], image[0, 400:464], image[1, 100:356] = 1, 2, 1


def same_image(b, h, q_idx, kv_idx):
    return (image[b, q_idx] == image[b, kv_idx]) & (image[b, q_idx] > 0)


# Most layers have a window, each sixth sees all of the past. Both are made of the same pieces.
layers = {"local": (causal() & sliding_window(WINDOW - 1)) | same_image, "global": causal() | same_image}

q = draw(2, 4, S, 64, device=device, dtype=dtype)
k, v = (draw(2, 2, S, 64, device=device, dtype=dtype) for _ in range(2))
for name, mask in layers.items():
    tiles = next(line for line in str(ca.Attention(mask_mod=mask).explain(q, k, v)).splitlines() if "visited (" in line)
    print(f"{name}: {tiles}")
    compare_with_fp64(q, k, v, mask_mod=mask)

draw_mask(layers["local"], "images.svg", S, "the local layers' mask of the first text")
