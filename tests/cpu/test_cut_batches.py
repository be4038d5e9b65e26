"""Masks and layouts where others cut a batch or move it: each part is right or refused, and `.to` moves all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.nn.attention.flex_attention import create_block_mask

import composattn as ca
from composattn import errors
from composattn.mods import alibi, causal, document, padding, prefix_lm

B, H, S, PARTS = 8, 2, 32, 4
IDS = torch.randint(0, 4, (B, S), generator=torch.Generator().manual_seed(0)).sort(-1).values
X = torch.randn(B, H, S, 8, generator=torch.Generator().manual_seed(1))
CU = torch.arange(0, 9, 2, dtype=torch.int32)


def same_document(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (IDS[b, q] == IDS[b, kv]) & (q >= kv)


def by_parts(call: Callable[..., torch.Tensor], **given: Any) -> torch.Tensor:
    """Calls a stage like torch's pipelines: with a microbatch, and its slice of the keyword arguments."""
    arguments, named = split_args_kwargs_into_chunks((X,), given, PARTS)
    return torch.cat([call(*a, **n) for a, n in zip(arguments, named, strict=True)])


def attend(x: torch.Tensor, mask: Any) -> torch.Tensor:
    return ca.attention(x, x, x, mask_mod=mask)  # type: ignore[return-value]


WANTED = attend(X, same_document)


def test_tables_and_block_masks_are_cut_by_torch() -> None:
    made_there = by_parts(lambda x, ids: attend(x, causal() & document(ids)), ids=IDS)
    torch.testing.assert_close(made_there, WANTED)
    block_mask = create_block_mask(same_document, B, None, S, S, device="cpu", BLOCK_SIZE=16)
    cut = by_parts(lambda x, mask: ca.flex_attention(x, x, x, block_mask=mask), mask=block_mask)  # type: ignore[arg-type,return-value]
    torch.testing.assert_close(cut, WANTED)


@pytest.mark.parametrize(
    ("error", "mask"),
    [
        (errors.ModShapeMismatch, same_document),
        (errors.ModShapeMismatch, ca.mask(same_document)),
        (errors.ModShapeMismatch, causal() & document(IDS)),
        (errors.ModShapeMismatch, prefix_lm(torch.arange(B))),
        (errors.ModShapeMismatch, ~padding(IDS > 0)),
        (errors.BlockMaskMismatch, ca.BlockSparse(torch.ones(B, 1, 2, 2, dtype=torch.bool), 16) & causal()),
    ],
)
def test_a_mask_of_the_whole_batch_is_refused_by_each_part(error: type[Exception], mask: Any) -> None:
    with pytest.raises(error, match=r"8 entries for 2 batch entries|batch 8, the call has 2"):
        by_parts(attend, mask=mask)


def test_a_mask_of_no_batch_serves_each_part() -> None:
    mask = causal() & document(IDS[0])
    torch.testing.assert_close(by_parts(attend, mask=mask), attend(X, mask))


# --- another device ---------------------------------------------------------------------------------------------------


MADE: dict[str, Callable[[], Any]] = {
    "a mask": lambda: causal() & document(IDS) | (lambda b, h, q, kv: IDS[b, kv] == 0),
    "documents by offsets": lambda: document(offsets=torch.tensor([0, 5, S])),
    "a score mod": lambda: alibi(torch.rand(H).requires_grad_()),
    "blocks": lambda: ca.BlockSparse(torch.ones(1, 1, 2, 2, dtype=torch.int8), 16, partial=document(IDS)),
    "lists of blocks": lambda: ca.BlockSparse.topk(torch.zeros(1, 1, 2, 1, dtype=torch.int32), 16, S, S),
}


@pytest.mark.parametrize("name", MADE)
def test_a_mod_moves_with_all_that_it_reads(name: str) -> None:
    mod = MADE[name]()
    moved = mod.to("meta", non_blocking=True)
    assert type(moved) is type(mod) and (moved.form, moved.name) == (mod.form, mod.name)
    assert {leaf.device.type for leaf in moved.leaves} == {"meta"}
    assert len({*map(id, moved.leaves)}) == len({*map(id, mod.leaves)}), "one tensor stays one"
    assert mod.to("cpu") is mod and mod.to(torch.device("cpu")) is mod


def test_documents_by_offsets_that_moved_are_still_looked_at() -> None:
    offsets = torch.tensor([0, 5, S])
    moved = document(offsets=offsets).to("meta")
    offsets[1] = 7
    with pytest.raises(errors.CapturedTensorChanged):
        moved.expr  # noqa: B018


def test_layouts_move() -> None:
    varlen = ca.Varlen(CU, seqused_q=CU[1:], max_seqlen_q=3)
    there = varlen.to("meta")
    assert (there.cu_seqlens_q.device.type, there.seqused_q.device.type, there.max_seqlen_q) == ("meta", "meta", 3)
    assert there.cu_seqlens_k is None
    paged = ca.Paged(torch.zeros(2, 3, dtype=torch.int32), 16, CU[:2]).to("meta")
    assert (paged.page_table.device.type, paged.seqused.device.type, paged.page_size) == ("meta", "meta", 16)


@pytest.mark.parametrize("made", [causal(), document(IDS), ca.Varlen(CU)])
def test_what_names_no_device_is_refused(made: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="takes a device"):
        made.to(torch.bfloat16)


def test_a_mask_moves_inside_of_a_compiled_region() -> None:
    torch._dynamo.reset()
    blocks = ca.BlockSparse(torch.ones(1, 1, 2, 2, dtype=torch.bool), 16)
    compiled = torch.compile(
        lambda x, ids: attend(x, (document(ids) & blocks.to(x.device)).to(x.device) & causal()),
        fullgraph=True, backend="eager",
    )  # fmt: skip
    torch.testing.assert_close(compiled(X, IDS), WANTED)
