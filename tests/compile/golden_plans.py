"""The fixed plans of which the kernels are recorded: every step, head dimension, layout and kind of mod.

Those with a twin among the other tests of this folder have its key, so that both compile once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import composattn as ca
from composattn.analysis.captured_gradient import GradientProgram, fused_reads
from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.planning.plan_around import DequantisePlan, QuantisePlan, UnitsPlan
from composattn.backends.fused.planning.plan_backward import SinkForm, plan_backward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import DENSE, Layout, Problem
from composattn.call.scales import rows_of, scaled_scores, scaled_values
from composattn.call.schedule import Schedule
from composattn.mods import masks
from composattn.mods.mask import Mask
from composattn.mods.score import Score

DOCUMENT = torch.arange(600) // 70
SLOPES = torch.linspace(0.1, 1.0, 8)
BIAS = torch.zeros(8, 8, 8)
BLOCKS = torch.tensor([[1, 0, 0, 1, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 1, 0], [1, 1, 0, 0, 1]]).bool()

MASKS: dict[str, Any] = {
    "full": None,
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 512),
    "documents": lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv],
    "causal-documents": lambda b, h, q, kv: (DOCUMENT[q] == DOCUMENT[kv]) & (q >= kv),
    "checkerboard": lambda b, h, q, kv: (q + kv) % 2 == 0,
    "rows": lambda b, h, q, kv: (q >= kv) & (q % 7 != 3),
    "grid": lambda b, h, q, kv: ((q // 64 - kv // 64).abs() <= 3) & ((q % 64 - kv % 64).abs() <= 3),
    "neighborhood": masks.neighborhood((8, 30), (3, 21)),  # too wide for strips
    "blocks": ca.BlockSparse(BLOCKS[None, None], 64, partial=masks.causal()),
}
SCORES: dict[str, Any] = {
    "plain": None,
    "alibi": lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q),
    "softcap": lambda s, b, h, q, kv: 30.0 * torch.tanh(s / 30.0),
    "bias": lambda s, b, h, q, kv: s + BIAS[h, q, kv],
}
# a score mod that reads a table with a gradient, by the pattern of the read; and the table
LEARNED: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[int, ...]]] = {
    "number": (lambda t: lambda s, b, h, q, kv: s + t * 0.1 * (q - kv), ()),
    "head": (lambda t: lambda s, b, h, q, kv: s - t[h] * (q - kv), (4,)),
    "row": (lambda t: lambda s, b, h, q, kv: s + 0.01 * t[h, q] * (q - kv), (4, 300)),
    "column": (lambda t: lambda s, b, h, q, kv: s + t[kv], (300,)),
    "distance": (lambda t: lambda s, b, h, q, kv: s + t[h, q - kv + 260], (4, 521)),
    "pair": (lambda t: lambda s, b, h, q, kv: s + t[h, q, kv], (4, 300, 300)),
}

LONG, SHORT = (16384, 16384), (512, 512)  # calls whose queries see few keys are cut into small tiles
SEVERAL_ROUNDS = 32, 32  # heads of which tiles of 64 queries do not run at once
PACKED = Layout("packed", "packed")
USED_Q = Layout("packed", "packed", used_q=True)
USED = Layout("packed", "packed", used_q=True, used_kv=True)
PAGED = Layout(kv="paged", page_size=16, used_kv=True)
PACKED_PAGED = Layout("packed", "paged", page_size=128, used_kv=True)


def program(score: str, mask: str) -> Program:
    score_mod, mask_mod = SCORES[score], MASKS[mask]
    return Program(
        None if score_mod is None else Score.of(score_mod).expr, None if mask_mod is None else Mask.of(mask_mod).expr
    )


def learned(pattern: str) -> Program:
    """A program whose backward sums the gradient of a table."""
    score, size = LEARNED[pattern]
    bare = Program(Score.of(score(torch.zeros(size).requires_grad_())).expr)
    reads = fused_reads(bare)
    followed = "head" if pattern == "number" else pattern  # a number is what all heads have in common
    assert {r.pattern.name for group in reads.values() for r in group} == {followed.upper()}
    return GradientProgram(bare, reads)


def problem(heads: tuple[int, int], lengths: tuple[int, int], dims: tuple[int, int], **how: Any) -> Problem:
    return Problem(1, *heads, *lengths, *dims, how.pop("dtype", torch.bfloat16), torch.device("cpu"), **how)


def forward(score: str = "plain", mask: str = "full", d: int = 128, dv: int = 0, **how: Any) -> Callable[[], Any]:
    """A forward plan, made when called; `options` go to `plan_forward`, the rest of `how` to the problem."""
    heads, lengths = how.pop("heads", (4, 4)), how.pop("lengths", LONG)
    options = how.pop("options", {})
    return lambda: plan_forward(problem(heads, lengths, (d, dv or d), **how), program(score, mask), HOPPER, **options)


def of_blocks() -> Any:
    """A forward of e4m3 q, k and v with scales of blocks, which products add up."""
    q, k, v = rows_of(*[torch.empty(1, 4, LONG[0], 128, device="meta")] * 3, None, None)
    scale = torch.ones(1, 4, LONG[0] // 64, 1)
    scores = scaled_scores([(k, scale)], None, [(q, scale)])
    assert scores is not None
    mods = Program(scores.expr, Mask.of(MASKS["causal"]).expr, values=scaled_values(v, scale).expr)
    return plan_forward(problem((4, 4), LONG, (128, 128), narrow=FP8), mods, HOPPER, return_lse=False)


def quantise(scale: str, power_of_two: bool, d: int = 128, **how: Any) -> Callable[[], Any]:
    """A kernel of `ca.quantize` that rotates and takes a mean from k."""
    return lambda: QuantisePlan(
        target=HOPPER, dtype=torch.bfloat16, head_dim=d, head_dim_v=d, to=torch.float8_e4m3fn, scale=scale,  # type: ignore[arg-type]
        rows=64, hadamard=True, center=True, power_of_two=power_of_two, **how,
    )  # fmt: skip


def dequantise(of_keys: torch.dtype, of_values: torch.dtype) -> Callable[[], Any]:
    """The kernel before a forward of many rows on keys and values of 8 bits."""
    return lambda: DequantisePlan(target=HOPPER, dtype=torch.bfloat16, of_keys=of_keys, of_values=of_values, rank=4)


def units(d: int, packed: bool = False) -> Callable[[], Any]:
    """The kernel before a backward that sums gradients of two captured tensors."""
    return lambda: UnitsPlan(
        target=HOPPER, dtype=torch.bfloat16, head_dim_v=d, is_dense=not packed, used_q=packed, used_kv=packed,
        has_dlse=packed, sums=2,
    )  # fmt: skip


def combine(forward: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: forward().combine


def backward(
    step: str, score: str = "plain", mask: str = "full", d: int = 128, dv: int = 0, layout: Layout = DENSE, **how: Any
) -> Callable[[], Any]:
    """A step of a gradient, made when called; `how` goes to `plan_backward`. A score in LEARNED has no mask."""
    of_heads, lengths = how.pop("heads", (4, 2)), how.pop("lengths", (220, 220))

    def plan() -> Any:
        mods = learned(score) if score in LEARNED else program(score, mask)
        posed = problem(of_heads, lengths, (d, dv or d), layout=layout)
        return getattr(plan_backward(posed, mods, HOPPER, **how), step)

    return plan


SPLIT: dict[str, Any] = {"heads": (8, 2), "lengths": (1, 4096), "schedule": Schedule(split_kv=3)}
MANY_HEADS: dict[str, Any] = {"heads": (8, 2), "lengths": (7, 300), "schedule": Schedule(split_kv=1)}
PERSISTENT = Schedule(persistent=True, split_kv=1)
BYTES = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2  # of q, k and v
FP8 = (torch.float8_e4m3fn,) * 3
GROUP: dict[str, Any] = {"mask": "causal", "heads": (64, 8), "lengths": (8192, 8192)}  # tiles of keys are cut by heads
LEARNED_SINKS = SinkForm(torch.float32, by_sequence=False)
FEW_TILES = (1024, 1024)  # so few tiles of keys that some are cut

PLANS: dict[str, Callable[[], Any]] = {
    **{f"forward-full-d{d}": forward(d=d) for d in (64, 96, 128, 192, 256)},
    "forward-causal-d64": forward(mask="causal", d=64),
    "forward-causal-d128-fp16": forward(mask="causal", dtype=torch.float16),
    "forward-short-full-d96": forward(d=96, lengths=SHORT, heads=SEVERAL_ROUNDS),
    "forward-short-causal-d64": forward(mask="causal", d=64, lengths=SHORT, heads=SEVERAL_ROUNDS),
    "forward-short-softcap-causal-d64": forward("softcap", "causal", d=64, lengths=SHORT, heads=SEVERAL_ROUNDS),
    "forward-short-bias-d64": forward("bias", d=64, lengths=SHORT, heads=SEVERAL_ROUNDS),
    "forward-alone-causal-d128": forward(mask="causal", lengths=SHORT),
    "forward-alone-softcap-d256": forward("softcap", d=256, lengths=SHORT),
    "forward-causal-documents-d128": forward(mask="causal-documents"),
    "forward-causal-d192-dv128": forward(mask="causal", d=192, dv=128),
    "forward-window-d128": forward(mask="window"),
    "forward-causal-documents-d64": forward(mask="causal-documents", d=64),
    "forward-checkerboard-d128": forward(mask="checkerboard"),
    "forward-alibi-causal-d128": forward("alibi", "causal"),
    "forward-softcap-causal-d64": forward("softcap", "causal", d=64),
    "forward-bias-d128": forward("bias"),
    "forward-strips-grid-d64": forward(mask="grid", d=64),
    "forward-lists-blocks-d128": forward(mask="blocks", lengths=(300, 300), heads=(64, 64)),
    "forward-varlen-causal-d128": forward(mask="causal", layout=PACKED),
    "forward-varlen-used-alibi-window-d128": forward("alibi", "window", layout=USED_Q),
    "forward-persistent-causal-d128": forward(mask="causal", schedule=PERSISTENT),
    "forward-paged-split-gqa-d128": forward(mask="full", layout=PAGED, **SPLIT),
    "forward-varlen-paged-causal-d64": forward(mask="causal", d=64, layout=PACKED_PAGED),
    "forward-split-gqa-d128": forward(**SPLIT),
    "forward-gqa-packed-alibi-d64": forward("alibi", d=64, **MANY_HEADS),
    "forward-max-scores-alibi-causal-d128": forward("alibi", "causal", options={"return_max_scores": True}),
    "forward-limits-of-rows-d64": forward(mask="rows", d=64),
    "forward-no-lse-any-scale-d64": forward(
        mask="causal", d=64, options={"return_lse": False, "positive_scale": False}
    ),
    "forward-of-bytes-gqa-d128": forward(narrow=BYTES, **SPLIT),
    "forward-of-bytes-guessing-causal-d64": forward(mask="causal", d=64, narrow=BYTES, lengths=(1024, 4096)),
    "forward-of-bytes-wide-d576-dv512": forward(d=576, dv=512, narrow=BYTES, heads=(16, 1), lengths=(1, 4096)),
    "forward-fp8-d64": forward(d=64, narrow=FP8),
    "forward-fp8-no-lse-causal-d64": forward(mask="causal", d=64, narrow=FP8, options={"return_lse": False}),
    "forward-fp8-causal-d96": forward(mask="causal", d=96, narrow=FP8),
    "forward-fp8-alibi-causal-d128": forward("alibi", "causal", narrow=FP8),
    "forward-fp8-no-lse-d128": forward(narrow=FP8, options={"return_lse": False}),
    "forward-fp8-causal-d192-dv128": forward(mask="causal", d=192, dv=128, narrow=FP8),
    "forward-fp8-of-blocks-causal-d128": of_blocks,
    "forward-fp8-d256": forward(d=256, narrow=FP8),
    "forward-wide-causal-d512": forward(mask="causal", d=512),
    "forward-wide-paged-softcap-d576-dv512": forward(
        "softcap", d=576, dv=512, layout=PAGED, heads=(128, 1), lengths=(1, 4096)
    ),
    "combine-d128": combine(forward(**SPLIT)),
    "combine-no-lse-d64": combine(forward(d=64, options={"return_lse": False}, **SPLIT)),
    "quantise-largest-d128": quantise("head", True, finds_largest=True),
    "quantise-head-d128": quantise("head", True),
    "quantise-token-best-of-4-d96": quantise("token", False, d=96),
    "quantise-block-best-of-4-d128": quantise("block", False),
    "dequantise-bf16": dequantise(*BYTES[1:]),
    "units-d64": units(64),
    "units-varlen-used-d128": units(128, packed=True),
    "preprocess-d64": backward("preprocess", d=64),
    "preprocess-dlse-d256": backward("preprocess", d=256, has_dlse=True),
    "preprocess-varlen-d128": backward("preprocess", layout=USED, has_dlse=True),
    "preprocess-sinks-varlen-d128": backward("preprocess", layout=USED, sinks=LEARNED_SINKS),
    "preprocess-long-documents-d128": backward("preprocess", mask="causal-documents", lengths=LONG),
    "postprocess-long-documents-d128": backward("postprocess", mask="causal-documents", lengths=LONG),
    "postprocess-d128": backward("postprocess"),
    "postprocess-d256": backward("postprocess", d=256),
    "postprocess-sinks-d128": backward("postprocess", sinks=LEARNED_SINKS),
    "postprocess-varlen-d64": backward("postprocess", d=64, layout=USED),
    "gather-d128": backward("gather", lengths=FEW_TILES),
    "gather-d256": backward("gather", d=256, lengths=FEW_TILES),
    "gather-d512": backward("gather", d=512, lengths=FEW_TILES),
    "gather-long-documents-gqa8-d128": backward("gather", **GROUP | {"mask": "causal-documents"}),
    "gather-varlen-causal-gqa8-d128": backward("gather", layout=PACKED, **GROUP),
    **{f"backward-causal-d{d}": backward("main", mask="causal", d=d) for d in (64, 96, 128, 192, 256)},
    "backward-causal-d192-dv128": backward("main", mask="causal", d=192, dv=128),
    "backward-full-d96": backward("main", d=96),
    "postprocess-full-d96": backward("postprocess", d=96),
    "backward-cut-full-d128": backward("main", lengths=FEW_TILES),
    "backward-window-d64": backward("main", mask="window", d=64, lengths=(2048, 2048)),
    "backward-documents-d128": backward("main", mask="documents"),
    "backward-long-documents-d128": backward("main", mask="causal-documents", lengths=LONG),
    "backward-alibi-causal-d128": backward("main", "alibi", "causal"),
    "backward-softcap-causal-d64": backward("main", "softcap", "causal", d=64),
    "backward-bias-d64": backward("main", "bias", d=64),
    "backward-blocks-that-leave-d128": backward("main", mask="causal", lengths=(32768, 32768)),
    "backward-causal-gqa8-d128": backward("main", **GROUP),
    "backward-long-documents-gqa8-d128": backward("main", **GROUP | {"mask": "causal-documents"}),
    "backward-varlen-causal-gqa8-d128": backward("main", layout=PACKED, **GROUP),
    "backward-claimed-causal-d128": backward("main", mask="causal", lengths=(2048, 2048)),
    "preprocess-claimed-d128": backward("preprocess", mask="causal", lengths=(2048, 2048)),
    "backward-in-order-causal-d128": backward("main", mask="causal", deterministic=True),
    "backward-in-order-backwards-d128": backward("main", mask="causal", deterministic=True, lengths=(16384, 16384)),
    "backward-in-order-causal-d256": backward("main", mask="causal", d=256, deterministic=True),
    "backward-in-order-full-d96": backward("main", d=96, deterministic=True),
    "backward-in-order-lists-blocks-d64": backward("main", mask="blocks", d=64, lengths=(300, 300), deterministic=True),
    "backward-lists-neighborhood-d128": backward("main", mask="neighborhood"),
    "backward-varlen-used-causal-d64": backward("main", mask="causal", d=64, layout=USED),
    **{f"backward-learned-{pattern}-d64": backward("main", pattern, d=64) for pattern in LEARNED},
    "backward-learned-distance-d256": backward("main", "distance", d=256),
    "backward-causal-d512": backward("main", mask="causal", d=512),
    "backward-in-order-window-d512-dv320": backward("main", mask="window", d=512, dv=320, deterministic=True),
}
