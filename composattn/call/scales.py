"""Scales of 8-bit queries, keys and values as reads of mods: which entry of a scale belongs to a pair of the call.

A scale is a captured tensor like any other. Those of q and k multiply the score before the score mod, so that it sees
true scores; that of v is the mod `values`. Which entry is meant follows from the shape alone; a size of 1 is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import errors
from ..mods.mod import Mod
from ..mods.score import Score
from .eight_bits import block_of
from .sequences import Paged, Sequences, Varlen

Size = tuple[str, int]  # what a dimension of a scale counts, and how many there are


class Values(Mod):
    """The factor of V: (b, h, kv, d) → float. h is the query head, d the channel of V."""

    __slots__ = ()
    _kind = "scales of values"


class Rows(NamedTuple):
    """The rows of q, k or v: what the dimensions of its scale count.

    name: "q", "k" or "v". lies: of dense ones (B, H, S), of packed ones (total, H), of pages (pages, H, page_size).
    heads: of q, of k and v. offsets, table: where sequences begin, or which pages are theirs.
    """

    name: str
    tensor: torch.Tensor
    lies: str
    batch: int
    heads: tuple[int, int]
    offsets: torch.Tensor | None = None
    table: torch.Tensor | None = None

    @property
    def position(self) -> str:
        return "q" if self.name == "q" else "kv"

    @property
    def own(self) -> list[Size]:
        """What the dimensions of the tensor count, but its last one."""
        t = self.tensor
        if self.lies == "dense":
            return [("b", self.batch), ("h", t.shape[1]), ("row", t.shape[2])]
        if self.lies == "packed":
            return [("packed row", t.shape[0]), ("h", t.shape[1])]
        return [("page", t.shape[0]), ("h", t.shape[1]), ("row of a page", t.shape[2])]

    @property
    def shapes(self) -> list[list[Size]]:
        """What the dimensions of a scale may count."""
        sequence, heads, one = ("b", self.batch), ("h", self.tensor.shape[1]), ("one", 1)
        channel = ("d", self.tensor.shape[-1]) if self.name == "v" else one
        found = [[], [heads], [sequence, heads], [sequence, heads, one, channel], self.own, [*self.own, one]]
        if self.name == "v":
            found.append([sequence, heads, channel])
        return found


def rows_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, varlen: Varlen | None, paged: Paged | None
) -> tuple[Rows, Rows, Rows]:
    """What scales of q, k and v count."""
    where = Sequences.of(varlen, paged)
    packed, pages = where.cu_q is not None, where.page_table is not None
    batch = varlen.batch if varlen is not None else q.shape[0]
    of_keys = "paged" if pages else "packed" if packed else "dense"
    heads = q.shape[1], k.shape[1]
    keys = (of_keys, batch, heads, where.cu_k, where.page_table)
    return (
        Rows("q", q, "packed" if packed else "dense", batch, heads, where.cu_q),
        Rows("k", k, *keys),
        Rows("v", v, *keys),
    )


Scale = tuple[Rows, torch.Tensor]


def scaled_scores(before: Sequence[Scale], shift: Scale | None, behind: Sequence[Scale]) -> Score | None:
    """What the score is before the score mod: times these scales, plus `shift`, a number of each query, times these.

    None where there is nothing to do. Raises: `ShapeMismatch`.
    """
    if not before and not behind and shift is None:
        return None
    form = _Form()
    result = "'score'"
    for rows, scale in before:
        result = form.scaled(result, rows, scale)
    if shift is not None:
        rows, of_rows = shift
        result = form.step("add", "None", result, form.read(rows, of_rows, rows.own))
    for rows, scale in behind:
        result = form.scaled(result, rows, scale)
    return Score.formed(form.text(result), tuple(form.leaves), "scales")


def scaled_values(rows: Rows, scale: torch.Tensor) -> Values:
    """The factor of v. Raises: `ShapeMismatch`."""
    form = _Form()
    result = form.read(rows, scale, _fitting(rows, scale))
    return Values.formed(form.text(result), tuple(form.leaves), "scales of values")


def _fitting(rows: Rows, scale: torch.Tensor) -> list[Size]:
    """What the dimensions of `scale` count. Raises: `ShapeMismatch` where that is nothing, or may be two things."""
    name, shape = rows.name, tuple(scale.shape)
    found: list[list[Size]] = []
    for sizes in rows.shapes:
        counted = _counted(rows, shape, sizes)
        if counted is not None and counted not in found:
            found.append(counted)
    if len(found) == 1:
        return found[0]
    of = f"{name}_scale has shape {shape}, {name} {tuple(rows.tensor.shape)}, of {rows.batch} sequences"
    if found:
        meant = " or ".join("(" + ", ".join(what for what, _ in sizes) + ")" for sizes in found)
        raise errors.ShapeMismatch(
            f"{of}: that may count {meant}; say which by a dimension of 1: (..., rows, 1) for rows, "
            "(B, H, 1, channels) for channels of v"
        )
    rows_of_it = {"dense": "(B, H, S)", "packed": "(total, H)", "paged": "(num_pages, H, page_size)"}[rows.lies]
    more = ", (B, H, S / block), block a power of two" if rows.lies == "dense" and name != "v" else ""
    more += ", (B, H, blocks, 1), (B, H, Dv) for channels" if name == "v" else ""
    heads = "(Hq,), (Hkv,), (B, Hq)" if name == "q" else "(Hkv,), (B, Hkv)"
    raise errors.ShapeMismatch(f"{of}: no scale of it; pass one number, (1,), {heads}, {rows_of_it} for rows{more}")


def _counted(rows: Rows, shape: tuple[int, ...], sizes: list[Size]) -> list[Size] | None:
    """`sizes` as this shape has them, "one" where it shares; None where it is another."""
    if len(shape) != len(sizes):
        return None
    found: list[Size] = []
    for n, (what, size) in zip(shape, sizes, strict=True):
        if n == 1 and (what != "d" or len(shape) == 4):  # (.., .., 1) of v are rows, as `ca.quantize` has packed ones
            found.append(("one", 1))
        elif n == size or (what == "h" and n == rows.heads[1]):  # q's by the heads of k, as flash-attention 3 has it
            found.append((what, n))
        elif what == "row" and (rows.name != "v" or len(shape) == 4) and block_of(size, n):
            found.append((f"block of {block_of(size, n)}", n))
        else:
            return None
    return found


class _Form:
    """Writes the form of a mod, see `graph.form`, step by step; arguments are written as Python's literals."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.leaves: list[torch.Tensor] = []

    def step(self, op: str, *arguments: str) -> str:
        """The literal that names the value of an operation."""
        self.steps.append(f"('op:{op}', {', '.join(arguments)})")
        return f"'x{len(self.steps) - 1}'"

    def text(self, result: str) -> str:
        """The form whose value is `result`."""
        return f"('steps', {len(self.leaves)}, ({''.join([step + ', ' for step in self.steps])}), {result})"

    def leaf(self, tensor: torch.Tensor) -> str:
        self.leaves.append(tensor)
        return f"'t{len(self.leaves) - 1}'"

    def constant(self, n: int) -> str:
        return self.step("const", str(int(n)), "'int32'")

    def read(self, rows: Rows, scale: torch.Tensor, sizes: list[Size]) -> str:
        """The entry of `scale` that belongs to a pair."""
        where = [self.place(rows, what, n) for what, n in sizes]
        return self.step("read", self.leaf(scale), *where)

    def scaled(self, value: str, rows: Rows, scale: torch.Tensor) -> str:
        """`value` times the entry of `scale`, which kernels know not to be negative."""
        factor = self.step("scale", "None", self.read(rows, scale, _fitting(rows, scale)))
        return self.step("mul", "None", value, factor)

    def place(self, rows: Rows, what: str, n: int) -> str:
        """Where along a dimension that counts `what`, `n` of them."""
        row = f"'{rows.position}'"
        if what == "one":
            return self.constant(0)
        if what in ("b", "d"):
            return f"'{what}'"
        if what == "h":
            return "'h'" if n == rows.heads[0] else self.divided("'h'", rows.heads[0] // n)
        if what == "row":
            return row
        if what == "packed row":
            assert rows.offsets is not None
            return self.step("add", "None", self.step("read", self.leaf(rows.offsets[:-1]), "'b'"), row)
        page_size = rows.tensor.shape[2]
        if what == "page":
            assert rows.table is not None
            return self.step("read", self.leaf(rows.table), "'b'", self.divided(row, page_size))
        if what == "row of a page":
            return self.step("mod", "None", row, self.constant(page_size))
        return self.divided(row, int(what.removeprefix("block of ")))

    def divided(self, place: str, by: Any) -> str:
        return self.step("floordiv", "None", place, self.constant(by))
