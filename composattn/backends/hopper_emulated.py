"""The Hopper kernels with no GPU: the real generated code, run by the emulator on CPU tensors of small size."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ..compile import compile_offline, content_hash
from ..emulator.capture import Captured
from ..emulator.cluster import EAGER, Mode
from ..emulator.findings import EmulationTooLarge
from ..emulator.launch import Result, run
from ..errors import GradientUnsupported
from ..graph.derived import Derived, refresh
from ..graph.program import Program
from ..launch import _at_least_1d, _empty_like_queries, tidy
from ..plan import ForwardPlan, plan_forward
from ..problem import Problem
from ..target import HOPPER

Pair = tuple[torch.Tensor, torch.Tensor | None]

# Seconds: a block costs the first, a score of a visited tile the second (2 cores of a shared server; see docs).
SECONDS_A_BLOCK, SECONDS_A_SCORE = 0.02, 1.5e-6
LIMIT_SECONDS = 600.0
_kernels: dict[str, Captured] = {}
_mode: ContextVar[Mode] = ContextVar("mode", default=EAGER)


@contextmanager
def emulating(mode: Mode) -> Iterator[None]:
    """Inside, calls of this backend run in `mode` (see `composattn.emulator`)."""
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def estimate(q: torch.Tensor, k: torch.Tensor, tile_m: int = 128) -> float:
    """Seconds that a forward will about take if every tile is visited."""
    batch, heads, q_len, _ = q.shape
    blocks = batch * heads * -(-q_len // tile_m)
    return blocks * SECONDS_A_BLOCK + batch * heads * q_len * k.shape[2] * SECONDS_A_SCORE


def check_size(q: torch.Tensor, k: torch.Tensor, tile_m: int = 128) -> None:
    """Raises `EmulationTooLarge` above COMPOSATTN_EMULATOR_SECONDS (600 if unset) estimated seconds."""
    limit = float(os.environ.get("COMPOSATTN_EMULATOR_SECONDS", LIMIT_SECONDS))
    seconds = estimate(q, k, tile_m)
    if seconds > limit:
        raise EmulationTooLarge(
            f"emulating q {tuple(q.shape)} with k {tuple(k.shape)} would take about {seconds:.0f} s, the limit is "
            f"{limit:.0f} s; take fewer heads or shorter sequences, "
            "raise COMPOSATTN_EMULATOR_SECONDS, or use backend='streaming'"
        )


class EmulatedKernel:
    """Stands for a compiled kernel: called like one, with CPU tensors in the order of the plan's host function.

    `result` is what the last run says beside what it wrote (instruction counts, time).
    """

    def __init__(self, plan: Any, mode: Mode = EAGER) -> None:
        self.plan, self.mode = plan, mode
        self.kernel = _captured(plan)
        self.result: Result | None = None

    def __call__(self, *arguments: Any) -> None:
        target = self.plan.target
        launch = self.kernel.launch(*arguments, dynamic_shared=self.plan.shared_memory, sms=target.sms)
        self.result = run(self.kernel.program, launch, self.mode)


def _captured(plan: Any) -> Captured:
    """The plan's kernel and host function, compiled once a process (the PTX once a cache folder)."""
    key = content_hash(plan)
    if key not in _kernels:
        backend = importlib.import_module(f"composattn.backends.{plan.backend}.{plan.module}")
        text = compile_offline(plan).ptx_path.read_text()
        function, declared = backend.kernel(plan)
        _kernels[key] = Captured(function, declared, plan.target.arch, text)
    return _kernels[key]


def forward(
    plan: ForwardPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    captured: Sequence[torch.Tensor] = (),
    scalars: Sequence[float | int] = (),
    mode: Mode = EAGER,
) -> Pair:
    """(out, lse or None) of the planned forward on CPU tensors, as the kernel would leave them. Raises `Finding`s."""
    out = _empty_like_queries(q, plan.head_dim_v)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if plan.return_lse else None
    if not q.shape[2]:
        return out, lse
    if not k.shape[2]:
        return out.zero_(), None if lse is None else lse.fill_(-torch.inf)
    check_size(q, k, plan.tiling.tile_m)
    emulate(plan, q, k, v, out, lse, scale, captured, scalars, mode)
    return out, lse


def emulate(
    plan: ForwardPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    captured: Sequence[torch.Tensor] = (),
    scalars: Sequence[float | int] = (),
    mode: Mode = EAGER,
) -> Result:
    """One launch into `out` and `lse`, which are poisoned first: what the kernel doesn't write shows as NaN."""
    out.fill_(float("nan"))
    if lse is not None:
        lse.fill_(float("nan"))
    kernel = EmulatedKernel(plan, mode)
    reads, numbers = tuple(_at_least_1d(t) for t in captured) or None, tuple(scalars) or None
    kernel(tidy(q, "q"), tidy(k, "k"), tidy(v, "v"), tidy(out, "out"), lse, scale, reads, numbers)
    assert kernel.result is not None
    return kernel.result


class EmulatedCall:
    """A prepared call: the plan that a Hopper GPU would get, run by the emulator."""

    def __init__(self, plan: ForwardPlan, program: Program, scale: float) -> None:
        self.plan, self.program, self.scale = plan, program, scale

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool) -> Pair:
        tensors = [c.tensor for c in self.program.captures]
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *tensors)):
            raise GradientUnsupported(
                'backend="hopper-emulated" computes no gradients; use torch.no_grad(), or backend="streaming"'
            )
        refresh([c for c in self.program.captures if isinstance(c, Derived)])
        scalars = [s.value for s in self.program.scalars]
        return forward(self.plan, q, k, v, scale=self.scale, captured=tensors, scalars=scalars, mode=_mode.get())


def prepare(
    problem: Problem, program: Program, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> EmulatedCall:
    """Plans for the H200 that the emulator stands for. Raises what planning raises, and `EmulationTooLarge`."""
    check_size(q, k)
    return EmulatedCall(plan_forward(problem, program, HOPPER, positive_scale=scale > 0), program, scale)


def random_run(problem: Problem, program: Program) -> Result:
    """A run of a call of this form on random inputs, for its counts."""
    make = torch.Generator().manual_seed(0)
    q = torch.randn(problem.batch, problem.q_heads, problem.q_len, problem.head_dim, generator=make).to(problem.dtype)
    k = torch.randn(problem.batch, problem.kv_heads, problem.kv_len, problem.head_dim, generator=make).to(problem.dtype)
    v = torch.randn(problem.batch, problem.kv_heads, problem.kv_len, problem.head_dim_v, generator=make).to(
        problem.dtype
    )
    check_size(q, k)
    plan = plan_forward(problem, program, HOPPER)
    out, lse = _empty_like_queries(q, problem.head_dim_v), q.new_empty(q.shape[:3], dtype=torch.float32)
    tensors = [c.tensor.cpu() for c in program.captures]
    scale = problem.head_dim**-0.5
    return emulate(plan, q, k, v, out, lse, scale, tensors, [s.value for s in program.scalars])
