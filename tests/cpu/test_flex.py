"""The drop-in agrees with torch's flex_attention, block lists included; only the import differs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

import composattn as ca
from benchmarks.host_work import without_kernels
from composattn import errors, flex
from composattn.parallel import context

Mod = Callable[..., Any]
LENGTH = 70


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv < 9) & (kv - q <= 3)


def head_window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv).abs() < 4 + 3 * h + b


def inputs(generator: torch.Generator, heads: int = 4, kv_heads: int = 4, kv_batch: int = 2) -> list[torch.Tensor]:
    def draw(batch: int, h: int, dim: int) -> torch.Tensor:
        return torch.randn(batch, h, LENGTH, dim, generator=generator, dtype=torch.float64)

    return [draw(2, heads, 16), draw(kv_batch, kv_heads, 16), draw(kv_batch, kv_heads, 24)]


def theirs(*args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the uncompiled call is slow
        return torchs.flex_attention(*args, **options)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    # fp32 statistics in torch's, fp64 here
    torch.testing.assert_close(a.double(), b.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mask", [None, causal, window, head_window], ids=["none", "causal", "window", "head-window"])
@pytest.mark.parametrize("scored", [False, True], ids=["plain", "relative-bias"])
def test_same_as_torch(generator: torch.Generator, mask: Mod | None, scored: bool) -> None:
    q, k, v = inputs(generator)
    table = torch.randn(4, 2 * LENGTH, generator=generator, dtype=torch.float64)

    def bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, q_idx - kv_idx + LENGTH]

    score = bias if scored else None
    made = mask and torchs.create_block_mask(mask, 2, 4, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32)
    out, lse = ca.flex_attention(q, k, v, score, made, return_lse=True)
    want, want_lse = theirs(q, k, v, score, made, return_lse=True)
    close(out, want)
    close(lse, want_lse)


def test_shared_heads_need_enable_gqa_and_then_agree(generator: torch.Generator) -> None:
    q, k, v = inputs(generator, heads=6, kv_heads=2)
    with pytest.raises(errors.GroupMismatch):
        ca.flex_attention(q, k, v)
    close(ca.flex_attention(q, k, v, enable_gqa=True), theirs(q, k, v, enable_gqa=True))


def test_keys_of_one_batch_serve_all_batches(generator: torch.Generator) -> None:
    q, k, v = inputs(generator, kv_batch=1)
    close(ca.flex_attention(q, k, v), theirs(q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)))


def test_scale_is_taken(generator: torch.Generator) -> None:
    q, k, v = inputs(generator)
    close(ca.flex_attention(q, k, v, scale=0.7), theirs(q, k, v, scale=0.7))


def test_what_tunes_the_kernels_of_torch_is_taken_without_a_word(generator: torch.Generator) -> None:
    q, k, v = inputs(generator)
    options = {"BLOCK_M": 64, "fwd_num_stages": 2, "bwd_BLOCK_N1": 32, "PRESCALE_QK": True, "BACKEND": "TRITON"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ca.flex_attention(q, k, v, kernel_options=options)
    assert torch.equal(found, ca.flex_attention(q, k, v))


def test_kernel_options_that_torch_has_not_are_named(generator: torch.Generator) -> None:
    q, k, v = inputs(generator)
    with pytest.warns(UserWarning, match=r"\['BLOCKM'\], which torch has not"):
        ca.flex_attention(q, k, v, kernel_options={"BLOCKM": 64, "BLOCK_N": 64})


def test_block_lists_that_differ_from_the_mask_are_honoured(generator: torch.Generator) -> None:
    """Unordered lists, with unlisted blocks that the mask would show and full blocks that it would not."""
    q, k, v = inputs(generator)
    partial = torch.tensor([[1, 0, 2], [2, 0, 1], [0, 1, 2]], dtype=torch.int32)
    full = torch.tensor([[2, 0, 1], [1, 0, 2], [1, 2, 0]], dtype=torch.int32)
    counts, full_counts = torch.tensor([2, 1, 1], dtype=torch.int32), torch.tensor([1, 1, 0], dtype=torch.int32)
    made = torchs.BlockMask.from_kv_blocks(
        counts[None, None], partial[None, None], full_counts[None, None], full[None, None],
        BLOCK_SIZE=32, mask_mod=causal, seq_lengths=(LENGTH, LENGTH),
    )  # fmt: skip

    def means(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kinds = torch.zeros(3, 3, dtype=torch.int64)
        for row in range(3):
            kinds[row, partial[row, : counts[row]].long()] = 1
            kinds[row, full[row, : full_counts[row]].long()] = 2
        kind = kinds[q_idx // 32, kv_idx // 32]
        return (kind == 2) | ((kind == 1) & (q_idx >= kv_idx))

    positions = torch.arange(LENGTH)
    dense = means(0, 0, positions[:, None], positions[None])
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    close(ca.flex_attention(q, k, v, block_mask=made), torch.nan_to_num(want))


def test_a_block_mask_that_says_what_its_mask_says_leaves_the_mask_alone() -> None:
    from composattn.flex import mask_of

    q = torch.empty(1, 1, LENGTH, 8)
    made = torchs.create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32)
    assert mask_of(made, q, q).expr is ca.mask(causal).expr


def scattered(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q * 7 + kv * kv) % 11 < 4


KINDS = {
    "as the mask says": lambda kinds, at: kinds,
    "one hidden": lambda kinds, at: kinds.index_put((at,), torch.tensor(0, dtype=torch.int8)),
    "one tested": lambda kinds, at: kinds.index_put((at,), torch.tensor(1, dtype=torch.int8)),
    "one whole": lambda kinds, at: kinds.index_put((at,), torch.tensor(2, dtype=torch.int8)),
}


@pytest.mark.parametrize("mask", [causal, window, head_window, scattered])
@pytest.mark.parametrize("change", KINDS)
def test_lists_add_nothing_where_each_pair_says_so(mask: Mod, change: str, generator: torch.Generator) -> None:
    """Bounds of a mask over blocks and the pairs of open ones say what all pairs say."""
    heads, block = (3 if mask is head_window else 1), 16
    pairs = torchs.create_mask(mask, 2 if mask is head_window else None, heads, LENGTH, LENGTH, device="cpu")
    rows = -(-LENGTH // block)
    padded = [torch.nn.functional.pad(t, (0, rows * block - LENGTH) * 2, value=v) for t, v in ((pairs, 0), (pairs, 1))]
    some, every = (t.unflatten(3, (rows, block)).unflatten(2, (rows, block)) for t in padded)
    true = some.any(-1).any(3).to(torch.int8) + every.all(-1).all(3).to(torch.int8)
    for _ in range(6):
        at = torch.randint(0, true.numel(), (1,), generator=generator)
        kinds = KINDS[change](true.flatten(), at).view(true.shape)
        whole = kinds.repeat_interleave(block, 2).repeat_interleave(block, 3)[..., :LENGTH, :LENGTH]
        listed = torch.where(whole == 2, True, (whole == 1) & pairs)
        partial, full = (torchs._dense_to_ordered(kinds == kind) for kind in (1, 2))
        blocks = torchs.BlockMask.from_kv_blocks(
            *partial, *full, BLOCK_SIZE=block, mask_mod=mask, seq_lengths=(LENGTH, LENGTH)
        )
        inner, found = flex._build(blocks)
        assert (found is inner) == torch.equal(listed, pairs)


def test_block_mask_of_other_lengths_is_refused(generator: torch.Generator) -> None:
    q, k, v = inputs(generator)
    made = torchs.create_block_mask(causal, None, None, 64, 64, device="cpu")
    with pytest.raises(errors.BlockMaskMismatch, match="64"):
        ca.flex_attention(q, k, v, block_mask=made)


def test_a_mask_mod_that_a_block_mask_was_given_since_is_seen(generator: torch.Generator) -> None:
    x = inputs(generator)
    blocks = torchs.create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=128)
    ca.flex_attention(*x, block_mask=blocks)
    blocks.mask_mod = window
    close(ca.flex_attention(*x, block_mask=blocks), theirs(*x, block_mask=blocks))


def test_a_block_mask_is_looked_at_again_where_the_call_or_its_lists_are_others(generator: torch.Generator) -> None:
    x = inputs(generator)
    blocks = torchs.create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=128)
    for _ in range(2):
        close(ca.flex_attention(*x, block_mask=blocks), theirs(*x, block_mask=blocks))
    with pytest.raises(errors.BlockMaskMismatch, match=f"{LENGTH}"):
        ca.flex_attention(*(t[:, :, 1:] for t in x), block_mask=blocks)
    blocks.seq_lengths = (LENGTH, LENGTH + 1)
    with pytest.raises(errors.BlockMaskMismatch, match=f"{LENGTH + 1}"):
        ca.flex_attention(*x, block_mask=blocks)
    blocks.seq_lengths = (LENGTH, LENGTH)
    blocks.kv_num_blocks = torch.zeros_like(blocks.kv_num_blocks)
    blocks.full_kv_num_blocks = torch.zeros_like(blocks.full_kv_num_blocks)
    assert not ca.flex_attention(*x, block_mask=blocks).any()


IDS, WIDTH = torch.arange(LENGTH) // 40, 20


def by_ids(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return IDS[q] == IDS[kv]


def by_width(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < WIDTH)


WRITES: dict[str, tuple[Mod, Callable[[Any, pytest.MonkeyPatch], Any]]] = {
    "counts of full blocks": (causal, lambda made, patch: made.full_kv_num_blocks.zero_()),
    "numbers of blocks": (causal, lambda made, patch: made.kv_indices.zero_()),
    "other numbers of blocks": (
        causal,
        lambda made, patch: setattr(made, "kv_indices", torch.zeros_like(made.kv_indices)),
    ),
    "no full blocks": (causal, lambda made, patch: setattr(made, "full_kv_num_blocks", made.kv_num_blocks * 0)),
    "what the mask_mod reads": (by_ids, lambda made, patch: IDS.copy_(torch.arange(LENGTH) // 23)),
    "the memory of what it reads": (by_ids, lambda made, patch: setattr(IDS, "data", torch.arange(LENGTH) // 23)),
    "another tensor for it": (by_ids, lambda made, patch: patch.setitem(globals(), "IDS", torch.arange(LENGTH) // 23)),
    "a global number": (by_width, lambda made, patch: patch.setitem(globals(), "WIDTH", 5)),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_to_a_block_mask_or_what_it_reads_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    mod, write = WRITES[name]
    x, before = inputs(generator), IDS.clone()
    made = torchs.create_block_mask(mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    first = ca.flex_attention(*x, block_mask=made)
    try:
        write(made, monkeypatch)
        want = ca.attention(*x, mask_mod=ca.BlockSparse.from_block_mask(made))
        assert not torch.allclose(first, want)
        for _ in range(2):
            close(ca.flex_attention(*x, block_mask=made), want)
    finally:
        IDS.data = before


def test_what_is_known_of_a_block_mask_ends_with_it(generator: torch.Generator) -> None:
    x, known = inputs(generator), len(flex._known)
    for _ in range(3):  # one may come where another one was
        blocks = torchs.create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=128)
        ca.flex_attention(*x, block_mask=blocks)
        assert len(flex._known) == known + 1
    del blocks
    assert len(flex._known) == known


@pytest.mark.parametrize("given", [5, "causal", [1], torch.ones(2, 2, dtype=torch.bool), causal])
def test_what_is_no_block_mask_is_refused_by_name(given: Any, generator: torch.Generator) -> None:
    with pytest.raises(errors.BlockMaskMismatch):
        ca.flex_attention(*inputs(generator), block_mask=given)


# --- calls that repeat ---------------------------------------------------------------------------------------------


class Repeated:
    """Calls with one BlockMask whose kernels don't run, until `attention` says no: the fast path never asks it."""

    def __init__(self, mod: Mod, kv_heads: int = 2, **options: Any) -> None:
        shape, shared = (1, 2, LENGTH, 16), (1, kv_heads, LENGTH, 16)
        self.inputs = [torch.zeros(s, dtype=torch.bfloat16) for s in (shape, shared, shared)]
        self.blocks = torchs.create_block_mask(mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
        for _ in range(3):
            self(**options)

    def __call__(self, of: Callable[[torch.Tensor], torch.Tensor] = lambda x: x, **options: Any) -> Any:
        return ca.flex_attention(*map(of, self.inputs), block_mask=self.blocks, **options)


class Asked(Exception):
    """All of a call is looked at."""


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Kernels don't run; from when it is called on, who takes the long way is refused."""

    def refuse(*_: Any, **__: Any) -> None:
        raise Asked

    with without_kernels(lambda plan: lambda *arguments: None):
        yield lambda: monkeypatch.setattr(flex, "attention", refuse)


@pytest.mark.parametrize("name", WRITES)
def test_a_call_that_repeats_takes_the_short_way_until_something_is_written(
    name: str, monkeypatch: pytest.MonkeyPatch, refused: Callable[[], None]
) -> None:
    mod, write = WRITES[name]
    before, call = IDS.clone(), Repeated(mod)
    refused()
    assert call().shape == call.inputs[0].shape
    try:
        write(call.blocks, monkeypatch)
        with pytest.raises(Asked):
            call()
    finally:
        IDS.data = before


LONG_WAYS: dict[str, Callable[[Repeated], Any]] = {
    "other shapes": lambda call: call(lambda x: x.expand(3, -1, -1, -1)),
    "another dtype": lambda call: call(torch.Tensor.half),
    "LSE": lambda call: call(return_lse=True),
    "another scale": lambda call: call(scale=2.0),
    "a score mod": lambda call: call(score_mod=lambda score, b, h, q, kv: score * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG_WAYS)
def test_a_call_that_differs_is_looked_at_anew(name: str, refused: Callable[[], None]) -> None:
    call = Repeated(causal)
    refused()
    call()
    with pytest.raises(Asked):
        LONG_WAYS[name](call)


def test_what_a_repeated_call_was_checked_for_is_checked_again_where_it_is_another(refused: Callable[[], None]) -> None:
    call = Repeated(causal, kv_heads=1, enable_gqa=True)
    refused()
    call(enable_gqa=True)
    with pytest.raises(errors.GroupMismatch):
        call()
    call.blocks.seq_lengths = (LENGTH, LENGTH + 1)
    with pytest.raises(errors.BlockMaskMismatch):
        call(enable_gqa=True)


def test_a_repeated_call_below_autocast_or_a_hook_of_saved_tensors_is_what_it_is_elsewhere() -> None:
    packed: list[torch.Tensor] = []
    with without_kernels(lambda plan: lambda *arguments: None):
        call = Repeated(causal)
        call.inputs = [x.requires_grad_() for x in call.inputs]
        for _ in range(3):
            call()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
            call()
        assert packed
        call.inputs = [x.detach().float() for x in call.inputs]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert [call().dtype for _ in range(3)] == [torch.bfloat16] * 3


def test_a_rank_that_shares_a_sequence_never_takes_the_short_way(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[[], None]
) -> None:
    call = Repeated(causal)
    refused()
    call()
    monkeypatch.setattr(context, "entered", [SimpleNamespace(shard=object())])
    with pytest.raises(Asked):
        call()


def test_a_process_that_shared_sequences_before_takes_the_short_way_again(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[[], None]
) -> None:
    call = Repeated(causal)
    monkeypatch.setattr(context, "left", [64])
    refused()
    assert call().shape == call.inputs[0].shape
