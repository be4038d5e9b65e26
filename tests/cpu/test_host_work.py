"""What a call costs the host, in torch operations; and that nothing kept from call to call is ever stale."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import composattn as ca
from benchmarks import host
from benchmarks.host_work import (
    LARGER,
    RECIPE,
    HostOnly,
    Operations,
    PackedStep,
    Recorded,
    Size,
    Step,
    calls_of,
    counted,
    document_step,
    drawn_documents,
    read_of,
    without_kernels,
)
from benchmarks.implementations import OURS
from composattn.analysis.refreshed import distrusting
from composattn.backends.fused.planning.arguments import (
    ForwardArguments,
    MainArguments,
    PostprocessArguments,
    PreprocessArguments,
)
from composattn.backends.fused.running import captured
from composattn.backends.fused.running.bulk import tidy
from composattn.backends.fused.running.captured import Standing
from composattn.dispatch import plans
from composattn.graph import copies as tables
from composattn.graph.borrowed import Borrowed, borrow
from composattn.mods import alibi, causal, document, sliding_window
from composattn.mods.mask import Mask


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel is given is kept as it was when it was given: a later call may bring the same memory up to date."""
    monkeypatch.setattr(Recorded, "copies", True)


STEP = 9  # operations of a step of which nothing is new: memory, and what autograd does itself


def test_a_plain_step_is_memory_and_autograd_alone() -> None:
    operations = counted(Step(causal(), RECIPE))
    assert operations.launches == 0
    assert operations.counts.total() <= STEP


def test_new_documents_take_few_operations_once_for_all_layers() -> None:
    one, three = (counted(document_step(RECIPE, 128, layers)) for layers in (1, 3))
    assert one.counts.total() <= STEP + 50  # 800 before tables were shared, made in place and kept in their order
    assert three.counts.total() == one.counts.total() + 2 * STEP
    assert three.launches == one.launches


def test_the_order_of_more_tiles_than_run_at_once_takes_few_operations_more() -> None:
    assert counted(document_step(LARGER, 256)).counts.total() <= STEP + 110  # 800 before


def test_new_lengths_take_few_operations_and_new_totals_no_more() -> None:
    step, other = PackedStep(RECIPE), PackedStep(RECIPE, new_total=True)
    # 136 before; 15 of them as tiles of short queries are others than the backward's, with a table of their own
    assert counted(step).counts.total() <= STEP + 67
    assert counted(other).counts == counted(step).counts
    assert len(other.attention._prepared) > len(other.attention._planned) == 1


DOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.clone,
    "expanded": lambda t: t[:, :, :1, :1].expand(t.shape),
    "transposed": lambda t: t.mT.contiguous().mT,
    "sliced": lambda t: torch.cat([t, t], -1)[..., 4 : 4 + t.shape[-1]],
    "begins between 16 bytes": lambda t: torch.cat([t.flatten(), t.flatten()])[3 : 3 + t.numel()].view(t.shape),
    "another order": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
}


@pytest.mark.parametrize("last", DOUTS)
@pytest.mark.parametrize("first", DOUTS)
def test_a_gradient_of_any_form_reaches_the_kernels_as_copies_read_it(first: str, last: str) -> None:
    step = Step(causal(), RECIPE)
    made = torch.randn(step.dout.shape, dtype=torch.bfloat16)
    for name in (first, last):
        given = DOUTS[name](made)
        torch.autograd.grad(step.attention(*step.inputs), step.inputs, given)
        _, before, main, _ = step.attention.last_arguments()
        for t in (before.dout, main.dout):
            assert torch.equal(t, given)
            assert tidy(t) is t, "a bulk copy can't read it"


