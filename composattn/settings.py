"""What the environment says for calls that say nothing themselves; read once, when composattn is imported.

    COMPOSATTN_BACKEND=streaming     as backend="streaming", where a call names none
    COMPOSATTN_DETERMINISTIC=1       as deterministic=True, where a call says neither True nor False
    COMPOSATTN_DEBUG_CHECKS=1        as ca.debug_checks(True) before the first call
    COMPOSATTN_LOG=INFO              the log "composattn" from this level on; on stderr, where no other handler has it

`COMPOSATTN_CACHE_DIR`, the folder of compiled kernels, is read when one is looked for.
"""

from __future__ import annotations

import logging
import os

from .errors import UnsupportedOption


def flag(name: str) -> bool:
    """Whether a variable is "1"; unset, empty and "0" are no. Raises `UnsupportedOption` for anything else."""
    said = os.environ.get(name, "")
    if said not in ("", "0", "1"):
        raise UnsupportedOption(f"{name}={said!r}; it must be 0 or 1")
    return said == "1"


def number(name: str, unset: float) -> float:
    """What a variable says, `unset` where it says nothing. Raises `UnsupportedOption` for what is no number above 0."""
    said = os.environ.get(name, "")
    try:
        found = float(said) if said else unset
    except ValueError:
        found = 0.0
    if not found > 0:
        raise UnsupportedOption(f"{name}={said!r}; it must be a number above 0")
    return found


def log_on_stderr(name: str) -> None:
    """Sets the log as the variable says, if it says something. Raises `UnsupportedOption` for a level that is none."""
    said = os.environ.get(name, "").upper()
    if not said:
        return
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    if said not in levels:
        raise UnsupportedOption(f"{name}={said!r}; it must be one of {', '.join(levels)}")
    log = logging.getLogger("composattn")
    log.setLevel(said)
    log.addHandler(_Alone())


class _Alone(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes what no handler of the program writes: after `logging.basicConfig()` each line is there once."""

    def filter(self, record: logging.LogRecord) -> bool:
        others = [handler for handler in logging.getLogger("composattn").handlers if handler is not self]
        return not others and not logging.getLogger().handlers and bool(super().filter(record))


BACKEND = os.environ.get("COMPOSATTN_BACKEND") or None
DETERMINISTIC = True if flag("COMPOSATTN_DETERMINISTIC") else None
DEBUG_CHECKS = flag("COMPOSATTN_DEBUG_CHECKS")
log_on_stderr("COMPOSATTN_LOG")
