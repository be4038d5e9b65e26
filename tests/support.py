"""What the tests share: fresh inputs with outliers, poisoned memory, and what this machine can run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from composattn.testing import Case


@functools.cache
def gpu_backend() -> str:
    """Whose generated kernels run on the GPU that is there; "" where there is none that runs any.

    COMPOSATTN_TEST_BACKEND names other ones than its own, as "warp" on a Hopper GPU.
    """
    from composattn.backends import BACKENDS, default_for
    from composattn.backends.fused.tiles.architecture import ARCHITECTURES

    if not torch.cuda.is_available():
        return ""
    here = torch.device("cuda")
    found = os.environ.get("COMPOSATTN_TEST_BACKEND") or default_for(here)
    return found if found in ARCHITECTURES and BACKENDS[found].unavailable(here) is None else ""


def has_gpu_backend() -> bool:
    """Whether a GPU is there to run generated kernels."""
    return gpu_backend() != ""


def has_backward(backend: str, *dims: int) -> bool:
    """Whether a backend computes gradients, of calls of these head dimensions; an architecture's may not yet."""
    from composattn.backends.fused.tiles.architecture import ARCHITECTURES

    architecture = ARCHITECTURES.get(backend.removesuffix("-emulated"))
    return architecture is None or architecture.max_gradient_dim >= max(dims, default=1)


def needs_backward(backend: str) -> None:
    """Skips the test, by name, where the backend computes no gradients."""
    if not has_backward(backend):
        pytest.skip(f'backend "{backend}" has no backward yet')


def as_served(case: Case, backend: str) -> Case:
    """The case, forward only where the backend computes no gradients."""
    learns = has_backward(backend, case.q.shape[-1], case.v.shape[-1])
    return case if learns else case.without_gradients()


@functools.cache
def has_kernel_toolchain() -> bool:
    """Whether kernels can be compiled here (needs no GPU)."""
    return importlib.util.find_spec("cutlass") is not None


@contextlib.contextmanager
def cut_as_long_ones(really: bool = True) -> Iterator[None]:
    """Inside, Hopper's forwards whose queries see few keys are cut as those of long sequences: tests are short."""
    from composattn.backends.hopper import forward_choice

    longer: dict[str, Any] = {
        "seen": lambda call: 8448,
        "length": lambda call: 8448,
        "work": lambda call: "few_rows" if call.few else "rounds",
    }
    with mock.patch.dict(forward_choice.FINDERS, longer if really else {}):  # type: ignore[arg-type]
        yield


@contextlib.contextmanager
def on_few_sms(backend: str, count: int = 3) -> Iterator[None]:
    """Inside, an emulated backend plans for so many, so that persistent blocks walk over several tiles each."""
    from composattn.backends.fused.tiles.architecture import planned_for

    with planned_as(backend, dataclasses.replace(planned_for(backend), sms=count)):
        yield


@contextlib.contextmanager
def planned_as(backend: str, target: Any) -> Iterator[None]:
    """Inside, an emulated backend plans for this target, with no plans from before."""
    from composattn import backends
    from composattn.backends.fused.running.emulated import EmulatedCall
    from composattn.dispatch import plan_cache

    planned = dataclasses.replace(
        backends.BACKENDS[backend],
        prepare=lambda problem, program, scale: EmulatedCall(problem, program, scale, target),
    )
    with mock.patch.dict(backends.BACKENDS, {backend: planned}), mock.patch.dict(plan_cache._plans, clear=True):
        yield


def docs_script(name: str) -> ModuleType:
    """A script of `docs`, imported."""
    path = Path(__file__).parents[1] / "docs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for the annotations of their fields
    spec.loader.exec_module(module)
    return module


def outlier_normal(
    *shape: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    requires_grad: bool = False,
) -> torch.Tensor:
    """N(0, 1) + N(0, 10²)·Bernoulli(0.001): real activations have outliers, and kernels must survive them.

    Drawn on the CPU in fp32, so that one seed gives the same numbers on every device.
    """
    common = torch.randn(shape, generator=generator)
    rare = torch.rand(shape, generator=generator) < 1e-3
    drawn = common + torch.where(rare, 10.0 * torch.randn(shape, generator=generator), 0.0)
    return drawn.to(device=device, dtype=dtype).requires_grad_(requires_grad)


def qkv(
    *,
    generator: torch.Generator,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    q_len: int = 64,
    kv_len: int | None = None,
    dim: int = 32,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    requires_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (B, Hq, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv); what is left out follows from the rest."""
    kv_heads = heads if kv_heads is None else kv_heads
    kv_len = q_len if kv_len is None else kv_len
    v_dim = dim if v_dim is None else v_dim

    def make(h: int, s: int, d: int) -> torch.Tensor:
        return outlier_normal(
            batch, h, s, d, generator=generator, dtype=dtype, device=device, requires_grad=requires_grad
        )

    return make(heads, q_len, dim), make(kv_heads, kv_len, dim), make(kv_heads, kv_len, v_dim)


def uncancelled_sizes(
    gradients: Callable[[torch.Tensor], Sequence[torch.Tensor]], rows: torch.Tensor, generator: torch.Generator
) -> list[float]:
    """Norms of gradients as they are where the parts that queries contribute do not cancel.

    The gradient of one number per head is a sum over all queries, which may come out far smaller than its parts; its
    error does not. So: the root mean square of the norms over random signs of the queries' incoming gradients.
    `gradients` takes the signs, shaped like `rows` (..., Sq).
    """
    draws = 8
    found = []
    for _ in range(draws):
        signs = torch.randint(0, 2, rows.shape, generator=generator).to(rows) * 2 - 1
        found.append([float(g.norm()) ** 2 for g in gradients(signs)])
    return [(sum(column) / draws) ** 0.5 for column in zip(*found, strict=True)]


def sampled(cases: Iterable[Any], every: int = 3) -> list[Any]:
    """Cases to parametrize by, of which each `every`-th runs by default and the others are slow (`make test-all`).

    For kernels that are compiled and emulated: seconds per case, and many cases.
    """
    cases = list(cases)
    params = [c if isinstance(c, tuple) else (c,) for c in cases]
    return [pytest.param(*c, marks=[pytest.mark.slow] if n % every else []) for n, c in enumerate(params)]


def poison_cuda_memory(megabytes: int = 256) -> None:
    """Fill what the allocator hands out next with NaN, so that what a kernel leaves unwritten shows."""
    torch.full((megabytes * 2**18,), float("nan"), device="cuda")
    torch.cuda.synchronize()


def count_calls(work: Callable[[], object]) -> int:
    """How many functions, of Python and of C, a call of `work` calls: what it costs, on machines of any load."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # what it finalises is none of the work
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count
