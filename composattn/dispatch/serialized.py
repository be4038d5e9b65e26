"""A call as text: what operators and exported programs take in place of mods and options."""

from __future__ import annotations

import ast
import functools
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..call.quantized import WIDE
from ..call.scales import Values
from ..call.schedule import Schedule
from ..errors import InvalidArgument
from ..graph.form import READING_FAILS, leaf_count, unreadable
from ..graph.scalar import Scalar
from ..mods.dropout import Dropout
from ..mods.mask import Mask
from ..mods.score import Score
from ..mods.sink import Sink

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in WIDE}
"""Types of out where q has 8 bits, by name."""

pytree.register_constant(Schedule)  # torch before 2.13 takes no other objects as constants


Mods = tuple[Score | None, Mask | None, Sink | None, Dropout | None, Values | None]
"""The mods of a call, in the order of `Program`; None, of none."""

SharedMods = tuple[Score | None, Mask | None, Sink | None]
"""The mods of a call that ranks share, which has no dropout and no values of 8 bits."""


class Serialized(NamedTuple):
    """The mods and options of a call as operators take them: a form, and the tensors and numbers it speaks of.

    A tensor that the mods read in several places is there once. A number is a `ca.scalar`, or an int that compiled code
    keeps symbolic.
    """

    form: str
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[Scalar | int, ...]


def serialize(mods: Mods, options: tuple[Any, ...]) -> Serialized:
    """Writes a call with these mods and options, those of `plans.Options`."""
    leaves: tuple[Any, ...] = ()
    for mod in mods:
        leaves += () if mod is None else mod.leaves
    scale, backend, deterministic, schedule, *out_dtype = options
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        scaled = f"{float(scale)}"  # numpy's floats, too, as Python's, and numbers that vary as what they are now
    else:
        scaled = repr(scale)
    if schedule is not None:
        schedule = (
            schedule.order, schedule.persistent, schedule.heads_together, schedule.split_kv, schedule.pack_gqa,
            schedule.batch_invariant,
        )  # fmt: skip
    tensors: list[torch.Tensor] = []
    kinds = "".join([_kind(leaf, tensors) for leaf in leaves])
    # by repr(): in an f-string the Dynamo of torch 2.11 forgets `!r` under Python 3.13, and writes strings bare; but a
    # scale that varies has no repr() in Dynamo, and needs none
    asked = f"({scaled}, {repr((backend, deterministic, schedule, kinds, *_names(out_dtype)))[1:]}"
    lines = [*["-" if mod is None else mod.form for mod in mods], asked]
    scalars = tuple([leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)])
    return Serialized("\n".join(lines), tuple(tensors), scalars)


def _names(out_dtype: list[torch.dtype]) -> list[str]:
    return [str(dtype).removeprefix("torch.") for dtype in out_dtype]


def _kind(leaf: Any, tensors: list[torch.Tensor]) -> str:
    """A letter, or the number of the tensor among the first ten, where it is one of those."""
    if isinstance(leaf, torch.Tensor):
        for number, tensor in enumerate(tensors[:10]):
            if tensor is leaf:
                return str(number)
        tensors.append(leaf)
        return "t"
    return "s" if isinstance(leaf, Scalar) else "n"


@functools.lru_cache(maxsize=512)
def parse(form: str) -> tuple[tuple[str | None, ...], tuple[Any, ...], str]:
    """(forms of the mods, options, kinds of the leaves) of a `serialize`d form. Raises: `UnreadableProgram`."""
    try:
        score, mask, sink, keep, values, last = form.split("\n")
        mods = tuple([None if mod == "-" else mod for mod in (score, mask, sink, keep, values)])
        scale, backend, deterministic, schedule, kinds, *out_dtype = ast.literal_eval(last)
        dtypes = [DTYPES[name] for name in out_dtype]
        options = (scale, backend, deterministic, None if schedule is None else Schedule(*schedule), *dtypes)
        known = all(k in "tsn" or (k in "0123456789" and int(k) < kinds[:n].count("t")) for n, k in enumerate(kinds))
        if len(kinds) != sum(map(leaf_count, mods)) or not known:
            raise ValueError(f"{kinds!r} are not the tensors and numbers of its mods")
    except InvalidArgument:
        raise
    except READING_FAILS as error:
        raise unreadable(form, error) from error
    return mods, options, kinds
