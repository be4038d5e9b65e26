"""The score value: how a score changes before the softmax, composable with `>>` (then) and `+` (both changes)."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from .. import errors
from ..analysis import pictures
from ..analysis.dense import check_sizes
from ..analysis.short_reads import positions_of
from ..graph.expr import Dep, score
from ..graph.refusals import user_line
from ..graph.trace import arity, trace_score
from .mask import SHOWN, Mask
from .mod import Mod, asked_by_dynamo, form_of_function

_LEAVES = ("score", "b", "h", "q", "kv")


class Score(Mod):
    """A composable score mod.

    `a >> b` feeds the score that `a` gives into `b`. `a + b` adds the changes of both:
    `a(s) + (b(s) - s)`, so for biases the order does not matter. Either side may be a plain callable.
    """

    __slots__ = ()
    _kind, _names = "score", _LEAVES

    @staticmethod
    def of(fn: Callable[..., Any] | Score, name: str | None = None) -> Score:
        """`fn` as a Score: itself, or traced.

        Raises: `WrongComposition` for a mask, and what tracing raises.
        """
        if isinstance(fn, Score):
            return fn
        if not isinstance(fn, (types.FunctionType, types.MethodType)):
            Score._refuse(fn)
        return Score.formed(*form_of_function(fn, name, trace_score, _LEAVES))

    @staticmethod
    def _refuse(fn: Any) -> None:
        """Raises `WrongComposition` for what is taken for a score mod and is none."""
        if isinstance(fn, Mask):
            raise errors.WrongComposition(
                f"{fn.name} is a mask, a score mod is needed here; pass it as mask_mod=, and join masks with & | ~"
            )
        if isinstance(fn, torch.Tensor):
            raise errors.WrongComposition("a tensor is not a score mod; wrap it: composattn.mods.bias(tensor)")

    def __call__(
        self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any = None, kv_len: Any = None
    ) -> Any:
        """The changed scores: tensors that broadcast, numbers, or traced values.

        Raises: `UnknownLength` if the mod depends on a length that is left out.
        """
        at = dict(zip(_LEAVES, (score, b, h, q_idx, kv_idx), strict=True))
        return self.at(at, {"q_len": q_len, "kv_len": kv_len})

    def svg(self, size: int | None = None) -> str:
        """What it does to scores, at b 0, h 0, as SVG text.

        Where it depends on the score alone, the curve from -90 to 90; else what it adds to a score of 0 at the first
        `size` queries (rows) and the keys (columns) up to them, dark where most; grey where it adds no finite number.
        With no `size` the first 64, or as many as captured tensors have. Raises: `InvalidArgument` for one below 1.
        """
        size = min(positions_of(self.expr, SHOWN)) if size is None else size
        check_sizes(1, size=size)
        here = self.to("cpu")
        zeros = torch.zeros(121, dtype=torch.int64, device="cpu")
        if not self.expr.deps & (Dep.B | Dep.H | Dep.Q | Dep.KV):
            return pictures.of_curve(lambda scores: here(scores, zeros, zeros, zeros, zeros), self.name)
        at = torch.arange(size, device="cpu")
        q, kv = torch.meshgrid(at, at, indexing="ij")
        first, scores = torch.zeros_like(q), torch.zeros(size, size, device="cpu")
        added = here(scores, first, first, q, kv, q_len=size, kv_len=size).detach().float()
        return pictures.of_changes(added.expand(size, size), q >= kv, self.name)

    def _repr_svg_(self) -> str:
        """What notebooks show."""
        return self.svg()

    def __rshift__(self, other: Any) -> Score:
        return Score.joined("then", ">>", self, other if isinstance(other, Score) else _operand(other, ">>"))

    def __rrshift__(self, other: Any) -> Score:
        return Score.joined("then", ">>", _operand(other, ">>"), self)

    def __add__(self, other: Any) -> Score:
        return Score.joined("plus", "+", self, other if isinstance(other, Score) else _operand(other, "+"))

    def __radd__(self, other: Any) -> Score:
        return Score.joined("plus", "+", _operand(other, "+"), self)

    def _no_masks(self, *other: Any) -> Any:
        raise errors.WrongComposition(
            "score mods join with >> (then) and + (both changes); & | ~ join masks. Pass masks as mask_mod="
        )

    def _no_arithmetic(self, *other: Any) -> Any:
        raise errors.WrongComposition(
            "score mods join with >> (then) and + (both changes); to multiply or divide the score, put "
            "composattn.mods.temperature(t) or `lambda score, b, h, q, kv: score * x` after >>"
        )

    __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _no_arithmetic
    __and__ = __rand__ = __or__ = __ror__ = __invert__ = _no_masks

    def __bool__(self) -> bool:
        if asked_by_dynamo():
            return True
        raise errors.WrongComposition(
            "a score mod has no truth value: `and`, `or`, `not` don't join score mods; write >> or +"
            f"\n  at {user_line()}"
        )


def _operand(side: Any, sign: str) -> Score:
    if isinstance(side, torch.Tensor):
        return Score.of(side)  # type: ignore[arg-type]  # says what to do with a tensor
    if isinstance(side, (int, float)) or not callable(side):
        raise errors.WrongComposition(
            f"{sign} joins score mods, got {type(side).__name__}; a constant shift leaves the softmax unchanged, "
            "a factor is composattn.mods.temperature"
        )
    if not isinstance(side, Mask) and arity(side) == 4:
        raise errors.WrongComposition(f"{sign} joins score mods, got a mask; pass it as mask_mod=")
    return Score.of(side)


IDENTITY = Score(score(), "identity")
"""The score as it is: the score mod of plain attention."""