# Functions of Python that a call enters where nothing is new: forward; forward and backward, with 42 of torch's own.
# Behind them those of the times before.
ENTRIES = {
    "ca.Attention, causal": (10, 47),  # 41 and 157 once, then 18 and 66, 14 and 50
    "ca.attention, causal()": (14, 51),  # 54, 170; 25, 73; 16, 53
    "ca.attention, lambda": (14, 51),  # 62, 178; 27, 75; 20, 57
    "ca.attention, causal(), sinks": (17, 62),  # 34, 88; 29, 74; 23, 64; 17, 58
    "ca.Attention, alibi(slopes)": (16, 56),  # 45, 166; 23, 73; 18, 55; 15, 52
    "ca.attention, a kept alibi(slopes)": (15, 53),  # 62, 191; 28, 78; 19, 56
    "ca.attention, alibi(slopes)": (17, 55),  # 89, 218; 32, 82; 22, 59
    "ca.attention, alibi(slopes) >> softcap(30.0), causal() & document(ids)": (31, 70),  # 188, 356; 60, 112; 37, 76
    "ca.attention, lambda over a tensor": (17, 55),  # 78, 207; 34, 84; 25, 62
    "flex_attention, score_mod": (18, 56),  # 82, 211; 35, 85; 26, 63
    "flex_attention, block_mask": (22, 61),  # 89, 247; 37, 89; 32, 70, as what its mask_mod reads is looked at
    "ca.nn.Attention, score_mod as a method": (23, 61),  # 85, 214; 45, 95; 30, 67
}
ROOM = 4  # for other versions of Python and torch


def test_every_entry_enters_few_functions_where_nothing_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "made", {})  # those of other tests, which cost two functions each call
    found = {name: calls.python for name, calls, _ in host.counted(rounds=0)}
    for name, (forward, both) in ENTRIES.items():
        assert found.pop(f"host forward: {name}") <= forward + ROOM
        assert found.pop(f"host forward and backward: {name}") <= both + ROOM
    assert not found, "an entry without a bound"


def test_a_table_of_another_mask_is_looked_for_in_two_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "made", {})
    with without_kernels(lambda plan: lambda *arguments: None):
        x = host.Inputs(torch.device("cpu"), False, dtype=torch.bfloat16)
        call = host.entries(x)["ca.attention, causal(), sinks"]["composattn"]
        before = calls_of(call).python
        mask = document(offsets=torch.tensor([0, 3, 10]))
        assert len(tables.made) == len(mask.leaves)
        assert calls_of(call).python <= before + 2  # 8 before, in every call that reads a tensor


@pytest.mark.parametrize("name", ENTRIES)
def test_nothing_new_is_asked_of_what_interpreters_audit(name: str) -> None:
    asked: list[str] = []

    def note(frame: Any, event: str, function: Any) -> None:
        asked.extend([function.__name__] if event == "c_call" and function is id else [])

    with without_kernels(lambda plan: lambda *arguments: None):
        x = host.Inputs(torch.device("cpu"), False, dtype=torch.bfloat16)
        call = host.entries(x)[name]["composattn"]
        call()
        call()
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    assert not asked, "`id` takes 0.3 µs where somebody listens"


LENT: dict[str, Callable[[host.Inputs], Any]] = {
    "bias": lambda x: {"score_mod": alibi(x.slopes)},
    "sinks": lambda x: {"sinks": x.sinks},  # which the backward's kernels don't read
    "documents": lambda x: {"mask_mod": causal() & document(x.ids)},  # from which tables are derived
}


