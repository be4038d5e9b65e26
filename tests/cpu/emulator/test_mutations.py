"""Mutants of our own kernels' PTX: nearly all are caught, and the survivors are of the kinds that change nothing.

`python -m tests.cpu.emulator.test_mutations [forward|backward|warp|warp-in-bulk|warp-backward|warp-in-order|blackwell|
blackwell-backward|blackwell-pair|blackwell-wide|blackwell-wide-pair|blackwell-query-pair] [head dim] [kind] [I/N]`
prints every verdict (of each N-th mutant from the I-th on): docs/emulator.md.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.backends.fused.tiles.target import AMPERE, BLACKWELL, HOPPER, TARGETS, Target
from composattn.call.problem import Problem
from composattn.emulator.launch import Result, run
from composattn.emulator.mode import Mode
from composattn.emulator.program import PtxProgram
from composattn.mods import causal
from tests.cpu.emulator.mutate import MODES, Trial, Verdict, judge
from tests.pairs import sharing

HAS_DSL = importlib.util.find_spec("cutlass") is not None
NEEDS_DSL = pytest.mark.skipif(not HAS_DSL, reason="nvidia-cutlass-dsl is not installed")


FEW = dataclasses.replace(HOPPER, sms=2)
"""So few SMs that a block of the backward takes one tile of keys after the other."""

# (queries, keys, query heads) of the trials, one key head each. The first has several tiles of both, cut. In the others
# what a kernel compares comes out equal: whole tiles, one more or less, ends at either of the rows (r, r + 8) that a
# thread has of each 16, a group of one head.
ON_HOPPER = ((400, 500, 2), (192, 256, 2), (196, 129, 2), (191, 385, 1), (385, 384, 2))
# For tiles of 128 queries and 64 keys that threads copy 16 rows at a time: ends in each of these, and in each 8 of the
# 32 rows of a warp; whole tiles, more keys than queries.
ON_WARP = ((132, 68, 2), (148, 84, 1), (172, 108, 2), (188, 124, 1), (196, 129, 2), (212, 192, 1), (236, 385, 1),
           (252, 256, 2))  # fmt: skip
# The same for tiles of 128 keys, of which a warp has 32, and 32 queries in two stages: queries and keys change places,
# where more keys than queries leave tiles that nobody sees; queries that end within the second 16 rows of the first of
# their tiles that a block sees.
OF_WARP_KEYS = (*((keys, queries, heads) for queries, keys, heads in ON_WARP), (148, 140, 1))
# For blocks of two query tiles of 128 rows, under a mask that ends at the bottom right: a last block whose second tile
# has no queries or one, blocks and first tiles with no keys, one kv tile and several more than the rings have
# slots, one key in all.
ON_BLACKWELL = ((384, 384, 1), (256, 128, 1), (384, 128, 1), (257, 129, 2), (640, 640, 1), (130, 1, 1), (200, 328, 1),
                (768, 800, 1))  # fmt: skip
# For blocks of 128 keys (of wide rows 64) and query tiles of 128: tiles of keys that no query sees, one query tile and
# several, ends in the middle of both, one key; a tile of 256 keys with one query tile in all.
OF_KEYS = ((400, 300, 2), (256, 256, 1), (130, 321, 1), (129, 128, 2), (200, 1, 1), (100, 200, 1))
SHAPES = {"forward": ON_HOPPER, "backward": ON_HOPPER, "warp": ON_WARP, "warp-in-bulk": ON_WARP,
          "warp-backward": OF_WARP_KEYS, "warp-in-order": ((400, 420, 1),),
          "blackwell": ON_BLACKWELL, "blackwell-backward": OF_KEYS, "blackwell-pair": OF_KEYS,
          "blackwell-wide": OF_KEYS, "blackwell-wide-pair": OF_KEYS, "blackwell-query-pair": OF_KEYS}  # fmt: skip
WIDTHS = {"blackwell-pair": 128, "blackwell-wide": 192, "blackwell-wide-pair": 192,
          "blackwell-query-pair": 256}  # of a row, by default 64  # fmt: skip


def _inputs(dim: int, queries: int, keys: int, heads: int, v_dim: int | None = None) -> tuple[torch.Tensor, ...]:
    make = torch.Generator().manual_seed(4)
    q, dout = (torch.randn(1, heads, queries, d, generator=make).to(torch.bfloat16) for d in (dim, v_dim or dim))
    k, v = (torch.randn(1, 1, keys, d, generator=make).to(torch.bfloat16) for d in (dim, v_dim or dim))
    return q, k, v, dout


class Calls:
    """Stands for the compiler: the kernels that a launcher asks for, emulated, and their last arguments by module."""

    def __init__(self) -> None:
        self.kernels: dict[str, Any] = {}
        self.arguments: dict[str, list[Any]] = {}

    def kernel_of(self, plan: Any) -> Callable[..., None]:
        from composattn.backends.fused.running.emulated import EmulatedKernel

        kernel = self.kernels[plan.step] = EmulatedKernel(plan)

        def call(*arguments: Any) -> None:
            self.arguments[plan.step] = list(arguments)
            kernel(*arguments)

        return call


def forward_trial(
    dim: int, *shape: int, target: Target = HOPPER, align: str = "top_left", first_key: float = 1.0
) -> tuple[str, Trial]:
    """Under a causal mask. `first_key`, a factor: with a large one maxima rise at the last tile, and O is rescaled."""
    from composattn.backends.fused.planning.plan import plan_forward
    from composattn.backends.fused.running.launch import ForwardLauncher

    q, k, v, _ = _inputs(dim, *shape)
    k[:, :, 0] *= first_key
    calls = Calls()
    problem = dataclasses.replace(Problem.of(q, k, v), schedule=ca.Schedule(split_kv=1))
    plan = plan_forward(problem, ca.Attention(mask_mod=causal(align)).program, target)
    out, lse, _ = ForwardLauncher(plan, calls.kernel_of)(q, k, v, dim**-0.5)
    results = out, lse
    return _trial(calls.kernels[plan.step], calls.arguments[plan.step], results)


def backward_trial(
    dim: int,
    *shape: int,
    target: Target = FEW,
    blocks: int = 1,
    v_dim: int | None = None,
    in_order: bool = False,
) -> tuple[str, Trial]:
    """Under a causal mask. With dQ summed `in_order`, only the same bits are the right result."""
    from composattn.backends.fused.planning.arguments import MainArguments
    from composattn.backends.fused.planning.plan_backward import COUNTER, plan_backward
    from composattn.backends.fused.running.launch_backward import BackwardLauncher

    q, k, v, dout = _inputs(dim, *shape, v_dim=v_dim)
    program = ca.Attention(mask_mod=causal()).program
    out, lse = ca.Attention(mask_mod=causal(), backend="streaming")(q, k, v, return_lse=True)
    calls = Calls()
    with sharing(blocks):
        plans = plan_backward(Problem.of(q, k, v), program, target, has_dlse=False, deterministic=in_order)
    BackwardLauncher(plans, calls.kernel_of)(q, k, v, out, lse, dout, None, dim**-0.5)
    arguments = MainArguments(*calls.arguments[plans.main.step])
    arguments = arguments._replace(dq_accum=torch.zeros_like(arguments.dq_accum))
    results = arguments.dq_accum, arguments.dk, arguments.dv
    counter = arguments.workspace[:COUNTER]  # of tiles of keys that were taken
    zero = arguments.dq_accum, counter, *([arguments.turns] if in_order else [])
    return _trial(calls.kernels[plans.main.step], arguments, results, zero, exact=in_order)


def _trial(
    kernel: Any,
    arguments: Sequence[Any],
    results: tuple[Any, ...],
    zero: tuple[torch.Tensor, ...] = (),
    exact: bool = False,
) -> tuple[str, Trial]:
    """The kernel's PTX and one call of it."""

    def launch(program: PtxProgram, mode: Mode) -> Result:
        for t in results:
            t.fill_(torch.nan)
        for t in zero:
            t.zero_()
        plan = kernel.plan
        call = kernel.kernel.launch(*arguments, dynamic_shared=plan.shared_memory, sms=plan.target.sms)
        return run(program, call, mode)

    launch(kernel.kernel.program, Mode())
    good = [t.clone() for t in results]

    # sums in memory arrive in the order of the schedule, but where it is fixed
    near = 0.0 if exact else 1e-4

    def same() -> bool:
        return all(
            torch.allclose(a, b, rtol=near, atol=near, equal_nan=True) for a, b in zip(results, good, strict=True)
        )

    return kernel.kernel.text, Trial(launch, same)


