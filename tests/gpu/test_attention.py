"""Attention on a GPU: one suite, inherited by every backend that runs there; all held to fp64 by the tolerance rule.

COMPOSATTN_FUZZ=300 draws that many random calls instead of a few.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.backends import default_for
from composattn.mods import alibi, causal, document, sliding_window, softcap
from composattn.testing import FUSED, Case, check, random_case
from tests.support import cut_as_long_ones, gpu_backend, needs_backward, outlier_normal

pytestmark = pytest.mark.gpu

FUZZED = int(os.environ.get("COMPOSATTN_FUZZ", "8"))
DEVICE = "cuda"
CUTS = pytest.mark.parametrize("cut", [False, True], ids=["short", "as a long one"])


def slopes(heads: int) -> torch.Tensor:
    return torch.exp2(-8.0 * torch.arange(1, heads + 1, device=DEVICE) / heads)


def documents(length: int) -> torch.Tensor:
    return (torch.arange(length, device=DEVICE) // 97).to(torch.int32)


MASKS: dict[str, Callable[[int], Any]] = {
    "full": lambda length: None,
    "causal": lambda length: causal(),
    "window": lambda length: sliding_window(100) & causal(),
    "documents": lambda length: document(documents(length)) & causal(),
    "callable": lambda length: lambda b, h, q, kv: (q + 2 * kv) % 3 != 0,
    "nothing": lambda length: lambda b, h, q, kv: q < 5,
}
SCORES: dict[str, Callable[[int, int], Any]] = {
    "plain": lambda heads, length: None,
    "alibi": lambda heads, length: alibi(slopes(heads)),
    "softcap": lambda heads, length: softcap(20.0),
    "bias": lambda heads, length: _bias(torch.randn(heads, length, length, device=DEVICE)),
}


def _bias(values: torch.Tensor) -> Any:
    return lambda score, b, h, q, kv: score + values[h, q, kv]


def case(
    seed: int,
    *,
    score: str = "plain",
    mask: str = "full",
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    lengths: tuple[int, int] = (333, 333),
    dims: tuple[int, int] = (128, 128),
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(outlier_normal, generator=generator, dtype=dtype, device=DEVICE)
    longest = max(lengths)
    return Case(
        draw(batch, heads[0], lengths[0], dims[0]),
        draw(batch, heads[1], lengths[1], dims[0]),
        draw(batch, heads[1], lengths[1], dims[1]),
        SCORES[score](heads[0], longest),
        MASKS[mask](longest),
    )


@pytest.fixture
def seed(generator: torch.Generator) -> int:
    """A number of this test alone, replayed by --seed."""
    return int(torch.randint(2**31, (1,), generator=generator))


class Suite:
    """What every backend on a GPU has to do; a subclass names the backend."""

    backend: str

    @property
    def attention(self) -> Callable[..., Any]:
        return functools.partial(ca.attention, backend=self.backend)

    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("score", SCORES)
    @CUTS
    def test_forward(self, score: str, mask: str, dtype: str, cut: bool, seed: int) -> None:
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        with cut_as_long_ones(cut):
            check(self.attention, case(seed, score=score, mask=mask, dtype=kind))

    @pytest.mark.parametrize("dims", [(8, 8), (24, 40), (64, 64), (72, 72), (80, 96), (96, 96), (128, 64), (104, 104),
                                      (192, 192), (192, 128), (64, 256), (256, 256), (248, 8)])  # fmt: skip
    @CUTS
    def test_head_dims(self, dims: tuple[int, int], cut: bool, seed: int) -> None:
        with cut_as_long_ones(cut):
            check(self.attention, case(seed, mask="causal", dims=dims))

    @pytest.mark.parametrize("lengths", [(1, 1), (1, 997), (997, 1), (2, 3), (64, 64), (127, 129), (128, 128),
                                         (129, 127), (191, 193), (509, 127), (1024, 2048), (2047, 1021)])  # fmt: skip
    @pytest.mark.parametrize("dim", [64, 128, 256])
    @CUTS
    def test_lengths(self, dim: int, lengths: tuple[int, int], cut: bool, seed: int) -> None:
        for mask in ("full", "causal"):
            with cut_as_long_ones(cut):
                check(self.attention, case(seed, mask=mask, lengths=lengths, dims=(dim, dim), batch=1))

    @pytest.mark.parametrize("heads", [(1, 1), (3, 3), (8, 1), (6, 2), (15, 5), (32, 4)])
    def test_groups(self, heads: tuple[int, int], seed: int) -> None:
        check(self.attention, case(seed, score="alibi", mask="causal", heads=heads, lengths=(257, 300)))

    def test_a_large_grid_of_small_heads(self, seed: int) -> None:
        check(self.attention, case(seed, mask="causal", batch=37, heads=(14, 7), lengths=(65, 65), dims=(64, 64)))

    @pytest.mark.parametrize("mask", ["full", "causal", "nothing"])
    @pytest.mark.parametrize(("dim", "length"), [(64, 1), (64, 131), (64, 333), (64, 511), (128, 333), (64, 2501)])
    def test_blocks_that_stay_give_the_bits_of_a_block_a_tile(
        self, dim: int, length: int, mask: str, seed: int
    ) -> None:
        """Several work tiles a block, so that the next one's queries come while one is computed."""
        made = case(seed, mask=mask, batch=9, heads=(48, 16), lengths=(length, length), dims=(dim, dim))
        found = []
        for stays in (False, True, True, None):
            torch.full_like(made.q, torch.nan)  # freed at once, so that outputs are likely to lie there
            attention = ca.Attention(
                mask_mod=made.mask_mod, backend=self.backend, schedule=ca.Schedule(persistent=stays)
            )
            found.append(attention(made.q, made.k, made.v, return_lse=True))
        for out, lse in found:
            assert not out.isnan().any()
            assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])
        check(self.attention, case(seed, mask=mask, lengths=(length, length), dims=(dim, dim)))

    def test_strided_views_pass_uncopied(self, seed: int) -> None:
        made = case(seed, mask="causal")
        expected, lse = self.attention(made.q, made.k, made.v, mask_mod=made.mask_mod, return_lse=True)
        for view in (_sequence_first, _sliced, _broadcast_free):
            q, k, v = (view(x) for x in (made.q, made.k, made.v))
            out, out_lse = self.attention(q, k, v, mask_mod=made.mask_mod, return_lse=True)
            assert torch.equal(out, expected)
            assert torch.equal(out_lse, lse)

    def test_shared_keys_are_expanded_views(self, seed: int) -> None:
        made = case(seed, heads=(4, 4))
        k, v = (x[:, :1].expand(-1, 4, -1, -1) for x in (made.k, made.v))
        assert torch.equal(self.attention(made.q, k, v), self.attention(made.q, k.contiguous(), v.contiguous()))

    def test_scale_of_any_sign_and_size(self, seed: int) -> None:
        made = case(seed, mask="causal")
        for scale in (-0.1, 0.0, 1e-3, 1.0):
            check(self.attention, Case(made.q, made.k, made.v, made.score_mod, made.mask_mod, scale))

    def test_runs_on_the_current_stream(self, seed: int) -> None:
        made = case(seed, mask="causal", lengths=(1024, 1024))
        expected = self.attention(made.q, made.k, made.v, mask_mod=made.mask_mod)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            q = made.q.clone()
            for _ in range(20):
                q = q * 1.0  # late on this stream: a launch elsewhere would read it too early
            out = self.attention(q, made.k, made.v, mask_mod=made.mask_mod)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(out, expected)

    def test_a_scalar_changes_without_a_new_kernel(self, seed: int) -> None:
        made = case(seed)
        cap = ca.scalar(10.0)
        attend = ca.Attention(score_mod=lambda s, b, h, q, kv: cap * torch.tanh(s / cap), backend=self.backend)
        for value in (10.0, 3.0):
            cap.value = value
            fixed = value
            check(
                lambda q, k, v, **mods: attend(q, k, v, return_lse=mods["return_lse"]),
                Case(made.q, made.k, made.v, lambda s, b, h, q, kv, c=fixed: c * torch.tanh(s / c)),
            )

    def test_gradients_of_everything(self, seed: int) -> None:
        needs_backward(self.backend)
        made = case(seed, mask="window", lengths=(200, 200), dims=(64, 64))
        table = torch.randn(4, 401, device=DEVICE, requires_grad=True)
        check(
            self.attention,
            Case(
                made.q, made.k, made.v,
                lambda s, b, h, q, kv: s + table[h, q - kv + 200], made.mask_mod,
                dout=torch.randn_like(made.q), dlse=torch.randn(made.q.shape[:3], device=DEVICE),
            ),
        )  # fmt: skip

    @pytest.mark.parametrize("number", range(FUZZED))
    def test_random_calls(self, number: int, seed: int) -> None:
        with cut_as_long_ones(number % 2 == 1):
            check(self.attention, random_case(seed + number, FUSED).without_gradients())

    @pytest.mark.parametrize("number", range(FUZZED))
    def test_random_gradients(self, number: int, seed: int) -> None:
        needs_backward(self.backend)
        with cut_as_long_ones(number % 2 == 1):
            check(self.attention, random_case(seed + number, FUSED))


