"""Reads outside of captured tensors at visible pairs, found by looking at every index that a mod computes.

Backends clamp such reads, at no cost and without a word. This is what `composattn.debug_checks` adds: each read becomes
a mask of its own, "visible, needed and outside", whose tiles are mostly seen to be empty from bounds; what bounds leave
open is computed pair by pair, some tiles at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..errors import CapturedIndexOutOfRange
from ..graph.evaluate import Env, evaluate
from ..graph.expr import Dep, Expr, const, index, substitute, walk
from ..graph.ops import apply
from .derived import Derived
from .program import Program
from .tiles import EMPTY, tiles

_TILE = 128


def refuse_outside_reads(
    program: Program, batches: range, heads: int, q_len: int, kv_len: int, device: torch.device
) -> None:
    """Looks at what `program` reads for the sequences `batches`, all of lengths `q_len` and `kv_len`.

    A read in a branch of `torch.where` counts where the branch is taken. Indices computed from the score are not
    looked at. Waits for the device. Raises: `CapturedIndexOutOfRange`.
    """
    if not q_len or not kv_len:
        return
    for read, bad in _outside(program):
        first = batches.start
        at = apply("add", index("b"), const(first)) if first else index("b")
        here = substitute(bad, {index("b"): at})
        kinds = tiles(here, q_len, kv_len, (_TILE, _TILE), len(batches), heads, refine=True, device=device)
        if bool((kinds != EMPTY).any()):
            b, h, q, kv = _first_pair(here, kinds, q_len, kv_len, device)
            raise CapturedIndexOutOfRange(
                f"a captured tensor of shape {tuple(read.attr.tensor.shape)} is read at {list(read.args)}, which "
                f"leaves that shape at b {b + first}, h {h}, q {q}, kv {kv}, where the mask is true; make the tensor "
                "larger, clamp the index, or hide those pairs with the mask"
            )


def _outside(program: Program) -> Iterator[tuple[Expr, Expr]]:
    """(read, where it leaves its tensor and is needed at a visible pair) of all reads that could."""
    visible = const(True) if program.mask is None else program.mask
    for root in (program.mask, program.score):
        for node, needed in {} if root is None else _needed(root).items():
            if node.op != "read" or isinstance(node.attr, Derived):
                continue  # tables of blocks are made to be read beyond their end
            beyond = const(False)
            for i, size in zip(node.args, node.attr.tensor.shape, strict=True):
                if not i.deps & Dep.SCORE:
                    beyond = apply("or", beyond, apply("or", apply("lt", i, const(-size)), apply("ge", i, const(size))))
            bad = apply("and", apply("and", beyond, needed), visible)
            if not bad.is_const or bad.attr:
                yield node, bad


def _needed(root: Expr) -> dict[Expr, Expr]:
    """Each node under `root`, and where its value has a say in that of `root`: in branches that are taken."""
    needed = {root: const(True)}
    for node in reversed(list(walk(root))):
        here = needed[node]
        for argument, condition in zip(node.args, _conditions(node), strict=True):
            there = apply("and", here, condition)
            needed[argument] = apply("or", needed[argument], there) if argument in needed else there
    return needed


def _conditions(node: Expr) -> list[Expr]:
    always = const(True)
    if node.op != "where" or node.args[0].deps & Dep.SCORE:
        return [always] * len(node.args)
    return [always, node.args[0], apply("not", node.args[0])]


def _first_pair(bad: Expr, kinds: torch.Tensor, q_len: int, kv_len: int, device: torch.device) -> list[int]:
    b, h, row, column = (kinds != EMPTY).nonzero()[0].tolist()
    q = torch.arange(row * _TILE, min(q_len, (row + 1) * _TILE), device=device).view(-1, 1)
    kv = torch.arange(column * _TILE, min(kv_len, (column + 1) * _TILE), device=device).view(1, -1)
    at: dict[str, torch.Tensor | int] = {"b": b, "h": h, "q": q, "kv": kv, "q_len": q_len, "kv_len": kv_len}
    found = evaluate(bad, Env(at, device=device, float_dtype=torch.float32)).expand(len(q), kv.shape[1])
    i, j = found.nonzero()[0].tolist()
    return [b, h, int(q[i, 0]), int(kv[0, j])]
