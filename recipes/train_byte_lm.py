"""Train a small byte-level GPT on the source files of Python's own standard library, packed as documents.

Grouped-query attention over a sliding window that never leaves the document; rotary positions outside of attention.
Prints and draws the falling loss, and trains once more with backend="reference" (dense, fp64 inside) from the same
seed: the losses of both must agree, step by step. `--tiny` trains a smaller one: 92 s of a CPU's time, where its losses
differ by 1.3e-7 of themselves. `--backend blackwell-emulated --tiny --bf16 --steps 2` trains that through kernels for a
GPU that is not there, in 15 s.
"""

from __future__ import annotations

import argparse
import importlib.util
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import OUT, best_device
from torch import Tensor, nn

import composattn as ca
from composattn.extras import how_to_install
from composattn.mods import causal, document, sliding_window

LEARNING_RATE = 3e-3
# Both runs do the same outside of attention; inside, one computes in fp32 or bf16 and the other in fp64. What differs
# is rounding, which training multiplies from step to step: after 60 steps on a
# CPU the losses differ by 1e-7 of themselves in fp32, by 5e-5 in bf16. A GPU sums in another order: hence the room.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a batch; small enough for a CPU unless said otherwise."""

    layers: int = 3
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    context: int = 256
    window: int = 128
    batch: int = 8


SMALL = Size()
TINY = Size(layers=1, width=64, heads=2, kv_heads=1, head_dim=64, context=160, window=100, batch=1)


@dataclass(frozen=True)
class Corpus:
    """Files one after the other, and for each byte the number of its file."""

    data: Tensor  # (N,) uint8
    doc: Tensor  # (N,) int32
    names: list[str]

    @staticmethod
    def of_standard_library(size: int) -> Corpus:
        """The first `size` bytes of the standard library's top-level modules, by name."""
        files, total = [], 0
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            source = path.read_bytes()
            if not source:
                continue
            files.append((path.name, source))
            total += len(source)
            if total >= size:
                break
        data = torch.frombuffer(bytearray(b"".join(s for _, s in files)), dtype=torch.uint8)
        doc = torch.repeat_interleave(torch.arange(len(files)), torch.tensor([len(s) for _, s in files]))
        return Corpus(data[:size], doc[:size].int(), [name for name, _ in files])

    def batch(self, generator: torch.Generator, size: Size = SMALL) -> tuple[Tensor, Tensor, Tensor]:
        """Bytes (B, S), the bytes that follow, and the document of each; slices of the packed stream."""
        start = torch.randint(len(self.data) - size.context - 1, (size.batch, 1), generator=generator)
        at = start + torch.arange(size.context + 1)
        tokens, doc = self.data[at].long(), self.doc[at]
        # The first byte of a file can't be told from the end of another one: it is no target.
        targets = tokens[:, 1:].masked_fill(doc[:, 1:] != doc[:, :-1], -100)
        return tokens[:, :-1], targets, doc[:, :-1].contiguous()

    def bits_of_frequencies(self) -> float:
        """Bits a byte when only the frequency of each byte is known."""
        p = torch.bincount(self.data.long(), minlength=256).double() / len(self.data)
        return float(-(p * p.clamp_min(1e-30).log2()).sum())


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021) on x (B, H, S, D): pairs of channels turn with the position."""
    half = x.shape[-1] // 2
    frequency = 1e4 ** (-torch.arange(half, device=x.device) / half)
    angle = positions[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, width = size, size.width
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (size.heads + 2 * size.kv_heads) * size.head_dim, bias=False)
        self.out = nn.Linear(size.heads * size.head_dim, width, bias=False)
        self.mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, positions: Tensor, attn: Callable[..., Any], dtype: torch.dtype) -> Tensor:
        """x (B, S, width) at positions (S,); attention runs in `dtype`, all else in fp32."""
        size = self.size
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, size.head_dim)).transpose(1, 2)
        q, k, v = heads.split([size.heads, size.kv_heads, size.kv_heads], dim=1)
        mixed = attn(*(t.to(dtype) for t in (rotate(q, positions), rotate(k, positions), v)))
        x = x + self.out(mixed.to(x.dtype).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class ByteGPT(nn.Module):
    def __init__(self, backend: str | None, dtype: torch.dtype, size: Size = SMALL) -> None:
        super().__init__()
        self.dtype, width = dtype, size.width
        self.doc = nn.Buffer(torch.zeros(size.batch, size.context, dtype=torch.int32))
        # Planned once: the mask reads the buffer anew at every call, so each batch only writes its documents there.
        self.mask = causal() & sliding_window(size.window) & document(self.doc)
        self.attn: Callable[..., Any] = ca.Attention(mask_mod=self.mask, backend=backend)
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 256, bias=False))

    def forward(self, tokens: Tensor, doc: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits (B, S, 256) of tokens (B, S) that lie in documents `doc` (B, S).

        positions: of the tokens, where they are some of a sequence's (recipe 12); `doc` is of all of it.
        """
        self.doc.copy_(doc)
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, self.attn, self.dtype)
        return self.head(x)


