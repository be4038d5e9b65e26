"""Torch operations that run again and again on tensors of one form: what no tensor decides is computed once.

Of what is derived from a mask's tensors about half speaks of positions and lengths alone. The second run of a form is
recorded, operation by operation; from then on only what hangs on the tensors is dispatched, with little Python between.
On a GPU these operations become one launch after some more (`replayed`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import replayed
from .refreshed import memory_is_ours

T = torch.Tensor

_OF_CONTENTS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded}
ALL = sys.maxsize  # results, as a number of them
MOST_HELD = 2**24  # bytes of tensors that no input decides; more are computed each time


class Rerun:
    """`compute(inputs, *constants)`, by operations that depend on the inputs' forms and on `constants` alone.

    To be called without gradients: a recorded run leaves out what only gives its argument again, `detach` too.

    A run that looks at a number of an input on the host is not recorded: all runs compute it as it stands. So do those
    that a CUDA graph records, which may outlive what is kept here.
    """

    def __init__(self, compute: Callable[..., Sequence[T]]) -> None:
        self.compute = compute
        # replaced whole: another thread may come with another form at any time
        self._known: tuple[Hashable, _Recorded | None] = (None, None)
        self.follows = True  # whether runs can be recorded, as far as is known

    def __call__(
        self,
        inputs: Sequence[T | None],
        constants: tuple[Hashable, ...] = (),
        standing: Collection[int] = (),
        for_now: int = 0,
    ) -> Sequence[T]:
        """What `compute` gives; other constants are another form, as other shapes are.

        standing: places of inputs that are the same tensors in every run; those may be written to. for_now: whoever
        asks has read so many of the results, on this stream and in this thread, before the next run is asked for.
        """
        told = [
            None if t is None
            else (t._cdata, t.data_ptr()) if n in standing
            else (t.shape, t.stride(), t.dtype, t.device)
            for n, t in enumerate(inputs)
        ]  # fmt: skip
        # the bits of floats, as -0.0 is 0.0
        form = (*[c.hex() if isinstance(c, float) else (type(c), c) for c in _leaves(constants)], *told)
        known, recorded = self._known
        if known != form:
            self._known = form, None
        elif self.follows and memory_is_ours() and False not in [t is None or _is_plain(t) for t in inputs]:
            return self._record(form, inputs, constants) if recorded is None else recorded(inputs, standing, for_now)
        return self.compute(inputs, *constants)

    def again(self, inputs: Sequence[T | None], for_now: int = 0) -> Sequence[T] | None:
        """What `compute` gives for inputs of the form of the last ones, which nobody asks again; None: no run is known.

        Of whoever has but one form, where memory that is made now is not a CUDA graph's.
        """
        _, recorded = self._known
        return None if recorded is None or not self.follows else recorded(inputs, (), for_now)

    def _record(self, form: Hashable, inputs: Sequence[T | None], constants: tuple[Hashable, ...]) -> Sequence[T]:
        with _Recorder(inputs) as recorder:
            results = self.compute(inputs, *constants)
        made = _Recorded(recorder, results)
        moves = all(isinstance(r, ResultSlot) for r in made.results)  # what is given out may be written to
        self.follows = recorder.follows and moves and made.held_bytes <= MOST_HELD
        if self.follows:
            self._known = form, made
        return results


def _is_plain(tensor: T) -> bool:
    """Whether what is dispatched below names this very tensor."""
    return tensor.__class__ in (T, torch.nn.Parameter) and not is_functorch_wrapped_tensor(tensor)


class ResultSlot(int):
    """The place of a tensor among those of a run."""


class RecordedOp(NamedTuple):
    """One operation; among its arguments slots stand for tensors that the inputs decide."""

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[ResultSlot]
    gives_argument: bool = False  # its result is its first argument, in the same form

    @property
    def reads(self) -> set[int]:
        return {leaf for leaf in _leaves([*self.args, *self.kwargs.values()]) if isinstance(leaf, ResultSlot)}


class _Recorder(TorchDispatchMode):
    """Writes down the operations that hang on `inputs`. `follows`: whether they can stand for the run."""

    def __init__(self, inputs: Sequence[T | None]) -> None:
        super().__init__()
        self.steps: list[RecordedOp] = []
        self.inputs = len(inputs)
        self.held: list[Any] = list(inputs)  # all of a run, so that no two have had the same id
        self.slots = {id(t): ResultSlot(n) for n, t in enumerate(inputs) if t is not None}
        self.follows = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        step = RecordedOp(func, self.with_slots(list(args)), {k: self.with_slots(v) for k, v in kwargs.items()}, [])
        if func._schema.is_mutable and not all(id(t) in self.slots for t in _written(func, args, kwargs)):
            self.follows = False  # what is kept would change from run to run
        self.follows &= not _hangs_on_contents(func, args)
        if step.reads:
            found = results if isinstance(results, tuple | list) else [results]
            self.follows &= all(isinstance(t, T) for t in found)
            again = _gives_argument(func, args, found)
            self.steps.append(step._replace(results=[self._slot(t) for t in found], gives_argument=again))
        return results

    def _slot(self, tensor: Any) -> ResultSlot:
        if id(tensor) not in self.slots:
            self.slots[id(tensor)] = ResultSlot(len(self.held))
            self.held.append(tensor)
        return self.slots[id(tensor)]

    def with_slots(self, value: Any) -> Any:
        """Arguments with slots in place of tensors that the inputs decide."""
        if isinstance(value, T):
            return self.slots.get(id(value), value)
        return [self.with_slots(v) for v in value] if isinstance(value, tuple | list) else value


def _gives_argument(func: Any, args: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether a view is of all that its first argument is, as a slice from end to end."""
    if func._schema.is_mutable or len(found) != 1 or not all(isinstance(t, T) for t in (args[0], found[0])):
        return False
    one, other = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_neg(), t.is_conj()) for t in (args[0], found[0])]
    return one == other and args[0].untyped_storage()._cdata == found[0].untyped_storage()._cdata


