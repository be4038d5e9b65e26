"""Generated kernels with no GPU: the real code, run by the emulator on CPU tensors of small size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from .... import settings
from ....analysis.program import Program
from ....call.problem import Problem
from ....emulator.capture import Captured
from ....emulator.findings import EmulationTooLarge
from ....emulator.launch import Result, Stream
from ....emulator.mode import EAGER, Mode
from ....emulator.text import compile_ptx
from ....watched import say_once, timed
from ..compiling import disk_cache
from ..compiling.compile import content_hash, uncollected
from ..compiling.generated import kernel_of as generated
from ..compiling.passes import switches
from ..planning.plan import ForwardPlan, Plan, plan_forward
from ..tiles.target import Target
from .call import FusedCall
from .launch import ForwardLauncher, has_unused_rows, tidied

# Seconds: a block costs the first, a score of a visited tile the second (measured, see docs/emulator.md).
SECONDS_A_BLOCK, SECONDS_A_SCORE = 0.03, 1.5e-6
LIMIT_SECONDS = 600.0
LONG_SECONDS = 5.0  # from which on a call says what it will take
KEPT = 32  # host functions kept, 3 MB each with the text of their kernels; of those `program` keeps fewer ready to run
_kernels: dict[tuple[Path | None, str], Captured] = {}
_stream = Stream()
_mode: ContextVar[Mode] = ContextVar("mode", default=EAGER)


@contextmanager
def emulating(mode: Mode) -> Iterator[None]:
    """Inside, calls of this backend run in `mode` (see `composattn.emulator`)."""
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def estimate(batch: int, heads: int, q_len: int, kv_len: int) -> float:
    """Seconds that a forward will about take if every tile is visited; a gradient takes three times as long."""
    blocks = batch * heads * -(-q_len // 128)
    return blocks * SECONDS_A_BLOCK + batch * heads * q_len * kv_len * SECONDS_A_SCORE


def check_size(problem: Problem) -> None:
    """Raises `EmulationTooLarge` above COMPOSATTN_EMULATOR_SECONDS (600 if unset) estimated seconds."""
    limit = settings.number("COMPOSATTN_EMULATOR_SECONDS", LIMIT_SECONDS)
    seconds = estimate(problem.batch, problem.q_heads, problem.q_len, problem.kv_len)
    if seconds > limit:
        raise EmulationTooLarge(
            f"emulating {problem.batch * problem.q_heads} heads of {problem.q_len} queries and {problem.kv_len} keys "
            f"would take about {seconds:.0f} s, the limit is {limit:.0f} s; take fewer heads or shorter sequences, "
            "raise COMPOSATTN_EMULATOR_SECONDS, or use backend='streaming'"
        )
    if seconds > LONG_SECONDS:
        say_once(
            "emulated",
            f"emulating {problem.batch * problem.q_heads} heads of {problem.q_len} queries and {problem.kv_len} keys "
            f"may take {seconds:.0f} s, a gradient three times that; backend='streaming' computes the same in PyTorch",
        )


class EmulatedKernel:
    """Stands for a compiled kernel: called like one, with CPU tensors in the order of the plan's host function.

    What is emulated it does not hold: one takes 30 to 50 MB, and plans that launch it are kept by the thousand. Raises
    `Finding`s when called.
    """

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        captured(plan)
        self._ran: tuple[Any, ...] | None = None  # what the last run says, but for the program

    @property
    def result(self) -> Result | None:
        """The result of the last run; None before the first."""
        return None if self._ran is None else Result(self.kernel.program, *self._ran)

    @property
    def kernel(self) -> Captured:
        """What is emulated, captured again where it is not among those used last."""
        return captured(self.plan)

    def __call__(self, *arguments: Any) -> None:
        target, kernel = self.plan.target, self.kernel
        launch = kernel.launch(*arguments, dynamic_shared=self.plan.shared_memory, sms=target.sms)
        launch.shared_memory = target.shared_memory
        found = _stream.run(kernel.program, launch, _mode.get())
        self._ran = found.visits, found.blocks, found.seconds


def captured(plan: Plan, folder: Path | None = None) -> Captured:
    """The plan's kernel and host function, of the `KEPT` used last (the PTX is compiled once per folder)."""
    key = folder, content_hash(plan)
    kernel = _kernels.pop(key, None)
    if kernel is None:
        kernel = Captured(*generated(plan), plan.target.arch, text_of(plan, folder))
    _kernels[key] = kernel  # the last used is last
    while len(_kernels) > KEPT:
        del _kernels[next(iter(_kernels))]
    return kernel


def text_of(plan: Plan, folder: Path | None = None) -> str:
    """The plan's PTX, from where `compile_offline` keeps it, else made now, with no machine code, and kept there."""
    folder = folder or disk_cache.usable() / "offline"
    key = content_hash(plan)
    kept = disk_cache.get(folder, key, ".ptx")
    if kept is not None:
        return kept.read_text()
    with timed(plan.title, str(folder)), uncollected():
        text = compile_ptx(*generated(plan), plan.target.arch, switches(plan))
    disk_cache.put(folder, key, ".ptx", text.encode())
    return text


class EmulatedForward(ForwardLauncher):
    """A plan's emulated kernel, launched into poisoned memory: what it doesn't write is NaN."""

    def __init__(self, plan: ForwardPlan, kernel_of: Callable[[Any], Any] = EmulatedKernel) -> None:
        super().__init__(plan, kernel_of)

    def launch(self, *arguments: Any) -> None:
        given = tidied(*arguments)
        if given.left is not None:
            given.left.fill_(torch.nan)
        if not has_unused_rows(self.plan, given.k):
            for t in (given.out, given.lse, given.max_scores):
                if t is not None:
                    t.fill_(torch.nan)
        try:
            super().launch(*given)
        except BaseException:
            if given.counter is not None:  # a kernel that was stopped leaves it anywhere, the next one draws from it
                given.counter.zero_()
            raise


class EmulatedCall(FusedCall):
    """A prepared call: the plans that `target` would get, run by the emulator.

    Raises what planning raises, and `EmulationTooLarge`.
    """

    launches = EmulatedForward

    def __init__(self, problem: Problem, program: Program, scale: float, target: Target) -> None:
        check_size(problem)
        super().__init__(problem, program, scale, target, EmulatedKernel)


def random_run(problem: Problem, program: Program, target: Target) -> Result:
    """A forward of a call of this form on random inputs, as `target` runs it, for its counts."""
    check_size(problem)
    make = torch.Generator().manual_seed(0)

    def tensor(heads: int, length: int, dim: int) -> torch.Tensor:
        return torch.randn(problem.batch, heads, length, dim, generator=make).to(problem.dtype)

    q = tensor(problem.q_heads, problem.q_len, problem.head_dim)
    k = tensor(problem.kv_heads, problem.kv_len, problem.head_dim)
    v = tensor(problem.kv_heads, problem.kv_len, problem.head_dim_v)
    here = dataclasses.replace(problem, device=torch.device("cpu"))
    forward = EmulatedForward(plan_forward(here, program, target))
    tensors, scalars = [c.tensor.cpu() for c in program.captures], [s.value for s in program.scalars]
    forward(q, k, v, problem.head_dim**-0.5, tensors, scalars)
    result: Result | None = forward.kernel.result
    if result is None:
        raise EmulationTooLarge(f"a call with {problem.q_len} queries and {problem.kv_len} keys runs no kernel")
    return result
