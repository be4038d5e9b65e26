"""Keys and values of 8 bits beside 16-bit queries, by Hopper's generated kernels, emulated with no GPU."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn import errors
from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.running.dequantise import dequantised
from composattn.backends.fused.running.emulated import EmulatedKernel, emulating
from composattn.backends.fused.tiles.target import HOPPER as TARGET
from composattn.backends.hopper.wide_tiling import WideByteTiling
from composattn.call.problem import Problem
from composattn.call.scales import rows_of, scaled_scores
from composattn.emulator.mode import EAGER, LATE, random_mode
from composattn.mods import causal
from composattn.testing import check
from tests.byte_keys import E4M3, E5M2, both, cases, power_of_two

CASES = cases(300, "cpu")
HOPPER = "hopper-emulated"


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_same_kernel_on_the_bytes_as_16_bit_numbers(name: str) -> None:
    case, options = CASES[name]()
    (out, lse), (expected, expected_lse) = both(case, HOPPER, **options)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


IN_ANY_ORDER = (
    "one query, D 128", "packed", "pages", "blocks that stay", "D 576 and 512", "D 272 and 16, many rows",
    "pages, D 384, 32 heads, fp16",
)  # fmt: skip


@pytest.mark.parametrize("name", IN_ANY_ORDER)
def test_results_are_right_in_whatever_order_warps_run(name: str) -> None:
    case, options = CASES[name]()
    for mode in (EAGER, LATE, random_mode(3)):
        with emulating(mode):
            check(functools.partial(ca.attention, backend=HOPPER, **options), case)


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_each_finite_code_is_the_number_it_stands_for(kind: torch.dtype, dtype: torch.dtype) -> None:
    """One key, whose value is the output; 256 channels have the 256 codes."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(kind)
    codes = torch.where(codes.float().isfinite(), codes.float(), 1.0).to(kind)
    q, k = torch.zeros(1, 1, 1, 256, dtype=dtype), torch.zeros(1, 1, 1, 256).to(kind)
    out = ca.attention(q, k, codes.view(1, 1, 1, 256), backend=HOPPER)
    assert torch.equal(out.float().flatten(), codes.float())


@pytest.mark.parametrize("d", [128, pytest.param(320, marks=pytest.mark.slow)])
def test_few_queries_of_bf16_have_no_larger_error_than_on_16_bit_keys(d: int) -> None:
    """Rows from 2^-20 to 2^20 times as large as others, and one whose first number is 2^40 times the next one."""
    q, k, v = (torch.randn(1, heads, n, d) for heads, n in ((8, 1), (1, 200), (1, 200)))
    sizes = 2.0 ** torch.tensor([-20.0, -10, -5, 0, 0, 5, 10, 20]).view(1, 8, 1, 1)
    q[:, 3, :, 1:], k[..., 0] = q[:, 3, :, 1:] * 2.0**-40, 0.0
    q = (q * sizes).bfloat16()
    k, v = k.to(E4M3), (v + 1.0).to(E4M3)
    assert "scales_queries" in str(ca.Attention(backend=HOPPER).explain(q, k, v))
    scores = q.double() @ k.double().mT * 2.0**-3
    exact, exact_lse = torch.softmax(scores, -1) @ v.double(), torch.logsumexp(scores, -1)
    for shift in (0, 60, -60):
        of_bytes, of_bf16 = (
            ca.attention(q * 2.0**shift, *given, scale=2.0 ** (-3 - shift), backend=HOPPER, return_lse=True)
            for given in ((k, v), (k.bfloat16(), v.bfloat16()))
        )
        errors = [(out.double() - exact).abs().amax((0, 2, 3)) for out, _ in (of_bytes, of_bf16)]
        assert (errors[0] <= errors[1] + 2.0**-9 * exact.abs().amax()).all()
        assert ((of_bytes[1].double() - exact_lse).abs() <= 1e-6 * (1 + exact_lse.abs())).all()


@pytest.mark.parametrize("d", [128, 320])
def test_queries_that_are_no_numbers_make_none(d: int) -> None:
    q, k = torch.randn(1, 4, 1, d).bfloat16(), torch.randn(1, 1, 200, d).to(E4M3)
    q[0, 0], q[0, 1, 0, 5], q[0, 2, 0, 5] = 0.0, torch.inf, torch.nan
    out = ca.attention(q, k, k, backend=HOPPER)
    assert out[0, 1:3].isnan().all()
    assert out[0, [0, 3]].isfinite().all()