def _hangs_on_contents(func: Any, args: Sequence[Any]) -> bool:
    """Whether shapes of its results, or numbers on the host, differ where contents do; or it draws."""
    if func is torch.ops.aten.index.Tensor:
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    return not _OF_CONTENTS.isdisjoint(func.tags)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    for n, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[n] if n < len(args) else kwargs.get(argument.name)


class _Recorded:
    """A run as steps, without those whose results nobody reads."""

    def __init__(self, recorder: _Recorder, results: Sequence[T]) -> None:
        self.results = recorder.with_slots(list(results))
        needed = {leaf for leaf in self.results if isinstance(leaf, ResultSlot)}
        once = _without_repetitions(recorder.steps, needed)
        self.steps: list[tuple[RecordedOp, set[int]]] = []  # each with the slots that nobody reads any more
        for step in reversed(once):
            if needed.isdisjoint(step.results) and not step.func._schema.is_mutable:
                continue
            over = step.reads.union(step.results) - needed
            needed |= step.reads
            self.steps.insert(0, (step, over))
        self._run = _as_function(recorder.inputs, self.steps, self.results)
        self._runs = 0
        self.replay: replayed.Replay | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors that are kept from run to run."""
        kept = {id(t): t for step, _ in self.steps for t in _leaves([*step.args, *step.kwargs.values()])}
        return sum(t.nbytes for t in kept.values() if isinstance(t, T))

    def __call__(self, inputs: Sequence[T | None], standing: Collection[int] = (), for_now: int = 0) -> Sequence[T]:
        if self.replay is not None:
            return self.replay(inputs, for_now)
        found = self._run(inputs)
        self._runs += 1
        if self._runs == replayed.AFTER:
            self.replay = replayed.replay_of(self._run, inputs, found, standing)
        return found


def _as_function(
    inputs: int, steps: Sequence[tuple[RecordedOp, set[int]]], results: list[Any]
) -> Callable[..., list[T]]:
    """The steps as one function of Python whose variables are the slots: a loop over them took three times as long."""
    known: dict[str, Any] = {}

    def said(value: Any) -> str:
        if value.__class__ is ResultSlot:
            return f"v{int(value)}"
        if value.__class__ is list:
            return f"[{', '.join(map(said, value))}]"
        name = f"c{len(known)}"
        known[name] = value
        return name

    lines = ["def run(inputs):", f"    [{''.join(f'v{n}, ' for n in range(inputs))}*_] = inputs"]
    for step, over in steps:
        named = [f"{name}={said(value)}" for name, value in step.kwargs.items()]
        call = f"{said(_called(step.func))}({', '.join([*map(said, step.args), *named])})"
        alone = [str(r.type) for r in step.func._schema.returns] == ["Tensor"]
        lines.append(f"    {', '.join(map(said, step.results))}{'' if alone else ','} = {call}")
        if over:  # their memory is free for the next
            lines.append(f"    del {', '.join(f'v{n}' for n in over)}")
    lines.append(f"    return {said(results)}")
    exec("\n".join(lines), known)
    return known["run"]  # type: ignore[no-any-return]


def _called(func: Any) -> Any:
    """What an overload calls, without its own function of Python."""
    return getattr(func, "_op", func)


def _without_repetitions(steps: list[RecordedOp], given_out: set[ResultSlot]) -> list[RecordedOp]:
    """The steps, but for those whose results an earlier one gave already, or are their argument.

    All of them where some step writes, or where what is given out is a view: whoever writes there must reach no other.
    """
    made_by = {slot: step for step in steps for slot in step.results}
    if any(s.func._schema.is_mutable for s in steps) or any(_gives_views(made_by[r]) for r in given_out & set(made_by)):
        return steps
    kept: list[RecordedOp] = []
    known: dict[Hashable, list[ResultSlot]] = {}
    same: dict[ResultSlot, ResultSlot] = {}
    for step in steps:
        args, kwargs = [_replaced(a, same) for a in step.args], {k: _replaced(v, same) for k, v in step.kwargs.items()}
        if step.gives_argument and isinstance(args[0], ResultSlot):
            same[step.results[0]] = args[0]
            continue
        key = (step.func, _key(args), *[(name, _key(v)) for name, v in kwargs.items()])
        before = known.setdefault(key, step.results)
        if before is step.results or not given_out.isdisjoint(step.results):
            kept.append(step._replace(args=args, kwargs=kwargs))
        else:
            same.update(zip(step.results, before, strict=True))
    return kept


def _gives_views(step: RecordedOp) -> bool:
    return any(r.alias_info is not None for r in step.func._schema.returns)


def _replaced(value: Any, same: dict[ResultSlot, ResultSlot]) -> Any:
    if isinstance(value, ResultSlot):
        return same.get(value, value)
    return [_replaced(v, same) for v in value] if isinstance(value, list) else value


def _key(value: Any) -> Hashable:
    """Equal for arguments that are the same; 1, 1.0 and True are not, nor are tensors of equal contents."""
    if isinstance(value, T):
        return T, id(value)
    return tuple(map(_key, value)) if isinstance(value, list) else (type(value), repr(value), value)


def _leaves(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _leaves(value)
        else:
            yield value
