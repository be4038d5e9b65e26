"""Writes docs/gallery.md and its pictures: masks and score mods, each drawn from itself, with its measured speed.

Run it from the repository: `python docs/make_gallery.py`. Tests compare the page and the pictures with what this makes.
New speeds need no run of it: `python benchmarks/run.py --report` writes them between the page's markers.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))


import composattn as ca
from benchmarks.report import speed_markers, with_speeds
from composattn import mods
from composattn.analysis.pictures import of_mask
from composattn.mods.mask import Mask
from composattn.mods.score import Score

PAGE = Path(__file__).with_name("gallery.md")
PICTURES = Path(__file__).with_name("plots") / "masks"
SIZE, TILE = 64, 8
"""Positions on each side of a picture, and of a tile in it."""


@dataclass(frozen=True)
class Entry:
    """One picture: its file, its heading, what it is for, the code that makes the mod, and what was measured."""

    name: str
    title: str
    words: str
    code: str
    measured: str = ""
    """The pattern of `benchmarks/cases.py` that has the same form, if one is measured."""
    tile: int = TILE


IDS = "torch.tensor([0] * 11 + [1] * 24 + [2] * 5 + [3] * 24)"

ENTRIES = (
    Entry("causal", "Causal", "Language models: no key after the query.", "mods.causal()", "causal"),
    Entry(
        "window", "Sliding window", "The last keys only. Work grows with S, not S² (Mistral, Gemma, GPT-OSS).",
        "mods.causal() & mods.sliding_window(12)", "window",
    ),
    Entry(
        "prefix", "Prefix LM", "A prompt that sees itself whole, and an answer that is causal (T5, PaliGemma).",
        "mods.prefix_lm(20)", "prefix",
    ),
    Entry(
        "documents", "Packed documents", "Documents packed into one row, causal inside each. What lies between them "
        "costs nothing.", f"ids = {IDS}\nmods.document(ids) & mods.causal()", "eight_causal_documents",
    ),
    Entry(
        "documents-whole", "Packed documents, both ways", "The same for encoders.",
        f"ids = {IDS}\nmods.document(ids)", "eight_documents",
    ),
    Entry(
        "chunked", "Chunks", "Each chunk sees itself and its past (Llama 4's local layers).",
        "mods.chunked(16) & mods.causal()",
    ),
    Entry(
        "global", "Window and first tokens", "A few keys that all queries see: attention sinks, summaries (Longformer, "
        "StreamingLLM).", 'mods.causal() & (mods.global_tokens(4, "keys") | mods.sliding_window(12))',
    ),
    Entry(
        "dilated", "Dilated window", "Each third key of a wider window.",
        "mods.dilated_window((24, 24), 3)",
    ),
    Entry(
        "neighbourhood", "Neighbourhood of an image", "8 × 8 pixels in rows, each sees the 3 × 3 around it (NATTEN).",
        "mods.neighborhood((8, 8), (3, 3))",
    ),
    Entry(
        "images", "Text with images", "A window for the text, and images that see themselves whole (Gemma 3 and 4).",
        """\
image = torch.zeros(64, dtype=torch.int32)  # 0 is text, then a number per image
image[8:20], image[36:44] = 1, 2

def same_image(b, h, q_idx, kv_idx):
    return (image[q_idx] == image[kv_idx]) & (image[q_idx] > 0)

(mods.causal() & mods.sliding_window(16)) | same_image""",
    ),
    Entry(
        "video", "Chunks of video", "Frames see their chunk and the two before it whole (Magi-1).",
        """\
CHUNK, BACK = 12, 2

def video(b, h, q_idx, kv_idx):
    back = q_idx // CHUNK - kv_idx // CHUNK
    return (back >= 0) & (back <= BACK)

ca.mask(video)""",
    ),
    Entry(
        "tree", "A tree of drafted tokens", "Speculative decoding: each token sees the text before the tree, and its "
        "ancestors (Medusa, EAGLE).",
        """\
TEXT = 40
parent = [-1, 0, 0, 0, 1, 1, 2, 3, 4, 4, 5, 6, 6, 8, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18]
sees = torch.zeros(64, 64, dtype=torch.bool)
for node, up in enumerate(parent):
    sees[TEXT + node] |= sees[TEXT + up] if up >= 0 else False
    sees[TEXT + node, TEXT + node] = True

def tree(b, h, q_idx, kv_idx):
    return ((kv_idx < TEXT) & (kv_idx <= q_idx)) | sees[q_idx, kv_idx]

