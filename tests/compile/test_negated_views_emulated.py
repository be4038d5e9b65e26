"""Views that torch negates when they are read, as imaginary parts of conjugates: kernels read what lies in memory."""

from __future__ import annotations

import pytest
import torch

import composattn as ca
from benchmarks.host_work import HostOnly
from composattn.errors import UnsupportedCapture
from composattn.mods import causal

H, S, D = 2, 24, 16
EMULATED = ["hopper-emulated", "blackwell-emulated"]
BACKENDS = ["streaming", *(pytest.param(name, marks=pytest.mark.slow) for name in EMULATED)]


def negated_later(x: torch.Tensor) -> torch.Tensor:
    """`x` as a view of memory that holds -x."""
    view = torch._neg_view(-x)
    assert view.is_neg() and torch.equal(view, x)
    return view


def drawn() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, H, S, D, generator=generator).bfloat16() for _ in range(4)]


def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, backend: str) -> list[torch.Tensor]:
    given = [t.detach().requires_grad_() for t in (q, k, v)]
    for _ in range(3):  # the third call goes the short way of the first two
        out = ca.attention(*given, mask_mod=causal(), backend=backend)
        found = [out.detach(), *torch.autograd.grad(out, given, dout)]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
def test_inputs_and_gradients_are_read_as_torch_reads_them(which: str, backend: str) -> None:
    given = drawn()
    wanted = results(*given, backend=backend)
    place = ["q", "k", "v", "dout"].index(which)
    given[place] = negated_later(given[place])
    for x, y in zip(results(*given, backend=backend), wanted, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", ["streaming", *EMULATED])
def test_captured_ones_are_refused_by_kernels_and_read_by_others(backend: str) -> None:
    q, k, v, _ = drawn()
    slopes = torch.rand(H)

    def call(table: torch.Tensor) -> torch.Tensor:
        return ca.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h] * (j - i), backend=backend)

    if backend == "streaming":
        assert torch.equal(call(negated_later(slopes)), call(slopes))
    else:
        with pytest.raises(UnsupportedCapture, match=r"resolve_neg\(\)"):
            call(negated_later(slopes))


def test_a_tensor_and_the_view_that_negates_it_are_two() -> None:
    q, k, v, _ = drawn()
    slopes = torch.rand(H)
    view = torch._neg_view(slopes)
    out = ca.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (slopes[h] + view[h]) * (j - i))
    assert torch.equal(out, ca.attention(q, k, v))


def test_kernels_of_an_h200_are_given_none() -> None:
    attention = HostOnly(causal())
    q, k, v, dout = map(negated_later, drawn())
    for _ in range(3):
        torch.autograd.grad(attention(q.requires_grad_(), k, v), q, dout)
    given = [t for record in attention.last_arguments() for t in record if isinstance(t, torch.Tensor)]
    assert len(given) > 10 and not any(t.is_neg() for t in given)