def update(model: ByteGPT, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor, doc: Tensor) -> Tensor:
    """One step; returns the loss before it, in nats a byte."""
    logits = model(tokens, doc)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def train(
    corpus: Corpus,
    steps: int,
    planned: int,
    backend: str | None,
    device: torch.device,
    dtype: torch.dtype,
    size: Size = SMALL,
) -> list[float]:
    """Bits a byte at each of the first `steps` of `planned` steps; weights and batches are the same in every run."""
    torch.manual_seed(0)
    with device:
        model = ByteGPT(backend, dtype, size)
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=planned)
    bits: list[float] = []
    start = time.perf_counter()
    for step in range(steps):
        tokens, targets, doc = (t.to(device) for t in corpus.batch(generator, size))
        loss = update(model, optimizer, tokens, targets, doc)
        schedule.step()
        bits.append(loss.item() / torch.tensor(2.0).log().item())
        if step % 20 == 0 or step == steps - 1:
            print(f"  step {step:4}  {bits[-1]:.3f} bits a byte  {time.perf_counter() - start:5.1f} s", flush=True)
    return bits


def draw_losses(ours: list[float], reference: list[float], frequencies: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(ours, label="composattn")
    axes.plot(reference, ":", label='backend="reference"', linewidth=3)
    axes.axhline(frequencies, color="grey", linewidth=0.8, label="byte frequencies alone")
    axes.set(xlabel="step", ylabel="bits a byte", title="A byte-level GPT on Python's standard library")
    axes.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--reference-steps", type=int, default=60, help="how many of them the reference repeats")
    parser.add_argument("--bytes", type=int, default=1_000_000, help="size of the corpus")
    parser.add_argument("--bf16", action="store_true", help="attention in bf16 on a CPU too, as on a GPU")
    parser.add_argument("--backend", help="what trains, by default as composattn chooses; emulated ones want --bf16")
    parser.add_argument("--tiny", action="store_true", help="one layer, one sequence of 160 bytes")
    options = parser.parse_args()

    device, dtype = best_device()
    dtype = torch.bfloat16 if options.bf16 else dtype
    size = TINY if options.tiny else SMALL
    corpus = Corpus.of_standard_library(options.bytes)
    frequencies = corpus.bits_of_frequencies()
    print(f"{len(corpus.names)} files, {len(corpus.data)} bytes; from frequencies alone {frequencies:.3f} bits each")

    print(f"training on {device}, attention in {str(dtype)[6:]}:")
    ours = train(corpus, options.steps, options.steps, options.backend, device, dtype, size)
    print('the same with backend="reference":')
    repeated = min(options.steps, options.reference_steps)
    reference = train(corpus, repeated, options.steps, "reference", device, dtype, size)

    apart = max(abs(a - b) / b for a, b in zip(ours, reference, strict=False))
    allowed = TOLERANCE[dtype]
    print(f"largest relative difference of the losses over {repeated} steps: {apart:.1e} (allowed {allowed:g})")
    picture = OUT / "byte-lm.png"
    if importlib.util.find_spec("matplotlib") is None:
        print(f"the losses are not drawn: matplotlib is not installed; {how_to_install('plot')}")
    else:
        draw_losses(ours, reference, frequencies, picture)
        print(f"the losses are drawn in {picture}")
    if not apart <= allowed:
        raise SystemExit("the two trainings differ")
    if options.steps >= 100 and not sum(ours[-10:]) / 10 < frequencies - 0.5:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