TRIALS = {
    "forward": forward_trial,
    "backward": backward_trial,
    "warp": functools.partial(forward_trial, target=AMPERE, first_key=30.0),
    "warp-in-bulk": functools.partial(forward_trial, target=TARGETS[12, 0], first_key=30.0),
    "warp-backward": functools.partial(backward_trial, target=dataclasses.replace(AMPERE, sms=1)),
    "warp-in-order": functools.partial(backward_trial, target=AMPERE, in_order=True),
    "blackwell": functools.partial(forward_trial, target=BLACKWELL, align="bottom_right", first_key=30.0),
    "blackwell-backward": functools.partial(backward_trial, target=BLACKWELL),
    "blackwell-pair": functools.partial(backward_trial, target=BLACKWELL, blocks=2),
    "blackwell-wide": functools.partial(backward_trial, target=BLACKWELL),
    "blackwell-wide-pair": functools.partial(backward_trial, target=BLACKWELL, blocks=2, v_dim=128),
    "blackwell-query-pair": functools.partial(backward_trial, target=BLACKWELL, blocks=2),
}


def verdicts(direction: str, dim: int, kind: str = "", part: str = "1/1") -> Iterator[Verdict]:
    """Verdicts on all mutants whose kind begins with `kind`, or each N-th of them from the I-th on."""
    trials = [TRIALS[direction](dim, *shape) for shape in SHAPES[direction]]
    texts = {text for text, _ in trials}
    assert len(texts) == 1, "shapes that take different kernels"
    first, step = map(int, part.split("/"))
    numbers = itertools.count(1 - first)
    return judge(
        texts.pop(),
        [trial for _, trial in trials],
        only=lambda mutant: mutant.kind.startswith(kind) and next(numbers) % step == 0,
    )


