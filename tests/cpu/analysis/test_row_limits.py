"""A mask's rows as runs of keys: exactly what the mask says, wherever limits are given and said to hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.analysis.bands import mirrored, row_limits, transposed
from composattn.analysis.derived import refresh
from composattn.analysis.row_limits import RowLimits
from composattn.graph.evaluate import Env, evaluate_all
from composattn.graph.expr import captures
from composattn.mods import causal, document, padding, prefix_lm, sliding_window
from composattn.mods.mask import Mask
from composattn.testing import SMALL, random_case

Q_LEN, KV_LEN, BATCH, HEADS = 37, 41, 2, 3
TOGETHER, APART = torch.tensor([0] * 9 + [3] * 20 + [1] * 12), torch.arange(41) % 5
MASKS: dict[str, Callable[..., Any]] = {
    "causal": causal(),
    "to-the-last-key": causal("bottom_right"),
    "window": causal() & sliding_window(7),
    "window-by-head": sliding_window((torch.tensor([1, 5, 9]), torch.tensor([0, 2, 30]))),
    "prefix": prefix_lm(11),
    "padding": padding(torch.tensor([5, 41])),
    "padding-of-rows": padding(torch.tensor([5, 41]), torch.tensor([30, 2])),
    "documents": document(TOGETHER) & causal(),
    "documents-by-offsets": document(offsets=torch.tensor([0, 9, 9, 29, 41])),
    "chunks": lambda b, h, q, kv: q // 8 == kv // 8,
    "not-causal": ~causal(),
}


def run(limits: RowLimits, q_len: int, kv_len: int, batch: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(visible by the limits, whether they hold), (B, H, Sq, Skv) and (B, H, 1, 1)."""
    refresh(captures(limits.begin, limits.end, limits.holds))
    axes = {"b": torch.arange(batch).view(-1, 1, 1, 1), "h": torch.arange(heads).view(-1, 1, 1)}
    env = Env({**axes, "q": torch.arange(q_len).view(-1, 1), "q_len": q_len, "kv_len": kv_len})
    begin, end, holds = evaluate_all([limits.begin, limits.end, limits.holds], env)
    kv = torch.arange(kv_len)
    return ((begin <= kv) & (kv < end)).expand(batch, heads, q_len, kv_len), holds.expand(batch, heads, 1, 1)


def run_of_columns(limits: RowLimits, *sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`run` for the limits of columns."""
    q_len, kv_len, *entries = sizes
    ends = RowLimits(mirrored(limits.begin), mirrored(limits.end), limits.holds)
    visible, holds = run(ends, kv_len, q_len, *entries)
    return visible.mT, holds


# a key of the prefix is seen by all, others by a run
OF_COLUMNS = MASKS.keys() - {"prefix"}
WAYS = {"rows": (row_limits, run), "columns": (lambda mask: transposed(mask)[1], run_of_columns)}
CASES = [*((name, "rows") for name in MASKS), *((name, "columns") for name in sorted(OF_COLUMNS))]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_limits_are_the_mask(name: str, way: str) -> None:
    limits_of, run = WAYS[way]
    mask = Mask.of(MASKS[name])
    limits = limits_of(mask.expr)
    assert limits is not None
    visible, holds = run(limits, Q_LEN, KV_LEN, BATCH, HEADS)
    assert holds.all()
    assert torch.equal(visible, mask.dense(Q_LEN, KV_LEN, BATCH, HEADS).expand_as(visible))


def test_documents_hold_where_equal_ids_lie_together_and_while_they_do() -> None:
    ids = TOGETHER.clone()
    limits = row_limits(document(ids).expr)
    assert limits is not None
    assert run(limits, 41, 41, 1, 1)[1].all()
    ids.copy_(APART)
    assert not run(limits, 41, 41, 1, 1)[1].any()


def test_documents_by_offsets_hold_for_keys_where_there_are_as_many_queries() -> None:
    offsets = torch.tensor([0, 9, 9, 29, 41])
    for kv_offsets in (offsets, torch.tensor([0, 5, 20, 20, 41]), torch.tensor([0, 9, 30, 31, 39])):
        limits = transposed(document(offsets=offsets, kv_offsets=kv_offsets).expr)[1]
        assert limits is not None and run_of_columns(limits, 41, 50, 1, 1)[1].all()
    # a key has a position that no query has: what is kept of each query's position says too little
    limits = transposed(document(offsets=offsets, kv_offsets=2 * offsets).expr)[1]
    assert limits is not None and not run_of_columns(limits, 41, 82, 1, 1)[1].any()


def test_none_are_given_where_a_row_sees_two_runs_or_tests_an_element() -> None:
    for mask in (
        lambda b, h, q, kv: (kv < 3) | ((q >= kv) & (q - kv < 5)),
        lambda b, h, q, kv: (q + kv) % 2 == 0,
        lambda b, h, q, kv: (q * kv) % 7 < 3,
        lambda b, h, q, kv: q != kv,
    ):
        assert row_limits(Mask.of(mask).expr) is None


@pytest.mark.parametrize("way", WAYS)
def test_random_masks_agree_with_their_limits(way: str) -> None:
    limits_of, run = WAYS[way]
    given = held = 0
    for seed in range(1500):
        case = random_case(seed, SMALL)
        mask = case.program.mask
        limits = None if mask is None else limits_of(mask)
        if mask is None or limits is None:
            continue
        (batch, heads, q_len, _), kv_len = case.q.shape, case.k.shape[2]
        visible, holds = run(limits, q_len, kv_len, batch, heads)
        dense = Mask(mask).dense(q_len, kv_len, batch, heads).expand_as(visible)
        assert torch.equal(visible & holds, dense & holds), f"random_case({seed}): {case}"
        given, held = given + 1, held + int(holds.all())
    assert held > given // 2 > 100


def test_constants_of_a_mask_say_how_many_keys_a_row_sees_wherever_it_stands() -> None:
    begin = torch.tensor(5)
    window = causal() & sliding_window(127)
    for mask, most in {
        window: 128,
        window.shifted(q=begin): 128,  # decoding from a cache
        causal("bottom_right") & sliding_window(127, align="bottom_right"): 128,
        sliding_window((3, 5)): 9,
        window & document(TOGETHER): 128,
        Mask.of(MASKS["chunks"]): 8,
        causal(): None,
        sliding_window(127): None,  # which sees all keys behind the query
        causal() & sliding_window(ca.scalar(127)): None,
        document(TOGETHER): None,
        causal() & (sliding_window(3) | Mask.of(lambda b, h, q, kv: kv < 4)): None,
    }.items():
        limits = row_limits(mask.expr)
        assert (limits and limits.most) == most, mask
