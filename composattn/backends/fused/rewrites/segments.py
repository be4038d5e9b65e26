"""A call whose mask falls apart into segments, as documents by ids do: tiles may begin with them."""

from __future__ import annotations

import dataclasses

from ..tiles.coverage import has_documents_apart
from ..tiles.segments import falls_apart
from .posed import Found, Nothing, Posed, Rewritten


def in_segments(posed: Posed) -> Found:
    """The call with segments, with which tiles may begin; its tiling says whether they do."""
    if posed.direction == "forward":
        apart = falls_apart(posed.problem, posed.program)
    else:
        apart = has_documents_apart(posed.problem, posed.program.without_sink)
    if not apart:
        return Nothing()
    return Rewritten(dataclasses.replace(posed, segments=True), "tiles begin with segments, if their kind can")
