"""Every form and every refusal of `test_tracing` in code that torch compiles: as eager code says it, word by word."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import composattn as ca
from composattn import errors
from composattn.dispatch.serialized import parse
from composattn.graph import torch_functions
from composattn.graph.dynamo_versions import is_known
from composattn.graph.form import graphs_of
from tests.cpu.test_op_semantics import FLOATS, INTEGERS, score_mod
from tests.cpu.test_tracing import MASK_REFUSED, MASKS, REFUSED, SCORES

pytestmark = pytest.mark.skipif(not is_known(), reason="refused as a whole: tests/cpu/test_versions_of_torch.py")

PAGES = Path(__file__).parents[2] / "docs"
TORCH, SEARCHES = PAGES / "torch.md", PAGES / "searches.md"
Q = torch.randn(2, 4, 12, 8, generator=torch.Generator().manual_seed(5))
Call = Callable[[torch.Tensor], Any]


class Module(torch.nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(x)


def compiled(call: Call, backend: Any = "eager") -> Call:
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend=backend)


def exported(call: Call, strict: bool) -> Call:
    return torch.export.export(Module(call), (Q,), strict=strict).module()


READINGS: dict[str, Callable[..., Call]] = {
    "compiled": compiled,
    "below a checkpoint": lambda call, *how: compiled(lambda x: checkpoint(call, x, use_reentrant=False), *how),
    "in a branch": lambda call, *how: compiled(lambda x: torch.cond(x.sum() < 1e9, call, call, (x,)), *how),
    "exported": lambda call: exported(call, strict=False),
    "exported by Dynamo": lambda call: exported(call, strict=True),
}


def calls(mods: dict[str, dict[str, Any]]) -> Call:
    return lambda x: [ca.attention(x, x, x, **kwargs) for kwargs in mods.values()]


FORMS = {f"mask: {n}": {"mask_mod": m} for n, m in MASKS.items()} | {
    f"score: {n}": {"score_mod": m} for n, m in SCORES.items()
}
OPERATIONS = {f"{n}, of floats": {"score_mod": score_mod(m)} for n, m in FLOATS.items()} | {
    f"{n}, of integers": {"score_mod": score_mod(m)} for n, m in INTEGERS.items()
}
UNSAID = {f"mask: {n}": {"mask_mod": m} for n, (_, m, _) in MASK_REFUSED.items()} | {
    f"score: {n}": {"score_mod": m} for n, (_, m, _) in REFUSED.items()
}


def said_in_eager_code(kwargs: dict[str, Any]) -> tuple[type[Exception], str]:
    with pytest.raises(errors.ComposattnError) as caught:
        ca.attention(Q, Q, Q, **kwargs)
    return type(caught.value), str(caught.value)


def assert_equal_results(found: Sequence[torch.Tensor], mods: dict[str, dict[str, Any]]) -> None:
    for name, out, kwargs in zip(mods, found, mods.values(), strict=True):
        torch.testing.assert_close(out, ca.attention(Q, Q, Q, **kwargs), msg=name)


def by_day(*names: str) -> list[Any]:
    """The readings; those that are not named run at night."""
    return [pytest.param(name, marks=() if name in names else (pytest.mark.nightly,)) for name in READINGS]


@pytest.mark.parametrize("reading", by_day("compiled", "below a checkpoint", "exported"))
def test_all_forms_in_one_region_compute_what_they_do_in_eager_code(reading: str) -> None:
    assert_equal_results(READINGS[reading](calls(FORMS))(Q), FORMS)


class Texts:
    """A compiler that notes the texts of a region's calls, of those in its branches and checkpoints too."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        for part in module.modules():
            nodes = part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ()
            self.found += [node.args[6] for node in nodes if "composattn" in str(node.target)]
        return module


IN_A_REGION = {n: k for n, k in UNSAID.items() if n not in ("mask: a tensor",)}  # refused before it is read


@pytest.mark.parametrize("reading", by_day("compiled")[:3])  # what is exported is never run
def test_all_refusals_in_one_region_have_the_class_and_the_words_of_eager_code(reading: str) -> None:
    texts = Texts()
    with pytest.raises(errors.ComposattnError):
        READINGS[reading](calls(IN_A_REGION), texts)(Q)
    count = len(texts.found) // len(IN_A_REGION)  # both branches are read
    assert count >= 1 and len(texts.found) == count * len(IN_A_REGION)
    for place, text in enumerate(texts.found):
        name = list(IN_A_REGION)[place % len(IN_A_REGION)]
        with pytest.raises(errors.ComposattnError) as caught:
            graphs_of(parse(text)[0], ())
        assert (type(caught.value), str(caught.value)) == said_in_eager_code(IN_A_REGION[name]), name


