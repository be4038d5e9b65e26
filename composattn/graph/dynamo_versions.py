"""Dynamo is taught to hand mods over the first time there is one. What teaches it imports Dynamo."""

from __future__ import annotations

import threading

import torch

from ..errors import UnsupportedTorch

KNOWN = (2, 11), (2, 15)
"""Versions of torch, the first and the last, whose Dynamo reads each form of `tests/cpu/test_one_reading.py` right."""


def teach_dynamo() -> str | None:
    """Has Dynamo hand mods over; run for real while Dynamo traces, as a function that is constant to it.

    The form of a refusal where nobody tried this Dynamo: names that it lacks stop it, but one that it gave another
    meaning (a branch on a value that is always taken) would make another mod.
    """
    if not is_known():
        return _unknown()
    from .dynamo_reader import install

    with _lock:
        if not _taught:
            install()
            _taught.append(True)
    return None


def is_known() -> bool:
    """Whether this torch is one of them."""
    return KNOWN[0] <= version_of_torch() <= KNOWN[1]


def version_of_torch() -> tuple[int, int]:
    """Major and minor."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _unknown() -> str:
    from .form import refused

    first, last = (f"{major}.{minor}" for major, minor in KNOWN)
    error = UnsupportedTorch(
        f"a mod made in a compiled region is followed by torch's Dynamo, of which composattn knows torch {first} to "
        f"{last}, and this is torch {torch.__version__}; make it outside of the region, by ca.mask, ca.score or a "
        "ca.Attention, or call ca.attention in eager code"
    )
    return refused(error)


_taught: list[bool] = []
_lock = threading.Lock()
# what torch.compiler.assume_constant_result sets
teach_dynamo._dynamo_marked_constant = True  # type: ignore[attr-defined]
