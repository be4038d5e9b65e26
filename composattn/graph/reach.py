"""What the code of a function reaches besides its arguments: chains of attributes, each from a root."""

from __future__ import annotations

import dis
import types
from typing import Any

CELL, GLOBAL, SELF = "cell", "global", "self"

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
    """Only tracing can tell what a mod says."""


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
