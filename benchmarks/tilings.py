"""Other tilings than the planner's, in turns with it: how a number in `backends/<architecture>/tiling.py` is chosen.

    python -m benchmarks.tilings "forward D64 S8192 causal" "exponential=(1, 8)" "tile_n=112"
    python -m benchmarks.tilings "backward D192 S8192 full" "tile_m=80 dq_leaves='in bulk'" --peer flash-attn-4

A case is named by a regular expression on `benchmarks/run.py --list`. A variant is fields of the tiling with values in
Python (`exponential`, `threshold`: the arguments of `ExponentialUnits` and of `RescaleThreshold`). With a GPU each
variant is checked against fp64 as in the harness, then timed; without one (or with --compile) it is compiled, and what
it takes is printed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import CASES, Case, Pattern
from benchmarks.implementations import Composattn, Implementation, Inputs, Job, available
from benchmarks.model.kernels import plan_of
from benchmarks.model.loops import inner_loops
from benchmarks.model.sass import instructions
from benchmarks.provenance import provenance
from benchmarks.run import run_case, save, show
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.tiles.architecture import ARCHITECTURES, Architecture, planned_for
from composattn.backends.fused.tiles.scheduler import Scheduler
from composattn.backends.fused.tiles.tiling import Chosen
from composattn.primitives.exponential_units import ExponentialUnits
from composattn.primitives.rescale_threshold import RescaleThreshold

Changes = dict[str, Any]
OBJECTS: dict[str, Callable[..., Any]] = {
    "exponential": ExponentialUnits, "threshold": RescaleThreshold, "scheduler": Scheduler.__getitem__,
}  # fmt: skip
_FIELD = re.compile(r"(\w+)=(.*?)(?=\s+\w+=|$)")


def changes_of(text: str) -> Changes:
    """The fields of a variant, `tile_m=64 exponential=(1, 8)`, with their values."""
    found = {name: ast.literal_eval(value) for name, value in _FIELD.findall(text)}
    if not found:
        raise SystemExit(f'a variant is fields with values, such as "tile_n=96 stages=3"; got {text!r}')
    return {name: OBJECTS[name](*_several(value)) if name in OBJECTS else value for name, value in found.items()}


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def changed(architecture: Architecture, direction: str, changes: Changes) -> Architecture:
    """The architecture with these fields of its tilings of one direction."""
    choose = getattr(architecture, direction)

    def other(*arguments: Any) -> Any:
        tiling, why = choose(*arguments)
        return Chosen(dataclasses.replace(tiling, **changes), why)

    chooses: Changes = {direction: other}
    return dataclasses.replace(architecture, **chooses)


@contextlib.contextmanager
def planning_with(direction: str, changes: Changes) -> Iterator[None]:
    """Inside, what is planned is cut so."""
    before = dict(ARCHITECTURES)
    ARCHITECTURES.update({name: changed(a, direction, changes) for name, a in before.items()})
    try:
        yield
    finally:
        ARCHITECTURES.update(before)


@dataclasses.dataclass(frozen=True)
class Variant:
    """This package with other numbers in one tiling."""

    text: str
    of: Implementation = dataclasses.field(default_factory=Composattn)

    @property
    def name(self) -> str:
        return self.text

    def prepare(self, case: Case, pattern: Pattern, inputs: Inputs) -> Job:
        job = self.of.prepare(case, pattern, inputs)
        with planning_with(case.direction, changes_of(self.text)):
            out = job.forward(*job.leaves)  # plans are kept, so later calls are cut so too
            if case.direction == "backward":
                torch.autograd.grad(out, (*job.leaves, *job.learned), job.grad)
        return job


def resources(case: Case, variants: list[str], of: Composattn) -> None:
    """Prints what the kernel of each variant takes, compiled for the GPU that is planned for where none is there."""
    pattern = case.pattern(case, torch.device("cpu"))
    for text in ("", *variants):
        with planning_with(case.direction, changes_of(text) if text else {}):
            plan = plan_of(case, pattern, planned_for(None), of.packed, of.deterministic)
        made = compile_offline(plan)
        loops = ((len(x.body), x.counts["MUFU"]) for x in inner_loops(instructions(made)) if x.multiplies)
        length, exponentials = min(loops, default=(0, 0))
        print(
            f"    {text or 'as planned':44} {made.registers} registers, {made.spills} spills, stack {made.stack}, "
            f"{made.shared_memory} bytes shared; loop {length} instructions, {exponentials} MUFU",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", help="regular expression on the names of cases")
    parser.add_argument("variants", nargs="*", help='such as "tile_n=96 stages=3"')
    parser.add_argument("--packed", action="store_true", help="documents as sequences of a packed call")
    parser.add_argument("--fixed-order", action="store_true", help="dQ is summed in one")
    parser.add_argument("--peer", nargs="+", default=[], help="implementations to time beside, by name")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one implementation of one case")
    parser.add_argument("--compile", action="store_true", help="compile only, also where a GPU is")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {**provenance(device), "rows": []}
    of = Composattn(packed=options.packed, deterministic=options.fixed_order)
    for case in (c for c in CASES if re.search(options.case, c.name)):
        print(case.name, flush=True)
        if options.compile or device.type == "cpu":
            resources(case, options.variants, of)
            continue
        peers = [i for i in available(device, None) if i.name in options.peer]
        variants = [Variant(v, of) for v in options.variants]
        measured: list[Implementation] = [of, *variants, *peers]
        rows = run_case(case, measured, device, {}, options)
        show(rows)
        result["rows"] += rows
        save(result, options.out)


if __name__ == "__main__":
    main()
