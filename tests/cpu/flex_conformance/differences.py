"""Where ca.flex_attention differs from torch's, and why: one table, true by row; docs/flex_conformance.md shows it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

import composattn as ca
from composattn import errors
from tests.cpu.flex_conformance.truth import Mods

LENGTH = 32
Q, K, V = (torch.randn(2, 4, LENGTH, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
HALVES = [t.to(torch.float8_e4m3fn) for t in (Q, K, V)]


@dataclass(frozen=True)
class Difference:
    """`shown` is a call of ours: it gives `error`, or with None what torch's documentation promises."""

    what: str
    torchs: str
    ours: str
    why: str
    shown: Callable[[], Any]
    error: type[errors.ComposattnError] | None = None


MEANS = torch.randn(LENGTH, 3, generator=torch.Generator().manual_seed(3))
CHOSEN = torch.tensor([[0, 1], [1, 0]])


def distance_of_vectors(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score * torch.exp(-(MEANS[q] - MEANS[kv]).pow(2).sum(-1).sqrt())


def sum_of_a_row(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + MEANS[kv].sum(-1)


def one_of_a_row(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (CHOSEN[q // 16] == (kv // 16).unsqueeze(-1)).any(-1)


class StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(score: Any) -> Any:
        return torch.round(score)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


def with_a_rule_of_its_own(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return StraightThrough.apply(score)


HUGE = torch.linspace(-6e4, 6e4, LENGTH).half()
BYTES = torch.arange(LENGTH, dtype=torch.uint8)


def difference_of_bytes(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + 0.1 * (BYTES[q] - BYTES[kv])


def half_of_the_blocks() -> Any:
    """A mask that says more than its blocks: only those of the first 16 keys are listed."""
    whole = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH, "cpu", 16)
    return BlockMask.from_kv_blocks(
        torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32), BLOCK_SIZE=16,
        mask_mod=whole.mask_mod, seq_lengths=(LENGTH, LENGTH),
    )  # fmt: skip


def same(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    torch.testing.assert_close(found, wanted)
    return found


def quiet(call: Callable[[], Any]) -> Callable[[], Any]:
    """Without the warning that options have no effect."""

    def run() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()

    return run


def gradients() -> Any:
    q, k, v = (t.clone().requires_grad_() for t in (Q, K, V))
    return torch.autograd.grad(ca.flex_attention(q, k, v).sum(), (q, k, v))


def untaken_branch() -> Any:
    q = Q.clone().requires_grad_()
    out = ca.flex_attention(q, K, V, score_mod=lambda s, b, h, q, kv: torch.where(s > 0, s.sqrt(), s))
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert gradient.isfinite().all()
    return gradient


DIFFERENCES = [
    Difference(
        "fp8 q, k, v", "taken by its GPU kernels", "`UnsupportedDType`; k and v alone are taken",
        "no output of 8 bits has a softmax's precision; `ca.attention` takes them, with `out_dtype=` and scales",
        lambda: ca.flex_attention(*HALVES), errors.UnsupportedDType,
    ),
    Difference(
        "k and v narrower than q", "taken", "`DTypeMismatch`",
        "the kernels multiply one type, or read 8 bits; cast k and v before the call",
        lambda: ca.flex_attention(Q, K.half(), V.half()), errors.DTypeMismatch,
    ),
    Difference(
        "three dimensions", "`NotImplementedError`", "`WrongRank`, a `ValueError`",
        "three dimensions are packed sequences here, which `ca.Varlen` describes; the error says so",
        lambda: ca.flex_attention(Q[0], K[0], V[0]), errors.WrongRank,
    ),
    Difference(
        "`kernel_options`", "tune its kernels", "nothing; a warning names those that torch has not",
        "the kernels differ; ours take `ca.Schedule`",
        quiet(lambda: ca.flex_attention(Q, K, V, kernel_options={"BLOCK_M": 16})),
    ),
    Difference(
        "keys of one batch for all queries", "asks for a BlockMask of all batches", "taken with or without a mask",
        "nothing here needs the mask's batch size", lambda: ca.flex_attention(Q, K[:1], V[:1]),
    ),
    Difference(
        "gradients on a CPU", "`NotImplementedError`", "there", "the streaming backend recomputes by tiles", gradients
    ),
    Difference(
        "the largest scores on a CPU", "`NotImplementedError`", "there", "every backend finds them on its way",
        lambda: ca.flex_attention(Q, K, V, return_aux=AuxRequest(max_scores=True)),
    ),
    Difference(
        "blocks of 96", "refused by its GPU kernels, whose tiles do not divide them", "taken",
        "kernels have tiles of their own; blocks are multiples of 16",
        lambda: ca.flex_attention(
            Q, K, V, block_mask=create_block_mask(lambda b, h, q, kv: q >= kv, 2, 4, LENGTH, LENGTH, "cpu", 96)
        ),
    ),
    Difference(
        "blocks of 1 or 8", "taken by `create_block_mask`, refused by its GPU kernels", "`UnsupportedBlockSize`",
        "tiles of keys and queries are multiples of 16; one block of a whole length, as in decoding, may have any size",
        lambda: ca.flex_attention(
            Q, K, V, block_mask=create_block_mask(lambda b, h, q, kv: q >= kv, 2, 4, LENGTH, LENGTH, "cpu", 8)
        ),
        errors.UnsupportedBlockSize,
    ),
    Difference(
        "blocks that say less than their mask_mod", "on a CPU the mask_mod alone counts, in its GPU kernels both",
        "both count", "one answer on every device",
        lambda: same(
            ca.flex_attention(Q, K, V, block_mask=half_of_the_blocks()),
            ca.attention(Q, K, V, mask_mod=lambda b, h, q, kv: (q >= kv) & (kv < 16)),
        ),
    ),
    Difference(
        "sums of integers narrower than 32 bits, as `bytes[q] - bytes[kv]`", "wrap around in their type",
        "are those of int32", "graphs have two integer types; write `.to(torch.uint8)` behind the sum to wrap it",
        lambda: same(
            ca.flex_attention(Q, K, V, score_mod=difference_of_bytes),
            ca.attention(Q, K, V, score_mod=lambda s, b, h, q, kv: s + 0.1 * (q - kv)),
        ),
    ),
    Difference(
        "a captured tensor that has more entries than the call has heads or batches, read at `h` or `b` itself",
        "its first entries are read", "`ModShapeMismatch`",
        "nobody said which are meant; capture those of the call, or say it: `ca.mask(mod).shifted(b=0)`",
        lambda: ca.flex_attention(Q, K, V, score_mod=lambda score, b, h, q, kv: score + MEANS[b, 0]),
        errors.ModShapeMismatch,
    ),
    Difference(
        "arithmetic of captured fp16 and bf16, and their comparison with numbers", "rounds to their type each time",
        "in fp32", "kernels have one float type",
        lambda: same(
            ca.flex_attention(Q, K, V, score_mod=lambda s, b, h, q, kv: s + (HUGE[q] - HUGE[kv] + HUGE[kv])),
            ca.flex_attention(Q, K, V, score_mod=lambda s, b, h, q, kv: s + HUGE[q]),
        ),
    ),
    Difference(
        "sums of integers that leave 32 or 64 bits", "wrap around in their type",
        "of positions in 64 bits; beyond them, and of captured int32 in kernels, they wrap, bounds on keys do not",
        "a limit of 2^63 - 1 is meant as none",
        lambda: ca.attention(Q, K, V, mask_mod=lambda b, h, q, kv: kv - q <= 2**63 - 1),
    ),
    Difference(
        "`.double()` in a mod", "fp64", "fp32; on the PyTorch backends fp64 if q or a captured tensor has it",
        "kernels compute mods in fp32, and refuse captured fp64; subtract integers before you cast them",
        lambda: ca.flex_attention(Q, K, V, score_mod=lambda s, b, h, q, kv: s + q.double() / LENGTH),
    ),
    Difference(
        "the gradient of a branch that is not taken, as in `torch.where(s > 0, s.sqrt(), s)`", "NaN if it is infinite",
        "not looked at", "a derivative is a formula with the same `where`",
        untaken_branch,
    ),
    Difference(
        "`torch.erfc(x)` of x above 1", "has all digits of its small values",
        "is `1 - torch.erf(x)`, right to 6e-8 in fp32, 0 from 4 on", "kernels have `erf` alone",
        lambda: ca.flex_attention(Q, K, V, score_mod=lambda s, b, h, q, kv: s * torch.erfc(s)),
    ),
    Difference(
        "rows that a score mod leaves nothing above -2^25, as `torch.where(seen, s, -1e9)` does where nothing is seen",
        "the mean of V",
        "0, as of a row that a mask hides, with no gradient", "no LSE in fp32 holds the sum of such a row",
        lambda: ca.flex_attention(Q, K, V, score_mod=lambda s, b, h, q, kv: torch.where(kv < q, s, -1e9)),
    ),
    Difference(
        "`return_lse=True`", "a `FutureWarning`, once", "no warning", "it stays; `return_aux` says the same",
        lambda: ca.flex_attention(Q, K, V, return_lse=True),
    ),
    Difference(
        "`isinstance(score, torch.Tensor)`, `torch.is_tensor(q_idx)` in a mod", "True",
        "False, so a branch on it takes the other side, and signatures that are checked at run time refuse the mod",
        "values in a mod stand for numbers of a formula and hold nothing; ask `hasattr(x, \"dtype\")`, and leave mods "
        "out of the check",
        lambda: ca.flex_attention(Q, K, V, score_mod=lambda s, b, h, q, kv: s * 2 if torch.is_tensor(s) else s),
    ),
    Difference(
        "text of a captured tensor (f-strings, `str`, `repr`, `print`) in a mod", "taken", "`ScalarExtraction`",
        "it would be taken once, when the mod is traced; make it outside",
        lambda: ca.flex_attention(Q, K, V, score_mod=lambda s, b, h, q, kv: s * len(f"{MEANS}")),
        errors.ScalarExtraction,
    ),
    Difference(
        "a torch.autograd.Function with a backward of its own in a mod", "its backward is taken",
        "`UnsupportedOperation`",
        "a mod becomes a formula and has its derivative; a backward that equals it is accepted",
        lambda: ca.flex_attention(Q, K, V, score_mod=with_a_rule_of_its_own), errors.UnsupportedOperation,
    ),
]  # fmt: skip

VECTORS = {
    "vectors of a captured tensor, reduced by a sum": Mods.of(distance_of_vectors),
    "a sum over a row of a captured tensor": Mods.of(sum_of_a_row),
    "a row of ids that any key's may equal (attn-gym's VSA)": Mods.of(None, one_of_a_row),
}
"""Rows of captured tensors that mods reduce."""
