"""What a rewrite of a call is given, and what it answers: another form of it, several calls, or nothing."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch

from ....analysis.program import Program
from ....call.problem import Problem
from ..tiles.target import Target

Direction = Literal["forward", "backward"]


@dataclasses.dataclass(frozen=True)
class Posed:
    """A call as it is planned in one direction.

    `segments`: its mask falls apart, so tiles may begin with the parts (`segments`). `tiling_is_given`: nobody chooses
    one, so what needs tiles of a kind can't ask for it.
    """

    problem: Problem
    program: Program
    target: Target
    direction: Direction = "forward"
    segments: bool = False
    tiling_is_given: bool = False


class Nothing(NamedTuple):
    """A call that a rewrite leaves as it is; `why`, where its mask looks like one that it serves, else empty."""

    why: str = ""


class Rewritten(NamedTuple):
    """The call in another form. `words`: which one, for people to read."""

    posed: Posed
    words: str


class Rows(NamedTuple):
    """Rows of sequences of a call, as sequences of a part: place i of the s-th one is row first + s + i * step of entry
    `b`.
    """

    b: int
    first: int
    sequences: int
    length: int
    step: int = 1

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """(sequences, H, length, ...) of t (B, H, S, ...), as a view."""
        batch, head, position, *inner = t.stride()
        size = (self.sequences, t.shape[1], self.length, *t.shape[3:])
        start = t.storage_offset() + self.b * batch + self.first * position
        return t.as_strided(size, (position, head, self.step * position, *inner), start)


class Part(NamedTuple):
    """One launch of a call that was taken apart: which of the `calls`, and where its rows lie in those of the whole."""

    call: int
    queries: Rows
    keys: Rows


@dataclasses.dataclass(frozen=True)
class Apart:
    """Several calls in place of one, for both directions: their problems and programs, launched for `parts` in turn.

    `words`: which calls these are, for people to read.
    """

    calls: tuple[tuple[Problem, Program], ...]
    parts: tuple[Part, ...]
    words: str


Found = Nothing | Rewritten | Apart
