"""Refusals while a mod runs: each quotes the user's line, and stands whoever swallows it."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch

from .. import errors

_HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_PYTHON = os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "")
_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")

pending = threading.local()
"""`pending.last` is the refusal that the mod at hand has met, if any; `pending.own` are tensors that it made.

`pending.frames` gives (file, line) of the mod's frames, innermost first, where Dynamo follows them and Python has none.
"""

OWN_BACKWARD = (
    "a torch.autograd.Function is applied in a mod, and its backward is not the gradient of what its forward computes; "
    "a mod's gradient is that of its formula. Write the formula itself, or apply the function outside and capture what "
    "it gives"
)


def user_line() -> str | None:
    """`file:line: source` of the innermost frame that is neither ours nor torch's."""
    followed = getattr(pending, "frames", None)
    frames = _of_python(sys._getframe(1)) if followed is None else followed()
    return next((quoted for name, line in frames if (quoted := quote(name, line)) is not None), None)


def _of_python(frame: types.FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def quote(name: str, line: int) -> str | None:
    """The line, unless it is ours, torch's or Python's own."""
    if name.startswith((_HERE, _TORCH, "<frozen")) or (name.startswith(_PYTHON) and "-packages" not in name):
        return None
    return f"{name}:{line}: {linecache.getline(name, line).strip()}"


def refuse(kind: type[errors.TraceError], message: str) -> Any:
    """Raise `kind` with the user's line. A refusal stands, whoever swallows it on the way out of the mod."""
    error = kind(message, user_line())
    pending.last = error
    raise error
