"""vLLM's engine with composattn's attention: small random models say what transformers says in eager mode.

`make vllm` makes an environment with vLLM for CPUs, which wants other versions than the rest, and runs this there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, where calls can be counted
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
pytest.importorskip("vllm", reason="vLLM is not installed (make vllm)")

import transformers as hf
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata

import composattn as ca
import composattn.integrations.vllm as integration
from composattn import errors
from composattn.mods import alibi, causal, sliding_window, softcap
from tests.serving.engine import AT_ONCE, BLOCK, NEW

WORDS, WINDOW = 128, 24
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "mistral, a window": ("Mistral", SIZES | {"sliding_window": WINDOW}),
    "gemma 2, a soft cap and a window": (
        "Gemma2",
        SIZES
        | {
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 32,
        },
    ),
    "gpt-oss, sinks and a window": (
        "GptOss",
        SIZES | {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "bloom, alibi": ("Bloom", {"vocab_size": WORDS, "hidden_size": 128, "n_layer": 2, "n_head": 4}),
}


def made(name: str, folder: Path) -> Any:
    """A random model whose next words are no matter of course, kept in `folder`."""
    kind, options = MODELS[name]
    torch.manual_seed(0)
    model = getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**options)).eval()
    with torch.no_grad():
        for of, parameter in model.named_parameters():
            if "embed" in of:  # where it is the last layer too, a word's answer is else the word
                parameter.normal_(std=0.01)
            elif parameter.ndim > 1 or of.endswith("sinks"):
                parameter.normal_(std=0.15 if parameter.ndim > 1 else 1.0)
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_says_what_transformers_does_in_eager(name: str, tmp_path: Path) -> None:
    eager = made(name, tmp_path)
    prompts = [torch.randint(3, WORDS, (n,)).tolist() for n in (5, 40, 100, 17)]
    prompts.append([*prompts[2][:70], 7, 8, 9])  # two blocks as another's
    ran = run("-m", "tests.serving.engine", str(tmp_path), given=json.dumps(prompts))
    found = json.loads(ran.splitlines()[-1])
    assert len(found["calls"]) >= 2 * NEW and max(found["calls"]) == AT_ONCE  # a prompt of 100 in chunks, beside others
    for prompt, answer in zip(prompts, found["answers"], strict=True):
        tokens = [token for token, _ in answer]
        with torch.no_grad():
            said = eager(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert said.argmax(-1).tolist() == tokens
        logprobs = torch.tensor([logprob for _, logprob in answer])
        assert float((said.max(-1).values - logprobs).abs().max()) <= 1e-3  # BLOOM's GELU in vLLM differs by 6e-4


def run(*arguments: str, given: str = "", **environment: str) -> str:
    """What Python prints, in an environment with these variables too."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        input=given,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def step(lengths: list[int], contexts: list[int], **more: Any) -> tuple[CommonAttentionMetadata, torch.Tensor]:
    """What vLLM tells its builders of such sequences, and the slots of their new keys."""
    seq_lens = torch.tensor([q + c for q, c in zip(lengths, contexts, strict=True)], dtype=torch.int32)
    begins = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    most = -(-int(seq_lens.max()) // BLOCK)
    table = (torch.randperm(len(lengths) * most) + 1).view(len(lengths), most).to(torch.int32)
    positions = [torch.arange(c, c + q) for q, c in zip(lengths, contexts, strict=True)]
    slots = torch.cat([table[b, p // BLOCK] * BLOCK + p % BLOCK for b, p in enumerate(positions)])
    told = {
        "query_start_loc": begins, "query_start_loc_cpu": begins, "seq_lens": seq_lens, "num_reqs": len(lengths),
        "num_actual_tokens": sum(lengths), "max_query_len": max(lengths), "max_seq_len": int(seq_lens.max()),
        "block_table_tensor": table, "slot_mapping": slots,
    }  # fmt: skip
    return CommonAttentionMetadata(**(told | more)), slots


def builder() -> integration.Builder:
    made_ = object.__new__(integration.Builder)
    made_.block_size = BLOCK
    return made_


LAYERS: dict[str, tuple[dict[str, Any], bool, Any, Any]] = {
    "causal": ({}, True, causal("bottom_right"), None),
    "no order": ({}, False, None, None),
    "a window": (
        {"sliding_window": 9}, True, causal("bottom_right") & sliding_window(8, align="bottom_right"), None,
    ),
    "a window to both sides": ({"sliding_window": 9}, False, sliding_window((8, 8), align="bottom_right"), None),
    "a cap, then slopes": (
        {"logits_soft_cap": 2.0, "alibi_slopes": [0.5, 0.25, 0.1, 0.0]}, True, causal("bottom_right"),
        softcap(2.0) >> alibi(torch.tensor([0.5, 0.25, 0.1, 0.0]), align="bottom_right"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_attends_to_the_blocks_of_each_sequence(name: str) -> None:
    options, is_causal, mask, score = LAYERS[name]
    lengths, contexts, heads, dim = [40, 1, 7], [0, 30, 25], (4, 2), 16
    said, slots = step(lengths, contexts, causal=is_causal)
    of = builder().build(0, said)
    cache = torch.randn(1 + said.block_table_tensor.numel(), heads[1], BLOCK, 2 * dim)
    q, k, v = (torch.randn(sum(lengths) + 3, h, dim) for h in (heads[0], heads[1], heads[1]))  # three rows of padding
    layer = integration.Layer(heads[0], dim, 0.3, heads[1], sinks=torch.tensor([1.0, -1.0, 0.0, 3.0]), **options)
    before = cache.clone()
    layer.do_kv_cache_update(torch.nn.Module(), k, v, cache, torch.cat((slots, torch.tensor([-1, -1, -1]))))
    assert torch.equal(cache[1:].isclose(before[1:]).all(-1).logical_not().sum(), torch.tensor(sum(lengths) * 2))
    out = layer.forward(torch.nn.Module(), q, k, v, cache, of, torch.full_like(q, torch.nan))
    for b, (begin, end) in enumerate(zip(said.query_start_loc[:-1], said.query_start_loc[1:], strict=True)):
        stored = cache[said.block_table_tensor[b].long()].transpose(1, 2).flatten(0, 1)[: int(said.seq_lens[b])]
        keys, values = stored.transpose(0, 1)[None].split(dim, -1)
        rows = q[begin:end].transpose(0, 1)[None]
        alone = ca.attention(rows, keys, values, mask_mod=mask, score_mod=score, scale=0.3, sinks=layer.sinks)
        assert float((out[begin:end].transpose(0, 1) - alone[0]).abs().max()) <= 1e-5
    assert bool(out[sum(lengths) :].isnan().all())  # padding is not written


def test_a_look_at_the_memory_attends_to_nothing() -> None:
    layer, q = integration.Layer(4, 16, 0.25), torch.randn(5, 4, 16)
    assert not bool(layer.forward(torch.nn.Module(), q, q, q, torch.empty(0), None, torch.ones_like(q)).any())


def test_what_vllm_asks_of_a_backend() -> None:
    backend = integration.Backend
    asked: dict[str, Any] = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": False,
        "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": None, "attn_type": AttentionType.DECODER, "has_sliding_window": True,
    }  # fmt: skip
    assert backend.validate_configuration(**asked) == []
    assert backend.validate_configuration(**(asked | {"kv_cache_dtype": "fp8"})) == []
    for refused in ({"kv_cache_dtype": "nvfp4"}, {"use_mla": True}, {"head_size": 1024}, {"use_mm_prefix": True}):
        assert backend.validate_configuration(**(asked | refused))


def test_the_plugin_is_found_and_takes_no_backend_of_vllms_own() -> None:
    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as all_\n"
        "print(all_.CUSTOM.is_overridden(), all_.CPU_ATTN.get_path())"
    )
    assert run("-c", code).split()[-2:] == ["True", "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"]
    named = run("-c", code, **{integration.TAKEN: "CPU_ATTN"})
    assert named.split()[-2:] == ["False", "composattn.integrations.vllm.Backend"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_type": AttentionType.ENCODER_ONLY}, "for decoders"),
        ({"kv_cache_dtype": "nvfp4"}, "'nvfp4'; composattn's backend in vLLM has auto"),
    ],
)
def test_a_layer_it_has_not_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.UnsupportedOption, match=words):
        integration.Layer(4, 16, 0.25, **options)


def test_steps_it_has_not_are_refused_by_name() -> None:
    said, _ = step([2, 3], [0, 0], causal=torch.tensor([True, False]))
    with pytest.raises(errors.UnsupportedOption, match="causal"):
        builder().build(0, said)
    layer, q = integration.Layer(4, 16, 0.25), torch.randn(5, 4, 16)
    with pytest.raises(errors.UnsupportedOption, match="8 bits"):
        layer.forward(torch.nn.Module(), q, q, q, q, None, q, output_scale=torch.ones(()))
