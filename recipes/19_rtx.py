"""D 128, 192 and 256 in the 99 KB of shared memory of RTX cards: a learned bias under a soft cap, and its gradient.

What mods read takes shared memory from kernels whose tiles are the same for all of them. Here tiles are chosen for each
call, so that nothing is refused for want of it. On such a card the calls below run as they stand; anywhere else they
run too, and the plans are those of an RTX 3090.
"""

import torch
from common import best_device, compare_with_fp64, draw

import composattn as ca
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.tiles.target import TARGETS
from composattn.call.problem import Problem
from composattn.mods import causal

torch.manual_seed(0)
device, dtype = best_device()
B, H, S = 1, 2, 192
bias = torch.randn(H, S, device=device).requires_grad_()


def capped(score, b, h, q_idx, kv_idx):
    return 30 * torch.tanh((score + bias[h, q_idx - kv_idx]) / 30)


card = TARGETS[8, 6]
for D in (128, 192, 256):
    print(f"D {D}")
    q, k, v = (draw(B, H, S, D, device=device, dtype=dtype) for _ in range(3))
    compare_with_fp64(q, k, v, score_mod=capped, mask_mod=causal(), captured={"bias": bias})
    program = ca.Attention(score_mod=capped, mask_mod=causal()).program
    plan = plan_forward(Problem(B, H, H, S, S, D, D, torch.bfloat16, torch.device("cpu")), program, card)
    takes, has = plan.shared_memory, card.shared_memory
    tile = f"{plan.tiling.queries} queries x {plan.tiling.tile_n} keys"
    print(f"  {card.gpu}: {tile} in {takes / 1024:.0f} of {has / 1024:.0f} KB")
    if takes > has:
        raise SystemExit("more than a block has")
