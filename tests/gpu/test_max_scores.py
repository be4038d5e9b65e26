"""The largest score of each row from the kernels on a GPU: that of the reference, and no other output for asking."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import composattn as ca
from composattn.call.schedule import Schedule
from composattn.mods import alibi, causal, softcap
from composattn.testing import Case, make_case, make_paged_case, make_varlen_case
from tests.support import gpu_backend

SIZES: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "dtype": torch.bfloat16, "device": "cuda"}


def slopes() -> torch.Tensor:
    return 2.0 ** -torch.arange(1.0, 5.0, device="cuda")


def dense(q_len: int, kv_len: int, dim: int, **mods: Any) -> Case:
    return make_case(5, q_len=q_len, kv_len=kv_len, dim=dim, gradients=False, **mods, **SIZES)


# a call, and how its work is divided
CASES: dict[str, Any] = {
    "causal-d128": lambda: (dense(1000, 1000, 128, mask_mod=causal()), {}),
    "alibi-d64": lambda: (dense(700, 900, 64, mask_mod=causal(), score_mod=alibi(slopes())), {}),
    "softcap-d256": lambda: (dense(300, 300, 256, score_mod=softcap(20.0)), {}),
    "parts-of-kv": lambda: (dense(1, 5000, 128, score_mod=alibi(slopes())), {"schedule": Schedule(split_kv=7)}),
    "packed": lambda: (
        make_varlen_case(6, (900, 0, 33), used_q=(800, 0, 33), heads=4, dim=128, mask_mod=causal(),
                         dtype=torch.bfloat16, device="cuda", gradients=False), {},
    ),
    "paged": lambda: (
        make_paged_case(7, [3000, 17, 0], page_size=64, heads=8, kv_heads=2, dim=128, dtype=torch.bfloat16,
                        device="cuda"), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_in_fp64(name: str) -> None:
    case, options = CASES[name]()
    given = {"score_mod": case.score_mod, "mask_mod": case.mask_mod, "varlen": case.varlen, "paged": case.paged}
    out, lse, found = ca.attention(
        case.q, case.k, case.v, **given, **options, return_lse=True, return_max_scores=True, backend=gpu_backend()
    )
    _, wanted = ca.attention(case.q, case.k, case.v, **given, return_max_scores=True, backend="reference")
    assert torch.equal(found == -torch.inf, wanted == -torch.inf)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    plain = ca.attention(case.q, case.k, case.v, **given, **options, return_lse=True, backend=gpu_backend())
    assert torch.equal(out, plain[0])
    assert torch.equal(lse, plain[1])
