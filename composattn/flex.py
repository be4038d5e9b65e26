"""A drop-in for `torch.nn.attention.flex_attention.flex_attention`: same arguments, one import changed."""

from __future__ import annotations

import operator
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from . import errors
from .analysis.tiles import settled_tiles, tiles
from .api import attention
from .call.block_sparse import LISTS, TESTED, BlockSparse, Table
from .call.inputs import OUT_ALONE, Inputs
from .dispatch.plan_cache import planned_for
from .graph.dynamo import dispatch_modes, function_modes, is_written_down
from .graph.expr import Dep, Expr
from .graph.fingerprint import Fingerprint, fingerprint
from .graph.scalar import Scalar
from .mods.mask import Mask
from .parallel import context

KERNELS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")  # of torch, as kernel_options may name them
_AUXILIARY = ("lse", "max_scores")  # what torch's AuxRequest may ask for


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
    backend: str | None = None,
) -> Any:
    """`flex_attention` of torch 2.11-2.15, on our backends; needs no torch.compile.

    query (B, Hq, Sq, D), key (B|1, Hkv, Skv, D), value (B|1, Hkv, Skv, Dv). `block_mask` is torch's `BlockMask`: its
    mask_mod is traced, and its lists of blocks mean what they mean to torch's compiled kernel: all of a listed full
    block is visible, in a listed partial block what the mask_mod says, in other blocks nothing. Returns out, or
    (out, lse) with `return_lse`, or (out, AuxOutput) with `return_aux`: lse and max_scores (B, Hq, Sq), natural units,
    fp32.

    Raises: what `Attention` raises; `GroupMismatch` for unequal head counts without `enable_gqa`;
    `BlockMaskMismatch`; `UnsupportedOption` for `return_lse` with `return_aux`, or a BACKEND in `kernel_options` that
    torch does not know. Other `kernel_options` of torch tune its kernels and change nothing here; a warning names those
    that torch has not.
    """
    if (
        block_mask is not None
        and return_lse is False
        and return_aux is None
        and kernel_options is None
        and query.__class__ is torch.Tensor
        and not torch.compiler.is_compiling()
        and not ((function_modes() or dispatch_modes()) and is_written_down())
    ):
        found = _again(query, key, value, score_mod, block_mask, scale, enable_gqa, backend)
        if found is not None:
            return found
    if return_aux is not None:
        _check_aux(return_aux, return_lse)
    if kernel_options is not None:
        _check_kernel(kernel_options)
    key, value = _of_all_batch_entries(query, key, value, enable_gqa)
    mask = None if block_mask is None else mask_of(block_mask, query, key)
    if return_aux is None:
        return attention(
            query, key, value, score_mod=score_mod, mask_mod=mask, scale=scale, return_lse=return_lse, backend=backend
        )
    options = {"score_mod": score_mod, "mask_mod": mask, "scale": scale, "backend": backend}
    return _with_auxiliary(return_aux, query, key, value, options)


