"""The facts of one call: shapes, dtype, device; checked once, frozen, holding no tensor."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Literal, NamedTuple

import torch

from .. import errors
from ..analysis.strips import Strips
from ..graph.expr import refuse_lazy
from ..graph.foreign import is_fake, reason_against
from ..graph.linear import MOST
from ..graph.sizes import differ, surely
from .eight_bits import EIGHT_BITS
from .schedule import AUTO, Schedule
from .sequences import Paged, Sequences, Varlen

HINT = {"why": "plans look at it, kernels do not"}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the sequences of a call lie in memory; where they do is for run time (`composattn.call.sequences.Sequences`).

    q: "dense" (B, H, S, D), or "packed" (total, H, D). kv: likewise, or "paged" in pages of `page_size` rows (0
    elsewhere). `used_q`, `used_kv`: whether a tensor says how many rows of each sequence are used. What plans look at
    and kernels do not: `max_q_len`, `max_kv_len`, upper bounds of the lengths of packed sequences, None where unknown;
    `keys_lie_as_queries`, of packed ones.
    """

    q: Literal["dense", "packed"] = "dense"
    kv: Literal["dense", "packed", "paged"] = "dense"
    page_size: int = 0
    used_q: bool = False
    used_kv: bool = False
    max_q_len: int | None = dataclasses.field(default=None, compare=False, repr=False, metadata=HINT)
    max_kv_len: int | None = dataclasses.field(default=None, compare=False, repr=False, metadata=HINT)
    keys_lie_as_queries: bool = dataclasses.field(default=False, compare=False, repr=False, metadata=HINT)

    @property
    def is_dense(self) -> bool:
        return self.q == self.kv == "dense"

    @property
    def strips(self) -> Strips | None:
        """How images are cut into strips, which are the sequences; None where sequences lie row by row."""
        return None

    @property
    def shares_keys(self) -> bool:
        """Whether several strips of an image have the same keys."""
        return self.sharing is not None

    @property
    def sharing(self) -> Strips | None:
        """Strips of an image that have the same keys, where there are such."""
        return None if self.strips is None or self.strips.is_whole else self.strips

    @property
    def mirrored(self) -> Layout:
        """With queries and keys exchanged."""
        assert self.kv != "paged"
        maxima, same = (self.max_kv_len, self.max_q_len), self.keys_lie_as_queries
        return Layout(self.kv, self.q, 0, self.used_kv, self.used_q, *maxima, same)

    @property
    def hints(self) -> tuple[int | None, int | None, bool]:
        """What plans of equal problems may differ by."""
        return self.max_q_len, self.max_kv_len, self.keys_lie_as_queries


@dataclasses.dataclass(frozen=True, kw_only=True)
class StripLayout(Layout):
    """Dense tensors of which each entry is an image, and its strips are sequences; see `composattn.analysis.strips`."""

    of: Strips

    @property
    def strips(self) -> Strips:
        return self.of


DENSE = Layout()


class ElementTypes(NamedTuple):
    """Element types of a call's tensors: k and v may have 8 bits beside a wider q, and q too beside a wider output."""

    q: torch.dtype
    k: torch.dtype
    v: torch.dtype
    out: torch.dtype

    @staticmethod
    def all_of(dtype: torch.dtype) -> ElementTypes:
        """The element types of a call with no 8 bits."""
        return ElementTypes(dtype, dtype, dtype, dtype)

    @property
    def has_eight_bits(self) -> bool:
        return len(set(self)) > 1

    def __str__(self) -> str:
        """For people to read: one name where there is one type, else those of q, k, v and the output."""
        names = [str(t).removeprefix("torch.") for t in self]
        return "q {}, k {}, v {}, out {}".format(*names) if self.has_eight_bits else names[0]


