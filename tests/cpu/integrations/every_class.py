"""Every class of transformers that reads and writes tokens, small, with random weights, under composattn and `eager`.

A class is found by transformers' own lists, its configuration made small by the names of its fields. `Verdict` says
what came out: right, refused by name, or what nobody may find here without a word.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto import modeling_auto

import composattn.integrations.transformers as integration
from composattn.errors import ComposattnError
from tests.cpu.integrations.small_configurations import AT_ONCE, GEMMA4, LATENT, NARROW, PARTICULAR, SIZES, WORDS

TOKENS, TARGETS = 24, 10  # per sequence, of a decoder with an encoder
LARGEST = 30_000_000  # parameters
SHARP = 12.0  # what weights of queries and keys are multiplied with, so that masks, scales and caps show
# of the largest number: plain, all classes stay below 3e-6; sharp, eager itself is 9e-3 from fp64 (mT5), and what was
# dropped moved models by 4e-2 or more
TOLERANCE = {False: 1e-4, True: 2e-3}

KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "encoder and decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}

# classes whose layers have no attention with a softmax over keys: nothing to ask composattn for
WITHOUT_ATTENTION = {"falcon_mamba", "fnet", "mamba", "mamba2", "rwkv", "xlstm"}

# classes that have no gradients in transformers 5.24: they write in place to what their backward reads
WITHOUT_GRADIENTS = {"xlstm"}

# classes whose vision tower is timm's, which is not installed here: text alone is asked for, so any stands for it
SEEN_BY_TIMM = {"gemma3n"}

# classes whose other layers read what attention says of padding: 0 here and with sdpa, the mean of V in eager
READ_PADDING = {"blt", "recurrent_gemma"}

_LISTS_OF_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")
_OF_QUERIES_AND_KEYS = re.compile(r"q_proj|k_proj|query|key|qkv|c_attn|q_lin|k_lin|\.q\.|\.k\.|q_[ab]|kv_[ab]|in_proj")


class Verdict(enum.Enum):
    """What a class is under composattn, beside `eager`."""

    RIGHT = "right"
    REFUSED = "refused by name"
    NOT_ASKED = "composattn was not asked, and nothing said so"
    DIFFERENT = "other logits or gradients"
    UNNAMED = "an error without a name of ours"
    NOT_MADE = "no small model that runs in eager"


class Found(NamedTuple):
    """A verdict and what it rests on."""

    verdict: Verdict
    why: str = ""


def classes(kind: str) -> Iterator[str]:
    """The names of the configurations that a list of transformers has a class for."""
    yield from sorted(KINDS[kind])


def small(config: Any, depth: int = 0) -> Any:
    """`config` with few narrow layers, one of each kind."""
    for name, value in SIZES.items():
        with contextlib.suppress(Exception):  # a field that each layer has its own of
            if isinstance(getattr(config, name, None), (int, float, str)):
                setattr(config, name, value)
    with contextlib.suppress(Exception):
        if getattr(config, LATENT, None) is not None:
            config.num_key_value_heads = config.num_attention_heads
    for name in _LISTS_OF_LAYERS:
        given = getattr(config, name, None)
        if isinstance(given, (list, tuple)) and given:
            each = list(dict.fromkeys(given))
            count = max(getattr(config, "num_hidden_layers", 2), len(each))
            _set(config, name, (each * count)[:count])
            _set(config, "num_hidden_layers", count)
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None and depth < 3:
            small(part, depth + 1)
    return config


def _set(config: Any, name: str, value: Any) -> None:
    with contextlib.suppress(Exception):  # a field that follows others
        setattr(config, name, value)


def made(kind: str, name: str) -> tuple[Any, Any]:
    """The class and its small configuration."""
    listed = KINDS[kind][name]
    of = getattr(transformers, listed if isinstance(listed, str) else listed[0])
    if name in AT_ONCE:
        whole = transformers.CONFIG_MAPPING[name](**AT_ONCE[name])
        if name in SEEN_BY_TIMM:
            vision = transformers.CONFIG_MAPPING["siglip_vision_model"](
                rms_norm_eps=1e-6, vocab_size=2, vocab_offset=WORDS - 4, **NARROW
            )
            object.__setattr__(whole, "vision_config", vision)  # the field takes timm's alone
        return of, whole if isinstance(whole, of.config_class) else whole.get_text_config()
    config = transformers.CONFIG_MAPPING[name]()
    if of.config_class is not None and not isinstance(config, of.config_class):
        parts = [getattr(config, part) for part in config.sub_configs]
        config = next((p for p in parts if isinstance(p, of.config_class)), None) or config.get_text_config()
    small(config)
    if name == "reformer":
        config.is_decoder = kind == "causal"
    for place, value in PARTICULAR.get(name, {}).items():
        *parts, field = place.split(".")
        setattr(functools.reduce(getattr, parts, config), field, value)
    return of, config


def built(of: Any, config: Any, implementation: str, sharp: bool = False) -> Any:
    """A model of random weights: the same ones for the same configuration."""
    torch.manual_seed(0)
    model = of._from_config(copy.deepcopy(config), attn_implementation=implementation)
    model.train(config.model_type in TRAINING)
    if sharp:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and _OF_QUERIES_AND_KEYS.search(name.lower()):
                    parameter.mul_(SHARP)
    return model


# classes that are reversible: they have gradients in training alone
TRAINING = {"reformer"}


def inputs(of: Any) -> dict[str, Any]:
    """Two sequences for a model, of which one has padding at its left."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, WORDS - 9, (2, TOKENS), generator=draw)
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    given["attention_mask"][1, :9] = 0
    if of.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens[:, :TARGETS]
    more = _MORE_INPUTS.get(of.config.model_type)
    return given if more is None else given | more(of, draw)


