"""The backward for Blackwell, emulated in several modes: right by fp64, and the same bits in each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.planning.cut import Cut
from composattn.backends.fused.running.emulated import emulating
from composattn.backends.fused.tiles.target import BLACKWELL
from composattn.emulator.mode import EAGER, LATE, random_mode
from composattn.mods import masks
from composattn.mods.masks import causal, document, sliding_window
from composattn.mods.scores import alibi, softcap
from composattn.testing import Case, assert_attention_close, make_case, make_varlen_case
from composattn.testing import run as run_case
from tests.compile.test_backward_emulated import check as check_kernels
from tests.pairs import sharing

MODES = (EAGER, LATE, random_mode(1), random_mode(2))
BF16: dict[str, Any] = {"dtype": torch.bfloat16}
IDS = torch.arange(333) // 70
KINDS = torch.randint(0, 3, (1, 2, 7, 10), generator=torch.Generator().manual_seed(4), dtype=torch.int8)


def learned(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(5)).requires_grad_()


def by(mod: Callable[..., Any]) -> dict[str, Any]:
    return {"score_mod": mod}


BIAS, GAIN, NUMBER = learned(2, 700), learned(2), learned()
ROW, COLUMN, PAIR = learned(2, 333), learned(333), learned(2, 150, 150)
CASES: dict[str, Callable[[], Case]] = {
    "causal-gqa2-d128": lambda: make_case(0, batch=1, heads=2, kv_heads=1, q_len=200, kv_len=333, dim=128,
                                          mask_mod=causal(), **BF16),
    "plain-d64-fp16": lambda: make_case(1, batch=2, heads=1, q_len=130, kv_len=77, dim=64, dtype=torch.float16),
    "window-d96-dv40": lambda: make_case(2, batch=1, heads=2, q_len=300, dim=96, v_dim=40,
                                         mask_mod=causal() & sliding_window(50), **BF16),
    "alibi-d64-dv128": lambda: make_case(3, batch=1, heads=2, q_len=200, dim=64, v_dim=128, score_mod=alibi(2),
                                         mask_mod=causal(), **BF16),
    "softcap-gqa2-d128": lambda: make_case(4, batch=1, heads=2, kv_heads=1, q_len=150, kv_len=200, dim=128,
                                           score_mod=softcap(5.0), mask_mod=causal(), **BF16),
    "documents-d8": lambda: make_case(5, batch=1, heads=2, q_len=333, dim=8, mask_mod=document(IDS), **BF16),
    "hidden-rows-and-keys-d64": lambda: make_case(
        6, batch=1, heads=1, q_len=60, kv_len=300, dim=64, mask_mod=lambda b, h, q, kv: (q >= 20) & (kv < 30), **BF16
    ),
    "lists-d64": lambda: make_case(
        7, batch=1, heads=2, kv_heads=1, q_len=300, dim=64,
        mask_mod=ca.BlockSparse(KINDS, (48, 32), partial=causal()), **BF16,
    ),
    "grid-d128": lambda: make_case(8, batch=1, heads=1, q_len=300, dim=128,
                                   mask_mod=masks.neighborhood((15, 20), (3, 5)), **BF16),
    "packed-d64": lambda: make_varlen_case(9, [150, 0, 130, 37], [150, 20, 200, 5], heads=2, kv_heads=1, dim=64,
                                           mask_mod=causal(), **BF16),
    "packed-d128": lambda: make_varlen_case(10, [15, 0, 130, 1], heads=2, dim=128, score_mod=alibi(2), **BF16),
    "distance-d64": lambda: make_case(11, batch=1, heads=2, kv_heads=1, q_len=150, kv_len=200, dim=64,
                                      **by(lambda s, b, h, q, kv: s + BIAS[h, q - kv + 333]), **BF16),
    "distance-in-softcap-d128": lambda: make_case(
        12, batch=1, heads=2, q_len=150, dim=128, mask_mod=causal(),
        **by(lambda s, b, h, q, kv: 5 * torch.tanh((s + BIAS[h, q - kv + 333]) / 5)), **BF16,
    ),
    "head-and-number-d64": lambda: make_case(
        13, batch=1, heads=2, q_len=150, dim=64,
        **by(lambda s, b, h, q, kv: s - 0.01 * GAIN[h] * (q - kv) + NUMBER * 0.1 * (q - kv)), **BF16,
    ),
    "row-and-column-d128": lambda: make_case(
        14, batch=1, heads=2, q_len=150, kv_len=200, dim=128,
        **by(lambda s, b, h, q, kv: s + 0.01 * ROW[h, q] * (q - kv) + COLUMN[kv]), **BF16,
    ),
    "pair-d64": lambda: make_case(15, batch=1, heads=2, q_len=150, dim=64,
                                  **by(lambda s, b, h, q, kv: s + PAIR[h, q, kv]), **BF16),
    "causal-gqa2-d256": lambda: make_case(20, batch=1, heads=2, kv_heads=1, q_len=200, kv_len=150, dim=256,
                                          mask_mod=causal(), **BF16),
    "window-d192-dv128": lambda: make_case(21, batch=1, heads=2, q_len=300, dim=192, v_dim=128,
                                           mask_mod=causal() & sliding_window(50), **BF16),
    "softcap-d160-fp16": lambda: make_case(22, batch=1, heads=2, q_len=150, kv_len=77, dim=160, score_mod=softcap(5.0),
                                           dtype=torch.float16),
    "alibi-d40-dv256": lambda: make_case(23, batch=1, heads=2, q_len=130, kv_len=200, dim=40, v_dim=256,
                                         score_mod=alibi(2), mask_mod=causal(), **BF16),
    "documents-d256-dv64": lambda: make_case(24, batch=1, heads=2, q_len=333, dim=256, v_dim=64,
                                             mask_mod=document(IDS), **BF16),
    "hidden-rows-and-keys-d192": lambda: make_case(
        25, batch=1, heads=1, q_len=60, kv_len=300, dim=192,
        mask_mod=lambda b, h, q, kv: (q >= 20) & (kv < 30), **BF16,
    ),
    "lists-d192": lambda: make_case(
        26, batch=1, heads=2, kv_heads=1, q_len=300, dim=192,
        mask_mod=ca.BlockSparse(KINDS, (48, 32), partial=causal()), **BF16,
    ),
    "packed-gqa2-d256": lambda: make_varlen_case(27, [150, 0, 130, 37], [150, 20, 200, 5], heads=2, kv_heads=1, dim=256,
                                                 mask_mod=causal(), **BF16),
    "distance-d192": lambda: make_case(28, batch=1, heads=2, kv_heads=1, q_len=150, kv_len=200, dim=192,
                                       **by(lambda s, b, h, q, kv: s + BIAS[h, q - kv + 333]), **BF16),
    "distance-in-softcap-d256": lambda: make_case(
        29, batch=1, heads=2, q_len=150, dim=256, mask_mod=causal(),
        **by(lambda s, b, h, q, kv: 5 * torch.tanh((s + BIAS[h, q - kv + 333]) / 5)), **BF16,
    ),
    "row-and-column-d256": lambda: make_case(
        30, batch=1, heads=2, q_len=150, kv_len=200, dim=256,
        **by(lambda s, b, h, q, kv: s + 0.01 * ROW[h, q] * (q - kv) + COLUMN[kv]), **BF16,
    ),
    "head-and-number-d256-dv128": lambda: make_case(
        31, batch=1, heads=2, q_len=150, dim=256, v_dim=128,
        **by(lambda s, b, h, q, kv: s - 0.01 * GAIN[h] * (q - kv) + NUMBER * 0.1 * (q - kv)), **BF16,
    ),
    "pair-d192-dv128": lambda: make_case(32, batch=1, heads=2, q_len=150, dim=192, v_dim=128,
                                         **by(lambda s, b, h, q, kv: s + PAIR[h, q, kv]), **BF16),
}  # fmt: skip
CHOSEN = ((2, "causal-gqa2-d256"),)  # by day, in three modes
CASES |= {
    "hidden-rows-and-keys-d128": lambda: make_case(
        40, batch=1, heads=1, q_len=60, kv_len=300, dim=128,
        mask_mod=lambda b, h, q, kv: (q >= 20) & (kv < 30), **BF16,
    ),
    "documents-d128": lambda: make_case(41, batch=1, heads=2, q_len=333, dim=128, mask_mod=document(IDS), **BF16),
    "head-and-number-d128": lambda: make_case(
        42, batch=1, heads=2, q_len=150, kv_len=300, dim=128,
        **by(lambda s, b, h, q, kv: s - 0.01 * GAIN[h] * (q - kv) + NUMBER * 0.1 * (q - kv)), **BF16,
    ),
    "pair-d128": lambda: make_case(43, batch=1, heads=2, q_len=150, dim=128,
                                   **by(lambda s, b, h, q, kv: s + PAIR[h, q, kv]), **BF16),
    "packed-head-d128": lambda: make_varlen_case(
        44, [150, 0, 130, 37], [150, 20, 200, 5], heads=2, kv_heads=1, dim=128, mask_mod=causal(),
        **by(lambda s, b, h, q, kv: s - 0.01 * GAIN[h] * (q - kv)), **BF16,
    ),
    "window-d256": lambda: make_case(50, batch=1, heads=2, q_len=300, kv_len=333, dim=256,
                                     mask_mod=causal() & sliding_window(50), **BF16),
    "softcap-d200-dv256-fp16": lambda: make_case(51, batch=1, heads=2, q_len=300, kv_len=140, dim=200, v_dim=256,
                                                 score_mod=softcap(5.0), dtype=torch.float16),
    "alibi-gqa2-d256-dv200": lambda: make_case(52, batch=1, heads=2, kv_heads=1, q_len=290, kv_len=200, dim=256,
                                               v_dim=200, score_mod=alibi(2), mask_mod=causal(), **BF16),
    "hidden-rows-and-keys-d256": lambda: make_case(
        53, batch=1, heads=1, q_len=60, kv_len=300, dim=256,
        mask_mod=lambda b, h, q, kv: (q >= 20) & (kv < 30), **BF16,
    ),
    "distance-d256": lambda: make_case(54, batch=1, heads=2, kv_heads=1, q_len=270, kv_len=200, dim=256,
                                       **by(lambda s, b, h, q, kv: s + BIAS[h, q - kv + 333]), **BF16),
    "packed-d256": lambda: make_varlen_case(55, [15, 0, 300, 1], heads=2, dim=256, score_mod=alibi(2), **BF16),
    "packed-row-d96": lambda: make_varlen_case(
        45, [150, 0, 130, 37], [150, 20, 200, 5], heads=2, dim=96, mask_mod=causal(),
        **by(lambda s, b, h, q, kv: s + 0.01 * ROW[h, q] * (q - kv)), **BF16,
    ),
    "packed-pair-d64": lambda: make_varlen_case(
        46, [150, 0, 130, 37], [150, 20, 140, 5], heads=2, dim=64, mask_mod=causal(),
        **by(lambda s, b, h, q, kv: s + PAIR[h, q, kv]), **BF16,
    ),
}  # fmt: skip
CASES |= {
    "causal-gqa2-d192-dv128": lambda: make_case(50, batch=1, heads=2, kv_heads=1, q_len=200, kv_len=333, dim=192,
                                                v_dim=128, mask_mod=causal(), **BF16),
    "softcap-gqa2-d192-dv128": lambda: make_case(
        51, batch=1, heads=2, kv_heads=1, q_len=150, kv_len=200, dim=192, v_dim=128, score_mod=softcap(5.0),
        mask_mod=causal(), **BF16,
    ),
    "alibi-fp16-d160-dv64": lambda: make_case(52, batch=1, heads=2, q_len=300, kv_len=200, dim=160, v_dim=64,
                                              score_mod=alibi(2), mask_mod=causal(), dtype=torch.float16),
    "packed-d192-dv128": lambda: make_varlen_case(53, [150, 0, 330, 37], [150, 20, 200, 5], heads=2, kv_heads=1,
                                                  dim=192, v_dim=128, mask_mod=causal(), **BF16),
    "hidden-rows-and-keys-d192-dv128": lambda: make_case(
        54, batch=1, heads=1, q_len=60, kv_len=300, dim=192, v_dim=128,
        mask_mod=lambda b, h, q, kv: (q >= 20) & (kv < 30), **BF16,
    ),
    "distance-d192-dv128": lambda: make_case(
        55, batch=1, heads=2, kv_heads=1, q_len=150, kv_len=200, dim=192, v_dim=128,
        **by(lambda s, b, h, q, kv: s + BIAS[h, q - kv + 333]), **BF16,
    ),
    "head-and-number-d192-dv128": lambda: make_case(
        56, batch=1, heads=2, q_len=150, kv_len=300, dim=192, v_dim=128,
        **by(lambda s, b, h, q, kv: s - 0.01 * GAIN[h] * (q - kv) + NUMBER * 0.1 * (q - kv)), **BF16,
    ),
    "column-d192-dv128": lambda: make_case(57, batch=1, heads=2, q_len=150, kv_len=200, dim=192, v_dim=128,
                                           **by(lambda s, b, h, q, kv: s + COLUMN[kv]), **BF16),
    "causal-d128-dv192": lambda: make_case(58, batch=1, heads=2, q_len=300, kv_len=200, dim=128, v_dim=192,
                                           mask_mod=causal(), **BF16),
}  # fmt: skip
BY_TWO = "-d128", "-d192", "-d192-dv128", "-d160-dv64", "-d128-dv192"


def by_two(name: str) -> bool:
    """Whether plans of a case may have two blocks: those of D or Dv above 96 may."""
    return name.endswith(BY_TWO) or any(f"d{width}" in name for width in (200, 256))


def chosen() -> list[Any]:
    """(blocks that share a tile of keys, name of a case)."""
    found = [(1, name) for name in CASES] + [(2, name) for name in CASES if by_two(name)]
    return [pytest.param(*each, marks=[] if each in CHOSEN else pytest.mark.slow) for each in found]


@pytest.mark.parametrize("in_order", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "in-order"])
@pytest.mark.parametrize(("blocks", "name"), chosen())
def test_all_modes_give_the_same_right_gradients(name: str, blocks: int, in_order: bool) -> None:
    """dQ too where it is summed in order; captured sums are fixed-point numbers, so their order is free."""
    case = CASES[name]()
    attention = functools.partial(ca.attention, backend="blackwell-emulated", deterministic=in_order)
    results, modes = [], MODES[:3] if (blocks, name) in CHOSEN else MODES
    with sharing(blocks) as asked:
        for mode in modes:
            with emulating(mode):
                results.append(run_case(attention, case))
    assert asked or not by_two(name)
    assert {"dq", "dk", "dv"} <= set(results[0])
    assert_attention_close(results[0], case)
    for mode, result in zip(modes, results, strict=True):
        for key in result.keys() - (set() if in_order else {"dq"}):
            assert torch.equal(result[key], results[0][key]), f"{key} differs in {mode} mode"
    if not in_order:
        close = [float((r["dq"] - results[0]["dq"]).double().norm()) for r in results]
        assert max(close) <= torch.finfo(case.q.dtype).eps * float(results[0]["dq"].double().norm())


# facts and cuts as of `tests.compile.test_backward_emulated`
CUT: dict[str, tuple[tuple[Any, ...], tuple[int, int, int]]] = {
    "all-cut-gqa4-d64": (("causal", torch.bfloat16, 4, 1, 150, 200, 64, 64, True, False), (2, 0, 2)),
    "last-cut-d128": (("plain", torch.bfloat16, 2, 2, 250, 170, 128, 128, False, False), (4, 3, 3)),
    "all-cut-gqa4-d128-by-two": (("causal", torch.bfloat16, 4, 1, 300, 400, 128, 128, True, False), (2, 0, 2)),
    "last-cut-in-order-d128-by-two": (("plain", torch.bfloat16, 2, 2, 250, 300, 128, 128, False, True), (4, 3, 3)),
    "all-cut-d256": (("causal", torch.bfloat16, 4, 1, 150, 100, 256, 256, True, False), (2, 0, 2)),
    "all-cut-gqa4-d256-by-two": (("causal", torch.bfloat16, 4, 1, 300, 200, 256, 256, True, False), (2, 0, 2)),
    "last-cut-in-order-d200-by-two": (("plain", torch.bfloat16, 2, 2, 300, 170, 200, 256, False, True), (4, 3, 3)),
    "last-cut-d192-dv128": (("plain", torch.bfloat16, 2, 2, 250, 80, 192, 128, False, False), (4, 3, 3)),
    "all-cut-gqa4-d192-dv128-by-two": (("causal", torch.bfloat16, 4, 1, 300, 400, 192, 128, True, False), (2, 0, 2)),
    "last-cut-in-order-d192-dv128-by-two": (
        ("plain", torch.bfloat16, 2, 2, 250, 300, 192, 128, False, True),
        (4, 3, 3),
    ),
    "all-cut-in-order-d96": (("window", torch.float16, 2, 1, 200, 200, 96, 64, False, True), (2, 0, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CUT)
def test_tiles_that_blocks_share_give_the_same_gradients(case: str, folder: Path, generator: torch.Generator) -> None:
    facts, cut = CUT[case]
    with sharing(2 if "by-two" in case else 1):
        check_kernels(facts, folder, generator, BLACKWELL, Cut(*cut), mode=random_mode(3))