@dataclasses.dataclass(frozen=True)
class Problem:
    """q (batch, q_heads, q_len, head_dim), k (batch, kv_heads, kv_len, head_dim), v (..., kv_len, head_dim_v).

    Packed, `q_len` and `kv_len` are the rows of all sequences together and `batch` is their number; paged, `kv_len`
    is what the page table of one sequence has room for. `deterministic`: gradients are bitwise repeatable; None is as
    torch is set when they are computed. `dtype`: that of the output, and of q, k and v unless `narrow` says theirs,
    which it does where k and v have 8 bits, or all three.
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    deterministic: bool | None = None
    layout: Layout = DENSE
    schedule: Schedule = AUTO
    narrow: tuple[torch.dtype, torch.dtype, torch.dtype] | None = None

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.q_heads // self.kv_heads

    @property
    def queries(self) -> int:
        """Queries of a sequence: packed, the most that any has if that is known, else the average."""
        return (self.layout.max_q_len or -(-self.q_len // self.batch)) if self.layout.q == "packed" else self.q_len

    @property
    def keys(self) -> int:
        """Keys of a sequence, by the rule of `queries`; in pages, as many as the page table has room for."""
        return (self.layout.max_kv_len or -(-self.kv_len // self.batch)) if self.layout.kv == "packed" else self.kv_len

    @property
    def mirrored(self) -> Problem:
        """With queries and keys exchanged."""
        return dataclasses.replace(self, q_len=self.kv_len, kv_len=self.q_len, layout=self.layout.mirrored)

    @property
    def types(self) -> ElementTypes:
        """Element types of q, k, v and the output."""
        return ElementTypes.all_of(self.dtype) if self.narrow is None else ElementTypes(*self.narrow, self.dtype)

    @property
    def rounded(self) -> Problem:
        """What is planned for: packed rows rounded up by an eighth at most, so that new totals find others' plans."""
        q_len, kv_len = self.q_len, self.kv_len
        if self.layout.q == "packed":
            q_len = _rounded(q_len, self.batch)
        if self.layout.kv == "packed":
            kv_len = _rounded(kv_len, self.batch)
        return dataclasses.replace(self, q_len=q_len, kv_len=kv_len)

    def flops(self, visible_pairs: int | None = None) -> int:
        """Floating-point operations of the forward over `visible_pairs` (q, kv) pairs, summed over batch and heads.

        Two products, a multiply and an add each. None: every pair of a dense call.
        """
        pairs = self.batch * self.q_heads * self.q_len * self.kv_len if visible_pairs is None else visible_pairs
        return 2 * pairs * (self.head_dim + self.head_dim_v)

    @staticmethod
    def of(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        varlen: Varlen | None = None,
        paged: Paged | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Problem:
        """The problem that q, k and v pose; `out_dtype`: where q has 8 bits too, None of others.

        Raises: `NotATensor`, `WrongRank`, `ShapeMismatch`, `GroupMismatch`, `EmptyDimension`, `DTypeMismatch`,
        `UnsupportedDType`, `DeviceMismatch`, `UnsupportedLayout`, `SequencesMismatch`, `UnsupportedTransform`,
        `InvalidLength`.
        """
        layout = check_ranks(q, k, v, varlen, paged)
        _check_types({"q": q, "k": k, "v": v}, out_dtype)
        if paged is not None:
            _check_page_size(paged, k)
        _check_shapes(q, k, v, layout)
        batch, q_heads, q_len, head_dim = _sizes(q, layout.q)
        _, kv_heads, kv_len, head_dim_v = _sizes(v, layout.kv)
        if varlen is not None:
            _check_varlen(varlen, q, k, layout)
            batch = varlen.batch
        if paged is not None:
            _check_paged(paged, batch, q.device)
            kv_len = paged.page_table.shape[1] * paged.page_size
        _check_sizes(batch, q_heads, q_len, kv_len, layout)
        sizes = (batch, q_heads, kv_heads, q_len, kv_len, head_dim, head_dim_v)
        narrow = (q.dtype, k.dtype, v.dtype) if k.dtype in EIGHT_BITS else None
        # AUTO by name: Dynamo, which follows 8-bit queries here, finds no source of the default of a field
        return Problem(*sizes, out_dtype or q.dtype, q.device, layout=layout, schedule=AUTO, narrow=narrow)


def check_ranks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, varlen: Varlen | None, paged: Paged | None
) -> Layout:
    """How q, k and v lie, which have its dimensions. Raises what `Problem.of` does for what is no tensor of them."""
    layout = _layout(varlen, paged)
    for name, t, lies in (("q", q, layout.q), ("k", k, layout.kv), ("v", v, layout.kv)):
        _check_rank(name, t, lies)
    return layout


