"""Packed sequences and keys in pages on a GPU: random calls, no wait for the device, no kernel for new lengths.

COMPOSATTN_FUZZ=300 draws that many random calls instead of a few.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
from collections.abc import Callable, Iterator

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.backends.fused.compiling import compile as compiled
from composattn.mods import alibi, causal, neighborhood, sliding_window
from composattn.testing import FUSED, check, make_paged_case, make_varlen_case, random_case
from composattn.testing.tolerance import Case
from tests.support import as_served, cut_as_long_ones, gpu_backend, has_backward

pytestmark = pytest.mark.gpu

FUZZED = int(os.environ.get("COMPOSATTN_FUZZ", "8"))
BACKENDS = (gpu_backend(), "streaming")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("number", range(FUZZED))
@pytest.mark.parametrize("layout", ["varlen", "paged"])
def test_random_calls_are_right(layout: str, number: int, backend: str) -> None:
    seed = random.Random(f"{os.environ['COMPOSATTN_TEST_SEED']}:{layout}:{number}").randrange(2**31)
    space = dataclasses.replace(FUSED, layouts=(layout,), batches=(1, 2, 5))  # type: ignore[arg-type]
    case = as_served(random_case(seed, space), backend)
    try:
        with cut_as_long_ones(number % 2 == 1):
            check(functools.partial(ca.attention, backend=backend), case)
    except Exception as error:
        raise AssertionError(f"random_case({seed}): {case}") from error


# --- what a call may not do ------------------------------------------------------------------------------------


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Whoever waits for the device raises, once the test has turned it on."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def packed(lengths: tuple[int, ...]) -> Case:
    return make_varlen_case(0, lengths, heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16, device="cuda")


def with_gradients(
    attend: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], dout: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """out, and dq, dk, dv where there is a backward."""
    if not has_backward(gpu_backend()):
        with torch.no_grad():
            return (attend(*inputs),)
    out = attend(*inputs)
    return out, *torch.autograd.grad(out, inputs, dout)


LENGTHS = ((300, 0, 17, 683), (1, 1, 1, 997), (0, 1000, 0, 0), (250, 250, 250, 250))
MASKS = {
    "causal": lambda: causal(),
    "window": lambda: causal() & sliding_window(100),
    "tiles": lambda: neighborhood((40, 25), (9, 5)),
}


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("lengths", [(300, 0, 17, 683), (1, 1, 1, 3997), (600,) * 40], ids=["few", "one", "many"])
def test_gradients_of_eight_heads_of_a_group(lengths: tuple[int, ...], kv_heads: int, dim: int) -> None:
    """Tiles of keys are cut by query heads; their sums end where a sequence does, and some entries are no tiles."""
    case = make_varlen_case(
        0, lengths, heads=8 * kv_heads, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16, device="cuda",
        mask_mod=causal(),
    )  # fmt: skip
    check(functools.partial(ca.attention, backend=gpu_backend()), case)


@pytest.mark.parametrize("mask", MASKS)
def test_new_lengths_wait_for_nothing_and_compile_nothing(mask: str, no_waiting: None) -> None:
    def planned() -> ca.Attention:
        return ca.Attention(mask_mod=MASKS[mask](), score_mod=alibi(4), backend=gpu_backend(), deterministic=True)

    attend, cases = planned(), [packed(lengths) for lengths in LENGTHS]

    def run(case: Case, attend: ca.Attention = attend) -> tuple[torch.Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in (case.q, case.k, case.v))
        varlen = ca.Varlen(case.varlen.cu_seqlens_q, max_seqlen_q=1000)
        return with_gradients(functools.partial(attend, varlen=varlen), (q, k, v), case.dout)

    run(cases[0])
    kernels = len(compiled._compiled)
    torch.cuda.set_sync_debug_mode("error")
    results = [run(case) for case in cases]
    torch.cuda.set_sync_debug_mode("default")
    assert len(compiled._compiled) == kernels
    for case, result in zip(cases, results, strict=True):
        assert all(map(torch.equal, result, run(case, planned())))


def test_new_pages_wait_for_nothing_and_compile_nothing(no_waiting: None) -> None:
    # how many parts kv is cut into follows from the table's width, which is the caller's: fixed here
    attend = ca.Attention(mask_mod=causal("bottom_right"), backend=gpu_backend(), schedule=ca.Schedule(split_kv=3))
    shape = {"heads": 8, "kv_heads": 2, "dim": 128, "page_size": 64, "dtype": torch.bfloat16, "device": "cuda"}
    cases = [make_paged_case(seed, lengths, **shape) for seed, lengths in enumerate(((700, 3), (65, 699), (640, 0)))]
    with torch.no_grad():
        attend(cases[0].q, cases[0].k, cases[0].v, paged=cases[0].paged)
        kernels = len(compiled._compiled)
        torch.cuda.set_sync_debug_mode("error")
        for case in cases:
            attend(case.q, case.k, case.v, paged=case.paged)
        torch.cuda.set_sync_debug_mode("default")
    assert len(compiled._compiled) == kernels


# --- in torch's machinery --------------------------------------------------------------------------------------


def test_lengths_change_under_a_cuda_graph() -> None:
    case = packed(LENGTHS[0])
    attend = ca.Attention(mask_mod=causal(), backend=gpu_backend())
    q, k, v = (x.nan_to_num() for x in (case.q, case.k, case.v))
    varlen = ca.Varlen(case.varlen.cu_seqlens_q.clone())
    with torch.no_grad():
        attend(q, k, v, varlen=varlen)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        varlen.cu_seqlens_q.copy_(varlen.cu_seqlens_q)  # whatever follows from the lengths is computed in the graph
        with torch.cuda.graph(graph):
            out = attend(q, k, v, varlen=varlen)
        for lengths in LENGTHS:
            varlen.cu_seqlens_q.copy_(packed(lengths).varlen.cu_seqlens_q)
            graph.replay()
            wanted = attend(q, k, v, varlen=ca.Varlen(varlen.cu_seqlens_q.clone()))
            assert torch.equal(out, wanted)


def test_packed_and_paged_calls_compile_whole() -> None:
    case, paged = packed(LENGTHS[0]), make_paged_case(0, (100, 5), dim=64, dtype=torch.bfloat16, device="cuda")
    attend = ca.Attention(mask_mod=causal("bottom_right"), backend=gpu_backend(), deterministic=True)
    q, k, v = (x.nan_to_num().requires_grad_() for x in (case.q, case.k, case.v))

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **lengths: object) -> torch.Tensor:
        return attend(q, k, v, **lengths)  # type: ignore[arg-type, return-value]

    def results(f: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        return list(with_gradients(functools.partial(f, varlen=case.varlen), (q, k, v), case.dout))

    whole = torch.compile(forward, fullgraph=True)
    assert all(map(torch.equal, results(whole), results(forward)))
    with torch.no_grad():
        tensors = (paged.q, paged.k, paged.v)
        assert torch.equal(whole(*tensors, paged=paged.paged), forward(*tensors, paged=paged.paged))


def test_contents_of_tensors_on_the_gpu_are_checked_on_demand() -> None:
    case = packed(LENGTHS[0])
    falling = ca.Varlen(torch.tensor([0, 300, 200, 400, 1000], dtype=torch.int32, device="cuda"))
    with ca.debug_checks(), pytest.raises(errors.OffsetsNotMonotone):
        ca.attention(case.q, case.k, case.v, varlen=falling)
