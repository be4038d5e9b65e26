"""Continuous batching of transformers, `model.generate_batch`, with composattn.

transformers lets in the implementations that it knows. Others it would leave without a mask, as flash-attention. Of
what a layer then gets, packed queries and the keys of its cache, `attend` makes documents that are causal from the end.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

_names: set[str] = set()  # that mean composattn


def serve_batches(name: str) -> None:
    """Lets a model of this implementation batch requests as it is, neither refused nor switched to another one."""
    _names.add(name)
    theirs = getattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn", None)
    if theirs is None or getattr(theirs, "_knows_composattn", False):
        return

    @functools.wraps(theirs)
    def switched(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        if model.config._attn_implementation in _names:
            return None
        return theirs(self, model, *args, **options)

    switched._knows_composattn = True  # type: ignore[attr-defined]
    ContinuousBatchingManager.switch_to_cb_friendly_attn = switched
