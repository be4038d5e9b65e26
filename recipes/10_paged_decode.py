"""Decoding with keys and values in pages of a shared cache: a prompt each, then token by token; grouped queries."""

import torch
from common import best_device, relative_error

import composattn as ca
from composattn.mods import causal

torch.manual_seed(0)
device, dtype = best_device()
HQ, HKV, D, PAGE, PAGES = 8, 2, 64, 16, 64
prompts, steps = [45, 7, 100], 20

# The cache of a serving engine: (pages, page, heads, D), and which of its pages each sequence has.
cache_k, cache_v = (torch.full((PAGES, PAGE, HKV, D), torch.nan, device=device, dtype=dtype) for _ in range(2))
free = torch.randperm(PAGES).tolist()
table = torch.zeros(len(prompts), -(-(max(prompts) + steps) // PAGE), dtype=torch.int32, device=device)
lengths = [0] * len(prompts)


def pages_for(counts: list[int]) -> None:
    """New pages for so many more tokens of each sequence: the engine knows lengths on the host."""
    for b, count in enumerate(counts):
        for page in range(-(-lengths[b] // PAGE), -(-(lengths[b] + count) // PAGE)):
            table[b, page] = free.pop()
        lengths[b] += count


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


# The last query of a sequence stands at its last key: causal("bottom_right"). Planned once, for prompts and tokens.
attend = ca.Attention(mask_mod=causal("bottom_right"))
k, v = cache_k.transpose(1, 2), cache_v.transpose(1, 2)  # views: (pages, heads, page, D)

# All prompts in one call: packed queries over pages.
pages_for(prompts)
packed = ca.Varlen(torch.tensor([0, *prompts], device=device).cumsum(0).to(torch.int32))
q, new_k, new_v = (draw(sum(prompts), heads, D) for heads in (HQ, HKV, HKV))
paged = ca.Paged(table, PAGE, torch.zeros(len(prompts), dtype=torch.int32, device=device))
paged = paged.append(k, v, new_k, new_v, varlen=packed)
history = [list(pair) for pair in zip(new_k.split(prompts), new_v.split(prompts), strict=True)]  # to compare with
with torch.no_grad():
    out = attend(q, k, v, paged=paged, varlen=packed)
print(f"prompts of {prompts} tokens: out {tuple(out.shape)}")

# Then a token each, in one call a step: dense queries (B, HQ, 1, D).
worst = 0.0
for _ in range(steps):
    pages_for([1] * len(prompts))
    q, new_k, new_v = (draw(len(prompts), heads, 1, D) for heads in (HQ, HKV, HKV))
    paged = paged.append(k, v, new_k, new_v)
    for b, pair in enumerate(history):
        pair[:] = (torch.cat((kept, new[b, :, 0][None])) for kept, new in zip(pair, (new_k, new_v), strict=True))
    with torch.no_grad():
        out = attend(q, k, v, paged=paged)
        for b, (keys, values) in enumerate(history):
            dense = (t.transpose(0, 1).unsqueeze(0).double() for t in (keys, values))
            worst = max(worst, relative_error(out[b : b + 1], ca.attention(q[b : b + 1].double(), *dense)))
print(f"{steps} steps, sequences of {paged.seqused.tolist()} keys in pages of {PAGE}")
print(f"largest relative error against dense fp64: {worst:.1e}")
assert worst < (1e-5 if dtype is torch.float32 else 1e-2)
