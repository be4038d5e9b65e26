"""What each unit of an SM does for a tile, read from machine code: ours beside flash-attn-4's, with no GPU.

    python -m benchmarks.tile_model --target sm_100a                       ours alone; sm_90a, sm_103a too
    python -m benchmarks.tile_model --target sm_100a --peer flash-attn-4   both
    python -m benchmarks.tile_model --target sm_90a --peer flash-attn-4    both, held to what an H200 measured
    python -m benchmarks.tile_model --target sm_100a --direction backward  gradients, there

Times are not forecast. A tile takes at least its `bound`, the clocks of the busiest unit, and `sum` where no two work
at a time. Beside each ratio stands for how many measured rows of an H200 it named the faster one.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator

import torch

from benchmarks import cases
from benchmarks.cases import Case, Direction, Pattern
from benchmarks.model import held, kernels
from benchmarks.model.clocks import TARGETS, UNITS
from benchmarks.model.costs import Cost, tile_cost
from benchmarks.model.kernels import Kernel
from benchmarks.model.peer import PACKAGE, PeerMissing, PeerRefused
from benchmarks.model.peer import version as peer_version
from benchmarks.provenance import provenance
from composattn.errors import ComposattnError

CPU = torch.device("cpu")
DIMS = ((128, 128), (64, 64), (96, 96), (192, 128), (192, 192), (256, 256))


def long_cases(direction: Direction) -> Iterator[Case]:
    """Long sequences by head dimension, full and causal; at D 128 with what changes the loop."""
    for d, dv in DIMS:
        for pattern in (cases.full, cases.causal):
            name = f"D{d}" + (f"/{dv}" if dv != d else "") + f" {pattern.__name__}"
            yield Case(name, (), pattern, 2, 16, 8192, d, v_dim=dv, direction=direction)
    for pattern in (cases.window, cases.softcap, cases.alibi):
        yield Case(f"D128 {pattern.__name__}", (), pattern, 2, 16, 8192, 128, direction=direction)


@dataclasses.dataclass(frozen=True)
class Counted:
    """A kernel with the clocks of a tile, without a test and with one."""

    kernel: Kernel
    plain: Cost
    tested: Cost

    @staticmethod
    def of(kernel: Kernel, arch: str) -> Counted:
        return Counted(kernel, *(tile_cost(kernel, arch, tested) for tested in (False, True)))

    def lines(self) -> Iterator[str]:
        k = self.kernel
        yield f"{k.rows} x {k.keys} a block, {k.threads} threads, {k.spills} spills"
        for job, found in k.roles.items():
            for role in found:
                plain, tested = len(role.plain.body), len(role.tested.body)
                loop = f"{plain}" + (f" plain, {tested} tested" if tested != plain else "")
                ways = len(role.path(False)), len(role.path(True))
                run = f"; carried out {' to '.join(map(str, sorted(set(ways))))}" if ways != (plain, tested) else ""
                yield f"{job}: {loop} instructions, {role.plain.counts['MUFU']} MUFU{run}"
        for word, cost in (("plain", self.plain), ("tested", self.tested)):
            units = ", ".join(f"{unit} {cost.clocks[unit]:.0f}" for unit in UNITS if cost.clocks[unit])
            yield f"clocks, {word}: {units}; bound {cost.bound:.0f} ({cost.unit}), sum {cost.total:.0f}"


def counted(case: Case, pattern: Pattern, arch: str, peer: bool) -> Counted | str:
    """A kernel's counts, or why there are none."""
    try:
        made = (kernels.peers if peer else kernels.ours)(case, pattern, arch)
        return Counted.of(made, arch)
    except PeerRefused as refused:
        return str(refused).strip().splitlines()[-1][:200]
    except (ComposattnError, KeyError) as refused:
        return f"no kernel for {arch}: {str(refused)[:200]}"


def compare(case: Case, arch: str, peer: bool, rows: list[held.Row]) -> None:
    pattern = case.pattern(case, CPU)
    sides = {"composattn": counted(case, pattern, arch, peer=False)}
    if peer:
        sides[PACKAGE] = counted(case, pattern, arch, peer=True)
    print(f"\n{case.name}")
    for who, found in sides.items():
        for line in [found] if isinstance(found, str) else found.lines():
            print(f"  {who:12}  {line}")
    mine, theirs = sides["composattn"], sides.get(PACKAGE)
    if isinstance(mine, Counted) and isinstance(theirs, Counted):
        for reading, read in held.READINGS.items():
            ratio = _a_pair(mine, read(mine.plain)) / _a_pair(theirs, read(theirs.plain))
            print(f"  {reading} ours / theirs  {ratio:.2f}   ({reliability(rows, reading)})")


def _a_pair(found: Counted, clocks: float) -> float:
    return clocks / (found.kernel.rows * found.kernel.keys)


def reliability(rows: list[held.Row], reading: str) -> str:
    if not rows:
        return "held to nothing: first run --target sm_90a --peer flash-attn-4 --keep"
    found = held.Reliability.of(rows, reading)
    word = "" if found.is_enough else "NOT RELIABLE, "
    return f"{word}right on an H200 in {found}; forward alone {held.Reliability.of(rows, reading, 'forward')}"


def judge(rows: list[held.Row]) -> None:
    """Every measured row beside the model's, then how often it was right."""
    print(f"\n{'the peers time over ours':46} {'measured':>8}" + "".join(f"{r:>8} {'':7}" for r in held.READINGS))
    for row in rows:
        said = "".join(f"{row.modelled[r]:8.2f} {row.verdict(r) if row.matters else '':7}" for r in held.READINGS)
        packed = " (packed)" if row.implementation != "composattn" else ""
        print(f"{row.name + packed:46} {row.measured:8.2f}{said}  {row.run}")
    for reading in held.READINGS:
        print(f"\n{reading}: right in {held.Reliability.of(rows, reading)}")
        for direction in ("forward", "backward"):
            print(f"  {direction}: {held.Reliability.of(rows, reading, direction)}")
            for (was, named), count in sorted(held.confusion(rows, reading, direction).items()):
                print(f"    faster: {was:7} named: {named:8} {count:3}")
    if not any(held.Reliability.of(rows, reading).is_enough for reading in held.READINGS):
        print(f"\nNo reading names the faster in {held.WANTED:.0%} of the rows: quote counts only.")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.tile_model", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--target", choices=sorted(TARGETS), required=True)
    made.add_argument("--peer", choices=[PACKAGE], help="compile its kernels too")
    made.add_argument("--direction", choices=["forward", "backward"], default="forward")
    made.add_argument("--only", default="", help="words of which one is in the name of each case shown")
    made.add_argument("--keep", action="store_true", help="write what was held to an H200 to results/model")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    words = options.only.split()
    try:
        if options.peer:
            peer_version()
        modelled = held.kept()
        if options.target == held.ARCH and options.peer and not words:
            modelled = held.modelled()
            judge(held.rows(modelled))
            if options.keep:
                held.keep(modelled, provenance(CPU))
        rows = held.rows(modelled)
        for case in long_cases(options.direction):
            if not words or any(word in case.name for word in words):
                compare(case, options.target, options.peer is not None, rows)
    except PeerMissing as missing:
        print(missing, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
