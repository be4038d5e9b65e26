"""What a call costs the host beside its kernels: dispatched torch operations, and time; runs with no GPU.

Everything is as for an H200, on CPU tensors, but that the kernels are only recorded, not run. A step is a forward and a
backward of one layer. Operations count as PyTorch dispatches them; of those, `launches` are no views and no
allocations: each is a kernel on a GPU. Times are of this host's processor, small computations included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import composattn as ca
from composattn import backends
from composattn.analysis.derived import Derived
from composattn.analysis.program import Program
from composattn.backends.fused.planning.arguments import (
    ForwardArguments,
    MainArguments,
    PostprocessArguments,
    PreprocessArguments,
)
from composattn.backends.fused.rewrites import prepared
from composattn.backends.fused.running.call import FusedCall
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.prepared import PreparedCall
from composattn.call.problem import Problem, softmax_scale
from composattn.dispatch import plan_cache
from composattn.mods import causal, document, sliding_window
from composattn.mods.mask import Mask


class Recorded:
    """Stands for a compiled kernel; `arguments` are those of its last call, with `copies` as they were then."""

    copies: ClassVar[bool] = False

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.arguments: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> None:
        given = read_of(self.plan, arguments)
        self.arguments = copied(given) if self.copies else given


def read_of(plan: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a kernel without those captured tensors that it does not read."""
    captured = getattr(plan, "captured", ())
    read = [c in plan.derived or not isinstance(c, Derived) for c in captured]
    return tuple([tuple(compress(a, read)) if a.__class__ is tuple and len(a) == len(read) else a for a in arguments])


def copied(arguments: Any) -> Any:
    """Tuples of arguments, with copies of the tensors."""
    if isinstance(arguments, tuple):
        return tuple(copied(a) for a in arguments)
    return arguments.clone() if isinstance(arguments, torch.Tensor) else arguments


@contextmanager
def without_kernels(kernel_of: Callable[[Any], Any] = Recorded) -> Iterator[None]:
    """Inside, new plans of every entry are an H200's, on CPU tensors; their kernels don't run."""

    def prepare(problem: Problem, program: Program, scale: float) -> PreparedCall:
        return prepared(partial(FusedCall, kernel_of=kernel_of), problem, program, scale, HOPPER)

    chosen = backends.choose
    backends.choose = lambda name, problem: SimpleNamespace(prepare=prepare)  # type: ignore[assignment,return-value]
    plan_cache._plans.clear()
    try:
        yield
    finally:
        backends.choose = chosen
        plan_cache._plans.clear()


class Calls(NamedTuple):
    """What one call takes of the interpreter, whatever else the machine does."""

    python: int  # functions
    c: int


def calls_of(call: Callable[[], object]) -> Calls:
    """The calls that Python makes for one, after two others."""
    found: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        found[event] += 1

    for _ in range(2):
        call()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Calls(found["call"], found["c_call"] - 1)  # but for setprofile


class HostOnly(ca.Attention):
    """An attention whose kernels don't run: out, lse and gradients hold anything."""

    def __init__(self, mask: Mask) -> None:
        super().__init__(mask_mod=mask)

    def _plan(self, problem: Problem) -> PreparedCall:
        return FusedCall(problem, self.program, softmax_scale(None, problem.head_dim), HOPPER, Recorded)

    def last_arguments(self) -> tuple[Any, ...]:
        """What the kernels of the last form of calls were given: the forward, the backward's two or three."""
        call: Any = list(self._prepared.values())[-1]
        (backward,) = call.gradient._launchers.values()
        return (
            ForwardArguments(*call.launcher(True).kernel.arguments),
            PreprocessArguments(*backward.preprocess.arguments),
            MainArguments(*backward.main.arguments),
            *(PostprocessArguments(*k.arguments) for k in [backward.postprocess] if k is not None),
        )


class Operations(TorchDispatchMode):
    """Counts what is dispatched inside."""

    VIEWS = ("alias", "as_strided", "detach", "expand", "permute", "select", "slice", "transpose", "unsqueeze", "view")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def launches(self) -> int:
        return sum(n for name, n in self.counts.items() if not name.startswith(self.VIEWS) and "empty" not in name)


