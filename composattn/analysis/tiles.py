"""Which tiles of a mask are empty, full or partial; from bounds of the mask over each tile, not from its elements."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..errors import InvalidArgument
from ..graph.evaluate import Env, evaluate
from ..graph.expr import Dep, Expr, captures, walk
from .dense import check_sizes, device_of
from .derived import refresh
from .interval_values import Bools
from .intervals import Tiles

EMPTY, PARTIAL, FULL = 0, 1, 2

_AT_ONCE = 2**22  # elements of partial tiles that a refinement looks at together


def tiles(
    mask: Expr,
    q_len: int,
    kv_len: int,
    tile: tuple[int, int] = (128, 128),
    batch: int = 1,
    heads: int = 1,
    *,
    refine: bool = False,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """int8 (B|1, H|1, Tq, Tkv): 0 empty, 1 partial, 2 full; a dimension the mask does not depend on is 1.

    `tile` is (queries, keys). Tiles at the edges speak of the positions that exist. Empty and full are never wrong;
    partial may be pessimistic, unless `refine` evaluates every element of the partial tiles. Work and memory without
    it are those of the tiles and of the captured tensors. `device` defaults to that of the captured tensors.

    Raises: `InvalidArgument` for lengths, counts or tile sizes below 1.
    """
    if not isinstance(tile, tuple | list) or len(tile) != 2:
        raise InvalidArgument(f"tile must be (queries, keys), got {tile!r}")
    if not isinstance(refine, bool):
        raise InvalidArgument(f"refine is {refine!r}; it must be True or False")
    check_sizes(1, q_len=q_len, kv_len=kv_len, batch=batch, heads=heads, **{"tile[0]": tile[0], "tile[1]": tile[1]})
    held = captures(mask)
    refresh(held)
    device = device_of(device, held)
    b, h = (batch if mask.deps & Dep.B else 1), (heads if mask.deps & Dep.H else 1)
    found = kinds(mask, Tiles(q_len, kv_len, tile, b, h, device, cuts=useful_cuts(mask, q_len, kv_len, tile)))
    if refine:
        for part, settled in settled_tiles(mask, (found == PARTIAL).nonzero(), q_len, kv_len, tile, device):
            found[tuple(part.unbind(1))] = settled
    return found


def kinds(mask: Expr, grid: Tiles) -> torch.Tensor:
    """int8 (B, H, Tq, Tkv) of a grid: 0 empty, 1 partial, 2 full; tiles beyond the end of a sequence are empty."""
    found = grid.value(mask)
    assert isinstance(found, Bools)
    result = found.yes * (FULL - found.no.to(torch.int8))
    for dim, which in ((2, 0), (3, 1)):
        cells = grid.cells(which)
        if cells is not None and result.shape[dim] > 1:
            parts = result.index_select(dim, cells.of_tile.flatten()).unflatten(dim, cells.of_tile.shape)
            low, high = parts.amin(dim + 1), parts.amax(dim + 1)
            result = torch.where(low == high, low, PARTIAL)
    for which, lens in enumerate((grid.q_lens, grid.kv_lens)):
        if lens is not None:
            result = torch.where(grid.starts(which) < lens.view(-1, 1, 1, 1), result, EMPTY)
    return result.to(torch.int8).expand(grid.batch, grid.heads, grid.count(0), grid.count(1)).contiguous()


_MORE_CELLS = 4  # times as many cells as tiles are worth it, and
_FEW_CELLS = 2**18  # that many always


def _divisors(mask: Expr, dep: Dep, other: Dep) -> set[int]:
    """Constants that positions are divided by; quotients by negative numbers change one position further on."""
    quotients = (n for n in walk(mask) if n.op in ("floordiv", "mod") and n.dtype.is_integer)
    divided = (n for n in quotients if n.deps & dep and not n.deps & other)
    return {int(n.args[1].attr) for n in divided if n.args[1].is_const and n.args[1].attr > 0}


def _shifted(mask: Expr, dep: Dep) -> set[int]:
    """Each n of a (position // n + constant) that is divided again, as rows are that begin above an image."""
    found = set()
    for quotient in walk(mask):
        if quotient.op in ("floordiv", "mod") and quotient.args[0].op in ("add", "sub"):
            rows, shift = quotient.args[0].args
            if shift.is_const and rows.op == "floordiv" and rows.args[0].deps == dep and rows.args[1].is_const:
                found.add(int(rows.args[1].attr))
    return found


def useful_cuts(mask: Expr, q_len: int, kv_len: int, tile: tuple[int, int]) -> tuple[int | None, int | None]:
    """Where to cut tiles so that rows of a grid (q // n, q % n) are seen apart: the finest n that is not too fine."""
    cuts: list[int | None] = []
    counts = [-(-length // size) for length, size in zip((q_len, kv_len), tile, strict=True)]
    limit = max(_FEW_CELLS, _MORE_CELLS * counts[0] * counts[1])
    for which, (dep, other, length) in enumerate(((Dep.Q, Dep.KV, q_len), (Dep.KV, Dep.Q, kv_len))):
        cut, shifted = None, _shifted(mask, dep)
        for n in sorted(_divisors(mask, dep, other)):
            cells = counts[which] + length // n
            across = tile[which] % n and n % tile[which]
            if (across or (n in shifted and n < tile[which])) and cells * counts[1 - which] <= limit:
                cut = n
                counts[which] = cells
                break
        cuts.append(cut)
    return cuts[0], cuts[1]


def settled_tiles(
    mask: Expr, where: torch.Tensor, q_len: int, kv_len: int, tile: tuple[int, int], device: torch.device | str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The kinds of tiles by their elements, some at a time: int64 (tiles, 4), some rows of `where`, and int8 (tiles,).

    where: (b, h, row, column) of each.
    """
    for part, at in positions_in(where, q_len, kv_len, tile, max(1, _AT_ONCE // (tile[0] * tile[1]))):
        visible = evaluate(mask, Env(at, device=device, float_dtype=torch.float32)).expand(len(part), *tile).flatten(1)
        yield part, visible.any(1).to(torch.int8) + visible.all(1).to(torch.int8)


def positions_in(
    where: torch.Tensor, q_len: int, kv_len: int, tile: tuple[int, int], at_once: int
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Some rows of `where`, and all positions in those tiles, by their names, as they broadcast to (tiles, *tile).

    Beyond the end the last position stands again, which changes neither any nor all.
    """
    rows, columns = (torch.arange(n, device=where.device) for n in tile)
    lengths = {"q_len": torch.tensor(q_len, device=where.device), "kv_len": torch.tensor(kv_len, device=where.device)}
    for part in where.split(at_once):
        b, h, row, column = (c.view(-1, 1, 1) for c in part.unbind(1))
        q = (row * tile[0] + rows[:, None]).clamp(max=q_len - 1)
        kv = (column * tile[1] + columns).clamp(max=kv_len - 1)
        yield part, {"b": b, "h": h, "q": q, "kv": kv, **lengths}
