"""What a call costs the host, entry by entry, with nothing new; and steps of compiled code with new masks.

    python benchmarks/host.py --out benchmarks/results/h200-host.json

A row is an entry (ready mods made at each call, lambdas, flex_attention with and without a BlockMask, the module, a
planned Attention); peers do the same call in their own way in the same run, in turns. Times are until the host has
issued the call, or the call and its backward: B 1, S 128, H 2, D 64, so that no kernel is waited for. Hosts differ by a
factor of 3, and so does one host when others work: in each row, in turns with it, are torch SDPA (causal, whatever the
row), our own kernels and memory without our Python, and the floor: a Function in Python that only allocates.

Torch runs a backward in a thread of its own. On one core (the default) both threads share its caches; on two a
step waits twice for another core to wake up, 30 to 40 µs for SDPA as for us.

    python benchmarks/host.py --cores 2 --out benchmarks/results/h200-host-two-cores.json
    python benchmarks/host.py --count        with no GPU: the calls that Python makes, and time, kernels left out
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)

import composattn as ca  # noqa: E402
from benchmarks.host_work import Calls, calls_of, without_kernels  # noqa: E402
from benchmarks.implementations import BARE, FLOOR, OURS  # noqa: E402
from benchmarks.provenance import provenance  # noqa: E402
from benchmarks.run import save, show  # noqa: E402
from benchmarks.timing import Timing, host_stopwatch, interleaved  # noqa: E402
from composattn.backends.fused.running import launch_backward  # noqa: E402
from composattn.backends.fused.running.launch import ForwardLauncher  # noqa: E402
from composattn.backends.fused.running.launch_backward import BackwardLauncher  # noqa: E402
from composattn.mods import alibi, causal, document, softcap  # noqa: E402

SDPA = "torch SDPA"
CALM, AGAIN = 1.15, 8

Call = Callable[[], Any]
Launch = tuple[Any, tuple[Any, ...]]  # a kernel and what it is given


class Inputs:
    """Tensors of one layer, with or without gradients."""

    def __init__(self, device: torch.device, grad: bool, length: int = 128, dtype: torch.dtype | None = None) -> None:
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        made = [torch.randn(1, 2, length, 64, device=device).to(dtype) for _ in range(4)]
        self.q, self.k, self.v = (t.requires_grad_(grad) for t in made[:3])
        self.dout, self.length, self.device = made[3], length, device
        self.slopes = torch.tensor([0.25, 0.5], device=device)
        self.sinks = torch.randn(2, device=device).requires_grad_(grad)
        self.ids = torch.arange(length, device=device) // 50

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v


def entries(x: Inputs) -> dict[str, dict[str, Call]]:
    """For each entry the calls of all who have it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def documents(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (x.ids[q] == x.ids[kv])

    def biased(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + x.slopes[h] * (kv - q)

    class Layer(ca.nn.Attention):
        slopes: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("slopes", x.slopes)

        def score_mod(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return score + self.slopes[h] * (kv - q)

    blocks = create_block_mask(documents, None, None, x.length, x.length, device=x.device)
    flex = torch.compile(flex_attention, dynamic=False) if x.device.type == "cuda" else flex_attention
    planned = ca.Attention(mask_mod=causal())
    with_bias = ca.Attention(score_mod=alibi(x.slopes))
    kept, layer = alibi(x.slopes), Layer()
    found: dict[str, dict[str, Call]] = {
        "ca.Attention, causal": {
            OURS: lambda: planned(*x.qkv),
        },
        "ca.attention, causal()": {
            OURS: lambda: ca.attention(*x.qkv, mask_mod=causal()),
        },
        "ca.attention, lambda": {OURS: lambda: ca.attention(*x.qkv, mask_mod=lambda b, h, q, kv: q >= kv)},
        "ca.attention, causal(), sinks": {OURS: lambda: ca.attention(*x.qkv, mask_mod=causal(), sinks=x.sinks)},
        "ca.Attention, alibi(slopes)": {
            OURS: lambda: with_bias(*x.qkv),
            "FlexAttention": lambda: flex(*x.qkv, score_mod=biased),
        },
        "ca.attention, a kept alibi(slopes)": {OURS: lambda: ca.attention(*x.qkv, score_mod=kept)},
        "ca.attention, alibi(slopes)": {OURS: lambda: ca.attention(*x.qkv, score_mod=alibi(x.slopes))},
        "ca.attention, alibi(slopes) >> softcap(30.0), causal() & document(ids)": {
            OURS: lambda: ca.attention(
                *x.qkv, score_mod=alibi(x.slopes) >> softcap(30.0), mask_mod=causal() & document(x.ids)
            )
        },
        "ca.attention, lambda over a tensor": {
            OURS: lambda: ca.attention(*x.qkv, score_mod=lambda s, b, h, q, kv: s + x.slopes[h] * (kv - q))
        },
        "flex_attention, score_mod": {
            OURS: lambda: ca.flex_attention(*x.qkv, score_mod=biased),
            "FlexAttention": lambda: flex(*x.qkv, score_mod=biased),
        },
        "flex_attention, block_mask": {
            OURS: lambda: ca.flex_attention(*x.qkv, block_mask=blocks),
            "FlexAttention": lambda: flex(*x.qkv, block_mask=blocks),
        },
        "ca.nn.Attention, score_mod as a method": {OURS: lambda: layer(*x.qkv)},
    }
    if x.device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None:
        from flash_attn.cute import flash_attn_func

        q, k, v = (t.transpose(1, 2) for t in x.qkv)
        for name in ("ca.Attention, causal", "ca.attention, causal()"):
            found[name]["flash-attn-4"] = lambda: flash_attn_func(q, k, v, causal=True)[0].transpose(1, 2)
    return found


def plain(x: Inputs) -> Call:
    """What every row is compared with."""
    return lambda: torch.nn.functional.scaled_dot_product_attention(*x.qkv, is_causal=True)


_forms = itertools.count(1)


class Bare:
    """The kernels and the memory of `call`, in a bare autograd.Function: what no Python of ours could go below.

    The kernels' arguments are those of one call, recorded; memory is allocated as in each call and not used.
    Without `launches` it is the floor of torch: a Function in Python that allocates what it returns, and no more.
    """

    def __init__(self, call: Call, x: Inputs, grad: bool, launches: bool = True) -> None:
        self.x, self.launches = x, launches
        self.forward: list[Launch] = []
        self.backward: list[Launch] = []
        if launches:
            # a gradient that lies otherwise than those before is the launcher's, which `_recorded` sees
            further = torch.nn.functional.pad(x.dout, (0, 8 * next(_forms)))
            dout = further[..., : x.dout.shape[-1]]
            run = (lambda: torch.autograd.grad(call(), x.qkv, dout)) if grad else call
            with torch.set_grad_enabled(grad), _recorded(self.forward, self.backward):
                run()
            if len(self.backward) < grad:
                raise RuntimeError("no launch of a backward was seen: its kernels would be left out of what is bare")

    def __call__(self) -> Any:
        return _applied(self, *self.x.qkv) if torch.is_grad_enabled() else self.launched(self.x.q)[0]

    def launched(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.empty_like(q), torch.empty_strided(q.shape[:3], q.stride()[:3], device=q.device)
        for kernel, given in self.forward:
            kernel(*given)
        return made


class _Bare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bare: Bare, q: Any, k: Any, v: Any) -> Any:
        out, lse = bare.launched(q)
        ctx.bare = bare
        ctx.to_save = (q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        made = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        if ctx.bare.launches:
            torch.empty_like(q), torch.empty_like(q)  # statistics of rows, the sum of dq
            for kernel, given in ctx.bare.backward:
                kernel(*given)
        return None, *made


# `_Bare.apply` and its backward without what torch does in Python for `torch.func` and other Functions, as ours
_applied = super(torch.autograd.Function, _Bare).apply
_Bare._backward_cls.apply = _Bare.backward  # type: ignore[attr-defined]


@contextlib.contextmanager
def _recorded(forward: list[Launch], backward: list[Launch]) -> Iterator[None]:
    """Inside, launches are noted: kernels with their arguments."""
    module: Any = launch_backward
    ahead, back, made = ForwardLauncher.launch, BackwardLauncher.launch, module.launches

    def launch(self: ForwardLauncher, *given: Any) -> None:
        forward.append((self.kernel, given))
        ahead(self, *given)

    def noted(kernel: Any) -> Callable[..., None]:
        def call(*given: Any) -> None:
            backward.append((kernel, given))
            kernel(*given)

        return call

    def launches(*kernels: Any, **memory: Any) -> Callable[..., None]:
        return made(*[kernel and noted(kernel) for kernel in kernels], **memory)

    ForwardLauncher.launch = launch  # type: ignore[method-assign,assignment]
    # made anew at each launch, whatever a launcher has made before
    BackwardLauncher.launch, module.launches = property(back.func), launches  # type: ignore
    try:
        yield
    finally:
        ForwardLauncher.launch = ahead  # type: ignore[method-assign]
        BackwardLauncher.launch, module.launches = back, made  # type: ignore


def timed(rounds: int, device: torch.device, cores: int, only: str) -> list[dict[str, Any]]:
    """Rows of entries whose names have `only`, forward and with the backward: on so many cores, but compiled on all.

    A host that works for others is slower by half for seconds. So a row in which SDPA took more than `CALM` of the
    least that it took in any row is timed again, up to `AGAIN` times, whatever our own calls took in it; the one with
    the least SDPA stands.
    """
    rows: list[dict[str, Any]] = []
    for grad in (False, True):
        x = Inputs(device, grad)
        ready: dict[str, dict[str, Callable[[], object]]] = {}
        for name, calls in entries(x).items():
            if re.search(only, name):
                ready[name], failed = _ready(name, calls, x, grad)
                rows += failed
        found = {name: _interleaved(done, rounds, grad, cores) for name, done in ready.items()}
        for _ in range(AGAIN):
            yardsticks = {name: timings[SDPA].ms for name, timings in found.items() if SDPA in timings}
            for name, ms in yardsticks.items():
                if ms > CALM * min(yardsticks.values()):
                    again = _interleaved(ready[name], rounds, grad, cores)
                    found[name] = min(found[name], again, key=lambda timings: timings[SDPA].ms)
        for name, timings in found.items():
            of_name = [
                {"row": _name(name, grad), "impl": who, "ms": t.ms, "spread": t.spread, "least_ms": t.least}
                for who, t in timings.items()
            ]
            print(_name(name, grad), _compared(timings))
            show(of_name)
            rows += of_name
    return rows


def _ready(
    name: str, calls: dict[str, Call], x: Inputs, grad: bool
) -> tuple[dict[str, Callable[[], object]], list[dict[str, Any]]]:
    """What is timed of an entry, by who does it, compiled; and rows of those that fail."""
    done: dict[str, Callable[[], object]] = {}
    failed = []
    for who, call in calls.items():
        try:
            run = _with_backward(call, x, name) if grad else call
            run()
        except Exception as error:  # a peer's compiler raises what it likes
            failed.append({"row": _name(name, grad), "impl": who, "error": f"{type(error).__name__}"})
            continue
        done[who] = run
    if OURS in done:
        beside: dict[str, Call] = {
            BARE: Bare(calls[OURS], x, grad),
            FLOOR: Bare(calls[OURS], x, grad, launches=False),
            SDPA: plain(x),
        }
        done |= {who: _with_backward(call, x) if grad else call for who, call in beside.items()}
    return done, failed


def _interleaved(done: dict[str, Callable[[], object]], rounds: int, grad: bool, cores: int) -> dict[str, Timing]:
    with torch.set_grad_enabled(grad):
        for run in done.values():
            run()
        with on_cores(cores):
            return interleaved(done, host_stopwatch, rounds=rounds, sample_ms=4.0)


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Inside, all threads of this process run on `count` of its cores; those begun before, torch's engine's too."""
    given = os.sched_getaffinity(0)
    if not 0 < count <= len(given):
        raise ValueError(f"{count} cores asked for where this process may use {len(given)}: choose 1 to {len(given)}")
    _pin(set(sorted(given)[-count:]))  # the last ones: interrupts prefer the first
    try:
        yield
    finally:
        _pin(given)


def _pin(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def _compared(timings: dict[str, Timing]) -> str:
    """Ours in times of those that each row has, by the least and by the median."""
    ours = timings.get(OURS)
    return (
        ""
        if ours is None
        else ", ".join(
            f"{ours.least / timings[who].least:.2f} and {ours.ms / timings[who].ms:.2f} of {who}"
            for who in (SDPA, BARE, FLOOR)
        )
    )


def counted(rounds: int = 40) -> Iterator[tuple[str, Calls, float]]:
    """Each entry of ours with kernels left out: calls, and the least of many times, in µs, of this processor."""
    with without_kernels(lambda plan: lambda *arguments: None):
        for grad in (False, True):
            x = Inputs(torch.device("cpu"), grad, dtype=torch.bfloat16)
            x.ids = -x.ids  # ascending ones take a way on a CPU that a GPU does not
            for name, calls in entries(x).items():
                run = _with_backward(calls[OURS], x, name) if grad else calls[OURS]
                with torch.set_grad_enabled(grad):
                    found = calls_of(run)
                    times = [_seconds(run, 50) for _ in range(rounds)]
                yield _name(name, grad), found, 1e6 * min(times, default=0.0)


def _seconds(run: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


def _name(entry: str, grad: bool) -> str:
    return f"host {'forward and backward' if grad else 'forward'}: {entry}"


def _with_backward(call: Call, x: Inputs, name: str = "") -> Callable[[], object]:
    """`call` and the gradients of what it learns: q, k and v, and sinks where its name says that it has some."""
    learned = (*x.qkv, x.sinks) if name.endswith("sinks") else x.qkv

    def step() -> object:
        return torch.autograd.grad(call(), learned, x.dout)

    return step


# --- compiled code with a new mask each step ---------------------------------------------------------------------


def compiled_steps(steps: int, device: torch.device) -> list[dict[str, Any]]:
    """Seconds of the first step, and the median of the others, of compiled layers that get a new mask each."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    x = Inputs(device, True, 1024)

    def masks(seed: int) -> Any:
        drawn = torch.Generator().manual_seed(seed)
        ids = (torch.rand(x.length, generator=drawn) < 0.02).cumsum(0).to(device)
        return ids, lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])

    def lambda_layer(ids: torch.Tensor) -> Any:
        return ca.attention(*x.qkv, mask_mod=lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]))

    def ready_layer(ids: torch.Tensor) -> Any:
        return ca.attention(*x.qkv, mask_mod=causal() & document(ids))

    def block_layer(block_mask: Any) -> Any:
        return ca.flex_attention(*x.qkv, block_mask=block_mask)

    def torch_layer(block_mask: Any) -> Any:
        return flex_attention(*x.qkv, block_mask=block_mask)

    def by_ids(layer: Callable[..., Any]) -> Callable[[int], Any]:
        compiled = torch.compile(layer, fullgraph=True)
        return lambda step: compiled(masks(step)[0])

    def by_blocks(layer: Callable[..., Any]) -> Callable[[int], Any]:
        compiled = torch.compile(layer, fullgraph=True)
        made = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
        return lambda step: compiled(made(masks(step)[1], None, None, x.length, x.length, device=device))

    layers = {
        ("compiled step: documents as a lambda", OURS): lambda: by_ids(lambda_layer),
        ("compiled step: causal() & document(ids)", OURS): lambda: by_ids(ready_layer),
        ("compiled step: a new BlockMask", OURS): lambda: by_blocks(block_layer),
        ("compiled step: a new BlockMask", "FlexAttention"): lambda: by_blocks(torch_layer),
    }
    rows: list[dict[str, Any]] = []
    for (name, who), make in layers.items():
        torch._dynamo.reset()
        try:
            taken = _steps(make(), steps, x)
        except Exception as error:
            rows.append({"row": name, "impl": who, "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
            print(rows[-1])
            continue
        rows.append({"row": name, "impl": who, "ms": 1e3 * statistics.median(taken[1:]), "spread": 0.0})
        rows.append({"row": f"{name}, the first", "impl": who, "ms": 1e3 * taken[0], "spread": 0.0})
        show(rows[-2:])
    return rows


def _steps(step: Callable[[int], Any], count: int, x: Inputs) -> list[float]:
    taken = []
    for n in range(count):
        start = time.perf_counter()
        torch.autograd.grad(step(n), x.qkv, x.dout)
        if x.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20, help="of compiled code, each with a new mask; 0: none")
    parser.add_argument("--only", default="", help="regular expression on the names of entries")
    parser.add_argument("--cores", type=int, default=1, help="of the host that calls run on; compiled steps have all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", action="store_true", help="calls of Python and time, kernels left out; no GPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.count:
        for name, calls, us in counted():
            print(f"{name:106} {calls.python:4} functions of Python {calls.c:4} of C {us:7.1f} µs")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {
        **provenance(device),
        "rows": compiled_steps(options.steps, device) if options.steps else [],
    }
    save(result, options.out)
    result["rows"] += timed(options.rounds, device, options.cores, options.only)
    save(result, options.out)


if __name__ == "__main__":
    main()
