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
from .call.checks import OF_MODULES, refuse_arguments
from .call.schedule import Schedule
from .call.sequences import Paged, Varlen
from .graph import copies
from .graph.buffers import Place, held_at, place_of
from .graph.dynamo import is_traced
from .mods.mask import Mask
from .mods.mod import Mod, title
from .mods.score import Score
from .mods.sink import Sink


class Attention(torch.nn.Module):
    """Attention whose mods are methods of a subclass, or arguments.

    score_mod, mask_mod: as in `ca.attention`. Without them, the methods `score_mod` and `mask_mod` of a subclass are
        used, if it has them. Tensors that a given `Score` or `Mask` captured become parameters (if they require a
        gradient) or buffers of this module: `score_mod_0`, `mask_mod_0` and so on. They move, load and train with it.
        One that is a buffer of another module too, as of the one in whose `__init__` this is made, stays one with that
        buffer: after both have moved, that module's is read. What a plain function closes over stays where it is, as
        in `ca.attention`.
    sinks: (Hq,) as in `ca.attention`; becomes the parameter (or buffer) `sinks` of this module. Without it, the
        attribute `sinks` of a subclass is used, if it has one.
    dropout_p: as in `ca.attention`, while the module is in training mode.
    scale, backend, deterministic, schedule: as in `ca.Attention`.

    Raises: what `ca.Attention` raises, here or at the call.
    """

    def __init__(
        self,
        *surplus: Any,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        sinks: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
        backend: str | None = None,
        deterministic: bool | None = None,
        schedule: Schedule | None = None,
        **unknown: Any,
    ) -> None:
        refuse_arguments(surplus, unknown, OF_MODULES)
        super().__init__()
        self.scale, self.backend, self.deterministic, self.schedule = scale, backend, deterministic, schedule
        self.dropout_p = dropout_p
        self._shared: dict[str, _Shared] = {}  # buffers of this module that are another one's too, by their names here
        for name, given in (("score_mod", score_mod), ("mask_mod", mask_mod)):
            if given is not None:
                setattr(self, name, _Held(self, name, given) if isinstance(given, Mod) else given)
        if sinks is not None:
            Sink.of(sinks)  # refused here, not at the first call
            _own(self, "sinks", sinks)
        self._look_for_places()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *surplus: Any,
        return_lse: bool = False,
        return_max_scores: bool = False,
        varlen: Varlen | None = None,
        paged: Paged | None = None,
        **unknown: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """out, and what else is asked for; shapes, gradients and errors as in `ca.attention`."""
        refuse_arguments(surplus, unknown, OF_MODULES)
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

    def _traced_mods(self) -> list[Any]:
        mods = [getattr(self, name, None) for name in _NAMES]
        mods = [mod.now(self) if isinstance(mod, _Held) else mod for mod in mods]
        return self._with_sinks_of_another(mods) if self._shared else mods

    def _mods(self) -> list[Any]:
        """Score mod, mask and sinks as the module has them now, None where it has none."""
        mods: list[Any] = []
        if is_traced():
            return self._traced_mods()
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
        return self._with_sinks_of_another(mods) if own["_shared"] else mods

    def _with_sinks_of_another(self, mods: list[Any]) -> list[Any]:
        *of_scores, sinks = mods
        return [*of_scores, self._shared["sinks"].one_of(sinks) if "sinks" in self._shared else sinks]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves the module; torch calls it of each, first of those inside of others."""
        self._look_for_places()  # another module may have made a buffer of a tensor since
        for name, shared in self._shared.items():
            self._buffers[name] = shared.one_of(self._buffers[name])
        moved = super()._apply(fn, recurse)
        self._follow_tables()
        for name, shared in self._shared.items():
            self._buffers[name] = shared.after_a_move(self._buffers[name])
        return moved

    def _load_from_state_dict(self, *args: Any, **named: Any) -> None:
        self._look_for_places()  # as other tensors may be assigned
        super()._load_from_state_dict(*args, **named)
        self._follow_tables()

    def _follow_tables(self) -> None:
        """Others stand where those of the mods did, and hold the same."""
        for mod in self._held():
            copies.follow(mod.own(self), mod.sources)

    def _held(self) -> list[_Held]:
        return [mod for mod in map(self.__dict__.get, _NAMES) if isinstance(mod, _Held)]

    def _look_for_places(self) -> None:
        """Where other modules hold as a buffer what this one was given, or what its tables were made of."""
        for name, tensor in self._buffers.items():
            if name not in self._shared and tensor is not None and _is_given(self, name):
                place = place_of(tensor, _is_anothers)
                if place is not None:
                    self._shared[name] = _Shared(tensor, place)
        for mod in self._held():
            for sources in mod.sources.values():
                places = zip(sources.places, sources.tensors, strict=True)
                sources.places = tuple([place or place_of(t, _is_anothers) for place, t in places])

    def extra_repr(self) -> str:
        """The mods and the options that are not left at their default."""
        options = {name: getattr(self, name) for name in ("scale", "backend", "deterministic", "schedule")}
        said = {}
        for name in ("score_mod", "mask_mod"):
            mod = getattr(self, name, None)
            if mod is not None:
                said[name] = mod.name if isinstance(mod, _Held) else title(mod)
        sinks: Any = getattr(self, "sinks", None)
        if sinks is not None:
            said["sinks"] = str(tuple(sinks.shape))
        said |= {name: repr(value) for name, value in options.items() if value is not None}
        return ", ".join(f"{name}={value}" for name, value in said.items())


_NAMES = ("score_mod", "mask_mod", "sinks")
_GETATTR: Any = torch.nn.Module.__getattr__
_GETATTRIBUTE: Any = object.__getattribute__


class _Held:
    """A ready mod whose tensors a module owns: made again of what the module holds by their names."""

    def __init__(self, owner: Attention, name: str, mod: Mod) -> None:
        self.kind = Score if isinstance(mod, Score) else Mask
        self.form, self.name = mod.form, mod.name
        self.sources = copies.sources_of(mod.leaves)
        self.leaves: list[Any] = []  # the name of a tensor, or a ca.scalar
        known: dict[int, str] = {}
        for leaf in mod.leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in known:
                known[id(leaf)] = place = f"{name}_{len(known)}"
                _own(owner, place, leaf)
            self.leaves.append(known.get(id(leaf), leaf))

    def own(self, owner: Attention) -> tuple[Any, ...]:
        """The leaves, by what the module owns."""
        return tuple([getattr(owner, leaf) if isinstance(leaf, str) else leaf for leaf in self.leaves])

    def now(self, owner: Attention) -> Mod:
        """The mod of the tensors that the module holds now. Raises: `CapturedTensorChanged`, see `graph.copies`."""
        if not is_traced():  # compiled code looks at the tables of each call
            for sources in self.sources.values():
                sources.refuse_outdated()
        leaves, shared = self.own(owner), owner._shared
        if shared:
            leaves = tuple(
                [
                    shared[leaf].one_of(tensor) if isinstance(leaf, str) and leaf in shared else tensor
                    for leaf, tensor in zip(self.leaves, leaves, strict=True)
                ]
            )
        return self.kind.formed(self.form, leaves, self.name)

    def __repr__(self) -> str:
        return self.name


class _Shared:
    """A tensor that is a buffer of a `ca.nn.Attention` and of another module, which torch moves apart."""

    def __init__(self, tensor: torch.Tensor, place: Place) -> None:
        self.tensor, self.place = tensor, place

    def one_of(self, own: Any) -> Any:
        """The tensor that stands for both modules now: the other module's if it put another one there."""
        theirs = held_at(self.place, own)
        return own if own is None or theirs is None or theirs is self.tensor else theirs

    def after_a_move(self, own: Any) -> Any:
        """What the owner holds from now on: a copy only where the other module's has another type or device."""
        theirs = held_at(self.place, own)
        if own is None or theirs is None or theirs is own:
            return own
        self.tensor = theirs
        if (theirs.dtype, theirs.device, theirs.shape) == (own.dtype, own.device, own.shape):
            return theirs
        copies.follow([own], {0: copies.Sources("buffers", (theirs,), places=(self.place,))})
        return own


def _is_given(module: torch.nn.Module, name: str) -> bool:
    """Whether a `ca.nn.Attention` owns the tensor of this name because an argument read it."""
    kinds, _, number = name.rpartition("_")
    return isinstance(module, Attention) and (name == "sinks" or (kinds in _NAMES and number.isdigit()))


def _is_anothers(module: torch.nn.Module, name: str) -> bool:
    return not _is_given(module, name)


def _own(owner: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, torch.nn.Parameter) or not (tensor.requires_grad and tensor.is_leaf):
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        (owner.register_parameter if is_parameter else owner.register_buffer)(name, tensor)  # type: ignore[arg-type]
    else:
        owner.register_parameter(name, torch.nn.Parameter(tensor))


__all__ = ["Attention"]
