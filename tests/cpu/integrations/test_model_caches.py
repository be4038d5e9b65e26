"""Caches in 8 bits: models attend to what they hold, in transformers' own classes and in `eight_bit_cache`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra: transformers)")

from transformers import QuantizedCache
from transformers.cache_utils import DynamicLayer

import composattn as ca
import composattn.integrations.transformers as integration
from composattn import errors
from composattn.integrations.model_caches import EightBitLayer, as_quantised
from tests.cpu.integrations.models import FAMILIES, WORDS


class Rounded(DynamicLayer):  # type: ignore[misc]
    """Wide rows with the numbers that 8 bits hold of each: e4m3 by the row's own power of two."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.get_seq_length() == 0
        kept = super().update(*(self.rounded(x) for x in (keys, values)))
        return (keys, values) if first else kept

    @staticmethod
    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = torch.exp2((x.abs().amax(-1, keepdim=True) / 448).log2().ceil())
        return (x / scale).to(torch.float8_e4m3fn).float() * scale


def model(name: str, implementation: str) -> Any:
    integration.register()
    torch.manual_seed(0)
    family = FAMILIES[name]()
    made = family.model(family.config).eval()
    made.set_attn_implementation(implementation)
    return made


def logits(of: Any, cache: Any, words: torch.Tensor) -> torch.Tensor:
    """What a model says of a prompt of 20 words, then of others one by one."""
    with torch.no_grad():
        said = [of(words[:, :20], past_key_values=cache).logits]
        said += [of(words[:, n : n + 1], past_key_values=cache).logits for n in range(20, words.shape[1])]
    return torch.cat(said, 1)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_later_tokens_attend_to_8_bits_by_the_scales_of_their_rows(name: str) -> None:
    words = torch.randint(1, WORDS, (2, 28))
    eager, ours = (model(name, implementation) for implementation in ("eager", "composattn"))
    held = integration.eight_bit_cache(eager.config)
    found = logits(ours, held, words)
    wide = integration.eight_bit_cache(eager.config)
    wide.layers = [Rounded() if isinstance(layer, EightBitLayer) else layer for layer in wide.layers]
    assert any(isinstance(layer, EightBitLayer) for layer in held.layers)
    torch.testing.assert_close(found, logits(eager, wide, words), rtol=1e-3, atol=1e-4)
    for layer in held.layers:
        windowed = getattr(layer, "is_sliding", False)
        assert layer.keys.dtype == (torch.float32 if windowed else torch.uint8)


def test_beams_move_rows_and_their_scales() -> None:
    words, ours = torch.randint(1, WORDS, (1, 12)), model("llama", "composattn")
    options: dict[str, Any] = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    cache = integration.eight_bit_cache(ours.config)
    found = ours.generate(words, past_key_values=cache, **options)
    wide = integration.eight_bit_cache(ours.config)
    wide.layers = [Rounded() for _ in wide.layers]
    assert torch.equal(found, model("llama", "eager").generate(words, past_key_values=wide, **options))


def test_transformers_own_cache_in_8_bits_is_taken() -> None:
    words = torch.randint(1, WORDS, (1, 24))
    said = [
        logits(model("llama", implementation), QuantizedCache("fp8", model("llama", "eager").config), words)
        for implementation in ("eager", "composattn")
    ]
    torch.testing.assert_close(*said, rtol=1e-3, atol=1e-4)


def test_8_bits_without_their_scale_are_refused() -> None:
    layer = EightBitLayer()
    rows = torch.randn(1, 2, 3, 16)
    layer.update(rows, rows)
    keys, _ = layer.update(rows[:, :, :1], rows[:, :, :1])
    assert as_quantised("key", rows) is rows
    made = as_quantised("key", keys)
    assert isinstance(made, ca.Quantized) and made.data.stride(2) % 16 == 0
    torch.testing.assert_close(made.dequantised(torch.float32)[:, :, :3], rows, rtol=2**-4, atol=1e-2)
    with pytest.raises(errors.UnsupportedOption, match="key has 8 bits and no scale"):
        as_quantised("key", keys.transpose(1, 2))
