"""Ready mods that are remembered by their arguments are what they would be if they were made anew."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import mods
from composattn.errors import InvalidModArgument
from composattn.mods import ready

LENGTH, HEADS = 12, 2
IDS, OTHERS = torch.arange(LENGTH) // 5, torch.arange(LENGTH) // 3
TABLE = torch.linspace(-1, 1, HEADS * 9).view(HEADS, 9)
ONE_TABLE = torch.zeros(1, HEADS, 1, LENGTH)

MADE: dict[str, Callable[[], Any]] = {
    "alibi": lambda: mods.alibi(TABLE[:, 0]),
    "alibi, symmetric": lambda: mods.alibi(TABLE[:, 0], symmetric=True),
    "alibi, of heads": lambda: mods.alibi(6),
    "softcap": lambda: mods.softcap(30.0),
    "softcap, an int": lambda: mods.softcap(30),
    "softcap, a tensor": lambda: mods.softcap(torch.tensor(30.0)),
    "softcap, a scalar": lambda: mods.softcap(CAP),
    "temperature": lambda: mods.temperature(0.5),
    "relative bias": lambda: mods.relative_bias(TABLE),
    "relative bias, one direction": lambda: mods.relative_bias(TABLE, False),
    "relative bias, shared": lambda: mods.relative_bias(TABLE[0]),
    "T5": lambda: mods.t5_bucket_bias(torch.zeros(8, HEADS), max_distance=20),
    "bias": lambda: mods.bias(torch.zeros(1, HEADS, LENGTH, LENGTH)),
    "bias, shared rows": lambda: mods.bias(ONE_TABLE),
    "scale by head": lambda: mods.scale_by_head(TABLE[:, 0]),
    "window": lambda: mods.sliding_window(4),
    "window, both sides": lambda: mods.sliding_window((4, 1)),
    "window, one side": lambda: mods.sliding_window((None, 1)),
    "window, aligned": lambda: mods.sliding_window((4, 1), align="bottom_right"),
    "window, by head": lambda: mods.sliding_window((torch.tensor([3, 4]), 0)),
    "window, of scalars": lambda: mods.sliding_window((WIDTH, CAP_OF_INTS)),
    "prefix": lambda: mods.prefix_lm(3),
    "prefixes": lambda: mods.prefix_lm(torch.tensor([3, 4])),
    "documents": lambda: mods.document(IDS),
    "documents, the same twice": lambda: mods.document(IDS, IDS),
    "documents, of keys too": lambda: mods.document(IDS, OTHERS),
    "documents, by batch": lambda: mods.document(IDS.expand(2, -1), kv_ids=OTHERS),
    "documents by offsets": lambda: mods.document(offsets=torch.tensor([0, 5, LENGTH])),
    "blocks": lambda: mods.block_diagonal(4, 3),
    "chunks": lambda: mods.chunked(4, None),
    "dilated": lambda: mods.dilated_window((4, 4), 2),
    "global": lambda: mods.global_tokens(3, sides="keys"),
    "global, marked": lambda: mods.global_tokens(IDS > 1),
    "global, by place": lambda: mods.global_tokens(torch.tensor([3, 7])),
    "padding": lambda: mods.padding(torch.tensor([7, 9])),
    "padding, marked": lambda: mods.padding((IDS > 0).expand(2, -1), torch.tensor([7, 9])),
    "neighborhood": lambda: mods.neighborhood((3, 4), 3, is_causal=(True, False)),
}
CAP, WIDTH, CAP_OF_INTS = ca.scalar(30.0), ca.scalar(3), ca.scalar(1)


def said(mod: Any) -> Any:
    return type(mod), mod.form, mod.name, [(type(leaf), getattr(leaf, "shape", leaf)) for leaf in mod.leaves]


@pytest.mark.parametrize("name", MADE)
def test_a_remembered_mod_is_what_it_is_made_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in MADE.values():  # all of them are there to be taken for it
        other()
    remembered = MADE[name]()
    monkeypatch.setattr(ready, "_known", {})
    assert said(MADE[name]()) == said(remembered)


def test_leaves_are_the_tensors_that_were_given_now() -> None:
    for ids in (torch.zeros(LENGTH, dtype=torch.int64) for _ in range(3)):
        (leaf,) = mods.document(ids).leaves
        assert leaf is ids
        first, second = mods.document(ids, kv_ids=OTHERS).leaves
        assert first is ids and second is OTHERS
    for cap in (ca.scalar(2.0), ca.scalar(3.0)):
        assert mods.softcap(cap).leaves == (cap,)


def test_a_mod_without_tensors_is_made_once() -> None:
    assert mods.softcap(30.0) is mods.softcap(30.0) is not mods.softcap(31.0)


def test_numbers_that_are_equal_but_not_the_same_are_told_apart() -> None:
    assert mods.temperature(1).form != mods.temperature(1.5).form
    assert mods.sliding_window(1).form == mods.sliding_window(1).form
    for make in (mods.sliding_window, mods.temperature, mods.prefix_lm, mods.chunked):
        make(1)
        with pytest.raises(InvalidModArgument):
            make(True)
    mods.chunked(1, 0)
    with pytest.raises(InvalidModArgument):
        mods.chunked(1, False)
    with pytest.raises(InvalidModArgument):
        mods.chunked(1, 0.0)


def test_a_tensor_that_is_another_one_now_is_checked_again() -> None:
    slopes = torch.rand(HEADS)
    mods.alibi(slopes)
    for data in (torch.rand(2, HEADS, 3), torch.zeros(HEADS, dtype=torch.int64), torch.zeros(0)):
        other = torch.rand(HEADS)
        other.data = data
        with pytest.raises(InvalidModArgument):
            mods.alibi(other)


def test_what_a_mod_makes_of_contents_is_made_anew() -> None:
    offsets = torch.tensor([0, 5, LENGTH])
    at = torch.arange(LENGTH)
    for end in (5, 8, 2):
        offsets[1] = end
        ids = (at >= end).int()
        torch.testing.assert_close(
            mods.document(offsets=offsets).dense(LENGTH, LENGTH), mods.document(ids).dense(LENGTH, LENGTH)
        )
    places = torch.tensor([1, 2])
    for place in (3, 9):
        places[0] = place
        assert mods.global_tokens(places, "keys").dense(1, LENGTH)[0, 0, 0].nonzero().flatten().tolist() == sorted(
            places.tolist()
        )


@pytest.mark.parametrize("table", [TABLE, TABLE.clone().requires_grad_(), TABLE.T.contiguous().T])
def test_gradients_and_strides_of_tensors_change_no_form(table: torch.Tensor) -> None:
    for make, given in ((mods.relative_bias, table), (mods.alibi, table[:, 0]), (mods.bias, table.double())):
        anew: Any = make.__wrapped__  # type: ignore[attr-defined]
        assert make(given).form == anew(given).form


def test_odd_arguments_are_refused_as_ever() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    for bad in (nested, None, [1.0], "2", {}, torch.nn.UninitializedParameter(), float("nan"), -0.0):
        for _ in range(2):
            with pytest.raises((InvalidModArgument, RuntimeError)):
                mods.alibi(bad)  # type: ignore[arg-type]
            with pytest.raises((InvalidModArgument, RuntimeError)):
                mods.softcap(bad)  # type: ignore[arg-type]


def test_nothing_that_is_remembered_keeps_a_tensor_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "_known", {})
    monkeypatch.setattr(ready, "_KNOWN_LIMIT", 20)
    for size in range(1, 100):
        table = torch.zeros(HEADS, 2 * size + 1)
        mods.relative_bias(table)
        assert len(ready._known) <= 20
    alive = weakref.ref(table.untyped_storage())
    del table
    gc.collect()
    assert alive() is None


def test_the_name_of_a_run_time_number_is_not_what_it_says_now() -> None:
    cap = ca.scalar(2.0)
    before = mods.softcap(cap)
    cap.value = 3.0
    assert repr(mods.softcap(cap)) == repr(before) == "softcap(ca.scalar)"
