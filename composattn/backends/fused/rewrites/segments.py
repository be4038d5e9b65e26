"""A call whose mask falls apart into segments, as documents by ids do: tiles may begin with them."""

from __future__ import annotations

import dataclasses

from ..tiles.coverage import has_documents_apart, has_segments_apart
from .posed import Found, Nothing, Posed, Rewritten


def in_segments(posed: Posed) -> Found:
    """The call with segments, with which tiles may begin; its tiling says whether they do."""
    if posed.direction == "forward":
        in_any_order = not posed.problem.schedule.batch_invariant  # of keys: tiles of these begin where segments do
        apart = in_any_order and has_segments_apart(posed.problem, posed.program)
    else:
        apart = has_documents_apart(posed.problem, posed.program.without_sink)
    if not apart:
        return Nothing()
    return Rewritten(dataclasses.replace(posed, segments=True), "tiles begin with segments, if their kind can")