# Survivors that change nothing at these inputs; docs/emulator.md says of each why. On Hopper: the first wait for a slot
# that starts free; releases after which nobody waits; a turn at the tensor core, which orders work and no data; a copy
# whose first two coordinates are both 0; fences between products whose registers nobody touched; groups of products
# that the next wait covers with or without their commit; comparisons of which both answers lead to the same numbers
# (0 // n, a whole tile that is tested, a row of zeros beyond the end); the wait before a block's first output, which
# finds nothing on its way; of dQ that is cleared inside, whether a head is clear, which a loop behind asks again, and
# whether a block's first draw is one tile too many, as none is at these sizes. On Blackwell also waits that another
# role's wait implies, fences that another one makes needless or behind which columns are only freed, and comparisons
# that never come out equal.
ON_HOPPER_HARMLESS = {
    "wait skipped": 4, "arrival dropped": 4, "barrier dropped": 2, "coordinate wrong": 2, "wgmma fence dropped": 4,
    "commit dropped": 3, "comparison off by one": 17,
}  # fmt: skip
HARMLESS: dict[str, dict[str, int]] = {
    "forward": ON_HOPPER_HARMLESS | {"wait weakened": 1, "wait dropped": 1},
    "backward": ON_HOPPER_HARMLESS | {"comparison off by one": 19},
    "warp": {"comparison off by one": 17},
    "warp-in-bulk": {"wait skipped": 2, "coordinate wrong": 1, "comparison off by one": 7},
    "blackwell": {
        "wait skipped": 5, "arrival dropped": 4, "coordinate wrong": 1, "commit dropped": 2, "tensor fence dropped": 8,
        "comparison off by one": 36,
    },
    "blackwell-backward": {
        "wait skipped": 3, "barrier dropped": 1, "commit dropped": 2, "tensor fence dropped": 5,
        "comparison off by one": 20,
    },
    "blackwell-pair": {
        "wait skipped": 2, "barrier dropped": 1, "commit dropped": 2, "tensor fence dropped": 5,
        "comparison off by one": 20,
    },
    "blackwell-wide": {
        "wait skipped": 2, "barrier dropped": 1, "commit dropped": 3, "tensor fence dropped": 9, "registers kept": 1,
        "comparison off by one": 47,
    },
}  # fmt: skip


