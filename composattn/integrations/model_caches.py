"""A cache of transformers in 8 bits, whose rows reach attention as they lie: none is made wide on its way.

    model.generate(..., past_key_values=eight_bit_cache(model.config))

transformers' own (`QuantizedCache(backend="fp8")`) makes all rows wide again in each step, so attention reads 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..call.eight_bits import EIGHT_BITS, Quantized, narrowed, scale_for
from ..errors import UnsupportedOption

E4M3 = torch.float8_e4m3fn
BESIDE = 16  # bytes behind a row, of which its scale has four: rows begin at whole 16 bytes, as bulk copies want them


def eight_bit_cache(config: Any) -> DynamicCache:
    """A cache for a model of this configuration: e4m3, each row by a scale of its own, a power of two.

    Layers with a window, and others that are no plain attention, keep 16 bits. A prompt attends to what it is made of;
    later tokens to what the cache holds.
    """
    cache = DynamicCache(config=config)
    cache.layers = [EightBitLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class EightBitLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of a layer as bytes (B, H, S, D + `BESIDE`): those of a row, and of its scale behind them.

    So what transformers does with rows, as for beams and drafts, it does with both.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds rows (B, H, n, D); gives what the layer attends to, `EightBitStates` from the second time on."""
        first = self.get_seq_length() == 0
        new = _bytes_of(key_states), _bytes_of(value_states)
        if first:
            self.lazy_initialization(*new)
            self.keys, self.values = new
            return key_states, value_states
        self.keys, self.values = (torch.cat(both, -2) for both in zip((self.keys, self.values), new, strict=True))
        return EightBitStates.of(self.keys), EightBitStates.of(self.values)


class EightBitStates(torch.Tensor):
    """Keys or values (B, H, S, D) of 8 bits, on their way to attention; `scale` (B, H, S, 1) is lost in operations."""

    scale: torch.Tensor

    @staticmethod
    def of(held: torch.Tensor) -> EightBitStates:
        """What rows of bytes stand for."""
        dim = held.shape[-1] - BESIDE
        found = held[..., :dim].view(E4M3).as_subclass(EightBitStates)
        found.scale = held[..., dim : dim + 4].view(torch.float32)
        return found


def as_quantised(name: str, states: torch.Tensor) -> torch.Tensor | Quantized:
    """`states` as `ca.attention` takes them. Raises: `UnsupportedOption` for 8 bits that have no scale."""
    if states.dtype not in EIGHT_BITS:
        return states
    scale = getattr(states, "scale", None)
    if scale is None:
        raise UnsupportedOption(
            f"{name} has 8 bits and no scale: the model has changed it behind its cache; give it a cache in 16 bits, "
            'or transformers\' QuantizedCache(backend="fp8")'
        )
    return Quantized(states.as_subclass(torch.Tensor), scale)


def _bytes_of(rows: torch.Tensor) -> torch.Tensor:
    scale = scale_for(rows.abs().amax(-1, keepdim=True), E4M3)
    held = rows.new_zeros((*rows.shape[:-1], rows.shape[-1] + BESIDE), dtype=torch.uint8)
    held[..., : rows.shape[-1]] = narrowed(rows.float() / scale, E4M3).view(torch.uint8)
    held[..., rows.shape[-1] : rows.shape[-1] + 4] = scale.contiguous().view(torch.uint8)
    return held
