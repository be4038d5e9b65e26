"""Reads outside of captured tensors at visible pairs, found by looking at every index that a mod computes.

Backends clamp such reads, at no cost and without a word. This is what `composattn.debug_checks` adds: each read becomes
a mask of its own, "visible, needed and outside", whose tiles are mostly seen to be empty from bounds; what bounds leave
open is computed pair by pair, some tiles at a time. What a score decides has no bounds: there the scores of all tiles
that have a visible pair are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..errors import CapturedIndexOutOfRange
from ..graph.evaluate import Env, evaluate
from ..graph.expr import Dep, Expr, const, index, walk
from ..graph.ops import apply
from ..graph.rebuilt import substitute
from .derived import Derived
from .program import Program
from .symbolic import read_in_words
from .tiles import EMPTY, positions_in, tiles

_TILE = 128
_TILES_AT_ONCE = 64  # 2^20 pairs


class Scores(NamedTuple):
    """The scores of some sequences: scale and q (B, Hq, Sq, D), k (B, Hkv, Skv, D)."""

    q: torch.Tensor
    k: torch.Tensor
    scale: float

    def at(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """(n, rows, columns) of tiles: b and h (n, 1, 1), q (n, rows, 1), kv (n, 1, columns); fp32, fp64 of fp64."""
        working = torch.promote_types(self.q.dtype, torch.float32)
        queries = self.q[b, h, q].squeeze(2).to(working)
        keys = self.k[b, h // (self.q.shape[1] // self.k.shape[1]), kv].squeeze(1).to(working)
        return (queries * self.scale) @ keys.mT


class Outside(NamedTuple):
    """A read, and where it leaves its tensor and is needed at a visible pair; `possible`, whatever the scores are."""

    read: Expr
    here: Expr
    possible: Expr


def refuse_outside_reads(
    program: Program,
    batches: range,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    scores: Scores | None = None,
) -> None:
    """Looks at what `program` reads for the sequences `batches`, all of lengths `q_len` and `kv_len`.

    A read in a branch of `torch.where` counts where the branch is taken. `scores`: those of `batches`, needed where
    `asks_for_scores`. Waits for the device. Raises: `CapturedIndexOutOfRange`.
    """
    if not q_len or not kv_len:
        return
    for outside in _outside(program):
        first = batches.start
        at = {index("b"): apply("add", index("b"), const(first)) if first else index("b")}
        read, here, possible = outside.read, substitute(outside.here, at), substitute(outside.possible, at)
        kinds = tiles(possible, q_len, kv_len, (_TILE, _TILE), len(batches), heads, refine=True, device=device)
        if here.deps & Dep.SCORE:
            kinds = kinds.expand(len(batches), heads, -1, -1)
        pair = _first_pair(here, (kinds != EMPTY).nonzero(), q_len, kv_len, scores)
        if pair is not None:
            b, h, q, kv = pair
            raise CapturedIndexOutOfRange(
                f"{read_in_words(read)}, which leaves that shape at b {b + first}, h {h}, q {q}, kv {kv}, "
                "where the mask is true; make the tensor larger, clamp the index, or hide those pairs with the mask"
            )


def asks_for_scores(program: Program) -> bool:
    """Whether a score decides what `program` reads, or whether a read of it is needed."""
    return any(outside.here.deps & Dep.SCORE for outside in _outside(program))


def _outside(program: Program) -> Iterator[Outside]:
    """All reads that could leave their tensors."""
    visible = const(True) if program.mask is None else program.mask
    for root in (program.mask, program.score):
        if root is None:
            continue
        needed, perhaps = _needed(root, by_score=True), _needed(root, by_score=False)
        for node in needed:
            if node.op != "read" or isinstance(node.attr, Derived):
                continue  # tables of blocks are made to be read beyond their end
            here, possible = (
                apply("and", apply("and", _beyond(node, by_score), where[node]), visible)
                for by_score, where in ((True, needed), (False, perhaps))
            )
            if not here.is_const or here.attr:
                yield Outside(node, here, possible)


def _beyond(read: Expr, by_score: bool) -> Expr:
    """Where a read leaves its tensor; without `by_score`, anywhere that a score decides."""
    found = const(False)
    for i, size in zip(read.args, read.attr.tensor.shape, strict=True):
        if i.deps & Dep.SCORE and not by_score:
            return const(True)
        found = apply("or", found, apply("or", apply("lt", i, const(-size)), apply("ge", i, const(size))))
    return found


def _needed(root: Expr, by_score: bool) -> dict[Expr, Expr]:
    """Each node under `root`, and where its value has a say in that of `root`: in branches that are taken.

    Without `by_score`, both branches are taken where a score decides.
    """
    needed = {root: const(True)}
    for node in reversed(list(walk(root))):
        here = needed[node]
        for argument, condition in zip(node.args, _conditions(node, by_score), strict=True):
            there = apply("and", here, condition)
            needed[argument] = apply("or", needed[argument], there) if argument in needed else there
    return needed


def _conditions(node: Expr, by_score: bool) -> list[Expr]:
    always = const(True)
    if node.op != "where" or (node.args[0].deps & Dep.SCORE and not by_score):
        return [always] * len(node.args)
    return [always, node.args[0], apply("not", node.args[0])]


def _first_pair(
    here: Expr, where: torch.Tensor, q_len: int, kv_len: int, scores: Scores | None
) -> tuple[int, int, int, int] | None:
    """(b, h, q, kv) of the first pair that is `here`, of the tiles (n, 4) `where`."""
    for part, at in positions_in(where, q_len, kv_len, (_TILE, _TILE), _TILES_AT_ONCE):
        b, h, q, kv = (at[name] for name in ("b", "h", "q", "kv"))
        env = Env(at, device=where.device, float_dtype=torch.float32)
        if here.deps & Dep.SCORE:
            assert scores is not None
            env.score = scores.at(b, h, q, kv)
            env.float_dtype, env.deciding = env.score.dtype, {}
        found = evaluate(here, env).expand(len(part), _TILE, _TILE).nonzero()
        if len(found):
            n, i, j = found[0].tolist()
            return int(b[n]), int(h[n]), int(q[n, i]), int(kv[n, 0, j])
    return None