@pytest.mark.parametrize("name", LENT)
def test_a_backward_has_tensors_borrowed_again_only_where_something_is_derived_anew(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent_again: list[Borrowed] = []
    again = Borrowed.again
    monkeypatch.setattr(Borrowed, "again", lambda borrowed: (lent_again.append(borrowed), again(borrowed))[1])
    with without_kernels(lambda plan: lambda *arguments: None):
        x = host.Inputs(torch.device("cpu"), True, dtype=torch.bfloat16)
        for is_new, wanted in (("plan", True), ("nothing", False), ("ids", name == "documents"), ("nothing", False)):
            lent_again.clear()
            if is_new == "ids":
                x.ids.copy_(x.ids.flip(0))
            torch.autograd.grad(ca.attention(*x.qkv, **LENT[name](x)), x.qkv, x.dout)
            assert bool(lent_again) == wanted, f"new: {is_new}"


def test_tables_stand_on_the_stream_that_read_them_and_never_in_a_recorded_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = {"stream": 7, "records": False}
    monkeypatch.setattr(captured, "has_streams", lambda device: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: now["stream"], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: now["records"], raising=False)
    ids, standing = torch.arange(5), Standing(torch.device("cuda", 0))

    def found() -> Any:
        return standing.find(borrow([ids]))

    borrowed = borrow([ids])
    assert borrowed is not None
    with borrowed:
        now["records"] = True
        standing.keep("of a graph")
        now["records"] = False
        assert found() is None
        standing.keep("tables")
    assert found() == "tables"
    for other in ({"stream": 8}, {"records": True}):
        before = dict(now)
        now.update(other)
        assert found() is None
        now.update(before)
    with distrusting():
        assert found() is None
    assert found() == "tables"
    ids.add_(1)
    assert found() is None


def read(attention: HostOnly) -> Iterator[torch.Tensor]:
    """What the kernels of the last step were given to read of masks, sequences and the order of tiles."""
    for arguments in attention.last_arguments():
        given = [getattr(arguments, name, None) for name in ("sequences", "work", "captured")]
        yield from (t for a in given for t in (a if isinstance(a, tuple) else (a,)) if isinstance(t, torch.Tensor))


def ascending(size: Size) -> torch.Tensor:
    return -drawn_documents(size)


MASKS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "documents": lambda x, y: causal() & document(x),
    "window": lambda x, y: sliding_window(100) & document(x),
    "two-tensors": lambda x, y: lambda b, h, q, kv: x[b, q] == y[b, kv],
    "one-side": lambda x, y: lambda b, h, q, kv: (x[b, q] == x[b, kv]) & (kv >= y[b, q]),
    "less": lambda x, y: lambda b, h, q, kv: x[b, q] <= y[b, kv],
    "limits": lambda x, y: lambda b, h, q, kv: (kv + 60 * y[b, q] >= 0) & (kv - 60 * y[b, q] >= 0),
    "not-one-document": lambda x, y: lambda b, h, q, kv: (q >= kv) & (x[b, kv] != y[b, q]),
}


SIZES = {"all-at-once": RECIPE, "ordered": Size(2, 16, 16, 1100, 64)}
DRAWN = {"descending": drawn_documents, "ascending": ascending}
# by default each mask at both sizes and of both draws, in turns
WRITTEN = [
    pytest.param(name, size, order, marks=[pytest.mark.slow] if (n + i + j) % 2 else [])
    for (n, name), (i, size), (j, order) in itertools.product(*map(enumerate, (MASKS, SIZES, DRAWN)))
]


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize(("name", "size_name", "order"), WRITTEN)
def test_what_is_written_in_place_is_seen_by_every_kernel(name: str, size_name: str, order: str) -> None:
    size, drawn = SIZES[size_name], DRAWN[order]

    def mask(x: torch.Tensor, y: torch.Tensor) -> Mask:
        return Mask.of(MASKS[name](x, y))

    ids, others = drawn(size), drawn(size)
    step = Step(mask(ids, others), size)
    step()
    for changed in ((ids,), (others,), (ids, others)):
        for tensor in changed:
            tensor.copy_(drawn(size))
        step()
        fresh = Step(mask(ids.clone(), others.clone()), size)
        fresh()
        found, wanted = list(read(step.attention)), list(read(fresh.attention))
        assert len(found) == len(wanted)
        assert all(map(torch.equal, found, wanted))


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "in place": lambda tensor, new: tensor.copy_(new),
    "other memory": lambda tensor, new: setattr(tensor, "data", new),
    "by a view": lambda tensor, new: tensor[:].copy_(new),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", ["documents", "one-side", "not-one-document"])
