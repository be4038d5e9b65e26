"""What each generated kernel is called with: names, order and form of its arguments.

A record of the kernel's arguments holds `TensorForm`s and `NumberForm`s where a plan describes them (`of`), what stands
for those where the kernel is compiled (`fake`), torch's tensors where it is launched, and the DSL's inside of its host
function. None is what the plan has not. The kernel itself takes a record's fields one by one, as TVM FFI passes tensors
faster than tuples of them, and by position: a call by name takes another 0.3 µs, a record made by name 0.7. Each kernel
is called in one place, with variables named as the fields are, which `tests/cpu/test_arguments.py` compares.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import torch

from ....call.problem import Layout
from ....call.sequences import Sequences
from ....graph.expr import DType
from ....primitives.segment_entry import WIDE
from .plan import CombinePlan, ForwardPlan, TiledPlan
from .plan_around import DequantisePlan, QuantisePlan, UnitsPlan
from .plan_backward import BackwardPlan, GatherPlan, PostprocessPlan, PreprocessPlan


@dataclasses.dataclass(frozen=True)
class TensorForm:
    """A tensor as a kernel is compiled for: its dtype, rank, and what is known of sizes, strides and address.

    `sizes`: a number, or a name that all sizes have which are equal at each call; "" has no equals. `strides`: all
    "dense" (contiguous), "any", or a number: the last one is 1 and the others are multiples of it. `align`: bytes that
    the address is a multiple of, None: of an element. `long`: sizes need 64 bits.
    """

    dtype: torch.dtype
    sizes: tuple[str | int, ...]
    strides: int | Literal["dense", "any"] = "dense"
    align: int | None = None
    long: bool = False


@dataclasses.dataclass(frozen=True)
class NumberForm:
    """A number that is given at each call."""

    dtype: DType


Form = TensorForm | NumberForm | tuple[Any, ...] | None
SCALE = NumberForm(DType.FLOAT)


class ForwardArguments(NamedTuple):
    """Arguments of a forward kernel; see `composattn.backends.fused.kernels.forward` for parts of a split."""

    q: Any  # (B, Hq, Sq, D), or packed (total, Hq, D)
    k: Any  # (B, Hkv, Skv, D), or packed, or pages (pages, Hkv, page_size, D)
    v: Any  # (B, Hkv, Skv, Dv), likewise
    out: Any  # (B, Hq, Sq, Dv), or packed; or fp32 parts (splits, B, Hq, Sq, Dv), packed (splits, Hq, total, Dv)
    lse: Any  # (B, Hq, Sq) fp32, or packed (Hq, total); or of parts
    max_scores: Any  # as lse
    scale: Any
    sequences: Any  # `Sequences`: where packed rows lie, or pages
    work: Any  # (tiles, 2) int32: b and m of each query tile, in their order; see `primitives.tile_scheduler`
    captured: Any  # tuple of the tensors that mods read, and lists of tiles
    scalars: Any  # tuple of the run-time numbers that mods read
    counter: Any = None  # (1,) int32, zero: from which blocks draw their tiles, then flags of shares; see `counter`
    left: Any = None  # (blocks * numbers,) fp32: what shares leave, see `composattn.primitives.stream_k`

    @staticmethod
    def of(plan: ForwardPlan) -> ForwardArguments:
        types, layout = plan.types, plan.layout
        rows = ("heads", "q_len") if layout.q == "packed" else ("batch", "heads", "q_len")
        parts = ("splits", *rows) if plan.is_split else rows
        statistic = TensorForm(torch.float32, parts, 1, align=4)
        return ForwardArguments(
            q=_rows(types.q, layout.q, "heads", "q_len", plan.head_dim),
            k=_rows(types.k, layout.kv, "kv_heads", "kv_len", plan.head_dim),
            v=_rows(types.v, layout.kv, "kv_heads", "kv_len", plan.head_dim_v),
            out=TensorForm(torch.float32, (*parts, plan.head_dim_v), 8, align=16)
            if plan.is_split
            else _rows(types.out, layout.q, "heads", "q_len", plan.head_dim_v),
            lse=statistic if plan.return_lse or plan.is_split else None,
            max_scores=statistic if plan.return_max_scores else None,
            scale=SCALE,
            sequences=_sequences(layout),
            work=_work(plan),
            captured=_captured(plan),
            scalars=_scalars(plan),
            counter=TensorForm(torch.int32, (plan.counters,)) if plan.counts else None,
            left=WORKSPACE if plan.tiling.scheduler.shares else None,
        )


class CombineArguments(NamedTuple):
    """Arguments of the kernel that combines partial outputs."""

    parts: Any  # (splits, B, Hq, Sq, Dv) fp32, each normalised by itself
    part_lse: Any  # (splits, B, Hq, Sq) fp32
    out: Any  # (B, Hq, Sq, Dv)
    lse: Any  # (B, Hq, Sq) fp32

    @staticmethod
    def of(plan: CombinePlan) -> CombineArguments:
        rows = ("batch", "heads", "q_len")
        return CombineArguments(
            parts=TensorForm(torch.float32, ("splits", *rows, plan.head_dim_v), 4, align=16),
            part_lse=TensorForm(torch.float32, ("splits", *rows), 1, align=16),
            out=TensorForm(plan.dtype, (*rows, plan.head_dim_v), 8, align=16),
            lse=TensorForm(torch.float32, rows, 1, align=16) if plan.return_lse else None,
        )


class SinkArguments(NamedTuple):
    """Arguments of preprocess and postprocess where sinks have a gradient; see `kernels.around.sink_sums`."""

    sinks: Any  # (Hq,) as captured, or fp32 (B * Hq,) where each sequence has its own
    workspace: Any  # as of `MainArguments`, with a share of each block of the preprocess behind all else
    gradient: Any  # like sinks


class PreprocessArguments(NamedTuple):
    """Arguments of the preprocess kernel: statistics of rows, an empty sum of dQ."""

    out: Any  # (B, Hq, Sq, Dv), packed (total, Hq, Dv)
    dout: Any  # (B, Hq, Sq, Dv), packed (total, Hq, Dv)
    lse: Any  # (B, Hq, Sq) fp32, packed (Hq, total)
    dlse: Any  # (B, Hq, Sq) fp32, packed (Hq, total)
    workspace: Any  # as of `MainArguments`
    dq_accum: Any  # (B, Hq, tiles, tile_m * d) fp32
    sequences: Any  # `Sequences`: where packed rows lie
    query_tiles: Any  # (tiles, 2) int32: b (-1: nothing) and number of each tile of packed queries
    sinks: Any  # `SinkArguments`
    keys: Any  # dk of `MainArguments`, where strips of an image share it: of what shape it is

    @staticmethod
    def of(plan: PreprocessPlan) -> PreprocessArguments:
        of_rows = ("batch", "heads", "q_len") if plan.layout.is_dense else ("heads", "q_len")
        statistic = TensorForm(torch.float32, of_rows, "any")
        rows = _rows(plan.dtype, plan.layout.q, "heads", "q_len", plan.head_dim_v)
        return PreprocessArguments(
            out=rows,
            dout=rows,
            lse=statistic,
            dlse=statistic if plan.has_dlse else None,
            workspace=WORKSPACE,
            dq_accum=_dq_accum(plan),
            sequences=_sequences(plan.layout),
            query_tiles=_work(plan),
            sinks=_sinks(plan),
            keys=_keys(plan, plan.head_dim) if plan.layout.shares_keys else None,
        )


class MainArguments(NamedTuple):
    """Arguments of the kernel that computes dK and dV, and adds up dQ."""

    q: Any  # (B, Hq, Sq, D), packed (total, Hq, D); those that follow alike
    k: Any  # (B, Hkv, Skv, D)
    v: Any  # (B, Hkv, Skv, Dv)
    dout: Any  # (B, Hq, Sq, Dv)
    workspace: Any  # fp32: a counter, zero; (2, B, Hq, rows): LSE in log2 units, D; see `primitives.padded_tiles`
    dq_accum: Any  # (B, Hq, tiles, tile_m * d) fp32, in the order of the product's registers
    dk: Any  # (B, Hkv, Skv, D)
    dv: Any  # (B, Hkv, Skv, Dv)
    pieces: Any  # of tiles that are cut: `PiecesArguments`
    turns: Any  # (B, Hq, tiles * sharing) int32, zeros: how many have added to a tile of dQ, or a block's part
    scale: Any
    sequences: Any  # `Sequences`: where packed rows lie
    key_tiles: Any  # (tiles, 2) int32: b and n of each tile of keys, in their order; see `primitives.tile_scheduler`
    captured: Any  # tuple of the tensors that mods and loop bounds read, and lists of tiles
    scalars: Any  # tuple of the run-time numbers that mods read
    finished: Any = None  # dq (B, Hq, Sq, D), where no postprocess writes it

    @staticmethod
    def of(plan: BackwardPlan) -> MainArguments:
        dtype, layout = plan.dtype, plan.layout
        return MainArguments(
            q=_rows(dtype, layout.q, "heads", "q_len", plan.head_dim),
            k=_rows(dtype, layout.kv, "kv_heads", "kv_len", plan.head_dim),
            v=_rows(dtype, layout.kv, "kv_heads", "kv_len", plan.head_dim_v),
            dout=_rows(dtype, layout.q, "heads", "q_len", plan.head_dim_v),
            workspace=WORKSPACE,
            dq_accum=_dq_accum(plan),
            dk=_keys(plan, plan.head_dim),
            dv=_keys(plan, plan.head_dim_v),
            pieces=PIECES if plan.in_pieces else None,
            turns=TensorForm(torch.int32, (_entries(plan), "heads", "turns"), 1, align=4)
            if plan.deterministic
            else None,
            scale=SCALE,
            sequences=_sequences(layout),
            key_tiles=_work(plan),
            captured=_captured(plan),
            scalars=_scalars(plan),
            finished=_rows(dtype, layout.q, "heads", "q_len", plan.head_dim) if plan.tiling.finishes_dq else None,
        )


class PiecesArguments(NamedTuple):
    """How tiles of keys are cut; see `composattn.primitives.pieces`."""

    workspace: Any  # (cut * (pieces * tile_n * (d + dv) + 4),) fp32: sums of pieces, and whose they are
    whole: Any  # how many tiles are whole
    cut: Any  # how many are cut
    pieces: Any  # of each


class PostprocessArguments(NamedTuple):
    """Arguments of the postprocess kernel, which scales and rounds dQ."""

    dq_accum: Any  # (B, Hq, tiles, tile_m * d) fp32, in the order of the product's registers
    dq: Any  # (B, Hq, Sq, D), packed (total, Hq, D)
    scale: Any
    sequences: Any  # `Sequences`: where packed rows lie
    query_tiles: Any  # as of `PreprocessArguments`
    sinks: Any  # `SinkArguments`

    @staticmethod
    def of(plan: PostprocessPlan) -> PostprocessArguments:
        return PostprocessArguments(
            dq_accum=_dq_accum(plan),
            dq=_rows(plan.dtype, plan.layout.q, "heads", "q_len", plan.head_dim),
            scale=SCALE,
            sequences=_sequences(plan.layout),
            query_tiles=_work(plan),
            sinks=_sinks(plan),
        )


class QuantisedTensor(NamedTuple):
    """One of q, k and v in the kernels of `ca.quantize`."""

    given: Any  # (B, H, S, D), 16 bits
    largest: Any  # (B, H, 1) int32: bits of the largest number of each head, which is never below 0
    data: Any  # (B, H, S, D), as bytes
    scale: Any  # (B, H, 1, 1), (B, H, blocks, 1) or (B, H, S, 1) fp32

    @staticmethod
    def of(plan: QuantisePlan, name: str, head_dim: int) -> QuantisedTensor:
        rows = ("batch", f"{name}_heads", f"{name}_rows")
        scales = ("batch", f"{name}_heads", f"{name}_rows" if plan.scale == "token" else f"{name}_scales")
        writes = not plan.finds_largest
        return QuantisedTensor(
            given=TensorForm(plan.dtype, (*rows, head_dim), 8, align=16),
            largest=TensorForm(torch.int32, (*rows[:2], 1), 1) if plan.scale == "head" else None,
            data=TensorForm(torch.uint8, (*rows, head_dim), 8, align=8) if writes else None,
            scale=TensorForm(torch.float32, (*scales, 1), 1) if writes else None,
        )


class QuantiseArguments(NamedTuple):
    """Arguments of the kernels of `ca.quantize`."""

    q: Any  # `QuantisedTensor`, as are k and v
    k: Any
    v: Any
    mean: Any  # (B, Hkv, 1, D) fp32, taken from k
    turned_mean: Any  # likewise, rotated as k is

    @staticmethod
    def of(plan: QuantisePlan) -> QuantiseArguments:
        mean = TensorForm(torch.float32, ("batch", "k_heads", 1, plan.head_dim), 4, align=16)
        return QuantiseArguments(
            q=QuantisedTensor.of(plan, "q", plan.head_dim),
            k=QuantisedTensor.of(plan, "k", plan.head_dim),
            v=QuantisedTensor.of(plan, "v", plan.head_dim_v),
            mean=mean if plan.center else None,
            turned_mean=mean if plan.center and plan.hadamard and not plan.finds_largest else None,
        )


class DequantiseArguments(NamedTuple):
    """Arguments of the kernel that makes 16-bit numbers of k and v, which have no gaps in memory."""

    k: Any  # (B, Hkv, Skv, D), or packed, 8 bits
    v: Any  # (B, Hkv, Skv, Dv), or packed, 8 bits
    wide_k: Any  # as k, 16 bits, in the same order in memory
    wide_v: Any  # as v, likewise

    @staticmethod
    def of(plan: DequantisePlan) -> DequantiseArguments:
        def numbers(dtype: torch.dtype, align: int) -> TensorForm:
            return TensorForm(dtype, ("",) * plan.rank, "any", align=align)

        return DequantiseArguments(
            k=numbers(plan.of_keys, 8),
            v=numbers(plan.of_values, 8),
            wide_k=numbers(plan.dtype, 16),
            wide_v=numbers(plan.dtype, 16),
        )


class GatherArguments(NamedTuple):
    """Arguments of the kernel that adds up dK and dV of tiles that were split."""

    pieces: Any  # `PiecesArguments`
    dk: Any  # (B, Hkv, Skv, D)
    dv: Any  # (B, Hkv, Skv, Dv)
    sequences: Any  # `Sequences`: where packed rows lie

    @staticmethod
    def of(plan: GatherPlan) -> GatherArguments:
        return GatherArguments(
            pieces=PIECES,
            dk=_keys(plan, plan.head_dim),
            dv=_keys(plan, plan.head_dim_v),
            sequences=_sequences(plan.layout),
        )


class UnitsArguments(NamedTuple):
    """Arguments of the kernel that finds units for sums of gradients of captured tensors."""

    dout: Any  # (B, Hq, Sq, Dv), packed (total, Hq, Dv)
    v: Any  # (B, Hkv, Skv, Dv), packed (total, Hkv, Dv)
    dlse: Any  # (B, Hq, Sq) fp32, packed (Hq, total)
    rows_in_use: Any  # of packed queries where some may be unused: (B + 1,) first rows, (B,) how many are used; int32
    keys_in_use: Any  # likewise
    found: Any  # (4,) int32, zeros: bits of maxima, and how many blocks have ended
    bounds: Any  # a number for each sum: how many times the largest |dP - D| it may be
    units: Any  # (sums,) fp32: units in 1, powers of two; NaN where a sum may not be finite

    @staticmethod
    def of(plan: UnitsPlan) -> UnitsArguments:
        lie = "dense" if plan.is_dense else "packed"
        of_rows = ("batch", "heads", "q_len") if plan.is_dense else ("heads", "q_len")
        numbers = TensorForm(torch.int32, ("",))
        return UnitsArguments(
            dout=_rows(plan.dtype, lie, "heads", "q_len", plan.head_dim_v),
            v=_rows(plan.dtype, lie, "kv_heads", "kv_len", plan.head_dim_v),
            dlse=TensorForm(torch.float32, of_rows, "any") if plan.has_dlse else None,
            rows_in_use=(numbers, numbers) if plan.used_q else None,
            keys_in_use=(numbers, numbers) if plan.used_kv else None,
            found=TensorForm(torch.int32, (4,)),
            bounds=(NumberForm(DType.FLOAT),) * plan.sums,
            units=TensorForm(torch.float32, (plan.sums,)),
        )


# --- forms that several kernels take --------------------------------------------------------------------------

WORKSPACE = TensorForm(torch.float32, ("",), align=16, long=True)


def _rows(dtype: torch.dtype, lie: str, heads: str, length: str, d: int) -> TensorForm:
    """q, k, v or a tensor like them: bulk copies take 16-byte aligned rows, strides of whole 16 bytes."""
    shapes = {
        "dense": ("batch", heads, length, d),
        "packed": (length, heads, d),
        "paged": ("pages", heads, length, d),
    }
    return TensorForm(dtype, shapes[lie], 16 // dtype.itemsize, align=16)


def _keys(plan: TiledPlan, d: int) -> TensorForm:
    """k, v, or a tensor like them."""
    return _rows(plan.dtype, plan.layout.kv, "kv_heads", "kv_len", d)


def _entries(plan: TiledPlan) -> str:
    """Size of a workspace's first mode; see `composattn.primitives.padded_tiles`."""
    return "batch" if plan.layout.is_dense and plan.layout.strips is None else "entries"


