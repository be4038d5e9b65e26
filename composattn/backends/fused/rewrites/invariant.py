"""A batch-invariant call, whose rows have the same bits whatever else the call holds."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

from ....analysis.program import Program
from ....errors import InvalidSchedule
from ....graph.ops import apply
from .posed import Found, Nothing, Posed, Rewritten


def invariant(posed: Posed) -> Found:
    """The forward, computed for each pair from its positions alone: no part of a score is left to a row's LSE.

    Raises: `InvalidSchedule` for masks whose tiles come in an order that depends on the other rows of a query tile.
    """
    program = posed.program
    if posed.direction == "backward" or not posed.problem.schedule.batch_invariant:
        return Nothing()
    if len(program.intervals) > 1:
        refuse_order(f"rows of this mask see {len(program.intervals)} runs of keys")
    score = None if program.score is None else apply("whole", program.score)
    alone = Program(score, program.mask, program.sink, program.keep, program.values)
    return Rewritten(dataclasses.replace(posed, program=alone), "no part of a score is left to a row's LSE")


def refuse_order(why: str) -> NoReturn:
    raise InvalidSchedule(
        f"batch_invariant=True, but {why}, in an order that depends on the rows beside a row; masks whose rows see one "
        "run of keys can be (causal, windows, prefixes, documents that lie together)"
    )
