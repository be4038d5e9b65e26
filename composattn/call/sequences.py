"""Where the sequences of a call lie: packed one after the other (Varlen), or their keys in pages (Paged).

`Varlen` and `Paged` are what users pass; they are checked without looking at contents, which would wait for the
device. `Sequences` are the tensors of both, as backends and kernels receive them.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any, NamedTuple

import torch

from .. import errors
from ..graph.expr import refuse_lazy
from ..graph.foreign import is_computed
from ..graph.sizes import differ, surely
from ..graph.to_device import on_device
from .checks import at_hand, check_pages, ranges
from .eight_bits import EIGHT_BITS, Quantized, narrowed, scale_for, scale_tensor

SMALLEST_PAGE, LARGEST_PAGE = 16, 256


@dataclasses.dataclass(frozen=True, eq=False)
class Varlen:
    """Sequences of different lengths, packed one after the other with no padding.

    q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv) → out (total_q, Hq, Dv), lse (Hq, total_q) fp32.
    Sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q and cu_seqlens_k[b] to cu_seqlens_k[b + 1] of k and
    v; any of them may be empty. Masks and score mods see b, and positions inside of the sequence.

    cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), on q's device, contiguous: 0 first, then running sums of the lengths,
        the last of them the total. Without `cu_seqlens_k` the keys lie as the queries do.
    seqused_q, seqused_k: int32 (B,): how many rows of each sequence are used, from its first row on. None: all of them
        (if the keys lie as the queries do: as many as of the queries). Rows that no sequence uses get out 0, lse -inf
        and zero gradients, whatever they hold. To pad the total, add a last sequence of the padding, with seqused 0.
    max_seqlen_q, max_seqlen_k: upper bounds of the lengths, if you know them; results never depend on such. One that is
        too small may leave rows out on a GPU: `debug_checks` refuse it.

    New lengths never recompile, and nothing here waits for the device. Kernels don't look at contents; backends in
    PyTorch, which read them anyway, refuse wrong ones, and all do under `composattn.debug_checks(True)`.

    Raises: `NotATensor`, `UnsupportedIndexDType`, `WrongRank`, `ShapeMismatch`, `UnsupportedLayout`, `DeviceMismatch`,
    `InvalidLength`.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor | None = None
    _: dataclasses.KW_ONLY
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    def __post_init__(self) -> None:
        batch = _check_offsets("cu_seqlens_q", self.cu_seqlens_q)
        if self.cu_seqlens_k is not None:
            found = _check_offsets("cu_seqlens_k", self.cu_seqlens_k)
            if differ(found, batch):
                raise errors.ShapeMismatch(
                    f"cu_seqlens_q has {batch + 1} entries, cu_seqlens_k {found + 1}; "
                    "both need one more than there are sequences"
                )
        for name in ("seqused_q", "seqused_k"):
            if getattr(self, name) is not None:
                _check_counts(name, getattr(self, name), batch)
        for name in ("max_seqlen_q", "max_seqlen_k"):
            _check_maximum(name, getattr(self, name))
        _check_one_device(
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_k=self.cu_seqlens_k,
            seqused_q=self.seqused_q,
            seqused_k=self.seqused_k,
        )

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.cu_seqlens_q.shape[0] - 1

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Varlen:
        """A copy on `device`. Raises: `InvalidArgument` for what names no device."""
        given = (self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k)
        cu_q, cu_k, used_q, used_k = on_device(given, device, non_blocking)
        return dataclasses.replace(self, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_q=used_q, seqused_k=used_k)

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """All of it that planning may look at."""
        tensors = (self.cu_seqlens_k, self.seqused_q, self.seqused_k)
        given = tuple(t is not None for t in tensors)
        same = Sequences.of(self, None).keys_lie_as_queries
        return (self.batch, self.cu_seqlens_q.device, given, same, self.max_seqlen_q, self.max_seqlen_k)


