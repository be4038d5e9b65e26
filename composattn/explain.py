"""What a call computes and how: formulas, dependence classes, gradient, visited tiles, FLOPs, plan; as text."""

from __future__ import annotations

import dataclasses
import html
from typing import TYPE_CHECKING, Any

import torch

from . import backends
from .analysis.derived import refresh
from .analysis.intervals import Tiles
from .analysis.program import Program
from .analysis.symbolic import Names, formula
from .analysis.tiles import FULL, PARTIAL, useful_cuts
from .analysis.tiles import kinds as tile_kinds
from .analysis.wording import visited
from .backends.fused.tiles.architecture import planned_for
from .backends.layouts import arrange
from .call.inputs import Inputs
from .call.problem import Problem, softmax_scale
from .dispatch.captured import check_captures
from .graph.expr import Dep, Expr, Rate, walk
from .graph.gradient import derivative, partials
from .graph.philox import factor_of
from .mods.mask import ALL, Mask

if TYPE_CHECKING:
    from .dispatch.pinned import Pinned

TILE = (128, 128)  # of the tile counts shown; kernels have their own, named in the plan


@dataclasses.dataclass(frozen=True)
class TileCounts:
    """Tiles of `TILE` over all batches and heads that the mask tells apart."""

    empty: int
    partial: int
    full: int

    @property
    def visited(self) -> int:
        return self.partial + self.full

    @property
    def total(self) -> int:
        return self.empty + self.visited

    def __str__(self) -> str:
        share = 100 * self.visited / max(1, self.total)
        return (
            f"{self.visited} of {self.total} visited ({share:.0f} %): {self.partial} with the test, "
            f"{self.full} without; {self.empty} skipped"
        )


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The parts of an explanation; `str()` joins them. `rows` are (heading, text), text may have several lines."""

    rows: tuple[tuple[str, str], ...]
    tiles: TileCounts
    flops: int
    mask: Mask = dataclasses.field(default=ALL, repr=False)

    def _repr_html_(self) -> str:
        """What notebooks show: the mask's first positions, and the rows as a table."""
        escaped = ((html.escape(heading), html.escape(text)) for heading, text in self.rows)
        table = "".join(f"<tr><th>{heading}</th><td><pre>{text}</pre></td></tr>" for heading, text in escaped)
        return f"{self.mask.svg()}<table>{table}</table>"

    def __str__(self) -> str:
        width = max(len(heading) for heading, _ in self.rows) + 2
        lines = []
        for heading, text in self.rows:
            first, *more = text.splitlines() or [""]
            lines.append(f"{heading:<{width}}{first}")
            lines += [" " * width + line for line in more]
        return "\n".join(lines)


def explain(attn: Pinned, inputs: Inputs, *, emulate: bool = False) -> Explanation:
    """The explanation of a call: plans and compiles nothing; of the tensors it reads the sequences' lengths.

    Backends that plan with no GPU are explained with CPU tensors too, as their GPU would run the call. Refuses what the
    call refuses for what mods read.
    """
    problem = attn.problem(inputs)
    program = attn.program
    check_captures(program, problem)
    backend, prepare, elsewhere = backends.to_explain(attn.options.backend, problem)
    call = prepare(problem.rounded, program, softmax_scale(attn.options.scale, problem.head_dim))
    lengths = _lengths(problem, inputs)
    tiles = count_tiles(program, problem, lengths)
    flops = problem.flops(tiles.visited * TILE[0] * TILE[1])
    dense = problem.flops(problem.q_heads * sum(n * m for n, m in lengths))
    names = Names(*program.roots)
    rows = [
        ("call", _call(problem, lengths, attn.options.scale)),
        ("score", "scale·q·k" if program.score is None else formula(program.score, names)),
        ("mask", "all pairs" if program.mask is None else formula(program.mask, names)),
        ("sinks", "" if program.sink is None else formula(program.sink, names)),
        ("dropout", "" if program.keep is None else f"weights times {factor_of(program.keep):.6g}, or 0"),
        ("values", "" if program.values is None else f"v times {formula(program.values, names)}"),
        ("captured", "; ".join(f"{name} {what}" for name, what in names.legend().items())),
        ("classes", _classes(program, names)),
        ("gradient", _gradient(program, names)),
        ("captured sums", call.captured_sums),
        ("kv visited", "\n".join(visited(program.intervals, names))),
        ("tiles", f"{TILE[0]} x {TILE[1]}: {tiles}"),
        ("FLOPs", f"{flops:.3e} forward in visited tiles, each counted whole; {dense:.3e} dense"),
        ("backend", f"{backend.name} ({backend.takes}){elsewhere}"),
        ("rewrites", call.rewrites),
        ("plan", call.plan),
    ]
    if emulate:
        from .backends.fused.running.emulated import random_run
        from .emulator.counts import count

        target = planned_for(attn.options.backend)
        rows.append(("emulated", str(count(random_run(problem, program, target)))))
    mask = ALL if program.mask is None else Mask(program.mask)
    return Explanation(tuple(row for row in rows if row[1]), tiles, flops, mask)


