"""What a value says, as text that is the same in every process: values of equal text are computed by one kernel.

Records say all their fields that are compared; one that is not has its reason in its metadata, under "why". Graphs say
what they compute, all of a value together, so that tensors which two of them read are told from two tensors.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

import torch

from .expr import Expr, content_key

_PLAIN = (type(None), bool, int, float, str, torch.dtype)


def content(value: object) -> str:
    """A line for each part of `value`, then one for each node of the graphs in it.

    Parts are the compared fields of a dataclass, the fields of a named tuple, or what the property `content` of another
    object maps by name. Raises `TypeError` for objects that have neither: the text of an object may be its address.
    """
    graphs: list[Expr] = []
    parts = _parts(value)
    if parts is None:
        said = [_text(value, graphs)]
    else:
        said = [type(value).__qualname__, *(f"{name}={_text(part, graphs)}" for name, part in parts)]
    return "\n".join([*said, *map(repr, content_key(*graphs))])


def _parts(value: object) -> list[tuple[str, object]] | None:
    """What a value is made of, by name; None where it is no record."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.compare]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    told = getattr(value, "content", None)
    return list(told.items()) if isinstance(told, Mapping) else None


def _text(value: object, graphs: list[Expr]) -> str:
    if isinstance(value, Expr):
        graphs.append(value)
        return f"graph {len(graphs) - 1}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, _PLAIN):
        return repr(value)
    parts = _parts(value)
    if parts is not None:
        return f"{type(value).__qualname__}({', '.join(f'{name}={_text(part, graphs)}' for name, part in parts)})"
    if isinstance(value, tuple):
        return f"({', '.join(_text(part, graphs) for part in value)})"
    raise TypeError(f"{type(value).__qualname__} has no content: make it a dataclass, or give it the property")
