"""How masks and score mods combine, and that each wrong combination names the likely mistake."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composattn import errors
from composattn.mods import alibi, causal, document, padding, prefix_lm, sliding_window, softcap, temperature
from composattn.mods.mask import ALL, Mask
from composattn.mods.score import IDENTITY, Score

POINTS = list(itertools.product(range(1), range(2), range(7), range(7)))


def plain(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv < 3


def plain_score(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score * 2


PARTS: dict[str, tuple[Any, Callable[..., bool]]] = {
    "causal": (causal(), lambda b, h, q, kv: kv <= q),
    "window": (sliding_window((2, 1)), lambda b, h, q, kv: q - 2 <= kv <= q + 1),
    "prefix": (prefix_lm(2), lambda b, h, q, kv: kv < 2 or kv <= q),
    "document": (
        document(torch.tensor([0, 0, 1, 1, 1, 2, 2])),
        lambda b, h, q, kv: (q > 1) + (q > 4) == (kv > 1) + (kv > 4),
    ),
    "padding": (padding(torch.tensor([5])), lambda b, h, q, kv: kv < 5),
    "head": (Mask.of(lambda b, h, q, kv: h == 1), lambda b, h, q, kv: h == 1),
}


@st.composite
def formulas(draw: st.DrawFn, depth: int = 3) -> tuple[Any, Callable[..., bool]]:
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return PARTS[draw(st.sampled_from(sorted(PARTS)))]
    sign = draw(st.sampled_from("&|~"))
    mask, rule = draw(formulas(depth - 1))
    if sign == "~":
        return ~mask, lambda *p: not rule(*p)
    other, other_rule = draw(formulas(depth - 1))
    if sign == "&":
        return mask & other, lambda *p: rule(*p) and other_rule(*p)
    return mask | other, lambda *p: rule(*p) or other_rule(*p)


@given(formulas())
def test_masks_combine_as_logic(case: tuple[Any, Callable[..., bool]]) -> None:
    mask, rule = case
    for p in POINTS[::5]:
        assert bool(mask(*p)) == bool(rule(*p)), (mask, p)


def test_plain_callables_stand_on_either_side() -> None:
    for mask in (causal() & plain, plain & causal(), functools.partial(plain) & causal()):
        assert [bool(mask(0, 0, q, kv)) for q, kv in ((5, 2), (1, 2), (5, 4))] == [True, False, False]
    for mask in (causal() | plain, plain | causal()):
        assert [bool(mask(0, 0, q, kv)) for q, kv in ((5, 4), (1, 2), (1, 4))] == [True, True, False]
    for score in (
        plain_score >> softcap(5.0),
        softcap(5.0) >> plain_score,
        alibi(2) + plain_score,
        plain_score + alibi(2),
    ):
        assert isinstance(score, Score)


def test_units() -> None:
    assert (causal() & ALL).expr is causal().expr
    assert (causal() | ALL).expr is ALL.expr
    assert (~~causal()).expr is causal().expr
    assert (causal() & causal()).expr is causal().expr
    assert (IDENTITY >> softcap(3.0)).expr is softcap(3.0).expr
    assert (softcap(3.0) >> IDENTITY).expr is softcap(3.0).expr
    assert (alibi(4) + IDENTITY).expr is alibi(4).expr


def test_names_say_what_was_combined() -> None:
    mask = causal() & ~(sliding_window(4) | plain)
    assert repr(mask) == "(causal & ~(sliding_window(4) | plain))"
    assert repr(alibi(8) >> softcap(30.0)) == "(alibi >> softcap(30.0))"


MASK, SCORE = causal(), softcap(30.0)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    # name: (what was written, what the message must offer)
    "mask and mask": (lambda: causal() and sliding_window(4), "&"),
    "mask or mask": (lambda: causal() or sliding_window(4), r"\|"),
    "mask ^ mask": (lambda: causal() ^ sliding_window(4), r"\(a \| b\) & ~"),
    "function ^ mask": (lambda: (lambda b, h, q, kv: q == kv) ^ causal(), "exclusively"),
    "not mask": (lambda: not causal(), "~"),
    "if mask": (lambda: 1 if causal() else 0, r"& \| ~"),
    "score and score": (lambda: softcap(3.0) and alibi(2), ">>"),
    "not score": (lambda: not softcap(3.0), ">>"),
    "mask & score": (lambda: MASK & SCORE, "score_mod="),
    "score & mask": (lambda: SCORE & MASK, "mask_mod="),
    "mask | score": (lambda: MASK | SCORE, "score_mod="),
    "score | mask": (lambda: SCORE | MASK, "mask_mod="),
    "~ score": (lambda: ~SCORE, "mask_mod="),
    "mask & plain score mod": (lambda: MASK & plain_score, "score_mod="),
    "plain score mod | mask": (lambda: plain_score | MASK, "score_mod="),
    "mask & None": (lambda: MASK & None, "NoneType"),
    "mask & True": (lambda: MASK & True, "bool"),
    "mask & tensor": (lambda: MASK & torch.ones(3, 3, dtype=torch.bool), "tensor"),
    "mask >> score": (lambda: MASK >> SCORE, "torch.where"),
    "score >> mask": (lambda: SCORE >> MASK, "mask_mod="),
    "mask + mask": (lambda: MASK + causal(), "&"),
    "mask - mask": (lambda: MASK - causal(), "&"),
    "mask * 2": (lambda: MASK * 2, "&"),
    "score + mask": (lambda: SCORE + MASK, "mask_mod="),
    "mask + score": (lambda: MASK + SCORE, "torch.where"),
    "score + plain mask": (lambda: SCORE + plain, "mask_mod="),
    "score >> plain mask": (lambda: SCORE >> plain, "mask_mod="),
    "score + number": (lambda: SCORE + 1.0, "softmax"),
    "score * number": (lambda: SCORE * 2.0, "temperature"),
    "number * score": (lambda: 2.0 * SCORE, "temperature"),
    "score / number": (lambda: SCORE / 2.0, "temperature"),
    "score - score": (lambda: SCORE - temperature(2.0), r"\+"),
    "score >> number": (lambda: SCORE >> 2, "int"),
    "score + tensor": (lambda: SCORE + torch.ones(3, 3), "bias"),
    "mask == mask as a mask": (lambda: Mask.of(SCORE), "score_mod="),
    "score where a mask belongs": (lambda: Mask.of(softcap(2.0)), "score_mod="),
    "mask where a score belongs": (lambda: Score.of(causal()), "mask_mod="),
    "tensor where a mask belongs": (lambda: Mask.of(torch.ones(3, 3)), "lambda b, h, q, kv"),
    "tensor where a score belongs": (lambda: Score.of(torch.ones(3, 3)), "bias"),
    "mask not called": (lambda: Mask.of(causal), r"causal\(\.\.\.\)"),
    "mask not called in a join": (lambda: MASK & sliding_window, "sliding_window"),
    "score not called": (lambda: Score.of(softcap), "softcap"),
    "score not called in a join": (lambda: SCORE >> alibi, "alibi"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_composition(name: str) -> None:
    write, offered = WRONG[name]
    with pytest.raises(errors.WrongComposition, match=offered):
        write()


def test_the_line_of_and_is_quoted() -> None:
    with pytest.raises(errors.WrongComposition, match=r"causal\(\) and sliding_window\(4\)"):
        causal() and sliding_window(4)