@dataclasses.dataclass(frozen=True, eq=False)
class Paged:
    """Keys and values of each sequence in pages of a cache that all sequences share.

    k (num_pages, Hkv, page_size, D), v (num_pages, Hkv, page_size, Dv), any strides with the last dimension
    contiguous: a cache (num_pages, page_size, Hkv, D) passes as cache.transpose(1, 2), uncopied. Position i of sequence
    b is row i % page_size of page page_table[b, i // page_size]. q is dense (B, Hq, Sq, D), or packed with
    `Varlen(cu_seqlens_q)`. Forward only.

    page_table: int32 (B, pages), on q's device, contiguous; entries beyond a sequence's length may hold anything.
    page_size: rows per page, a power of two from 16 to 256.
    seqused: int32 (B,): how many keys each sequence has.

    Contents are checked under `composattn.debug_checks(True)`. Raises: `NotATensor`, `UnsupportedIndexDType`,
    `WrongRank`, `ShapeMismatch`, `EmptyDimension`, `UnsupportedLayout`, `DeviceMismatch`, `UnsupportedPageSize`.

    Source: Kwon et al. 2023, PagedAttention, section 4.
    """

    page_table: torch.Tensor
    page_size: int
    seqused: torch.Tensor

    def __post_init__(self) -> None:
        _check_index("page_table", self.page_table, "(B, pages)", 2)
        if surely(self.page_table.numel() == 0):
            raise errors.EmptyDimension(
                f"page_table has shape {tuple(self.page_table.shape)}; it needs at least one sequence, and one page "
                "(which may be unused)"
            )
        size = self.page_size
        if not isinstance(size, int) or size & (size - 1) or not SMALLEST_PAGE <= size <= LARGEST_PAGE:
            raise errors.UnsupportedPageSize(f"page_size is {size!r}; pages hold 16, 32, 64, 128 or 256 rows")
        _check_counts("seqused", self.seqused, self.batch)
        _check_one_device(page_table=self.page_table, seqused=self.seqused)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.page_table.shape[0]

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Paged:
        """A copy on `device`. Raises: `InvalidArgument` for what names no device."""
        table, used = on_device((self.page_table, self.seqused), device, non_blocking)
        return dataclasses.replace(self, page_table=table, seqused=used)

    def append(
        self,
        k_cache: torch.Tensor | Quantized,
        v_cache: torch.Tensor | Quantized,
        k: torch.Tensor,
        v: torch.Tensor,
        varlen: Varlen | None = None,
    ) -> Paged:
        """Writes new keys and values behind those of each sequence, and gives the pages with as many more in use.

        k_cache (num_pages, Hkv, page_size, D), v_cache (num_pages, Hkv, page_size, Dv), as a call takes them;
        k (B, Hkv, n, D), v (B, Hkv, n, Dv), or packed (total, Hkv, D), (total, Hkv, Dv) where `varlen` says whose.
        `page_table` must have pages for them. On a CPU, and under `composattn.debug_checks(True)`, contents are looked
        at before anything is written. Else, and in compiled code, nothing waits for the device, and torch stops at what
        names no page, also a number below 0, with its own error of an index out of range.

        A cache of 8 bits is a `ca.Quantized`: rows are quantised by its scale, one number or (Hkv,), as it is; or by
        one of each row, (num_pages, Hkv, page_size), which is written beside it, a power of two.

        Raises: `NotATensor`, `UnsupportedLayout` of a lazy parameter and of an expanded cache, `UnsupportedDType` of
        what is no float, `DeviceMismatch`, `ShapeMismatch`, `SequencesMismatch`, `GradientUnsupported` of a cache that
        asks for one, `UnsupportedOption` for `seqused_q` of `varlen` and for a cache with other scales or rotated rows;
        `PageOutOfRange`, `UsedOutOfRange`, `OffsetsOutOfRange`, `OffsetsNotMonotone` where contents are looked at.
        """
        _check_appended((k_cache, v_cache), (k, v), self, varlen)
        used = self.seqused.view(torch.uint32).long()  # one below 0 is beyond all pages, and stopped so
        if varlen is None:
            count = torch.full_like(self.seqused, k.shape[2])
            b = torch.arange(self.batch, device=k.device)[:, None]
            position = used[:, None] + torch.arange(k.shape[2], device=k.device)
        else:
            begins = varlen.cu_seqlens_q
            count, row = begins.diff(), torch.arange(k.shape[0], device=k.device)
            b = torch.searchsorted(begins[1:], row, right=True)
            position = used[b] + row - begins[b]
        parts = [
            part
            for cache, new in ((k_cache, k), (v_cache, v))
            for part in _held_by(cache, new.transpose(1, 2) if varlen is None else new)
        ]
        page = self.page_table[b, position // self.page_size].view(torch.uint32).long()
        for part, held in parts:
            if part.dtype.itemsize == 1:  # float8_e8m0fnu has no writes by index
                part, held = part.view(torch.uint8), held.view(torch.uint8)
            part.transpose(1, 2)[page, position % self.page_size] = held
        return dataclasses.replace(self, seqused=(self.seqused + count).to(torch.int32))

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """All of it that planning may look at."""
        return (self.page_table.shape, self.page_table.device, self.page_size)


class Sequences(NamedTuple):
    """The tensors that say where the sequences of a call lie, each int32 or None; a dense call has none.

    cu_q, cu_k (B + 1,): first rows of packed queries and keys; used_q, used_k (B,): how many of them are used;
    page_table (B, pages): where keys lie in pages (`used_k` is then how many each sequence has).
    """

    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    used_q: torch.Tensor | None = None
    used_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None

    @property
    def is_dense(self) -> bool:
        return self.cu_q is None and self.page_table is None

    @property
    def keys_lie_as_queries(self) -> bool:
        """Whether each packed sequence has as many keys as queries, as one tensor says both."""
        return self.cu_q is not None and self.cu_q is self.cu_k and self.used_q is self.used_k

    @property
    def mirrored(self) -> Sequences:
        """With queries and keys exchanged."""
        return Sequences(self.cu_k, self.cu_q, self.used_k, self.used_q)

    @property
    def queries(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """First rows of packed queries, and how many are used."""
        return self.cu_q, self.used_q

    @property
    def keys(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """First rows of packed keys, and how many are used."""
        return self.cu_k, self.used_k

    @staticmethod
    def of(varlen: Varlen | None, paged: Paged | None) -> Sequences:
        """The tensors of both, what was left out filled in."""
        if varlen is None:
            return NO_SEQUENCES if paged is None else Sequences(used_k=paged.seqused, page_table=paged.page_table)
        if paged is not None:
            return Sequences(varlen.cu_seqlens_q, None, varlen.seqused_q, paged.seqused, paged.page_table)
        if varlen.cu_seqlens_k is not None:
            return Sequences(varlen.cu_seqlens_q, varlen.cu_seqlens_k, varlen.seqused_q, varlen.seqused_k)
        used_k = varlen.seqused_q if varlen.seqused_k is None else varlen.seqused_k
        return Sequences(varlen.cu_seqlens_q, varlen.cu_seqlens_q, varlen.seqused_q, used_k)


NO_SEQUENCES = Sequences()
"""Those of a dense call."""


def rows_in_use(offsets: torch.Tensor, used: torch.Tensor | None, total: int) -> torch.Tensor | None:
    """bool (total,): which of the packed rows a sequence uses, None for all; does not wait for the device."""
    if used is None:
        return None
    row = torch.arange(total, device=offsets.device)
    # of empty sequences the last one that begins here or before, as rows belong to it
    b = torch.searchsorted(offsets[1:], row, right=True).clamp(max=len(used) - 1)
    return row - offsets[b] < used[b]


# --- checks that look at no contents ---------------------------------------------------------------------------


def _check_index(name: str, tensor: Any, shape: str, rank: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise errors.NotATensor(f"{name} is a {type(tensor).__name__}; pass an int32 tensor of shape {shape}")
    refuse_lazy(name, tensor)
    if tensor.dtype is not torch.int32:
        raise errors.UnsupportedIndexDType(f"{name} is {tensor.dtype}; pass {name}.to(torch.int32)")
    if tensor.ndim != rank:
        raise errors.WrongRank(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}")
    if is_computed(tensor):
        raise errors.UnsupportedLayout(
            f"the class {type(tensor).__name__} computes what {name} holds; pass a plain tensor"
        )
    if not tensor.is_contiguous():
        raise errors.UnsupportedLayout(f"{name} has strides {tensor.stride()}; pass {name}.contiguous()")


def _check_offsets(name: str, tensor: Any) -> int:
    """How many sequences `tensor` is for."""
    _check_index(name, tensor, "(B + 1,)", 1)
    if surely(tensor.shape[0] < 2):
        raise errors.ShapeMismatch(
            f"{name} has {tensor.shape[0]} entries; it needs one more than there are sequences, and at least 2"
        )
    return tensor.shape[0] - 1  # type: ignore[no-any-return]


def _held_by(cache: torch.Tensor | Quantized, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of a cache, and what rows (..., Hkv, D) are in each. Raises: `UnsupportedOption`."""
    if not isinstance(cache, Quantized):
        narrow = cache.dtype in EIGHT_BITS
        return [(cache, narrowed(rows.float(), cache.dtype) if narrow else rows.to(cache.dtype))]
    data, scale, rows = cache.data, cache.scale, rows.float()
    if scale is None and cache.mean is None:
        return [(data, narrowed(rows, data.dtype))]
    by = scale_tensor("cache", scale, data.device)
    of_rows = tuple(data.shape[:3])
    if cache.mean is not None or tuple(by.shape) not in ((), (1,), of_rows[1:2], of_rows, (*of_rows, 1)):
        raise errors.UnsupportedOption(
            "append quantises by one scale, (Hkv,) scales, or one of each row, (num_pages, Hkv, page_size), without a "
            f"mean; the cache has {tuple(by.shape) if cache.mean is None else 'a mean'}"
        )
    if not isinstance(scale, torch.Tensor) or scale.ndim < 2:  # a number in the place of a tensor too
        return [(data, narrowed(rows / by.float().view(-1, 1), data.dtype))]
    held = min(torch.finfo(scale.dtype), torch.finfo(torch.float32), key=lambda kind: kind.max)
    own = scale_for(rows.abs().amax(-1, keepdim=True), data.dtype).clamp(held.smallest_normal, held.max)
    own = own.to(scale.dtype)  # rows are divided by what is kept of it
    return [
        (data, narrowed(rows / own.float(), data.dtype)),
        (scale, own if by.ndim == 4 else own.squeeze(-1)),
    ]


def _check_appended(caches: tuple[Any, Any], rows: tuple[Any, Any], paged: Paged, varlen: Varlen | None) -> None:
    """Raises what `Paged.append` does, but for a cache of other scales."""
    if varlen is not None and (not isinstance(varlen, Varlen) or differ(varlen.batch, paged.batch)):
        found = f"is of {varlen.batch} sequences" if isinstance(varlen, Varlen) else f"is a {type(varlen).__name__}"
        raise errors.SequencesMismatch(f"varlen {found}; pass ca.Varlen(cu_seqlens) of {paged.batch} sequences")
    if varlen is not None and varlen.seqused_q is not None:
        raise errors.UnsupportedOption("append takes all packed rows; leave seqused_q out of varlen")
    data = [cache.data if isinstance(cache, Quantized) else cache for cache in caches]
    for name, cache, held, new in zip("kv", caches, data, rows, strict=True):
        for what, t in ((f"{name}_cache", held), (name, new)):
            _check_beside(paged.page_table, what, t)
        _check_rows(name, held, new, paged, varlen is None)
        _check_written(name, cache)
    counts = [x.shape[2 if varlen is None else 0] for x in rows]
    if differ(*counts):
        raise errors.ShapeMismatch(f"k has {counts[0]} new rows, v {counts[1]}; each key needs its value")
    _check_room(paged, varlen, counts[0], min(len(held) for held in data))


def _check_written(name: str, cache: torch.Tensor | Quantized) -> None:
    """Whether rows can be kept in a cache, each in memory of its own, as what they are."""
    tensors = (cache.data, cache.scale) if isinstance(cache, Quantized) else (cache,)
    for t in (t for t in tensors if isinstance(t, torch.Tensor)):
        refuse_lazy(f"{name}_cache", t)
        if any(surely(step == 0) and surely(size > 1) for step, size in zip(t.stride(), t.shape, strict=True)):
            raise errors.UnsupportedLayout(f"{name}_cache was expanded: its pages are one; write to a copy, t.clone()")
        if t.requires_grad and t.is_leaf and torch.is_grad_enabled():
            raise errors.GradientUnsupported(
                f"{name}_cache asks for a gradient, and keys in pages are for inference; call under torch.no_grad()"
            )
    if isinstance(cache, Quantized) and cache.rotated:
        raise errors.UnsupportedOption(
            f"{name}_cache was rotated by ca.quantize, and append writes rows as they are; quantise with "
            f"hadamard=False, or rotate the rows too and give {name}_cache._replace(rotated=False) to append"
        )


def _check_beside(page_table: torch.Tensor, name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise errors.NotATensor(f"{name} is a {type(tensor).__name__}; pass a torch.Tensor")
    refuse_lazy(name, tensor)
    if not tensor.is_floating_point():
        raise errors.UnsupportedDType(f"{name} is {tensor.dtype}; keys and values are floats")
    if tensor.device != page_table.device:
        raise errors.DeviceMismatch(f"{name} is on {tensor.device}, page_table on {page_table.device}")


def _check_room(paged: Paged, varlen: Varlen | None, rows: int, num_pages: int) -> None:
    """Looks whether each sequence has pages for its new rows: of `rows` each, or of as many packed ones."""
    if not at_hand(paged.page_table):
        return
    count = torch.full_like(paged.seqused, rows)
    if varlen is not None:
        count = count.new_tensor([new.stop - new.start for new in ranges("q", varlen.cu_seqlens_q, None, rows)])
    count.masked_fill_(paged.seqused < 0, 0)  # refused as it is
    check_pages(paged.page_table, paged.seqused + count, paged.page_size, num_pages)


def _check_rows(name: str, cache: torch.Tensor, new: torch.Tensor, paged: Paged, heads_first: bool) -> None:
    rank = 4 if heads_first else 3
    if new.ndim != rank or cache.ndim != 4 or cache.shape[2] != paged.page_size:
        raise errors.ShapeMismatch(
            f"{name} has shape {tuple(new.shape)} for pages {tuple(cache.shape)} of {paged.page_size} rows; it must be "
            "(B, Hkv, n, D), or with varlen (total, Hkv, D), the cache (num_pages, Hkv, page_size, D)"
        )
    lead = (paged.batch, cache.shape[1]) if heads_first else (cache.shape[1],)
    found = tuple(new.shape[:2]) if heads_first else (new.shape[1],)
    if found != lead or new.shape[-1] != cache.shape[3]:
        raise errors.ShapeMismatch(
            f"{name} has shape {tuple(new.shape)}; pages {tuple(cache.shape)} of {paged.batch} sequences hold "
            f"{cache.shape[1]} heads of {cache.shape[3]} numbers"
        )


def _check_counts(name: str, tensor: Any, batch: int) -> None:
    _check_index(name, tensor, "(B,)", 1)
    if differ(tensor.shape[0], batch):
        raise errors.ShapeMismatch(f"{name} has {tensor.shape[0]} entries for {batch} sequences; it needs one each")


def _check_maximum(name: str, value: Any) -> None:
    number = isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
    if value is not None and (not number or surely(value < 0)):
        raise errors.InvalidLength(f"{name} is {value!r}; it must be a Python int of at least 0, or None")


def _check_one_device(**tensors: torch.Tensor | None) -> None:
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise errors.DeviceMismatch(f"{places}; move them to q's device")
