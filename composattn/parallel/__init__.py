"""One sequence on several ranks: who computes which queries, which keys move, and how results come together."""

from .context import ContextParallel, Shard, active

__all__ = ["ContextParallel", "Shard", "active"]
