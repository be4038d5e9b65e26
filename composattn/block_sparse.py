"""Masks of blocks: which blocks of queries and keys attend, as tensors say at run time; any lists become one map.

Whatever names the blocks becomes a table on its device, int8 or bool (B|1, H|1, Tq, Tkv), by a few torch operations
with no host synchronisation, and the mask reads it at (b, h, q // R, kv // C) like any captured tensor. So blocks
compose with masks and score mods, kernels visit what the table leaves (`graph.block_map`), whatever their own tile size
is, and the backward's lists are made from the same table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import errors
from .graph.derived import Derived
from .graph.expr import Capture, DType, Expr, const, index, read
from .graph.mask import Mask
from .graph.ops import apply

SMALLEST_BLOCK = 16

Blocks = int | tuple[int, int]
HIDDEN, TESTED, VISIBLE = 0, 1, 2


class BlockSparse(Mask):
    """A mask made of blocks of R queries and C keys: `& | ~` combine it with any other mask.

    tiles: int8, uint8 or bool (B|1, H|1, Tq, Tkv), on q's device; H counts query heads. 0 (False): nothing of the block
        is visible; 1 (True): of the block is visible what `partial` says, all of it without `partial`; 2: all of it.
        This is what `Mask.tiles` returns: `BlockSparse(m.tiles(...), block, partial=m)` is `m`.
    block: (R, C), or one number for both; multiples of 16. They need not match a kernel's tiles.
    partial: a mask, or a mask_mod, for the blocks of kind 1.

    The tensors are held by reference: write new contents into them, and the next call sees those, with nothing planned
    or compiled again (by torch operations: torch counts no write through `.data` or numpy). Blocks speak of positions
    0 to Tq·R and 0 to Tkv·C of each sequence; what lies beyond is not visible. A dense call must have as many blocks,
    else it raises `BlockMaskMismatch`. Numbers out of range name none; with `composattn.debug_checks(True)` a call
    raises `BlocksOutOfRange` for them.

    Raises: `NotATensor`, `UnsupportedIndexDType`, `WrongRank`, `EmptyDimension`, `UnsupportedBlockSize`.
    """

    __slots__ = ("block", "table")

    def __init__(self, tiles: torch.Tensor, block: Blocks = 128, *, partial: Any = None) -> None:
        _check("tiles", tiles, (torch.bool, torch.int8, torch.uint8), "(B|1, H|1, Tq, Tkv)", 4)
        recipe = functools.partial(_map, test=partial is not None)
        self._made(Table(recipe, (tiles,), _block(block), {"tiles": (HIDDEN, VISIBLE)}), partial)

    def _made(self, table: Table, partial: Any = None) -> None:
        kind = _read(table)
        if partial is None:
            visible = kind if kind.dtype is DType.BOOL else apply("ne", kind, const(HIDDEN))
        else:
            inner = Mask.of(partial).expr
            tested = apply("and", apply("ne", kind, const(HIDDEN)), inner)
            visible = apply("or", apply("eq", kind, const(VISIBLE)), tested)
        batch, heads, rows, columns = table.shape
        super().__init__(visible, f"blocks({batch}x{heads}x{rows}x{columns} of {table.block[0]}x{table.block[1]})")
        self.table, self.block = table, table.block

    @classmethod
    def _of(cls, table: Table, partial: Any = None) -> BlockSparse:
        made = cls.__new__(cls)
        made._made(table, partial)
        return made

    @classmethod
    def topk(cls, indices: torch.Tensor, block: Blocks, q_len: int, kv_len: int) -> BlockSparse:
        """The blocks of keys that each block of queries picked, as sparse-attention models do at run time.

        indices: int32 or int64 (B|1, H|1, Tq, K), numbers of key blocks in any order, any of them several times; -1 is
        none. Tq is q_len / R rounded up. Write new indices into the same tensor rather than making a new mask a step.

        Raises: as the class, `ShapeMismatch`.
        """
        _check("indices", indices, _INDEX, "(B|1, H|1, Tq, K)", 4)
        rows, columns = _grid(block, q_len, kv_len)
        if indices.shape[2] != rows:
            raise errors.ShapeMismatch(
                f"indices has rows for {indices.shape[2]} query blocks; {q_len} queries are {rows} blocks of "
                f"{_block(block)[0]}"
            )
        recipe = functools.partial(_picked, columns=columns)
        return cls._of(Table(recipe, (indices,), _block(block), {"indices": (-1, columns - 1)}))

    @classmethod
    def from_csr(
        cls, indptr: torch.Tensor, indices: torch.Tensor, block: Blocks, q_len: int, kv_len: int
    ) -> BlockSparse:
        """Rows of blocks one after the other: those of query block m are indices[indptr[m]:indptr[m + 1]].

        indptr: int (Tq + 1,) or (B|1, H|1, Tq + 1). indices: int (n,) or (B|1, H|1, n); entries from indptr's last one
        on are not used, duplicates and any order are fine.

        Raises: as the class, `ShapeMismatch`.
        """
        indptr, indices = _with_heads("indptr", indptr), _with_heads("indices", indices)
        rows, columns = _grid(block, q_len, kv_len)
        if indptr.shape[2] != rows + 1:
            raise errors.ShapeMismatch(
                f"indptr has {indptr.shape[2]} entries; {q_len} queries are {rows} blocks of {_block(block)[0]}, "
                f"which need {rows + 1}"
            )
        _check_lead("indptr", indptr, "indices", indices)
        limits = {"indptr": (0, indices.shape[2]), "indices": (-1, columns - 1)}
        return cls._of(Table(functools.partial(_rows_of, columns=columns), (indptr, indices), _block(block), limits))

    @classmethod
    def from_coo(cls, rows: torch.Tensor, columns: torch.Tensor, block: Blocks, q_len: int, kv_len: int) -> BlockSparse:
        """Pairs of blocks in any order, duplicates included.

        rows, columns: int (n,) or (B|1, H|1, n), numbers of query and of key blocks; a pair with a -1 is none.

        Raises: as the class, `ShapeMismatch`.
        """
        rows, columns = _with_heads("rows", rows), _with_heads("columns", columns)
        grid = _grid(block, q_len, kv_len)
        if rows.shape[2] != columns.shape[2]:
            raise errors.ShapeMismatch(f"rows has {rows.shape[2]} entries, columns {columns.shape[2]}; they are pairs")
        _check_lead("rows", rows, "columns", columns)
        limits = {"rows": (-1, grid[0] - 1), "columns": (-1, grid[1] - 1)}
        return cls._of(Table(functools.partial(_pairs, grid=grid), (rows, columns), _block(block), limits))

    @classmethod
    def from_block_mask(cls, block_mask: Any, partial: Any = None) -> BlockSparse:
        """torch's `BlockMask`, its lists taken at their word: full blocks whole, partial ones by the mask_mod.

        partial: what stands for its mask_mod, if that is known already as a `Mask`.

        Raises: `NotATensor` for another object; `UnsupportedBlockSize`.
        """
        lists = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        if not all(hasattr(block_mask, name) for name in (*lists, "mask_mod", "seq_lengths", "BLOCK_SIZE")):
            raise errors.NotATensor(f"got a {type(block_mask).__name__}; pass torch's BlockMask")
        given = {name: t for name in lists if (t := getattr(block_mask, name)) is not None}
        block = tuple(block_mask.BLOCK_SIZE)
        grid = _grid(block, *block_mask.seq_lengths)
        limits = {name: (0, t.shape[-1] if name.endswith("blocks") else grid[1] - 1) for name, t in given.items()}
        table = Table(functools.partial(_listed, grid=grid), tuple(given.values()), _block(block), limits)
        return cls._of(table, block_mask.mask_mod if partial is None else partial)


# --- the table ------------------------------------------------------------------------------------------------


class Table(Derived):
    """int8 or bool (B|1, H|1, Tq + 1, Tkv + 1): the kind of each block, and a last row and column of hidden ones.

    Reads are clamped, so what lies beyond the blocks reads those.
    """

    __slots__ = ("block", "limits")

    def __init__(
        self,
        recipe: Callable[..., torch.Tensor],
        tensors: tuple[torch.Tensor, ...],
        block: tuple[int, int],
        limits: dict[str, tuple[int, int]],
    ) -> None:
        self.block, self.limits = block, limits
        devices = {str(t.device) for t in tensors}
        if len(devices) > 1:
            raise errors.DeviceMismatch(f"the tensors of a BlockSparse lie on {sorted(devices)}; move them to q's")
        if torch.compiler.is_compiling():
            _say_where_blocks_are_made()
        super().__init__(functools.partial(_framed, recipe=recipe), tuple(map(Capture, tensors)))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B|1, H|1, Tq, Tkv)."""
        batch, heads, rows, columns = self.tensor.shape
        return batch, heads, rows - 1, columns - 1

    def check_contents(self) -> None:
        """Looks whether all numbers are in range, which waits for the device. Raises `BlocksOutOfRange`."""
        for (name, (least, most)), source in zip(self.limits.items(), self.sources, strict=True):
            tensor = source.tensor
            if tensor.numel() and not least <= int(tensor.min()) <= int(tensor.max()) <= most:
                raise errors.BlocksOutOfRange(
                    f"{name} has numbers from {int(tensor.min())} to {int(tensor.max())}; "
                    f"they must be from {least} to {most}"
                )
            if name == "indptr" and bool((tensor.diff(dim=-1) < 0).any()):
                raise errors.BlocksOutOfRange("indptr falls; it must be the running sums of how many blocks a row has")

    def check(self, batch: int, heads: int, q_len: int | None, kv_len: int | None) -> None:
        """Whether it was made for a call of this form; a length may be unknown. Raises `BlockMaskMismatch`."""
        for name, made, given in zip(("batch", "query heads"), self.shape[:2], (batch, heads), strict=True):
            if made not in (1, given):
                raise errors.BlockMaskMismatch(
                    f"the blocks are for {name} {made}, the call has {given}; make them so, or 1"
                )
        for name, made, length, size in zip(
            ("queries", "keys"), self.shape[2:], (q_len, kv_len), self.block, strict=True
        ):
            if length is not None and made != -(-length // size):
                raise errors.BlockMaskMismatch(
                    f"there are {made} blocks of {size} {name}; {length} {name} are {-(-length // size)} blocks"
                )


@torch._dynamo.disable(  # type: ignore[untyped-decorator]
    reason="a BlockSparse can't be made in a compiled region: make it outside, and write new indices into its tensor"
)
def _say_where_blocks_are_made() -> None:
    pass


def _framed(*tensors: torch.Tensor, recipe: Callable[..., torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.pad(recipe(*tensors), (0, 1, 0, 1))


def _map(tiles: torch.Tensor, test: bool) -> torch.Tensor:
    """A user's map: with a test for some, all three kinds, else bool."""
    if not test:
        return tiles != HIDDEN
    return tiles.to(torch.int8)


def _picked(indices: torch.Tensor, columns: int) -> torch.Tensor:
    return _scattered(indices, columns)


def _rows_of(indptr: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    lead = torch.broadcast_shapes(indptr.shape[:2], indices.shape[:2])
    entry = torch.arange(indices.shape[2], device=indices.device).expand(*lead, -1).contiguous()
    starts = indptr.expand(*lead, -1).contiguous()
    row = torch.searchsorted(starts, entry.to(starts.dtype), right=True) - 1
    return _pairs(row, indices, (indptr.shape[2] - 1, columns))


def _pairs(rows: torch.Tensor, columns: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    lead = torch.broadcast_shapes(rows.shape[:2], columns.shape[:2])
    inside = (rows >= 0) & (rows < grid[0]) & (columns >= 0) & (columns < grid[1])
    place = torch.where(inside, rows.long() * grid[1] + columns, -1).expand(*lead, -1)
    return _scattered(place, grid[0] * grid[1]).unflatten(-1, grid)


def _listed(*lists: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """torch's lists: (counts, indices) of partial blocks, and of full ones if there are any."""
    kinds = None
    for kind, (count, indices) in enumerate(zip(lists[::2], lists[1::2], strict=True), start=TESTED):
        used = torch.arange(indices.shape[-1], device=count.device) < count[..., None]
        there = _scattered(torch.where(used, indices, -1), grid[1])[..., : grid[0], :].to(torch.int8) * kind
        kinds = there if kinds is None else torch.maximum(kinds, there)
    assert kinds is not None
    return kinds


def _scattered(places: torch.Tensor, size: int) -> torch.Tensor:
    """bool (..., size): True at the places along the last dimension; places outside of it are none."""
    outside = (places < 0) | (places >= size)
    # new_zeros, so that below vmap the zeros are as many as the places
    found = places.new_zeros((*places.shape[:-1], size + 1), dtype=torch.bool)
    return found.scatter_(-1, torch.where(outside, size, places).long(), True)[..., :size]


def _read(table: Table) -> Expr:
    batch, heads, *_ = table.shape
    rows, columns = table.block
    return read(
        table,
        (
            index("b") if batch > 1 else const(0),
            index("h") if heads > 1 else const(0),
            apply("floordiv", index("q"), const(rows)),
            apply("floordiv", index("kv"), const(columns)),
        ),
    )


# --- checks that look at no contents ---------------------------------------------------------------------------

_INDEX = (torch.int32, torch.int64)


def _check(name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], shape: str, rank: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise errors.NotATensor(f"{name} is a {type(tensor).__name__}; pass a tensor of shape {shape}")
    if tensor.dtype not in dtypes:
        raise errors.UnsupportedIndexDType(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if tensor.ndim != rank:
        raise errors.WrongRank(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}")
    if tensor.numel() == 0 and rank == 4:
        raise errors.EmptyDimension(f"{name} has shape {tuple(tensor.shape)}; it must have blocks")


def _block(block: Any) -> tuple[int, int]:
    pair = block if isinstance(block, (tuple, list)) else (block, block)
    good = len(pair) == 2 and all(isinstance(n, int) and n > 0 and n % SMALLEST_BLOCK == 0 for n in pair)
    if not good:
        raise errors.UnsupportedBlockSize(
            f"block is {block!r}; it is (queries, keys), or one number for both, in multiples of {SMALLEST_BLOCK}"
        )
    return int(pair[0]), int(pair[1])


def _grid(block: Any, q_len: int, kv_len: int) -> tuple[int, int]:
    rows, columns = _block(block)
    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise errors.InvalidLength(f"{name} is {length!r}; it is a number of positions from 1")
    return -(-q_len // rows), -(-kv_len // columns)


def _with_heads(name: str, tensor: Any) -> torch.Tensor:
    _check(name, tensor, _INDEX, "(n,) or (B|1, H|1, n)", 1 if getattr(tensor, "ndim", 3) == 1 else 3)
    return tensor[None, None] if tensor.ndim == 1 else tensor  # type: ignore[no-any-return]


def _check_lead(name: str, x: torch.Tensor, other: str, y: torch.Tensor) -> None:
    if any(a != b and 1 not in (a, b) for a, b in zip(x.shape[:2], y.shape[:2], strict=True)):
        raise errors.ShapeMismatch(
            f"{name} is for (batch, heads) {tuple(x.shape[:2])}, {other} for {tuple(y.shape[:2])}; make them one, or 1"
        )


__all__ = ["BlockSparse", "Table"]