def _of_another_model(of: Any, draw: torch.Generator) -> dict[str, Any]:
    """Embeddings, and keys and values of each kind of layer, as the model has them that a drafter guesses for."""
    text = of.config.get_text_config()
    widths = {"sliding_attention": GEMMA4["head_dim"], "full_attention": GEMMA4["global_head_dim"]}
    shared = {
        kind: tuple(torch.randn(2, text.num_key_value_heads, TOKENS, width, generator=draw) for _ in range(2))
        for kind, width in widths.items()
    }
    embedded = torch.randn(2, TOKENS, 2 * of.config.backbone_hidden_size, generator=draw)
    every = torch.arange(TOKENS)
    at = {"position_ids": every.expand(2, -1), "logits_to_keep": every}
    return {"inputs_embeds": embedded, "shared_kv_states": shared, **at}


def _heard(of: Any, draw: torch.Generator) -> dict[str, Any]:
    """A frame of sound per token."""
    audio = of.config.audio_config
    embedded = torch.randn(2, TOKENS * of.config.downsample_factor, audio.hidden_size, generator=draw)
    return {"encoder_inputs_embeds": embedded}


_MORE_INPUTS: dict[str, Callable[[Any, torch.Generator], dict[str, Any]]] = {
    "gemma4_assistant": _of_another_model,
    "gemma4_unified_assistant": _of_another_model,
    "voxtral_realtime": _heard,
}


def logits_and_gradients(model: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits of what is no padding, and what a random loss of them says to each parameter."""
    logits = model(**given).logits
    if logits.shape[1] == TOKENS:
        logits = logits[given["attention_mask"].bool()]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    if model.config.model_type not in WITHOUT_GRADIENTS:
        (logits.float() * weights).sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.numel()}


def judged(kind: str, name: str, sharp: bool = False) -> Found:
    """How a class under composattn compares with itself in `eager`."""
    try:
        of, config = made(kind, name)
        reference = built(of, config, "sdpa" if name in READ_PADDING else "eager", sharp)
        if sum(p.numel() for p in reference.parameters()) > LARGEST:
            return Found(Verdict.NOT_MADE, "too large")
        wanted = logits_and_gradients(reference, inputs(reference))
    except Exception as error:  # whatever a configuration made by names alone may meet
        return Found(Verdict.NOT_MADE, _line(error))
    calls: list[int] = []
    try:
        model = built(of, config, "composattn", sharp)
        model.load_state_dict(reference.state_dict())
        with _counted(calls):
            found = logits_and_gradients(model, inputs(model))
    except ComposattnError as error:
        return Found(Verdict.REFUSED, _line(error))
    except Exception as error:
        return Found(Verdict.UNNAMED, _line(error))
    difference = _greatest_difference(found, wanted)
    if not difference <= TOLERANCE[sharp]:
        return Found(Verdict.DIFFERENT, f"{difference:.1e} of the greatest, {len(calls)} calls")
    if not calls and name not in WITHOUT_ATTENTION:
        return Found(Verdict.NOT_ASKED)
    return Found(Verdict.RIGHT, f"{difference:.1e}, {len(calls)} calls")


def _greatest_difference(found: Any, wanted: Any) -> float:
    """The greatest difference of logits and of gradients, relative to the largest number of each kind."""
    (logits, gradients), (right_logits, right_gradients) = found, wanted
    if logits.shape != right_logits.shape or gradients.keys() != right_gradients.keys():
        return float("inf")
    of_logits = float((logits - right_logits).abs().max()) / max(1.0, float(right_logits.abs().max()))
    largest = max((float(g.abs().max()) for g in right_gradients.values()), default=0.0)
    errors = [
        float((gradients[name] - g).abs().max()) / (float(g.abs().max()) + 1e-2 * largest)
        for name, g in right_gradients.items()
    ]
    return max([of_logits, *errors])


class _counted:
    """Notes each call of `ca.attention` that the integration makes."""

    def __init__(self, calls: list[int]) -> None:
        self.calls, self.theirs = calls, integration.attention  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        theirs: Callable[..., Any] = self.theirs

        @functools.wraps(theirs)
        def noted(*args: Any, **options: Any) -> Any:
            self.calls.append(1)
            return theirs(*args, **options)

        integration.attention = noted  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        integration.attention = self.theirs  # type: ignore[attr-defined]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
