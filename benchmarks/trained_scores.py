"""How the scores of a trained model lie, two numbers a head, for draws that are like them (`--set trained`).

    python -m benchmarks.trained_scores FOLDER --gguf FILE --text README.md docs/*.md --out OUT

A small language model reads text on a CPU. Of each head, over rows of its causal mask: how far the scores of a row
deviate, and how far that of the first key lies above their mean. In trained models the first key takes what weight a
head does not need ("attention sinks", Xiao et al. 2023). Both decide how often the largest score of a row rises while a
kernel reads its keys. `drawn` makes q and k whose scores have the same two numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import provenance

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "results" / "scores" / "smollm2-135m.json"
STEP = 7  # from head to head of a case through those that are kept, so that few heads are of all layers
EVERY = 97  # rows that are looked at: each 97th, from the 1,000th on


def heads() -> tuple[tuple[float, float], ...]:
    """Deviation and lead of the first key, of the heads of all kept layers."""
    rows = json.loads(KEPT.read_text())["rows"]
    return tuple((row["deviation"], row["first above mean"]) for row in rows)


def drawn(q: torch.Tensor, k: torch.Tensor, of_heads: Sequence[tuple[float, float]]) -> None:
    """Makes q (B, H, Sq, D) and k (B, Hkv, Skv, D), both N(0, 1), such that scores lie as `of_heads` says, in place.

    One column carries the lead of the first key.
    """
    told = torch.tensor([of_heads[h * STEP % len(of_heads)] for h in range(q.shape[1])], device=q.device)
    deviation, lead = told.to(q.dtype)[None, :, :, None].unbind(2)
    q.mul_(deviation[..., None])
    k[..., 0] = 0
    k[:, :, 0] = 0
    k[:, :, 0, 0] = 4  # beside q of lead * sqrt(D) / 4: both far from what 16 bits can't hold
    q[..., 0] = lead * q.shape[-1] ** 0.5 / 4


def of_rows(scores: torch.Tensor, rows: torch.Tensor) -> tuple[float, float]:
    """Means over `rows` of causal scores (rows, Skv): deviation without the first key, and its lead over the mean."""
    found = [
        (row[1 : n + 1].std(), row[0] - row[1 : n + 1].mean()) for row, n in zip(scores, rows.tolist(), strict=True)
    ]
    deviation, lead = torch.tensor(found).mean(0).tolist()
    return deviation, lead


def scores_of(model: Any, tokens: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """q (H, S, D) and k (Hkv, S, D) of each layer, rotated."""
    import transformers.models.llama.modeling_llama as llama

    taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    rotate = llama.apply_rotary_pos_emb

    def taking(q: torch.Tensor, k: torch.Tensor, *rest: Any, **named: Any) -> Any:
        turned = rotate(q, k, *rest, **named)
        taken[len(taken)] = turned[0][0], turned[1][0]
        return turned

    llama.apply_rotary_pos_emb = taking
    try:
        with torch.no_grad():
            model(tokens, use_cache=False)
    finally:
        llama.apply_rotary_pos_emb = rotate
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of a model of transformers' class Llama")
    parser.add_argument("--gguf", help="its file, where weights are in GGUF")
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=6, help="of which so many are kept, evenly")
    parser.add_argument("--out", type=Path, default=KEPT)
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": options.gguf} if options.gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(options.folder, **where)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32, **where)
    text = "\n\n".join(path.read_text() for path in options.text)
    tokens = torch.tensor(tokenizer(text)["input_ids"][: options.tokens])[None]
    taken = scores_of(model, tokens)
    positions = torch.arange(1000, tokens.shape[1], EVERY)
    rows = []
    for layer in range(0, len(taken), -(-len(taken) // options.layers)):
        q, k = taken[layer]
        for head in range(q.shape[0]):
            scores = q[head, positions] @ k[head * k.shape[0] // q.shape[0]].T * q.shape[-1] ** -0.5
            deviation, lead = of_rows(scores, positions)
            row = {"layer": layer, "head": head, "deviation": round(deviation, 2), "first above mean": round(lead, 2)}
            rows.append(row)
            print(row, flush=True)
    config = model.config
    about = {"layers": config.num_hidden_layers, "heads": config.num_attention_heads, "tokens": tokens.shape[1]}
    result = {**provenance(torch.device("cpu")), "model": about, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
