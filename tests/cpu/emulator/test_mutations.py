"""Mutants of our own kernels' PTX: nearly all are caught, and the survivors are of the kinds that change nothing.

`python -m tests.cpu.emulator.test_mutations [forward|backward] [head dim]` prints every verdict (docs/emulator.md).
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.emulator.cluster import Mode
from composattn.emulator.launch import Result, run
from composattn.emulator.mutate import Verdict, judge
from composattn.emulator.program import Program
from composattn.mods import causal
from composattn.problem import Problem
from composattn.target import HOPPER

HAS_DSL = importlib.util.find_spec("cutlass") is not None
NEEDS_DSL = pytest.mark.skipif(not HAS_DSL, reason="nvidia-cutlass-dsl is not installed")


def _inputs(dim: int) -> tuple[torch.Tensor, ...]:
    make = torch.Generator().manual_seed(4)
    q, dout = (torch.randn(1, 2, 400, dim, generator=make).to(torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, 1, 500, dim, generator=make).to(torch.bfloat16) for _ in range(2))
    return q, k, v, dout


def forward_verdicts(dim: int) -> Iterator[Verdict]:
    from composattn.backends.hopper_emulated import EmulatedKernel
    from composattn.plan import plan_forward

    q, k, v, _ = _inputs(dim)
    program = ca.Attention(mask_mod=causal()).program
    kernel = EmulatedKernel(plan_forward(Problem.of(q, k, v), program, HOPPER))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    return _verdicts(kernel, (q, k, v, out, lse, dim**-0.5, None, None), (out, lse))


def backward_verdicts(dim: int) -> Iterator[Verdict]:
    from composattn.backends.hopper_emulated import EmulatedKernel
    from composattn.launch_backward import BackwardLauncher
    from composattn.plan_backward import plan_backward

    q, k, v, dout = _inputs(dim)
    program = ca.Attention(mask_mod=causal()).program
    out, lse = ca.Attention(mask_mod=causal(), backend="streaming")(q, k, v, return_lse=True)
    calls: dict[str, tuple[Any, ...]] = {}
    plans = plan_backward(Problem.of(q, k, v), program, HOPPER, has_dlse=False)

    class Remembering(EmulatedKernel):
        def __call__(self, *arguments: Any) -> None:
            calls[self.plan.module] = arguments
            super().__call__(*arguments)

    BackwardLauncher(plans, Remembering)(q, k, v, out, lse, dout, None, dim**-0.5)
    arguments = list(calls[plans.main.module])
    sums = torch.zeros_like(arguments[5])
    arguments[5] = sums
    results = (sums, arguments[6], arguments[7])
    return _verdicts(EmulatedKernel(plans.main), tuple(arguments), results, zero=(sums,))


def _verdicts(
    kernel: Any, arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...], zero: tuple[torch.Tensor, ...] = ()
) -> Iterator[Verdict]:
    def launch(program: Program, mode: Mode) -> Result:
        for t in results:
            t.fill_(0.0 if any(t is z for z in zero) else torch.nan)
        plan = kernel.plan
        return run(program, kernel.kernel.launch(*arguments, dynamic_shared=plan.shared_memory), mode)

    launch(kernel.kernel.program, Mode())
    good = [t.clone() for t in results]

    def same() -> bool:
        # sums in memory arrive in the order of the schedule
        return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(results, good, strict=True))

    return judge(kernel.kernel.text, launch, same)


# Survivors that change nothing at these inputs: the first wait for a slot that starts free; releases after which nobody
# waits; a turn at the matrix unit, which orders work and no data; a copy whose first two coordinates are both 0;
# fences between products whose registers nobody touched.
HARMLESS = {
    "wait skipped": 4, "arrival dropped": 4, "barrier dropped": 2, "coordinate wrong": 2, "wgmma fence dropped": 4,
}  # fmt: skip


@NEEDS_DSL
@pytest.mark.slow
@pytest.mark.parametrize("verdicts", [forward_verdicts, backward_verdicts], ids=["forward", "backward"])
def test_mutants_are_caught(verdicts: Callable[[int], Iterator[Verdict]]) -> None:
    found = list(verdicts(64))
    reached = [v for v in found if v.how != "not reached"]
    survivors = [v for v in reached if not v.caught]
    assert len(reached) >= 30
    counts = Counter(v.mutant.kind for v in survivors)
    assert all(n <= HARMLESS.get(kind, 0) for kind, n in counts.items()), [v.mutant.instr.where() for v in survivors]


def main(which: str = "forward", dim: str = "64") -> None:
    table: dict[str, Counter[str]] = {}
    for v in {"forward": forward_verdicts, "backward": backward_verdicts}[which](int(dim)):
        table.setdefault(v.mutant.kind, Counter())[v.how] += 1
        if v.how == "survived":
            print(f"survived: {v.mutant.kind}: {v.mutant.instr.where()[:200]}", flush=True)
    for kind, counts in table.items():
        print(f"{kind}: {dict(counts)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
