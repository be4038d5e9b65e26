"""What a mod reads besides its arguments, found without running it: whether a function traced before says the same now.

A mod's Python runs once per form, not once per call. A function says the same as before if its code is the same and all
that the code reaches from outside is (`graph.reach`): closure cells, globals, defaults, attributes of the object it is
bound to, and the same of every function that it calls. Each chain must end in something that can't change under us: a
number, a string, a tensor (a leaf of the form; its contents are read at the call), a dtype, a mask or score mod, a
builtin or torch function, another function. Where one ends in anything else (a list, a dict, an object that is called)
there is no fingerprint, and the mod is traced anew. So it is where a tensor or a function may be asked for an attribute
of the user's own that no chain leads to, behind a local name, in a loop, as an argument: where any value that has no
chain is asked for a name that traced values do not answer, or one that something reached has in its `__dict__`.

Reading all that is one function per code, written for the kinds of values that were there when the code was first seen:
one look at each value, and no search for what it may be. Where a kind is another, another such function is made.
"""

from __future__ import annotations

import enum
import functools
import itertools
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from .reach import CELL, SELF, Unfit, reached_by
from .tensor_forms import of_the_form
from .torch_functions import POINTWISE

_BUILTINS = frozenset(
    {abs, min, max, round, len, range, int, float, bool, pow, sum, zip, enumerate, tuple, isinstance, divmod, slice}
)
_ENDS = (str, bytes, type(None), torch.dtype, torch.device)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
_OF_PYTHON = (types.BuiltinFunctionType, type)
_PURE_MODULES = ("math", "operator")
TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_TOLD_BY_FORM = frozenset(
    {"device", "dim", "dtype", "element_size", "is_complex", "is_cuda", "is_floating_point", "ndim", "ndimension",
     "nelement", "numel", "requires_grad", "shape", "size", "stride"}
)  # fmt: skip
_OF_CLASSES = frozenset({"data", "device", "dtype", "is_cuda", "ndim", "requires_grad", "shape"})  # no tensor's own
_OF_PYTHONS = {name for kind in (str, tuple, list, dict, set, int, float) for name in dir(kind) if name[0] != "_"}
# what may be asked of any value, if nothing has one of its own by that name; not what text says of attributes
_COMMON = (POINTWISE | _TOLD_BY_FORM | _OF_CLASSES | _OF_PYTHONS) - {"format", "format_map"}
DEEPEST = 8  # functions that call functions

Fingerprint = tuple[Hashable, tuple[Any, ...]]
"""A key that is equal for mods that say the same of tensors of the same form, and the tensors and scalars they read."""

Reader = Callable[[Any], Fingerprint | None]

_readers: dict[tuple[int, int], tuple[types.CodeType, tuple[Reader, ...]]] = {}
_READERS_LIMIT = 4096  # codes
_KINDS_LIMIT = 8  # readers of one code; the latest stay
_CHANGED = (AttributeError, KeyError, ValueError, TypeError, IndexError)  # what a reader meets where something is gone
_numbers = itertools.count()
_identity = object.__hash__  # `id` is audited, as `__code__` and `__defaults__` are: 0.2 µs each where somebody listens


def fingerprint(fn: Callable[..., Any], given: int = 0) -> Fingerprint | None:
    """The fingerprint of a mod, or None where only tracing it can tell what it says.

    given: how many arguments it is called with, by place; one that takes no more has no use for defaults.
    """
    inner = fn
    while inner.__class__ is not types.FunctionType:
        if inner.__class__ is types.MethodType:
            inner = inner.__func__
        elif inner.__class__ is functools.partial:
            inner = inner.func
        else:
            return None
    code = inner.__code__
    # by its identity: Python computes the hash of code from all of its instructions, each time anew
    known = _readers.get((_identity(code), given))
    if known is not None:
        for read in known[1]:
            try:
                found = read(fn)
            except _CHANGED:
                continue
            if found is not None:
                return found
    return _newly_read(fn, code, given)


