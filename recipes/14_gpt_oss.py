"""GPT-OSS: a window in every other layer, and a learned sink per head that takes a share of each row's softmax.

A sink is one more key with a score of its own and no value. It has a gradient, and `lse` counts it.
"""

import torch
from common import best_device, draw, relative_error

import composattn as ca
from composattn.mods import causal, sliding_window

torch.manual_seed(0)
device, dtype = best_device()
B, HQ, HKV, S, D, WINDOW = 1, 8, 2, 384, 64, 128


def with_one_more_column(window, q, k, v, sinks):
    """The definition, in fp64: a column of sinks beside the scores, left out after the softmax."""
    k, v = (t.repeat_interleave(HQ // HKV, dim=1) for t in (k, v))
    back = torch.arange(S, device=q.device)[:, None] - torch.arange(S, device=q.device)
    hidden = (back < 0) | (back >= (window or S))
    scores = (q @ k.mT / D**0.5).masked_fill(hidden, float("-inf"))
    column = sinks[:, None, None].expand(B, HQ, S, 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1] @ v


for number, window in enumerate((WINDOW, None)):
    mask = causal() if window is None else causal() & sliding_window(window - 1)  # W tokens with the query itself
    sinks = torch.nn.Parameter(torch.randn(HQ, device=device))
    attend = ca.nn.Attention(mask_mod=mask, sinks=sinks)  # its parameter, as they are
    q = draw(B, HQ, S, D, device=device, dtype=dtype)
    k, v = (draw(B, HKV, S, D, device=device, dtype=dtype) for _ in range(2))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v, sinks)]
    out, truth = attend(q, k, v), with_one_more_column(window, *wide)
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v, sinks), upstream)
    true = torch.autograd.grad(truth, wide, upstream.double())
    pairs = zip(("out", "dq", "dk", "dv", "dsinks"), (out, *got), (truth, *true), strict=True)
    errors = {name: relative_error(mine, exact) for name, mine, exact in pairs}
    print(f"layer {number}, window {window}: " + "   ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    assert max(errors.values()) < (1e-5 if dtype is torch.float32 else 2e-2)