@pytest.mark.parametrize("d", [64, 320])
def test_small_weights_of_many_keys_are_not_lost(d: int) -> None:
    """One key has 2^26 times the weight of 512 others, whose values are as much larger: fp16 ends at 2^-24."""
    q, k, v = torch.zeros(1, 1, 1, d), torch.zeros(1, 1, 513, d), torch.full((1, 1, 513, d), 448.0)
    q[..., 0], k[..., 0, 0], v[..., 0, :] = 1.0, 8.0, 2.0**-9
    q, k, v = q.bfloat16(), k.to(E4M3), v.to(E4M3)
    scale = 26 / 8 / 1.4426950408889634
    exact = torch.softmax(q.double() @ k.double().mT * scale, -1) @ v.double()
    out = ca.attention(q, k, v, scale=scale, backend=HOPPER)
    assert ((out - exact).abs() <= 2.0**-8 * exact).all()


def test_scales_behind_the_last_key_of_a_page_may_hold_anything() -> None:
    """A new cache is made with no numbers in it."""
    q, k, v = (torch.randn(2, heads, n, 64) for heads, n in ((4, 1), (2, 32), (2, 32)))
    lengths, table = torch.tensor([21, 5], dtype=torch.int32), torch.arange(4, dtype=torch.int32).view(2, 2)
    unused = torch.arange(32) >= lengths[:, None, None]
    scales = torch.rand(2, 2, 32) + 0.5
    k8, v8 = (x.to(E4M3) for x in (k, v))
    wide = [(x.double() * scales[..., None]).repeat_interleave(2, 1) for x in (k8, v8)]
    scores = (q.bfloat16().double() @ wide[0].mT / 8).masked_fill(unused[:, :, None], -torch.inf)
    exact = torch.softmax(scores, -1) @ wide[1]

    def pages(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (2, 16)).transpose(1, 2).flatten(0, 1).contiguous()

    for behind in (torch.nan, torch.inf):
        kept = pages(scales.masked_fill(unused, behind))
        cache = [ca.Quantized(pages(x.float()).to(E4M3), kept) for x in (k8, v8)]
        paged = ca.Paged(table, 16, lengths)
        for backend in (HOPPER, "streaming"):
            out = ca.attention(q.bfloat16(), *cache, paged=paged, backend=backend)
            assert (out - exact).abs().max() <= 2.0**-7 * exact.abs().max()


def test_scales_of_heads_take_the_tiles_of_none() -> None:
    sizes = 1, 32, 8, 8192, 8192, 128, 128
    problem = Problem(*sizes, torch.bfloat16, torch.device("cpu"), narrow=(torch.bfloat16, E4M3, E4M3))
    of_keys = rows_of(*(torch.empty(1, h, 8192, 128, device="meta") for h in (32, 8, 8)), None, None)[1]
    scores = (scaled_scores([(of_keys, torch.ones(shape))], None, []) for shape in ((1, 8), (1, 8, 8192)))
    mods = [None, *(score.expr for score in scores if score is not None)]
    none, of_heads, of_rows = (plan_forward(problem, Program(mod, causal().expr), TARGET).tiling for mod in mods)
    assert none == of_heads != of_rows


@pytest.mark.parametrize(("heads", "q_len", "rows"), [(16, 1, 16), (16, 2, 32), (3, 5, 32), (40, 1, 64), (128, 1, 64)])
def test_of_wide_bytes_as_many_rows_are_multiplied_as_there_are(heads: int, q_len: int, rows: int) -> None:
    sizes = 1, heads, 1, q_len, 8192, 576, 512
    problem = Problem(*sizes, torch.bfloat16, torch.device("cpu"), narrow=(torch.bfloat16, E4M3, E4M3))
    tiling = plan_forward(problem, Program(None, None), TARGET).tiling
    assert isinstance(tiling, WideByteTiling)
    assert tiling.rows == tiling.most_rows == rows
    assert tiling.fits(TARGET)


def test_a_negative_scale_of_k_is_seen_by_all() -> None:
    q, k = torch.randn(1, 2, 3, 64).bfloat16(), torch.randn(1, 2, 70, 64).to(E4M3)
    assert ca.attention(q, k, k, k_scale=torch.tensor(-1.0), backend=HOPPER).isnan().all()