def _newly_read(fn: Any, code: types.CodeType, given: int) -> Fingerprint | None:
    """By a reader made for what `fn` reaches now."""
    try:
        reader = _Writer(fn, given).reader()
    except Unfit:
        return None
    found = reader(fn)
    if found is not None:
        if len(_readers) >= _READERS_LIMIT:
            _readers.clear()
        key = _identity(code), given
        before = _readers.get(key, (code, ()))[1]
        _readers[key] = code, (reader, *before[: _KINDS_LIMIT - 1])
    return found


class _Writer:
    """Writes the function that reads what one function reaches, from what that is now.

    The key begins with a number of its own, and has as many parts in every call: no two readers give the same.
    """

    def __init__(self, fn: Callable[..., Any], given: int) -> None:
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {}
        self.key: list[str] = [str(next(_numbers))]
        self.leaves: list[tuple[str, Any]] = []  # with their names
        self.met: list[tuple[str, Any]] = []  # functions and mods, likewise
        self.functions: list[tuple[str, Any]] = []  # of those the plain ones, likewise
        self.owners: list[tuple[str, Any]] = []  # of methods, likewise
        self.names: set[str] = set()  # of attributes that any of these may be asked for
        self._function("fn", fn, 0, given, is_known=True)

    def reader(self) -> Reader:
        """The function."""
        self._demand_no_own()
        leaves = "".join(f"{name}, " for name, _ in self.leaves)
        body = "\n".join(f"    {line}" for line in [*self.lines, f"return ({', '.join(self.key)},), ({leaves})"])
        exec(f"def read(fn):\n{body}", self.scope)
        return self.scope["read"]  # type: ignore[no-any-return]

    def _taken(self, what: str) -> str:
        """The name of a value, which is taken once."""
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {what}")
        return name

    def _constant(self, value: Any) -> str:
        name = f"k{len(self.scope)}"
        self.scope[name] = value
        return name

    def _demand(self, *conditions: str) -> None:
        self.lines += [f"if not ({condition}): return None" for condition in conditions]

    def _demand_kind(self, at: str, kind: type) -> None:
        self._demand(f"{at}.__class__ is {self._constant(kind)}")

    def _demand_no_own(self) -> None:
        """Nothing that was reached may have an attribute of its own by one of the names that values are asked for."""
        if not self.names <= _COMMON:
            raise Unfit
        for values, names in ((self.met, self.names), (self.leaves, self.names - _OF_CLASSES)):
            those = [at for at, value in values if names and hasattr(value, "__dict__")]
            if those:
                lacks = self._constant(frozenset(names).isdisjoint)
                self._demand(*[f"{lacks}({at}.__dict__)" for at in those])

    def _function(self, at: str, fn: Any, depth: int, given: int = 0, is_known: bool = False) -> None:
        """`is_known`: whoever asks found the reader by its code."""
        if depth > DEEPEST:
            raise Unfit
        self._demand_kind(at, type(fn))
        if type(fn) is functools.partial:
            self._partial(at, fn, depth, is_known)
            return
        owner: tuple[str, Any] | None = None
        if type(fn) is types.MethodType:
            owner = self._taken(f"{at}.__self__"), fn.__self__
            self._is_known(*owner, self.owners)
            at, fn = self._taken(f"{at}.__func__"), fn.__func__
            self._demand_kind(at, type(fn))
        if type(fn) is not types.FunctionType:
            raise Unfit
        if not is_known:
            self._demand(f"{at}.__code__ is {self._constant(fn.__code__)}")
        if owner is None and depth:
            same_code = [known for known in self.functions if known[1].__code__ is fn.__code__]
            if self._is_known(at, fn, same_code):
                return
            self.functions.append((at, fn))
        if depth:
            self.met.append((at, fn))
        if fn.__code__.co_argcount - (owner is not None) > given or fn.__code__.co_kwonlyargcount:
            self._defaults(at, fn, depth)
        self._reached(at, fn, owner, depth)

    def _partial(self, at: str, fn: functools.partial[Any], depth: int, is_known: bool) -> None:
        if self._is_known(at, fn, [known for known in self.met if type(known[1]) is functools.partial]):
            return
        if depth:
            self.met.append((at, fn))
        self._demand(f"len({at}.args) == {len(fn.args)}", f"tuple({at}.keywords) == {tuple(fn.keywords)!r}")
        self._function(self._taken(f"{at}.func"), fn.func, depth + 1, is_known=is_known)
        self._ends(f"{at}.args", enumerate(fn.args), depth)
        self._ends(f"{at}.keywords", fn.keywords.items(), depth)

    def _defaults(self, at: str, fn: types.FunctionType, depth: int) -> None:
        if fn.__defaults__:
            given = self._taken(f"{at}.__defaults__")
            self._demand(f"len({given}) == {len(fn.__defaults__)}")
            self._ends(given, enumerate(fn.__defaults__), depth)
        else:
            self._demand(f"not {at}.__defaults__")
        if fn.__code__.co_kwonlyargcount:
            named = fn.__kwdefaults__ or {}
            self._demand(f"tuple({at}.__kwdefaults__ or ()) == {tuple(named)!r}")
            self._ends(f"{at}.__kwdefaults__", named.items(), depth)

    def _reached(self, at: str, fn: types.FunctionType, owner: tuple[str, Any] | None, depth: int) -> None:
        """What its code reaches, from closure cells, globals and the object it is bound to."""
        found = reached_by(fn.__code__, owner is not None)
        if found is None:
            raise Unfit
        self.names |= found.names
        cells = scope = ""
        for root, place, attributes in found.chains:
            try:
                if root is CELL:
                    cells = cells or self._taken(f"{at}.__closure__")
                    where, value = f"{cells}[{place}].cell_contents", fn.__closure__[place].cell_contents  # type: ignore[index]
                elif root is SELF:
                    assert owner is not None
                    where, value = owner
                else:
                    scope = scope or self._taken(f"{at}.__globals__")
                    where, value = self._global(fn.__globals__, place, scope)
                value, taken = self._behind(value, attributes)
            except (AttributeError, KeyError, ValueError):
                raise Unfit from None  # tracing says what is wrong
            self._end(".".join([where, *taken]), value, depth)

    def _behind(self, value: Any, attributes: Sequence[str]) -> tuple[Any, Sequence[str]]:
        """The value at the end of a chain, and how it is reached; a tensor ends it."""
        for place, name in enumerate(attributes):
            if type(value) in TENSORS:
                self.names.update(attributes[place:])
                return value, attributes[:place]
            value = getattr(value, name)
        return value, attributes

    def _global(self, values: dict[str, Any], name: str, scope: str) -> tuple[str, Any]:
        """(where it is, value) of a global, or of a builtin that no global hides."""
        if name in values:
            return f"{scope}[{name!r}]", values[name]
        self._demand(f"{name!r} not in {scope}")
        return f"{self._constant(_builtin)}({scope}, {name!r})", _builtin(values, name)

    def _ends(self, at: str, values: Iterable[tuple[Any, Any]], depth: int) -> None:
        for place, value in values:
            self._end(f"{at}[{place!r}]", value, depth)

    def _end(self, where: str, value: Any, depth: int) -> None:
        kind, at = type(value), self._taken(where)
        if kind in TENSORS:
            self._leaf(at, value)
        elif (kind in _OF_PYTHON and value in _BUILTINS) or _is_pure(value, kind):
            self._demand(f"{at} is {self._constant(value)}")
        elif kind is int or kind is bool or (isinstance(value, _ENDS) and not hasattr(value, "__dict__")):
            self._demand_kind(at, kind)
            self.key.append(at)
        elif isinstance(value, enum.Enum):
            self._demand(f"{at} is {self._constant(value)}")
            self.met.append((at, value))
        elif kind is float:
            self._demand_kind(at, kind)
            self.key.append(f"{at} if {at} and {at} == {at} else repr({at})")  # -0.0 is 0.0, NaN no NaN
        elif kind is tuple:
            self._demand_kind(at, kind)
            self._demand(f"len({at}) == {len(value)}")
            self._ends(at, enumerate(value), depth)
        elif hasattr(kind, "composattn_fingerprint"):
            self._fingerprinted(at, value)
        elif kind in (types.FunctionType, types.MethodType, functools.partial):
            self._function(at, value, depth + 1)
        else:
            raise Unfit

    def _fingerprinted(self, at: str, value: Any) -> None:
        """An object that says itself what it reads."""
        kind = type(value)
        self._demand_kind(at, kind)
        _, leaves = value.composattn_fingerprint()
        of_its_kind = [known for known in self.met if type(known[1]) is kind]
        if not (leaves and leaves[0] is value) and not self._is_known(at, value, of_its_kind):
            self.met.append((at, value))
        said = self._taken(f"{at}.composattn_fingerprint()")
        self._demand(f"len({said}[1]) == {len(leaves)}")
        self.key.append(f"{said}[0]")
        for place, leaf in enumerate(leaves):
            self._leaf(self._taken(f"{said}[1][{place}]"), leaf)

    def _is_known(self, at: str, value: Any, among: list[tuple[str, Any]]) -> bool:
        """Which of them it is, or none: a mod may ask whether two things are one."""
        for name, known in among:
            self._demand(f"{at} is {name}" if known is value else f"{at} is not {name}")
            if known is value:
                return True
        return False

    def _leaf(self, at: str, value: Any) -> None:
        """Which of the leaves it is, and of a tensor that is a new one its form."""
        if self._is_known(at, value, self.leaves):
            return
        self._demand_kind(at, type(value))
        self.leaves.append((at, value))
        if type(value) in TENSORS:
            latest = self._constant((lambda _: False, 0))
            look = self._constant(functools.partial(_looked_at, self.scope, latest))
            seen = self._taken(latest)  # taken once: another thread may put another there
            self.key.append(f"{seen}[1] if not {at}.is_nested and {seen}[0]({at}) else {look}({at})")