def _sequence_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _sliced(x: torch.Tensor) -> torch.Tensor:
    room = x.new_full((x.shape[0] + 1, x.shape[1] + 2, x.shape[2] + 3, x.shape[3] + 8), float("nan"))
    view = room[1:, 1:-1, 2:-1, 8:]
    view.copy_(x)
    return view


def _broadcast_free(x: torch.Tensor) -> torch.Tensor:
    """Batch outermost in meaning, innermost but one in memory."""
    return x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)


class TestGenerated(Suite):
    backend = gpu_backend()

    def test_is_what_gpu_tensors_get(self, seed: int) -> None:
        if self.backend != default_for(torch.device(DEVICE)):
            pytest.skip("another backend is asked for by name")
        made = case(seed)
        assert torch.equal(ca.attention(made.q, made.k, made.v), self.attention(made.q, made.k, made.v))

    def test_the_same_call_gives_the_same_bits(self, seed: int) -> None:
        made = case(seed, score="softcap", mask="causal", lengths=(1500, 1500))
        first = self.attention(made.q, made.k, made.v, score_mod=made.score_mod, mask_mod=made.mask_mod)
        for _ in range(20):
            again = self.attention(made.q, made.k, made.v, score_mod=made.score_mod, mask_mod=made.mask_mod)
            assert torch.equal(first, again)

    def test_extra_memory_is_the_output(self, seed: int) -> None:
        made = case(seed, batch=1, lengths=(8192, 8192), mask="causal")
        self.attention(made.q, made.k, made.v, mask_mod=made.mask_mod)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = self.attention(made.q, made.k, made.v, mask_mod=made.mask_mod)
        assert torch.cuda.max_memory_allocated() - before <= out.nbytes + 4 * out.nbytes // 128 + 4096

    def test_refuses_by_name_what_it_cannot_do(self, seed: int) -> None:
        made = case(seed, lengths=(64, 64))
        q, k, v = made.q, made.k, made.v
        with pytest.raises(errors.UnsupportedDType, match="bfloat16"):
            self.attention(q.float(), k.float(), v.float())
        with pytest.raises(errors.UnsupportedHeadDim, match="multiples of 8"):
            self.attention(q[..., :60], k[..., :60], v)
        with pytest.raises(errors.UnsupportedLayout, match="contiguous"):
            self.attention(q.mT.contiguous().mT, k, v)
        with pytest.raises(errors.UnsupportedLayout, match="16 bytes"):
            room = q.new_zeros(*q.shape[:3], 136)
            self.attention(room[..., 4:132], k, v)
        wide = q.new_zeros(1, 1, 64, 640)
        with pytest.raises(errors.UnsupportedHeadDim, match="640"):
            self.attention(wide, wide, wide)


class TestStreaming(Suite):
    backend = "streaming"
