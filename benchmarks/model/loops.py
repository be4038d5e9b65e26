"""The loops over tiles of a kernel's machine code, and whose they are: products, softmax, correction, copies."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.model.sass import SassInstruction

MATRIX = ("HGMMA", "UTCHMMA")
COPIES = ("UTMALDG", "UBLKCP", "LDGSTS")
REDUCTIONS = ("UBLKRED", "UTMAREDG")
SHORTEST = 16  # instructions: below it a loop only waits
ASIDE = ("LG2", "RCP")  # of what the unit for exponentials has: a rescale's, which few tiles need
ENDS = ("EXIT", "RET", "BRX", "KILL")


@dataclasses.dataclass(frozen=True)
class Loop:
    """Instructions start to stop, both included, of which the last jumps back; `code` are all of the kernel."""

    code: tuple[SassInstruction, ...]
    start: int
    stop: int

    @property
    def body(self) -> tuple[SassInstruction, ...]:
        return self.code[self.start : self.stop + 1]

    @property
    def counts(self) -> Counter[str]:
        """Names of the instructions."""
        return Counter(i.name for i in self.body)

    def path(self, tested: bool) -> tuple[SassInstruction, ...]:
        """What a warp carries out of the body for a tile: the shortest way through it, or the longest if `tested`.

        No way leaves out a product or an exponential that another takes, nor takes what a warp's vote skips that has
        none: a rescale, which few tiles need. What a vote skips that has a product is a tile computed again, as its
        maximum was guessed too low.
        """
        sign = -1 if tested else 1
        best: dict[int, tuple[int, int, int]] = {self.stop + 1: (0, 0, -1)}  # less of both is better; and what follows
        for n in range(self.stop, self.start - 1, -1):
            i = self.code[n]
            work = int(_works(i))
            ways = [best[m] + (m,) for m in self._after(n) if m in best]
            skipped, count, _, follows = min(ways, key=lambda way: way[:2])
            best[n] = skipped - work, count + sign, follows
        way, n = [], self.start
        while n <= self.stop:
            way.append(self.code[n])
            n = best[n][2]
        return tuple(way)

    def _after(self, n: int) -> list[int]:
        """Instructions of the body that may follow number n; jumps out of it wait, and come back to it."""
        i = self.code[n]
        ahead = i.target is not None and n < i.target <= self.stop
        if ahead and self._is_voted(n):
            skipped = self.code[n : i.target]
            if any(j.name in MATRIX for j in skipped) or not any(map(_works, skipped)):
                return [i.target]  # type: ignore[list-item]
        always = ahead and not _may_fall_through(i)
        return ([] if always else [n + 1]) + ([i.target] if ahead else [])  # type: ignore[list-item]

    def _is_voted(self, n: int) -> bool:
        """Whether the n-th instruction is a branch by what a warp voted, or by a comparison of that."""
        condition = re.search(r"U?P\d", self.code[n].predicate or self.code[n].text)
        writers = [] if condition is None else self._writers(n, [condition[0]])
        compared = [m for m in writers if self.code[m].name in ("ISETP", "UISETP")]
        for m in compared:
            writers += self._writers(m, re.findall(r"\bU?R\d+", self.code[m].text))
        return any(self.code[m].name in ("VOTE", "VOTEU") for m in writers)

    def _writers(self, n: int, registers: list[str]) -> list[int]:
        """Who wrote these last before the n-th instruction; not those that nobody in the body did."""
        found = []
        for register in registers:
            writes = re.compile(rf"\S+ {register},")
            found += [m for m in range(self.start, n) if writes.match(self.code[m].text)][-1:]
        return found

    @property
    def multiplies(self) -> bool:
        """Whether it has products of matrices."""
        return any(self.counts[name] for name in MATRIX)

    @property
    def selects(self) -> int:
        """Selections by a condition, as a test makes one of each number."""
        return self.counts["FSEL"] + self.counts["SEL"]

    @property
    def job(self) -> str:
        """What the warps in it are there for; empty where that is nothing of a tile's."""
        count = self.counts
        if self.multiplies:
            return "matrix and softmax" if count["MUFU"] >= SHORTEST else "matrix"
        if count["MUFU"] >= SHORTEST:
            return "softmax"
        if count["LDTM"] and count["STTM"]:
            return "correction"
        if any(count[name] for name in REDUCTIONS):
            return "reduce"
        return "copies" if any(count[name] for name in COPIES) else ""


@dataclasses.dataclass(frozen=True)
class Role:
    """The loops of warps that do the same job: one after the other, or one within a loop over work tiles.

    `plain` is that of tiles that need no test, which selects the least, `tested` the one that selects the most; of
    equals that with the shorter and the longer way through it.
    """

    job: str
    loops: tuple[Loop, ...]

    @property
    def plain(self) -> Loop:
        return min(self.loops, key=lambda loop: (loop.selects, len(loop.path(False))))

    @property
    def tested(self) -> Loop:
        return max(self.loops, key=lambda loop: (loop.selects, len(loop.path(True))))

    def path(self, tested: bool) -> tuple[SassInstruction, ...]:
        """What a warp carries out for a tile."""
        return self.tested.path(True) if tested else self.plain.path(False)


def _works(i: SassInstruction) -> bool:
    """Whether it is an exponential or a product, which every tile has."""
    return i.name in MATRIX or (i.name == "MUFU" and not any(name in i.text for name in ASIDE))


def inner_loops(code: Sequence[SassInstruction]) -> list[Loop]:
    """Loops that have a job and hold no other such loop, in program order.

    Code behind the last EXIT waits out of line and jumps back into the kernel: that is no loop.
    """
    last = max((n for n, i in enumerate(code) if i.name == "EXIT"), default=len(code))
    back = ((i.target, n) for n, i in enumerate(code[:last]) if i.target is not None and i.target <= n)
    loops = (Loop(tuple(code), start, stop) for start, stop in back if stop - start >= SHORTEST - 1)
    found: list[Loop] = []
    for loop in sorted((x for x in loops if x.job), key=lambda x: x.stop - x.start):
        if all(loop.stop < other.start or loop.start > other.stop for other in found):
            found.append(loop)
    return sorted(found, key=lambda x: x.start)


def roles(code: Sequence[SassInstruction]) -> list[Role]:
    """The loops over tiles by who runs them: loops of one job where the end of one leads to the other."""
    found: list[list[Loop]] = []
    for loop in inner_loops(code):
        same = [r for r in found if r[0].job == loop.job and _leads(code, r[-1].stop, loop.start)]
        if same:
            same[0].append(loop)
        else:
            found.append([loop])
    return [Role(loops[0].job, tuple(loops)) for loops in found]


def _leads(code: Sequence[SassInstruction], start: int, stop: int) -> bool:
    """Whether running on from instruction `start` may reach `stop`."""
    seen, waiting = set(), [start]
    while waiting:
        n = waiting.pop()
        if n == stop:
            return True
        if n not in seen and n < len(code):
            seen.add(n)
            waiting += _next(code, n)
    return False


def _next(code: Sequence[SassInstruction], n: int) -> Iterator[int]:
    """The instructions that may follow number n."""
    i = code[n]
    if i.target is not None:
        yield i.target
    if _may_fall_through(i):
        yield n + 1


def _may_fall_through(i: SassInstruction) -> bool:
    """`BRA.U !UP0` has its condition among its operands."""
    conditional = bool(i.predicate) or "UP" in i.text or ".DIV" in i.text
    return conditional or i.name not in ("BRA", *ENDS)
