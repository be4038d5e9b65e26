"""A buffer that a `ca.nn.Attention` was given and another module holds: a write is read or refused, whatever moved."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.mods import bias, causal, document, global_tokens

LENGTH = 20
# The buffer as it was, as it is written to, and what is made of it.
Kind = tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], dict[str, Any]]]
ROWS = torch.arange(LENGTH)
KINDS: dict[str, Kind] = {
    "biases": (torch.zeros(1, LENGTH, LENGTH), -(ROWS - ROWS[:, None])[None] / 3.0, lambda t: {"score_mod": bias(t)}),
    "ids": (ROWS // 5, ROWS // 3, lambda t: {"mask_mod": causal() & document(t)}),
    "sinks": (torch.zeros(1), torch.ones(1), lambda t: {"sinks": t}),
    "offsets": (torch.tensor([0, 7, 20]), torch.tensor([0, 11, 20]), lambda t: {"mask_mod": document(offsets=t)}),
    "tokens": (torch.tensor([0, 7]), torch.tensor([0, 11]), lambda t: {"mask_mod": global_tokens(t)}),
}
TABLES = ("offsets", "tokens")  # of which masks make tables: a write is refused


class Holder(torch.nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("buffer", buffer)


class Model(torch.nn.Module):
    holder: Any
    attend: ca.nn.Attention

    def forward(self, x: torch.Tensor) -> Any:
        return self.attend(x, x, x)


class OfItsOwn(Model):
    def __init__(self, kind: str) -> None:
        super().__init__()
        before, _, made = KINDS[kind]
        self.register_buffer("buffer", before.clone())
        self.attend = ca.nn.Attention(**made(self.buffer))

    @property
    def holder(self) -> Any:  # type: ignore[override]
        return self


class OfOneThatMovesBefore(Model):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.holder = Holder(KINDS[kind][0].clone())
        self.attend = ca.nn.Attention(**KINDS[kind][2](self.holder.buffer))


class OfOneThatMovesAfter(Model):
    """A model made after the module whose buffer it shares: known once both move."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        buffer = KINDS[kind][0].clone()
        self.attend = ca.nn.Attention(**KINDS[kind][2](buffer))
        self.holder = Holder(buffer)


class SharedByTwo(OfItsOwn):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        made = KINDS[kind][2](self.buffer)
        self.first, self.attend = ca.nn.Attention(**made), ca.nn.Attention(**made)


MODELS = (OfItsOwn, OfOneThatMovesBefore, OfOneThatMovesAfter, SharedByTwo)


def to_a_device(module: torch.nn.Module) -> None:
    """What `.cuda()` does to each buffer of a CPU."""
    module._apply(torch.clone)


def to_empty(module: torch.nn.Module) -> None:
    state = copy.deepcopy(module.state_dict())
    module.to_empty(device="cpu")
    module.load_state_dict(state)


MOVES: dict[str, Callable[[Any], Any]] = {
    "a device": to_a_device,
    "a device, twice": lambda m: (to_a_device(m), to_a_device(m)),
    "a type and back": lambda m: (m.double(), m.float()),
    "empty memory": to_empty,
    "assigned": lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
    "shared memory": lambda m: m.share_memory(),
    "the module alone": lambda m: to_a_device(m.attend),
    "the module before the rest": lambda m: (to_a_device(m.attend), to_a_device(m)),
    "the module alone to another type": lambda m: m.attend.double(),
    "the module to another type, then the rest": lambda m: (m.attend.bfloat16(), m.float()),
}


def same(module: Any) -> Any:
    return module


def compiled(module: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend="eager")


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


CASES = [
    pytest.param(kind, model, move, duplicate, entry, id=f"{kind}-{model.__name__}-{move}-{how}".replace(" ", "_"))
    for kind in KINDS
    for model in MODELS
    for move in MOVES
    for how, duplicate, entry in (
        ("as_it_is", same, same),
        ("copied", copy.deepcopy, same),
        ("pickled", pickled, same),
        ("compiled", same, compiled),
    )
    if (how == "as_it_is" or move == "a device") and not (model is OfOneThatMovesAfter and "module" in move)
]


@pytest.mark.parametrize("kind,model,move,duplicate,entry", CASES)
def test_a_write_after_a_move_is_read_or_refused(
    kind: str, model: type[Any], move: str, duplicate: Any, entry: Any, generator: torch.Generator
) -> None:
    of = duplicate(model(kind))
    attend, x = entry(of), torch.randn(1, 1, LENGTH, 8, generator=generator)
    before = attend(x)
    MOVES[move](of)
    torch.testing.assert_close(attend(x), before)
    of.holder.buffer.copy_(KINDS[kind][1])
    # a copy of another type is a copy
    if kind in TABLES or (KINDS[kind][0].is_floating_point() and move == "the module alone to another type"):
        with pytest.raises(errors.CapturedTensorChanged, match="were written to"):
            attend(x)
    else:
        torch.testing.assert_close(attend(x), ca.attention(x, x, x, **KINDS[kind][2](of.holder.buffer)))


def test_what_is_set_in_the_module_itself_is_read(generator: torch.Generator) -> None:
    of, x = OfItsOwn("ids"), torch.randn(1, 1, LENGTH, 8, generator=generator)
    wanted = ca.attention(x, x, x, mask_mod=causal() & document(KINDS["ids"][1]))
    found = torch.func.functional_call(of.attend, {"mask_mod_0": KINDS["ids"][1].clone()}, (x, x, x))
    torch.testing.assert_close(found, wanted)
    of.attend.mask_mod_0 = KINDS["ids"][1].clone()
    torch.testing.assert_close(of(x), wanted)


def test_modules_of_one_mask_may_lie_on_several_devices(generator: torch.Generator) -> None:
    """Here types stand for devices: each module's buffer is its own where they move one by one."""
    of, x = SharedByTwo("biases"), torch.randn(1, 1, LENGTH, 8, generator=generator)
    wanted = of(x)
    of.first.bfloat16(), of.attend.double()
    assert [of.first.score_mod_0.dtype, of.attend.score_mod_0.dtype] == [torch.bfloat16, torch.float64]
    assert of.buffer.dtype is torch.float32
    torch.testing.assert_close(of(x), wanted)
    torch.testing.assert_close(of.first(x, x, x), wanted)


def test_nothing_keeps_a_model_that_ended() -> None:
    class Marked(torch.nn.Module):
        ended = 0

        def __del__(self) -> None:
            Marked.ended += 1

    of = OfItsOwn("offsets")
    of.mark = Marked()
    to_a_device(of)
    del of
    gc.collect()
    assert Marked.ended == 1
