"""What mods are called in logs and profiles: as their author named them, else by their formula.

Plans know mods by their forms, so names are kept by form. Of mods of one form the first that has a name gives it.
"""

from __future__ import annotations

from typing import Any

from .form import parsed

LONGEST = 60  # characters; profilers cut names, and a log has lines
_LIMIT = 4096
_SIGNS = {"and": "&", "or": "|", "then": ">>", "plus": "+"}
_names: dict[Any, str] = {}


def remember(form: str, name: str) -> None:
    """From now on mods of this form are called so, unless nobody named them, as lambdas."""
    if name.startswith("<") or form in _names:
        return
    if len(_names) >= _LIMIT:
        _names.clear()
    _names[form] = name


def name_of(form: str) -> str | None:
    """The name of a form; of joined ones by the names of their parts. None where one of them has none."""
    return _names.get(form) or _joined(parsed(form))


def _joined(form: Any) -> str | None:
    kind, *parts = form
    if kind not in ("not", *_SIGNS):
        return None
    names = [_names.get(repr(part)) or _joined(part) for part in parts]
    if None in names:
        return None
    return f"~{names[0]}" if kind == "not" else f" {_SIGNS[kind]} ".join(map(_bracketed, names))


def _bracketed(name: str | None) -> str:
    name = str(name)
    return f"({name})" if any(f" {sign} " in name for sign in _SIGNS.values()) else name


def shortened(title: str) -> str:
    """At most `LONGEST` characters of it."""
    return title if len(title) <= LONGEST else title[: LONGEST - 1] + "…"
