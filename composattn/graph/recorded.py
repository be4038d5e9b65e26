"""A mod that runs inside of a compiled region: written down as the steps of a form, to be traced when the call runs.

Dynamo follows the mod's Python with `Recorded` values in place of the score and the indices. All they do is to add a
line of text for each operation, so a compiled region sees nothing of the graphs. The tensors that the mod meets become
inputs of the operator, whatever they are: parameters, buffers, or computed a line before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import errors
from .dynamo import Varying, teach_dynamo
from .operators import OPERATORS, name_of
from .scalar import Scalar

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


class Tape:
    """The lines and leaves of one mod."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.leaves: list[Any] = []
        self.records = torch.is_grad_enabled()

    def add(self, name: str, arguments: Sequence[Any], named: dict[str, Any]) -> Recorded:
        """One more step."""
        if name in _HOOKS:  # refused by name; what they call can't be written down
            arguments, named = (), {}
        words = [f"{name!r}"]
        for a in arguments:
            words.append(self.word(a))
        for key, a in named.items():
            words.append(f"('=', {key!r}, {self.word(a)})")
        self.steps.append("(" + ", ".join(words) + ",)")
        if self.records and not torch.is_grad_enabled():  # below no_grad in the mod: refused where it cuts a gradient
            self.steps.append(f"('detach', 'x{len(self.steps) - 1}')")
        return Recorded(self, f"'x{len(self.steps) - 1}'")

    def word(self, value: Any) -> str:
        """An argument as a form writes it."""
        if isinstance(value, Recorded):
            return value.word
        if isinstance(value, Varying):
            self.leaves.append(value)
            return f"'t{len(self.leaves) - 1}'"
        if isinstance(value, torch.Tensor | Scalar):
            return self.leaf(value)
        if isinstance(value, str):
            return f"('s', {value!r})"
        if isinstance(value, bool) or value is None or isinstance(value, int):
            return f"{value!r}"
        if isinstance(value, float):
            return f"('f', {value.hex()!r})"
        if isinstance(value, tuple | list | torch.Size):
            return "('i', " + " ".join([self.word(v) + "," for v in value]) + ")"
        if isinstance(value, torch.dtype):
            return f"('d', '{value}')"
        if value is Ellipsis:
            return "('...',)"
        if isinstance(value, slice):
            raise errors.InvalidRead("a slice of a captured tensor in a mod; give one integer per dimension")
        if isinstance(value, torch.device):
            return "None"
        raise errors.UnsupportedOperation(f"a {type(value).__name__} can't be part of a mod")

    def leaf(self, value: Any) -> str:
        """The place of a tensor or scalar among the leaves."""
        place = len(self.leaves)
        for n, known in enumerate(self.leaves):
            if not isinstance(known, Varying) and known is value:
                place = n
        if place == len(self.leaves):
            self.leaves.append(value)
        return f"'t{place}'"

    def form(self, result: Any) -> str:
        """The form of all that was recorded."""
        word = self.word(result)
        return f"('steps', {len(self.leaves)}, ({' '.join([s + ',' for s in self.steps])}), {word})"


class Recorded:
    """A value in a mod: which step gives it."""

    def __init__(self, tape: Tape, word: str) -> None:
        self.tape, self.word = tape, word

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = name_of(func) if isinstance(func, OPERATORS) else func.__name__
        for a in args:
            if isinstance(a, Recorded):
                return a.tape.add(name, args, kwargs or {})
            if isinstance(a, tuple):
                for i in a:
                    if isinstance(i, Recorded):
                        return i.tape.add(name, args, kwargs or {})
        raise errors.UnsupportedOperation(f"{func.__name__} with these arguments in a mod of a compiled region")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def method(*args: Any, **kwargs: Any) -> Recorded:
            return self.tape.add(name, (self, *args), kwargs)

        return method

    shape, ndim, device = (), 0, None  # of a single number, wherever it is

    @property
    def data(self) -> Any:
        """Cut from its gradient, which is refused where it has one."""
        return self.tape.add("detach", (self,), {})

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        raise errors.DataDependentBranch(
            "a traced value has no truth value: use torch.where(condition, yes, no), & | ~, torch.minimum, "
            "torch.maximum"
        )


def _install() -> None:
    def operator(name: str) -> Callable[..., Any]:
        def record(self: Recorded, *args: Any) -> Any:
            return self.tape.add(name, (self, *args), {})

        return record

    two = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
    names = [*two, *("r" + n for n in two), "lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert", "pos"]
    for name in (*names, "getitem"):
        setattr(Recorded, f"__{name}__", operator(f"__{name}__"))


_install()


class Recording(TorchFunctionMode):
    """While a mod is recorded: reads of tensors, and what is computed from 0-d ones, are steps too."""

    def __init__(self, tape: Tape, of_score: bool) -> None:
        super().__init__()
        self.tape, self.of_score = tape, of_score

    def held(self, value: torch.Tensor) -> Recorded:
        """A tensor as a value of the mod, so that a torch.autograd.Function is followed and not applied."""
        return Recorded(self.tape, self.tape.leaf(value))

    def own_backward(self) -> None:
        """One more step, which is refused, as a mod's gradient is that of its formula. A mask has none."""
        if self.of_score:
            self.tape.add("autograd.Function", (), {})

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func) if isinstance(func, OPERATORS) else func.__name__
        if name in ASKED:
            return func(*args, **(kwargs or {}))
        if name == "unbind":
            return tuple([self.tape.add("__getitem__", (args[0], n), {}) for n in range(args[0].shape[0])])
        return self.tape.add(name, args, kwargs or {})


ASKED = ("size", "dim", "numel", "__len__", "__get__", "is_floating_point", "is_complex", "stride")


def record(fn: Callable[..., Any], names: Sequence[str]) -> tuple[str, tuple[Any, ...]]:
    """(form, leaves) of a mod that is run on values of these names: indices, and "score"."""
    teach_dynamo()
    tape = Tape()
    arguments = [Recorded(tape, f"{name!r}") for name in names]
    with Recording(tape, "score" in names):
        result = fn(*arguments)
    form = tape.form(result)
    return form, tuple(tape.leaves)
