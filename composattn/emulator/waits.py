"""What stands still or is under way: why a gang waits, a copy that may complete, a warpgroup that is not all there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from composattn.emulator.findings import CollectiveMismatch
from composattn.emulator.ptx import Instr


@dataclass
class Wait:
    """Why a gang stands still. `ready` says when its instruction is worth trying again."""

    ready: Callable[[], bool]
    what: Callable[[], str]
    may_give_up: bool = False  # a try_wait may come back with "not yet"


@dataclass
class PendingCopy:
    """A copy under way: `run` completes it."""

    run: Callable[[], None]
    what: str


def together(g: Any, m: Any, instr: Instr) -> Wait | None:
    """None when g is a whole warpgroup; else g waits for its neighbours, and the last to come merges them."""
    if m is not True:
        raise CollectiveMismatch(f"{instr.op} under divergence: all lanes of a warpgroup execute it together")
    if len(g.warps) == 4:
        return None
    block = g.block
    table = block.rendezvous.setdefault(g.low // 4, {})
    table[g.low] = (g, instr)
    if any(i is not instr for _, i in table.values()):
        text = "; ".join(f"warps {x.low}-{x.high - 1} at PTX line {i.line}" for x, i in table.values())
        raise CollectiveMismatch(f"a warpgroup's warps stand at different instructions of a warpgroup: {text}")
    gangs = [x for x, _ in table.values()]
    if sum(len(x.warps) for x in gangs) == 4:
        table.clear()
        block.cluster.merge(gangs)
        block.cluster.progress += 1
    return Wait(lambda: False, lambda: f"the other warps of its warpgroup at {instr.op}")
