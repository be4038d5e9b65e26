"""Every mask and score mod that attn-gym ships traces and agrees with eager; what can't is listed with the reason.

Also the forms that transformers and torchtitan build their masks from, written out as plain functions.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F

from composattn import errors
from composattn.mods.mask import Mask
from composattn.mods.score import Score

pytest.importorskip("attn_gym", reason="attn-gym is part of the test extra")

import attn_gym.masks as gym_masks
import attn_gym.masks.vsa as gym_vsa
import attn_gym.mods as gym_mods
from attn_gym.masks.batchify import batchify_mask_mod
from attn_gym.masks.document_mask import length_to_offsets

Draw = Callable[[int, int], int]  # a random integer, both ends included
Case = tuple[Callable[..., Any], int, int]  # mod, q_len, kv_len

B, H = 2, 3


def vary(draw: Draw) -> Any:
    return torch.Generator().manual_seed(draw(0, 2**31 - 1))


def offsets(draw: Draw) -> tuple[torch.Tensor, int, int]:
    """Document offsets, total length, number of documents."""
    parts = [draw(1, 9) for _ in range(draw(1, 5))]
    return length_to_offsets(parts, "cpu"), sum(parts), len(parts)


def free(mod: Callable[..., Any], draw: Draw) -> Case:
    return mod, draw(1, 40), draw(1, 40)


def document(draw: Draw) -> Case:
    ends, n, _ = offsets(draw)
    return gym_masks.generate_doc_mask_mod(gym_masks.causal_mask, ends), n, n


def packed_document(draw: Draw) -> Case:
    ends, n, _ = offsets(draw)
    return gym_masks.generate_packed_causal_doc_mask_mod(ends), n, n


def shared_prefix(draw: Draw) -> Case:
    ends, n, documents = offsets(draw)
    prefix = torch.tensor([draw(0, documents - 1) for _ in range(documents)], dtype=torch.int32)
    return gym_masks.generate_shared_prefix_mask_mod(ends, prefix), n, n


def global_window(draw: Draw) -> Case:
    n = draw(1, 30)
    marks = torch.rand(n, generator=vary(draw)) < 0.2
    return gym_masks.generate_global_sliding_window(draw(0, 6), marks), n, n


def flamingo(draw: Draw) -> Case:
    images, tokens = draw(1, 4), draw(1, 5)
    intervals = torch.randint(0, 20, (images, 2), generator=vary(draw))
    return gym_masks.generate_vision_cross_attention_mask_mod(intervals, tokens), draw(1, 25), images * tokens


def block_diffusion(draw: Draw) -> Case:
    n = draw(1, 20)
    return gym_masks.generate_block_diffusion_mask(n, draw(1, 6)), 2 * n, 2 * n


def tree(draw: Draw) -> Case:
    parents = [-1] + [draw(0, i) for i in range(draw(0, 8))]
    prefix = draw(0, 7)
    ancestors = gym_masks.build_tree_ancestor_matrix(parents, device="cpu")
    return gym_masks.generate_jetspec_tree_causal_mask_mod(prefix, ancestors), len(parents), prefix + len(parents)


def tree_training(draw: Draw) -> Case:
    prefix, block, blocks = draw(0, 7), draw(1, 5), draw(1, 4)
    n = block * blocks
    return gym_masks.generate_jetspec_training_mask_mod(prefix, block), n, prefix + n


def natten(draw: Draw) -> Case:
    n = draw(3, 7)
    return gym_masks.generate_natten(n, n, draw(1, n), draw(1, n)), n * n, n * n


def tiled_natten(draw: Draw) -> Case:
    w, h, tw, th = draw(1, 3), draw(1, 3), draw(1, 3), draw(1, 3)
    mod = gym_masks.generate_tiled_natten(w * tw, h * th, draw(1, w * tw), draw(1, h * th), tw, th)
    return mod, w * tw * h * th, w * tw * h * th


def morton_natten(draw: Draw) -> Case:
    n = 2 ** draw(1, 3)
    return gym_masks.generate_morton_natten(n, n, draw(1, n), draw(1, n)), n * n, n * n


def sta_2d(draw: Draw) -> Case:
    tile, tiles, text = (draw(1, 3), draw(1, 3)), (draw(1, 3), draw(1, 3)), draw(0, 5)
    canvas = tuple(t * n for t, n in zip(tile, tiles, strict=True))
    kernel = tuple(t * draw(1, n) for t, n in zip(tile, tiles, strict=True))
    n = canvas[0] * canvas[1] + text
    return gym_masks.generate_sta_mask_mod_2d(canvas, kernel, tile, text), n, n


def sta_3d(draw: Draw) -> Case:
    tile, tiles, text = [draw(1, 2) for _ in "thw"], [draw(1, 3) for _ in "thw"], draw(0, 4)
    canvas = tuple(t * n for t, n in zip(tile, tiles, strict=True))
    kernel = tuple(t * draw(1, n) for t, n in zip(tile, tiles, strict=True))
    n = canvas[0] * canvas[1] * canvas[2] + text
    return gym_masks.generate_sta_mask_mod_3d(canvas, kernel, tile, text), n, n


def spatial_head(draw: Draw) -> Case:
    mod = gym_masks.generate_spatial_head_mask_mod(
        draw(0, 5), draw(1, 4), draw(1, 9), draw(1, 3), attn_sink=bool(draw(0, 1)), round_width=draw(1, 4)
    )
    return free(mod, draw)


def temporal_head(draw: Draw) -> Case:
    return free(gym_masks.generate_temporal_head_mask_mod(draw(0, 5), draw(1, 4), draw(1, 9), draw(1, 3)), draw)


def vsa_padding(draw: Draw) -> Case:
    tiles, size = draw(1, 5), draw(1, 6)
    sizes = torch.randint(1, size + 1, (tiles,), generator=vary(draw))
    return gym_vsa.generate_vsa_padding_mask_mod(sizes, size), tiles * size, tiles * size


def vsa(draw: Draw) -> Case:
    tiles, size, picked = draw(1, 5), draw(1, 6), draw(1, 4)
    indices = torch.randint(0, tiles, (B, H, tiles, picked), generator=vary(draw))
    return gym_masks.generate_vsa_mask_mod(indices, size), tiles * size, tiles * size


MASKS: dict[str, Callable[[Draw], Case]] = {
    "causal_mask": lambda draw: free(gym_masks.causal_mask, draw),
    "generate_sliding_window": lambda draw: free(gym_masks.generate_sliding_window(draw(0, 12)), draw),
    "generate_dilated_sliding_window": lambda draw: free(
        gym_masks.generate_dilated_sliding_window(draw(0, 12), draw(1, 5)), draw
    ),
    "generate_global_sliding_window": global_window,
    "generate_prefix_lm_mask": lambda draw: free(gym_masks.generate_prefix_lm_mask(draw(0, 20)), draw),
    "generate_block_diffusion_mask": block_diffusion,
    "generate_jetspec_tree_causal_mask_mod": tree,
    "generate_jetspec_training_mask_mod": tree_training,
    "generate_doc_mask_mod": document,
    "generate_packed_causal_doc_mask_mod": packed_document,
    "generate_shared_prefix_mask_mod": shared_prefix,
    "generate_natten": natten,
    "generate_tiled_natten": tiled_natten,
    "generate_morton_natten": morton_natten,
    "generate_sta_mask_mod_2d": sta_2d,
    "generate_sta_mask_mod_3d": sta_3d,
    "generate_spatial_head_mask_mod": spatial_head,
    "generate_temporal_head_mask_mod": temporal_head,
    "generate_vision_cross_attention_mask_mod": flamingo,
    "generate_vsa_padding_mask_mod": vsa_padding,
    "generate_vsa_mask_mod": vsa,
    "batchify_mask_mod": lambda draw: free(
        batchify_mask_mod(gym_masks.generate_prefix_lm_mask(draw(0, 4)), draw(1, 9)), draw
    ),
}


def graph_of(draw: Draw, nodes: int) -> torch.Tensor:
    adjacency = torch.rand(B, nodes, nodes, generator=vary(draw)) < 0.3
    return adjacency | adjacency.transpose(1, 2)


def graphormer_spatial(draw: Draw) -> Case:
    nodes, far = draw(2, 12), draw(1, 5)
    distances = gym_mods.shortest_path_distances(graph_of(draw, nodes), far)
    return gym_mods.generate_graphormer_spatial_bias(torch.randn(H, far + 2), distances), nodes, nodes


def graphormer_edge(draw: Draw) -> Case:
    nodes, steps, kinds = draw(2, 10), draw(1, 4), draw(1, 5)
    types = torch.randint(0, kinds, (B, nodes, nodes), generator=vary(draw))
    path = gym_mods.shortest_path_edge_types(graph_of(draw, nodes), types, steps)
    return gym_mods.generate_graphormer_edge_bias(torch.randn(H, steps, kinds), *path), nodes, nodes


def sandwich(draw: Draw) -> Case:
    n = draw(1, 30)
    return gym_mods.generate_sandwich_bias(H, n), n, n


def mla_rope(draw: Draw) -> Case:
    n, width = draw(1, 12), draw(1, 8)
    return gym_mods.generate_mla_rope_score_mod(torch.randn(B, H, n, width), torch.randn(B, 1, n, width), H), n, n


SCORES: dict[str, Callable[[Draw], Case]] = {
    "generate_mla_rope_score_mod": mla_rope,
    "generate_alibi_bias": lambda draw: free(gym_mods.generate_alibi_bias(H), draw),
    "generate_tanh_softcap": lambda draw: free(gym_mods.generate_tanh_softcap(draw(1, 40)), draw),
    # an autograd.Function around an operator whose name and meaning are tanh's: traced as tanh
    "generate_tanh_softcap approximate": lambda draw: free(
        gym_mods.generate_tanh_softcap(draw(1, 40), approx=True), draw
    ),
    "generate_sandwich_bias": sandwich,
    "generate_graphormer_spatial_bias": graphormer_spatial,
    "generate_graphormer_edge_bias": graphormer_edge,
    "generate_activation_score_mod": lambda draw: free(gym_mods.generate_activation_score_mod(), draw),
    "generate_activation_score_mod of relu": lambda draw: free(
        gym_mods.generate_activation_score_mod(F.relu, 2.0), draw
    ),
    "generate_activation_score_mod of sigmoid": lambda draw: free(
        gym_mods.generate_activation_score_mod(torch.sigmoid, 0.5), draw
    ),
}


def long_vsa(draw: Draw) -> Case:
    return gym_masks.generate_vsa_mask_mod(torch.zeros(B, H, 2, 64, dtype=torch.int64), 4), 8, 8


def long_mla_rope(draw: Draw) -> Case:
    return gym_mods.generate_mla_rope_score_mod(torch.randn(B, H, 8, 64), torch.randn(B, 1, 8, 64), H), 8, 8


# What can't be traced: the refusal, and why the form has no place in a function of one score.
REFUSED: dict[str, tuple[Callable[[Draw], Case], type[errors.ComposattnError], str]] = {
    "generate_vsa_mask_mod of 64 tiles": (long_vsa, errors.UnindexedTensor, "ca.BlockSparse.topk"),
    "generate_mla_rope_score_mod of 64": (long_mla_rope, errors.UnindexedTensor, "outside"),
}

MOD_TYPES = (flex._mask_mod_signature, flex._score_mod_signature)
HELPERS = {
    # public functions of attn_gym that are no mods and make none
    "build_tree_ancestor_matrix", "shortest_path_distances", "shortest_path_edge_types", "undo_softmax",
}  # fmt: skip


@pytest.fixture
def draw(generator: torch.Generator) -> Draw:
    return lambda low, high: int(torch.randint(low, high + 1, (), generator=generator))


def grid(q_len: int, kv_len: int) -> tuple[torch.Tensor, ...]:
    return torch.meshgrid(*map(torch.arange, (B, H, q_len, kv_len)), indexing="ij")


def eager(mod: Callable[..., Any], *values: torch.Tensor) -> torch.Tensor:
    """`mod` on 0-d tensors mapped over the grid, as FlexAttention runs it."""
    shape = values[0].shape
    flat = tuple(v.reshape(-1) for v in values)
    return torch.vmap(mod)(*flat).reshape(shape)


@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str, draw: Draw) -> None:
    for _ in range(4):
        mod, q_len, kv_len = MASKS[name](draw)
        places = grid(q_len, kv_len)
        got = Mask.of(mod)(*places).expand(places[0].shape)
        assert torch.equal(got, eager(mod, *places)), f"{name} {q_len}x{kv_len}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", SCORES)
def test_score(name: str, dtype: torch.dtype, draw: Draw) -> None:
    for _ in range(4):
        mod, q_len, kv_len = SCORES[name](draw)
        places = grid(q_len, kv_len)
        scores = 3 * torch.randn(places[0].shape, generator=vary(draw)).to(dtype)
        got = Score.of(mod)(scores, *places).expand(places[0].shape)
        wanted = eager(mod, scores, *places)
        # eager computes what comes from integers alone in fp32, the graph in the type of the score
        torch.testing.assert_close(got, wanted, rtol=3e-6, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str, draw: Draw) -> None:
    make, error, reason = REFUSED[name]
    mod, _, _ = make(draw)
    kind = Score if "score" in name else Mask
    with pytest.raises(error, match=reason) as caught:
        kind.of(mod)  # type: ignore[attr-defined]
    assert type(caught.value) is error


def test_nothing_that_attn_gym_ships_is_left_out() -> None:
    """A later attn-gym with a new mod fails here until the mod is listed above."""
    listed = {name.split()[0] for name in (*MASKS, *SCORES, *REFUSED)}
    found = set()
    for package in (gym_masks, gym_mods):
        for module in pkgutil.iter_modules(package.__path__):
            loaded = importlib.import_module(f"{package.__name__}.{module.name}")
            for name, value in inspect.getmembers(loaded, inspect.isfunction):
                makes_a_mod = value.__annotations__.get("return") in MOD_TYPES
                is_a_mod = list(inspect.signature(value).parameters)[-4:] == ["b", "h", "q_idx", "kv_idx"]
                if (makes_a_mod or is_a_mod) and value.__module__.startswith("attn_gym"):
                    found.add(name)
    assert found <= listed, found - listed
    assert len(found) >= 26
    assert not HELPERS & found


# --- forms of transformers and torchtitan ---------------------------------------------------------------------


def causal(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return kv_idx <= q_idx


def overlay_and(*parts: Callable[..., Any]) -> Callable[..., Any]:
    """How transformers joins masks: `new_ones`, then `&` of each."""

    def joined(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        result = q_idx.new_ones((), dtype=torch.bool)
        for part in parts:
            result = result & part(b, h, q_idx, kv_idx).to(q_idx.device)
        return result

    return joined


def overlay_or(*parts: Callable[..., Any]) -> Callable[..., Any]:
    def joined(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        result = q_idx.new_zeros((), dtype=torch.bool)
        for part in parts:
            result = result | part(b, h, q_idx, kv_idx).to(q_idx.device)
        return result

    return joined


def window(size: int) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: kv_idx > q_idx - size


def two_sided_window(size: int) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) <= size


def chunk_of(size: int, left_padding: torch.Tensor) -> Callable[..., Any]:
    """Llama 4 with padding on the left: chunks count from each row's first real token."""

    def chunk(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return (kv_idx - left_padding[b]) // size == (q_idx - left_padding[b]) // size

    return chunk


def blockwise(blocks: torch.Tensor) -> Callable[..., Any]:
    """Gemma 3 images: positions of one image see each other both ways; block -1 is text."""

    def same_image(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        image = blocks[b, q_idx]
        return (image == blocks[b, kv_idx]) & (image >= 0)

    return same_image


def padding(real: torch.Tensor) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: real[b, kv_idx]


def packed(ids: torch.Tensor) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx]


def offset(mod: Callable[..., Any], q_offset: Any, kv_offset: Any) -> Callable[..., Any]:
    """Decoding: the tensors begin somewhere inside the sequence; offsets are ints or 0-d tensors."""
    return lambda b, h, q_idx, kv_idx: mod(b, h, q_idx + q_offset, kv_idx + kv_offset)


def fixed_block(size: int) -> Callable[..., Any]:
    """torchtitan's fixed blocks: a vectorised division of both positions."""
    return lambda b, h, q_idx, kv_idx: (q_idx // size) == (kv_idx // size)


def causal_per_document(ids: torch.Tensor) -> Callable[..., Any]:
    """torchtitan's block-causal mask: ids from the positions of the end-of-sequence token."""
    return lambda b, h, q_idx, kv_idx: (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)


N = 24


def drawn(draw: Draw) -> dict[str, Callable[..., Any]]:
    ids = torch.randint(0, 4, (B, N), generator=vary(draw)).sort(1).values
    real = torch.arange(N) < torch.tensor([[draw(1, N)], [draw(1, N)]])
    left = torch.tensor([draw(0, 5), draw(0, 5)])
    images = torch.where(torch.rand(B, N, generator=vary(draw)) < 0.5, ids, -1)
    end_of_text = torch.rand(B, N, generator=vary(draw)) < 0.2
    documents = end_of_text.cumsum(1).roll(1, 1)
    documents[:, 0] = 0
    n = draw(1, 9)
    return {
        "causal": causal,
        "sliding window": overlay_and(window(n), causal),
        "bidirectional window": two_sided_window(n),
        "bidirectional window with padding": overlay_and(two_sided_window(n), padding(real)),
        "chunked": overlay_and(chunk_of(n, left), causal),
        "blockwise": overlay_or(causal, blockwise(images)),
        "padding": overlay_and(causal, padding(real)),
        "packed sequence": overlay_and(causal, packed(ids)),
        "offset": offset(causal, n, draw(0, 3)),
        "offset by a tensor": offset(overlay_and(window(n), causal), torch.tensor(n), torch.tensor(1)),
        "fixed block": fixed_block(n),
        "block causal": causal_per_document(documents),
        "everything": overlay_and(overlay_or(causal, blockwise(images)), packed(ids), padding(real), window(n + 4)),
        "all": lambda b, h, q_idx, kv_idx: q_idx >= 0,
        "legacy bool of a bool": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx).bool() & real[b, kv_idx].to(torch.bool),
    }


@pytest.mark.parametrize("name", drawn(lambda low, high: low))
def test_transformers_and_torchtitan_forms(name: str, draw: Draw) -> None:
    for _ in range(3):
        mod = drawn(draw)[name]
        places = grid(N, N)
        assert torch.equal(Mask.of(mod)(*places).expand(places[0].shape), eager(mod, *places))
