"""Mods made for another number of heads or sequences than a call has: refused by name, with what would work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.mods import alibi, bias, causal, document, padding, prefix_lm, scale_by_head, sliding_window
from tests.support import qkv

B, H, S = 2, 4, 24
LONG = 64  # positions of tables, more than any call has


def attended(**options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    q, k, v = qkv(generator=generator, batch=B, heads=H, kv_heads=H, q_len=S, kv_len=S)
    return ca.attention(q, k, v, **options)


def of_heads(n: int) -> torch.Tensor:
    return torch.arange(float(n)) / 8 - 0.2


IDS = torch.randint(0, 3, (8, LONG), generator=torch.Generator().manual_seed(0))
MADE_FOR_OTHERS: dict[str, tuple[Any, str]] = {
    "slopes of the paper": (lambda: {"score_mod": alibi(8)}, r"made for 8 query heads, .* has 4; .* alibi\(4\)"),
    "slopes of fewer heads": (lambda: {"score_mod": alibi(2)}, "made for 2 query heads"),
    "slopes inside of a function": (
        lambda: {"score_mod": lambda s, b, h, q, kv: alibi(8)(s, b, h, q, kv) * 2},
        "made for 8 query heads",
    ),
    "slopes": (lambda: {"score_mod": alibi(of_heads(8))}, r"8 entries for 4 query heads; .* tensor\[:4\]"),
    "slopes of a batch": (lambda: {"score_mod": alibi(torch.rand(3, H))}, r"3 entries for 2 batch entries"),
    "a table": (lambda: {"score_mod": lambda s, b, h, q, kv: s + of_eight[h]}, "8 entries"),
    "a table by an int64": (lambda: {"score_mod": lambda s, b, h, q, kv: s + of_eight[h.long()]}, "8 entries"),
    "a table in a branch": (
        lambda: {"score_mod": lambda s, b, h, q, kv: torch.where(q > 3, s + of_eight[h], s)},
        "8 entries",
    ),
    "a table's second dimension": (
        lambda: {"score_mod": lambda s, b, h, q, kv: s + IDS[kv % 8, h]},
        r"64 entries for 4 query heads; .* tensor\[:, :4\]",
    ),
    "factors": (lambda: {"score_mod": scale_by_head(of_heads(8))}, "8 entries"),
    "windows": (lambda: {"mask_mod": sliding_window(torch.arange(8))}, "8 entries for 4 query heads"),
    "documents of a batch": (lambda: {"mask_mod": causal() & document(IDS)}, r"8 entries for 2 batch .*shifted\(b="),
    "prefixes": (lambda: {"mask_mod": prefix_lm(torch.arange(8))}, "8 entries for 2 batch entries"),
    "paddings": (lambda: {"mask_mod": padding(torch.arange(1, 9))}, "8 entries for 2 batch entries"),
    "a bias": (lambda: {"score_mod": bias(torch.zeros(8, H, S, S))}, "8 entries for 2 batch entries"),
}
of_eight = of_heads(8)
SERVED: dict[str, tuple[Any, Any]] = {
    "tables of the longest sequence": (
        lambda: {"mask_mod": document(IDS[:B])},
        lambda: {"mask_mod": document(IDS[:B, :S].contiguous())},
    ),
    "a dimension that is shared": (
        lambda: {"score_mod": bias(torch.arange(4.0).view(1, H, 1, 1).expand(1, H, S, S))},
        lambda: {"score_mod": lambda s, b, h, q, kv: s + h},
    ),
    "an index that is computed": (
        lambda: {"score_mod": lambda s, b, h, q, kv: s * of_eight[h // 2] + q * of_eight[h + 1]},
        lambda: {"score_mod": lambda s, b, h, q, kv: s * (h // 2 / 8 - 0.2) + q * ((h + 1) / 8 - 0.2)},
    ),
    "an index that begins at 0 here, and elsewhere on other ranks": (
        lambda: {"score_mod": lambda s, b, h, q, kv: s * of_eight[h + 0] + q * of_eight[h - torch.zeros_like(h)]},
        lambda: {"score_mod": lambda s, b, h, q, kv: (s + q) * (h / 8 - 0.2)},
    ),
    "the first heads of more": (
        lambda: {"score_mod": alibi(of_eight).shifted(h=0)},
        lambda: {"score_mod": alibi(of_eight[:4])},
    ),
    "the first slopes of more": (
        lambda: {"score_mod": alibi(8).shifted(h=0) >> alibi(8).shifted(h=4)},
        lambda: {"score_mod": alibi(2.0 ** -torch.arange(1.0, 5)) >> alibi(2.0 ** -torch.arange(5.0, 9))},
    ),
    "the first of a batch": (
        lambda: {"mask_mod": causal() & document(IDS).shifted(b=0)},
        lambda: {"mask_mod": causal() & document(IDS[:B])},
    ),
    "others of a batch": (
        lambda: {"mask_mod": causal() & document(IDS).shifted(b=torch.tensor(3))},
        lambda: {"mask_mod": causal() & document(IDS[3:5])},
    ),
}


@pytest.mark.parametrize("name", MADE_FOR_OTHERS)
def test_a_mod_of_more_heads_or_sequences_is_refused_by_name(name: str) -> None:
    options, message = MADE_FOR_OTHERS[name]
    with pytest.raises(errors.ModShapeMismatch, match=message):
        attended(**options())


@pytest.mark.parametrize("name", SERVED)
def test_a_table_that_is_longer_on_purpose_is_served(name: str) -> None:
    options, plain = SERVED[name]
    torch.testing.assert_close(attended(**options()), attended(**plain()))


def test_parts_of_heads_are_those_of_the_whole_from_the_first_on() -> None:
    """Each rank says where its heads begin, rank 0 too."""
    q, k, v = (torch.randn(1, H, S, 8) for _ in range(3))
    whole = ca.attention(q, k, v, score_mod=alibi(H), mask_mod=causal())
    for first in (0, 2):
        mine = slice(first, first + 2)
        part = ca.attention(q[:, mine], k[:, mine], v[:, mine], score_mod=alibi(H).shifted(h=first), mask_mod=causal())
        torch.testing.assert_close(part, whole[:, mine])


def test_a_shifted_mask_is_analysed_as_the_mask_is() -> None:
    mask = padding(torch.tensor([20, 30])) & causal()
    here = mask.shifted(b=0)
    assert here.bands() == mask.bands()
    assert torch.equal(here.tiles(S, 32, (8, 8), 2), mask.tiles(S, 32, (8, 8), 2))
    assert torch.equal(here.dense(S, 32, 2), mask.dense(S, 32, 2))


def test_numbers_of_heads_and_sequences_reach_no_kernel() -> None:
    from composattn.analysis.program import Program

    paper, ready = lambda s, b, h, q, kv: s + torch.exp2((h + 1) * -2.0) * (kv - q), alibi(4)
    assert Program(ready.expr).mods == Program(ca.score(paper).expr).mods == Program(ready.shifted(h=0).expr).mods


def test_below_vmap_each_call_is_looked_at() -> None:
    q, ids = torch.randn(3, 1, H, S, 8), torch.randint(0, 3, (3, 8, S))

    def one(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return ca.attention(q, q, q, mask_mod=document(ids) | (lambda b, h, i, j: i == j))

    with pytest.raises(errors.ModShapeMismatch, match="8 entries for 1 batch"):
        torch.func.vmap(one)(q, ids)
    each = torch.stack([one(q[n], ids[n, :1]) for n in range(3)])
    torch.testing.assert_close(torch.func.vmap(one)(q, ids[:, :1]), each)


def test_in_compiled_code_the_operator_refuses() -> None:
    torch._dynamo.reset()
    with pytest.raises(errors.ModShapeMismatch, match="made for 8 query heads"):
        q = torch.randn(1, H, S, 8)
        torch.compile(lambda q: ca.attention(q, q, q, score_mod=alibi(8)), backend="eager", fullgraph=True)(q)