def _with_auxiliary(return_aux: Any, query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
    """(out, AuxOutput) with what `return_aux` asks for."""
    from torch.nn.attention.flex_attention import AuxOutput

    lse, max_scores = return_aux.lse, return_aux.max_scores
    found = attention(query, key, value, return_lse=lse, return_max_scores=max_scores, **options)
    asked = [name for name in _AUXILIARY if getattr(return_aux, name)]
    out, *more = found if asked else (found,)
    return out, AuxOutput(**dict(zip(asked, more, strict=True)))


def _of_all_batch_entries(query: Any, key: Any, value: Any, enable_gqa: bool) -> tuple[Any, Any]:
    """key and value, those of one batch entry as those of all. Raises: `GroupMismatch`."""
    try:
        (batch, heads, _, _), (kv_batch, kv_heads, _, _) = query.shape, key.shape
    except (AttributeError, RuntimeError, ValueError):  # refused where the call is checked
        return key, value
    if heads != kv_heads and not enable_gqa and _are_dense(query, key):
        raise errors.GroupMismatch(
            f"{heads} query heads and {kv_heads} key/value heads; pass enable_gqa=True to share heads"
        )
    if kv_batch == 1 and batch > 1 and _are_dense(query, key):
        return key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
    return key, value


def _are_dense(x: Any, y: Any) -> bool:
    """Others are refused by name where the call is checked."""
    return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and not (x.is_nested or y.is_nested)


def _check_aux(return_aux: Any, return_lse: bool) -> None:
    from torch.nn.attention.flex_attention import AuxRequest

    if not isinstance(return_aux, AuxRequest):
        raise errors.UnsupportedOption(
            f"return_aux is {return_aux!r}; pass torch's AuxRequest(lse=True, max_scores=True), or a part of it"
        )
    more = [name for name, asked in return_aux._asdict().items() if asked and name not in _AUXILIARY]
    if more:
        raise errors.UnsupportedOption(f"return_aux asks for {', '.join(more)}; there are {', '.join(_AUXILIARY)}")
    if return_lse:
        raise errors.UnsupportedOption(
            "return_lse and return_aux both say what to return; pass return_aux=AuxRequest(lse=True) alone"
        )


def _check_kernel(kernel_options: Any) -> None:
    """Raises `UnsupportedOption`; warns of options that torch does not have, which change nothing either."""
    if not isinstance(kernel_options, dict):
        raise errors.UnsupportedOption(f"kernel_options is {kernel_options!r}; torch takes a dict, or None")
    kernel = kernel_options.get("BACKEND", "AUTO")
    if kernel not in KERNELS:
        raise errors.UnsupportedOption(
            f"kernel_options has BACKEND {kernel!r}, torch has {', '.join(KERNELS)}; to choose who computes here, pass "
            "backend="
        )
    from torch.nn.attention.flex_attention import FlexKernelOptions

    known = FlexKernelOptions.__annotations__  # they tune torch's kernels: no result hangs on them
    unknown = [name for name in kernel_options if str(name).removeprefix("fwd_").removeprefix("bwd_") not in known]
    if unknown:
        warnings.warn(f"kernel_options has {sorted(unknown)}, which torch has not; they have no effect", stacklevel=3)


# --- torch's BlockMask as a Mask --------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Known:
    """The mask that a `BlockMask` means, for as long as it has the mask_mod and the lists that it was made of."""

    of: weakref.ref[Any]  # the BlockMask
    mask_mod: Any
    said: Fingerprint | None  # of the mask_mod: for as long as it says this, it means the same
    inner: Mask  # what the mask_mod means
    lists: tuple[torch.Tensor | None, ...]
    mask: Mask
    # tensors and numbers that decided that it is the mask_mod's alone, but for those of inference mode, whose writes
    # nobody counts; each with what it was then
    decided: tuple[tuple[torch.Tensor, int, int], ...]  # counts of writes, addresses
    numbers: tuple[Scalar, ...]
    values: list[Any]  # of the numbers
    fits: list[Any]  # shapes, device and lengths of calls that it was checked for, the latest
    latest: tuple[Any, ...] | None = None  # whose form is this fast path's, with what else it was checked for


_known: dict[int, _Known] = {}  # by the place of a BlockMask, for as long as it lives
_FITS = 8
_ARGUMENTS = 4  # of a mask_mod


def mask_of(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> Mask:
    """The mask that a torch `BlockMask` means: its mask_mod where its lists add nothing, else both together.

    Whether they do is found out once per BlockMask, at the cost of some small operations and one wait; where bounds of
    the mask leave blocks open, of looking at the pairs of those. Of one that was written to,
    or whose mask_mod means something else since, both count.
    """
    compiling = torch.compiler.is_compiling()
    known = None if compiling else _unchanged(block_mask) or _known_still(block_mask)
    if known is None:
        _check(block_mask)
        if _is_one_block_of_any_length(block_mask):
            return Mask.of(block_mask.mask_mod)
    asked = None if compiling else (query.shape, key.shape, query.device, *block_mask.seq_lengths)
    if known is not None and asked in known.fits:
        return known.mask
    if block_mask.kv_num_blocks.device != query.device:
        raise errors.BlockMaskMismatch(
            f"block_mask lies on {block_mask.kv_num_blocks.device}, q on {query.device}; "
            f'move it: block_mask.to("{query.device}")'
        )
    _check_extent(block_mask, query, key)
    if compiling or (known is None and is_written_down()):
        return BlockSparse.from_block_mask(block_mask)  # looking at the lists would wait for them
    if known is None:
        known = _remembered(block_mask, *_build(block_mask))
    known.fits[:] = [asked, *known.fits[: _FITS - 1]]
    return known.mask


def _again(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    backend: str | None,
) -> torch.Tensor | None:
    """The output of a call that differs from an earlier one in nothing but what tensors hold; else None.

    What is checked of shapes is known by their form, at which the call looks itself.
    """
    if (context.entered or context.left) and context.active(query, compiling=False) is not None:
        return None
    known = _unchanged(block_mask)
    if known is None:
        return None
    options = scale, backend, None, None
    if known.mask is known.inner:
        planned, borrowed = planned_for(score_mod, known.mask_mod, None, None, options, known.said)
    else:
        planned, borrowed = planned_for(score_mod, known.mask, None, None, options)
    fast_path = planned.fast_path_of(query, key, value)
    if fast_path is None:
        return None
    asked = fast_path, enable_gqa, block_mask.seq_lengths
    if asked != known.latest:
        (batch, heads, _, _), (kv_batch, kv_heads, _, _) = query.shape, key.shape
        if (heads != kv_heads and not enable_gqa) or (kv_batch == 1 < batch):
            return None
        if mask_of(block_mask, query, key) is not known.mask:
            return None
        known.latest = asked
    out = fast_path(query, key, value, borrowed)
    return planned(Inputs(query, key, value), OUT_ALONE, borrowed) if out is None else out


def _unchanged(given: object) -> _Known | None:
    """What is known of a BlockMask, if all of it is what it was; in one function."""
    known = _known.get(object.__hash__(given))
    if known is None or known.of() is not given:
        return None
    block_mask: Any = given
    mod, then, lists = known.mask_mod, known.said, known.lists
    if (
        then is None
        or block_mask.mask_mod is not mod
        or block_mask.kv_num_blocks is not lists[0]
        or block_mask.kv_indices is not lists[1]
        or block_mask.full_kv_num_blocks is not lists[2]
        or block_mask.full_kv_indices is not lists[3]
    ):
        return None
    said = fingerprint(mod, _ARGUMENTS)
    # as `_are_the_same`, without the call
    if said is None or said[0] != then[0] or len(said[1]) != len(then[1]):
        return None
    for a, b in zip(said[1], then[1]):  # noqa: B905  named arguments take time
        if a is not b:
            return None
    return known if _stands(known) else None


def _stands(known: _Known) -> bool:
    """Whether nothing was written to what decided."""
    for tensor, writes, place in known.decided:
        if tensor._version != writes or tensor.data_ptr() != place:
            return False
    return not known.numbers or [s.value for s in known.numbers] == known.values


def _remembered(block_mask: Any, inner: Mask, mask: Mask) -> _Known:
    place = object.__hash__(block_mask)

    def ended(of: weakref.ref[Any]) -> None:
        if place in _known and _known[place].of is of:
            del _known[place]

    lists = _lists_of(block_mask)
    # blocks that a mask lists are read at each call
    read = () if isinstance(mask, BlockSparse) else (*lists, *mask.leaves)
    numbers = tuple(leaf for leaf in read if isinstance(leaf, Scalar))
    decided = tuple(
        (leaf, leaf._version, leaf.data_ptr())
        for leaf in read
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
    )
    of, mod, values = weakref.ref(block_mask, ended), block_mask.mask_mod, [s.value for s in numbers]
    found = _known[place] = _Known(
        of, mod, fingerprint(mod, _ARGUMENTS), inner, lists, mask, decided, numbers, values, []
    )
    return found


_lists_of = operator.attrgetter(*LISTS)


def _known_still(block_mask: Any) -> _Known | None:
    """What is known of it, found anew where it was written to or its mask_mod means something else; None where new."""
    known = _known.get(object.__hash__(block_mask))
    if known is None or known.of() is not block_mask:
        return None
    mod, before = known.mask_mod, known.inner
    if block_mask.mask_mod is not mod or not all(map(operator.is_, _lists_of(block_mask), known.lists)):  # type: ignore[union-attr]
        return None
    said = fingerprint(mod, _ARGUMENTS)
    now = before if said is not None and _are_the_same(said, known.said) else Mask.of(mod)
    if now is before or _are_the_same((now.form, now.leaves), (before.form, before.leaves)):
        if _stands(known):
            return known
        now = before
    return _remembered(block_mask, now, BlockSparse.from_block_mask(block_mask, now))


def _are_the_same(a: Fingerprint, b: Fingerprint | None) -> bool:
    """Whether both forms are equal and read the very same tensor objects."""
    return b is not None and a[0] == b[0] and len(a[1]) == len(b[1]) and all(map(operator.is_, a[1], b[1]))


def _check(block_mask: Any) -> None:
    from torch.nn.attention import flex_attention as torchs

    if not isinstance(block_mask, torchs.BlockMask):
        raise errors.BlockMaskMismatch(
            f"block_mask is a {type(block_mask).__name__}; pass torch's BlockMask, or a mask_mod to ca.attention"
        )
    if block_mask.mask_mod is getattr(torchs, "_sliced_mask_mod_error", errors):
        raise errors.BlockMaskMismatch(
            "block_mask is a part of another one, and torch removed its mask_mod, because positions changed; set "
            "part.mask_mod to a function that adds the part's first position, and set part.seq_lengths"
        )


def _is_one_block_of_any_length(block_mask: Any) -> bool:
    """What torch puts in place of no BlockMask: one block that it tests, which calls of all lengths lie in."""
    return tuple(block_mask.BLOCK_SIZE) == (1 << 30, 1 << 30) and tuple(block_mask.seq_lengths) == (1, 1)


def _check_extent(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    (batch, heads, q_len, *_), kv_len = query.shape, key.shape[2]
    lengths = (q_len, kv_len)
    if tuple(block_mask.seq_lengths) != lengths:
        raise errors.BlockMaskMismatch(
            f"block_mask was made for lengths {tuple(block_mask.seq_lengths)}, q and k have {lengths}; "
            "make it again with create_block_mask, or pass its mask_mod to ca.attention, which needs no lengths"
        )
    of_batch, of_heads, *_ = block_mask.kv_num_blocks.shape
    for name, made, given in (("batch", of_batch, batch), ("heads", of_heads, heads)):
        if made not in (1, given):
            raise errors.BlockMaskMismatch(f"block_mask is for {name} {made}, q has {given}; make it for these or 1")


def _build(block_mask: Any) -> tuple[Mask, Mask]:
    """What the mask_mod means, and the whole `BlockMask`."""
    inner = Mask.of(block_mask.mask_mod)
    listed = BlockSparse.from_block_mask(block_mask, inner)
    return inner, inner if _lists_add_nothing(inner.expr, listed.table, block_mask) else listed


def _lists_add_nothing(mask: Expr, table: Table, block_mask: Any) -> bool:
    """Whether the lists say just what the mask says: nothing visible in unlisted blocks, full blocks full.

    Bounds of the mask over each block settle most; only in those that they leave open each pair is looked at.
    """
    listed = table.tensor[:, :, :-1, :-1]
    batch, heads = listed.shape[:2]
    if (mask.deps & Dep.B and batch == 1) or (mask.deps & Dep.H and heads == 1):
        return False  # one list for all heads (batches), made from the first one's mask
    q_len, kv_len = block_mask.seq_lengths
    found = tiles(mask, q_len, kv_len, table.block, batch, heads, device=listed.device)
    is_open = (listed != TESTED) & (listed != found)
    for part, settled in settled_tiles(mask, is_open.nonzero(), q_len, kv_len, table.block, listed.device):
        if not torch.equal(settled, listed[tuple(part.unbind(1))]):
            return False
    return True
