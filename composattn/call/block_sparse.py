"""Masks of blocks: which blocks of queries and keys attend, as tensors say at run time; any lists become one map.

Whatever names the blocks becomes a table on its device, int8 or bool (B|1, H|1, Tq, Tkv). That takes a few torch
operations and no host synchronisation. The mask reads the table at (b, h, q // R, kv // C) like any captured tensor. So
blocks compose with masks and score mods. Kernels visit what the table leaves (`analysis.tile_lists`), whatever their
own tile size is, and the backward's lists are made from the same table.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import errors
from ..analysis.derived import Derived
from ..graph.borrowed import capture_of
from ..graph.dynamo import is_traced
from ..graph.expr import Capture
from ..graph.form import MAKERS, Formed, joined
from ..graph.sizes import differ, is_known, surely
from ..mods.mask import Mask

SMALLEST_BLOCK = 16

Blocks = int | tuple[int, int]
HIDDEN, TESTED, VISIBLE = 0, 1, 2


class BlockSparse(Mask):
    """A mask made of blocks of R queries and C keys: `& | ~` combine it with any other mask.

    tiles: int8, uint8 or bool (B|1, H|1, Tq, Tkv), on q's device; H counts query heads. 0 (False): nothing of the block
        is visible; 1 (True): what `partial` says is visible, or all of the block without `partial`; 2: all of it.
        This is what `Mask.tiles` returns: `BlockSparse(m.tiles(...), block, partial=m)` is `m`.
    block: (R, C), or one number for both; multiples of 16. They need not match a kernel's tiles.
    partial: a mask, or a mask_mod, for the blocks of kind 1.

    The tensors are held by reference: write new contents into them with torch operations, and the next call sees those.
    Nothing is planned or compiled again. Torch does not count writes through `.data` or numpy. Blocks cover positions 0
    to Tq·R and 0 to Tkv·C of each sequence; what lies beyond is not visible. A dense call that has another number of
    blocks raises `BlockMaskMismatch`. Numbers out of range name no block; under `composattn.debug_checks(True)` a call
    raises `BlocksOutOfRange` for them.

    Raises: `NotATensor`, `UnsupportedIndexDType`, `WrongRank`, `EmptyDimension`, `UnsupportedBlockSize`; for tiles on a
    CPU also `BlocksOutOfRange`, for other kinds than 0, 1 and 2.
    """

    __slots__ = ("block", "count", "source")

    def __init__(self, tiles: torch.Tensor, block: Blocks = 128, *, partial: Any = None) -> None:
        _check("tiles", tiles, (torch.bool, torch.int8, torch.uint8), "(B|1, H|1, Tq, Tkv)", 4)
        if type(tiles) is torch.Tensor and tiles.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_range("tiles", tiles, HIDDEN, VISIBLE)  # looking waits for nobody
        self._set(("map", _block(block), (int(partial is not None),)), (tiles,), partial)

    def _set(self, source: Source, tensors: tuple[torch.Tensor, ...], partial: Any = None) -> None:
        """`source` and `tensors`: what `MAKERS` makes the table of, see `Table`."""
        if len({t.device for t in tensors}) > 1:
            raise errors.DeviceMismatch(
                f"the tensors of a BlockSparse lie on {sorted(str(t.device) for t in tensors)}; move them to q's"
            )
        self.source, self.block, self._expr = source, source[1], None
        kind = _kind_at(source, [not all(surely(t.shape[d] <= 1) for t in tensors) for d in (0, 1)], len(tensors))
        if partial is None:
            shown = _compared(kind, "ne", HIDDEN) if source[0] in LISTED else kind  # the others are bool
            self.form, self.leaves = _steps(len(tensors), shown), tensors
        else:
            inner = Mask.of(partial)
            visible = _steps(len(tensors), _compared(kind, "eq", VISIBLE))
            tested = joined("and", _steps(len(tensors), _compared(kind, "ne", HIDDEN)), inner.form)
            self.form = joined("or", visible, tested)
            self.leaves = (*tensors, *tensors, *inner.leaves)
        self.count = len(tensors)
        self.name = f"blocks({source[0]} of {source[1][0]}x{source[1][1]})"

    @classmethod
    def _of(cls, source: Source, tensors: tuple[torch.Tensor, ...], partial: Any = None) -> BlockSparse:
        made = cls.__new__(cls)
        made._set(source, tensors, partial)
        return made

    def named(self, name: str) -> Mask:  # type: ignore[override]
        """A `Mask` of this function by another name; it has no blocks that could be asked for by number."""
        return Mask.formed(self.form, self.leaves, name)

    def shifted(self, **by: Any) -> Mask:  # type: ignore[override]
        """A `Mask` that reads the blocks of the larger call; arguments are those of `Mask.shifted`."""
        return self.named(self.name).shifted(**by)

    def to(self, device: Any, *, non_blocking: bool = False) -> Any:
        """This mask on `device`, see `Mask.to`. Inside of a compiled region it is a `Mask` without numbered blocks."""
        mask: Any = self.named(self.name) if is_traced() else super()
        return mask.to(device, non_blocking=non_blocking)

    @property
    def table(self) -> Table:
        """The kinds of the blocks as a tensor, see `Table`."""
        return table_of(self.source, self.leaves[: self.count])

    def __getstate__(self) -> tuple[Any, ...]:
        return *super().__getstate__(), self.source, self.count

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:-2])
        self.source, self.count = state[-2:]
        self.block = self.source[1]

    @classmethod
    def topk(cls, indices: torch.Tensor, block: Blocks, q_len: int, kv_len: int) -> BlockSparse:
        """The blocks of keys that each block of queries picked, as sparse-attention models do at run time.

        indices: int32 or int64 (B|1, H|1, Tq, K), numbers of key blocks in any order, duplicates included; -1 is none.
        Tq is q_len / R rounded up. Better write new indices into the same tensor than make a new mask per step.

        Raises: what the class raises, and `ShapeMismatch`.
        """
        _check("indices", indices, _INDEX, "(B|1, H|1, Tq, K)", 4)
        rows, columns = _grid(block, q_len, kv_len)
        if differ(indices.shape[2], rows):
            raise errors.ShapeMismatch(
                f"indices has rows for {indices.shape[2]} query blocks; {q_len} queries are {rows} blocks of "
                f"{_block(block)[0]}"
            )
        return cls._of(("topk", _block(block), (columns,)), (indices,))

    @classmethod
    def from_csr(
        cls, indptr: torch.Tensor, indices: torch.Tensor, block: Blocks, q_len: int, kv_len: int
    ) -> BlockSparse:
        """Rows of blocks one after the other: those of query block m are indices[indptr[m]:indptr[m + 1]].

        indptr: int (Tq + 1,) or (B|1, H|1, Tq + 1). indices: int (n,) or (B|1, H|1, n); entries from indptr's last one
        on are not used, duplicates and any order are fine.

        Raises: what the class raises, and `ShapeMismatch`.
        """
        indptr, indices = _with_heads("indptr", indptr), _with_heads("indices", indices)
        rows, columns = _grid(block, q_len, kv_len)
        if differ(indptr.shape[2], rows + 1):
            raise errors.ShapeMismatch(
                f"indptr has {indptr.shape[2]} entries; {q_len} queries are {rows} blocks of {_block(block)[0]}, "
                f"which need {rows + 1}"
            )
        _check_lead("indptr", indptr, "indices", indices)
        return cls._of(("csr", _block(block), (columns,)), (indptr, indices))

    @classmethod
    def from_coo(cls, rows: torch.Tensor, columns: torch.Tensor, block: Blocks, q_len: int, kv_len: int) -> BlockSparse:
        """Pairs of blocks in any order, duplicates included.

        rows, columns: int (n,) or (B|1, H|1, n), numbers of query and of key blocks; a pair with a -1 is none.

        Raises: what the class raises, and `ShapeMismatch`.
        """
        rows, columns = _with_heads("rows", rows), _with_heads("columns", columns)
        grid = _grid(block, q_len, kv_len)
        if differ(rows.shape[2], columns.shape[2]):
            raise errors.ShapeMismatch(f"rows has {rows.shape[2]} entries, columns {columns.shape[2]}; give pairs")
        _check_lead("rows", rows, "columns", columns)
        return cls._of(("coo", _block(block), grid), (rows, columns))

    @classmethod
    def from_block_mask(cls, block_mask: Any, partial: Any = None) -> BlockSparse:
        """torch's `BlockMask`, exactly as its lists say: full blocks whole, partial ones by the mask_mod.

        partial: used in place of its mask_mod, if that is already known as a `Mask`.

        Raises: `NotATensor` for another object; `UnsupportedBlockSize`.
        """
        if not all(hasattr(block_mask, name) for name in (*LISTS, "mask_mod", "seq_lengths", "BLOCK_SIZE")):
            raise errors.NotATensor(f"got a {type(block_mask).__name__}; pass torch's BlockMask")
        given = [t for t in (getattr(block_mask, name) for name in LISTS) if t is not None]
        block = tuple(map(_of_one, block_mask.BLOCK_SIZE, block_mask.seq_lengths))
        grid = _grid(block, *block_mask.seq_lengths)
        # by the lists' own shapes where these say it: a compiled region writes no number that changes with the lengths
        numbers = () if grid == (given[0].shape[-1], given[1].shape[-1]) else grid
        source = ("listed" if numbers else "lists", _block(block), numbers)
        return cls._of(source, tuple(given), block_mask.mask_mod if partial is None else partial)


# --- the table ------------------------------------------------------------------------------------------------


Source = tuple[str, tuple[int, int], tuple[int, ...]]
"""How a table is made: which of `_RECIPES`, the block, and numbers that the recipe takes."""


class Table(Derived, Formed):
    """int8 or bool (B|1, H|1, Tq + 1, Tkv + 1): the kind of each block, and a last row and column of hidden ones.

    Reads are clamped, so what lies beyond the blocks reads those.
    """

    __slots__ = ("block", "source")

    def __init__(self, source: Source, sources: tuple[Capture, ...]) -> None:
        self.source, self.block = source, source[1]
        super().__init__(functools.partial(_framed, recipe=_RECIPES[source[0]], numbers=source[2]), sources)

    @property
    def says_visible(self) -> bool:
        """torch's lists do."""
        return self.source[0] in LISTED

    @property
    def form(self) -> tuple[str, tuple[Any, ...]]:
        return "blocks", self.source

    @property
    def leaves(self) -> tuple[Any, ...]:
        return tuple(s.tensor for s in self.sources)

    @property
    def limits(self) -> dict[str, tuple[int, int]]:
        """The least and largest number that each of the tensors may hold."""
        return _LIMITS[self.source[0]](*self.source[2], *self.leaves)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B|1, H|1, Tq, Tkv)."""
        batch, heads, rows, columns = self.kept.shape
        return batch, heads, rows - 1, columns - 1

    def check_contents(self) -> None:
        """Looks whether all numbers are in range, which waits for the device. Raises `BlocksOutOfRange`."""
        for (name, (least, most)), tensor in zip(self.limits.items(), self.leaves, strict=True):
            _check_range(name, tensor, least, most)
            if name == "indptr" and bool((tensor.diff(dim=-1) < 0).any()):
                raise errors.BlocksOutOfRange("indptr falls; it must be the running sums of how many blocks a row has")

    def check(self, batch: int, heads: int, q_len: int | None, kv_len: int | None) -> None:
        """Whether it was made for a call of this form; a length may be unknown. Raises `BlockMaskMismatch`."""
        for name, made, given in zip(("batch", "query heads"), self.shape[:2], (batch, heads), strict=True):
            if made not in (1, given):
                raise errors.BlockMaskMismatch(
                    f"the blocks are for {name} {made}, the call has {given}; make them for {given}, or for 1"
                )
        for name, made, length, size in zip(
            ("queries", "keys"), self.shape[2:], (q_len, kv_len), self.block, strict=True
        ):
            if length is not None and made != -(-length // size):
                raise errors.BlockMaskMismatch(
                    f"there are {made} blocks of {size} {name}; {length} {name} are {-(-length // size)} blocks"
                )


_tables: weakref.WeakValueDictionary[Any, Table] = weakref.WeakValueDictionary()


def table_of(source: Source, tensors: Sequence[torch.Tensor]) -> Table:
    """The one table of these tensors."""
    sources = tuple(map(capture_of, tensors))
    key = (source, *(c.identity for c in sources))
    found = _tables.get(key)  # it keeps its sources alive, so an identity in the key can't have been taken over
    if found is None:
        found = _tables[key] = Table(source, sources)
    return found


MAKERS["blocks"] = lambda constants, tensors: table_of(constants, tensors)  # type: ignore[arg-type]


def _framed(*tensors: torch.Tensor, recipe: Callable[..., torch.Tensor], numbers: tuple[int, ...]) -> torch.Tensor:
    return torch.nn.functional.pad(recipe(*numbers, *tensors), (0, 1, 0, 1))


def _map(test: int, tiles: torch.Tensor) -> torch.Tensor:
    """A user's map: with a test for some, all three kinds, else bool."""
    if not test:
        return tiles != HIDDEN
    return tiles.to(torch.int8)