@dataclass(frozen=True)
class Size:
    batch: int = 8
    heads: int = 4
    kv_heads: int = 2
    length: int = 256
    head_dim: int = 32


RECIPE = Size()  # of recipes/train_byte_lm.py
LARGER = Size(heads=16, kv_heads=4, length=1024, head_dim=64)


def drawn_documents(size: Size) -> torch.Tensor:
    """Ids that descend: ascending ones take a way on a CPU that a GPU does not."""
    return -(torch.rand(size.batch, size.length) < 0.01).cumsum(1).int()


class Step:
    """Forward and backward of a layer; `new` changes what the next one sees, as a new batch does."""

    def __init__(self, mask: Mask, size: Size, new: Callable[[], object] = lambda: None, layers: int = 1) -> None:
        self.attention, self.new, self.layers = HostOnly(mask), new, layers
        s, shapes = size, (size.heads, size.kv_heads, size.kv_heads, size.heads)
        made = [torch.randn(s.batch, s.length, h, s.head_dim, dtype=torch.bfloat16).transpose(1, 2) for h in shapes]
        self.inputs, self.dout = [t.requires_grad_() for t in made[:3]], made[3]

    def __call__(self) -> None:
        for out in [self.attention(*self.inputs) for _ in range(self.layers)]:
            torch.autograd.grad(out, self.inputs, self.dout)


class PackedStep:
    """A step of packed sequences; each has other lengths, and another total where asked for."""

    def __init__(self, size: Size, new_total: bool = False) -> None:
        self.attention, self.size, self.new_total = HostOnly(causal()), size, new_total
        self.total = size.batch * size.length
        self.new()

    def new(self) -> None:
        s = self.size
        self.total -= self.new_total
        cuts = (torch.randperm(self.total - 1)[: s.batch - 1] + 1).sort().values
        self.varlen = ca.Varlen(torch.cat([torch.tensor([0]), cuts, torch.tensor([self.total])]).int())
        heads = (s.heads, s.kv_heads, s.kv_heads, s.heads)
        made = [torch.randn(self.total, h, s.head_dim, dtype=torch.bfloat16) for h in heads]
        self.inputs, self.dout = [t.requires_grad_() for t in made[:3]], made[3]

    def __call__(self) -> None:
        out = self.attention(*self.inputs, varlen=self.varlen)
        torch.autograd.grad(out, self.inputs, self.dout)


def document_step(size: Size, window: int, layers: int = 1) -> Step:
    """A new batch of documents each step, written into the tensor that the mask reads."""
    ids = drawn_documents(size)
    mask = causal() & sliding_window(window) & document(ids)
    return Step(mask, size, lambda: ids.copy_(drawn_documents(size)), layers)


def steps() -> dict[str, Any]:
    return {
        "causal, nothing new": Step(causal(), RECIPE),
        "documents, new ones": document_step(RECIPE, 128),
        "documents, new ones, 3 layers": document_step(RECIPE, 128, 3),
        "documents, new ones, 1024 tokens": document_step(LARGER, 256),
        "packed, new lengths": PackedStep(RECIPE),
        "packed, new total": PackedStep(RECIPE, new_total=True),
        "packed, new lengths, 8192 tokens": PackedStep(LARGER),
    }


def counted(step: Any) -> Operations:
    """The operations of a step after two others; who counts is a part of a call's form, so he looks on there too."""
    with Operations() as operations:
        for _ in range(3):
            step.new()
            operations.counts.clear()
            step()
    return operations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, step in steps().items():
        operations, times = counted(step), []
        for _ in range(options.repeats):
            step.new()
            start = time.perf_counter()
            step()
            times.append(1e6 * (time.perf_counter() - start))
        count = operations.counts.total()
        print(f"{name:34} {count:4} operations {operations.launches:4} launches   {statistics.median(times):7.0f} µs")


if __name__ == "__main__":
    main()
