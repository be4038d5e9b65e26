"""The masks of transformers' models: functions, for as long as a model's own code doesn't read one as a tensor.

Most models carry their mask to their layers and look at nothing but whether there is one. Others cut queries or keys
of it, join two, or read it to choose keys. `ModelMask` cuts as a function, and is transformers' own (B, 1, Sq, Skv)
tensor for all else, so that such code does what it does with `sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree
from transformers import masking_utils as theirs

from ..errors import UnknownKeyword, UnsupportedOption
from ..mods.mask import Mask
from ..mods.mod import title
from .model_classes import written_for_eager

MaskFunction = Callable[[Any, Any, Any, Any], Any]

WHOLE = slice(None)

_OF_ARITHMETIC = ["add", "sub", "rsub", "mul", "div", "baddbmm", "addcmul"]
_OF_ARITHMETIC += [f"__{way}{name}__" for way in ("", "r", "i") for name in ("add", "sub", "mul", "truediv")]
# arithmetic on a mask of bools: code that means masks of 0 and -inf, which it was never given
_ARITHMETIC = frozenset(
    getattr(of, name) for of in (torch, torch.Tensor) for name in _OF_ARITHMETIC if hasattr(of, name)
)
_WRITES = frozenset(
    getattr(torch.Tensor, name) for name in dir(torch.Tensor) if name.endswith("_") and not name.endswith("__")
)

# keywords of transformers that say nothing about what is visible, each with what it is for
_SAY_NOTHING = {
    "allow_is_causal_skip": "whether None may stand for a causal mask; a ModelMask says it at no cost",
    "use_vmap": "how sdpa's tensor is filled",
    "local_size": "for sdpa to see that a window hides nothing; the mask function holds the window",
}

# models whose layers look whether their mask is a tensor, and what for
_NEED_TENSORS = {"deepseek_v4": "its layers add compressed keys behind those of the mask, and widen it if it is one"}


class ModelMask:
    """What transformers carries from its masks to its layers: a mask mod, and the lengths it is for.

    mask_mod: None where all is visible. lengths: (B, 1, Sq, Skv). dtype: bool, True where visible, as transformers'
    masks for `sdpa`; or floats, 0 or the least number, of models that it knows in `eager` alone.
    """

    def __init__(
        self,
        mask_mod: Mask | MaskFunction | None,
        lengths: tuple[int, int, int, int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bool,
    ) -> None:
        self.mask_mod, self.lengths, self.device, self.dtype = mask_mod, lengths, torch.device(device), dtype

    @property
    def shape(self) -> torch.Size:
        """(B, 1, Sq, Skv)."""
        return torch.Size(self.lengths)

    @property
    def ndim(self) -> int:
        """4, as of a mask that is ready."""
        return len(self.lengths)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def contiguous(self) -> ModelMask:
        return self

    def to(self, *args: Any, **options: Any) -> Any:
        """Itself on another device, as what it reads lies where transformers put it; of another type a tensor."""
        given = (*args, *options.values())
        if any(kind is not self.dtype for kind in given if isinstance(kind, torch.dtype)):
            return self.tensor().to(*args, **options)
        return self

    def tensor(self) -> torch.Tensor:
        """transformers' mask as a tensor (B, 1, Sq, Skv) of `dtype`."""
        axes = [torch.arange(n, device=self.device) for n in self.lengths]
        b, h, q, kv = (axis.view(*[-1 if d == own else 1 for d in range(4)]) for own, axis in enumerate(axes))
        seen = torch.ones_like(kv, dtype=torch.bool) if self.mask_mod is None else self.mask_mod(b, h, q, kv)
        seen = seen.expand(self.lengths).contiguous()
        if self.dtype is torch.bool:
            return seen
        return torch.where(seen, torch.zeros((), dtype=self.dtype, device=self.device), torch.finfo(self.dtype).min)

    def __getitem__(self, index: Any) -> Any:
        """Some queries or keys in a row, `mask[:, :, 8:, :20]`: a mask function as well; else of the tensor."""
        spans = _spans(index)
        if spans is None:
            return self.tensor()[index]
        (q_begin, q_length), (kv_begin, kv_length) = (
            _cut(span, length) for span, length in zip(spans, self.lengths[2:], strict=True)
        )
        mod = self.mask_mod
        if mod is not None:
            shifted = shifted_by(mod, q_begin, kv_begin, self.device)
            mod = shifted if torch.compiler.is_compiling() else Mask.of(shifted)
        return ModelMask(mod, (*self.lengths[:2], q_length, kv_length), self.device, self.dtype)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        self._refuse_write()

    def _refuse_write(self) -> NoReturn:
        raise UnsupportedOption(
            "this model writes into its mask, which is a function here; load the model with "
            'attn_implementation="eager", or pass it a 4-d tensor as attention_mask'
        )

    def __getattr__(self, name: str) -> Any:
        """What else a tensor has; writes in place are refused."""
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"a ModelMask has no {name!r}, nor has a tensor")
        if name.endswith("_"):
            self._refuse_write()
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A function of torch, of the tensor. Raises `UnsupportedOption` for arithmetic on bools, and for writes."""
        masks = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ModelMask)]
        if func in _ARITHMETIC and any(of.dtype is torch.bool for of in masks):
            raise UnsupportedOption(
                "this model adds its mask to scores by itself, and its masks are of bools; load it with "
                'attn_implementation="eager", or, where it is a part of a model, name the others: '
                'attn_implementation={"text_config": "composattn"}'
            )
        if func in _WRITES and isinstance(args[0], ModelMask):
            args[0]._refuse_write()
        tensors = pytree.tree_map_only(ModelMask, ModelMask.tensor, (args, kwargs or {}))
        return func(*tensors[0], **tensors[1])

    def __repr__(self) -> str:
        return f"ModelMask({None if self.mask_mod is None else title(self.mask_mod)}, {self.lengths})"

    __str__ = __repr__
    __hash__ = object.__hash__


def _operator(name: str) -> Any:
    function = getattr(torch.Tensor, name)
    return lambda self, *others: ModelMask.__torch_function__(function, (), (self, *others))


_OPERATORS = "add radd sub rsub mul rmul truediv and rand or ror xor invert neg eq ne lt le gt ge bool len"
for _name in _OPERATORS.split():
    setattr(ModelMask, f"__{_name}__", _operator(f"__{_name}__"))


def _spans(index: Any) -> tuple[slice, slice] | None:
    """The queries and keys that an index cuts, in a row; None where it does something else."""
    at = list(index) if isinstance(index, tuple) else [index]
    for place, item in enumerate(at):
        if item is Ellipsis:
            at[place : place + 1] = [WHOLE] * (5 - len(at))
            break
    at += [WHOLE] * (4 - len(at))
    in_a_row = len(at) == 4 and all(isinstance(item, slice) and item.step in (None, 1) for item in at)
    return (at[2], at[3]) if in_a_row and at[0] == at[1] == WHOLE else None


def _cut(span: slice, length: int) -> tuple[int, int]:
    begin, end, _ = span.indices(length)
    return begin, max(0, end - begin)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: MaskFunction = theirs.causal_mask_function,
    attention_mask: torch.Tensor | ModelMask | None = None,
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    allow_is_bidirectional_skip: bool = False,
    **unknown: Any,
) -> ModelMask | torch.Tensor | None:
    """The mask of a model's forward, as `AttentionMaskInterface` asks for it.

    attention_mask: (B, at most kv_offset + Skv) bool, False where a token is padding; or a mask that is ready.
    dtype, config: of the model, which decide what its own code reads where it reads a tensor, see `ModelMask`.
    allow_is_bidirectional_skip: whether None may say that all is visible.

    Raises: `UnknownKeyword`.
    """
    _refuse_unknown(unknown)
    if isinstance(attention_mask, ModelMask):
        return attention_mask
    if getattr(config, "model_type", None) in _NEED_TENSORS:
        return theirs.eager_mask(  # type: ignore[no-any-return]
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, dtype, device=device
        )
    kind = dtype if type(config) in written_for_eager else torch.bool
    shape = (batch_size, 1, q_length, kv_length)
    padding = None if attention_mask is None else _padding(attention_mask, kv_length, kv_offset)
    if padding is None and _sees_all(mask_function, q_length, q_offset, kv_offset + kv_length):
        bidirectional = mask_function is theirs.bidirectional_mask_function
        may_skip = allow_is_bidirectional_skip and bidirectional and kind is torch.bool
        return None if may_skip else ModelMask(None, shape, device, kind)
    if padding is not None:
        mask_function = theirs.and_masks(mask_function, padding)
    mask_function = shifted_by(mask_function, q_offset, kv_offset, device)
    made = mask_function if torch.compiler.is_compiling() else Mask.of(mask_function)
    return ModelMask(made, shape, device, kind)


def _refuse_unknown(unknown: dict[str, Any]) -> None:
    for name, value in unknown.items():
        if value is not None and name not in _SAY_NOTHING:
            raise UnknownKeyword(
                f"transformers asks for a mask with {name}={value!r}, of which composattn does not know whether it "
                'changes what is visible; load the model with attn_implementation="sdpa"'
            )


def _sees_all(mask_function: MaskFunction, q_length: int, q_offset: Any, kv_end: Any) -> bool:
    """Whether every key is seen: with no order, or by a causal query behind all keys; False where the device knows."""
    if mask_function is theirs.bidirectional_mask_function:
        return True
    known = not torch.compiler.is_compiling() and isinstance(q_offset, int) and isinstance(kv_end, int)
    return known and mask_function is theirs.causal_mask_function and q_length == 1 and q_offset + 1 >= kv_end


def _padding(tokens: torch.Tensor, kv_length: int, kv_offset: Any) -> MaskFunction | None:
    """The mask of (B, S) `tokens`, False where padding; None where there is none.

    Waits for the device to say whether there is any, as transformers' own masks do, and once more where there is.
    Tokens that follow each other, as with padding left or right of them, are two bounds per sequence: tiles beyond
    are skipped, and a longer table is no new plan.
    """
    if not torch.compiler.is_compiling():
        if bool(tokens.all()):
            return None
        begin, count = tokens.int().argmax(-1), tokens.sum(-1)
        end = torch.where(count == 0, begin, tokens.shape[1] - tokens.flip(-1).int().argmax(-1))
        if bool((end - begin == count).all()):
            return lambda b, h, q_idx, kv_idx: (kv_idx >= begin[b]) & (kv_idx < end[b])
    table = theirs.prepare_padding_mask(tokens, kv_length, kv_offset)
    return theirs.padding_mask_function(table)  # type: ignore[no-any-return]


def shifted_by(mask_function: MaskFunction, q_offset: Any, kv_offset: Any, device: Any) -> MaskFunction:
    """`mask_function` of positions in the whole sequence, where queries and keys begin at these."""
    q_begin, kv_begin = (_number(offset, device) for offset in (q_offset, kv_offset))

    def mask_of_the_model(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_function(b, h, q_idx + q_begin, kv_idx + kv_begin)

    return mask_of_the_model


def _number(offset: Any, device: Any) -> Any:
    """0, or a run-time number: a constant would be another plan for each new token."""
    if isinstance(offset, torch.Tensor):
        return offset.reshape(()).clone()  # a static cache counts on in this tensor before the layers are called
    return torch.tensor(offset, device=device) if offset and not torch.compiler.is_compiling() else offset
