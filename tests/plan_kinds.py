"""Plans of every kind, with tilings of every kind, on all architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.planning.plan_around import DequantisePlan, QuantisePlan, UnitsPlan
from composattn.backends.fused.planning.plan_backward import SinkForm, plan_backward
from composattn.backends.fused.tiles.target import AMPERE, BLACKWELL, HOPPER, TARGETS, Target
from composattn.call.problem import Problem
from composattn.call.schedule import Schedule
from composattn.mods import causal, document, neighborhood
from composattn.mods.mask import Mask

LONG, SHORT = 8192, 512
BYTES = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fn  # of q, k and v
DOCUMENTS = document(torch.arange(LONG) // 1000) & causal()
NEIGHBOURS = neighborhood((96, 96), (7, 7))


def forward(target: Target, d: int = 128, length: int = LONG, mask: Mask | None = None, **how: Any) -> list[Any]:
    problem = Problem(1, 4, 2, length, length, d, d, torch.bfloat16, torch.device("cpu"), **how)
    plan = plan_forward(problem, Program(None, None if mask is None else mask.expr), target)
    return [plan, plan.combine] if plan.is_split else [plan]


def backward(
    target: Target, d: int = 128, dv: int = 0, length: int = SHORT, mask: Mask | None = None, **how: Any
) -> list[Any]:
    problem = Problem(1, 4, 2, length, length, d, dv or d, torch.bfloat16, torch.device("cpu"))
    plans = plan_backward(problem, Program(None, None if mask is None else mask.expr), target, **how)
    return [p for p in (plans.preprocess, plans.main, plans.postprocess, plans.gather) if p is not None]


def quantise(target: Target) -> list[Any]:
    plan = QuantisePlan(
        target=target, dtype=torch.bfloat16, head_dim=128, head_dim_v=64, to=torch.float8_e4m3fn, scale="head",
        rows=64, hadamard=True, center=True, power_of_two=True,
    )  # fmt: skip
    return [plan]


def dequantise(target: Target) -> list[Any]:
    of_keys, of_values = BYTES[1:]
    return [DequantisePlan(target=target, dtype=torch.bfloat16, of_keys=of_keys, of_values=of_values, rank=4)]


def units(target: Target) -> list[Any]:
    used = {"is_dense": False, "used_q": True, "used_kv": True}
    return [UnitsPlan(target=target, dtype=torch.bfloat16, head_dim_v=64, has_dlse=True, sums=2, **used)]


PLANS: dict[str, Callable[[], list[Any]]] = {
    "hopper-forward": lambda: forward(HOPPER),
    "hopper-forward-split": lambda: forward(HOPPER, schedule=Schedule(split_kv=2)),
    "hopper-forward-segments": lambda: forward(HOPPER, mask=DOCUMENTS),
    "hopper-forward-strips": lambda: forward(HOPPER, length=96 * 96, mask=NEIGHBOURS),
    "hopper-forward-wide": lambda: forward(HOPPER, d=512),
    "hopper-forward-of-bytes": lambda: forward(HOPPER, length=SHORT, narrow=BYTES),
    "hopper-forward-wide-of-bytes": lambda: forward(HOPPER, d=512, length=SHORT, narrow=BYTES),
    "hopper-forward-fp8": lambda: forward(HOPPER, narrow=(torch.float8_e4m3fn,) * 3),
    "blackwell-forward": lambda: forward(BLACKWELL, mask=causal()),
    "warp-forward": lambda: forward(AMPERE, mask=causal()),
    "warp-forward-in-bulk": lambda: forward(TARGETS[12, 0], mask=causal()),
    "warp-backward": lambda: backward(AMPERE, mask=causal()),
    "hopper-backward": lambda: backward(HOPPER, sinks=SinkForm(torch.float32, False), has_dlse=True),
    "hopper-quantise": lambda: quantise(HOPPER),
    "hopper-dequantise": lambda: dequantise(HOPPER),
    "hopper-units": lambda: units(HOPPER),
    "hopper-backward-segments": lambda: backward(HOPPER, length=LONG, mask=DOCUMENTS),
    "hopper-backward-strips": lambda: backward(HOPPER, length=96 * 96, mask=NEIGHBOURS, has_dlse=True),
    "hopper-backward-exchange": lambda: backward(HOPPER, d=256, mask=causal()),
    "hopper-backward-pair": lambda: backward(HOPPER, d=512, mask=causal()),
    "blackwell-backward": lambda: backward(BLACKWELL, d=64, mask=causal()),
    "blackwell-backward-pair": lambda: backward(BLACKWELL, d=128, length=LONG),
    "blackwell-backward-wide": lambda: backward(BLACKWELL, d=192, length=128),
    "blackwell-backward-wide-pair": lambda: backward(BLACKWELL, d=192, dv=128, length=LONG),
    "blackwell-backward-query-pair": lambda: backward(BLACKWELL, d=256, length=LONG),
}