Lengths = list[tuple[int, int]]  # queries and keys of every sequence


def _lengths(problem: Problem, inputs: Inputs) -> Lengths:
    if problem.layout.is_dense:
        return [(problem.q_len, problem.kv_len)] * problem.batch
    parts = arrange(inputs.sequences, inputs.q, inputs.k).parts
    return [(p.queries.stop - p.queries.start, p.keys.stop - p.keys.start) for p in parts]


def count_tiles(program: Program, problem: Problem, lengths: Lengths) -> TileCounts:
    """How many tiles of `TILE` are empty, partial and full, over sequences and query heads."""
    total = problem.q_heads * sum(-(-n // TILE[0]) * -(-m // TILE[1]) for n, m in lengths)
    if not total:
        return TileCounts(0, 0, 0)
    mask = ALL if program.mask is None else Mask(program.mask)
    refresh(program.captures)
    q_lens, kv_lens = torch.tensor(lengths, device=problem.device).unbind(1)
    alike = not mask.expr.deps & Dep.B and len(set(lengths)) == 1  # one sequence then stands for all
    heads = problem.q_heads if mask.expr.deps & Dep.H else 1
    longest = int(q_lens.max()), int(kv_lens.max())
    batch, cuts = 1 if alike else len(lengths), useful_cuts(mask.expr, *longest, TILE)
    grid = Tiles(*longest, TILE, batch, heads, problem.device, cuts=cuts)
    if not alike:
        grid = dataclasses.replace(grid, q_lens=q_lens, kv_lens=kv_lens)
    kinds = tile_kinds(mask.expr, grid)
    shared = problem.q_heads // heads * (len(lengths) if alike else 1)
    partial, full = (int((kinds == kind).sum()) * shared for kind in (PARTIAL, FULL))
    return TileCounts(total - partial - full, partial, full)


def _call(problem: Problem, lengths: Lengths, scale: float | None) -> str:
    p = problem
    heads = f"{p.q_heads} heads" if p.group == 1 else f"{p.q_heads} query heads on {p.kv_heads} key/value heads"
    dims = f"D {p.head_dim}" if p.head_dim == p.head_dim_v else f"D {p.head_dim}, Dv {p.head_dim_v}"
    types = " ".join(str(t).removeprefix("torch.") for t in dict.fromkeys((p.dtype, *p.types)))
    if p.layout.is_dense:
        where = f"batch {p.batch}, {heads}, {p.q_len} queries x {p.kv_len} keys"
    else:
        queries, keys = (f"{min(ns)} to {max(ns)}" for ns in zip(*lengths, strict=True))
        pages = f" in pages of {p.layout.page_size}" if p.layout.kv == "paged" else ""
        where = f"{p.batch} sequences, {heads}, {queries} {p.layout.q} queries x {keys} {p.layout.kv} keys{pages}"
    return f"{where}, {dims}, {types} on {p.device}; scale {softmax_scale(scale, p.head_dim):.6g}"


def _classes(program: Program, names: Names) -> str:
    """The largest parts of the mods that need not be computed for every element, by how often they are."""
    parts: dict[Rate, list[str]] = {}
    roots = [e for e in (program.score, program.mask) if e is not None]
    seen: set[Expr] = set()
    waiting = roots[::-1]
    while waiting:
        node = waiting.pop()
        if node.is_const or node in seen:
            continue
        seen.add(node)
        if node.rate is Rate.ELEMENT:
            waiting += node.args[::-1]
            continue
        shown = formula(node, names)
        if node.args and shown not in parts.setdefault(node.rate, []):
            parts[node.rate].append(shown)
    lines = [f"{rate.value}: {', '.join(shown)}" for rate, shown in parts.items() if shown]
    count = sum(n.rate is Rate.ELEMENT and bool(n.args) for n in walk(*roots)) if roots else 0
    return "\n".join([*lines, f"per element: {count} operation{'s' * (count != 1)}"]) if roots else ""


def _gradient(program: Program, names: Names) -> str:
    if program.score is None:
        return ""
    lines = [f"d score_mod/d score = {formula(derivative(program.score), names)}"]
    for leaf, d in partials(program.score).items():
        lines.append(f"d score_mod/d {formula(leaf, names)} = {formula(d, names)}")
    return "\n".join(lines)


__all__: list[Any] = ["Explanation", "TileCounts", "count_tiles", "explain"]
