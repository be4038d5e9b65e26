"""Tokens per second of a training step of models of Hugging Face transformers, by each of their attention functions.

    python benchmarks/models.py --out benchmarks/results/h200-models.json

Two layers of each model with its own shapes and random weights, bf16, eager but for attention; forward, loss and
backward. One model serves all implementations, which take turns. An implementation whose loss is another one, or that
leaves out what the model asks for (SDPA a soft cap), is no row.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)

from benchmarks.implementations import OURS  # noqa: E402
from benchmarks.provenance import provenance  # noqa: E402
from benchmarks.timing import Stopwatch, interleaved  # noqa: E402

FLASH = "flash_attention_4"


@dataclass(frozen=True)
class Model:
    """A model by the name of its classes in transformers, and the tokens of a step."""

    name: str
    kind: str
    batch: int
    length: int
    options: dict[str, Any]
    leaves_out: tuple[str, ...] = ()  # implementations that don't compute this model

    def made(self, device: torch.device) -> Any:
        import transformers

        config = getattr(transformers, f"{self.kind}Config")(**self.options, use_cache=False)
        torch.manual_seed(0)
        with device:
            return getattr(transformers, f"{self.kind}ForCausalLM")(config).to(torch.bfloat16)


LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "num_hidden_layers": 2, "vocab_size": 32000, "max_position_embeddings": 32768,
}  # fmt: skip
GEMMA = {
    "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 256, "num_hidden_layers": 2, "vocab_size": 32000, "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
}  # fmt: skip
MODELS = (
    Model("Llama 32/8 D128, 8k", "Llama", 2, 8192, LLAMA),
    Model("Llama 32/8 D128, 32k", "Llama", 1, 32768, LLAMA),
    Model("Mistral window 4096, 16k", "Mistral", 1, 16384, LLAMA | {"sliding_window": 4096}),
    Model("Gemma 2 softcap and window 4096, 8k", "Gemma2", 2, 8192, GEMMA, ("sdpa",)),
)
SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 2, "vocab_size": 64,
}  # fmt: skip


def steps(model: Any, kind: Model, names: list[str], device: torch.device) -> tuple[dict[str, Callable[[], Any]], Any]:
    """A training step by each of the implementations, and for each of the others why it has none."""
    tokens = torch.randint(model.config.vocab_size, (kind.batch, kind.length), device=device)

    def step(name: str) -> float:
        model.config._attn_implementation = name
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()  # type: ignore[no-any-return]

    made: dict[str, Callable[[], Any]] = {}
    losses: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name in names:
        if name in kind.leaves_out:
            refused[name] = "computes another model"
            continue
        try:
            model.set_attn_implementation(name)
            losses[name] = float(step(name))
        except Exception as error:  # peers raise what they like
            refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        made[name] = functools.partial(step, name)
        if abs(losses[name] - losses[names[0]]) > 2e-2 * abs(losses[names[0]]):
            refused[name] = f"loss {losses[name]:.4f}, ours {losses[names[0]]:.4f}"
            del made[name]
    return made, refused


def measure(kind: Model, names: list[str], device: torch.device, rounds: int, limit_s: float) -> list[dict[str, Any]]:
    made, refused = steps(kind.made(device), kind, names, device)
    timings = interleaved(made, Stopwatch(device), rounds=rounds, sample_ms=1.0, limit_s=limit_s)
    tokens = kind.batch * kind.length
    rows: list[dict[str, Any]] = [
        {"row": kind.name, "impl": name, "ms": t.ms, "spread": t.spread, "tokens_per_s": tokens / t.ms * 1e3}
        for name, t in timings.items()
    ]
    rows += [{"row": kind.name, "impl": name, "not served": why} for name, why in refused.items()]
    for row in rows:
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of timing for one model")
    parser.add_argument("--impl", nargs="+", default=[OURS, "sdpa", FLASH, "flex_attention"])
    parser.add_argument("--only", default="", help="regular expression on the model's name")
    parser.add_argument("--smoke", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import composattn.integrations.transformers as integration

    integration.register(OURS)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {**provenance(device), "rows": []}
    for model in (m for m in MODELS if re.search(options.only, m.name)):
        if options.smoke:
            small = {name: SMALL.get(name, value) for name, value in model.options.items()}
            model = Model(model.name, model.kind, 1, 64, small, model.leaves_out)
        result["rows"] += measure(model, options.impl, device, options.rounds, options.limit)
        # a second model's lengths would be dynamic ones to FlexAttention, in kernels that no user of one model has
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
