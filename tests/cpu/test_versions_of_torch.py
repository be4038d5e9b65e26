"""What differs with the version of torch, said by version: each test holds on every one of them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.dispatch import serialized
from composattn.graph import dynamo_versions, form
from composattn.graph.dynamo_versions import is_known, version_of_torch

Q = torch.randn(2, 4, 12, 8, generator=torch.Generator().manual_seed(5))


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def in_a_region(mask: Any) -> torch.Tensor:
    torch._dynamo.reset()
    call = torch.compile(lambda x: ca.attention(x, x, x, mask_mod=mask), fullgraph=True, backend="eager")
    return call(Q)  # type: ignore[no-any-return]


def test_a_function_is_read_in_a_region_by_a_dynamo_that_was_tried() -> None:
    if is_known():
        torch.testing.assert_close(in_a_region(causal), ca.attention(Q, Q, Q, mask_mod=causal))
    else:
        with pytest.raises(errors.UnsupportedTorch, match=f"this is torch {torch.__version__.split('+')[0]}"):
            in_a_region(causal)


def test_another_dynamo_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo_versions, "KNOWN", ((1, 12), (1, 13)))
    with pytest.raises(errors.UnsupportedTorch, match=r"torch 1\.12 to 1\.13"):
        in_a_region(causal)


@pytest.mark.parametrize("known", [(dynamo_versions.KNOWN), ((1, 12), (1, 13))], ids=["known", "unknown"])
def test_mods_made_outside_of_a_region_work_with_every_dynamo(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo_versions, "KNOWN", known)
    torch.testing.assert_close(in_a_region(ca.mask(causal)), ca.attention(Q, Q, Q, mask_mod=causal))
    kept = ca.Attention(mask_mod=causal)
    torch._dynamo.reset()
    call = torch.compile(lambda x: kept(x, x, x), fullgraph=True, backend="eager")
    torch.testing.assert_close(call(Q), ca.attention(Q, Q, Q, mask_mod=causal))


def test_a_clamp_keeps_its_gradient_at_its_ends_as_that_of_torch_did_before_2_14() -> None:
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    (theirs,) = torch.autograd.grad(torch.clamp(x, -1.0, 1.0).sum(), x)
    at_ends = 1.0 if version_of_torch() < (2, 14) else 0.0
    assert theirs.tolist() == [0.0, at_ends, 1.0, at_ends, 0.0]
    shift = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    # one key a query, so that out is v, and the LSE is the score: 0, moved to each of these
    zero = torch.zeros(1, 1, 5, 16, dtype=torch.float64)
    _, lse = ca.attention(
        zero,
        zero,
        zero,
        mask_mod=lambda b, h, q, kv: q == kv,
        score_mod=lambda s, b, h, q, kv: torch.clamp(s + shift[q], -1.0, 1.0),
        return_lse=True,
    )
    (ours,) = torch.autograd.grad(lse.sum(), shift)
    assert ours.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("writes", [serialized.serialize, serialized._names, form._written])
def test_text_that_a_region_writes_has_no_conversion_in_an_f_string(writes: Callable[..., object]) -> None:
    """The Dynamo of torch 2.11 forgets `!r` and `%r` under Python 3.13: strings were written bare."""
    tree = ast.parse(inspect.getsource(writes))
    converted = [node for node in ast.walk(tree) if isinstance(node, ast.FormattedValue) and node.conversion != -1]
    assert [ast.unparse(node) for node in converted] == []