# the instruction and its set-up are the same in all kernels by one block, and in all by two
ALIKE = {"blackwell-wide", "blackwell-wide-pair", "blackwell-query-pair"}
WITHOUT_MBARRIERS = {"warp", "warp-backward", "warp-in-order"}  # cp.async and barriers of the block


@NEEDS_DSL
@pytest.mark.parametrize(
    "direction",
    [pytest.param(d, marks=[pytest.mark.slow] if d in ALIKE else []) for d in TRIALS if d not in WITHOUT_MBARRIERS],
)
def test_the_only_fence_of_mbarriers_is_missed_in_every_mode(direction: str) -> None:
    text, trial = TRIALS[direction](WIDTHS.get(direction, 64), 64, 64, 1)
    for mode in MODES:
        found = list(judge(text, [trial], [mode], only=lambda m: m.kind == "init fence dropped"))
        assert [v.how for v in found] == ["MissingInitFence"], mode


@NEEDS_DSL
@pytest.mark.parametrize("direction", ["warp", "warp-backward"])
@pytest.mark.parametrize("kind", ["barrier dropped", "wait dropped", "commit dropped"])
def test_a_copy_by_cp_async_that_races_who_reads_is_found_in_every_mode(direction: str, kind: str) -> None:
    """Without the barrier it overtakes a reader, without its wait or its group a reader overtakes it."""
    text, trial = TRIALS[direction](64, 130, 130, 1)
    for mode in MODES:
        found = [v for v in judge(text, [trial], [mode], only=lambda m: m.kind == kind) if v.how != "not reached"]
        assert found and {v.how for v in found} <= {"SharedRace", "UninitialisedShared"}, mode


@NEEDS_DSL
@pytest.mark.slow
@pytest.mark.parametrize("direction", ["warp", "warp-in-bulk", "warp-backward"])
def test_a_product_of_a_warp_with_wrong_operands_is_found(direction: str) -> None:
    """What registers hold races nobody: the result says so."""
    for kind in ("operands exchanged", "matrix turned", "matrix elsewhere"):
        found = list(verdicts(direction, 64, kind, "1/16"))
        assert len(found) >= 4 and all(v.caught for v in found), kind


@NEEDS_DSL
@pytest.mark.slow
def test_what_a_warp_does_not_give_to_others_is_missed() -> None:
    for kind in ("value not put", "sum dropped"):
        found = list(verdicts("warp-backward", 64, kind, "1/4"))
        assert len(found) == 4 and all(v.caught for v in found), kind


@NEEDS_DSL
@pytest.mark.slow
def test_who_adds_to_dq_out_of_turn_is_found() -> None:
    """By other bits, and who says nothing by those that wait for it. In turn nobody asks twice whose turn it is."""
    found = {(v.mutant.kind, v.how) for v in verdicts("warp-in-order", 64, "turn")}
    assert found == {
        ("turn not awaited", "wrong result"), ("turn not awaited", "not reached"), ("turn not passed", "Livelock"),
    }  # fmt: skip


@NEEDS_DSL
@pytest.mark.slow
@pytest.mark.parametrize("direction", HARMLESS)
def test_mutants_are_caught(direction: str) -> None:
    found = list(verdicts(direction, WIDTHS.get(direction, 64)))
    reached = [v for v in found if v.how != "not reached"]
    survivors = [v for v in reached if not v.caught]
    assert len(reached) >= 30
    counts = Counter(v.mutant.kind for v in survivors)
    harmless = HARMLESS[direction]
    assert all(n <= harmless.get(kind, 0) for kind, n in counts.items()), [v.mutant.instr.where() for v in survivors]


def main(direction: str = "forward", dim: str = "64", kind: str = "", part: str = "1/1") -> None:
    table: dict[str, Counter[str]] = {}
    for v in verdicts(direction, int(dim), kind, part):
        table.setdefault(v.mutant.kind, Counter())[v.how] += 1
        if v.how == "survived":
            print(f"survived: {v.mutant.kind}: {v.mutant.instr.where()[:200]}", flush=True)
    for kind, counts in table.items():
        print(f"{kind}: {dict(counts)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
