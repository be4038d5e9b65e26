"""The mask value: which (q, kv) pairs attend, as a graph that composes with `& | ~` and is itself a mask_mod."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any

import torch

from .. import errors
from ..analysis import drawing, pictures
from ..analysis.dense import check_sizes, dense
from ..analysis.program import Program
from ..analysis.short_reads import positions_of, refuse_short_reads
from ..graph.among import without_counts
from ..graph.expr import Expr, const
from ..graph.form import joined
from ..graph.refusals import user_line
from ..graph.trace import arity, trace_mask
from .mod import Mod, asked_by_dynamo, form_of_function

_INDICES = ("b", "h", "q", "kv")
SHOWN = 64  # positions on a side of a picture in a notebook


class Mask(Mod):
    """A composable mask. True means that query `q` may attend to key `kv`.

    Combine with `&`, `|`, `~` (either side may be a plain callable), call it like any mask_mod, also inside
    another mod, or pass it as `mask_mod=`.

        visible = causal() & (sliding_window(1024) | (lambda b, h, q, kv: kv < 4))
    """

    __slots__ = ()
    _kind, _names = "mask", _INDICES

    @staticmethod
    def of(fn: Callable[..., Any] | Mask, name: str | None = None) -> Mask:
        """`fn` as a Mask: itself, or traced.

        Raises: `WrongComposition` for a score mod, and what tracing raises.
        """
        if isinstance(fn, Mask):
            return fn
        if not isinstance(fn, (types.FunctionType, types.MethodType)):
            Mask._refuse(fn)
        return Mask.formed(*form_of_function(fn, name, trace_mask, _INDICES))

    @staticmethod
    def _refuse(fn: Any) -> None:
        """Raises `WrongComposition` for what is taken for a mask and is none."""
        if isinstance(fn, Mod):
            raise errors.WrongComposition(
                f"{fn.name} changes scores, a mask is needed here; pass it as score_mod=, "
                "or join score mods with >> and +"
            )
        if hasattr(fn, "kv_num_blocks"):
            raise errors.WrongComposition(
                "a BlockMask is not a mask_mod; pass it as block_mask to ca.flex_attention, or as "
                "mask_mod=ca.BlockSparse.from_block_mask(block_mask)"
            )
        if isinstance(fn, torch.Tensor):
            raise errors.WrongComposition(
                "a tensor is not a mask; wrap it: `lambda b, h, q, kv: tensor[b, h, q, kv]`, "
                "or composattn.mods.bias(tensor) for an additive one"
            )

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any = None, kv_len: Any = None) -> Any:
        """The mask at positions: tensors that broadcast, numbers, or traced values; bool.

        Lengths matter to masks that are aligned at the bottom right. Raises: `UnknownLength` if they are left out.
        """
        return self.at(dict(zip(_INDICES, (b, h, q_idx, kv_idx), strict=True)), {"q_len": q_len, "kv_len": kv_len})

    def __and__(self, other: Any) -> Mask:
        return Mask.joined("and", "&", self, other if isinstance(other, Mask) else _operand(other, "&"))

    def __or__(self, other: Any) -> Mask:
        return Mask.joined("or", "|", self, other if isinstance(other, Mask) else _operand(other, "|"))

    def __rand__(self, other: Any) -> Mask:
        return Mask.joined("and", "&", _operand(other, "&"), self)

    def __ror__(self, other: Any) -> Mask:
        return Mask.joined("or", "|", _operand(other, "|"), self)

    def __invert__(self) -> Mask:
        return Mask.formed(joined("not", self.form), self.leaves, f"~{self.name}")

    def dense(
        self,
        q_len: int,
        kv_len: int,
        batch: int = 1,
        heads: int = 1,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """The mask as a bool tensor (B|1, H|1, q_len, kv_len); a dimension it does not depend on is 1.

        Raises: `InvalidArgument` for lengths below 0, a batch or heads below 1; `CapturedIndexOutOfRange` as a call
        does where a captured tensor is too short for these.
        """
        expr = without_counts(self.expr)
        found = dense(expr, q_len, kv_len, batch, heads, device)
        return _within(expr, found, b=batch, h=heads, q=q_len, kv=kv_len)

    def tiles(
        self,
        q_len: int,
        kv_len: int,
        tile: tuple[int, int] = (128, 128),
        batch: int = 1,
        heads: int = 1,
        *,
        refine: bool = False,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """int8 (B|1, H|1, Tq, Tkv): 0 empty, 1 partial, 2 full; partial may be pessimistic unless `refine`.

        Found by interval arithmetic, in work and memory of the tiles; see `analysis.tiles`. Raises: as `dense`.
        """
        from ..analysis.tiles import tiles

        expr = without_counts(self.expr)
        found = tiles(expr, q_len, kv_len, tile, batch, heads, refine=refine, device=device)
        return _within(expr, found, b=batch, h=heads, q=q_len, kv=kv_len)

    def bands(self) -> str:
        """Which kv a query tile visits, derived from the mask, in words: one interval per line, and what is tested."""
        from ..analysis.wording import describe

        return describe(without_counts(self.expr))

    def svg(self, q_len: int | None = None, kv_len: int | None = None, tile: tuple[int, int] = (8, 8)) -> str:
        """The mask at b 0, h 0 as SVG text: pairs that are seen, in tiles that are skipped, tested or seen whole.

        Grey tiles are skipped, in blue ones each pair is tested, green ones are seen whole. S² work: for
        some hundred positions. With no `q_len` the first 64, or as many as captured tensors have. Raises:
        `InvalidArgument` for lengths below 1.
        """
        q_len, kv_len = _sizes(self, SHOWN, q_len, kv_len)
        check_sizes(1, q_len=q_len, kv_len=kv_len)
        pairs, kinds = self.dense(q_len, kv_len)[0, 0].cpu(), self.tiles(q_len, kv_len, tile)[0, 0].cpu()
        return pictures.of_mask(pairs, kinds, tile, self.name)

    def _repr_svg_(self) -> str:
        """What notebooks show: the first positions."""
        return self.svg()

    def grid(self, size: int | None = None) -> str:
        """The first `size` queries (rows) and keys (columns) as text: ■ where a query may attend to a key.

        With no `size` the first 16, or as many as captured tensors have.
        """
        q_len, kv_len = _sizes(self, 16, size, None)
        check_sizes(1, q_len=q_len, kv_len=kv_len)
        rows = self.dense(q_len, kv_len)[0, 0].tolist()
        return "\n".join(" ".join("■" if seen else "·" for seen in row) for row in rows)

    def picture(
        self,
        path: str | os.PathLike[str],
        q_len: int = 512,
        kv_len: int | None = None,
        tile: tuple[int, int] = (32, 32),
    ) -> None:
        """Saves what `svg()` draws of the first `q_len` queries and `kv_len` keys (None: as many), as an SVG file.

        Raises: `InvalidArgument` for a path that does not end in .svg, and as `svg`.
        """
        drawing.save(path, self.svg(q_len, kv_len, tile))

    def _no_scores(self, other: Any) -> Any:
        raise errors.WrongComposition(
            "masks join with & | ~, exclusively as (a | b) & ~(a & b); `>>` and `+` join score mods. A mask used as a "
            "bias is `lambda score, b, h, q, kv: torch.where(mask(b, h, q, kv), score, value)`"
        )

    __add__ = __radd__ = __rshift__ = __rrshift__ = __sub__ = __mul__ = __xor__ = __rxor__ = _no_scores

    def __bool__(self) -> bool:
        if asked_by_dynamo():
            return True
        raise errors.WrongComposition(
            f"a mask has no truth value: write & | ~ where `and`, `or`, `not` stand\n  at {user_line()}"
        )

    def __format__(self, spec: str) -> str:
        return format(self.name, spec)

    def __str__(self) -> str:
        """What `print` shows: the name, and the first pairs."""
        return f"{self.name}\n{self.grid()}"


def _sizes(mask: Mask, most: int, q_len: int | None, kv_len: int | None) -> tuple[int, int]:
    """Queries and keys of a picture: those that are asked for, else what can be shown."""
    queries, keys = positions_of(without_counts(mask.expr), most)
    if q_len is None:
        return queries, keys if kv_len is None else kv_len
    return q_len, q_len if kv_len is None else kv_len


def _within(mask: Expr, found: torch.Tensor, **sizes: int) -> torch.Tensor:
    """What was found of a mask of these sizes. Raises: `CapturedIndexOutOfRange`."""
    if found.numel():
        refuse_short_reads(Program(mask=mask), sizes, found.device)
    return found


def _operand(side: Any, sign: str) -> Mask:
    if isinstance(side, torch.Tensor):
        return Mask.of(side)  # type: ignore[arg-type]  # says what to do with a tensor
    if isinstance(side, bool) or not callable(side):
        raise errors.WrongComposition(
            f"{sign} joins masks, got {type(side).__name__}; a mask is a Mask or a callable (b, h, q, kv)"
        )
    if arity(side) == 5:
        raise errors.WrongComposition(f"{sign} joins masks, got a score mod; pass it as score_mod=")
    return Mask.of(side)


ALL = Mask(const(True), "all")
"""Every pair attends: the mask of plain attention."""
