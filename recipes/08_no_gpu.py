"""The Hopper kernel without the GPU: the real generated code on CPU tensors, its instructions, and a race hunt."""

import importlib.util

import torch

import composattn as ca
from composattn.extras import how_to_install
from composattn.mods import alibi, causal

if importlib.util.find_spec("cutlass") is None:
    print(f"this recipe needs the kernel compiler: {how_to_install('gpu')}")
    raise SystemExit

from composattn.backends.fused.running.emulated import emulating
from composattn.emulator.mode import LATE, random_mode

torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 200, 64, dtype=torch.bfloat16) for _ in range(3))
attn = ca.Attention(score_mod=alibi(torch.tensor([0.5, 0.25])), mask_mod=causal(), backend="hopper-emulated")

out = attn(q, k, v)  # raises a named finding on a deadlock, a race, an access out of bounds, ...
for mode in (LATE, random_mode(seed=1)):
    with emulating(mode):
        assert torch.equal(attn(q, k, v), out), mode
print("the same bits whether copies and products complete early, late or at random\n")
print(attn.explain(q, k, v, emulate=True))
