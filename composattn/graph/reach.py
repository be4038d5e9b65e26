"""What the code of a function reaches besides its arguments: chains of attributes, each from a root.

A chain ends where the value goes anywhere but into an attribute: into a local name, an operation, a call. Attributes
that are asked of values which come from there are listed by their names alone, as any of what is reached may be asked.
"""

from __future__ import annotations

import dis
import types
from typing import Any, NamedTuple

CELL, GLOBAL, SELF = "cell", "global", "self"

_LOADS = {
    "LOAD_GLOBAL": GLOBAL,
    "LOAD_NAME": GLOBAL,
    "LOAD_DEREF": CELL,
    "LOAD_CLASSDEREF": CELL,
    "LOAD_FROM_DICT_OR_DEREF": CELL,
}
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
# what changes more than the function's own values, or reaches further than chains and names say
_OPAQUE = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "IMPORT_NAME", "IMPORT_FROM", "STORE_NAME")
_OPAQUE_CALLS = ("LOAD_SUPER_ATTR", "LOAD_BUILD_CLASS", "YIELD_VALUE", "SETUP_ANNOTATIONS")
_OPAQUE_NAMES = ("MATCH_CLASS", "LOAD_LOCALS", "LOAD_FROM_DICT_OR_GLOBALS")  # of attributes, in data
_OPAQUE_TEXTS = (
    "FORMAT_VALUE",
    "FORMAT_SIMPLE",
    "FORMAT_WITH_SPEC",
    "CONVERT_VALUE",
)  # f"{x}": whatever x says of itself
_REFUSED = frozenset(_OPAQUE + _OPAQUE_CALLS + _OPAQUE_NAMES + _OPAQUE_TEXTS)
_NOTHING = ("PUSH_NULL", "CACHE", "EXTENDED_ARG", "RESUME", "NOP")
_OF_CELLS = ("STORE_DEREF", "DELETE_DEREF")

Chain = tuple[str, Any, tuple[str, ...]]
"""(kind of root, its place, attributes)."""


class Reached(NamedTuple):
    """What some code reaches, and the names of the attributes that it asks of values which no chain leads to."""

    chains: dict[Chain, None]
    names: set[str]


class Unfit(Exception):
    """Only tracing can tell what a mod says."""


_reached: dict[tuple[int, bool], tuple[types.CodeType, Reached | None]] = {}
_LIMIT = 4096


def reached_by(code: types.CodeType, bound: bool) -> Reached | None:
    """All that `code` reaches; `bound`: its first argument is an object.

    None where it can do more than read. Known by the identity of the code: Python computes its hash from all of its
    instructions, each time anew.
    """
    known = _reached.get((id(code), bound))
    if known is None:
        if len(_reached) >= _LIMIT:
            _reached.clear()
        known = _reached[(id(code), bound)] = code, _listed(code, bound)
    return known[1]


def _listed(code: types.CodeType, bound: bool) -> Reached | None:
    if bound and not code.co_argcount:
        return None  # the object comes among others, in `*args`
    scan = _Scan(list(code.co_freevars))
    try:
        scan(code, code.co_varnames[0] if bound else None, set(code.co_freevars))
    except Unfit:
        return None
    return scan.found


class _Scan:
    """Lists what code and the functions in it reach; `order`: the cells of the outermost."""

    def __init__(self, order: list[str]) -> None:
        self.found, self.order = Reached({}, set()), order
        self.root: tuple[str, Any] | None = None  # of the value on top of the stack, where it is at the end of a chain
        self.attributes: list[str] = []

    def __call__(self, code: types.CodeType, owner: str | None, free: set[str]) -> None:
        """owner: the name of the argument that is an object; free: names of cells that are the outermost's."""
        for step in dis.get_instructions(code):
            if step.opname in _REFUSED or (step.opname in _OF_CELLS and step.argval in free):
                raise Unfit
            if step.is_jump_target:  # the value may be one of several: `(a or b).x`
                self._close()
            if step.opname in _ATTRIBUTES:
                if self.root is None:
                    self.found.names.add(step.argval)
                else:
                    self.attributes.append(step.argval)
            elif step.opname not in _NOTHING:
                self._close()
                self._begin(step, owner, free)
        self._close()
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                # an argument of the inner function may have the owner's name: it is no root then
                self(inner, None, free & set(inner.co_freevars))
                if owner is not None and owner in inner.co_freevars:
                    raise Unfit

    def _close(self) -> None:
        if self.root is not None:
            kind, place = self.root
            self.found.chains[kind, place, tuple(self.attributes)] = None
            self.root = None
        self.attributes.clear()

    def _begin(self, step: dis.Instruction, owner: str | None, free: set[str]) -> None:
        name, value = step.opname, step.argval
        kind = _LOADS.get(name)
        if kind is GLOBAL:
            self.root = (GLOBAL, value)
        elif kind is CELL:
            self.root = (CELL, self.order.index(value)) if value in free else None
        elif owner is not None and name.startswith(("LOAD_FAST", "LOAD_CLOSURE")):
            *others, last = value if isinstance(value, tuple) else (value,)
            if owner in others:
                self.found.chains[SELF, None, ()] = None
            self.root = (SELF, None) if last == owner else None
        elif owner is not None and name.startswith("STORE_FAST") and owner in str(value):
            raise Unfit
