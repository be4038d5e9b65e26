"""Records of which some fields are compared and others are not: copies that tell who reads, or says, which.

`planted` changes one field at a time, of records in a record too. `bare` has no other fields than those compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def planted(record: Any, name: str = "", compared: bool = True) -> Iterator[tuple[str, Any, bool]]:
    """(which field, a copy where it alone says something else, whether it is compared), whatever makes sense of it."""
    for field in dataclasses.fields(record):
        value, path, counts = getattr(record, field.name), f"{name}{field.name}", compared and field.compare
        if dataclasses.is_dataclass(value):
            for inner, other, counted in planted(value, f"{path}.", counts):
                yield inner, _with(record, field.name, other), counted
        else:
            yield path, _with(record, field.name, _another(value)), counts


def _with(record: T, name: str, value: Any) -> T:
    made = object.__new__(type(record))
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        object.__setattr__(made, field.name, value if field.name == name else getattr(record, field.name))
    return made


def _another(value: Any) -> Any:
    """Another value, of the same type if that is a plain one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, torch.dtype):
        return torch.float64
    if isinstance(value, tuple):
        return (*value, "planted")
    return f"{value} planted" if isinstance(value, str) else None if value is not None else "planted"


def uncompared(record: Any) -> Iterator[tuple[type, dataclasses.Field[Any]]]:
    """The fields that are not compared, of records in it too, each with whose it is."""
    for field in dataclasses.fields(record):
        if not field.compare:
            yield type(record), field
        elif dataclasses.is_dataclass(value := getattr(record, field.name)):
            yield from uncompared(value)


def bare(value: T) -> T:
    """A copy of which only the compared fields can be read, of records in it too."""
    if isinstance(value, tuple):
        parts = [bare(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)  # type: ignore[return-value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = dataclasses.fields(value)
    hidden = {f.name: property(_refused(f.name)) for f in fields if not f.compare}
    made = object.__new__(type(type(value).__name__, (type(value),), hidden))
    for field in fields:
        if field.compare:
            object.__setattr__(made, field.name, bare(getattr(value, field.name)))
    return made


def _refused(name: str) -> Any:
    def read(self: object) -> None:
        raise AssertionError(f"`{name}` is read, which is not compared")

    return read