@pytest.mark.parametrize("reading", by_day("compiled")[:3])
def test_every_operation_is_written_in_a_region_as_in_eager_code(reading: str) -> None:
    texts = Texts()
    READINGS[reading](calls(OPERATIONS), texts)(Q)
    count = len(texts.found) // len(OPERATIONS)
    assert count >= 1 and len(texts.found) == count * len(OPERATIONS)
    for place, text in enumerate(texts.found):
        name = list(OPERATIONS)[place % len(OPERATIONS)]
        assert parse(text)[0][0] == ca.score(OPERATIONS[name]["score_mod"]).form, name


def test_pages_say_how_many_forms_operations_and_refusals_have_one_reading() -> None:
    counted = len(FORMS), len(OPERATIONS), len(IN_A_REGION)
    said = re.findall(r"(\d+) forms,\s(\d+)\soperations\sand (\d+)\srefusals", TORCH.read_text() + SEARCHES.read_text())
    assert said and {tuple(map(int, numbers)) for numbers in said} == {counted}


FEW = ("score: if", "score: item of captured", "score: rand", "score: returns a tuple", "mask: three arguments")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else (pytest.mark.nightly,)) for n in UNSAID])
def test_a_refusal_is_met_where_the_program_is_exported(name: str, strict: bool) -> None:
    with pytest.raises(Exception) as caught:
        exported(calls({name: UNSAID[name]}), strict)
    assert said_in_eager_code(UNSAID[name])[1] in str(caught.value)


def test_the_mask_that_is_a_tensor_is_refused_with_the_same_words() -> None:
    with pytest.raises(Exception, match="a tensor is not a mask; wrap it"):
        compiled(calls({"a tensor": UNSAID["mask: a tensor"]}))(Q)


def test_a_refusal_is_raised_as_it_is_in_eager_code() -> None:
    for name in FEW:
        kind, words = said_in_eager_code(UNSAID[name])
        with pytest.raises(kind) as caught:
            compiled(calls({name: UNSAID[name]}))(Q)
        assert str(caught.value) == words


# --- that it is one reading ---------------------------------------------------------------------------------------


def test_an_operation_that_is_added_to_the_table_of_eager_code_is_known_in_compiled_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mod = lambda s, b, h, q, kv: torch.sinc(s)  # noqa: E731
    assert said_in_eager_code({"score_mod": mod})[0] is errors.UnsupportedOperation
    monkeypatch.setitem(torch_functions._HANDLERS, "sinc", lambda x: x * 3.0)
    assert_equal_results(compiled(calls({"sinc": {"score_mod": mod}}))(Q), {"sinc": {"score_mod": mod}})


def test_every_attribute_that_a_value_has_is_answered_as_in_eager_code() -> None:
    asked: dict[str, Any] = {}

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        asked["of a score"] = [s.dtype, s.shape, s.ndim, s.device, s.requires_grad, s.is_cuda, s.is_floating_point()]
        asked["of an index"] = [q.dtype, q.dim(), q.numel(), q.size(), q.is_sparse, q.is_complex()]
        asked["of a row"] = [ROWS[h].shape, len(ROWS[h]), ROWS[h, q].dtype, hasattr(s, "nonsense"), hasattr(s, "exp")]
        asked["of its class"] = [isinstance(s, torch.Tensor), torch.is_tensor(q), isinstance(s, float)]
        return s

    ca.attention(Q, Q, Q, score_mod=mod)
    eager = dict(asked)
    asked.clear()
    compiled(lambda x: ca.attention(x, x, x, score_mod=mod))(Q)
    assert asked == eager and len(asked) == 4


