"""Every combination of a mod, a layout, a kind of mask, heads and a pass: each is right, or refused by name.

    for cell in cells():
        print(cell, outcome(cell, "streaming"))

`docs/combinations.md` is the table of all outcomes. A cell that is neither right nor refused raises.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable
from typing import Any, Literal

import torch

from composattn import BlockSparse, ComposattnError, Mask, QuantizedInputs, Score, attention, mods, quantize, scalar
from composattn.testing import Case, check, make_case, make_paged_case, make_varlen_case, run

OK = "right"
Q_LEN, KV_LEN, DIM = 150, 200, 64
Q_LENS, KV_LENS = (150, 0, 37), (200, 5, 37)
PAGED_KV_LENS, PAGED_Q_LEN, PAGE_SIZE = (200, 0, 37), 5, 32


@dataclasses.dataclass
class Shapes:
    """What mods and masks are made for."""

    generator: torch.Generator
    device: str | torch.device
    heads: int
    q_len: int
    entries: int

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)


def _relative_bias(shapes: Shapes) -> Score:
    return mods.relative_bias(shapes.normal(shapes.heads, 2 * 128 + 1).requires_grad_())


def _own_function(shapes: Shapes) -> Score:
    rows = shapes.normal(3, Q_LEN)[: shapes.entries]
    return Score.of(lambda score, b, h, q, kv: score + rows[b, q] * torch.cos((kv % 7) * 0.5) - 0.1 * h, "own function")


def _part_of_a_call(shapes: Shapes) -> dict[str, Any]:
    """The second half of the heads, from a query that a number says and a key that a tensor says."""
    begin = torch.tensor(9, device=shapes.device)
    return {"score_mod": mods.alibi(2 * shapes.heads).shifted(h=shapes.heads, q=scalar(30), kv=begin)}


MODS: dict[str, Callable[[Shapes], dict[str, Any]]] = {
    "none": lambda shapes: {},
    "alibi": lambda shapes: {"score_mod": mods.alibi(shapes.heads)},
    "softcap": lambda shapes: {"score_mod": mods.softcap(20.0)},
    "learned relative bias": lambda shapes: {"score_mod": _relative_bias(shapes)},
    "own function": lambda shapes: {"score_mod": _own_function(shapes)},
    "dropout": lambda shapes: {"dropout": (0.2, 7)},
    "learned sinks": lambda shapes: {"sinks": 2 * shapes.normal(shapes.heads).requires_grad_()},
    "offsets": _part_of_a_call,
    "largest scores": lambda shapes: {},
    "keys of 8 bits": lambda shapes: {},
    "wide heads": lambda shapes: {},
}
"""What a call is given besides its mask."""

LARGEST = "largest scores"
EIGHT_BITS = "keys of 8 bits"
SHIFTED = "offsets"

DIMS = {"wide heads": (512, 320)}
"""D and Dv, where they are not both `DIM`."""


def _blocks(shapes: Shapes) -> Mask:
    grid = (1, 1, -(-shapes.q_len // 32), -(-KV_LEN // 32))
    kinds = torch.randint(0, 3, grid, generator=shapes.generator).to(shapes.device, torch.int8)
    return BlockSparse(kinds, 32, partial=mods.causal("bottom_right"))


MASKS: dict[str, Callable[[Shapes], Mask]] = {
    "band": lambda shapes: mods.causal("bottom_right") & mods.sliding_window(90, align="bottom_right"),
    "tiles": lambda shapes: mods.neighborhood((16, 16), (9, 5)),
    "block-sparse": _blocks,
}

LAYOUTS: tuple[Literal["dense", "varlen", "paged"], ...] = ("dense", "varlen", "paged")
HEADS = {"MHA": (2, 2), "GQA": (4, 2)}
PASSES: tuple[Literal["forward", "backward", "deterministic"], ...] = ("forward", "backward", "deterministic")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination, by the names of its parts."""

    mod: str
    layout: Literal["dense", "varlen", "paged"]
    mask: str
    heads: str
    way: Literal["forward", "backward", "deterministic"]

    def __str__(self) -> str:
        return ", ".join(dataclasses.astuple(self))

    def case(self, device: str | torch.device = "cpu") -> Case:
        """The cell's call, of bf16 tensors; the same in every run."""
        seed = zlib.crc32(str(self).encode())
        generator = torch.Generator().manual_seed(seed)
        heads, kv_heads = HEADS[self.heads]
        q_len = PAGED_Q_LEN if self.layout == "paged" else Q_LEN
        shapes = Shapes(generator, device, heads, q_len, 1 if self.layout == "dense" else len(Q_LENS))
        given = MODS[self.mod](shapes) | {"mask_mod": MASKS[self.mask](shapes)}
        if self.mod == SHIFTED:
            given["mask_mod"] = given["mask_mod"].shifted(q=scalar(30), kv=torch.tensor(9, device=device))
        dim, v_dim = DIMS.get(self.mod, (DIM, DIM))
        call: dict[str, Any] = {
            "heads": heads,
            "kv_heads": kv_heads,
            "dim": dim,
            "v_dim": v_dim,
            "dtype": torch.bfloat16,
            "device": device,
        }
        if self.layout == "dense":
            case = make_case(seed, q_len=Q_LEN, kv_len=KV_LEN, batch=1, **call)
        elif self.layout == "varlen":
            case = make_varlen_case(seed, Q_LENS, KV_LENS, **call)
        else:
            case = make_paged_case(seed, PAGED_KV_LENS, page_size=PAGE_SIZE, q_len=PAGED_Q_LEN, **call)
            dout = torch.ones(*case.q.shape[:-1], v_dim, dtype=case.q.dtype, device=device)
            case = dataclasses.replace(case, dout=dout)
        case = dataclasses.replace(case, **given)
        if self.mod == EIGHT_BITS:  # numbers that 8 bits and a scale of their row hold, so that quantised they stay
            _, k, v = _quantised(case.q, case.k, case.v)
            case = dataclasses.replace(case, k=k.dequantised(), v=v.dequantised())
        return case.without_gradients() if self.way == "forward" else case


