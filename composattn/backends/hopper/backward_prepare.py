"""Before the backward kernel on Hopper: statistics of query rows, padded to whole tiles, and an empty sum for dQ."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_stream

from ...plan_backward import BackwardPlan
from ...primitives.delta import row_product, row_statistics
from ...primitives.values import choose
from .backward import element_type, fake_tensor

THREADS = 256
ELEMENTS = 8  # of a row, a thread and load: 16 bytes


class BackwardPrepare:
    """A block a query tile: D = rowsum(dO·O) - dLSE and log2(e)·LSE of its rows, zeros for its dQ.

    `lanes` neighbouring threads share a row, 16 bytes each.
    """

    def __init__(self, plan: BackwardPlan):
        self.plan, self.tiling = plan, plan.tiling
        chunks = -(-plan.head_dim_v // ELEMENTS)
        self.lanes = min(32, 1 << (chunks - 1).bit_length())
        self.passes = -(-chunks // self.lanes)

    def __repr__(self):
        return "backward_prepare"  # becomes part of the kernel's name

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,  # (B, Hq, Sq, Dv)
        dout: cute.Tensor,  # (B, Hq, Sq, Dv)
        lse: cute.Tensor,  # (B, Hq, Sq) fp32
        dlse: cute.Tensor | None,  # (B, Hq, Sq) fp32
        statistics: cute.Tensor,  # (2, B, Hq, rows padded to tiles) fp32
        dq_sum: cute.Tensor,  # (B, Hq, tiles, tile_m * d) fp32
        stream,
    ):
        tiles = cute.ceil_div(out.shape[2], self.tiling.tile_m)
        self.kernel(out, dout, lse, dlse, statistics, dq_sum).launch(
            grid=(tiles, out.shape[1], out.shape[0]), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, out, dout, lse, dlse, statistics, dq_sum):
        tile, head, batch = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        q_len = out.shape[2]
        member = thread % self.lanes
        at_once = THREADS // self.lanes
        rows, products = [], []
        for step in cutlass.range_constexpr(-(-self.tiling.tile_m // at_once)):
            local = step * at_once + thread // self.lanes
            q = tile * self.tiling.tile_m + local
            inside = (q < q_len) & (local < self.tiling.tile_m)
            product = Float32(0.0)
            for chunk in cutlass.range_constexpr(self.passes):
                column = (chunk * self.lanes + member) * ELEMENTS
                product = product + _load_product(
                    out[batch, head, None, None], dout[batch, head, None, None], q, column,
                    inside & (column < self.plan.head_dim_v),
                )  # fmt: skip
            rows.append((q, inside, (member == 0) & (local < self.tiling.tile_m)))
            products.append(product)
        self.clear(dq_sum[batch, head, tile, None], thread)
        for step in cutlass.range_constexpr(len(rows)):
            _store_statistics(lse, dlse, statistics, batch, head, *rows[step], row_product(products[step], self.lanes))

    def clear(self, whole: cute.Tensor, thread: Int32) -> None:
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        for chunk in range(self.tiling.tile_m * self.tiling.d // (4 * THREADS)):
            place = whole.iterator + (chunk * THREADS + thread) * 4
            cute.autovec_copy(zeros, cute.make_tensor(place, cute.make_layout(4)))


def _load_product(out: cute.Tensor, dout: cute.Tensor, q: Int32, column: Int32, inside: Boolean) -> Float32:
    """Products of one thread's elements of a row, summed; 0 where not `inside`."""
    # no branch, so that the loads of all rows are under way at once: what lies outside reads the first row
    q, column = choose(inside, q, 0), choose(inside, column, 0)
    parts = []
    for tensor in (out, dout):
        row = tensor[q, None]
        registers = cute.make_rmem_tensor(ELEMENTS, tensor.element_type)
        cute.autovec_copy(cute.make_tensor(_aligned(row.iterator + column), cute.make_layout(ELEMENTS)), registers)
        parts.append(registers)
    product = Float32(0.0)
    for e in range(ELEMENTS):
        product = product + parts[0][e].to(Float32) * parts[1][e].to(Float32)
    return choose(inside, product, Float32(0.0))


def _aligned(pointer: cute.Pointer) -> cute.Pointer:
    return cute.make_ptr(pointer.dtype, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16)


@cute.jit
def _store_statistics(lse, dlse, statistics, batch, head, q: Int32, inside: Boolean, mine: Boolean, product: Float32):
    if mine:
        row_lse, row_dlse = -Float32.inf, Float32(0.0)
        if inside:
            row_lse = lse[batch, head, q]
            if const_expr(dlse is not None):
                row_dlse = dlse[batch, head, q]
        log2, delta = row_statistics(row_lse, product, row_dlse)
        statistics[0, batch, head, q] = log2
        statistics[1, batch, head, q] = delta


def kernel(plan: BackwardPlan) -> tuple:
    """(function to compile, arguments to compile it with)."""
    size, stride = cute.sym_int, cute.sym_int64
    dtype, tiling = element_type(plan), plan.tiling
    batch, heads, q_len, tiles = size(), size(), size(), size()
    rows = cute.sym_int(divisibility=tiling.tile_m)

    def statistic():
        return cute.runtime.make_fake_tensor(Float32, (batch, heads, q_len), (stride(), stride(), stride()))

    arguments = (
        fake_tensor(dtype, (batch, heads, q_len, plan.head_dim_v)),
        fake_tensor(dtype, (batch, heads, q_len, plan.head_dim_v)),
        statistic(),
        statistic() if plan.has_dlse else None,
        fake_tensor(Float32, (2, batch, heads, rows), divisibility=4),
        fake_tensor(Float32, (batch, heads, tiles, tiling.tile_m * tiling.d), divisibility=4),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return BackwardPrepare(plan), arguments