def _rows_of(columns: int, indptr: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    lead = torch.broadcast_shapes(indptr.shape[:2], indices.shape[:2])
    entry = torch.arange(indices.shape[2], device=indices.device).expand(*lead, -1).contiguous()
    starts = indptr.expand(*lead, -1).contiguous()
    row = torch.searchsorted(starts, entry.to(starts.dtype), right=True) - 1
    return _pairs(indptr.shape[2] - 1, columns, row, indices)


def _pairs(height: int, width: int, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    lead = torch.broadcast_shapes(rows.shape[:2], columns.shape[:2])
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    place = torch.where(inside, rows.long() * width + columns, -1).expand(*lead, -1)
    return _scattered(height * width, place).unflatten(-1, (height, width))


def _listed(height: int, width: int, *lists: torch.Tensor) -> torch.Tensor:
    """torch's lists: (counts, indices) of partial blocks, and of full ones if there are any."""
    kinds = None
    nowhere = torch.full((1,), -1, device=lists[0].device)  # int64, as `scatter` wants it
    for kind, (count, indices) in enumerate(zip(lists[::2], lists[1::2], strict=True), start=TESTED):
        used = torch.arange(indices.shape[-1], device=count.device) < count[..., None]
        # one place before the blocks and one behind them are for numbers that name none
        place = torch.where(used, indices, nowhere).clamp(-1, width) + 1
        # not of `place`: what no list decides is made once (`Rerun`)
        empty = torch.zeros((*place.shape[:-1], width + 2), dtype=torch.int8, device=place.device)
        there = empty.scatter(-1, place, kind)
        kinds = there if kinds is None else torch.maximum(kinds, there)
    assert kinds is not None
    return kinds[..., :height, 1:-1]


def _scattered(size: int, places: torch.Tensor) -> torch.Tensor:
    """bool (..., size): True at the places along the last dimension; places outside of it are none."""
    outside = (places < 0) | (places >= size)
    # new_zeros, so that below vmap the zeros are as many as the places
    none = places.new_zeros((*places.shape[:-1], size + 1), dtype=torch.bool)
    return none.scatter(-1, torch.where(outside, size, places).long(), True)[..., :size]


_RECIPES: dict[str, Callable[..., torch.Tensor]] = {
    "map": _map,
    "topk": _scattered,
    "csr": _rows_of,
    "coo": _pairs,
    "listed": _listed,
    # as many blocks of keys as indices
    "lists": lambda *lists: _listed(lists[0].shape[-1], lists[1].shape[-1], *lists),
}
LISTED = ("listed", "lists")
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_LIMITS: dict[str, Callable[..., dict[str, tuple[int, int]]]] = {
    "map": lambda test, tiles: {"tiles": (HIDDEN, VISIBLE)},
    "topk": lambda columns, indices: {"indices": (-1, columns - 1)},
    "csr": lambda columns, indptr, indices: {"indptr": (0, indices.shape[2]), "indices": (-1, columns - 1)},
    "coo": lambda height, width, rows, columns: {"rows": (-1, height - 1), "columns": (-1, width - 1)},
    "listed": lambda height, width, *lists: _limits_of_lists(width, lists),
    "lists": lambda *lists: _limits_of_lists(lists[1].shape[-1], lists),
}


def _limits_of_lists(width: int, lists: Sequence[torch.Tensor]) -> dict[str, tuple[int, int]]:
    limits = {}
    for name, t in zip(LISTS, lists, strict=False):
        limits[name] = (0, t.shape[-1] if name.endswith("blocks") else width - 1)
    return limits


# --- the mask, as a form: a compiled region can write it down ------------------------------------------------------


def _kind_at(source: Source, several: Sequence[bool], count: int) -> list[str]:
    """Steps that read the kind of the block of (q, kv); `several`: whether batches, heads have blocks of their own."""
    kind, block, numbers = source
    if not all(is_known(n) for n in numbers):
        raise errors.UnsupportedTransform(
            "these blocks are as many as only the run says, and a text of a mask says how many; pass their kinds, "
            "BlockSparse(tiles, block), whose shape says it, or make the mask outside of the compiled region"
        )
    # Dynamo can't write a number down that changes with a length; as the length of a range it is that of this call
    constants = "".join([f", {len(range(n))}" for n in numbers])
    tensors = ", ".join([f"'t{n}'" for n in range(count)])
    b, h = ["'b'" if several[0] else "'x3'", "'h'" if several[1] else "'x3'"]
    return [
        f"('made', 'blocks', ('i', {kind!r}, ('i', {block[0]}, {block[1]}), ('i'{constants},)), {tensors})",
        f"('op:const', {block[0]}, 'int32')",
        f"('op:const', {block[1]}, 'int32')",
        "('op:const', 0, 'int32')",
        "('op:floordiv', None, 'q', 'x1')",
        "('op:floordiv', None, 'kv', 'x2')",
        f"('op:read', 'x0', {b}, {h}, 'x4', 'x5')",
    ]


def _compared(steps: list[str], op: str, kind: int) -> list[str]:
    return [*steps, f"('op:const', {kind}, 'int32')", f"('op:{op}', None, 'x6', 'x7')"]


def _steps(count: int, steps: list[str]) -> str:
    return f"('steps', {count}, ({', '.join(steps)},), 'x{len(steps) - 1}')"


# --- checks that look at no contents ---------------------------------------------------------------------------

_INDEX = (torch.int32, torch.int64)


def _check(name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], shape: str, rank: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise errors.NotATensor(f"{name} is a {type(tensor).__name__}; pass a tensor of shape {shape}")
    if tensor.dtype not in dtypes:
        raise errors.UnsupportedIndexDType(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if tensor.ndim != rank:
        raise errors.WrongRank(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}")
    if rank == 4 and surely(tensor.numel() == 0):
        raise errors.EmptyDimension(f"{name} has shape {tuple(tensor.shape)}; it must have blocks: at least one")


def _block(block: Any) -> tuple[int, int]:
    pair = block if isinstance(block, (tuple, list)) else (block, block)
    good = len(pair) == 2 and all(isinstance(n, int) and n > 0 and n % SMALLEST_BLOCK == 0 for n in pair)
    if not good:
        raise errors.UnsupportedBlockSize(
            f"block is {block!r}; it must be (queries, keys), or one number for both, in multiples of {SMALLEST_BLOCK}"
        )
    return int(pair[0]), int(pair[1])


def _of_one(block: Any, length: Any) -> Any:
    """A block's size, or a larger one that kernels take where a single block has the whole length, as in decoding."""
    if isinstance(block, int) and block > 0 and surely(length <= block):
        return -(-block // SMALLEST_BLOCK) * SMALLEST_BLOCK
    return block


def _check_range(name: str, tensor: torch.Tensor, least: int, most: int) -> None:
    """Raises `BlocksOutOfRange`; waits for the device."""
    if tensor.numel() and not least <= int(tensor.min()) <= int(tensor.max()) <= most:
        raise errors.BlocksOutOfRange(
            f"{name} has numbers from {int(tensor.min())} to {int(tensor.max())}; they must be from {least} to {most}"
        )


def _grid(block: Any, q_len: int, kv_len: int) -> tuple[int, int]:
    rows, columns = _block(block)
    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if isinstance(length, bool) or not isinstance(length, int) or surely(length < 1) or surely(length >= 2**31):
            raise errors.InvalidLength(f"{name} is {length!r}; it must be at least 1 and below 2^31")
    return -(-q_len // rows), -(-kv_len // columns)


def _with_heads(name: str, tensor: Any) -> torch.Tensor:
    _check(name, tensor, _INDEX, "(n,) or (B|1, H|1, n)", 1 if getattr(tensor, "ndim", 3) == 1 else 3)
    return tensor[None, None] if tensor.ndim == 1 else tensor  # type: ignore[no-any-return]


def _check_lead(name: str, x: torch.Tensor, other: str, y: torch.Tensor) -> None:
    if any(differ(a, b) and differ(a, 1) and differ(b, 1) for a, b in zip(x.shape[:2], y.shape[:2], strict=True)):
        raise errors.ShapeMismatch(
            f"{name} is for (batch, heads) {tuple(x.shape[:2])}, {other} for {tuple(y.shape[:2])}; make both equal or 1"
        )