def test_a_plan_says_what_comes_as_bytes() -> None:
    q, k = torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16), torch.zeros(1, 2, 4096, 128).to(E4M3)
    said = str(ca.Attention(backend=HOPPER).explain(q, k, k))
    assert "k float8_e4m3fn" in said
    assert "byte_stages 5" in said


def test_rows_that_copies_cannot_read_are_refused_by_name() -> None:
    q, k = torch.zeros(1, 2, 4, 72, dtype=torch.bfloat16), torch.zeros(1, 2, 64, 72).to(E4M3)
    with pytest.raises(errors.UnsupportedLayout, match="16 elements"):
        ca.attention(q, k, k, backend=HOPPER)
    padded = torch.zeros(1, 2, 64, 80).to(E4M3)[..., :72]
    assert torch.equal(ca.attention(q, padded, padded, backend=HOPPER), torch.zeros_like(q))


def test_where_many_rows_read_each_key_it_is_made_16_bits_once() -> None:
    q = torch.randn(1, 64, 130, 64, dtype=torch.bfloat16)  # 8,320 rows of a head
    k, v = (torch.randn(1, 1, 100, 64).to(E4M3) for _ in range(2))
    attend = ca.Attention(mask_mod=causal("bottom_right"), backend=HOPPER)
    assert "k and v in torch.bfloat16 for 8320 rows each" in str(attend.explain(q, k, v))
    scale = power_of_two(1, 1, 100, 1)
    wide = k.to(q.dtype), ca.Quantized(v, scale).dequantised()
    assert torch.equal(attend(q, k, v, v_scale=scale), attend(q, *wide))


def test_gradients_of_what_was_quantised_are_those_of_16_bits() -> None:
    leaves = [torch.randn(1, 2, 70, 64).bfloat16().requires_grad_() for _ in range(3)]
    made = ca.quantize(*leaves, hadamard=False, center=False)
    wide = [x.dequantised(torch.bfloat16).detach().requires_grad_() for x in made]
    attend = ca.Attention(mask_mod=causal(), backend=HOPPER)
    outs = attend(*made), attend(*wide)
    grads = [torch.autograd.grad(out.sum(), of) for out, of in zip(outs, (leaves, wide), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_gradients_beside_bytes_are_refused_by_name() -> None:
    q, k = torch.zeros(1, 2, 4, 64, dtype=torch.bfloat16, requires_grad=True), torch.zeros(1, 2, 64, 64).to(E4M3)
    with pytest.raises(errors.GradientUnsupported, match="dequantised"):
        ca.attention(q, k, k, backend=HOPPER)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_tensor_made_16_bits_has_the_number_of_each_finite_code_where_it_lay(dtype: torch.dtype) -> None:
    """Keys of one kind and values of the other, in two orders of dimensions, more than a block of threads has."""
    codes = (torch.arange(256 * 41, dtype=torch.int32) % 256).to(torch.uint8)
    k, v = (codes.view(kind) for kind in (E4M3, E5M2))
    k, v = (torch.where(x.float().isfinite(), x.float(), 1.0).to(x.dtype).view(2, 41, 2, 64) for x in (k, v))
    k = k.transpose(1, 2)
    wide_k, wide_v = dequantised(k, v, TARGET, dtype, EmulatedKernel)
    assert wide_k.stride() == k.stride()
    assert torch.equal(wide_k, k.to(dtype))
    assert torch.equal(wide_v, v.to(dtype))


def test_a_tensor_with_gaps_is_made_16_bits_by_torch() -> None:
    k = torch.randn(1, 2, 9, 96).to(E4M3)[..., :64]
    wide, _ = dequantised(k, k, TARGET, torch.bfloat16, EmulatedKernel)
    assert torch.equal(wide, k.to(torch.bfloat16))


def test_keys_that_heads_share_in_memory_are_cast_one_by_one() -> None:
    """From the first to the last number there are as many places as numbers, but some numbers twice, and gaps."""
    shared = torch.randn(2, 3, 40, 64).to(E4M3)[:, :1].expand(2, 2, 40, 64)
    wide, _ = dequantised(shared, shared, TARGET, torch.bfloat16, EmulatedKernel)
    assert torch.equal(wide, shared.to(torch.bfloat16))
