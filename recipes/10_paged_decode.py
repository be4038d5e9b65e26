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
used = torch.zeros(len(prompts), dtype=torch.int32, device=device)
history = [torch.empty(2, 0, HKV, D, device=device, dtype=dtype) for _ in prompts]  # only to compare with


def append(b: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Puts the keys and values (tokens, HKV, D) behind those of sequence b, in new pages where one is full."""
    for token in range(len(k)):
        at = int(used[b])
        if at % PAGE == 0:
            table[b, at // PAGE] = free.pop()
        page = table[b, at // PAGE]
        cache_k[page, at % PAGE], cache_v[page, at % PAGE] = k[token], v[token]
        used[b] += 1
    history[b] = torch.cat([history[b], torch.stack([k, v])], dim=1)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


# The last query of a sequence stands at its last key: causal("bottom_right"). Planned once, for prompts and tokens.
attend = ca.Attention(mask_mod=causal("bottom_right"))
k, v = cache_k.transpose(1, 2), cache_v.transpose(1, 2)  # views: (pages, heads, page, D)

# All prompts in one call: packed queries over pages.
for b, length in enumerate(prompts):
    append(b, draw(length, HKV, D), draw(length, HKV, D))
offsets = torch.tensor([0, *prompts], device=device).cumsum(0).to(torch.int32)
q = draw(sum(prompts), HQ, D)
with torch.no_grad():
    out = attend(q, k, v, paged=ca.Paged(table, PAGE, used), varlen=ca.Varlen(offsets))
print(f"prompts of {prompts} tokens: out {tuple(out.shape)}")

# Then a token each, in one call a step: dense queries (B, HQ, 1, D).
worst = 0.0
for _ in range(steps):
    for b in range(len(prompts)):
        append(b, draw(1, HKV, D), draw(1, HKV, D))
    q = draw(len(prompts), HQ, 1, D)
    with torch.no_grad():
        out = attend(q, k, v, paged=ca.Paged(table, PAGE, used))
        for b, (keys, values) in enumerate(history):
            dense = (t.transpose(0, 1).unsqueeze(0).double() for t in (keys, values))
            worst = max(worst, relative_error(out[b : b + 1], ca.attention(q[b : b + 1].double(), *dense)))
print(f"{steps} steps, sequences of {used.tolist()} keys in pages of {PAGE}")
print(f"largest relative error against dense fp64: {worst:.1e}")
assert worst < (1e-5 if dtype is torch.float32 else 1e-2)
