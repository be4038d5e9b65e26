"""Tokens a second of the trainer in `recipes/train_byte_lm.py`, against the same model with compiled FlexAttention.

Both models start from the same weights and take turns, some steps each a round, on the same batches; only what their
blocks call for attention differs. FlexAttention makes its block mask from the documents of every batch, once for all
layers, compiled too. Matrix products outside of attention run in TF32.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from train_byte_lm import LEARNING_RATE, SMALL, ByteGPT, Corpus, Size, update  # noqa: E402

from benchmarks.implementations import OURS  # noqa: E402
from benchmarks.provenance import provenance  # noqa: E402
from benchmarks.timing import Stopwatch, interleaved  # noqa: E402

SIZES = {
    "recipe": SMALL,
    "context 4096": Size(layers=4, width=1024, heads=16, kv_heads=4, head_dim=64, context=4096, window=1024, batch=8),
}


class Flex:
    """Compiled FlexAttention with the mask of the batch at hand."""

    def __init__(self, mask: Callable[..., Any], size: Size) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.mask, self.size = mask, size
        self.block_mask: Any = None
        self.create = torch.compile(create_block_mask, dynamic=False)
        self.attend = torch.compile(flex_attention, dynamic=False)

    def look(self, device: torch.device) -> None:
        length = self.size.context
        self.block_mask = self.create(self.mask, self.size.batch, None, length, length, device=str(device))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v, block_mask=self.block_mask, enable_gqa=True)


class FlexGPT(ByteGPT):
    """The recipe's model with FlexAttention in its blocks."""

    def __init__(self, dtype: torch.dtype, size: Size) -> None:
        super().__init__(None, dtype, size)
        documents, window = self.doc, size.window

        def mask(b, h, q, kv):  # type: ignore[no-untyped-def]
            return (q >= kv) & (q - kv <= window) & (documents[b, q] == documents[b, kv])

        self.attn = self.flex = Flex(mask, size)

    def forward(self, tokens: Tensor, doc: Tensor, positions: Tensor | None = None) -> Tensor:
        self.doc.copy_(doc)
        self.flex.look(doc.device)
        return super().forward(tokens, doc, positions)


def measure(name: str, size: Size, corpus: Corpus, rounds: int, limit_s: float) -> list[dict[str, Any]]:
    device, dtype = torch.device("cuda"), torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    batches = [tuple(t.to(device) for t in corpus.batch(generator, size)) for _ in range(8)]
    losses: dict[str, list[float]] = {}
    calls: dict[str, Callable[[], object]] = {}
    for label, make in ((OURS, lambda: ByteGPT(None, dtype, size)), ("FlexAttention", lambda: FlexGPT(dtype, size))):
        torch.manual_seed(0)
        with device:
            model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE / 10, weight_decay=0.01)

        def steps(model: ByteGPT = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for batch in batches:
                update(model, optimizer, *batch)

        losses[label] = [float(update(model, optimizer, *batch)) for batch in batches]
        calls[label] = steps
    apart = max(abs(a - b) / b for a, b in zip(*losses.values(), strict=True))
    if not apart < 0.01:  # bf16 rounding, multiplied by eight steps
        raise SystemExit(f"{name}: the losses differ by {apart:.1e} of themselves")
    timings = interleaved(calls, Stopwatch(device), rounds=rounds, sample_ms=100.0, limit_s=limit_s)
    tokens = size.batch * size.context * len(batches)
    rows = []
    for label, timing in timings.items():
        row = {
            "row": f"trainer, {name}", "impl": label, "ms": timing.ms / len(batches), "spread": timing.spread,
            "tokens_per_s": tokens / timing.ms * 1e3, "losses_apart": apart,
        }  # fmt: skip
        rows.append(row)
        print(
            f"{row['row']:24} {label:14} {row['tokens_per_s']:12.0f} tokens/s   spread {row['spread']:.1%}", flush=True
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of timing for one size")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU: compiled FlexAttention has no backward on a CPU")
    torch.set_float32_matmul_precision("high")
    result: dict[str, Any] = {**provenance(torch.device("cuda")), "rows": []}
    corpus = Corpus.of_standard_library(4_000_000)
    for name, size in SIZES.items():
        result["rows"] += measure(name, size, corpus, options.rounds, options.limit)
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
