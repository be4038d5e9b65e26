"""A learned bias by head and distance: the gradient of what a score mod reads comes from its graph.

A teacher attends with a hidden bias; the student starts from none and learns the teacher's from its outputs.
"""

import torch
from common import best_device

import composattn as ca
from composattn.mods import causal

torch.manual_seed(0)
device, dtype = best_device()
B, H, S, D = 4, 2, 128, 32

hidden = -0.3 * torch.arange(S, device=device).sqrt() * torch.tensor([[1.0], [0.2]], device=device)
learned = torch.zeros(H, S, device=device, requires_grad=True)


def by_distance(bias):
    """A plain function over the tensor it closes over; distance 0 is the query's own position."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[h, q_idx - kv_idx]

    return score_mod


teacher = ca.Attention(score_mod=by_distance(hidden), mask_mod=causal())
student = ca.Attention(score_mod=by_distance(learned), mask_mod=causal())
optimizer = torch.optim.Adam([learned], lr=0.05)

losses = []
for step in range(101):
    q, k, v = (torch.randn(B, H, S, D, device=device, dtype=dtype) for _ in range(3))
    with torch.no_grad():
        target = teacher(q, k, v)
    loss = (student(q, k, v) - target).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        # Softmax does not see a shift of all scores: compare up to one, over the distances that most rows reach.
        mine, its = (t[:, : S // 4].detach() for t in (learned, hidden))
        mine, its = mine - mine.mean(1, keepdim=True), its - its.mean(1, keepdim=True)
        apart = float((mine - its).norm() / its.norm())
        print(f"step {step:3}  loss {loss.item():.2e}  distance to the teacher's bias {apart:.3f}")

if not (losses[-1] < losses[0] / 10 and apart < 0.5):
    raise SystemExit("the bias was not learned")
