"""What models of transformers do with their masks, and what their layers hand to attention beside q, k and v."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as torchs

pytest.importorskip("transformers", reason="transformers is not installed (extra: transformers)")

import transformers as hf
from torch.nn.attention.flex_attention import BlockMask
from transformers import masking_utils

import composattn.integrations.transformers as integration
from composattn import errors
from composattn.integrations.model_masks import ModelMask, mask

Q_LENGTH, KV_LENGTH = 6, 10


def padded() -> torch.Tensor:
    tokens = torch.ones(2, KV_LENGTH, dtype=torch.bool)
    tokens[0, :3] = False
    return tokens


def of_a_window(**options: Any) -> Any:
    """Queries 4 to 9 of 10 positions, each sees its own and 4 before; the first sequence begins at 3."""
    within = masking_utils.sliding_window_causal_mask_function(5)
    return mask(2, Q_LENGTH, KV_LENGTH, 4, 0, within, padded(), **options)


def as_a_tensor() -> torch.Tensor:
    q, kv = torch.arange(4, 4 + Q_LENGTH)[:, None], torch.arange(KV_LENGTH)
    return ((kv <= q) & (q - kv < 5) & padded()[:, None, None, :]).expand(2, 1, Q_LENGTH, KV_LENGTH)


def attended(given: Any, q: torch.Tensor, k: torch.Tensor, **options: Any) -> torch.Tensor:
    return integration.attend(torch.nn.Module(), q, k, k, given, **options)[0].transpose(1, 2)


def test_a_mask_is_no_block_mask_and_its_tensor_is_that_of_sdpa() -> None:
    made = of_a_window()
    assert not isinstance(made, BlockMask)
    assert made.shape == (2, 1, Q_LENGTH, KV_LENGTH) and made.ndim == made.dim() == 4 and len(made) == 2
    assert made.dtype is torch.bool and made.size(-1) == KV_LENGTH and made.to("cpu") is made.contiguous() is made
    assert torch.equal(made.tensor(), as_a_tensor())
    assert torch.equal(made.to(torch.float32), as_a_tensor().float())


CUTS: dict[str, Any] = {
    "the last query": (slice(None), slice(None), slice(-1, None), slice(None)),
    "some of both": (Ellipsis, slice(2, 5), slice(1, 9)),
    "keys": (slice(None), slice(None), slice(None), slice(None, 7)),
    "no head": (slice(None), 0),
    "every second query": (slice(None), slice(None), slice(None, None, 2), slice(None)),
    "picked queries": (slice(None), slice(None), torch.tensor([3, 0]), slice(None)),
    "a sequence": 1,
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_part_of_a_mask_is_that_of_its_tensor(cut: str) -> None:
    part, wanted = of_a_window()[CUTS[cut]], as_a_tensor()[CUTS[cut]]
    stays = cut in ("the last query", "some of both", "keys")
    assert isinstance(part, ModelMask) is stays
    assert torch.equal(part.tensor() if stays else part, wanted)
    if stays:
        q, k = torch.randn(2, 4, wanted.shape[2], 8), torch.randn(2, 2, wanted.shape[3], 8)
        difference = attended(part, q, k) - torchs(q, k, k, attn_mask=wanted, enable_gqa=True)
        assert float(difference[1].abs().max()) <= 1e-6  # of the first, rows see nothing


READS: dict[str, Any] = {
    "chosen by it": lambda m: torch.where(m, 0.0, -9.0),
    "filled": lambda m: torch.zeros(2, 4, Q_LENGTH, KV_LENGTH).masked_fill(m == 0, -9.0),
    "and": lambda m: m & torch.eye(Q_LENGTH, KV_LENGTH, dtype=torch.bool),
    "not": lambda m: ~m,
    "joined": lambda m: torch.cat([m, m], -1),
    "widened": lambda m: torch.nn.functional.pad(m, (0, 3)),
    "a method": lambda m: m.float().sum(),
}


@pytest.mark.parametrize("read", READS)
def test_what_reads_a_mask_as_a_tensor_gets_what_it_gets_with_sdpa(read: str) -> None:
    assert torch.equal(READS[read](of_a_window()), READS[read](as_a_tensor()))


@pytest.mark.parametrize(
    "add", [lambda s, m: s + m, lambda s, m: m + s, lambda s, m: (1 - m) * s], ids=["right", "left", "away"]
)
def test_bools_added_to_scores_are_refused(add: Any) -> None:
    with pytest.raises(errors.UnsupportedOption, match="adds its mask to scores"):
        add(torch.zeros(2, 4, Q_LENGTH, KV_LENGTH), of_a_window())


def write_to_a_part(m: Any) -> None:
    m[:, :, 0] = True


@pytest.mark.parametrize("write", [write_to_a_part, lambda m: m.logical_not_()], ids=["a part", "a method"])
def test_writes_into_a_mask_are_refused(write: Any) -> None:
    with pytest.raises(errors.UnsupportedOption, match="writes into its mask"):
        write(of_a_window())


def test_a_mask_that_is_ready_stays() -> None:
    made = of_a_window()
    assert mask(2, Q_LENGTH, KV_LENGTH, attention_mask=made) is made


def test_a_keyword_of_masks_that_nobody_knows_is_refused() -> None:
    mask(1, 4, 4, allow_is_causal_skip=True, use_vmap=True, local_size=3, something=None)
    with pytest.raises(errors.UnknownKeyword, match="something=3"):
        mask(1, 4, 4, something=3)


def test_where_all_is_visible_there_may_be_no_mask() -> None:
    both_ways = masking_utils.bidirectional_mask_function
    assert mask(1, 4, 4, 0, 0, both_ways, allow_is_bidirectional_skip=True) is None
    assert mask(2, 4, KV_LENGTH, 0, 0, both_ways, padded(), allow_is_bidirectional_skip=True) is not None


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("queries", [12, 1])
@pytest.mark.parametrize("documents", [False, True], ids=["one row", "documents"])
def test_a_layer_with_a_window_and_no_mask_has_its_window(is_causal: bool, queries: int, documents: bool) -> None:
    q, k = torch.randn(1, 2, queries, 8), torch.randn(1, 2, 12, 8)
    ends = {"cu_seq_lens_q": torch.tensor([0, queries]), "cu_seq_lens_k": torch.tensor([0, 12])}
    most = {"max_length_q": queries, "max_length_k": 12}
    packed = {**{name: end.int() for name, end in ends.items()}, **most} if documents else {}
    found = attended(None, q, k, is_causal=is_causal, sliding_window=4, **packed)
    before = (torch.arange(12)[:, None] - torch.arange(12))[-queries:]
    seen = (before.abs() < 4) & (before >= 0) if is_causal else before.abs() < 4
    assert float((found - torchs(q, k, k, attn_mask=seen)).abs().max()) <= 1e-6


# --- keywords -------------------------------------------------------------------------------------------------------


def test_keywords_that_change_nothing_are_taken_and_unknown_ones_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    wanted = torchs(q, q, q, is_causal=True)
    found = attended(None, q, q, use_cache=True, position_ids=torch.arange(4), head_mask=None)
    assert float((found - wanted).abs().max()) <= 1e-6
    with pytest.raises(errors.UnknownKeyword, match="Module hands head_mask= to its attention"):
        attended(None, q, q, head_mask=torch.ones(2))
    with pytest.raises(errors.UnsupportedOption, match="picks single keys"):
        attended(None, q, q, indices=torch.zeros(1, 4, 2, dtype=torch.long))


def eager_with_sinks(q: torch.Tensor, k: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~torch.ones(q.shape[2], k.shape[2]).tril().bool(), -torch.inf)
    beside = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1) if sinks.ndim == 1 else sinks
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1] @ k


@pytest.mark.parametrize("shape", [(2,), (1, 2, 6, 1)], ids=["of heads", "of queries"])
@pytest.mark.parametrize("name", ["sinks", "s_aux"])
def test_sinks_of_heads_and_of_queries_are_those_of_eager_with_their_gradients(
    name: str, shape: tuple[int, ...]
) -> None:
    q, k = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(2))
    sinks = (3 * torch.randn(shape)).requires_grad_()
    loss = torch.randn(1, 2, 6, 8)
    outs = [attended(None, q, k, **{name: sinks}), eager_with_sinks(q, k, sinks)]
    assert float((outs[0] - outs[1]).detach().abs().max()) <= 1e-6
    found, wanted = (torch.autograd.grad((out * loss).sum(), (q, k, sinks)) for out in outs)
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours - theirs).abs().max()) <= 2e-6


def test_sinks_of_queries_in_packed_documents_are_as_of_each_alone() -> None:
    q, sinks, begins = torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 1), torch.tensor([0, 4, 10], dtype=torch.int32)
    packed = attended(mask(1, 10, 10), q, q, sinks=sinks, cu_seq_lens_q=begins, cu_seq_lens_k=begins)
    alone = [eager_with_sinks(t, t, s) for t, s in zip(q.split([4, 6], 2), sinks.split([4, 6], 2), strict=True)]
    assert float((packed - torch.cat(alone, 2)).abs().max()) <= 1e-6


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sinks": torch.zeros(1, 2, 3, 1)}, errors.ShapeMismatch, "a number for each query"),
        ({"sinks": torch.zeros(2), "s_aux": torch.zeros(2)}, errors.UnsupportedOption, "give one of them"),
        ({"block_indices": torch.zeros(1, 2, 4, 1).long()}, errors.UnsupportedOption, "index_block_size"),
        ({"cu_seq_lens_k": torch.tensor([0, 4], dtype=torch.int32)}, errors.UnsupportedOption, "cu_seq_lens_q"),
    ],
)
def test_what_is_said_twice_or_in_part_is_refused(options: Any, error: Any, words: str) -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(error, match=words):
        attended(None, q, q, **options)


@pytest.mark.parametrize(
    ("given", "error"),
    [(torch.ones(1, 4), errors.WrongRank), (torch.ones(1, 1, 4, 4, dtype=torch.int64), errors.DTypeMismatch)],
)
def test_masks_that_are_none_of_pairs_are_refused(given: torch.Tensor, error: Any) -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(error, match="attention_mask"):
        attended(given, q, q)


@pytest.mark.parametrize("size", [4, 16])
def test_each_query_sees_the_blocks_of_keys_that_it_picked(size: int) -> None:
    module = torch.nn.Module()
    module.config = hf.PretrainedConfig(index_block_size=size)
    length, blocks = 37, -(-37 // size)
    q, k = torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8)
    picked = torch.randint(-1, blocks, (2, 2, length, 2))
    picked[..., 0] = torch.arange(length) // size  # its own
    seen = torch.zeros(2, 2, length, blocks + 1, dtype=torch.bool).scatter(-1, picked % (blocks + 1), True)[..., :-1]
    seen = seen.repeat_interleave(size, -1)[..., :length].repeat_interleave(2, 1)
    wanted = torchs(q, k, k, attn_mask=seen & torch.ones(length, length).tril().bool(), enable_gqa=True)
    found, _ = integration.attend(module, q, k, k, mask(2, length, length), block_indices=picked)
    assert float((found.transpose(1, 2) - wanted).abs().max()) <= 1e-6
    with pytest.raises(errors.ShapeMismatch, match="block_indices"):
        integration.attend(module, q, k, k, None, block_indices=picked[:, :, 1:])


def sparse_minimax() -> Any:
    config = hf.MiniMaxM3VLTextConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, index_block_size=8,
        index_topk_blocks=2, index_n_heads=2, index_head_dim=16,
    )  # fmt: skip
    config.layer_types = ["minimax_m3_sparse"] * 2
    return hf.MiniMaxM3VLForCausalLM._from_config(config).eval()


def test_a_model_of_picked_blocks_says_what_it_does_in_eager() -> None:
    integration.register()
    of, tokens, found = sparse_minimax(), torch.randint(3, 99, (2, 40)), []
    with torch.no_grad():
        for layer in of.model.layers:
            layer.self_attn.q_proj.weight.mul_(8)
        for implementation in ("eager", "composattn"):
            of.set_attn_implementation(implementation)
            found.append(of(tokens).logits)
    assert float((found[0] - found[1]).abs().max()) <= 4e-6


def test_a_class_that_never_asks_is_refused_when_it_is_loaded(tmp_path: Any) -> None:
    integration.register("by another name")
    config = hf.MPNetConfig(vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    config.num_attention_heads = 2
    hf.MPNetForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(errors.UnsupportedOption, match="MPNetForMaskedLM computes attention by itself"):
        hf.MPNetForMaskedLM.from_pretrained(tmp_path, attn_implementation="by another name")
    assert hf.MPNetForMaskedLM.from_pretrained(tmp_path, attn_implementation="eager")(
        torch.arange(9)[None]
    ).logits.any()
