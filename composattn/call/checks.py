"""Checks of contents (lengths, blocks, what mods read), not only of forms: off unless asked for, as they wait for GPUs.

In use:

    ca.debug_checks(True)                  # from now on, in every thread
    with ca.debug_checks(): attend(...)    # here only
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from types import TracebackType

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .. import errors, settings
from ..analysis.cuda_graphs import refuse_in_graph

are_on = settings.DEBUG_CHECKS


class debug_checks:
    """From now on, or inside `with`, every call checks what its lengths, blocks and indices hold.

    That reads them on the host, which waits for the device; a call that is captured into a CUDA graph can't do it.
    Compiled code checks as well, when it runs.

    Raises then, at the call: `OffsetsNotMonotone`, `OffsetsOutOfRange`, `UsedOutOfRange`, `PageOutOfRange`,
    `MaximumExceeded`, `BlocksOutOfRange`, `InvalidScale` of 8-bit tensors, `CapturedIndexOutOfRange` for a mod that
    reads a captured tensor outside of its shape at a visible pair. All backends but the reference clamp such a read
    without a message.

    Where a score decides what is read, or whether a read is needed, scores are computed for the check, of all tiles of
    128 x 128 that have a visible pair: scale * q·k and what the score mod makes of it, in fp32 (fp64 of fp64 tensors).
    That is slow, and takes the memory of a list of those tiles. A backend that sums in another order may round a score
    to the other side of a bound: the check speaks of the scores that it computed.
    """

    def __init__(self, on: bool = True) -> None:
        global are_on
        check_flag("debug_checks", on)
        self._before, are_on = are_on, on

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global are_on
        are_on = self._before

    def __repr__(self) -> str:
        return f"debug_checks({are_on})"


def check_flag(name: str, value: object) -> None:
    """Raises `UnsupportedOption` unless `value` is True or False."""
    if not isinstance(value, bool | torch.SymBool):
        raise errors.UnsupportedOption(f"{name} is {value!r:.40}; it must be True or False")


_ELSEWHERE = {
    "is_causal": "write mask_mod=composattn.mods.causal()",
    "attn_mask": "write mask_mod=lambda b, h, q, kv: mask[b, h, q, kv], of floats score_mod=composattn.mods.bias(mask)",
    "block_mask": "call composattn.flex_attention, or write mask_mod=composattn.BlockSparse.from_block_mask(...)",
    "enable_gqa": "heads are shared wherever k has fewer than q; leave it out",
    "window_size": "write mask_mod=composattn.mods.sliding_window(...)",
    "sliding_window": "write mask_mod=composattn.mods.sliding_window(...)",
    "attn_bias": "write score_mod=composattn.mods.bias(...)",
    "bias": "write score_mod=composattn.mods.bias(...)",
    "softcap": "write score_mod=composattn.mods.softcap(...)",
    "alibi_slopes": "write score_mod=composattn.mods.alibi(slopes)",
    "softmax_scale": "it is called scale here",
    "sm_scale": "it is called scale here",
    "s_aux": "it is called sinks here",
    "learnable_sink": "it is called sinks here",
    "cache_seqlens": "write mask_mod=lambda b, h, q, kv: kv < lengths[b], or with pages paged=composattn.Paged(...)",
    "causal": "write mask_mod=composattn.mods.causal()",
    "cu_seqlens": "write varlen=composattn.Varlen(cu_seqlens)",
    "cu_seqlens_q": "write varlen=composattn.Varlen(cu_seqlens_q, cu_seqlens_k)",
    "max_seqlen_q": "write varlen=composattn.Varlen(cu_seqlens_q, cu_seqlens_k), which needs no largest length",
    "page_table": "write paged=composattn.Paged(page_table, page_size, seqused)",
    "block_table": "write paged=composattn.Paged(block_table, page_size, seqused)",
    "q_descale": "it is called q_scale here",
    "k_descale": "it is called k_scale here",
    "v_descale": "it is called v_scale here",
    "return_weights": "weights are never formed; composattn.attention_weights gives those of some rows",
    "need_weights": "weights are never formed; composattn.attention_weights gives those of some rows",
    "key_padding_mask": "write mask_mod=composattn.mods.padding(real), of bools (B, Skv) that are True at real tokens",
    "return_attn_probs": "weights are never formed; write return_lse=True for the LSE that comes with them",
    "return_aux": "write return_lse=True, or call composattn.flex_attention",
    "kernel_options": "write schedule=composattn.Schedule(...)",
}
_MADE_WITH = (
    "score_mod", "mask_mod", "sinks", "dropout_p", "dropout_seed", "scale", "backend", "deterministic", "schedule",
)  # fmt: skip
_ELSEWHERE |= {name: f"an Attention is made with it: composattn.Attention({name}=...)" for name in _MADE_WITH}
_CALLED_WITH = (
    "return_lse", "return_max_scores", "varlen", "paged", "context_parallel", "q_scale", "k_scale", "v_scale",
    "out_dtype",
)  # fmt: skip
_ELSEWHERE |= {name: f"it belongs to the call: composattn.Attention(...)(q, k, v, {name}=...)" for name in _CALLED_WITH}


OF_MODULES = {f"{name}_scale": f"pass {name} as composattn.Quantized({name}, {name}_scale)" for name in "qkv"} | {
    "out_dtype": "out of a q of 8 bits is bf16 here; composattn.attention takes out_dtype",
    "context_parallel": "call the module inside of `with cp:`, after cp.plan(module, seq_len)",
    "dropout_seed": "torch.manual_seed repeats what is dropped; composattn.attention takes dropout_seed",
}
"""What a `composattn.nn.Attention` does not take, and other calls do."""


def refuse_arguments(
    surplus: Sequence[object], unknown: Iterable[str], elsewhere: Mapping[str, str] = _ELSEWHERE
) -> None:
    """Raises `UnnamedArgument` for what stands behind q, k and v, `UnknownKeyword` for a name that is no argument.

    elsewhere: names, and what to write instead; those that it has not are looked for among all.
    """
    if surplus:
        raise errors.UnnamedArgument(
            f"an argument of type {type(surplus[0]).__name__} has no name here; only q, k and v of a call have none: "
            "write mask_mod=..., score_mod=..., scale=..."
        )
    for name in unknown:
        near = difflib.get_close_matches(name, (*_MADE_WITH, *_CALLED_WITH), 1)
        instead = elsewhere.get(name) or _ELSEWHERE.get(name)
        instead = instead or (f"was {near[0]} meant?" if near else "see help(composattn.attention)")
        raise errors.UnknownKeyword(f"attention has no argument {name!r} here; {instead}")


def refuse_capture() -> None:
    """Raises `GraphUnsupported` where a CUDA graph records: a replay would look at nothing."""
    refuse_in_graph("debug_checks look at what lengths, blocks and indices hold", "switch them off for the capture")


def at_hand(tensor: torch.Tensor) -> bool:
    """Whether to look at what `tensor` holds: on a CPU that costs little, elsewhere `debug_checks` ask for it."""
    if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):
        return False
    if are_on:
        refuse_capture()
    return are_on or tensor.device.type == "cpu"


def check_offsets(name: str, offsets: torch.Tensor, of: str, total: int | None) -> list[int]:
    """The lengths that `offsets` say, of `total` rows if given."""
    at = offsets.tolist()
    if at[0] != 0:
        raise errors.OffsetsOutOfRange(f"{name} begins with {at[0]}; it must begin with 0: the running sums of lengths")
    lengths = [end - start for start, end in pairwise(at)]
    for b, length in enumerate(lengths):
        if length < 0:
            raise errors.OffsetsNotMonotone(
                f"{name} falls from {at[b]} to {at[b + 1]} at sequence {b}; it must be the running sums of lengths"
            )
    if total is not None and at[-1] != total:
        raise errors.OffsetsOutOfRange(
            f"{name} ends with {at[-1]}, and {of} has {total} rows; to leave rows out, let a last sequence have them, "
            "with seqused 0"
        )
    return lengths


def ranges(of: str, offsets: torch.Tensor, used: torch.Tensor | None, total: int | None) -> list[slice]:
    """The rows of q or k (`of`) that each sequence uses, of `total` if given; waits for the device.

    Raises: `OffsetsNotMonotone`, `OffsetsOutOfRange`, `UsedOutOfRange`.
    """
    lengths = check_offsets(f"cu_seqlens_{of}", offsets, of, total)
    counts = check_used(f"seqused_{of}", used, lengths)
    return [slice(start, start + count) for start, count in zip(accumulate(lengths, initial=0), counts, strict=False)]


def check_used(name: str, used: torch.Tensor | None, lengths: list[int]) -> list[int]:
    """How many rows of each sequence are used."""
    if used is None:
        return lengths
    counts: list[int] = used.tolist()
    for b, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        if not 0 <= count <= length:
            raise errors.UsedOutOfRange(f"{name} is {count} for sequence {b}, which has room for {length}")
    return counts


def check_maximum(name: str, maximum: int | None, lengths: list[int]) -> None:
    if maximum is not None and max(lengths) > maximum:
        raise errors.MaximumExceeded(
            f"{name} is {maximum}, and sequence {lengths.index(max(lengths))} has {max(lengths)}; leave it out, or "
            "give an upper bound"
        )


def check_pages(page_table: torch.Tensor, seqused: torch.Tensor, page_size: int, num_pages: int) -> None:
    """Looks whether all pages that hold keys are there, which waits for the device.

    Raises: `UsedOutOfRange`, `PageOutOfRange`.
    """
    table: list[list[int]] = page_table.tolist()
    room = len(table[0]) * page_size
    counts = check_used("seqused", seqused, [room] * len(table))
    for b, (row, count) in enumerate(zip(table, counts, strict=True)):
        for i, page in enumerate(row[: -(-count // page_size)]):
            if not 0 <= page < num_pages:
                raise errors.PageOutOfRange(
                    f"page_table[{b}, {i}] is {page}, and there are {num_pages} pages; entries up to "
                    f"ceil(seqused / {page_size}) must be pages of the cache"
                )
