"""Attention as a `torch.nn.Module` whose mods read its parameters by name, at each call.

    class Biased(ca.nn.Attention):
        def __init__(self, heads, length):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(heads, length))

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return score + self.bias[h, q_idx - kv_idx]

        def mask_mod(self, b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

    out = Biased(8, 4096)(q, k, v)

    layer = ca.nn.Attention(score_mod=ca.mods.alibi(slopes), mask_mod=ca.mods.causal())   # or ready mods

The tensor that is `self.bias` when the module is called is read and gets the gradient, also after FSDP,
`load_state_dict(assign=True)`, `functional_call`, `parametrize`, `to_empty` or `Module.to` put another tensor there. If
nothing changed, nothing is traced or planned again.
"""

from __future__ import annotations

from typing import Any

import torch

from .api import MaskMod, ScoreMod, attention
from .call.schedule import Schedule
from .call.sequences import Paged, Varlen
from .graph import copies
from .graph.dynamo import is_traced
from .mods.mask import Mask
from .mods.mod import Mod
from .mods.score import Score
from .mods.sink import Sink


class Attention(torch.nn.Module):
    """Attention whose mods are methods of a subclass, or arguments.

    score_mod, mask_mod: as in `ca.attention`. Without them, the methods `score_mod` and `mask_mod` of a subclass are
        used, if it has them. Tensors that a given `Score` or `Mask` captured become parameters (if they require a
        gradient) or buffers of this module: `score_mod_0`, `mask_mod_0` and so on. They move, load and train with it.
        What a plain function closes over stays where it is, as in `ca.attention`. A table that a mask made of a tensor
        (`document(offsets=)`) is as it was made after the module has moved to another device or type: a write to the
        moved offsets is not seen. Where they change, make the mask in `forward`.
    sinks: (Hq,) as in `ca.attention`; becomes the parameter (or buffer) `sinks` of this module. Without it, the
        attribute `sinks` of a subclass is used, if it has one.
    dropout_p: as in `ca.attention`, while the module is in training mode.
    scale, backend, deterministic, schedule: as in `ca.Attention`.

    Raises: what `ca.Attention` raises, here or at the call.
    """

    def __init__(
        self,
        *,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        sinks: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
        backend: str | None = None,
        deterministic: bool | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.backend, self.deterministic, self.schedule = scale, backend, deterministic, schedule
        self.dropout_p = dropout_p
        for name, given in (("score_mod", score_mod), ("mask_mod", mask_mod)):
            if given is not None:
                setattr(self, name, _Held(self, name, given) if isinstance(given, Mod) else given)
        if sinks is not None:
            Sink.of(sinks)  # refused here, not at the first call
            _own(self, "sinks", sinks)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        return_lse: bool = False,
        return_max_scores: bool = False,
        varlen: Varlen | None = None,
        paged: Paged | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """out, and what else is asked for; shapes, gradients and errors as in `ca.attention`."""
        score_mod, mask_mod, sinks = self._mods()
        return attention(
            q,
            k,
            v,
            score_mod=score_mod,
            mask_mod=mask_mod,
            sinks=sinks,
            dropout_p=self.dropout_p if self.training else 0.0,
            scale=self.scale,
            backend=self.backend,
            deterministic=self.deterministic,
            schedule=self.schedule,
            return_lse=return_lse,
            return_max_scores=return_max_scores,
            varlen=varlen,
            paged=paged,
        )

    @property
    def current_mask(self) -> Mask | None:
        """The mask of the tensors that the module holds now, None where all is seen."""
        _, found, _ = self._mods()
        return None if found is None else Mask.of(found)

    def _mods(self) -> list[Any]:
        """Score mod, mask and sinks as the module has them now, None where it has none."""
        mods: list[Any] = []
        if is_traced():
            mods = [getattr(self, name, None) for name in _NAMES]
            return [mod.now(self) if isinstance(mod, _Held) else mod for mod in mods]
        kind, own = self.__class__, self.__dict__
        is_plain = kind.__getattr__ is _GETATTR and kind.__getattribute__ is _GETATTRIBUTE
        parameters, buffers, modules = own["_parameters"], own["_buffers"], own["_modules"]
        for name in _NAMES:
            found = own.get(name)
            if found is None and (
                # torch takes 1 µs to say that there is no such attribute, which is sure otherwise
                getattr(kind, name, None) is not None
                or not is_plain
                or name in parameters
                or name in buffers
                or name in modules
            ):
                found = getattr(self, name, None)
            mods.append(found.now(self) if found.__class__ is _Held else found)
        return mods

    def extra_repr(self) -> str:
        """The mods and the options that are not left at their default."""
        options = {name: getattr(self, name) for name in ("scale", "backend", "deterministic", "schedule")}
        mods = {name: getattr(self, name, None) for name in ("score_mod", "mask_mod")}
        sinks: Any = getattr(self, "sinks", None)
        mods["sinks"] = None if sinks is None else tuple(sinks.shape)
        return ", ".join(f"{name}={value!r}" for name, value in (mods | options).items() if value is not None)


_NAMES = ("score_mod", "mask_mod", "sinks")
_GETATTR: Any = torch.nn.Module.__getattr__
_GETATTRIBUTE: Any = object.__getattribute__


class _Held:
    """A ready mod whose tensors a module owns: made again of what the module holds by their names."""

    def __init__(self, owner: torch.nn.Module, name: str, mod: Mod) -> None:
        self.kind = Score if isinstance(mod, Score) else Mask
        self.form, self.name = mod.form, mod.name
        self.sources = tuple(copies.sources_of(mod.leaves).values())
        self.leaves: list[Any] = []  # the name of a tensor, or a ca.scalar
        known: dict[int, str] = {}
        for leaf in mod.leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in known:
                known[id(leaf)] = place = f"{name}_{len(known)}"
                _own(owner, place, leaf)
            self.leaves.append(known.get(id(leaf), leaf))

    def now(self, owner: torch.nn.Module) -> Mod:
        """The mod of the tensors that the module holds now. Raises: `CapturedTensorChanged`, see `graph.copies`."""
        if not is_traced():  # compiled code looks at the tables of each call
            for sources in self.sources:
                sources.refuse_outdated()
        leaves = tuple([getattr(owner, leaf) if isinstance(leaf, str) else leaf for leaf in self.leaves])
        return self.kind.formed(self.form, leaves, self.name)

    def __repr__(self) -> str:
        return self.name


def _own(owner: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, torch.nn.Parameter) or not (tensor.requires_grad and tensor.is_leaf):
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        (owner.register_parameter if is_parameter else owner.register_buffer)(name, tensor)  # type: ignore[arg-type]
    else:
        owner.register_parameter(name, torch.nn.Parameter(tensor))


__all__ = ["Attention"]
