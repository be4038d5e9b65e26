"""The largest score of each row from Hopper's kernels, emulated with no GPU, whatever was left out of their loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.call.schedule import Schedule
from composattn.mods import alibi, causal
from composattn.testing import Case, make_case, make_paged_case, make_varlen_case

SLOPES = torch.tensor([0.5, 0.25])


def creeping(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Rises along the keys by less a tile than the stabiliser follows."""
    return 0.01 * score + kv / 100.0


def by_row(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + 3.0 * q - 40.0


def hidden_rows(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q % 7 != 3)


def late(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv <= q + 250


def dense(score: Any, mask: Any, **sizes: Any) -> Case:
    sizes = {"heads": 2, "kv_heads": 2, "q_len": 200, "kv_len": 200, **sizes}
    return make_case(3, score_mod=score, mask_mod=mask, batch=1, dim=64, dtype=torch.bfloat16, gradients=False, **sizes)


# a call, and how its work is divided
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "within the slack": (dense(creeping, None, kv_len=600), {}),
    "a row's constant": (dense(by_row, hidden_rows), {}),
    "alibi": (dense(alibi(SLOPES), causal()), {}),
    "negative scale": (dense(None, causal()), {"scale": -0.3}),
    "kv in parts": (dense(creeping, late, heads=4, q_len=3, kv_len=600), {"schedule": Schedule(split_kv=3)}),
    "packed": (
        make_varlen_case(1, (90, 0, 33), used_q=(80, 0, 33), heads=2, dim=64, mask_mod=causal(), dtype=torch.bfloat16),
        {},
    ),
    "paged": (make_paged_case(2, [300, 17, 0], page_size=16, heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_fp64(name: str) -> None:
    case, options = CASES[name]
    given: dict[str, Any] = {
        "score_mod": case.score_mod, "mask_mod": case.mask_mod, "scale": case.scale,
        "varlen": case.varlen, "paged": case.paged, "return_max_scores": True, **options,
    }  # fmt: skip
    out, found = ca.attention(case.q, case.k, case.v, backend="hopper-emulated", **given)
    exact, wanted = ca.attention(case.q, case.k, case.v, backend="reference", **given)
    assert torch.equal(found == -torch.inf, wanted == -torch.inf)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out, exact, rtol=2e-2, atol=2e-2)


def test_a_number_that_is_none_shows_in_it() -> None:
    case = dense(None, causal(), q_len=80, kv_len=80)
    case.q[0, 1, 50, 2] = torch.nan
    _, found = ca.attention(
        case.q, case.k, case.v, mask_mod=causal(), backend="hopper-emulated", return_max_scores=True
    )
    assert found.isnan().nonzero().tolist() == [[0, 1, 50]]


def test_gradients_are_those_of_a_call_that_does_not_ask_for_it() -> None:
    case = dense(None, causal(), q_len=70, kv_len=70)
    q, k, v = (t.detach().requires_grad_() for t in (case.q, case.k, case.v))
    attention = ca.Attention(mask_mod=causal(), backend="hopper-emulated", deterministic=True)
    asked: Any = attention(q, k, v, return_lse=True, return_max_scores=True)
    plain: Any = attention(q, k, v, return_lse=True)
    assert not asked[2].requires_grad
    for a, b in zip(*(torch.autograd.grad(r[0].sum() + r[1].sum(), (q, k, v)) for r in (asked, plain)), strict=True):
        assert torch.equal(a, b)
