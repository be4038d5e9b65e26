"""Packed sequences through the emulated forward kernel: each as if it were alone, whatever lies between them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.graph.expr import const, index
from composattn.graph.rebuilt import substitute
from composattn.mods.mask import Mask
from composattn.mods.masks import causal, padding, prefix_lm, sliding_window
from composattn.mods.score import Score
from composattn.mods.scores import alibi, softcap
from composattn.testing import Case, assert_attention_close
from tests.support import outlier_normal, sampled

LENGTHS = (70, 0, 1, 130, 200)
OTHERS = (100, 50, 0, 33, 210)
WIDTHS, SLOPES = torch.tensor([5, 40]), torch.rand(2)
PREFIXES, GAINS = torch.tensor([3, 1, 1, 60, 7]), torch.rand(5, 2) + 0.5


@dataclasses.dataclass(frozen=True)
class Packed:
    """One call on packed sequences; `kv` and `used*` None: the keys lie as the queries do, all rows are used."""

    score: Any = None
    mask: Any = None
    kv: tuple[int, ...] | None = None
    used_q: tuple[int, ...] | None = None
    used_kv: tuple[int, ...] | None = None
    heads: tuple[int, int] = (2, 1)
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "plain": Packed(),
    "plain-d128-mha-other-keys": Packed(kv=OTHERS, heads=(2, 2), dim=128),
    "causal": Packed(mask=causal()),
    "causal-to-the-last-key": Packed(mask=causal("bottom_right"), kv=OTHERS, dtype=torch.float16),
    "window-by-head": Packed(mask=causal() & sliding_window(WIDTHS), heads=(2, 2)),
    "prefix-by-sequence": Packed(mask=prefix_lm(PREFIXES)),
    "checkerboard": Packed(mask=lambda b, h, q, kv: (q + kv) % 2 == 0),
    "opaque-listed": Packed(mask=lambda b, h, q, kv: (q // 16 * 7 + kv // 32) % 5 < 2, heads=(2, 2)),
    "padding-by-sequence": Packed(mask=padding(torch.tensor([7, 9, 1, 130, 33]))),
    "alibi-softcap": Packed(score=alibi(SLOPES) >> softcap(5.0), mask=causal()),
    "gain-by-sequence": Packed(score=lambda s, b, h, q, kv: s * GAINS[b, h] - 0.01 * q, heads=(2, 2)),
    "used-keys": Packed(kv=OTHERS, used_kv=(99, 0, 0, 32, 2), dim=128),
    "used-both-causal-fp16": Packed(mask=causal(), used_q=(33, 0, 1, 0, 150), dtype=torch.float16),
}


@pytest.mark.parametrize("name", sampled(CASES))
def test_each_sequence_is_as_if_alone(name: str, generator: torch.Generator) -> None:
    case = CASES[name]
    cu_q, cu_kv = offsets(LENGTHS), offsets(case.kv or LENGTHS)
    used_q, used_kv = counts(case.used_q), counts(case.used_kv)
    q_rows = rows(cu_q, used_q)
    kv_rows = rows(cu_kv, used_q if case.kv is None and used_kv is None else used_kv)
    q, k, v = (
        hidden(outlier_normal(int(cu[-1]), heads, case.dim, generator=generator, dtype=case.dtype), spans)
        for cu, heads, spans in (
            (cu_q, case.heads[0], q_rows),
            (cu_kv, case.heads[1], kv_rows),
            (cu_kv, case.heads[1], kv_rows),
        )
    )
    varlen = ca.Varlen(cu_q, None if case.kv is None else cu_kv, seqused_q=used_q, seqused_k=used_kv)
    out, lse = ca.attention(
        q, k, v, score_mod=case.score, mask_mod=case.mask, varlen=varlen, return_lse=True, backend="hopper-emulated"
    )
    unused = torch.ones(q.shape[0], dtype=torch.bool)
    for b, (mine, keys) in enumerate(zip(q_rows, kv_rows, strict=True)):
        unused[mine] = False
        if mine.start == mine.stop:
            continue
        one, its_k, its_v = (x.transpose(0, 1)[None] for x in (q[mine], k[keys], v[keys]))
        assert_attention_close(
            {"out": out[mine].transpose(0, 1)[None], "lse": lse[None, :, mine]},
            Case(
                one,
                its_k,
                its_v,
                score_mod=None if case.score is None else Score(of_sequence(Score.of(case.score).expr, b)),
                mask_mod=None if case.mask is None else Mask(of_sequence(Mask.of(case.mask).expr, b)),
                name=f"{name}, sequence {b}",
            ),
        )
    assert (out[unused] == 0).all()
    assert (lse[:, unused] == -torch.inf).all()


def test_no_keys_at_all_give_zero(generator: torch.Generator) -> None:
    q = outlier_normal(5, 2, 64, generator=generator, dtype=torch.bfloat16)
    k = v = q.new_empty(0, 1, 64)
    varlen = ca.Varlen(offsets((2, 3)), offsets((0, 0)))
    out, lse = ca.attention(q, k, v, varlen=varlen, return_lse=True, backend="hopper-emulated")
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def counts(used: tuple[int, ...] | None) -> torch.Tensor | None:
    return None if used is None else torch.tensor(used, dtype=torch.int32)


def rows(cu: torch.Tensor, used: torch.Tensor | None) -> list[slice]:
    """The rows of each sequence."""
    lengths = cu.diff() if used is None else used
    return [slice(int(start), int(start + length)) for start, length in zip(cu, lengths, strict=False)]


def hidden(x: torch.Tensor, spans: list[slice]) -> torch.Tensor:
    """`x` with NaN in the rows that no sequence uses."""
    unused = torch.ones(x.shape[0], dtype=torch.bool)
    for span in spans:
        unused[span] = False
    return x.masked_fill(unused[:, None, None], torch.nan)


def of_sequence(expr: Any, b: int) -> Any:
    """A mod's graph for the one sequence, as batch entry 0 of a dense call sees it."""
    return substitute(expr, {index("b"): const(b)})
