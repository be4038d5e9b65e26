"""Kernels with one loop over tested tiles and one over the others, by turns, emulated with no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.mods import alibi, causal, document
from composattn.testing import Case, assert_attention_close, make_case, make_paged_case

ROWS = 330
LONG, SHORT = torch.arange(ROWS) // 140, torch.arange(ROWS) // 13
MIXED = torch.arange(ROWS) % 3  # no row sees one run of keys
SLOPES = torch.tensor([0.5, 0.25])


def window_and_first(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Two runs of keys, the first of which all rows see."""
    return (q >= kv) & ((q - kv < 70) | (kv < 20))


def dense(mask: Any, score: Any = None, dim: int = 64, **sizes: Any) -> Case:
    sizes = {"heads": 2, "kv_heads": 2, "q_len": ROWS, "kv_len": ROWS, **sizes}
    return make_case(
        5, score_mod=score, mask_mod=mask, batch=1, dim=dim, dtype=torch.bfloat16, gradients=False, **sizes
    )


CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "documents": (dense(causal() & document(LONG)), {}),
    "short documents": (dense(causal() & document(SHORT), dim=128), {}),
    "mixed documents": (dense(causal() & document(MIXED), dim=128), {}),
    "documents that all rows see": (dense(document(LONG), dim=128), {}),
    "alibi": (dense(causal() & document(LONG), alibi(SLOPES)), {}),
    "two runs": (dense(window_and_first), {}),
    "two runs, blocks that stay": (dense(window_and_first, dim=128), {"schedule": ca.Schedule(persistent=True)}),
    "fewer keys than rows": (dense(causal() & document(LONG), kv_len=150), {}),
    "documents, in one order": (dense(causal() & document(LONG)), {"schedule": ca.Schedule(batch_invariant=True)}),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_fp64(name: str) -> None:
    case, options = CASES[name]
    given = {"score_mod": case.score_mod, "mask_mod": case.mask_mod}
    out, lse = ca.attention(case.q, case.k, case.v, return_lse=True, backend="hopper-emulated", **given, **options)
    assert_attention_close({"out": out, "lse": lse}, case)


def test_what_a_page_holds_behind_the_last_key_changes_nothing() -> None:
    """Nothing of V behind the last key is multiplied."""
    case = make_paged_case(
        2, [300, 17, 0], page_size=16, q_len=90, heads=2, dim=64, dtype=torch.bfloat16, mask_mod=window_and_first
    )
    given: dict[str, Any] = {"mask_mod": case.mask_mod, "paged": case.paged}
    out = ca.attention(case.q, case.k, case.v, backend="hopper-emulated", **given)
    exact = ca.attention(case.q, case.k, case.v, backend="reference", **given)
    assert isinstance(out, torch.Tensor) and out.isfinite().all()
    torch.testing.assert_close(out, exact, rtol=2e-2, atol=2e-2)
