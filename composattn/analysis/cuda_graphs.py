"""What a CUDA graph can't record of a call: whatever the host reads. Refused by name when it is captured.

What is derived from tensors is a part of the graph instead, see `composattn.analysis.derived`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import GraphUnsupported
from ..graph import copies
from ..graph.scalar import Scalar
from . import refreshed, streams


def refuse_in_graph(what: str, instead: str) -> None:
    """Raises `GraphUnsupported` where a CUDA graph records this call. what: who reads tensors on the host."""
    if streams.is_capturing():
        raise GraphUnsupported(f"{what}, which waits for the device, and a CUDA graph can't record that; {instead}")


def numbers_now(scalars: Iterable[Scalar]) -> list[float | int]:
    """What run-time numbers are now, for a launch.

    Raises: `GraphUnsupported` where a CUDA graph records it and a number is one that changes between calls: a replay
    would launch with the number of the capture.
    """
    scalars = tuple(scalars)
    if scalars and streams.is_capturing():
        for scalar in scalars:
            if scalar.in_graphs is not None:
                raise GraphUnsupported(
                    f"{scalar.in_graphs} is read on the host: a replay of the CUDA graph that is captured would repeat "
                    "its number of now"
                )
    return [scalar.value for scalar in scalars]


def refuse_outdated(leaves: Iterable[Any]) -> None:
    """Raises what `copies.refuse_outdated` does, and `GraphUnsupported` if a CUDA graph would read an older table.

    No replay looks at the writes to what the table was made of, unless that lies on the host, which no graph reads.
    """
    tables = copies.made_among(leaves)
    for _, sources in tables:
        sources.refuse_outdated()
    if not (tables and refreshed.belongs_to_graph()):
        return
    for table, sources in tables:
        if any(source.device == table.device for source in sources.tensors):
            raise GraphUnsupported(
                f"{sources.name} of a mask became a table when it was made, and no replay of a CUDA graph makes that "
                "again; give document(ids), the document of each token, or a mask_mod that reads the tensor"
            )
