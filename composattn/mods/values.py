"""What values of 8 bits are multiplied by: a number for each sequence, head, key or channel, read as a mod reads."""

from __future__ import annotations

from .mod import Mod


class Values(Mod):
    """The factor of V: (b, h, kv, d) → float. h is the query head, d the channel of V."""

    __slots__ = ()
    _kind = "scales of values"
