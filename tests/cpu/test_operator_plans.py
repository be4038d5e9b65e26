"""Calls of compiled code: one plan a form, one run in each direction, and kernels read what a fresh mask gives."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import composattn as ca
from benchmarks.host_work import RECIPE, Size, drawn_documents, read_of, without_kernels
from composattn.analysis import matches, replayed
from composattn.analysis.rerun import Rerun
from composattn.analysis.tile_lists import TileLists
from composattn.backends.fused.planning.arguments import ForwardArguments, MainArguments, PreprocessArguments
from composattn.backends.fused.running import captured
from composattn.call.inputs import Inputs
from composattn.dispatch import operator_plans, operators
from composattn.mods import causal
from tests.cpu.test_host_work import MASKS

SIZES = {"all-at-once": RECIPE, "ordered": Size(1, 16, 16, 1100, 64)}
TABLES: dict[int, tuple[Any, str]] = {
    len(ForwardArguments._fields): (ForwardArguments, "work"),
    len(MainArguments._fields): (MainArguments, "key_tiles"),
    len(PreprocessArguments._fields): (PreprocessArguments, "query_tiles"),
}
Read = list[torch.Tensor]


class Graph:
    """What a graph does: runs again on the memory it was captured with."""

    replays = 0

    def __init__(self, run: Callable[[], object], device: torch.device) -> None:
        self.run = run

    def __call__(self) -> None:
        Graph.replays += 1
        self.run()


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that has graphs, and looks at no number of a tensor, as a GPU does not; no plan is known."""
    monkeypatch.setitem(replayed.GRAPHS, "cpu", Graph)
    monkeypatch.setattr(matches, "derives_anew", lambda: True)
    monkeypatch.setattr(replayed, "_turns", {})
    monkeypatch.setattr(operator_plans, "_plans", OrderedDict())
    monkeypatch.setattr(operator_plans, "_paths", OrderedDict())
    monkeypatch.setattr(Graph, "replays", 0)
    torch._dynamo.reset()
    yield


class Layer:
    """Forward and backward of `attend`; what kernels read is noted, the kernels don't run."""

    def __init__(self, attend: Callable[..., Any], size: Size) -> None:
        self.attend = attend
        s, shapes = size, (size.heads, size.kv_heads, size.kv_heads, size.heads)
        made = [torch.randn(s.batch, h, s.length, s.head_dim).to(torch.bfloat16) for h in shapes]
        self.inputs, self.dout = [t.requires_grad_() for t in made[:3]], made[3]

    def __call__(self, noted: Read, *of: Any) -> Read:
        noted.clear()
        torch.autograd.grad(self.attend(*self.inputs, *of), self.inputs, self.dout)
        return list(noted)


@pytest.fixture
def noted() -> Iterator[Read]:
    """What kernels read of the latest step: their mods' tensors and tables of tiles, as they were then."""
    found: Read = []

    def kernel_of(plan: Any) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            record, table = TABLES.get(len(arguments), (None, ""))
            if record is not None:
                known = record(*read_of(plan, arguments))
                tensors = (getattr(known, table), *(getattr(known, "captured", None) or ()))
                found.extend(t.clone() for t in tensors if t is not None)

        return launch

    with without_kernels(kernel_of):
        yield found


def assert_same(found: Read, wanted: Read) -> None:
    assert found and len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", MASKS)
def test_kernels_of_compiled_steps_read_what_a_fresh_mask_gives(name: str, size: Size, noted: Read) -> None:
    def attend(q: Any, k: Any, v: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return ca.attention(q, k, v, mask_mod=MASKS[name](x, y))

    compiled = Layer(torch.compile(attend, fullgraph=True, backend="aot_eager"), size)
    replays = 0
    for _ in range(replayed.AFTER + 4):
        x, y = drawn_documents(size), drawn_documents(size)
        before = Graph.replays
        found = compiled(noted, x, y)
        replays = Graph.replays - before
        assert_same(found, Layer(attend, size)(noted, x.clone(), y.clone()))
    assert replays <= 1  # the forward's, for both directions


def blocks_of(step: int, length: int) -> Any:
    ids = (torch.rand(length, generator=torch.Generator().manual_seed(step)) < 0.02).cumsum(0)
    return create_block_mask(lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]), None, None, length, length, "cpu")


