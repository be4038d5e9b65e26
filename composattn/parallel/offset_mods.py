"""Mods at global positions: what a rank's call computes, whose rows are some of the sequence's.

A call sees rows 0, 1, ... of what the rank has and fetched. Its mods are the user's with other leaves: where the rows
are one run, `q + first` and `kv + first` with run-time numbers, so that bands, diagonals and everything else that is
derived stays what it was; elsewhere `positions[q]` and `positions[kv]`, which kernels read as any captured table. What
a mask reads row by row, as document ids, a call gets of its own rows. Packed sequences are one sequence whose mods read
which of them a row belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..analysis.derived import refresh
from ..call.block_sparse import Table
from ..call.sequences import Varlen, rows_in_use
from ..graph.expr import Capture, Dep, Expr, captures, const, index, read
from ..graph.ops import apply
from ..graph.rebuilt import substitute, transform
from ..graph.scalar import Scalar
from ..mods.mask import Mask
from ..mods.mod import Mod
from ..mods.score import Score

FIRST_Q, FIRST_KV, FIRST_HEAD, SEQ_LEN = (Scalar(0) for _ in range(4))
"""Run-time numbers of every such call: first query, first key, first head, length of the whole sequence."""

_Q, _KV, _H, _B = (index(name) for name in ("q", "kv", "h", "b"))
_AT_Q, _AT_KV = (torch.zeros(1, dtype=torch.int32, device="cpu") for _ in range(2))  # stand for the tables of positions


@dataclass(frozen=True)
class Graphs:
    """The mods of a call on the whole sequence: dense, or packed and made dense; None changes nothing."""

    score: Expr | None
    mask: Expr | None

    @staticmethod
    def of(score: Score | None, mask: Mask | None, packed: Packed | None) -> Graphs:
        """What `score` and `mask` compute, of one sequence of all rows."""
        found = Graphs(None if score is None else _plain(score.expr), None if mask is None else _plain(mask.expr))
        if packed is None:
            return found
        same = packed.same_sequence
        mask_of = same if found.mask is None else apply("and", same, packed.inside(found.mask))
        return Graphs(None if found.score is None else packed.inside(found.score), mask_of)

    def mapped(self, change: Callable[[Expr], Expr]) -> Graphs:
        return Graphs(*(None if e is None else change(e) for e in (self.score, self.mask)))


def _plain(graph: Expr) -> Expr:
    """With the tables of a `BlockSparse` as tensors: they are made for the whole sequence, a call has a part of it."""
    tables = [c for c in captures(graph) if isinstance(c, Table)]
    refresh(tables)
    plain = {c: Capture(c.tensor) for c in tables}

    def leaf(node: Expr) -> Expr | None:
        if node.op != "read" or node.attr not in plain:
            return None
        return read(plain[node.attr], node.args)

    return transform(graph, leaf) if tables else graph


class Packed:
    """Sequences that lie one after the other, as tables over all rows: which one, the position in it, its length."""

    def __init__(self, varlen: Varlen, total: int) -> None:
        offsets, used = varlen.cu_seqlens_q, varlen.seqused_q
        row = torch.arange(total, device=offsets.device)
        number = torch.searchsorted(offsets[1:].contiguous(), row, right=True).clamp(max=varlen.batch - 1)
        lengths = offsets.diff() if used is None else used
        inside = rows_in_use(offsets, used, total)
        self.number = (number if inside is None else torch.where(inside, number, -1)).int()
        self.position = (row - offsets[number]).int()
        self.length = lengths[number].int().contiguous()

    def _at(self, table: torch.Tensor, place: Expr) -> Expr:
        return read(Capture(table), [place])

    @property
    def same_sequence(self) -> Expr:
        """Whether q and kv belong to one sequence, which uses both."""
        mine, other = self._at(self.number, _Q), self._at(self.number, _KV)
        return apply("and", apply("eq", mine, other), apply("ge", mine, const(0)))

    def inside(self, graph: Expr) -> Expr:
        """`graph`, which speaks of positions inside of a sequence, of rows."""
        length = self._at(self.length, _Q)
        return substitute(
            graph,
            {
                _B: self._at(self.number, _Q),
                _Q: self._at(self.position, _Q),
                _KV: self._at(self.position, _KV),
                index("q_len"): length,
                index("kv_len"): length,
            },
        )


@dataclass(frozen=True, eq=False)
class Local:
    """A captured tensor that is read row by row: a call gets those of its own queries, or keys, along `dim`."""

    tensor: torch.Tensor
    dim: int
    of_keys: bool

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """What the rows at these positions (on the tensor's device) read."""
        return self.tensor.detach().index_select(self.dim, positions).contiguous()


@dataclass(frozen=True)
class OffsetMods:
    """Mods whose rows lie elsewhere: forms, and of each leaf where a call finds it.

    A leaf is a tensor of `given`, by its number; a `Local`; a table of positions, by its name; or what it is.
    """

    forms: tuple[str | None, str | None]
    leaves: tuple[Any, ...]

    @staticmethod
    def of(
        graphs: Graphs,
        given: Sequence[torch.Tensor],
        constant: Sequence[torch.Tensor],
        seq_len: int,
        *,
        runs: bool,
        heads: bool = False,
    ) -> OffsetMods:
        """`graphs` of rows that are runs, or that tables name.

        given: the tensors that calls give anew; constant: those whose contents do not change. heads: whether
        the call has some of the heads only.
        """
        length = SEQ_LEN.expr
        in_runs = apply("add", _Q, FIRST_Q.expr), apply("add", _KV, FIRST_KV.expr)
        q, kv = in_runs if runs else (read(Capture(_AT_Q), [_Q]), read(Capture(_AT_KV), [_KV]))
        at = {_Q: q, _KV: kv, index("q_len"): length, index("kv_len"): length}
        if heads:
            at[_H] = apply("add", _H, FIRST_HEAD.expr)
        numbers = {id(t): n for n, t in enumerate(given)}
        found = _Locals(frozenset(numbers) - {id(t) for t in constant}, seq_len, at)
        moved = graphs.mapped(lambda graph: transform(graph, lambda node: at.get(node) or found.read(node)))
        mods: list[Mod | None] = [
            None if moved.score is None else Score(moved.score),
            None if moved.mask is None else Mask(moved.mask),
        ]
        known: dict[int, Any] = numbers | found.by_stand_in | {id(_AT_Q): "q", id(_AT_KV): "kv"}
        leaves = [known.get(id(leaf), leaf) for mod in mods if mod is not None for leaf in mod.leaves]
        score, mask = (None if mod is None else mod.form for mod in mods)
        return OffsetMods((score, mask), tuple(leaves))

    def tables(self, q: torch.Tensor, kv: torch.Tensor) -> dict[Any, torch.Tensor]:
        """What the calls on queries and keys at these positions (int64, on their device) read."""
        found: dict[Any, torch.Tensor] = {}
        for leaf in self.leaves:
            if isinstance(leaf, Local):
                found[leaf] = leaf.at(kv if leaf.of_keys else q)
            elif isinstance(leaf, str):
                found[leaf] = (q if leaf == "q" else kv).int()
        return found

    def leaves_of(self, given: Sequence[torch.Tensor], tables: Mapping[Any, torch.Tensor]) -> list[Any]:
        """The leaves of one call."""
        return [
            given[leaf] if isinstance(leaf, int) else tables[leaf] if isinstance(leaf, str | Local) else leaf
            for leaf in self.leaves
        ]


class _Locals:
    """Reads of captured tensors at q or kv itself, in place of which a call reads its own rows of them.

    So what is known of `ids[q] == ids[kv]` is known of a call's rows too: the runs of keys that a row sees.
    """

    def __init__(self, changing: frozenset[int], seq_len: int, at: Mapping[Expr, Expr]) -> None:
        self._changing, self._seq_len, self._at = changing, seq_len, at
        self.by_stand_in: dict[int, Local] = {}
        self._stand_ins: dict[tuple[int, int, bool], torch.Tensor] = {}

    def read(self, node: Expr) -> Expr | None:
        """`node` as a read of the call's own rows; None where it is no such read."""
        if node.op != "read" or id(node.attr.tensor) in self._changing:
            return None
        tensor = node.attr.tensor
        rows = [d for d, i in enumerate(node.args) if i.deps & (Dep.Q | Dep.KV)]
        if len(rows) != 1 or node.args[rows[0]] not in (_Q, _KV) or tensor.shape[rows[0]] < self._seq_len:
            return None
        dim, of_keys = rows[0], node.args[rows[0]] is _KV
        key = id(tensor), dim, of_keys
        if key not in self._stand_ins:
            stand_in = self._stand_ins[key] = torch.zeros((1,) * tensor.ndim, dtype=tensor.dtype, device="cpu")
            self.by_stand_in[id(stand_in)] = Local(tensor, dim, of_keys)
        arguments = [i if d == dim else substitute(i, self._at) for d, i in enumerate(node.args)]
        return read(Capture(self._stand_ins[key]), arguments)
