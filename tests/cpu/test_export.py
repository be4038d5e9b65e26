"""Programs that torch.export saves carry their mods: another process computes what was exported."""

from __future__ import annotations

import io
import itertools
import operator
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.errors import UnsupportedOperation
from composattn.mods import alibi, causal, document, sliding_window, softcap

LENGTH = 48


class Planned(torch.nn.Module):
    """An Attention made once, which reads a buffer of the module and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.1, 0.7]))
        self.register_buffer("ids", torch.arange(LENGTH) // 9)
        self.attention = ca.Attention(
            mask_mod=causal() & document(self.ids), score_mod=alibi(self.slopes) >> softcap(3.0), scale=0.3
        )

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return self.attention(q, k, v)


class MadeInside(Planned):
    """`Planned` with the mods made at each call."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return ca.attention(
            q, k, v, mask_mod=causal() & document(self.ids), score_mod=alibi(self.slopes) >> softcap(3.0), scale=0.3
        )


class ByName(ca.nn.Attention):
    """An `nn.Attention` with mods as methods."""

    def __init__(self) -> None:
        super().__init__(scale=0.3)
        self.slopes = torch.nn.Parameter(torch.tensor([0.1, 0.7]))
        self.register_buffer("ids", torch.arange(LENGTH) // 9)

    def score_mod(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return 3.0 * torch.tanh((score + self.slopes[h] * (kv - q)) / 3.0)

    def mask_mod(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (self.ids[q] == self.ids[kv])


def draw() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(1, 2, LENGTH, 8, generator=generator) for _ in range(3))


LOADER = """
import pathlib, sys, torch, composattn as ca
from composattn.mods import sliding_window
others = [ca.Attention(mask_mod=sliding_window((2, 2))) for _ in range(50)]  # whose numbers a saved one may have had
folder = pathlib.Path(sys.argv[1])
inputs = torch.load(folder / "inputs.pt")
for saved in folder.glob("*.pt2"):
    torch.save(torch.export.load(saved).module()(*inputs), saved.with_suffix(".out"))
"""


def test_saved_programs_compute_the_same_in_another_process(tmp_path: Path) -> None:
    # one process for all: its start is three seconds
    inputs, wanted = draw(), {}
    torch.save(inputs, tmp_path / "inputs.pt")
    for kind, strict in itertools.product((Planned, MadeInside, ByName), (False, True)):
        module, saved = kind(), tmp_path / f"{kind.__name__}-{strict}.pt2"
        wanted[saved] = module(*inputs)
        program = torch.export.export(module, inputs, strict=strict)
        torch.testing.assert_close(program.module()(*inputs), wanted[saved])
        torch.export.save(program, saved)
    subprocess.run([sys.executable, "-c", LOADER, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
    for saved, out in wanted.items():
        torch.testing.assert_close(torch.load(saved.with_suffix(".out")), out, msg=saved.name)


def test_a_loaded_program_does_not_need_its_attention_and_ignores_others() -> None:
    module, inputs = Planned(), draw()
    wanted, saved = module(*inputs), io.BytesIO()
    torch.export.save(torch.export.export(module, inputs), saved)
    del module
    others = [ca.Attention(mask_mod=sliding_window(n)) for n in range(1, 20)]
    saved.seek(0)
    torch.testing.assert_close(torch.export.load(saved).module()(*inputs), wanted)
    assert others


COMPILED_LOADER = """
import sys, torch, composattn
inputs = torch.load(sys.argv[2])
torch.save(torch._inductor.aoti_load_package(sys.argv[1])(*inputs), sys.argv[3])
"""


@pytest.mark.slow  # 12 to 36 s each: a C++ compiler
@pytest.mark.parametrize("kind", [Planned, MadeInside, ByName])
def test_a_program_compiled_ahead_of_time_computes_the_same_in_another_process(
    kind: type[torch.nn.Module], tmp_path: Path
) -> None:
    module, inputs = kind(), draw()
    with torch.no_grad():
        wanted = module(*inputs)
        program = torch.export.export(module, inputs)
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "program.pt2"))
    torch.save(inputs, tmp_path / "inputs.pt")
    arguments = [str(tmp_path / name) for name in ("program.pt2", "inputs.pt", "out.pt")]
    subprocess.run([sys.executable, "-c", COMPILED_LOADER, *arguments], check=True, cwd=Path(__file__).parents[2])
    torch.testing.assert_close(torch.load(tmp_path / "out.pt"), wanted)


def test_a_run_time_number_of_this_process_is_refused_by_name() -> None:
    class Capped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = ca.Attention(score_mod=softcap(ca.scalar(2.0)))

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return self.attention(q, k, v)

    with pytest.raises(Exception, match="0-d tensor"):
        torch.export.export(Capped(), draw())


class OfConstants(torch.nn.Module):
    """Attends from queries that are no input, parameter or buffer."""

    def __init__(self, is_held: bool) -> None:
        super().__init__()
        self.given = [torch.randn(1, 2, LENGTH, 16) for _ in range(3)]
        self.attention = ca.Attention(mask_mod=causal()) if is_held else None

    def forward(self, x: torch.Tensor) -> Any:
        if self.attention is not None:
            return x + self.attention(*self.given)
        return x + ca.attention(*self.given, mask_mod=causal())  # type: ignore[arg-type]


@pytest.mark.parametrize("is_held", [True, False], ids=["ca.Attention", "ca.attention"])
def test_attention_of_constants_is_an_operator_of_what_export_runs_as_it_stands(is_held: bool) -> None:
    module, x = OfConstants(is_held), torch.zeros(1, 2, LENGTH, 16)
    program = torch.export.export(module, (x,), strict=False)
    assert any("composattn" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), module(x))


class OfLength(torch.nn.Module):
    """A mask of the length, which torch.export keeps symbolic."""

    def __init__(self, compare: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.compare = compare

    def forward(self, x: torch.Tensor) -> Any:
        length, compare = x.shape[2], self.compare
        return ca.attention(x, x, x, mask_mod=lambda b, h, q, kv: compare(q - kv, length - 1) | (q == kv))


COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.ge)


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("turned", [False, True])
def test_a_symbolic_length_in_a_mod_is_read_by_dynamo_and_else_refused(compare: Any, turned: bool) -> None:
    module = OfLength((lambda x, n: compare(n, x)) if turned else compare)
    x = torch.randn(1, 2, LENGTH, 16)
    sizes = {"x": {2: torch.export.Dim("length", min=2, max=64)}}
    with pytest.raises(UnsupportedOperation, match="strict=True"):
        torch.export.export(module, (x,), dynamic_shapes=sizes, strict=False)
    program = torch.export.export(module, (x,), dynamic_shapes=sizes, strict=True).module()
    for given in (x, x[:, :, :21]):
        torch.testing.assert_close(program(given), module(given))


# --- the operator called directly ---------------------------------------------------------------------------------

BIAS = torch.randn(2, LENGTH)
SAID = ca.Attention(
    score_mod=lambda s, b, h, q, kv: s + BIAS[h, q - kv], mask_mod=causal(), sinks=torch.zeros(2), scale=0.3
).serialized
SCORE, MASK, SINK, KEEP, VALUES, OPTIONS = SAID.form.split("\n")


def said(text: str, tensors: Any = SAID.tensors, plan: int = -1, numbers: tuple[int, ...] = ()) -> torch.Tensor:
    q, k, v = draw()
    found = torch.ops.composattn.attend(q, k, v, list(tensors), [None] * 6, [-1, -1, 0, *numbers], text, plan, False)
    return found[0]  # type: ignore[no-any-return]


WRONG_CALLS: dict[str, dict[str, Any]] = {
    "no tensors": {"tensors": ()},
    "a tensor too many": {"tensors": (*SAID.tensors, BIAS)},
    "a tensor too few": {"tensors": SAID.tensors[:1]},
    "a number too many": {"numbers": (1,)},
    "tensors in another order": {"tensors": SAID.tensors[::-1]},
    "no text": {"text": ""},
    "a word": {"text": "x"},
    "a call of Python": {"text": "\n".join(["__import__('os').getcwd()", MASK, SINK, KEEP, VALUES, OPTIONS])},
    "a text cut short": {"text": SAID.form[:90]},
    "one line": {"text": SCORE},
    "no dropout": {"text": "\n".join([SCORE, MASK, SINK, VALUES, OPTIONS])},
    "no options": {"text": "\n".join([SCORE, MASK, SINK, KEEP, VALUES, "-"])},
    "an unknown operation": {"text": SAID.form.replace("op:add", "op:nonsense")},
    "a step that is not there": {"text": SAID.form.replace("'x1'", "'x9'")},
    "a tensor that is not there": {"text": SAID.form.replace("'t0'", "'t7'")},
    "a tensor again that comes later": {"text": SAID.form.replace("'tt'", "'1t'")},
    "a tensor again that was never there": {"text": SAID.form.replace("'tt'", "'t7'")},
    "mods in another order": {"text": "\n".join([MASK, SCORE, SINK, KEEP, VALUES, OPTIONS])},
    "a mask for a sink": {"text": "\n".join([SCORE, "-", MASK, SINK, VALUES, OPTIONS])},
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_direct_call_with_another_text_or_other_tensors_is_refused_by_name(name: str) -> None:
    with pytest.raises(ca.errors.UnreadableProgram, match=r"ca\.attention|lines are score mod"):
        said(**{"text": SAID.form, **WRONG_CALLS[name]})


def test_a_direct_call_with_what_its_text_speaks_of_computes_it() -> None:
    q, k, v = draw()
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    scores = 0.3 * q @ k.mT + BIAS[:, (i - j).clamp(min=0)]
    scores = torch.cat((scores.masked_fill(j > i, -torch.inf), torch.zeros(1, 2, LENGTH, 1)), -1)
    torch.testing.assert_close(said(SAID.form), scores.softmax(-1)[..., :-1] @ v)


def test_a_living_plan_is_given_as_many_tensors_as_it_reads() -> None:
    held = ca.Attention(score_mod=lambda s, b, h, q, kv: s + BIAS[h, q])
    with pytest.raises(ca.errors.UnreadableProgram, match="1 captured tensors"):
        said(held.serialized.form, (), held.number)


def test_a_tensor_that_mods_read_in_many_places_is_one_input() -> None:
    ids, learned = torch.arange(LENGTH) // 5, torch.randn(LENGTH, requires_grad=True)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (ids[q] == ids[kv]) & (q >= kv)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        blocks = ca.BlockSparse(torch.ones(1, 1, 2, 2, dtype=torch.int8), 32, partial=mask)
        return ca.attention(
            q, k, v, mask_mod=blocks | ca.mask(mask), score_mod=lambda s, b, h, i, j: s + learned[i] * learned[j]
        )

    counts: list[int] = []

    def counting(module: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes = [node for node in module.graph.nodes if "composattn" in str(node.target)]
        counts.extend(len(node.args[3]) for node in nodes)
        return module

    inputs = draw()
    torch._dynamo.reset()
    found = torch.compile(layer, fullgraph=True, backend=counting)(*inputs)
    (ours,) = torch.autograd.grad(found.square().sum(), learned)
    (wanted,) = torch.autograd.grad(layer(*inputs).square().sum(), learned)
    assert counts == [3]  # the kinds of blocks, ids and what is learned
    torch.testing.assert_close(found, layer(*inputs))
    torch.testing.assert_close(ours, wanted)
