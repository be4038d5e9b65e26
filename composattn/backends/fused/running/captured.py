"""The tensors that a kernel reads for its mods in one call: captured, derived from captured ones, or made for it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ....analysis.derived import Derived, Upkeep, derived_anew, derives_anew, plain_tensors, sources_behind, value_of
from ....analysis.program import Program
from ....analysis.refreshed import Moment, distrusted, may_cache
from ....analysis.rerun import Rerun
from ....analysis.streams import device_number, has_streams, is_captured
from ....call.sequences import NO_SEQUENCES, Sequences
from ....graph.borrowed import Borrowed, BorrowedCapture, current
from ....graph.expr import Capture
from ..planning.plan import ForwardPlan
from ..planning.plan_backward import BackwardPlan
from ..tiles.work import WorkTables


class Reads:
    """What the kernel of `plan` reads, in its order (`plan.captured`), in calls of `program`.

    A call gives the tensors and run-time numbers of its program; the kernel may read lists of tiles as well, other
    tensors that are derived from the call's, and what is made for it (sums of gradients). What is derived is brought up
    to date here, and derived anew in a call that does so, whatever was given for it.
    """

    def __init__(self, plan: ForwardPlan | BackwardPlan, program: Program) -> None:
        self.program, self.captured, self.lists = program, plan.captured, plan.lists
        at_call = {capture: n for n, capture in enumerate(program.captures)}
        self.places = [at_call.get(capture) for capture in plan.captured]
        self.are_as_given = self.places == list(range(len(program.captures)))
        self.has_numbers = any(rank == 0 for _, rank in plan.captures)
        self.upkeep = Upkeep(plan.derived)
        self.derived = [c for c in plan.captured if isinstance(c, Derived)]  # of these kernels read some
        self.are_given = None not in self.places and not self.derived  # whatever was borrowed

    def __call__(
        self,
        captured: Sequence[torch.Tensor],
        scalars: Sequence[float | int],
        sequences: Sequences = NO_SEQUENCES,
        made: Mapping[Capture, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The tensors, up to date; 0-d ones come as one element."""
        if not self.captured:
            return ()
        anew = derives_anew()
        if self.upkeep.derived and not anew:
            self.upkeep()
        as_given = self.are_as_given and not (anew and self.derived)
        return self.given(captured if as_given else self._found(captured, scalars, sequences, made or {}))

    def given(self, found: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """These as they are read, where they are `as_given` or found."""
        return tuple([t if t.ndim else t.reshape(1) for t in found] if self.has_numbers else found)

    def _found(
        self,
        captured: Sequence[torch.Tensor],
        scalars: Sequence[float | int],
        sequences: Sequences,
        made: Mapping[Capture, torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        if self.lists is None and not self.derived:
            return tuple(
                [made[c] if n is None else captured[n] for c, n in zip(self.captured, self.places, strict=True)]
            )
        at_call = self.at_call(captured)
        if self.lists is not None:
            numbers = dict(zip(self.program.scalars, scalars, strict=True))
            listed = self.lists.of_call(at_call, numbers, sequences.queries, sequences.keys)
            made = {**made, **dict(zip(self.lists.captures, listed, strict=True))}
        return tuple(made[c] if c in made else self._value(c, at_call) for c in self.captured)

    def _value(self, capture: Capture, at_call: Mapping[Capture, torch.Tensor]) -> torch.Tensor:
        if isinstance(capture, Derived) and capture not in self.upkeep.derived:
            return torch.empty_like(capture.kept) if derives_anew() else capture.kept  # which the kernel does not read
        return value_of(capture, at_call)

    def at_call(self, captured: Sequence[torch.Tensor]) -> dict[Capture, torch.Tensor]:
        """What a call gives for captured tensors."""
        given = zip(self.program.captures, captured, strict=True)
        return {c: t for c, t in given if not isinstance(c, Derived)} if derives_anew() else dict(given)

    def standing(self, *tables: WorkTables | None) -> Standing | None:
        """What keeps these tables of dense calls; None where there is nothing to keep, or no call borrows."""
        there = [table for table in tables if table is not None]
        kept = self.derived or there
        if not kept or not self.are_as_given or any(table.scalars for table in there):
            return None
        if not any(isinstance(c, BorrowedCapture) for c in self.program.captures):
            return None
        return Standing(there[0].problem.device if there else self.derived[0].kept.device)

    def one_run(self, tables: Sequence[WorkTables | None], counted: WorkTables | None) -> OneRun | None:
        """What derives all of dense calls in one run; None where nothing is derived, or numbers have a part."""
        listed = self.lists is not None
        made = [t for t in dict.fromkeys(tables) if t is not None and t.hangs_on_tensors(listed and t is counted)]
        if self.program.scalars or not (made or self.upkeep.derived or self.lists is not None):
            return None
        return OneRun(self, tables, made, counted)

    def counts(self, found: Sequence[torch.Tensor]) -> torch.Tensor:
        """How many tiles each tile visits by the lists that a call reads, of which there are some."""
        assert self.lists is not None
        return found[self.captured.index(self.lists.captures[0])]


def derives_for_itself() -> Moment | None:
    """Stands for a call that trusts nothing that was derived before, where no graph records it, which derives anew."""
    return None if derives_anew() else distrusted()


Found = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]
"""What kernels read, and their work tables."""


class OneRun:
    """All that a dense call's kernels read that comes from captured tensors, derived by one run: on a GPU one graph.

    For calls that trust nothing derived before, as those of compiled code: nobody asks what was written to, or where.
    A forward whose calls have a backward derives what that reads too, in the same run, into memory that waits for it.
    """

    def __init__(
        self,
        reads: Reads,
        tables: Sequence[WorkTables | None],
        made: Sequence[WorkTables],
        counted: WorkTables | None,
    ) -> None:
        """`made`: those of the work tables that hang on tensors; `counted`: the one that reads what lists count."""
        self._reads, self._made, self._counted = reads, made, counted
        self._derived = [c for c in reads.captured if c in reads.upkeep.derived]
        listed, of_lists = ((), ()) if reads.lists is None else (reads.lists.captures, reads.lists.sources)
        given = [*reads.program.captures, *self._derived, *of_lists, *(c for table in made for c in table.captures)]
        self._sources = [c for c in dict.fromkeys([*given, *sources_behind(given)]) if not isinstance(c, Derived)]
        found: dict[object, int] = {c: n for n, c in enumerate([*self._derived, *listed, *made])}
        self._places = [(c, found.get(c)) for c in reads.captured]
        self._tables = [(t, None if t is None else found.get(t)) for t in tables]
        self._size = len(found)
        self._backwards: tuple[OneRun, ...] = ()  # that came after a forward by this
        self._alone = 0  # forwards since one came
        self._own = _Run()

    def __call__(
        self, captured: Sequence[torch.Tensor], moment: Moment, made: Mapping[Capture, torch.Tensor] | None = None
    ) -> Found:
        """`of` a call that gives these tensors for what its program captures, and borrows what else there is.

        made: what was made for the call.
        """
        given = dict(zip(self._reads.program.captures, captured, strict=True))
        return self.of({**given, **made} if made else given, moment)

    def of(self, given: Mapping[Capture, torch.Tensor], moment: Moment) -> Found:
        """What the kernels read, in their order, and the work tables, of a call that reads these tensors.

        moment: the forward's, for its backward too.
        """
        found = moment.found.get(self)
        if found is None:
            found = self._found(given, moment)
        elif moment.first is not self:
            moment.first._alone = 0
        # of what is derived and not of the run kernels read nothing
        reads = [
            found[n] if n is not None else given[c] if c in given else c.kept  # noqa: SIM401  as below
            for c, n in self._places
        ]
        tables = [found[n] if n is not None else None if t is None else t() for t, n in self._tables]
        return self._reads.given(reads), tuple(tables)

    def _found(self, given: Mapping[Capture, torch.Tensor], moment: Moment) -> Sequence[torch.Tensor]:
        """What the run gives, to be read before this thread's next one."""
        if moment.first is None:
            moment.first = self
            self._alone += 1
            if self._alone > MOST_ALONE:
                self._backwards = ()
        elif moment.first is not self:  # a backward of which the forward did not know
            moment.first._followed_by(self)
        backwards, own = self._backwards, self._own
        runs = self, *backwards
        if own.of != runs:
            own.sources = tuple(dict.fromkeys(c for run in runs for c in run._sources))
            own.of, own.run = runs, Rerun(partial(_together, runs, own.sources))
        inputs = [given[c] if c in given else c.tensor for c in own.sources]  # noqa: SIM401  2 µs where not asked
        with plain_tensors():
            found = own.run.again(inputs, self._size) or own.run(inputs, for_now=self._size)
        first = self._size
        for backward in backwards:
            moment.found[backward] = found[first : first + backward._size]
            first += backward._size
        return found[: self._size]

    def _followed_by(self, backward: OneRun) -> None:
        """From now on forwards derive what this one reads as well."""
        knows = backward in self._backwards or len(self._backwards) == MOST_BACKWARDS
        if not knows and set(backward._reads.program.captures) == set(self._reads.program.captures):
            self._backwards, self._alone = (*self._backwards, backward), 0

    def derived_from(self, at_call: Mapping[Capture, torch.Tensor]) -> list[torch.Tensor]:
        """What comes from the tensors of a call, which derives anew."""
        lists = self._reads.lists
        found = [c.tensor for c in self._derived]
        listed = [] if lists is None else lists.of_call(at_call)
        counts = listed[0] if listed else None
        made = [t(counts=counts if t is self._counted else None, given=at_call) for t in self._made]
        return [*found, *listed, *made]


MOST_ALONE = 256  # forwards without a backward, of all layers, and they derive nothing for one any more
MOST_BACKWARDS = 4  # kinds that one forward has: with a gradient of LSE and without, of other captured tensors


class _Run(threading.local):
    """Each thread has its own: what a run gives lies in a graph's memory, to be read before the thread's next run."""

    of: tuple[OneRun, ...] = ()  # what is derived together
    sources: tuple[Capture, ...]  # from what
    run: Rerun


def _together(runs: Sequence[OneRun], sources: Sequence[Capture], inputs: Sequence[Any]) -> list[torch.Tensor]:
    """What each of these derives."""
    at_call = dict(zip(sources, inputs, strict=True))
    with derived_anew(sources, inputs):
        return [t for run in runs for t in run.derived_from(at_call)]


class Standing:
    """Tables of the latest launch, which stand as long as nothing borrowed for it is written to.

    All that was derived from what was borrowed is up to date too. One look at what was borrowed stands for one at each
    table and each derived tensor: 4 to 8 µs less of an H200's host in each direction.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_number(device) if has_streams(device) else None
        self._kept: tuple[Sequence[object], int | None, Any] | None = None  # marks of what was borrowed, the stream

    def find(self, borrowed: Borrowed | None) -> Any:
        """The tables, if they stand for what is borrowed; None if not. After the call the guard has to be valid."""
        stream: int | None = None
        if self._device is not None:
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            if is_captured(stream):
                return None
        return self.found(borrowed, stream)

    def found(self, borrowed: Borrowed | None, stream: int | None) -> Any:
        """The tables on the current stream, of this handle, which no graph records; None: the device has no streams."""
        kept = self._kept
        if kept is None or borrowed is None or borrowed.unwritten != kept[0] or stream != kept[1]:
            return None
        return None if distrusted() is not None else kept[2]

    def keep(self, tables: Any) -> None:
        """Keeps `tables` where what is borrowed now says when they end."""
        borrowed = current()
        if borrowed is None or None in borrowed.unwritten or distrusted() is not None or not may_cache():
            return
        if self._device is None:
            self._kept = borrowed.unwritten, None, tables
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if not is_captured(stream):  # a graph must see what tensors hold at each replay
            self._kept = borrowed.unwritten, stream, tables
