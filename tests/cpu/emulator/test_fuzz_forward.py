"""Random calls of the forward kernels, emulated in four modes: within the tolerance, and the same bits in each.

`python -m tests.cpu.emulator.test_fuzz_forward blackwell-emulated 0 300` runs so many, and prints each.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import composattn as ca
from composattn.backends.fused.tiles.target import TARGETS, Target
from composattn.call.schedule import ORDERS
from composattn.emulator.mode import EAGER, LATE, random_mode
from composattn.testing import Case, Space
from composattn.testing.cases import draw_case
from composattn.testing.tolerance import assert_attention_close
from tests.case_parts import draw_part
from tests.support import cut_as_long_ones, planned_as

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"
)

FEW_ROWS = Space(
    dtypes=(torch.bfloat16, torch.float16), head_dims=(*range(8, 257, 8), 64, 64, 96, 128, 128, 128, 192, 256),
    longest=129, kv_heads=(1, 2), groups=(1, 2, 4), batches=(1, 2), layouts=("dense", "dense", "varlen", "paged"),
    gradients=False, learned=False,
)  # fmt: skip
SEVERAL_TILES = dataclasses.replace(
    FEW_ROWS, shortest=129, longest=311, kv_heads=(1,), groups=(1, 2), batches=(1, 1, 2)
)
WIDE = dataclasses.replace(FEW_ROWS, head_dims=(64, 264, 320, 512, 512), longest=311, batches=(1, 1, 2))
# by default, for a call each: seconds, nearly all to compile
BACKENDS = (*["hopper-emulated"] * 4, *["blackwell-emulated"] * 2, "warp-emulated")
MODES = (EAGER, LATE, random_mode(1), random_mode(2))


def gpu_of(backend: str, number: int) -> Target:
    """One of the GPUs that an emulated backend plans for: they differ in shared memory, in copies and in rates."""
    gpus = [target for target in TARGETS.values() if f"{target.backend}-emulated" == backend]
    return gpus[number % len(gpus)]


@dataclasses.dataclass(frozen=True)
class Call:
    """A case, how its work is divided, whether the largest scores are asked for; `cut`: see `cut_as_long_ones`.

    `gpu`: the number of the GPU that it is planned for, among those of a backend.
    """

    case: Case
    schedule: ca.Schedule
    max_scores: bool
    cut: bool
    gpu: int

    spaces: ClassVar[tuple[Space, ...]] = (FEW_ROWS, SEVERAL_TILES)

    @property
    def rows(self) -> int:
        """Rows of the output: where the keys are split, a block of four modes each."""
        return self.case.q[..., 0].numel()

    @classmethod
    def of(cls, seed: int) -> Call:
        choices = random.Random(seed)
        case = cls.drawn(choices)
        schedule = ca.Schedule(
            order=choices.choice(("auto", *ORDERS)),
            persistent=choices.choice((None, None, True)),
            heads_together=choices.choice((None, 1)),
            split_kv=choices.choice(("auto", "auto", 1, 2, 3)),
            pack_gqa=choices.choice((None, None, False)),
        )
        return cls(case, schedule, choices.randint(0, 2) == 0, choices.randint(0, 1) == 1, choices.randint(0, 11))

    @classmethod
    def drawn(cls, choices: random.Random) -> Case:
        return draw_case(choices, choices.choice(cls.spaces))

    def results(self, backend: str) -> list[dict[str, torch.Tensor]]:
        """What the call returns in each mode, by name."""
        from composattn.backends.fused.running.emulated import emulating

        case, found = self.case, []
        names = ("out", "lse", "max_scores") if self.max_scores else ("out", "lse")
        few = dataclasses.replace(gpu_of(backend, self.gpu), sms=3)  # so that persistent blocks take several tiles each
        with torch.no_grad(), planned_as(backend, few), cut_as_long_ones(self.cut):
            attend = self.attention(backend)
            for mode in MODES:
                with emulating(mode):
                    found.append(dict(zip(names, attend(case.q, case.k, case.v), strict=True)))
        return found

    def attention(self, backend: str) -> Callable[..., Any]:
        case = self.case
        held = ca.Attention(
            score_mod=case.score_mod, mask_mod=case.mask_mod, scale=case.scale, backend=backend, schedule=self.schedule,
            sinks=case.sinks, dropout_p=case.dropout[0], dropout_seed=case.dropout[1],
        )  # fmt: skip
        asked = {"return_lse": True, "return_max_scores": self.max_scores}
        return functools.partial(held, varlen=case.varlen, paged=case.paged, **asked)

    def check(self, backend: str) -> None:
        """Raises: AssertionError where a result is off or differs between modes."""
        results, case = self.results(backend), self.case
        for mode, found in zip(MODES, results, strict=True):
            for name, value in found.items():
                assert torch.equal(value, results[0][name]), f"{name} differs in {mode} mode"
        top = results[0].pop("max_scores", None)
        assert_attention_close(results[0], case)
        if top is not None:
            _, _, exact = self.attention("reference")(case.q, case.k, case.v)
            torch.testing.assert_close(top, exact, rtol=1e-4, atol=1e-4, msg=lambda m: f"max_scores: {m}")


class WideCall(Call):
    """Head dimensions above 256 among them."""

    spaces = (WIDE,)


class PartCall(Call):
    """Parts of larger calls, by mods that are shifted: by numbers, run-time numbers and tensors."""

    spaces = tuple(dataclasses.replace(space, layouts=("dense",)) for space in Call.spaces)

    @classmethod
    def drawn(cls, choices: random.Random) -> Case:
        parts = (draw_part(choices, super(PartCall, cls).drawn(choices)) for _ in itertools.count())
        return next(part for part, _ in filter(None, parts) if (part.mask_mod, part.score_mod) != (None, None))


def held_in_every_mode(seed: int, backend: str, kind: type[Any] = Call) -> object:
    """The call of a kind (`of`, `check`) that this seed draws, checked."""
    call = kind.of(seed)
    try:
        call.check(backend)
    except Exception as error:
        raise AssertionError(f"{kind.__name__}.of({seed}): {call}") from error
    return call


def seeds(count: int) -> list[int]:
    draw = random.Random(os.environ.get("COMPOSATTN_TEST_SEED", "0") + ":emulator")
    return [draw.randrange(2**31) for _ in range(count)]


def small(kind: type[Call], number: int) -> int:
    """The seed of the so manieth call that has rows, and few of them: one of 2,000 took 20 s."""
    found = (seed for seed in seeds(100) if 0 < kind.of(seed).rows <= 400)
    return next(itertools.islice(found, number, None))


@pytest.mark.parametrize(("number", "backend"), [(n, b) for n, b in enumerate(BACKENDS)])
def test_random_calls(number: int, backend: str) -> None:
    held_in_every_mode(small(Call, number), backend)


def test_a_random_call_of_wide_heads() -> None:
    held_in_every_mode(small(WideCall, 0), "hopper-emulated", WideCall)


def test_a_random_part_of_a_call() -> None:
    held_in_every_mode(small(PartCall, 0), "hopper-emulated", PartCall)


@pytest.mark.slow
@pytest.mark.parametrize("backend", sorted(set(BACKENDS)))
@pytest.mark.parametrize("number", range(40))
def test_random_parts_of_calls(number: int, backend: str) -> None:
    held_in_every_mode(seeds(40)[number], backend, PartCall)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_random_calls_of_wide_heads(number: int) -> None:
    held_in_every_mode(seeds(40)[number], "hopper-emulated", WideCall)


@pytest.mark.slow
@pytest.mark.parametrize("backend", sorted(set(BACKENDS)))
@pytest.mark.parametrize("number", range(300))
def test_many_random_calls(number: int, backend: str) -> None:
    held_in_every_mode(seeds(300)[number], backend)


def report(held: Callable[[int, str], object], backend: str, first: str, last: str) -> None:
    """Runs these of the random calls, and prints each."""
    failed = 0
    for number, seed in list(enumerate(seeds(int(last))))[int(first) :]:
        begun = time.perf_counter()
        try:
            said = f"agrees: {held(seed, backend)}"
        except AssertionError as error:
            failed += 1
            said = f"FAILED: {error}: {error.__cause__!r}"
        print(f"{number} {time.perf_counter() - begun:.1f} s {said}", flush=True)
    print(f"{int(last) - int(first)} calls on {backend}, {failed} failed")


if __name__ == "__main__":
    report(held_in_every_mode, *sys.argv[1:])