def _layout(varlen: Varlen | None, paged: Paged | None) -> Layout:
    if varlen is not None and not isinstance(varlen, Varlen):
        raise errors.SequencesMismatch(f"varlen is a {type(varlen).__name__}; pass ca.Varlen(cu_seqlens_q, ...)")
    if paged is not None and not isinstance(paged, Paged):
        raise errors.SequencesMismatch(
            f"paged is a {type(paged).__name__}; pass ca.Paged(page_table, page_size, seqused)"
        )
    if varlen is None:
        return DENSE if paged is None else Layout(kv="paged", page_size=paged.page_size, used_kv=True)
    used_q = varlen.seqused_q is not None
    if paged is None:
        used_kv = varlen.seqused_k is not None or (used_q and varlen.cu_seqlens_k is None)
        max_kv_len = varlen.max_seqlen_q if varlen.cu_seqlens_k is None else varlen.max_seqlen_k
        same = Sequences.of(varlen, None).keys_lie_as_queries
        return Layout("packed", "packed", 0, used_q, used_kv, varlen.max_seqlen_q, max_kv_len, same)
    if varlen.cu_seqlens_k is not None or varlen.seqused_k is not None:
        raise errors.SequencesMismatch(
            "the keys lie in pages, so paged says how many there are; leave cu_seqlens_k and seqused_k out of varlen"
        )
    return Layout("packed", "paged", paged.page_size, used_q, True, varlen.max_seqlen_q)