def test_a_new_block_mask_in_each_compiled_step_is_one_replay_for_both_directions(noted: Read) -> None:
    size = Size(1, 2, 2, 1024, 64)

    def attend(q: Any, k: Any, v: Any, blocks: Any) -> Any:
        return ca.flex_attention(q, k, v, block_mask=blocks)

    compiled = Layer(torch.compile(attend, fullgraph=True, backend="aot_eager"), size)
    other = Layer(torch.compile(attend, fullgraph=True, backend="aot_eager"), size)
    for n in range(replayed.AFTER + 4):
        before = Graph.replays
        found = compiled(noted, blocks_of(n, size.length))
        replays = Graph.replays - before
        with pytest.MonkeyPatch.context() as anew:
            anew.setattr(operator_plans, "_plans", OrderedDict())
            anew.setattr(operator_plans, "_paths", OrderedDict())
            assert_same(found, other(noted, blocks_of(n, size.length)))
    assert replays == 1


def test_other_memory_of_one_form_takes_the_plan_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    plan = operator_plans.OperatorPlan.__init__

    def counted(self: Any, *given: Any) -> None:
        made.append(self)
        plan(self, *given)

    monkeypatch.setattr(operator_plans.OperatorPlan, "__init__", counted)

    def attend(q: torch.Tensor, ids: torch.Tensor) -> Any:
        return ca.attention(q, q, q, mask_mod=lambda b, h, i, j: ids[i] == ids[j])

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q = torch.randn(1, 2, 60, 8).requires_grad_()
    held = [torch.arange(60) // n for n in (7, 10, 13)]
    for ids in held:
        torch.testing.assert_close(compiled(q, ids), attend(q, ids))
    outs = [compiled(q, ids) for ids in held]  # their backwards come later, and in another order
    for out, ids in reversed(list(zip(outs, held, strict=True))):
        (found,), (wanted,) = (torch.autograd.grad(o.sin().sum(), [q]) for o in (out, attend(q, ids)))
        torch.testing.assert_close(found, wanted)
    assert len(made) == 1


def test_plans_of_lengths_that_do_not_come_again_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_plans, "LIMIT", 3)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def attend(q: torch.Tensor, ids: torch.Tensor) -> Any:
        return ca.attention(q, q, q, mask_mod=lambda b, h, i, j: ids[i] == ids[j])

    for length in (20, 30, 40, 20, 50, 60, 20):
        attend(torch.randn(1, 2, length, 8), torch.arange(length) // 7)
    lengths = [key[1][0][0] for key in operator_plans._plans]  # type: ignore[index]
    assert lengths == [50, 60, 20]


def test_calls_of_several_threads_have_a_plan_each(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)
    forward = Rerun.__call__

    def attend(q: torch.Tensor, ids: torch.Tensor) -> Any:
        return ca.attention(q, q, q, mask_mod=lambda b, h, i, j: ids[i] == ids[j], backend="streaming")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, held = torch.randn(1, 2, 60, 8), [torch.arange(60) // 7, torch.arange(60) // 13]
    with torch.no_grad():
        compiled(q, held[0])
    wanted = [attend(q, ids) for ids in held]
    met: set[int] = set()

    def waiting(self: Any, *given: Any, **named: Any) -> Any:
        if threading.get_ident() not in met:  # both calls are under way, each with its plan
            met.add(threading.get_ident())
            both.wait()
        return forward(self, *given, **named)

    monkeypatch.setattr(Rerun, "__call__", waiting)
    found: dict[int, torch.Tensor] = {}

    def call(n: int) -> None:
        with torch.no_grad():
            found[n] = compiled(q, held[n])

    threads = [threading.Thread(target=call, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(2):
        torch.testing.assert_close(found[n], wanted[n])
    assert [len(plans) for plans in operator_plans._plans.values()] == [2]


def test_a_call_that_is_refused_leaves_its_plan_to_the_next() -> None:
    def attend(q: torch.Tensor, ids: torch.Tensor) -> Any:
        return ca.attention(q, q, q, mask_mod=lambda b, h, i, j: ids[h, i] == ids[h, j])

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    ids = torch.arange(120).view(2, 60) // 7
    for heads in (3, 2, 3, 2):
        q = torch.randn(1, heads, 60, 8)
        if heads == 2:
            torch.testing.assert_close(compiled(q, ids), attend(q, ids))
        else:
            with pytest.raises(ca.errors.CapturedIndexOutOfRange):
                compiled(q, ids)
    assert [len(plans) for plans in operator_plans._plans.values()] == [1]


def documents_layer() -> tuple[Callable[..., Any], Layer]:
    def attend(q: Any, k: Any, v: Any, ids: torch.Tensor) -> Any:
        return ca.attention(q, k, v, mask_mod=lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]))

    return attend, Layer(torch.compile(attend, fullgraph=True, backend="aot_eager"), Size(1, 2, 2, 300, 64))


def test_a_backward_reads_what_its_forward_derived_for_it_whatever_other_forwards_did_since(noted: Read) -> None:
    attend, compiled = documents_layer()
    for n in range(replayed.AFTER + 5):
        held = [(torch.arange(300) * (n + m + 2)) // 301 for m in range(2)]
        outs = [compiled.attend(*compiled.inputs, ids) for ids in held]
        replays = []
        for out, ids in ((outs[1], held[1]), (outs[0], held[0])):
            before = Graph.replays
            noted.clear()
            torch.autograd.grad(out, compiled.inputs, compiled.dout)
            found, of_backward = list(noted), Graph.replays - before
            replays.append(of_backward)
            wanted = Layer(attend, Size(1, 2, 2, 300, 64))(noted, ids.clone())
            assert_same(found, wanted[-len(found) :])
    assert replays == [0, 0]


def test_forwards_that_have_no_backward_any_more_derive_nothing_for_one(
    noted: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "MOST_ALONE", 3)
    made: list[int] = []
    found = captured.OneRun._found

    def counted(self: Any, *given: Any) -> Any:
        made.append(self._size + sum(run._size for run in self._backwards))
        return found(self, *given)

    monkeypatch.setattr(captured.OneRun, "_found", counted)
    _, compiled = documents_layer()
    compiled.attend(*compiled.inputs, torch.arange(300) // 20)
    forward = made[-1]
    for n in range(2):
        compiled(noted, torch.arange(300) // (n + 21))
    compiled.attend(*compiled.inputs, torch.arange(300) // 25)
    assert made[-1] > forward
    for n in range(5):
        compiled.attend(*compiled.inputs, torch.arange(300) // (n + 30))
    assert made[-1] == forward


def test_steps_of_known_forms_do_not_go_the_whole_way(noted: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[str] = []

    def counted(name: str) -> None:
        run = getattr(operators, name)
        monkeypatch.setattr(operators, name, lambda *given: (whole.append(name), run(*given))[1])

    counted("_attended")
    counted("_differentiated")
    _, compiled = documents_layer()

    def went(*of: Any) -> list[str]:
        whole.clear()
        compiled(noted, *of)
        return list(whole)

    ids = [torch.arange(300) // n for n in range(7, 12)]
    # torch watches the first step, by a mode; the second is the first of its forms, and teaches the forward's
    assert [went(of) for of in ids][-2:] == [[], []]
    with ca.debug_checks(True):
        assert went(ids[0]) == ["_attended", "_differentiated"]
    assert went(ids[1]) == []
    out = compiled.attend(*compiled.inputs, ids[2])
    ids[2].data = ids[2] + 1
    with pytest.raises(RuntimeError, match="other memory"):
        torch.autograd.grad(out, compiled.inputs, compiled.dout)


def test_lists_that_hang_on_no_tensor_are_made_once(noted: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    compute = TileLists._compute

    def counted(self: Any, *given: Any) -> Any:
        made.append(self)
        return compute(self, *given)

    monkeypatch.setattr(TileLists, "_compute", counted)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return ca.attention(q, k, v, mask_mod=lambda b, h, i, j: (i - j) % 150 < 3)

    size = Size(1, 2, 2, 300, 64)
    wanted = Layer(attend, size)(noted)
    compiled = Layer(torch.compile(attend, fullgraph=True, backend="aot_eager"), size)
    for _ in range(5):
        made.clear()
        assert_same(compiled(noted), wanted)
    assert not made and len(wanted) > 2


def test_a_call_that_records_nothing_goes_straight_to_the_operators_function(monkeypatch: pytest.MonkeyPatch) -> None:
    by_torch: list[str] = []

    def noted(operator: Any) -> Callable[..., Any]:
        run, name = operator._backend_fns[None], operator._name
        return lambda *given: (by_torch.append(name), run(*given))[1]

    for operator in (operators.attend, operators.attend_backward):
        monkeypatch.setitem(operator._backend_fns, None, noted(operator))
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    torch._dynamo.reset()
    layer = torch.compile(lambda q: ca.attention(q, q, q, mask_mod=causal()), fullgraph=True, backend="aot_eager")
    layer(q).sum().backward()  # torch watches the first call, by a mode
    by_torch.clear()
    layer(q).sum().backward()
    assert by_torch == []
    serialized = ca.Attention(mask_mod=causal()).serialized
    negated = torch.view_as_complex(torch.randn(1, 2, 16, 8, 2)).conj().imag
    given = [*serialized.tensors], *Inputs(q, q, q).flatten(), serialized.form, -1, False
    with torch.no_grad():
        found = torch.ops.composattn.attend(negated, q, q, *given)[0]
    torch.testing.assert_close(found, ca.attention(negated.resolve_neg(), q, q, mask_mod=causal()))
    torch.ops.composattn.attend(q, q, q, *given)[0].sum().backward()  # recorded
    assert by_torch == ["attend", "attend"]
