"""One sequence on several ranks: who computes which queries, which keys move, and how results come together."""

from .context import ContextParallel, active
from .shard import Shard

__all__ = ["ContextParallel", "Shard", "active"]
