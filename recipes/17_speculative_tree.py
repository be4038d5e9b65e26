"""Speculative decoding: a tree of drafted tokens behind a cache, checked in one call. A token sees its ancestors.

The tree is a tensor, and so is the length of the text: another tree in each step plans nothing anew.
"""

import torch
from common import best_device

import composattn as ca

torch.manual_seed(0)
device, dtype = best_device()
HQ, HKV, D, TEXT, NODES = 8, 2, 64, 200, 16

ancestor = torch.zeros(NODES, NODES, dtype=torch.bool, device=device)  # (node, is it one of these), itself included
text = torch.tensor(TEXT, device=device)  # keys before the tree


def tree(b, h, q_idx, kv_idx):
    return (kv_idx < text) | ancestor[q_idx, (kv_idx - text).clamp(0, NODES - 1)]


def grow(parent: list[int]) -> None:
    """Writes the tree into the tensor that the mask reads; the root's parent is -1, parents come first."""
    ancestor.zero_()
    for node, up in enumerate(parent):
        if up >= 0:
            ancestor[node] |= ancestor[up]
        ancestor[node, node] = True


def path(node: int) -> list[int]:
    return ancestor[node].nonzero().flatten().tolist()


check = ca.Attention(mask_mod=tree)
worst = 0.0
for step in range(3):
    parent = [-1] + [int(torch.randint(0, n, ())) for n in range(1, NODES)]
    grow(parent)
    q = torch.randn(1, HQ, NODES, D, device=device, dtype=dtype)
    k, v = (torch.randn(1, HKV, TEXT + NODES, D, device=device, dtype=dtype) for _ in range(2))
    with torch.no_grad():
        out = check(q, k, v)
        for node in range(NODES):  # the same as the text and this one path, decoded token by token
            kept = [*range(TEXT), *(TEXT + n for n in path(node))]
            alone = ca.attention(q[:, :, node : node + 1], k[:, :, kept], v[:, :, kept])
            worst = max(worst, float((out[:, :, node : node + 1] - alone).abs().max()))
    deepest = max(range(NODES), key=lambda node: len(path(node)))
    print(f"step {step}: {NODES} drafted tokens, the longest path {path(deepest)}")
print(f"largest difference from decoding each path alone: {worst:.1e}")
assert worst < (1e-5 if dtype is torch.float32 else 2e-2)
