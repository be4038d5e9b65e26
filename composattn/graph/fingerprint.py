"""What a mod reads besides its arguments, found without running it: whether a function traced before says the same now.

A mod's Python runs once per form, not once per call. A function says the same as before if its code is the same and all
that the code reaches from outside is: closure cells, globals, defaults, attributes of the object it is bound to, and
the same of every function that it calls. Those are chains of attributes from a root, listed once per code object.
Each must end in something that can't change under us: a number, a string, a tensor (a leaf of the form; its contents
are read at the call), a dtype, a mask or score mod, a builtin or torch function, another function. Where a chain ends
in anything else (a list, a dict, an object that is called) there is no fingerprint, and the mod is traced anew.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from .torch_functions import POINTWISE

CELL, GLOBAL, SELF, DEFAULT = "cell", "global", "self", "default"

_LOADS = {
    "LOAD_GLOBAL": GLOBAL,
    "LOAD_NAME": GLOBAL,
    "LOAD_DEREF": CELL,
    "LOAD_CLASSDEREF": CELL,
    "LOAD_FROM_DICT_OR_DEREF": CELL,
}
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
# what changes more than the function's own values, or reaches further than the chains say
_OPAQUE = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "IMPORT_NAME", "IMPORT_FROM", "STORE_NAME")
_OPAQUE_CALLS = ("LOAD_SUPER_ATTR", "LOAD_BUILD_CLASS", "YIELD_VALUE", "SETUP_ANNOTATIONS")

Chain = tuple[str, Any, tuple[str, ...]]


class Unfit(Exception):
    """A mod has no fingerprint."""


_chains: dict[tuple[int, bool], tuple[types.CodeType, tuple[Chain, ...] | None]] = {}
_CHAINS_LIMIT = 4096


def chains(code: types.CodeType, bound: bool) -> tuple[Chain, ...] | None:
    """(kind of root, its place, attributes) for all that `code` reaches; `bound`: its first argument is an object.

    None where it can do more than read. Known by the identity of the code: Python computes its hash from all of its
    instructions, each time anew.
    """
    known = _chains.get((id(code), bound))
    if known is None:
        if len(_chains) >= _CHAINS_LIMIT:
            _chains.clear()
        known = _chains[(id(code), bound)] = code, _listed(code, bound)
    return known[1]


def _listed(code: types.CodeType, bound: bool) -> tuple[Chain, ...] | None:
    found: dict[Chain, None] = {}
    owner = code.co_varnames[0] if bound and code.co_argcount else None
    try:
        _scan(code, owner, set(code.co_freevars), list(code.co_freevars), found)
    except Unfit:
        return None
    return tuple(found)


def _scan(code: types.CodeType, owner: str | None, free: set[str], order: list[str], found: dict[Chain, None]) -> None:
    root: tuple[str, Any] | None = None
    attributes: list[str] = []

    def close() -> None:
        nonlocal root
        if root is not None:
            found[root[0], root[1], tuple(attributes)] = None
            root = None
        attributes.clear()

    for step in dis.get_instructions(code):
        name = step.opname
        if name in _OPAQUE or name in _OPAQUE_CALLS:
            raise Unfit
        if root is not None and name in _ATTRIBUTES:
            attributes.append(step.argval)
            continue
        if name in ("PUSH_NULL", "CACHE", "EXTENDED_ARG", "RESUME", "NOP"):
            continue
        close()
        if name in _LOADS:
            kind, value = _LOADS[name], step.argval
            if kind == CELL:
                root = (CELL, order.index(value)) if value in free else None
            else:
                root = (GLOBAL, value)
        elif owner is not None and name.startswith(("LOAD_FAST", "LOAD_CLOSURE")):
            loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            for other in loaded[:-1]:
                if other == owner:
                    found[(SELF, None, ())] = None
            root = (SELF, None) if loaded[-1] == owner else None
        elif owner is not None and name.startswith("STORE_FAST") and owner in str(step.argval):
            raise Unfit
    close()
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            # an argument of the inner function may have the owner's name: it is no root then
            _scan(inner, None, free & set(inner.co_freevars), order, found)
            if owner is not None and owner in inner.co_freevars:
                raise Unfit


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
DEEPEST = 8  # functions that call functions


class Fingerprint:
    """`key` is equal for mods that say the same of tensors of the same form; `leaves` are the tensors and scalars.

    Each part of it begins with its kind and says how many belong to it, so that no two mods give the same parts.

    The key speaks of functions by the identity of their `codes`: it holds for as long as those are kept.
    """

    __slots__ = ("codes", "key", "leaves", "parts")

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.leaves: list[Any] = []
        self.codes: list[types.CodeType] = []
        self.parts: list[Hashable] = []
        self._function(fn, 0)
        self.key: Hashable = tuple(self.parts)

    def _function(self, fn: Any, depth: int) -> None:
        if depth > DEEPEST:
            raise Unfit
        kind, owner = type(fn), None
        if kind is functools.partial:
            self.parts.append(("partial", len(fn.args), *fn.keywords))
            self._function(fn.func, depth + 1)
            self._ends((*fn.args, *fn.keywords.values()), depth)
            return
        if kind is types.MethodType:
            owner, fn = fn.__self__, fn.__func__
            kind = type(fn)
        if kind is not types.FunctionType:
            raise Unfit
        code = fn.__code__
        found = chains(code, owner is not None)
        if found is None:
            raise Unfit
        self.codes.append(code)
        named = fn.__kwdefaults__ or {}
        self.parts.append(("code", id(code), len(fn.__defaults__ or ()), *named))
        if fn.__defaults__:
            self._ends(fn.__defaults__, depth)
        if named:
            self._ends(named.values(), depth)
        for root, place, attributes in found:
            try:
                if root is CELL:
                    value = fn.__closure__[place].cell_contents
                elif root is SELF:
                    value = owner
                else:
                    value = fn.__globals__.get(place, _MISSING)
                    if value is _MISSING:
                        value = _builtin(fn, place)
                if attributes:
                    value = _behind(value, attributes)
            except (AttributeError, KeyError, ValueError):
                raise Unfit from None  # tracing says what is wrong
            self._end(value, depth)

    def _ends(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self._end(value, depth)

    def _end(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in TENSORS:
            self._leaf(value)
        elif kind in _OF_PYTHON and value in _BUILTINS:
            self.parts += ("function", value)
        elif kind is int or kind is bool or isinstance(value, _ENDS):
            self.parts += (kind.__name__, value)
        elif kind is float:
            self.parts += ("float", value.hex())
        elif kind is tuple:
            self.parts += ("tuple", len(value))
            self._ends(value, depth)
        elif _is_pure(value, kind):
            self.parts += ("function", value)
        elif hasattr(kind, "composattn_fingerprint"):
            key, leaves = value.composattn_fingerprint()
            self.parts += ("mod", key)
            for leaf in leaves:
                self._leaf(leaf)
        elif kind in (types.FunctionType, types.MethodType, functools.partial):
            self._function(value, depth + 1)
        else:
            raise Unfit

    def _leaf(self, value: Any) -> None:
        """Which of the leaves it is, and of a tensor that is a new one its form."""
        for place, known in enumerate(self.leaves):
            if known is value:
                self.parts += ("leaf", place)
                return
        self.parts += ("leaf", len(self.leaves))
        self.leaves.append(value)
        if type(value) in TENSORS:  # all that a mod may ask of it while it is traced
            self.parts.append((value.shape, value.stride(), value.dtype, value.device, value.requires_grad))


def _is_pure(value: Any, kind: type) -> bool:
    """Whether it is a function known to look at its arguments only."""
    if kind not in _FUNCTIONS:
        return False
    module = getattr(value, "__module__", None) or ""
    if module in _PURE_MODULES:
        return True
    owner = getattr(value, "__self__", None)  # of `tensor.sum` the tensor, of torch's own functions none or a class
    from_torch = module.partition(".")[0] == "torch" or not module
    return from_torch and (owner is None or isinstance(owner, type)) and value.__name__ in POINTWISE


def _behind(value: Any, attributes: Sequence[str]) -> Any:
    """The value at the end of a chain; a tensor on the way ends it, where its form tells the rest."""
    for name in attributes:
        if type(value) in TENSORS:
            if name not in _TOLD_BY_FORM:
                raise Unfit  # an attribute of the user's own, a count of writes: only tracing knows
            return value
        value = getattr(value, name)
    return value


_MISSING = object()


def _builtin(fn: types.FunctionType, name: str) -> Any:
    scope = fn.__globals__["__builtins__"]
    return scope[name] if isinstance(scope, dict) else getattr(scope, name)


def fingerprint(fn: Callable[..., Any]) -> Fingerprint | None:
    """The fingerprint of a mod, or None where only tracing it can tell what it says."""
    try:
        return Fingerprint(fn)
    except Unfit:
        return None


def places_of(leaves: Sequence[Any], among: Sequence[Any]) -> tuple[int, ...] | None:
    """Where each of `leaves` stands among others, by identity; None where one does not."""
    at = {id(value): n for n, value in enumerate(among)}
    try:
        return tuple(at[id(leaf)] for leaf in leaves)
    except KeyError:
        return None
