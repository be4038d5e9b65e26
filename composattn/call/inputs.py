"""What one call is given, q, k and v and where their sequences lie, as one value; and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import torch

from ..errors import SequencesMismatch
from ..graph.expr import has_no_shape
from ..graph.foreign import in_memory
from ..graph.sizes import surely
from .eight_bits import EIGHT_BITS
from .sequences import Paged, Sequences, Varlen


class Asked(NamedTuple):
    """What a call returns besides its output."""

    lse: bool
    max_scores: bool


OUT_ALONE = Asked(False, False)
Outputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # out, lse, max_scores


LENGTHS, HINTS = 6, 3  # tensors and numbers that `Inputs.flatten` gives; other numbers may follow


def say_dense(tensors: Sequence[torch.Tensor | None], numbers: Sequence[int]) -> bool:
    """Whether these are what `Inputs.flatten` gives of dense calls, and nothing behind it."""
    return len(numbers) == HINTS and [t is None for t in tensors] == [True] * LENGTHS


class InputOptions(TypedDict, total=False):
    """The keywords of a call that say where its sequences lie, and what tensors of 8 bits are multiplied by."""

    varlen: Varlen | None
    paged: Paged | None
    q_scale: torch.Tensor | float | None
    k_scale: torch.Tensor | float | None
    v_scale: torch.Tensor | float | None
    out_dtype: torch.dtype | None


class Inputs(NamedTuple):
    """The tensors of a call, dense, packed (`varlen`) or with keys in pages (`paged`); see `Problem` for shapes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    varlen: Varlen | None = None
    paged: Paged | None = None

    @property
    def sequences(self) -> Sequences:
        """The tensors that say where the sequences lie."""
        return Sequences.of(self.varlen, self.paged)

    @property
    def form(self) -> tuple[Any, ...]:
        """All that planning may look at; what a prepared call is remembered by."""
        q, k, v, _, _ = self
        return (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
            q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, q.__class__, k.__class__, v.__class__,
            self.lie,
        )  # fmt: skip

    @property
    def lie(self) -> Any:
        """All that planning may look at of where the sequences lie; None of dense ones."""
        _, _, _, varlen, paged = self
        if varlen is None and paged is None:
            return None
        try:
            return None if varlen is None else varlen.form, None if paged is None else paged.form
        except AttributeError:
            return object()  # equal to nothing: refused by name where it is looked at

    @property
    def autocast(self) -> Inputs:
        """Under autocast with q, k and v in its type, as `scaled_dot_product_attention` takes them; 8 bits stay."""
        if not torch._C._is_any_autocast_enabled():
            return self
        kind = getattr(getattr(self.q, "device", None), "type", None)
        if kind is None or not torch.is_autocast_enabled(kind):
            return self
        dtype = torch.get_autocast_dtype(kind)
        wide = torch.float64
        kept = wide, *EIGHT_BITS
        q, k, v = (t.to(dtype) if t.is_floating_point() and t.dtype not in kept else t for t in self[:3])
        return Inputs(q, k, v, self.varlen, self.paged)

    @property
    def resolved(self) -> Inputs:
        """With q, k and v `in_memory`."""
        if not all(isinstance(t, torch.Tensor) and not has_no_shape(t) for t in self[:3]):
            return self
        q, k, v = (in_memory(t) for t in self[:3])
        return Inputs(q, k, v, self.varlen, self.paged)

    def flatten(self) -> tuple[list[torch.Tensor | None], list[int]]:
        """Where the sequences lie, as tensors and numbers, as an operator takes them."""
        v, p = self.varlen, self.paged
        packed = (None,) * 4 if v is None else (v.cu_seqlens_q, v.cu_seqlens_k, v.seqused_q, v.seqused_k)
        maxima = (None, None) if v is None else (v.max_seqlen_q, v.max_seqlen_k)
        paging = (None, None) if p is None else (p.page_table, p.seqused)
        return [*packed, *paging], [*(-1 if m is None else m for m in maxima), 0 if p is None else p.page_size]

    @staticmethod
    def unflatten(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[torch.Tensor | None], hints: Sequence[int]
    ) -> Inputs:
        """The inputs of an operator, with what `flatten` gave; more hints may follow.

        Raises: `SequencesMismatch` for fewer, which a direct call of the operator may pass.
        """
        if len(lengths) != LENGTHS or len(hints) < HINTS:
            raise SequencesMismatch(
                f"the operator takes {LENGTHS} tensors of lengths and {HINTS} numbers, got {len(lengths)} and "
                f"{len(hints)}; call an Attention, which calls it"
            )
        cu_q, cu_k, used_q, used_k, table, used = lengths
        if cu_q is None and table is None:
            return Inputs(q, k, v)
        max_q, max_k = (None if surely(m < 0) else m for m in hints[:2])
        varlen, paged = None, None
        if cu_q is not None:
            varlen = Varlen(cu_q, cu_k, seqused_q=used_q, seqused_k=used_k, max_seqlen_q=max_q, max_seqlen_k=max_k)
        if table is not None and used is not None:
            paged = Paged(table, int(hints[2]), used)
        return Inputs(q, k, v, varlen, paged)
