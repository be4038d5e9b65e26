"""Models of transformers with attn_implementation="composattn": as in eager, forward, gradients and generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra: transformers)")

import composattn
import composattn.integrations.transformers as integration
from composattn import errors
from composattn.dispatch import plan_cache
from tests.cpu.integrations.models import FAMILIES, TOKENS, WORDS

NEW = 12  # tokens to generate


@pytest.fixture(autouse=True)
def _registered() -> None:
    integration.register()


def model(name: str) -> Any:
    family = FAMILIES[name]()
    return family.model(family.config)


def padding(side: str) -> torch.Tensor | None:
    """(2, TOKENS): sequences of 33 and 37 tokens, the rest padding."""
    if side == "none":
        return None
    tokens = torch.ones(2, TOKENS, dtype=torch.long)
    for row, count in zip(tokens, (7, 3), strict=True):
        row[: count if side == "left" else 0] = 0
        row[TOKENS - (count if side == "right" else 0) :] = 0
    return tokens


def logits_and_gradients(of: Any, implementation: str, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """What a model says where there is a token, and the gradients of a random loss of it."""
    of.set_attn_implementation(implementation)
    of.zero_grad()
    logits = of(**inputs).logits
    mask = inputs.get("attention_mask")
    if mask is not None and logits.shape[1] == TOKENS:
        logits = logits * mask[..., None]  # a row of padding sees nothing: 0 here, the mean of V in eager
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return logits.detach(), {name: p.grad for name, p in of.named_parameters() if p.grad is not None}


CASES = [
    pytest.param(name, side, marks=[] if side == "left" or name == "vit" else [pytest.mark.slow])
    for name in FAMILIES
    for side in ("none", "left", "right")
    if name not in ("vit", "whisper") or side == "none"  # which take no padding
]


@pytest.mark.parametrize(("name", "side"), CASES)
def test_a_family_says_and_learns_what_it_does_in_eager(name: str, side: str, monkeypatch: Any) -> None:
    calls = []
    ours = composattn.attention
    monkeypatch.setattr(integration, "attention", lambda *a, **k: (calls.append(1), ours(*a, **k))[1])
    inputs = FAMILIES[name]().inputs() | ({} if side == "none" else {"attention_mask": padding(side)})
    of = model(name).train()
    wanted, wanted_gradients = logits_and_gradients(of, "eager", inputs)
    assert not calls
    found, gradients = logits_and_gradients(of, "composattn", inputs)
    assert len(calls) >= 2, "no layer asked composattn"
    assert float((found - wanted).abs().max()) <= 4e-6 * max(1.0, float(wanted.abs().max()))
    assert gradients.keys() == wanted_gradients.keys()
    greatest = max(float(g.norm()) for g in wanted_gradients.values())
    for parameter, gradient in wanted_gradients.items():
        error = float((gradients[parameter] - gradient).norm())
        assert error <= 4e-6 * (float(gradient.norm()) + 1e-2 * greatest), parameter


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
}
DECODERS = [name for name, family in FAMILIES.items() if family().decodes]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize(
    "name", [n if n in ("mistral", "gemma2") else pytest.param(n, marks=pytest.mark.slow) for n in DECODERS]
)
def test_generation_gives_the_tokens_of_sdpa_with_two_plans(name: str, side: str, cache: str, monkeypatch: Any) -> None:
    of = model(name).eval()
    tokens = torch.randint(1, WORDS, (2, TOKENS))
    mask = padding(side)
    options = CACHES[cache] | {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(tokens) if mask is None else mask}

    of.set_attn_implementation("eager")
    wanted = of.generate(tokens, **options)
    plans = []
    made = plan_cache.made_plan
    monkeypatch.setattr(plan_cache, "made_plan", lambda *a: (plans.append(str(a[0])), made(*a))[1])
    plan_cache._plans.clear()
    of.set_attn_implementation("composattn")
    assert torch.equal(of.generate(tokens, **options), wanted)
    kinds = len(set(getattr(of.config, "layer_types", None) or ["full"]))
    assert len(plans) <= 2 * kinds, plans


@pytest.mark.parametrize("name", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_packed_documents_are_as_each_alone(name: str) -> None:
    of = model(name).eval()
    of.set_attn_implementation("composattn")
    lengths = [11, 22, 7]
    tokens = torch.randint(1, WORDS, (1, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    begins = torch.tensor([0, 11, 33, 40], dtype=torch.int32)
    told = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": 22, "max_length_k": 22}
    with torch.no_grad():
        alone = torch.cat([of(document).logits for document in tokens.split(lengths, 1)], 1)
        for given in ({}, told):
            packed = of(tokens, position_ids=positions, use_cache=False, **given).logits
            assert float((packed - alone).abs().max()) <= 2e-6


def test_sinks_of_packed_documents_are_as_of_each_alone() -> None:
    # gpt-oss does not tell its masks the positions: cu_seq_lens alone keeps its documents apart
    of = model("gpt-oss").eval()
    of.set_attn_implementation("composattn")
    tokens, begins = torch.randint(1, WORDS, (1, 40)), torch.tensor([0, 15, 40], dtype=torch.int32)
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None]
    with torch.no_grad():
        alone = torch.cat([of(document).logits for document in tokens.split([15, 25], 1)], 1)
        packed = of(tokens, position_ids=positions, cu_seq_lens_q=begins, cu_seq_lens_k=begins, use_cache=False).logits
    assert float((packed - alone).abs().max()) <= 2e-6


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks_as_tensors_are_followed(kind: torch.dtype, heads: int) -> None:
    of = model("llama").eval()
    seen = torch.rand(2, heads, TOKENS, TOKENS).tril() > 0.3
    seen |= torch.eye(TOKENS, dtype=torch.bool)
    mask = seen if kind is torch.bool else torch.where(seen, torch.randn(seen.shape), torch.finfo(kind).min)
    tokens = torch.randint(1, WORDS, (2, TOKENS))
    found = []
    for implementation in ("sdpa", "composattn"):
        of.set_attn_implementation(implementation)
        found.append(of(tokens, attention_mask=mask).logits)
    assert float((found[0] - found[1]).abs().max()) <= 2e-6


def test_a_mask_of_one_row_is_that_of_all_queries() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind()
    for seen in (torch.tensor([1, 1, 0, 1, 1, 0]).bool().expand(2, 1, 1, 6), torch.randn(2, 4, 1, 6)):
        out, _ = integration.attend(torch.nn.Module(), q, k, v, seen)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        assert float((out.transpose(1, 2) - wanted).abs().max()) <= 1e-6


def test_checkpointing_changes_no_gradient() -> None:
    of = model("gemma2").train()
    inputs = {"input_ids": torch.randint(1, WORDS, (2, TOKENS)), "use_cache": False}
    _, kept_ones = logits_and_gradients(of, "composattn", inputs)
    kept_ones = {name: gradient.clone() for name, gradient in kept_ones.items()}
    of.gradient_checkpointing_enable()
    _, again = logits_and_gradients(of, "composattn", inputs)
    for name, gradient in kept_ones.items():
        assert torch.equal(again[name], gradient), name


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_packed_documents_under_checkpointing_have_the_gradients_of_each_alone(told: bool, reentrant: bool) -> None:
    of, lengths = model("mistral").train(), [11, 22, 7]
    tokens, pushed = torch.randint(1, WORDS, (1, 40)), torch.randn(1, 40, WORDS)
    of.set_attn_implementation("eager")
    for document, push in zip(tokens.split(lengths, 1), pushed.split(lengths, 1), strict=True):
        (of(document, use_cache=False).logits * push).sum().backward()
    wanted = {name: p.grad for name, p in of.named_parameters() if p.grad is not None}
    of.zero_grad()
    of.set_attn_implementation("composattn")
    of.gradient_checkpointing_enable({"use_reentrant": reentrant})
    begins = torch.tensor([0, 11, 33, 40], dtype=torch.int32)
    documents = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": 22, "max_length_k": 22}
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = of(tokens, position_ids=positions, use_cache=False, **(documents if told else {})).logits
    (packed * pushed).sum().backward()
    for name, gradient in wanted.items():
        found = of.get_parameter(name).grad
        assert float((found - gradient).norm()) <= 4e-6 * float(gradient.norm() + 1e-3), name


def test_adapters_of_low_rank_learn_what_they_do_in_eager_under_checkpointing() -> None:
    class Adapted(torch.nn.Module):
        def __init__(self, base: torch.nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = torch.nn.Parameter(torch.randn(4, base.in_features) / 10)
            self.up = torch.nn.Parameter(torch.randn(base.out_features, 4) / 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]

    of = model("gpt-oss").train().requires_grad_(False)
    for layer_ in of.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer_.self_attn, name, Adapted(getattr(layer_.self_attn, name)))
    of.enable_input_require_grads()
    of.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = {"input_ids": torch.randint(1, WORDS, (2, TOKENS)), "use_cache": False}
    _, wanted = logits_and_gradients(of, "eager", inputs)
    wanted = {name: gradient.clone() for name, gradient in wanted.items()}
    _, found = logits_and_gradients(of, "composattn", inputs)
    assert len(found) == 8
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm()) <= 4e-6 * float(gradient.norm()), name


WAYS: dict[str, dict[str, Any]] = {
    "the prompt in chunks": {"prefill_chunk_size": 16},
    "beams of a static cache": {"num_beams": 3, "num_return_sequences": 2, "cache_implementation": "static"},
    "beams that may not repeat": {"num_beams": 3, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_other_ways_to_generate_give_the_tokens_of_eager(name: str, way: str) -> None:
    of, tokens, mask = model(name).eval(), torch.randint(1, WORDS, (2, TOKENS)), padding("left")
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | WAYS[way]
    found = []
    for implementation in ("eager", "composattn"):
        of.set_attn_implementation(implementation)
        found.append(of.generate(tokens, **options))
    assert torch.equal(*found)


def test_drafted_tokens_are_taken_as_in_eager() -> None:
    of, helper, tokens = model("mistral").eval(), model("mistral").eval(), torch.randint(1, WORDS, (1, TOKENS))
    found = []
    for implementation in ("eager", "composattn"):
        of.set_attn_implementation(implementation)
        helper.set_attn_implementation(implementation)
        found.append(of.generate(tokens, assistant_model=helper, max_new_tokens=NEW, do_sample=False, pad_token_id=0))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) for n in ("gemma2", "llama", "mistral", "gpt-oss")]
)
def test_a_compiled_training_step_learns_what_eager_does_at_other_lengths_too(name: str) -> None:
    of = model(name).train()
    of.set_attn_implementation("composattn")
    twin = copy.deepcopy(of)
    twin.set_attn_implementation("eager")
    steps = [torch.optim.SGD(m.parameters(), 0.1) for m in (of, twin)]
    torch._dynamo.reset()
    compiled = torch.compile(of, fullgraph=True, backend="aot_eager")
    for length in (TOKENS, TOKENS + 8, TOKENS + 24):
        tokens = torch.randint(1, WORDS, (2, length))
        losses = [m(input_ids=tokens, labels=tokens, use_cache=False).loss for m in (compiled, twin)]
        assert float((losses[0] - losses[1]).detach().abs()) <= 1e-5
        for loss, step in zip(losses, steps, strict=True):
            loss.backward()
            step.step()
            step.zero_grad()
    for ours, theirs in zip(of.parameters(), twin.parameters(), strict=True):
        assert float((ours - theirs).detach().abs().max()) <= 1e-5


SLOWLY_COMPILED = [pytest.param(name, "left", marks=pytest.mark.slow) for name in ("llama", "gemma2")]


@pytest.mark.parametrize(("name", "side"), [("llama", "none"), *SLOWLY_COMPILED])
def test_a_compiled_model_has_one_graph(name: str, side: str) -> None:
    of = model(name).eval()
    of.set_attn_implementation("composattn")
    inputs = {"input_ids": torch.randint(1, WORDS, (2, TOKENS)), "attention_mask": padding(side), "use_cache": False}
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = of(**inputs).logits
        found = torch.compile(of, fullgraph=True, backend="aot_eager")(**inputs).logits
    seen = slice(None) if side == "none" else padding(side).bool()  # type: ignore[union-attr]
    assert float((found - wanted)[seen].abs().max()) <= 2e-6


def test_attention_dropout_in_training_follows_the_seed_and_checkpointing() -> None:
    of = model("llama").train()
    of.config.attention_dropout = 0.3
    for layer_ in of.model.layers:
        layer_.self_attn.attention_dropout = 0.3
    of.set_attn_implementation("composattn")
    tokens = torch.randint(1, WORDS, (2, TOKENS))
    found = []
    for checkpointed in (False, False, True):
        if checkpointed:
            of.gradient_checkpointing_enable({"use_reentrant": False})
        of.zero_grad()
        torch.manual_seed(5)
        logits = of(tokens, use_cache=False).logits
        logits.square().sum().backward()
        found.append([logits.detach(), *(p.grad.clone() for p in of.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    assert not torch.equal(of(tokens, use_cache=False).logits, found[0][0])


# --- what is refused ------------------------------------------------------------------------------------------------


def layer(**options: Any) -> Any:
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, options.pop("keys", 4), 8)
    return integration.attend(torch.nn.Module(), q, k, k, options.pop("attention_mask", None), **options)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dropout": 1.5}, errors.UnsupportedOption, "dropout_p"),
        ({"output_attentions": True}, errors.UnsupportedOption, "eager"),
        ({"is_causal": True, "keys": 6}, errors.ShapeMismatch, "masking_utils"),
        (
            {"attention_mask": integration.mask(1, 3, 4)},
            errors.ShapeMismatch,
            "for 3 queries and 4 keys; this layer has 4 and 4",
        ),
    ],
)
def test_what_can_not_be_right_is_refused_by_name(options: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        layer(**options)


def test_packed_documents_in_two_rows_are_refused() -> None:
    q = torch.randn(2, 2, 4, 8)
    begins = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(errors.UnsupportedOption, match="batch of one, got a batch of 2"):
        integration.attend(torch.nn.Module(), q, q, q, None, is_causal=False, cu_seq_lens_q=begins)


def test_padding_between_tokens_hides_them() -> None:
    tokens = torch.ones(1, 6, dtype=torch.bool)
    tokens[0, 2:4] = False
    q, k, v = torch.randn(3, 1, 2, 6, 8).unbind()
    out, _ = integration.attend(torch.nn.Module(), q, k, v, integration.mask(1, 6, 6, attention_mask=tokens))
    seen = torch.ones(6, 6).tril().bool() & tokens
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    assert float((out.transpose(1, 2) - wanted).abs().max()) <= 1e-6
