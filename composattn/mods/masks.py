"""Ready masks: which keys a query may attend to; every one is a `Mask`, so `& | ~` combine them.

Positions are logical and start at 0 in every sequence; a mask is True where query `q` may attend to key `kv`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import InvalidModArgument
from ..graph.borrowed import capture_of
from ..graph.copies import copy_of
from ..graph.dynamo import is_traced
from ..graph.dynamo_versions import teach_dynamo
from ..graph.expr import const, size
from ..graph.ops import apply
from ..graph.proxies import Proxy
from ..graph.scalar import Scalar
from .arguments import (
    Number,
    aligned,
    choice,
    count_at,
    integer,
    offsets_of,
    refuse_contents_in_a_region,
    sequence,
    shown,
    tensor,
)
from .mask import Mask
from .ready import ready

Window = int | Scalar | torch.Tensor | tuple[Any, Any] | None


def causal(align: str = "top_left") -> Mask:
    """No key after the query: `kv <= q`, or `kv <= q + (Skv - Sq)` with `align="bottom_right"`.

    The two differ only where Sq and Skv do: "top_left" puts query 0 at key 0 (FlexAttention, torch's
    `is_causal`), "bottom_right" puts the last query at the last key (FlashAttention; decoding with a cache).

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.3.

    Raises: `InvalidModArgument` for another `align`.
    """
    if is_traced():
        teach_dynamo()  # nothing is traced here, and `~causal()` may follow
    if align.__class__ is not str or align not in _CAUSAL:
        choice(align, "align", *_CAUSAL)
    return _CAUSAL[align]


def _causal(align: str) -> Mask:
    at = aligned(align)
    return Mask.of(lambda b, h, q, kv: at(q) >= kv, name="causal" if align == "top_left" else f"causal({align})")


_CAUSAL = {align: _causal(align) for align in ("top_left", "bottom_right")}


@ready
def sliding_window(window: Window, align: str = "top_left") -> Mask:
    """Keys near the query: `q - left <= kv <= q + right`, both ends included.

    `window` is `left` alone, which limits the past only (join it with `causal()`), or `(left, right)`; None is
    no limit. Each is an int, a `ca.scalar`, a 0-d int tensor, or an int tensor (H,) with one width per head.
    `left` counts the keys before the query, as FlashAttention does: a window of W tokens that counts the query
    itself (Mistral, transformers) is `sliding_window(W - 1)`. `align` is that of `causal`.

    Source: Child et al. 2019, "Generating Long Sequences with Sparse Transformers", section 4.3; Beltagy et al.
    2020, "Longformer", section 3.1.

    Raises: `InvalidModArgument` for a negative or non-integer width, or another `align`.
    """
    if isinstance(window, list) or (isinstance(window, tuple) and len(window) != 2):
        raise InvalidModArgument(f"window must be left, or a tuple (left, right), got {window!r:.40}")
    left, right = window if isinstance(window, tuple) else (window, None)
    if left is None and right is None:
        raise InvalidModArgument("a window needs at least one end; give left, or (left, right)")
    before = None if left is None else count_at(left, "window (its left)", "H")
    after = None if right is None else count_at(right, "window (its right)", "H")
    at = aligned(align)

    def sliding_window(b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = at(q) - kv
        if before is None:
            return distance >= -after(h)  # type: ignore[misc]
        if after is None:
            return distance <= before(h)
        return (distance <= before(h)) & (distance >= -after(h))

    return Mask.of(sliding_window, name=f"sliding_window({shown(window)})")


@ready
def prefix_lm(prefix: Number) -> Mask:
    """A prefix that all attend to, causal after it: `(kv < prefix) | (kv <= q)`.

    `prefix` is an int, a `ca.scalar`, a 0-d int tensor, or an int tensor (B,) with one prefix per batch entry.

    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", section 3.2.1 and figure 3.

    Raises: `InvalidModArgument` for a negative or non-integer prefix.
    """
    length = count_at(prefix, "prefix", "B")
    return Mask.of(lambda b, h, q, kv: (kv < length(b)) | (q >= kv), name=f"prefix_lm({shown(prefix)})")


@ready
def document(
    ids: torch.Tensor | None = None,
    kv_ids: torch.Tensor | None = None,
    *,
    offsets: torch.Tensor | None = None,
    kv_offsets: torch.Tensor | None = None,
) -> Mask:
    """Attention inside documents packed one after another: both positions belong to the same document.

    By ids: `ids[q] == kv_ids[kv]`; int tensors (S,) shared by the batch, or (B, S). `kv_ids` defaults to `ids`.
    Ids may stand in any order.

    By offsets: `start(q) <= kv < end(q)`, for documents that lie one after the other; int tensor (documents + 1,)
    as `cu_seqlens`: 0, then the end of each document; the last is the length of the sequence. `kv_offsets`
    defaults to `offsets`. Ends are known for each row, so this form gives loop bounds with no further analysis. They
    are those of the time when the mask is made: after a write to `offsets` a call raises `CapturedTensorChanged`.

    Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", section 3.2.

    Raises: `InvalidModArgument` unless exactly one of `ids` and `offsets` is given, for a wrong type or rank, and
    for offsets that don't start with 0 or that fall.
    """
    if (ids is None) == (offsets is None):
        raise InvalidModArgument(
            "document takes either ids or offsets=, and got " + ("none" if ids is None else "both")
        )
    if offsets is not None:
        if kv_ids is not None:
            raise InvalidModArgument("kv_ids goes with ids; with offsets= give kv_offsets=")
        return _document_by_offsets(offsets, offsets if kv_offsets is None else kv_offsets)
    if kv_offsets is not None:
        raise InvalidModArgument("kv_offsets goes with offsets=; with ids give kv_ids")
    of_q = tensor(ids, "ids", "integer", ("S",), ("B", "S"))
    of_kv = of_q if kv_ids is None else tensor(kv_ids, "kv_ids", "integer", ("S",), ("B", "S"))

    def document(b: Any, h: Any, q: Any, kv: Any) -> Any:
        mine = of_q[q] if of_q.ndim == 1 else of_q[b, q]
        return mine == (of_kv[kv] if of_kv.ndim == 1 else of_kv[b, kv])

    return Mask.of(document, name="document")


def _document_by_offsets(offsets: torch.Tensor, kv_offsets: torch.Tensor) -> Mask:
    rows, columns = offsets_of(offsets, "offsets"), offsets_of(kv_offsets, "kv_offsets")
    if len(rows) != len(columns):
        raise InvalidModArgument(f"offsets and kv_offsets describe {len(rows) - 1} and {len(columns) - 1} documents")
    given = ("the offsets", offsets, kv_offsets)
    start, end = (copy_of(_by_row(rows, ends), *given) for ends in (columns[:-1], columns[1:]))
    return Mask.of(lambda b, h, q, kv: (kv >= start[q]) & (kv < end[q]), name="document")


def _by_row(offsets: torch.Tensor, of_document: torch.Tensor) -> torch.Tensor:
    """For each row the value of its document, int32."""
    return of_document.repeat_interleave(offsets[1:] - offsets[:-1]).to(torch.int32)


@ready
def block_diagonal(block: int, kv_block: int | None = None) -> Mask:
    """Blocks along the diagonal: `q // block == kv // kv_block`; `kv_block` defaults to `block`.

    Source: Qiu et al. 2020, "Blockwise Self-Attention for Long Document Understanding", section 3.1 (the identity
    permutation).

    Raises: `InvalidModArgument` for a block below 1.
    """
    rows = integer(block, "block", 1)
    columns = rows if kv_block is None else integer(kv_block, "kv_block", 1)
    return Mask.of(lambda b, h, q, kv: q // rows == kv // columns, name=f"block_diagonal({rows}, {columns})")


@ready
def chunked(size: int, left: int | None = 0) -> Mask:
    """The query's own chunk and `left` chunks before it: `0 <= q // size - kv // size <= left`; None: all before.

    A chunk is visible as a whole. `chunked(size) & causal()` is the chunked attention of Llama 4,
    `chunked(size, left=None)` is block-causal attention.

    Source: Zhang et al. 2020, "Unified Streaming and Non-streaming Two-pass End-to-end Model for Speech
    Recognition" (chunk-based attention).

    Raises: `InvalidModArgument` for a size below 1 or a negative `left`.
    """
    n = integer(size, "size", 1)
    before = None if left is None else integer(left, "left")

    def chunked(b: Any, h: Any, q: Any, kv: Any) -> Any:
        if before == 0:
            return q // n == kv // n
        not_after = kv // n <= q // n
        return not_after if before is None else not_after & (kv // n >= q // n - before)

    return Mask.of(chunked, name=f"chunked({n}, {before})")


@ready
def dilated_window(window: Window, dilation: int) -> Mask:
    """Every `dilation`-th key of a window: `sliding_window(window) & ((q - kv) % dilation == 0)`.

    `window` is measured in positions, as in `sliding_window`.

    Source: Beltagy et al. 2020, "Longformer", section 3.1 (dilated sliding window).

    Raises: `InvalidModArgument` for a dilation below 1, and as `sliding_window`.
    """
    step = integer(dilation, "dilation", 1)
    near = sliding_window(window)
    every = Mask.of(lambda b, h, q, kv: (q - kv) % step == 0)
    return (near & every).named(f"dilated_window({shown(window)}, {step})")


@ready
def global_tokens(tokens: int | Scalar | torch.Tensor, sides: str = "both") -> Mask:
    """Some positions see all and are seen by all: `is_global(q) | is_global(kv)`.

    `tokens` is a count (the first n positions: int or `ca.scalar`), a bool tensor (S,) or (B, S), or an int tensor
    (n,) with the positions, of the time when the mask is made (after a write to it a call raises
    `CapturedTensorChanged`). `sides="keys"` keeps `is_global(kv)` only (seen by all: attention sinks, with
    `| sliding_window(...)`), `sides="queries"` keeps `is_global(q)` only.

    Source: Beltagy et al. 2020, "Longformer", section 3.1 (global attention); Xiao et al. 2023, "Efficient
    Streaming Language Models with Attention Sinks", section 3.2.

    Raises: `InvalidModArgument` for a negative count or position, a wrong type or rank, or another `sides`.
    """
    choice(sides, "sides", "both", "keys", "queries")
    is_global = _membership(tokens)

    def global_tokens(b: Any, h: Any, q: Any, kv: Any) -> Any:
        if sides == "keys":
            return is_global(b, kv)
        if sides == "queries":
            return is_global(b, q)
        return is_global(b, q) | is_global(b, kv)

    return Mask.of(global_tokens, name=f"global_tokens({shown(tokens)})")


def _membership(tokens: Any) -> Any:
    """(b, position) → is it one of `tokens`."""
    if isinstance(tokens, torch.Tensor) and tokens.dtype is torch.bool:
        marked = tensor(tokens, "tokens", "bool", ("S",), ("B", "S"))
        return lambda b, position: marked[position] if marked.ndim == 1 else marked[b, position]
    if isinstance(tokens, torch.Tensor) and tokens.ndim:
        positions = tensor(tokens, "tokens", "integer", ("n",)).to(torch.int64)
        refuse_contents_in_a_region("tokens")
        if bool(((positions < 0) | (positions >= 2**31)).any()):
            raise InvalidModArgument("tokens must be positions of at least 0, and below 2^31")
        # one beyond the last token, where nothing is global
        table = torch.zeros(int(positions.max()) + 2, dtype=torch.bool, device=positions.device)
        table[positions] = True
        table = copy_of(table, "the tokens", tokens)
        last: Any = Proxy(apply("sub", size(capture_of(table), 0), const(1)))
        return lambda b, position: table[torch.minimum(position, last)]
    count = count_at(tokens, "tokens", "n")
    return lambda b, position: position < count(0)


@ready
def padding(lengths: torch.Tensor, q_lengths: torch.Tensor | None = None) -> Mask:
    """Keys that exist: `kv < lengths[b]`, and with `q_lengths` also `q < q_lengths[b]`.

    `lengths` and `q_lengths` are int tensors (B,). `lengths` may also be a bool tensor (B, Skv), True at real
    tokens, for padding on the left or in between. Without `q_lengths` padded queries still get an output.

    Source: Vaswani et al. 2017, "Attention Is All You Need" (as every batched implementation of it).

    Raises: `InvalidModArgument` for a wrong type or rank.
    """
    if isinstance(lengths, torch.Tensor) and lengths.dtype is torch.bool:
        real = tensor(lengths, "lengths", "bool", ("B", "Skv"))
        keys = Mask.of(lambda b, h, q, kv: real[b, kv], name="padding")
    else:
        of_kv = tensor(lengths, "lengths (or bools (B, Skv), True at real tokens)", "integer", ("B",))
        keys = Mask.of(lambda b, h, q, kv: kv < of_kv[b], name="padding")
    if q_lengths is None:
        return keys
    of_q = tensor(q_lengths, "q_lengths", "integer", ("B",))
    return (keys & (lambda b, h, q, kv: q < of_q[b])).named("padding")


@ready
def neighborhood(
    shape: Sequence[int],
    kernel: Sequence[int] | int,
    dilation: Sequence[int] | int = 1,
    is_causal: Sequence[bool] | bool = False,
) -> Mask:
    """The nearest neighbours on a grid: along each axis the `kernel` positions around the query.

    With `shape` = (rows, columns) (one, two or three axes; positions are row-major) and, on an axis of length n,
    query coordinate i, kernel k and dilation d: only coordinates of the query's residue `i % d` count. There are m of
    them, and the query's place among them is `i // d`. Visible are the places `start <= place < start + k` with
    `start = clamp(i // d - k // 2, 0, m - k)`: at an edge the window moves inwards and keeps its k positions. On a
    causal axis visible are `i // d - k < place <= i // d`.

    A call's lengths are not compared with the grid, which may be a part of a longer sequence: what positions beyond it
    see means nothing, so hide them.

    Source: Hassani et al. 2023, "Neighborhood Attention Transformer", section 3.1; dilation: Hassani and Shi 2022,
    "Dilated Neighborhood Attention Transformer", section 3.1; causal axes and even kernels: NATTEN.

    Raises: `InvalidModArgument` for numbers of axes that differ, a number below 1, or kernel * dilation > axis.
    """
    sizes = _per_axis(shape, "shape", None)
    if not 1 <= len(sizes) <= 3:
        raise InvalidModArgument(f"shape must have 1 to 3 axes, got {len(sizes)}")
    kernels, dilations = _per_axis(kernel, "kernel", len(sizes)), _per_axis(dilation, "dilation", len(sizes))
    causals = [is_causal] * len(sizes) if isinstance(is_causal, bool) else sequence(is_causal, "is_causal")
    if len(causals) != len(sizes):
        raise InvalidModArgument(f"is_causal has {len(causals)} axes, shape has {len(sizes)}")
    for n, k, d in zip(sizes, kernels, dilations, strict=True):
        if k * d > n:
            raise InvalidModArgument(f"kernel {k} with dilation {d} does not fit an axis of {n} positions")

    def neighborhood(b: Any, h: Any, q: Any, kv: Any) -> Any:
        visible = None
        inner = functools.reduce(lambda x, y: x * y, sizes)
        for n, k, d, causal_axis in zip(sizes, kernels, dilations, causals, strict=True):
            outer, inner = inner, inner // n
            i, j = _coordinate(q, outer, inner, sizes), _coordinate(kv, outer, inner, sizes)
            axis = _near(i, j, n, k, d, causal_axis)
            visible = axis if visible is None else visible & axis
        return visible

    return Mask.of(neighborhood, name=f"neighborhood({'x'.join(map(str, sizes))}, {'x'.join(map(str, kernels))})")


def _coordinate(position: Any, outer: int, inner: int, sizes: Sequence[int]) -> Any:
    whole = outer == functools.reduce(lambda x, y: x * y, sizes)  # the first axis has nothing above it to strip
    rest = position if whole else position % outer
    return rest if inner == 1 else rest // inner


def _near(i: Any, j: Any, n: int, k: int, d: int, causal_axis: bool) -> Any:
    """Whether coordinate j is visible from i on one axis."""
    place, other = (i, j) if d == 1 else (i // d, j // d)
    if causal_axis:
        near = (other > place - k) & (other <= place)
    else:
        there = n if d == 1 else (n - i % d + d - 1) // d
        start = torch.minimum((place - k // 2).clamp(min=0), there - k + 0 * place)
        near = (other >= start) & (other < start + k)
    return near if d == 1 else near & (i % d == j % d)


def _per_axis(value: Any, name: str, axes: int | None) -> list[int]:
    values = [value] * (axes or 1) if isinstance(value, int) else sequence(value, name)
    if axes is not None and len(values) != axes:
        raise InvalidModArgument(f"{name} has {len(values)} axes, shape has {axes}")
    return [integer(v, name, 1) for v in values]


@ready
def shared_prefix(offsets: torch.Tensor, prefix_of: torch.Tensor | None = None) -> Mask:
    """Packed documents that continue a common prompt, which is stored once.

    Document t of row q spans `[start(q), ...)`; its prefix document spans `[prefix_start(q), prefix_end(q))`. Then
    visible is `(start(q) <= kv <= q) | (prefix_start(q) <= kv < prefix_end(q))`: causal inside each document,
    all of the prefix from every continuation.

    `offsets` is an int tensor (documents + 1,) as in `document`, `prefix_of` an int tensor (documents,): the document
    that precedes each one; a document that names itself has no prefix. Left out, document 0 is the prefix of all
    others. Both are read when the mask is made, as in `document`.

    Source: Juravsky et al. 2024, "Hydragen: High-Throughput LLM Inference with Shared Prefixes", section 3.

    Raises: `InvalidModArgument` for offsets as in `document`, and for `prefix_of` that names no document.
    """
    ends = offsets_of(offsets, "offsets")
    documents = len(ends) - 1
    own = torch.arange(documents, device=ends.device)
    if prefix_of is None:
        prefix = torch.zeros_like(own)
    else:
        prefix = tensor(prefix_of, "prefix_of", "integer", ("documents",)).to(torch.int64)
        if len(prefix) != documents:
            raise InvalidModArgument(f"prefix_of names {len(prefix)} documents, offsets describe {documents}")
        if bool(((prefix < 0) | (prefix >= documents)).any()):
            raise InvalidModArgument(f"prefix_of must name documents 0 to {documents - 1}")
    begins = ends[:-1]
    given = ("the offsets", offsets) if prefix_of is None else ("the offsets or the prefixes", offsets, prefix_of)
    start, prefix_start = (copy_of(_by_row(ends, of), *given) for of in (begins, begins[prefix]))
    # a document that is its own prefix gets an empty interval: no comparison of ids a score
    prefix_end = copy_of(_by_row(ends, torch.where(prefix == own, begins[prefix], ends[1:][prefix])), *given)

    def shared_prefix(b: Any, h: Any, q: Any, kv: Any) -> Any:
        own_past = (kv >= start[q]) & (kv <= q)
        return own_past | ((kv >= prefix_start[q]) & (kv < prefix_end[q]))

    return Mask.of(shared_prefix)
