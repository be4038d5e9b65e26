"""Parts of attention over different keys joined by their LSE: exact, with gradients, also where parts see nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.mods import causal, document

T = torch.Tensor
KEYS = [slice(0, 7), slice(7, 8), slice(8, 20)]
HIDDEN = 6  # first rows, which see nothing; the last keys are seen by few


def seen(first: int) -> Any:
    return lambda b, h, q, kv: (kv + first <= q) & (q >= HIDDEN)


def inputs(dtype: torch.dtype = torch.float64) -> list[T]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(1, 2, 20, 8, dtype=dtype, generator=generator).requires_grad_() for _ in range(3)]


def merged(q: T, k: T, v: T, **options: Any) -> tuple[T, T]:
    return ca.merge_states(
        ca.attention(q, k[:, :, keys], v[:, :, keys], mask_mod=seen(keys.start), return_lse=True, **options)  # type: ignore[misc]
        for keys in KEYS
    )


def test_parts_are_the_whole_with_its_gradients_also_of_rows_that_see_nothing() -> None:
    q, k, v = inputs()
    found, wanted = merged(q, k, v), ca.attention(q, k, v, mask_mod=seen(0), return_lse=True)
    torch.testing.assert_close(found, wanted)
    assert (found[1][:, :, :HIDDEN] == -math.inf).all() and not found[0][:, :, :HIDDEN].any()
    through = [(out.cos().sum() + lse[:, :, HIDDEN:].sin().sum()) for out, lse in (found, wanted)]
    for mine, whole in zip(*(torch.autograd.grad(loss, (q, k, v)) for loss in through), strict=True):
        torch.testing.assert_close(mine, whole)


def test_forward_mode_and_gradients_of_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    outs = [torch.randn(1, 1, 3, 2, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]
    lses = [torch.randn(1, 1, 3, dtype=torch.float64, generator=generator) for _ in range(3)]
    lses[1][..., 0] = lses[2][..., 2] = -math.inf
    lses = [lse.requires_grad_() for lse in lses]

    def joined(*given: T) -> tuple[T, T]:
        return ca.merge_states(zip(given[:3], given[3:], strict=True))

    # torch moves each number by itself, so those that are -inf stay, with a gradient of 0
    assert torch.autograd.gradcheck(joined, (*outs, *lses), check_forward_ad=True, check_batched_forward_grad=True)
    assert torch.autograd.gradgradcheck(joined, (*outs, *lses), check_fwd_over_rev=True, check_rev_over_rev=True)


def test_a_light_part_keeps_its_digits() -> None:
    """It weighs e^-18, and holds what is large: as the sink of a row that sees nothing else of size."""
    heavy, light = torch.zeros(1, 1, 1, 4), torch.full((1, 1, 1, 4), 1e6)
    for far in (18.0, 40.0, 80.0):
        lses = torch.zeros(1, 1, 1), torch.full((1, 1, 1), -far)
        for order in (1, -1):
            out, lse = ca.merge_states([(heavy, lses[0]), (light, lses[1])][::order])
            torch.testing.assert_close(out.double(), light.double() * math.exp(-far), rtol=3e-5, atol=0.0)
            assert lse.item() == pytest.approx(math.log1p(math.exp(-far)), abs=1e-7)


def test_what_a_part_holds_of_rows_that_it_does_not_see_is_not_read() -> None:
    out, lse = torch.ones(1, 1, 2, 4), torch.tensor([[[0.5, -math.inf]]])
    garbage = torch.full((1, 1, 2, 4), math.nan, requires_grad=True)
    found, total = ca.merge_states([(garbage, torch.full((1, 1, 2), -math.inf)), (out, lse)])
    assert torch.equal(found, torch.tensor([1.0, 0.0])[:, None].expand(1, 1, 2, 4)) and torch.equal(total, lse)
    (gradient,) = torch.autograd.grad(found.sum(), garbage)
    assert not gradient.any()
    found, total = ca.merge_states([(out, torch.tensor([[[math.nan, 0.0]]])), (out, lse)])
    assert found[0, 0, 0].isnan().all() and total.isnan().tolist() == [[[True, False]]]
    assert torch.equal(found[0, 0, 1], out[0, 0, 1])


def test_packed_parts_and_half_precision() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(11, 2, 8, generator=generator).bfloat16() for _ in range(3))
    varlen = ca.Varlen(torch.tensor([0, 4, 11], dtype=torch.int32))
    even = document(torch.arange(11) % 2, torch.zeros(11, dtype=torch.int64))
    whole = ca.attention(q, k, v, varlen=varlen, mask_mod=causal(), return_lse=True)
    parts = [ca.attention(q, k, v, varlen=varlen, mask_mod=causal() & m, return_lse=True) for m in (even, ~even)]
    out, lse = ca.merge_states(parts)  # type: ignore[arg-type]
    assert out.dtype is torch.bfloat16 and lse.dtype is torch.float32
    torch.testing.assert_close((out, lse), whole, rtol=1e-2, atol=1e-2)


def test_merging_is_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    lses = [torch.tensor([[[0.5, -math.inf, -math.inf]]]), torch.tensor([[[1.5, 2.0, -math.inf]]])]
    found = []
    for merge in (ca.merge_states, torch.compile(ca.merge_states, fullgraph=True, backend="aot_eager")):
        given = [t.clone().requires_grad_() for t in (*(torch.ones(1, 1, 3, 2) * n for n in (1, 2)), *lses)]
        out, lse = merge([(given[0], given[2]), (given[1], given[3])])
        found.append([out, lse, *torch.autograd.grad(out.sum() + lse[..., :2].sum(), given)])
    torch.testing.assert_close(found[1], found[0])


PART = (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3))


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (errors.InvalidArgument, []),
        (errors.NotATensor, [(PART[0], None)]),
        (errors.NotATensor, [PART[0][0, 0]]),
        (errors.ShapeMismatch, [PART, (PART[0][:, :, :2], PART[1][:, :, :2])]),
        (errors.ShapeMismatch, [(PART[0][0], PART[1][0])]),
        (errors.ShapeMismatch, [(PART[0][0, 0], PART[1][0, 0])]),
        (errors.DTypeMismatch, [PART, (PART[0].half(), PART[1])]),
        (errors.DTypeMismatch, [(PART[0].int(), PART[1])]),
        (errors.DTypeMismatch, [(PART[0].to(torch.float8_e4m3fn), PART[1])]),
        (errors.UnsupportedLayout, [PART, (torch.nn.UninitializedParameter(), PART[1])]),
        (errors.DeviceMismatch, [PART, (PART[0].to("meta"), PART[1])]),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(error: type[Exception], parts: Any) -> None:
    with pytest.raises(error):
        ca.merge_states(parts)
