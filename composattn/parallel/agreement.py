"""Whether all ranks were given the same: fingerprints of what each has, compared once when something is planned."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import errors
from ..graph.foreign import in_memory
from .exchange import Ranks

_WHOLE = 1 << 22  # bytes of a tensor that are looked at one by one; of larger ones a sum and some of them


class Said(NamedTuple):
    """Something that all ranks must have alike; `found`: a text, a number or bytes; `error`: what it is otherwise."""

    what: str
    found: Any
    error: type[errors.RanksDisagree] = errors.RanksDisagree


def agree(ranks: Ranks, said: Sequence[Said]) -> None:
    """Waits for all ranks, for at most the time-out.

    Raises: `RanksDisagree` or `CapturedTensorsDiffer` on every rank, `RankUnreachable`.
    """
    marks = torch.tensor([_mark(s.found) for s in said], dtype=torch.int64, device="cpu")
    table = ranks.said_by_all(torch.cat([torch.tensor([len(said)], device="cpu"), marks]))
    for column, one in enumerate([Said("number of what ranks compare", len(said)), *said]):
        given = table[:, column].tolist()
        if len(set(given)) > 1:
            usual = max(given, key=given.count)
            others = [r for r, mark in enumerate(given) if mark != usual]
            mine = f"; here, on rank {ranks.rank}: {one.found}" if len(str(one.found)) < 200 else ""
            raise one.error(
                f"ranks that share a sequence differ in {one.what}: {_named(others)} from the others{mine}; "
                "give all of them the same"
            )


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} differs" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} differ"


def _mark(found: Any) -> int:
    raw = found if isinstance(found, bytes) else repr(found).encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little", signed=True)


def digest_of(tensors: Sequence[torch.Tensor]) -> bytes:
    """A fingerprint of what tensors hold; waits for their device."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        t = in_memory(tensor.detach())
        digest.update(repr((t.dtype, tuple(t.shape))).encode())
        if t.numel() * t.element_size() > _WHOLE:
            flat = t.reshape(-1)
            digest.update(repr(float(flat.double().nan_to_num().sum())).encode())
            t = flat[:: max(1, flat.numel() * t.element_size() // _WHOLE)]
        digest.update(t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    return digest.digest()
