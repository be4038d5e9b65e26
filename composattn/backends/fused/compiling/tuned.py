"""Which form a user's own calls were timed to want: a file beside the kernels, written by `composattn tune`.

A call is known there by its class and its sizes, direction and GPU; a form that cannot cut it any more is passed by.
Batch-invariant calls are left as they are, as their bits are those of the form.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..planning.facts import Facts
from ..tiles.tiling import Chosen
from . import disk_cache

FILE = "tuned.json"


@dataclasses.dataclass(frozen=True)
class Tuned:
    """`form` was the fastest: `gain` is the time of the best other one, `over`, over its. `gpu`: where."""

    form: str
    over: str
    gain: float
    gpu: str

    def __str__(self) -> str:
        return f"tuned: {self.gain - 1:+.1%} over {self.over}, timed on this machine ({self.gpu})"


@dataclasses.dataclass
class Asking:
    """Which form is `wanted` by direction; `met`: of each call its own form, and the others that cut it otherwise."""

    wanted: Mapping[str, str]
    met: dict[str, list[str]] = dataclasses.field(default_factory=dict)


_asking: list[Asking] = []  # of the process: a backward is planned in a thread of autograd's


@contextlib.contextmanager
def asking(**wanted: str) -> Iterator[Asking]:
    """Inside, calls are planned by these forms, `forward=` and `backward=`, where they can cut them."""
    asked = Asking(wanted)
    _asking.append(asked)
    try:
        yield asked
    finally:
        _asking.remove(asked)


def chosen(call: Facts, own: str, others: Iterable[str], said: str, made: Callable[[str, Facts], Any]) -> Chosen:
    """What a call gets by its `own` form, tables `said` why, or by one of the `others`, asked for or tuned.

    `made`: the tiling by a form.
    """
    words = f"{call}\n    {said}"
    if call.order == "batch-invariant":
        return Chosen(made(own, call), words)
    key = key_of(call)
    if _asking:
        tilings = {own: made(own, call)}
        for form in others:
            with contextlib.suppress(AssertionError, ValueError):  # fields that exclude each other
                found = made(form, call)
                if found not in tilings.values():
                    tilings[form] = found
        _asking[-1].met[key] = list(tilings)
        return Chosen(tilings.get(_asking[-1].wanted.get(call.direction, ""), tilings[own]), words)
    known = kept(disk_cache.folder() / FILE).get(key)
    if known is None:
        return Chosen(made(own, call), words)
    words = f"{call}\n    form: {known.form}; {known}; the tables say {own}"
    return Chosen(made(known.form if known.form in others else own, call), words)


def key_of(call: Facts) -> str:
    """What kind of call it is, its sizes and GPU."""
    p, target = call.problem, call.target
    sizes = f"B {p.batch}, {p.q_heads} on {p.kv_heads} heads, {p.q_len} x {p.kv_len}, D {p.head_dim}, Dv {p.head_dim_v}"
    return f"{call}; {sizes}, {p.dtype}, {target.arch} of {target.sms} SMs"


def kept(path: Path) -> dict[str, Tuned]:
    """What the file says; nothing where there is none, or others than this user can write it, or it is damaged."""
    try:
        written = os.stat(path).st_mtime_ns
    except OSError:
        return {}
    return _read(path, written)


@functools.lru_cache(maxsize=1)
def _read(path: Path, written: int) -> dict[str, Tuned]:
    if disk_cache.unusable(path.parent):
        return {}
    try:
        return {key: Tuned(**said) for key, said in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:  # cut off, or of another version
        warnings.warn(f"calls are planned as nobody tuned them: {path} can't be read ({error})", stacklevel=2)
        return {}


def keep(found: Mapping[str, Tuned]) -> Path:
    """Adds what was found to the file, which other processes see whole. Returns its path."""
    folder = disk_cache.usable()
    path = folder / FILE
    all_of: dict[str, Any] = {key: dataclasses.asdict(t) for key, t in (kept(path) | dict(found)).items()}
    with disk_cache.writing(folder) as aside:
        (aside / FILE).write_text(json.dumps(all_of, indent=1))
        os.replace(aside / FILE, path)
    return path