ROWS = torch.randn(4, 12)
GRID = torch.stack([torch.arange(12) // 4, torch.arange(12) % 4], 1)

SEQUENCES: dict[str, Callable[..., Any]] = {
    "two names": lambda s, b, h, q, kv: (lambda y, x: s + y * 0.1 - x)(*GRID[q]),
    "iteration": lambda s, b, h, q, kv: sum([a * 0.1 for a in GRID[q]], s),
    "a list": lambda s, b, h, q, kv: s + list(GRID[q])[1],
    "a tuple": lambda s, b, h, q, kv: s + (*GRID[q],)[0],
    "zip": lambda s, b, h, q, kv: s + sum([a * c for a, c in zip(GRID[q], GRID[kv], strict=True)]),
    "enumerate": lambda s, b, h, q, kv: s + sum([a * n for n, a in enumerate(GRID[q])]),
    "a length": lambda s, b, h, q, kv: s * len(GRID[q]),
    "a range of a length": lambda s, b, h, q, kv: s + sum([GRID[q][n] for n in range(len(GRID[q]))]),
    "a slice and its element": lambda s, b, h, q, kv: s + ROWS[h, 3:4][0],
    "a product of rows": lambda s, b, h, q, kv: s + ROWS[h] @ ROWS[h],
    "a cast to the score's type": lambda s, b, h, q, kv: s + ROWS[h, q].to(s.dtype),
    "finfo of the score's type": lambda s, b, h, q, kv: torch.where(q >= kv, s, torch.finfo(s.dtype).min),
    "a type in a dict": lambda s, b, h, q, kv: s * {torch.float32: 2.0}.get(s.dtype, 3.0),
    "a type compared": lambda s, b, h, q, kv: s if s.dtype == torch.float32 and (q > 1).dtype == torch.bool else s * 2,
}


def test_rows_are_taken_apart_and_types_are_asked_for_as_in_eager_code() -> None:
    mods = {name: {"score_mod": mod} for name, mod in SEQUENCES.items()}
    for reading in ("compiled", "below a checkpoint"):
        assert_equal_results(READINGS[reading](calls(mods))(Q), mods)


def test_a_gradient_that_data_would_cut_is_refused_alike() -> None:
    learned = torch.ones(4, requires_grad=True)
    mods = {"score_mod": lambda s, b, h, q, kv: s + learned.data[h]}
    kind, words = said_in_eager_code(mods)
    with pytest.raises(kind) as caught:
        compiled(calls({"data": mods}))(Q)
    assert str(caught.value) == words


def test_the_largest_of_a_row_is_refused_alike() -> None:
    mods = {"score_mod": lambda s, b, h, q, kv: s + max(GRID[q])}
    kind, words = said_in_eager_code(mods)
    with pytest.raises(kind) as caught:
        compiled(calls({"max": mods}))(Q)
    assert str(caught.value) == words


HELD = {
    "an f-string": lambda s, b, h, q, kv: s * len(f"{ROWS}"),
    "a text in a list": lambda s, b, h, q, kv: s * len(str([ROWS])),
    "print": lambda s, b, h, q, kv: (print(ROWS), s)[1],
    "format": lambda s, b, h, q, kv: s * len("{}".format(ROWS)),  # noqa: UP032
    "an address": lambda s, b, h, q, kv: s * (ROWS.data_ptr() % 7),
    "a count of writes": lambda s, b, h, q, kv: s * (ROWS._version + 1),
}


@pytest.mark.parametrize("name", HELD)
def test_what_a_tensor_holds_is_refused_alike(name: str) -> None:
    mods = {"score_mod": HELD[name]}
    kind, words = said_in_eager_code(mods)
    with pytest.raises(kind) as caught:
        compiled(calls({name: mods}))(Q)
    assert str(caught.value) == words


# --- activation checkpointing -------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A layer with a learned bias and a mask that is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = torch.nn.Linear(16, 48), torch.nn.Parameter(torch.randn(2, 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        ids = torch.arange(20, device=x.device) // 3
        out = ca.attention(
            q, k, v, mask_mod=lambda b, h, i, j: (i >= j) | (ids[i] == ids[j]),
            score_mod=lambda s, b, h, i, j: s + self.bias[h, abs(i - j)],
        )  # fmt: skip
        return x + out.transpose(1, 2).flatten(2)  # type: ignore[union-attr]


def test_a_block_below_a_checkpoint_gives_the_gradients_of_eager_code_in_one_graph() -> None:
    block, x = Block(), torch.randn(2, 20, 16)

    def gradients(run: Call) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(run(x).sin().sum(), list(block.parameters()))

    found = gradients(compiled(lambda x: checkpoint(block, x, use_reentrant=False), "aot_eager"))
    for one, other in zip(found, gradients(block), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
