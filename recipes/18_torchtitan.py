"""torchtitan's idiom: masks are made once per batch and handed to all layers, whose inner attention is a module.

There, masks are BlockMasks of FlexAttention, made by a compiled create_block_mask and kept in a cache. Here a mask is
the function. A new batch brings new documents, of which only the tiles are found again.
"""

import torch
import torch.nn.functional as F
from common import best_device

import composattn as ca
from composattn.mods import causal, document, sliding_window

EOS, VOCABULARY, WIDTH, HEADS, S, WINDOW = 0, 64, 128, 4, 128, 32


class InnerAttention(torch.nn.Module):
    """Where a layer of torchtitan has its FlexAttention: q, k and v come first, the mask by name."""

    def forward(self, q, k, v, *, mask_mod, scale=None):
        return ca.attention(q, k, v, mask_mod=mask_mod, scale=scale)


class Layer(torch.nn.Module):
    def __init__(self, kind: str, inner: torch.nn.Module) -> None:
        super().__init__()
        self.kind, self.inner_attention = kind, inner
        self.wqkv, self.wo = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, masks):
        q, k, v = self.wqkv(F.rms_norm(x, (WIDTH,))).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.wo(self.inner_attention(q, k, v, mask_mod=masks[self.kind]).transpose(1, 2).flatten(2))


class Model(torch.nn.Module):
    def __init__(self, inner: type[torch.nn.Module]) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        torch.nn.init.normal_(self.embed.weight, std=0.1)
        self.layers = torch.nn.ModuleList(Layer(kind, inner()) for kind in ("window", "all"))

    def get_attention_masks(self, tokens):
        """Once per batch: documents end at EOS."""
        ids = F.pad((tokens == EOS).cumsum(1)[:, :-1], (1, 0)).to(torch.int32)
        packed = causal() & document(ids)
        return {"all": packed, "window": packed & sliding_window(WINDOW - 1)}

    def forward(self, tokens, masks):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, masks)
        return x @ self.embed.weight.T


class DenseAttention(torch.nn.Module):
    """What to compare with: torch's SDPA and the same mask as a tensor of bools."""

    def forward(self, q, k, v, *, mask_mod, scale=None):
        visible = mask_mod.dense(S, S, batch=len(q)).to(q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)


def train(inner: type[torch.nn.Module], device: torch.device) -> list[float]:
    torch.manual_seed(0)
    model = Model(inner).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        tokens = torch.randint(0, VOCABULARY // 4, (2, S + 1)).to(device)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        loss = F.cross_entropy(model(inputs, model.get_attention_masks(inputs)).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


device, _ = best_device()
with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
    ours, dense = train(InnerAttention, device), train(DenseAttention, device)
print("losses: " + "  ".join(f"{loss:.3f}" for loss in ours))
apart = max(abs(a - b) for a, b in zip(ours, dense, strict=True))
print(f"largest difference from SDPA with a mask tensor: {apart:.1e}")
assert apart < (1e-3 if device.type == "cpu" else 5e-2) and ours[-1] < ours[0]
