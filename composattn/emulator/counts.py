"""How many warp instructions a run executed: by role (producer, consumers, ...) and by pipe."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from composattn.emulator.launch import Result
from composattn.emulator.opcodes.fp8 import OPCODES
from composattn.emulator.ptx import Instr

# The pipe of an instruction that is not arithmetic, by how its name begins.
_PIPES = (
    ("wgmma", "matrix"), ("mma.", "matrix"), ("ldmatrix", "memory"),
    ("tcgen05.mma", "matrix"), ("tcgen05.ld", "tensor"), ("tcgen05.st", "tensor"),
    ("tcgen05", "barrier"), ("cp.", "copy"), ("ld", "memory"), ("st", "memory"), ("atom", "memory"), ("red.", "memory"),
    ("mbarrier", "barrier"), ("bar", "barrier"), ("fence", "barrier"), ("shfl", "lanes"), ("vote", "lanes"),
    ("elect", "lanes"), ("bra", "branch"), ("ret", "branch"), ("exit", "branch"), ("redux", "lanes"),
)  # fmt: skip


def pipe_of(instr: Instr) -> str:
    """alu, fma, mufu (exp2, reciprocal, ...), xu (conversions), matrix, tensor (registers to and from tensor
    memory), copy, memory, barrier, lanes, branch, other.
    """
    row = OPCODES.get(instr.op)
    if row is not None:
        return row.pipe
    return next((pipe for head, pipe in _PIPES if instr.op.startswith(head)), "other")


@dataclass(frozen=True)
class Counts:
    """Warp instructions by role and pipe. A role is a run of warpgroups whose warps executed alike."""

    roles: dict[str, Counter[str]]
    blocks: int

    @property
    def total(self) -> int:
        return sum(sum(c.values()) for c in self.roles.values())

    def __str__(self) -> str:
        pipes = [p for p, _ in sum(self.roles.values(), Counter()).most_common()]
        width = max(len(r) for r in self.roles)
        lines = [f"{self.total} warp instructions in {self.blocks} blocks"]
        for role, counter in self.roles.items():
            parts = ", ".join(f"{p} {counter[p]}" for p in pipes if counter[p])
            lines.append(f"{role:<{width}}  {sum(counter.values())}: {parts}")
        return "\n".join(lines)


_WHOLE = {"matrix": "wgmma", "tensor": "tensor memory"}  # pipes whose users are a role where a whole warpgroup is one
_SINGLE = {"matrix": "multiplies", "copy": "copies", "tensor": "tensor memory"}


def count(result: Result) -> Counts:
    """Counts of a run. A warpgroup that multiplies or uses tensor memory is a role; so are equal neighbours."""
    by_pipe = [Counter(pipe_of(i) for i in [*n.code, *([n.branch] if n.branch else [])]) for n in result.program.nodes]
    warps = [_warp(result.visits[w], by_pipe) for w in range(result.visits.shape[0])]
    roles: dict[str, Counter[str]] = {}
    w = 0
    while w < len(warps):
        kind, end = _role(warps, w)
        name = f"warp {w}" if end == w + 1 else f"warps {w}-{end - 1}"
        roles[f"{name} ({kind})"] = sum(warps[w:end], Counter())
        w = end
    return Counts(roles, result.blocks)


def _role(warps: list[Counter[str]], w: int) -> tuple[str, int]:
    """What warp `w` does, and behind which warp those end that have this role with it."""
    group = warps[w : w + 4] if w % 4 == 0 and w + 4 <= len(warps) else []
    together = next((name for pipe, name in _WHOLE.items() if group and all(c[pipe] for c in group)), None)
    if together is not None:
        return together, w + 4
    alone = next((name for pipe, name in _SINGLE.items() if warps[w][pipe]), "idle after setup")
    return alone, next((n for n in range(w + 1, len(warps)) if warps[n] != warps[w]), len(warps))


def _warp(visits: Any, by_pipe: list[Counter[str]]) -> Counter[str]:
    out: Counter[str] = Counter()
    for n in np.flatnonzero(visits):
        for pipe, k in by_pipe[n].items():
            out[pipe] += k * int(visits[n])
    return out