ca.mask(tree)""",
    ),
    Entry(
        "prefix-shared", "One prompt, many answers", "Answers share a prompt and don't see each other (GRPO).",
        "mods.shared_prefix(torch.tensor([0, 24, 34, 50, 64]))",
    ),
    Entry(
        "blocks", "Blocks that the model picks", "Top-k blocks per block of queries, as a tensor that changes in each "
        "call (MoBA, NSA).",
        """\
picked = torch.tensor([[0, 0], [0, 1], [0, 2], [1, 3]], dtype=torch.int32)[None, None]  # (B, H, blocks, k)
mods.causal() & ca.BlockSparse.topk(picked, 16, 64, 64)""",
        tile=16,
    ),
    Entry(
        "alibi", "ALiBi", "A penalty that grows with the distance, with a slope per head, learned or not. "
        "Dark keys count most.", "mods.alibi(torch.tensor([0.1]))", "alibi",
    ),
    Entry(
        "relative", "Learned relative bias", "A table by head and distance. Its gradient comes with the others.",
        "table = torch.sin(torch.arange(129) / 6.0)[None]\nmods.relative_bias(table)", "relative",
    ),
    Entry("softcap", "Soft cap", "No score beyond the cap (Gemma 2).", "mods.softcap(30.0)", "softcap"),
)  # fmt: skip

HEAD = """\
# Gallery

<!-- Written by docs/make_gallery.py: change that and run it. -->

Each picture is drawn from the mask or score mod below it. Rows are 64 queries, columns are 64 keys. Grey tiles are
skipped. In blue tiles each pair is tested, and the stronger blue is what a query sees. Green tiles are visible whole
and run with no test. Which tile is what was found by the analysis of the function, not by looking at each pair.

Speeds are of masks of the same form in the kept benchmark runs: bf16, D 128, 8192 queries and keys, TFLOP/s of the
visible pairs. "Ours to it" is ours over the fastest other implementation of the same run: above 1×, ours is faster.
[benchmarks.md](benchmarks.md) has all rows and says how they are measured. Where nothing stands, nothing was measured.

The blocks of this page run as they stand, in order, behind this one:

```python
import torch

import composattn as ca
from composattn import mods
from composattn.analysis.pictures import of_mask
```
"""


def made(entry: Entry) -> Any:
    """The mod that an entry's code ends in."""
    vocabulary = {"torch": torch, "ca": ca, "mods": mods}
    *before, last = entry.code.rsplit("\n", 1)
    exec("\n".join(before), vocabulary)
    return eval(last, vocabulary)


def kinds(mask: Mask, tile: int) -> torch.Tensor:
    """What the analysis says of each tile: 0 hidden, 1 tested, 2 whole."""
    return mask.tiles(SIZE, SIZE, (tile, tile))[0, 0]


def mask_picture(mask: Mask, title: str, tile: int) -> str:
    return of_mask(mask.dense(SIZE, SIZE)[0, 0], kinds(mask, tile), (tile, tile), title)


def picture(entry: Entry) -> str:
    mod = made(entry)
    if isinstance(mod, Mask):
        return mask_picture(mod, entry.title, entry.tile)
    assert isinstance(mod, Score)
    return mod.named(entry.title).svg(SIZE)


def caption(entry: Entry) -> str:
    mod = made(entry)
    if not isinstance(mod, Mask):
        return ""
    found, pairs = kinds(mod, entry.tile), mod.dense(SIZE, SIZE).float().mean().item()
    visited, whole, every = int((found > 0).sum()), int((found == 2).sum()), math.prod(found.shape)
    tiles = f"{visited} of {every} tiles are visited, {whole} of them with no test"
    return f"{pairs:.0%} of the pairs are visible; {tiles}.\n"


def section(entry: Entry) -> str:
    parts = [
        f"## {entry.title}\n",
        f"{entry.words}\n",
        f"![{entry.title}: {entry.words}](plots/masks/{entry.name}.svg)\n",
        f"```python\n{entry.code}\n```\n",
        caption(entry),
        f"{speed_markers(entry.measured)}\n" if entry.measured else "",
    ]
    return "\n".join(part for part in parts if part)


def page() -> str:
    text = "\n".join([HEAD, *(section(entry) for entry in ENTRIES)]).rstrip() + "\n"
    return with_speeds(text)


def pictures() -> dict[Path, str]:
    return {PICTURES / f"{entry.name}.svg": picture(entry) for entry in ENTRIES}


if __name__ == "__main__":
    PICTURES.mkdir(parents=True, exist_ok=True)
    for path, text in {PAGE: page(), **pictures()}.items():
        path.write_text(text)
    print(f"{PAGE}: {len(ENTRIES)} pictures")