def test_what_is_written_to_borrowed_tensors_is_seen_by_every_kernel(name: str, write: str) -> None:
    given: list[torch.Tensor] = []

    def kernel_of(plan: Any) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            record = {len(ForwardArguments._fields): ForwardArguments, 15: MainArguments}.get(len(arguments))
            if record is not None:
                known = record(*read_of(plan, arguments))
                table = known.work if record is ForwardArguments else known.key_tiles
                given.extend(t.clone() for t in (table, *(known.captured or ())) if t is not None)

        return launch

    step = Step(causal(), RECIPE)  # for its tensors

    def read_by(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        given.clear()
        out = ca.attention(*step.inputs, mask_mod=MASKS[name](x, y))
        torch.autograd.grad(out, step.inputs, step.dout)
        return list(given)

    ids, others = drawn_documents(RECIPE), drawn_documents(RECIPE)
    with without_kernels(kernel_of):
        before = read_by(ids, others)
        assert all(map(torch.equal, read_by(ids, others), before))
        for changed in ((ids,), (others,), (ids, others)):
            for tensor in changed:
                WRITES[write](tensor, drawn_documents(RECIPE))
            found, wanted = read_by(ids, others), read_by(ids.clone(), others.clone())
            assert found and len(found) == len(wanted)
            assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("learned", [False, True], ids=["sinks", "learned-sinks"])
def test_a_gradient_of_sinks_gives_the_kernels_of_a_dense_call_no_table(learned: bool) -> None:
    given: dict[int, tuple[Any, ...]] = {}
    with without_kernels(lambda plan: lambda *arguments: given.update({len(arguments): arguments})):
        x = host.Inputs(torch.device("cpu"), True, dtype=torch.bfloat16)
        out = ca.attention(*x.qkv, sinks=x.sinks.requires_grad_(learned))
        torch.autograd.grad(out, (*x.qkv, x.sinks) if learned else x.qkv, x.dout)
    before = PreprocessArguments(*given[10])
    assert before.query_tiles is None and (before.sinks is not None) == learned
    if learned:  # otherwise the only tile of keys writes dQ
        after = PostprocessArguments(*given[6])
        assert after.query_tiles is None and after.sinks is not None


def test_a_gradient_of_sinks_takes_no_operation_but_memory() -> None:
    with without_kernels(lambda plan: lambda *arguments: None):
        x = host.Inputs(torch.device("cpu"), True, dtype=torch.bfloat16)

        def step() -> None:
            torch.autograd.grad(ca.attention(*x.qkv, sinks=x.sinks), (*x.qkv, x.sinks), x.dout)

        step()
        step()
        with Operations() as operations:
            step()
    assert operations.launches == 0
    assert operations.counts.total() <= STEP + 1


def drawn_blocks(size: Size) -> torch.Tensor:
    return torch.randint(0, 2, (size.batch, 1, size.length // 64, size.length // 64), dtype=torch.int8)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("drawn", [drawn_documents, drawn_blocks])
def test_compiled_code_that_writes_to_a_tensor_attends_to_what_it_wrote(drawn: Callable[[Size], torch.Tensor]) -> None:
    """Compiled code has a copy of the tensor, which the backward reads too, whatever was written since."""
    read_now, others, then = drawn(RECIPE), drawn_documents(RECIPE), drawn(RECIPE)

    def step(x: torch.Tensor) -> Step:
        if drawn is drawn_blocks:
            return Step(ca.BlockSparse(x, 64), RECIPE)
        return Step(Mask.of(lambda b, h, q, kv: x[b, q] <= others[b, kv]), RECIPE)

    def written(*inputs: torch.Tensor) -> Any:
        read_now.copy_(then)
        return late.attention(*inputs)

    late, fresh = step(read_now), step(then.clone())
    out = torch.compile(written, backend="aot_eager", fullgraph=True)(*late.inputs)
    read_now.copy_(drawn(RECIPE))
    torch.autograd.grad(out, late.inputs, late.dout)
    fresh()
    (forward, _, main, _), (as_forward, _, as_main, _) = (s.attention.last_arguments() for s in (late, fresh))
    found, wanted = [*forward.captured, *main.captured], [*as_forward.captured, *as_main.captured]
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("size", [RECIPE, LARGER], ids=["all-at-once", "ordered"])
def test_lengths_written_in_place_are_seen_by_every_kernel(size: Size) -> None:
    step = PackedStep(size)
    step()
    offsets = step.varlen.cu_seqlens_q
    for _ in range(2):
        offsets[1:-1] = (torch.randperm(step.total)[: size.batch - 1] + 1).sort().values
        step()
        fresh = PackedStep(size)
        fresh.varlen = ca.Varlen(offsets.clone())
        fresh()
        assert all(map(torch.equal, read(step.attention), read(fresh.attention)))


def near_keys(width: Any) -> Step:
    return Step(Mask.of(lambda b, h, q, kv: (q - kv < width) & (kv < 900)), SIZES["ordered"])


@pytest.mark.usefixtures("copies")
def test_a_run_time_number_is_read_anew_where_it_orders_tiles() -> None:
    width = ca.scalar(300)  # with which a plan has the tiles that it has with 700
    step = near_keys(width)
    step()
    first = list(read(step.attention))
    width.value = 700
    step()
    fresh = near_keys(ca.scalar(700))
    fresh()
    found, wanted = list(read(step.attention)), list(read(fresh.attention))
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))
    assert not all(map(torch.equal, found, first)), "the order follows it"


@pytest.mark.usefixtures("copies")
def test_a_plan_keeps_the_tiles_of_its_first_run_time_number_and_orders_them_by_that_of_now() -> None:
    def order_of_queries(step: Step) -> torch.Tensor:
        step()
        return step.attention.last_arguments()[0].work

    width = ca.scalar(40)
    step = near_keys(width)
    first = order_of_queries(step)
    fewer = order_of_queries(near_keys(ca.scalar(700)))
    width.value = 700
    found = order_of_queries(step)
    assert len(found) == len(first) > len(fewer), "a new number compiles nothing"
    assert {(b, m) for b, m in found.tolist()} == {(b, m) for b, m in first.tolist()}
    assert not torch.equal(found, first)
    call: Any = list(step.attention._prepared.values())[-1]
    tiling = call.launcher(True).kernel.plan.tiling
    first_key = (found[:, 1] * tiling.tile_m - 699).clamp(0)  # of those that the tile's first query sees
    visits = -(-900 // tiling.tile_n) - first_key // tiling.tile_n
    assert (visits.diff() <= 0).all(), "longest first"


def test_tensors_of_a_form_that_was_met_are_not_checked_again_for_what_their_form_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, problems = RECIPE, []
    described = plans.Plans.problem
    monkeypatch.setattr(plans.Plans, "problem", lambda *given: problems.append(1) or described(*given))
    q = torch.randn(size.batch, size.heads, size.length, size.head_dim)
    for _ in range(4):
        ids = drawn_documents(size)
        ca.attention(q, q, q, mask_mod=causal() & document(ids))
    assert len(problems) == 1


def test_what_is_bare_launches_what_a_call_and_its_gradient_do() -> None:
    with without_kernels(lambda plan: lambda *arguments: None):
        x = host.Inputs(torch.device("cpu"), True, dtype=torch.bfloat16)
        for name, calls in host.entries(x).items():
            bare = host.Bare(calls[OURS], x, True)
            assert len(bare.forward) == 1 and len(bare.backward) >= 2, name  # the only tile of keys writes dQ
            assert len(torch.autograd.grad(bare(), x.qkv, x.dout)) == 3