def cells() -> list[Cell]:
    """All of them."""
    parts: Any = (MODS, LAYOUTS, MASKS, HEADS, PASSES)
    return [Cell(*names) for names in itertools.product(*parts)]


def outcome(cell: Cell, backend: str, device: str | torch.device = "cpu") -> str:
    """`OK`, or the refusal: its name and what it says.

    Raises: AssertionError where the result is wrong, or differs between two deterministic runs; what is no refusal.
    """
    case = cell.case(device)
    ways = {LARGEST: _with_largest, EIGHT_BITS: _with_keys_of_8_bits}
    attend = functools.partial(ways.get(cell.mod, attention), backend=backend)
    if cell.way == "deterministic":
        attend = functools.partial(attend, deterministic=True)
    try:
        check(attend, case)
        if cell.way == "deterministic":
            first, second = run(attend, case), run(attend, case)
            different = [name for name in first if not torch.equal(first[name], second[name])]
            assert not different, f"{cell}: {', '.join(different)} differ between two runs"
    except ComposattnError as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return OK


def _quantised(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> QuantizedInputs:
    return quantize(q, k, v, scale="token", hadamard=False, center=False)


def _with_keys_of_8_bits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """`attention` to k and v in 8 bits, which get their gradients straight through."""
    made = _quantised(q, k, v)
    return attention(q, made.k, made.v, **options)


def _with_largest(q: torch.Tensor, *tensors: torch.Tensor, backend: str, **options: Any) -> Any:
    """`attention`, with the largest scores asked for beside its results, and held to those in fp64."""
    out, lse, found = attention(q, *tensors, backend=backend, **options, return_max_scores=True)
    exact = (t.detach().double() for t in (q, *tensors))
    with torch.no_grad():
        *_, wanted = attention(*exact, backend="reference", **options, return_max_scores=True)
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-4, atol=1e-4)
    return out, lse