def _rounded(rows: int, batch: int) -> int:
    """Rows of all sequences, where each has as many as there are on average, in four significant bits."""
    average = -(-rows // batch)
    step = 1 << max(0, average.bit_length() - 4)
    return batch * (-(-average // step) * step)


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DIMENSIONS = {"dense": "(B, H, S, D)", "packed": "(total, H, D)", "paged": "(num_pages, H, page_size, D)"}
_WAYS_OUT = {
    "dense": "a (B, S, H, D) tensor passes as x.transpose(1, 2), uncopied; packed (total, H, D) tensors need "
    "varlen=ca.Varlen(cu_seqlens)",
    "packed": "with varlen, sequences lie one after the other: x.flatten(0, 1) of a (B, S, H, D) tensor",
    "paged": "a cache (num_pages, page_size, H, D) passes as cache.transpose(1, 2), uncopied",
}


def _check_rank(name: str, t: torch.Tensor, lies: str) -> None:
    if not isinstance(t, torch.Tensor):
        raise errors.NotATensor(f"{name} is a {type(t).__name__}; pass a torch.Tensor of shape {_DIMENSIONS[lies]}")
    refuse_foreign(name, t)
    if t.is_nested:
        refuse_unreadable(name, t)
    if t.ndim != (3 if lies == "packed" else 4):
        raise errors.WrongRank(f"{name} has shape {tuple(t.shape)}; it must be {_DIMENSIONS[lies]}: {_WAYS_OUT[lies]}")


def refuse_unreadable(name: str, t: torch.Tensor) -> None:
    """Raises `NotATensor`, `UnsupportedLayout` for a nested or sparse tensor, and what `refuse_foreign` raises."""
    if not isinstance(t, torch.Tensor):
        raise errors.NotATensor(f"{name} is a {type(t).__name__}; pass a torch.Tensor")
    refuse_foreign(name, t)
    if t.is_nested:
        raise errors.UnsupportedLayout(
            f"{name} is a nested tensor; pass the values of a jagged one, (total, H, D), and "
            "varlen=ca.Varlen(offsets.int())"
        )
    lies = undense(t)
    if lies is not None:
        raise errors.UnsupportedLayout(f"{name} is {lies[0]}; pass a dense tensor: {name}.{lies[1]}")


def check_on_one_device(tensors: dict[str, torch.Tensor]) -> None:
    """Raises `DeviceMismatch` for q, k and v, by name, that lie on several."""
    devices = {name: str(t.device) for name, t in tensors.items()}
    if len(set(devices.values())) > 1:
        raise errors.DeviceMismatch(f"q, k and v must lie on one device, got {devices}; move two of them with .to()")


def undense(t: torch.Tensor) -> tuple[str, str] | None:
    """How a tensor lies that is not dense, and the method that makes a dense one of it; None of dense ones."""
    if t.is_quantized:
        return "quantized", "dequantize()"
    return None if t.layout is torch.strided else (str(t.layout), "to_dense()")


def refuse_foreign(name: str, t: torch.Tensor) -> None:
    """Raises `UnsupportedLayout` for a tensor whose elements are not there, or not what it means (torch's CausalBias).

    `UnsupportedTransform` for a DTensor, and for any tensor below torch.jit.trace.
    """
    refuse_lazy(name, t)
    reason = reason_against(t)
    if reason is not None:
        raise errors.UnsupportedLayout(f"{name} is {reason}")
    if hasattr(t, "to_local"):
        raise errors.UnsupportedTransform(
            f"{name} is a {type(t).__name__}; attend to local tensors, .to_local(), with mods that read what "
            "belongs to the heads or the batch of this rank; DTensor.from_local(out, ...) after. Or let "
            "torch.distributed.tensor.experimental.local_map do both: local_map(call, out_placements=..., "
            "in_placements=...)(q, k, v)"
        )
    if torch._C._get_tracing_state() is not None:
        raise errors.UnsupportedTransform(
            "torch.jit.trace records no call of composattn: which tiles it visits depends on the inputs; use "
            "torch.export or torch.compile"
        )


def _sizes(t: torch.Tensor, lies: str) -> tuple[int, int, int, int]:
    """(batch or pages, heads, length or rows, dim), with 1 for the batch of packed rows."""
    if lies == "packed":
        rows, heads, dim = t.shape
        return 1, heads, rows, dim
    batch, heads, length, dim = t.shape
    return batch, heads, length, dim


def _check_types(tensors: dict[str, torch.Tensor], out_dtype: torch.dtype | None) -> None:
    dtypes = {name: t.dtype for name, t in tensors.items()}
    dtype = dtypes["q"]
    if len(set(dtypes.values())) > 1 and not (dtypes["k"] in EIGHT_BITS and dtypes["v"] in EIGHT_BITS):
        raise errors.DTypeMismatch(
            "q, k and v must have one dtype, or k and v 8 bits (float8_e4m3fn or float8_e5m2), got "
            f"{dtypes}; cast two of them, or quantise k and v"
        )
    if dtype in EIGHT_BITS and out_dtype is None:
        raise errors.UnsupportedDType(
            f"q is {dtype}, and its output can't be; say q_scale= (1.0 where there is none) or out_dtype=torch.bfloat16"
        )
    if (out_dtype or dtype) not in _DTYPES:
        raise errors.UnsupportedDType(f"q, k and v are {dtype}; attention takes {', '.join(map(str, _DTYPES))}")
    check_on_one_device(tensors)
    for name, t in tensors.items():
        refuse_unreadable(name, t)
    if len(set(map(is_fake, tensors.values()))) > 1:
        fakes = ", ".join(name for name, t in tensors.items() if is_fake(t))
        raise errors.UnsupportedTransform(f"{fakes} of q, k and v are FakeTensors; make all of them of one mode")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    q_batch, q_heads, _, q_dim = _sizes(q, layout.q)
    k_batch, k_heads, k_len, k_dim = _sizes(k, layout.kv)
    v_batch, v_heads, v_len, _ = _sizes(v, layout.kv)
    if layout.kv == "paged" and differ(k_batch, v_batch):
        raise errors.ShapeMismatch(f"k and v must have the same number of pages, got {shapes}")
    if layout.is_dense and (differ(q_batch, k_batch) or differ(k_batch, v_batch)):
        raise errors.ShapeMismatch(f"q, k, v must have one batch size, got {shapes}; .expand({q_batch}, ...) shares")
    if differ(k_heads, v_heads):
        raise errors.ShapeMismatch(f"k and v must have the same number of heads, got {shapes}")
    if differ(k_len, v_len):
        raise errors.ShapeMismatch(f"k and v must have the same length, got {shapes}")
    if differ(q_dim, k_dim):
        raise errors.ShapeMismatch(f"q and k must have the same head dimension, got {shapes}")
    for name, t, lies in (("q", q, layout.q), ("k", k, layout.kv), ("v", v, layout.kv)):
        may_be_zero = {"dense": 2, "packed": 0, "paged": -1}[lies]
        for dim, size in enumerate(t.shape):
            # no queries or no keys are ordinary: the output is empty, or all rows see nothing
            if dim != may_be_zero and surely(size == 0):
                only = "no size" if lies == "paged" else "only the length"
                raise errors.EmptyDimension(f"{name} has shape {tuple(t.shape)}; {only} may be zero")
    if surely(q_heads % k_heads != 0):
        raise errors.GroupMismatch(
            f"{q_heads} query heads can't share {k_heads} key/value heads evenly; "
            "the number of query heads must be a multiple (GQA), or both the same (MHA)"
        )


def _check_sizes(batch: int, heads: int, q_len: int, kv_len: int, layout: Layout) -> None:
    longest = {"q_len": layout.max_q_len, "kv_len": layout.max_kv_len}  # of packed rows, where it is said
    for name, size in (("batch", batch), ("heads", heads), ("q_len", q_len), ("kv_len", kv_len)):
        said = longest.get(name)
        if said is not None and surely(said > 0) and surely(said < size):
            size = said
        if surely(size > MOST[name]):
            raise errors.InvalidLength(
                f"{name} is {size}; positions are 32-bit numbers, and masks are analysed up to {MOST[name]}: "
                "split the call, and join the parts by their lse"
            )


def _check_varlen(varlen: Varlen, q: torch.Tensor, k: torch.Tensor, layout: Layout) -> None:
    if varlen.cu_seqlens_q.device != q.device:
        raise errors.DeviceMismatch(
            f'cu_seqlens_q lies on {varlen.cu_seqlens_q.device}, q on {q.device}; move it: .to("{q.device}")'
        )
    if layout.kv == "packed" and varlen.cu_seqlens_k is None and differ(q.shape[0], k.shape[0]):
        raise errors.ShapeMismatch(
            f"q has {q.shape[0]} rows, k {k.shape[0]}; pass cu_seqlens_k if keys are packed unlike queries"
        )


def _check_page_size(paged: Paged, k: torch.Tensor) -> None:
    if differ(k.shape[2], paged.page_size):
        raise errors.SequencesMismatch(
            f"k has shape {tuple(k.shape)}, which is pages of {k.shape[2]} rows, and page_size is {paged.page_size}; "
            f"{_WAYS_OUT['paged']}"
        )


def _check_paged(paged: Paged, batch: int, device: torch.device) -> None:
    if differ(paged.batch, batch):
        raise errors.ShapeMismatch(f"page_table has {paged.batch} rows for {batch} sequences; it needs one row each")
    if paged.page_table.device != device:
        raise errors.DeviceMismatch(
            f'page_table lies on {paged.page_table.device}, q on {device}; move it: .to("{device}")'
        )


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """`scale`, by default 1/sqrt(head_dim). Raises `InvalidScale` unless it is a finite Python number."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, int) and not isinstance(scale, bool) and abs(scale) > sys.float_info.max:
        raise errors.InvalidScale(f"scale is an integer of {scale.bit_length()} bits, larger than any float")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise errors.InvalidScale(
            f"scale is a {type(scale).__name__}; pass a Python number; a learned one is composattn.mods.temperature"
        )
    if not math.isfinite(scale):
        raise errors.InvalidScale(f"scale is {scale}; it must be finite")
    return float(scale)
