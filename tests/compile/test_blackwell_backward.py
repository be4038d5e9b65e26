"""The Blackwell backward, compiled with no GPU: it fits, spills nothing, frees what it allocates, loops shortly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

from benchmarks.model.sass import instructions
from composattn.analysis.captured_gradient import GradientProgram
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.compiling.inspect import Artifact
from composattn.backends.fused.planning.plan_backward import BackwardPlan, BackwardPlans
from composattn.backends.fused.tiles.target import BLACKWELL, TARGETS
from composattn.mods import alibi, causal, document, sliding_window, softcap
from tests.compile.blackwell_matrix import frees_what_it_allocates
from tests.compile.blackwell_plans import PACKED, backward_plans
from tests.pairs import sharing

B300 = TARGETS[10, 3]
DOCUMENTS = torch.arange(2048, dtype=torch.int32) // 300
FA4_LOOP = 583  # instructions of flash-attn-4 4.0.0b36 of 64 queries and 32 keys of a warp, D 128, causal


SIZES = (8, 2048), (2048,), (8, 4096), (2048, 2048), (8,)
ROW, COLUMN, BIAS, PAIRS, SLOPES = (torch.randn(*size, requires_grad=True) for size in SIZES)


def by_row(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + 0.01 * ROW[h, q] * (q - kv)


def by_column(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + COLUMN[kv]


def by_pair(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + PAIRS[q, kv]


def by_head(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s - SLOPES[h] * (q - kv)


def by_distance_alone(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + BIAS[h, q - kv + 2048]


def by_distance(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return 5 * torch.tanh((s + BIAS[h, q - kv + 2048]) / 5)


def by_one(**given: Any) -> BackwardPlans:
    with sharing(1):
        return backward_plans(**given)


CAUSAL, CAUSAL_BY_ONE = backward_plans(mask=causal()), by_one(mask=causal())
PLANS = {
    "causal-d128-by-two": CAUSAL,
    "causal-d128": CAUSAL_BY_ONE,
    "causal-d256": by_one(mask=causal(), d=256),
    "causal-d256-by-two": backward_plans(mask=causal(), d=256),
}
MORE = {
    "plain-d128-by-two": backward_plans(),
    "causal-d128-by-two-sm103": backward_plans(mask=causal(), target=B300),
    "causal-packed-d128-by-two": backward_plans(mask=causal(), layout=PACKED),
    "plain-d128-by-two-in-order": backward_plans(in_order=True),
    "alibi-causal-d128-by-two": backward_plans(alibi(8), causal()),
    "softcap-causal-d128-by-two": backward_plans(softcap(30.0), causal()),
    "by-column-d128-by-two": backward_plans(by_column, causal(), learned=True),
    "by-distance-d128-by-two": backward_plans(by_distance_alone, causal(), learned=True),
    "by-head-packed-d128-by-two": backward_plans(by_head, causal(), layout=PACKED, learned=True),
    "alibi-causal-d128-by-two-in-order-sm103": backward_plans(alibi(8), causal(), in_order=True, target=B300),
    "plain-d128": by_one(),
    "plain-d64": backward_plans(d=64),
    "causal-packed-d64-sm103": backward_plans(mask=causal(), d=64, layout=PACKED, target=B300),
    "causal-d128-sm103": by_one(mask=causal(), target=B300),
    "window-d96-in-order": backward_plans(mask=sliding_window(512), d=96, in_order=True),
    "window-d128-in-order": by_one(mask=causal() & sliding_window(512), in_order=True),
    "documents-d128": backward_plans(mask=document(DOCUMENTS)),
    "documents-packed-d64": backward_plans(mask=document(DOCUMENTS) & causal(), d=64, layout=PACKED),
    "alibi-causal-d128": by_one(score=alibi(8), mask=causal()),
    "softcap-causal-d128": by_one(score=softcap(30.0), mask=causal()),
    "softcap-d64-dv128": backward_plans(softcap(30.0), d=64, dv=128),
    "plain-d256": by_one(d=256),
    "plain-d256-by-two": backward_plans(d=256),
    "causal-packed-d192-by-two": backward_plans(mask=causal(), d=192, layout=PACKED),
    "window-d256-by-two-in-order-sm103": backward_plans(
        mask=causal() & sliding_window(512), d=256, in_order=True, target=B300
    ),
    "softcap-causal-d256-by-two-in-order": backward_plans(softcap(30.0), causal(), d=256, in_order=True),
    "by-distance-d256-dv64-by-two": backward_plans(by_distance_alone, causal(), d=256, dv=64, learned=True),
    "causal-packed-d192-sm103": by_one(mask=causal(), d=192, layout=PACKED, target=B300),
    "window-d256-in-order": by_one(mask=causal() & sliding_window(512), d=256, in_order=True),
    "softcap-causal-d256": by_one(score=softcap(30.0), mask=causal(), d=256),
    "causal-d192-dv128": by_one(mask=causal(), d=192, dv=128),
    "causal-d192-dv128-by-two": backward_plans(mask=causal(), d=192, dv=128),
    "alibi-causal-d192-dv128-by-two-in-order-sm103": backward_plans(
        alibi(8), causal(), d=192, dv=128, in_order=True, target=B300
    ),
    "softcap-causal-d192-dv128-by-two": backward_plans(softcap(30.0), causal(), d=192, dv=128),
    "by-distance-packed-d192-dv128-by-two": backward_plans(
        by_distance_alone, causal(), d=192, dv=128, layout=PACKED, learned=True
    ),
    "causal-d128-dv192-by-two": backward_plans(mask=causal(), d=128, dv=192),
    "documents-d256-dv64": backward_plans(mask=document(DOCUMENTS) & causal(), d=256, dv=64),
    "by-row-d64": backward_plans(by_row, causal(), d=64, learned=True),
    "by-row-d128": backward_plans(by_row, causal(), d=128, learned=True),
    "by-row-packed-d128": backward_plans(by_row, causal(), d=128, layout=PACKED, learned=True),
    "by-pair-packed-d96": backward_plans(by_pair, causal(), d=96, layout=PACKED, learned=True),
    "softcap-causal-d256-in-order-sm103": by_one(score=softcap(30.0), mask=causal(), d=256, in_order=True, target=B300),
    "by-distance-in-softcap-packed-d256": backward_plans(by_distance, causal(), d=256, layout=PACKED, learned=True),
    "by-column-d256": backward_plans(by_column, causal(), d=256, learned=True),
    "by-distance-in-softcap-d256": backward_plans(by_distance, causal(), d=256, learned=True),
}


def check_lean(artifact: Artifact) -> None:
    if artifact.registers is None or not artifact.assembly:
        pytest.skip("needs cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)")
    assert (artifact.spills, artifact.stack) == (0, 0)
    assert artifact.shared_memory <= BLACKWELL.shared_memory
    assert artifact.registers * artifact.threads <= BLACKWELL.registers
    plan = artifact.plan
    assert isinstance(plan, BackwardPlan)
    staged = plan.tiling.dq_room > 0
    for name in ("UTCHMMA", "LDTM", "STTM", "UTMALDG", "UTMASTG", *(["UBLKRED"] if staged else [])):
        assert artifact.mnemonics[name] > 0, name
    sums = isinstance(plan.program, GradientProgram)
    added = "sums of captured tensors are added from registers, and dQ that no shared memory stages"
    assert (artifact.mnemonics["REDG"] > 0) == (sums or not staged), added
    assert frees_what_it_allocates(artifact.ptx, plan.tiling.columns.allocated)


@pytest.mark.parametrize("name", [*PLANS, *MORE])
def test_as_many_blocks_share_a_tile_as_the_name_says(name: str) -> None:
    assert (PLANS | MORE)[name].main.tiling.sharing == (2 if "by-two" in name else 1)


@pytest.mark.parametrize("name", PLANS)
def test_compiles_lean(name: str, folder: Path) -> None:
    check_lean(compile_offline(PLANS[name].main, folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_compile_lean(name: str, folder: Path) -> None:
    found = MORE[name]
    check_lean(compile_offline(found.main, folder))
    for plan in (found.preprocess, found.postprocess):
        made = compile_offline(plan, folder)
        assert (made.spills, made.stack) == (0, 0)


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_loops_are_as_short_as_those_that_were_counted(blocks: int, folder: Path) -> None:
    """Instructions of a query tile: of a warp that computes P and dS of 64 queries and 32 keys, and of one that takes
    dQ out; of the copies.
    """
    artifact = compile_offline((CAUSAL if blocks == 2 else CAUSAL_BY_ONE).main, folder)
    if not artifact.assembly:
        pytest.skip("needs nvdisasm (PyPI: nvidia-cuda-nvdisasm)")
    code = instructions(artifact)
    loops = [(i.target, n) for n, i in enumerate(code) if i.target is not None and i.target <= n]
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    counted = COUNTED[blocks]
    of = {name: [b - a + 1 for a, b in inner if any(i.name == name for i in code[a:b])] for name in counted}
    assert of == {name: [pytest.approx(n, rel=0.02)] for name, n in counted.items()}
    assert of["MUFU"][0] <= FA4_LOOP


COUNTED = {1: {"MUFU": 403, "UBLKRED": 121, "UTMALDG": 56}, 2: {"MUFU": 449, "UBLKRED": 74, "UTMALDG": 75}}
