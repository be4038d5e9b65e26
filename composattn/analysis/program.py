"""Score mod, mask and sink together: what one attention call computes besides q·k, and what it reads at run time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ..graph.among import without_counts
from ..graph.balanced import balanced
from ..graph.expr import Capture, Expr, const, inputs, score
from ..graph.factors import scales_of
from ..graph.titles import name_of, shortened
from .bands import EVERY_QUERY, EVERYTHING, TileInterval, ends_of, row_limits, tile_intervals, transposed
from .row_limits import RowLimits
from .symbolic import formula


class Program:
    """The mods of a call, as graphs; None stands for a mod that changes nothing.

    `sink` depends on head and sequence alone: each row's sum of exponentials has exp(sink) more, which has no value.
    `keep`: which pairs dropout keeps, an operation "kept"; weights of others are 0 behind the softmax.
    `values`: what V of 8 bits is multiplied by, of sequence, head, key and channel.
    `given`: the five as they were given, whose indices may say among how many they count (`graph.among`).
    `forms`: those of score mod and mask as they were given, by which their names are known; empty where nobody knows.
    `captures` and `scalars` fix the order in which kernels receive captured tensors and run-time numbers.
    """

    def __init__(
        self,
        score_mod: Expr | None = None,
        mask: Expr | None = None,
        sink: Expr | None = None,
        keep: Expr | None = None,
        values: Expr | None = None,
    ) -> None:
        self.given = score_mod, mask, sink, keep, values
        self.score = None if score_mod is None or score_mod is score() else without_counts(score_mod)
        self.mask = None if mask is None or mask is const(True) else balanced(without_counts(mask))
        self.sink, self.keep, self.values = sink, keep, values
        self.forms: Sequence[str | None] = ()

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles keep; what is derived from the mods they derive again, from their own tensors."""
        derived = {name for name in self.__dict__ if isinstance(getattr(type(self), name, None), cached_property)}
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    @property
    def mods(self) -> tuple[Expr | None, ...]:
        """What it is made of."""
        return self.score, self.mask, self.sink, self.keep, self.values

    @property
    def is_plain(self) -> bool:
        return self.score is None and self.mask is None

    @cached_property
    def title(self) -> str:
        """What logs and profiles call it: mask and score mod by their names, else by their formulas."""
        score_form, mask_form = tuple(self.forms)[:2] or (None, None)
        parts = [_title(self.mask, mask_form), _title(self.score, score_form)]
        parts += [word for word, mod in (("sinks", self.sink), ("dropout", self.keep)) if mod is not None]
        return ", ".join(filter(None, parts)) or "no mods"

    @cached_property
    def without_sink(self) -> Program:
        """What a gradient with a known LSE computes: the sink is in it."""
        if self.sink is None:
            return self
        return self._with_intervals(Program(self.score, self.mask, keep=self.keep, values=self.values))

    @cached_property
    def unscaled(self) -> Program:
        """What is left where scales of heads are the softmax's: by it tiles are chosen."""
        rest, scales = scales_of(self.score, None, 0, lambda node: node.rate)
        return self._with_intervals(Program(rest, *self.mods[1:])) if scales.heads else self

    def _with_intervals(self, other: Program) -> Program:
        """`other`, which has the same mask."""
        other.__dict__["intervals"] = self.intervals
        return other

    @cached_property
    def intervals(self) -> tuple[TileInterval, ...]:
        """Which kv positions a query tile visits; derived from the mask."""
        return EVERYTHING if self.mask is None else tile_intervals(self.mask)

    @cached_property
    def limits(self) -> RowLimits | None:
        """Where the keys that a row sees begin and end, if they are one run; derived from the mask."""
        return row_limits(self.mask)

    @cached_property
    def of_keys(self) -> tuple[tuple[TileInterval, ...], RowLimits | None]:
        """The queries that a tile of keys (from `first` to `last`) visits, and those that see one key."""
        return (EVERY_QUERY, None) if self.mask is None else transposed(self.mask)

    @cached_property
    def roots(self) -> tuple[Expr, ...]:
        mods = self.score, self.mask, *ends_of(self.intervals, self.limits), self.sink, self.keep, self.values
        return tuple(e for e in mods if e is not None)

    @cached_property
    def _inputs(self) -> tuple[tuple[Capture, ...], tuple[Any, ...]]:
        return inputs(*self.roots)

    @cached_property
    def read_by_mods(self) -> tuple[tuple[Capture, ...], tuple[Any, ...]]:
        """Captured tensors and run-time numbers of the mods alone, known without their analysis."""
        return inputs(*(e for e in self.mods if e is not None))

    @property
    def captures(self) -> tuple[Capture, ...]:
        return self._inputs[0]

    @property
    def scalars(self) -> tuple[Any, ...]:
        return self._inputs[1]

    @property
    def content(self) -> dict[str, object]:
        """Graphs by name: programs that say the same by `graph.content` share a kernel, whatever tensors they read."""
        mods = {"score": self.score, "mask": self.mask, "sink": self.sink, "keep": self.keep}
        if self.values is not None:
            mods["values"] = self.values
        return {**mods, "intervals": self.intervals, "limits": self.limits}


def _title(mod: Expr | None, form: str | None) -> str:
    """What a mod is called; nothing where it changes nothing."""
    if mod is None:
        return ""
    return shortened((None if form is None else name_of(form)) or formula(mod))