def _looked_at(scope: dict[str, Any], latest: str, tensor: torch.Tensor) -> int:
    """The number of a tensor's form, which from now on is the latest at this place: torch compares that in one look."""
    # all that a mod may ask of it while it is traced
    form = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    number = _forms.get(form)
    if number is None:
        if len(_forms) >= _READERS_LIMIT:
            _forms.clear()
        number = _forms[form] = next(_numbers)
    scope[latest] = of_the_form(tensor), number
    return number


_forms: dict[Hashable, int] = {}


def _is_pure(value: Any, kind: type) -> bool:
    """Whether it is a function known to look at its arguments only."""
    if kind not in _FUNCTIONS:
        return False
    module = getattr(value, "__module__", None) or ""
    if module in _PURE_MODULES:
        return True
    owner = getattr(value, "__self__", None)  # of `tensor.sum` the tensor, of torch's own functions none or a class
    from_torch = module.partition(".")[0] == "torch" or (not module and kind is not types.FunctionType)
    return from_torch and (owner is None or isinstance(owner, type)) and value.__name__ in POINTWISE


def _builtin(scope: dict[str, Any], name: str) -> Any:
    builtins = scope["__builtins__"]
    return builtins[name] if isinstance(builtins, dict) else getattr(builtins, name)


def places_of(leaves: Sequence[Any], among: Sequence[Any]) -> tuple[int, ...] | None:
    """Where each of `leaves` stands among others, by identity; None where one does not."""
    at = {id(value): n for n, value in enumerate(among)}
    try:
        return tuple(at[id(leaf)] for leaf in leaves)
    except KeyError:
        return None