def _dq_accum(plan: TiledPlan) -> TensorForm:
    t = plan.tiling
    return TensorForm(torch.float32, (_entries(plan), "heads", "tiles", t.tile_m * t.d), 4, align=16)


PIECES = PiecesArguments(WORKSPACE, NumberForm(DType.INT32), NumberForm(DType.INT32), NumberForm(DType.INT32))


def _sinks(plan: PreprocessPlan | PostprocessPlan) -> SinkArguments | None:
    if plan.sinks is None:
        return None
    sinks = TensorForm(plan.sinks.dtype, ("sinks",), "any")
    return SinkArguments(sinks, WORKSPACE, sinks)


def _sequences(layout: Layout) -> Sequences | None:
    """Forms of the sequences that the layout says there are; None for a dense call."""
    if layout.is_dense:
        return None
    numbers: Any = TensorForm(torch.int32, ("",))
    pages: Any = TensorForm(torch.int32, ("", ""), 1)
    return Sequences(
        cu_q=numbers if layout.q == "packed" else None,
        cu_k=numbers if layout.kv == "packed" else None,
        used_q=numbers if layout.used_q else None,
        used_k=numbers if layout.used_kv else None,
        page_table=pages if layout.kv == "paged" else None,
    )


def _work(plan: TiledPlan) -> TensorForm | None:
    """A table of the order of tiles, see `composattn.backends.fused.tiles.work`."""
    return _table(plan.has_segments, plan.has_order_table, plan.metadata_numbers)


def _table(has_segments: bool, is_there: bool, metadata_numbers: int = 0) -> TensorForm | None:
    if has_segments:
        return TensorForm(torch.int32, ("", WIDE + metadata_numbers), align=4 if metadata_numbers else 8)
    return TensorForm(torch.int32, ("", 2), align=8) if is_there else None


def _captured(plan: ForwardPlan | BackwardPlan) -> tuple[TensorForm, ...] | None:
    # a 0-d tensor comes as one element
    return tuple(TensorForm(dtype, ("",) * max(rank, 1), "any") for dtype, rank in plan.captures) or None


def _scalars(plan: ForwardPlan | BackwardPlan) -> tuple[NumberForm, ...] | None:
    return tuple(map(NumberForm, plan.scalars)) or None
