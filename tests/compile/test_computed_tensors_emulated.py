"""Tensors whose class computes what a read of them gives: kernels read memory, where such a tensor has none of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

import composattn as ca
from composattn.errors import UnsupportedCapture, UnsupportedLayout
from composattn.mods import document

H, S, D = 2, 24, 16
EMULATED = ["hopper-emulated", "warp-emulated", "blackwell-emulated"]
BACKENDS = ["streaming", *(pytest.param(name, marks=pytest.mark.slow) for name in EMULATED)]


class InBytes(torch.Tensor):
    """Numbers of 16 bits, kept as whole ones of 8 bits times 1/32, as weights that are quantised are."""

    kept: torch.Tensor

    @staticmethod
    def __new__(cls, kept: torch.Tensor) -> InBytes:
        made: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return made(cls, kept.shape, dtype=torch.bfloat16, device=kept.device)  # type: ignore[no-any-return]

    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = kept

    @property
    def wide(self) -> torch.Tensor:
        return self.kept.bfloat16() / 32

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def read(x: Any) -> Any:
            return x.wide if isinstance(x, InBytes) else x

        return func(*tree_map(read, args), **tree_map(read, kwargs or {}))


class Halved(torch.Tensor):
    """Half of what its memory holds, wherever an element is read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found / 2 if func is torch.Tensor.__getitem__ else found


def halved(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(Halved)


def waited_for(x: torch.Tensor) -> torch.Tensor:
    """What a collective gives that still runs."""
    found: torch.Tensor = AsyncCollectiveTensor(x)
    return found


def drawn() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(1, H, S, D, generator=generator).bfloat16() for _ in range(4)]


def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, backend: str) -> list[torch.Tensor]:
    learns = q.requires_grad_()
    for _ in range(3):  # the third call goes the short way of the first two
        out = ca.attention(learns, k, v, backend=backend)
        found = [out.detach(), *torch.autograd.grad(out, learns, dout)]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", ["k", "v", "dout"])
def test_inputs_and_gradients_are_what_a_collective_gives(which: str, backend: str) -> None:
    given = drawn()
    wanted = results(*given, backend=backend)
    place = ["q", "k", "v", "dout"].index(which)
    given[place] = waited_for(given[place])
    for x, y in zip(results(*given, backend=backend), wanted, strict=True):
        assert type(x) is torch.Tensor and torch.equal(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_in_a_class_of_their_own_are_read_as_it_says(backend: str) -> None:
    q, _, v, dout = drawn()
    k = InBytes(torch.randint(-99, 99, (1, H, S, D), dtype=torch.int8))
    for x, y in zip(results(q, k, v, dout, backend), results(q, k.wide, v, dout, backend), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", ["streaming", *EMULATED])
def test_captured_ones_are_refused_by_kernels_and_read_by_others(backend: str) -> None:
    q, k, v, _ = drawn()
    bias = InBytes(torch.randint(-99, 99, (H, S), dtype=torch.int8))

    def call(table: torch.Tensor, **sinks: torch.Tensor) -> torch.Tensor:
        return ca.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, j], backend=backend, **sinks)

    if backend == "streaming":
        assert torch.equal(call(bias), call(bias.wide))
        return
    for _ in range(2):
        with pytest.raises(UnsupportedCapture, match="InBytes"):
            call(bias)
    with pytest.raises(UnsupportedCapture, match="InBytes"):
        call(bias.wide, sinks=InBytes(torch.ones(H, dtype=torch.int8)))


@pytest.mark.slow
@pytest.mark.parametrize("made", [InBytes, waited_for, halved])
def test_one_that_takes_the_place_of_a_plain_one_is_refused_too(made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    q, k, v, _ = drawn()
    table = torch.ones(H, S, dtype=torch.bfloat16)

    def by_key(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, kv_idx]

    for _ in range(3):
        ca.attention(q, k, v, score_mod=by_key, backend="hopper-emulated")
    table = made(torch.ones(H, S, dtype=torch.int8 if made is InBytes else torch.bfloat16))
    with pytest.raises(UnsupportedCapture, match=type(table).__name__):
        ca.attention(q, k, v, score_mod=by_key, backend="hopper-emulated")


@pytest.mark.parametrize("backend", ["hopper-emulated", *BACKENDS[:1], *BACKENDS[2:]])
def test_what_a_class_says_of_reads_is_heard_or_refused(backend: str) -> None:
    q, k, v, _ = drawn()
    table = torch.randn(H, S, generator=torch.Generator().manual_seed(1))

    def call(bias: torch.Tensor) -> torch.Tensor:
        return ca.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h, j], backend=backend)

    if backend == "streaming":
        torch.testing.assert_close(call(halved(table)), call(table / 2))
        return
    with pytest.raises(UnsupportedCapture, match="__torch_function__ of Halved"):
        call(halved(table))
    call(halved(table).as_subclass(torch.Tensor))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedCapture, match="__torch_function__ of Halved"):
        call(halved(table))


def test_a_mask_that_was_made_of_a_plain_one_is_not_taken_for_one_of_these() -> None:
    q, k, v, _ = drawn()
    ids = torch.arange(S) // 10
    ca.attention(q, k, v, mask_mod=document(ids), backend="hopper-emulated")
    with pytest.raises(UnsupportedCapture, match="AsyncCollectiveTensor"):
        ca.attention(q, k, v, mask_mod=document(waited_for(ids)), backend="hopper-emulated")


def test_where_a_copy_is_of_the_class_too_kernels_refuse_it() -> None:
    q, k, v, _ = drawn()
    with pytest.raises(UnsupportedLayout, match="TwoTensor"):
        ca.attention(TwoTensor(q, q), k, v, backend="hopper-emulated")


def test_lengths_are_plain() -> None:
    lengths = torch.tensor([0, 9, S], dtype=torch.int32)
    with pytest.raises(UnsupportedLayout, match="AsyncCollectiveTensor"):
        ca.Varlen(waited_for(lengths))
