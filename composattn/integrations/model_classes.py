"""Which classes of transformers ask its attention interface. Others are refused by name where they are loaded.

transformers lets any registered name pass when it loads a model, whether the class asks for it or not: such a class
then computes attention by itself, without a word, or fails at its first mask. `sdpa` and `flex_attention`, which
transformers knows, are refused there; so is composattn.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NoReturn

from transformers import PreTrainedModel

from ..errors import UnsupportedOption

names: set[str] = set()  # that mean composattn
written_for_eager: set[type] = (
    set()
)  # configurations of models that add their masks to scores, as transformers' `eager`


def check_when_loaded(name: str) -> None:
    """Lets transformers refuse classes for which `name` can't be meant, and note what masks others are written for."""
    names.add(name)
    theirs = PreTrainedModel.get_correct_attn_implementation
    if getattr(theirs, "_asks_composattn", False):
        return

    @functools.wraps(theirs)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        found = theirs(self, *args, **options)
        if found in names:
            _check(self, found)
        return found

    checked._asks_composattn = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = checked


def _check(model: Any, name: str) -> None:
    """Raises `UnsupportedOption` for a class that never asks."""
    kind = type(model)
    if not any(_asks(base) for base in kind.__mro__ if issubclass(base, PreTrainedModel)):
        _refuse(kind.__name__, name)
    _refuse_in_tables(kind, name)
    if not kind._supports_sdpa:  # never given masks of bools
        written_for_eager.add(type(model.config))


def _asks(kind: Any) -> bool:
    """By what transformers itself goes by: a flag, else the source."""
    return kind is not PreTrainedModel and (kind._supports_attention_backend or kind._can_set_attn_implementation())


def _refuse_in_tables(kind: type, name: str) -> None:
    """Modules that look the class of their layers up by the implementation's name: one that refuses, under ours."""
    for table in list(vars(sys.modules[kind.__module__]).values()):
        if isinstance(table, dict) and "eager" in table and all(isinstance(made, type) for made in table.values()):
            layer = table["eager"].__name__
            table.setdefault(name, functools.partial(_refuse_layer, layer, name))


def _refuse_layer(layer: str, name: str, *_: Any, **__: Any) -> NoReturn:
    _refuse(layer, name)


def _refuse(what: str, name: str) -> NoReturn:
    raise UnsupportedOption(
        f"{what} computes attention by itself and never asks transformers' AttentionInterface; load it with "
        f'attn_implementation="eager", or, where it is a part of a model, name the parts that shall have composattn: '
        f'attn_implementation={{"text_config": "{name}"}}'
    )
