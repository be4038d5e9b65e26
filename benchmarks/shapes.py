"""Shapes that nobody chose for being fast: half of models, half drawn. One part is to fit choices on, others held out.

`drawn(direction, part)` gives the cases of a part, the same in every run. What is fitted on the part "fit" is judged on
the parts "held-out" and "unseen", whose shapes have other lengths and batches. Tables were looked at with the results
of "held-out"; "unseen" has shapes of neither. "short" has 100 to 1,000 queries, whose last tile is partly empty:
it was fitted on too. So was "near": other shapes of the kinds that were behind a peer among the unseen ones. "named"
has the shapes that a review found far behind, and beside them what D 72 to 96 take of the same tokens.

Results name shapes that a table is then mended by, so each judgement draws its own: `drawn(direction, "unseen", seed)`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import re
from typing import Literal

from benchmarks.cases import (
    Case,
    Direction,
    PatternFactory,
    alibi,
    causal,
    dilated,
    documents,
    full,
    pair_bias,
    prefix,
    relative,
    softcap,
    window,
)

Part = Literal["fit", "held-out", "unseen", "short", "near", "named"]
SEEDS: dict[Part, int] = {"fit": 1, "held-out": 2, "unseen": 3, "short": 4, "near": 5, "named": 6}
COUNTS: dict[Direction, int] = {"forward": 200, "backward": 120}
SHORT = 80  # shapes of the part of that name
# of a call's products: 0.03 to 2 ms at 600 TFLOP/s, so that a sweep of some hundred shapes takes minutes
LEAST_FLOPS, MOST_FLOPS = 2e10, 1.2e12
MOST_NUMBERS = 3 << 28  # of q, k, v and the output together: 1.6 GB of 16 bits


@dataclasses.dataclass(frozen=True)
class Layer:
    """Attention of a published model. `lengths`: of queries; `keys`: how many keys, if other.

    `batch`: of so many sequences; 0: of as many as are drawn.
    """

    model: str
    heads: int
    kv_heads: int
    dim: int
    lengths: tuple[int, ...]
    pattern: PatternFactory = full
    keys: int = 0
    v_dim: int = 0
    batch: int = 0


TEXT = (512, 1024, 2048, 3000, 4096, 8192)
LAYERS = (
    Layer("LLaMA 3 8B", 32, 8, 128, TEXT, causal),
    Layer("LLaMA 3 70B", 64, 8, 128, TEXT, causal),
    Layer("LLaMA 3.2 1B", 32, 8, 64, TEXT, causal),
    Layer("LLaMA 2 7B", 32, 32, 128, (1024, 2048, 4096), causal),
    Layer("Qwen 2.5 7B", 28, 4, 128, TEXT, causal),
    Layer("Qwen 2.5 0.5B", 14, 2, 64, TEXT, causal),
    Layer("Mistral 7B", 32, 8, 128, (4096, 6000, 8192), functools.partial(window, width=4096)),
    Layer("Gemma 2 9B", 16, 8, 256, (1024, 4096, 8192), functools.partial(softcap, cap=50.0)),
    Layer("Gemma 3 4B, local", 8, 4, 256, (2048, 4096, 8192), functools.partial(window, width=1024)),
    Layer("Gemma 3 4B, global", 8, 4, 256, (2048, 4096, 8192), causal),
    Layer("GPT-OSS 20B, local", 64, 8, 64, (2048, 4096, 8192), functools.partial(window, width=128)),
    Layer("GPT-OSS 20B, global", 64, 8, 64, (2048, 4096, 8192), causal),
    Layer("DeepSeek V3, prefill", 128, 128, 192, (1024, 2048, 4096), causal, v_dim=128),
    Layer("Phi 3 mini", 32, 32, 96, TEXT, causal),
    Layer("StableLM 3B", 32, 32, 80, (1024, 2048, 4096), causal),
    Layer("GPT-J 6B", 16, 16, 256, (1024, 2048), causal),
    Layer("MPT 7B", 32, 32, 128, (1024, 2048, 4096), alibi),
    Layer("BLOOM 560M", 16, 16, 64, (1024, 2048), alibi),
    Layer("T5 base", 12, 12, 64, (512, 1024), relative),
    Layer("BERT base", 12, 12, 64, (128, 384, 512)),
    Layer("packed pretraining", 32, 8, 128, (4096, 8192), documents),
    Layer("ViT-B/16", 12, 12, 64, (197, 577)),
    Layer("ViT-H/14", 16, 16, 80, (257, 577)),
    Layer("CLIP bigG", 16, 16, 104, (257,)),
    Layer("SigLIP so400m", 16, 16, 72, (256, 729, 1024)),
    Layer("DINOv2 L", 16, 16, 64, (1370,)),
    Layer("DINOv2 g", 24, 24, 64, (1370,)),
    Layer("SAM H", 16, 16, 80, (4096,)),
    Layer("Whisper large, encoder", 20, 20, 64, (1500,)),
    Layer("Whisper large, cross", 20, 20, 64, (448,), keys=1500),
    Layer("SD 1.5, 64x64", 8, 8, 40, (4096,)),
    Layer("SD 1.5, 32x32", 8, 8, 80, (1024,)),
    Layer("SD 1.5, 16x16", 8, 8, 160, (256,)),
    Layer("SDXL, 64x64", 10, 10, 64, (4096,)),
    Layer("SDXL, 32x32", 20, 20, 64, (1024,)),
    Layer("SDXL, cross 64x64", 10, 10, 64, (4096,), keys=77),
    Layer("SDXL, cross 32x32", 20, 20, 64, (1024,), keys=77),
    Layer("Flux", 24, 24, 128, (1536, 4608)),
    Layer("Wan 1.3B", 12, 12, 128, (7800, 14040)),
    Layer("Wan, cross", 12, 12, 128, (7800,), keys=512),
    Layer("PixArt, cross", 16, 16, 72, (1024, 4096), keys=300),
)

# kinds that were behind a peer: rows of no whole sectors and few keys, few rounds of tiles, packed heads of D 256;
# in the backward many queries on few keys, and some hundred queries
NEAR: dict[Direction, tuple[Layer, ...]] = {
    "forward": (
        Layer("near", 16, 16, 72, (200, 240, 320, 400, 512)),
        Layer("near", 12, 12, 80, (192, 240, 256, 384)),
        Layer("near", 16, 16, 88, (208, 250, 384)),
        Layer("near", 32, 32, 96, (192, 256, 384, 640)),
        Layer("near", 16, 16, 72, (1100, 1700, 2900, 5000)),
        Layer("near", 32, 8, 72, (600, 1400, 4000), causal),
        Layer("near", 16, 16, 72, (2500,), keys=320),
        Layer("near", 8, 8, 40, (3400, 3900), batch=1),
        Layer("near", 12, 12, 64, (1300, 2300, 2700), batch=1),
        Layer("near", 8, 1, 256, (140, 180, 300), keys=2300),
    ),
    "backward": (
        Layer("near", 12, 12, 128, (6000, 9600), keys=440),
        Layer("near", 16, 16, 72, (1500, 2600, 3600), keys=280),
        Layer("near", 16, 16, 80, (3000,), keys=360),
        Layer("near", 8, 8, 88, (150, 220, 250), causal),
        Layer("near", 12, 12, 72, (180, 230), causal),
        Layer("near", 40, 8, 112, (480, 600, 700)),
        Layer("near", 28, 4, 128, (400, 600, 640), causal),
    ),
}
NEARBY = 40  # shapes of that part

# a review found these far behind (forward D 40, 72 and 88 at 0.57 to 0.64 of a peer; backward D 160 and few keys at
# 0.92 and 0.95), and D 72 and 80 slower than D 96
NAMED: dict[Direction, tuple[str, ...]] = {
    "forward": (
        "named: B64 S729 H16 D72 full",
        "named: B10 S1408 H32/8 D40 full",
        "named: B64 S576 H12 D88 full",
        *(f"named: B{b} S{s} H12 D{d} full" for b, s in ((248, 128), (64, 576), (64, 729)) for d in (72, 80, 96)),
    ),
    "backward": (
        *(f"named: B{b} S4096 on 77 H10 D64 full" for b in (2, 16, 64)),
        "named: B2 S4096 H16 D160 causal",
        "named: B2 S5000 H16 D160 full",
        "named: B8 S1408 H16 D160 full",
    ),
}

DIMS = (40, 48, 56, 64, 64, 72, 80, 88, 96, 104, 112, 128, 128, 128, 144, 160, 192, 192, 224, 256, 256)
HEADS = ((8, 8), (12, 12), (16, 16), (16, 2), (24, 3), (28, 4), (32, 8), (40, 8), (64, 8), (8, 1))
# a third full, a third causal, the rest of the gallery
PATTERNS: tuple[tuple[int, PatternFactory], ...] = (
    (8, full), (8, causal), (1, functools.partial(window, width=256)), (1, functools.partial(window, width=1024)),
    (1, alibi), (1, softcap), (1, relative), (1, pair_bias), (1, documents), (1, prefix), (1, dilated),
)  # fmt: skip


def drawn(direction: Direction, part: Part, seed: int | None = None) -> list[Case]:
    """The shapes of a part, models first; `seed`: others drawn as those are, none of them in any part."""
    if part == "named":
        return [shape_named(f"{direction} {name}") for name in NAMED[direction]]
    generator = random.Random(f"{direction} {SEEDS[part] if seed is None else seed}")
    if part == "short":
        return [_of_nobody(direction, generator, (100, 1000)) for _ in range(SHORT)]
    if part == "near":
        near = itertools.islice(itertools.cycle(NEAR[direction]), NEARBY)
        return list({case.name: case for case in (_of_layer(layer, direction, generator) for layer in near)}.values())
    before = [other for other in SEEDS if seed is not None or SEEDS[other] < SEEDS[part]]
    taken = {case.name for other in before for case in drawn(direction, other)}
    count = COUNTS[direction]
    found: dict[str, Case] = {}
    for turn in itertools.count():
        if len(found) == count:
            return list(found.values())
        of_models = len(found) < count // 2
        case = (
            _of_layer(LAYERS[turn % len(LAYERS)], direction, generator)
            if of_models
            else _of_nobody(direction, generator)
        )
        if case.name not in taken:
            found[case.name] = case
    raise AssertionError("unreachable")


def every_shape() -> list[Case]:
    """The shapes of both directions and parts."""
    return [case for direction in COUNTS for part in SEEDS for case in drawn(direction, part)]


def shape_named(name: str) -> Case:
    """The shape of this name, in whatever part or with whatever seed it was drawn."""
    found = re.fullmatch(r"(forward|backward) (.+): B(\d+) S(\d+)(?: on (\d+))? H([\d/]+) D([\d/]+) (.+)", name)
    pattern = next((p for p in _patterns() if found and _name(p) == found[8]), None)
    if found is None or pattern is None:
        raise ValueError(f"no shape is named {name!r}: names are as {drawn('forward', 'fit')[0].name!r}")
    direction: Direction = "forward" if found[1] == "forward" else "backward"
    heads, _, kv_heads = found[6].partition("/")
    dim, _, v_dim = found[7].partition("/")
    return Case(
        name, (f"{direction} shapes",), pattern, int(found[3]), int(heads), int(found[4]), int(dim),
        kv_heads=int(kv_heads or heads), kv_len=int(found[5] or found[4]), v_dim=int(v_dim or dim), direction=direction,
    )  # fmt: skip


def _patterns() -> list[PatternFactory]:
    return [p for _, p in PATTERNS] + [layer.pattern for layer in (*LAYERS, *NEAR["forward"], *NEAR["backward"])]


def _of_layer(layer: Layer, direction: Direction, generator: random.Random) -> Case:
    length = generator.choice(layer.lengths)
    return _case(
        direction, generator, layer.model, layer.pattern, layer.heads, layer.kv_heads, length, layer.keys or length,
        layer.dim, layer.v_dim or layer.dim, layer.batch,
    )  # fmt: skip


def _of_nobody(direction: Direction, generator: random.Random, between: tuple[int, int] = (128, 8192)) -> Case:
    heads, kv_heads = generator.choice(HEADS)
    dim = generator.choice(DIMS)
    length = round(math.exp(generator.uniform(*map(math.log, between))))
    (pattern,) = generator.choices([p for _, p in PATTERNS], [weight for weight, _ in PATTERNS])
    keys = length
    if pattern is full and generator.random() < 0.4:  # masks here are aligned to the first key
        keys = round(math.exp(generator.uniform(math.log(64), math.log(8192))))
    return _case(direction, generator, "drawn", pattern, heads, kv_heads, length, keys, dim, dim)


def _case(
    direction: Direction, generator: random.Random, kind: str, pattern: PatternFactory, heads: int, kv_heads: int,
    length: int, keys: int, dim: int, v_dim: int, sequences: int = 0,
) -> Case:  # fmt: skip
    """With as many sequences as make a call of a drawn size, as far as memory goes, or so many."""
    products = 2 if direction == "forward" else 5
    one = products * heads * length * keys * (dim + v_dim)
    wanted = math.exp(generator.uniform(math.log(LEAST_FLOPS), math.log(MOST_FLOPS)))
    numbers = (heads * length + kv_heads * keys) * (dim + v_dim)
    batch = sequences or max(1, min(round(wanted / one), MOST_NUMBERS // numbers, 512))
    of_keys = f" on {keys}" if keys != length else ""
    of_heads = f"{heads}/{kv_heads}" if heads != kv_heads else f"{heads}"
    of_values = f"/{v_dim}" if v_dim != dim else ""
    pattern_name = _name(pattern)
    name = f"{direction} {kind}: B{batch} S{length}{of_keys} H{of_heads} D{dim}{of_values} {pattern_name}"
    return Case(
        name, (f"{direction} shapes",), pattern, batch, heads, length, dim, kv_heads=kv_heads, kv_len=keys, v_dim=v_dim,
        direction=direction,
    )  # fmt: skip


def _name(pattern: PatternFactory) -> str:
    """What a case's name says of its pattern, with the arguments that it does not have as a rule."""
    if isinstance(pattern, functools.partial):
        return " ".join([pattern.func.__name__, *map("{:g}".format, pattern.keywords.values())])
    return pattern.__name__
