"""Attention inside torch's machinery: torch.compile, checkpointing, torch.func, autocast, fake tensors, copies."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

import composattn as ca
from composattn.call.inputs import Inputs
from composattn.dispatch.serialized import parse
from composattn.mods import alibi, causal, document, sliding_window, softcap
from composattn.testing import make_paged_case, make_varlen_case

Tensors = list[torch.Tensor]
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def forget_compiled_code() -> None:
    torch._dynamo.reset()


def draw(generator: torch.Generator, length: int = 50, dtype: torch.dtype = torch.float32) -> Tensors:
    return [torch.randn(2, 2, length, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def gradients(forward: Callable[..., Any], inputs: Tensors, *more: torch.Tensor) -> list[Any]:
    out, lse = forward(*inputs)
    loss = out.sin().sum() + torch.where(lse == -math.inf, 0.0, lse).cos().sum()
    return [out, lse, *torch.autograd.grad(loss, [*inputs, *more])]


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def biased(backend: str | None = None) -> tuple[ca.Attention, torch.Tensor]:
    """Mods that read a learned table and a mask's tensor with a derived one."""
    table, documents = torch.randn(2, 200, requires_grad=True), torch.arange(100) // 17
    attention = ca.Attention(
        score_mod=lambda s, b, h, q, kv: s + table[h, q - kv + 100],
        mask_mod=lambda b, h, q, kv: (q >= kv) & (documents[q] == documents[kv]),
        backend=backend,
    )
    return attention, table


@pytest.mark.parametrize("compiler", BACKENDS)
def test_a_compiled_call_gives_the_eager_gradients_in_one_graph(compiler: str, generator: torch.Generator) -> None:
    attention, table = biased()

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention(q * 1.5, k, v, return_lse=True)

    inputs = draw(generator)
    compiled = torch.compile(forward, fullgraph=True, backend=compiler)
    assert_same(gradients(compiled, inputs, table), gradients(forward, inputs, table))
    assert torch._dynamo.explain(forward)(*inputs).graph_break_count == 0


def test_the_reference_backend_compiles_without_its_gradient(generator: torch.Generator) -> None:
    attention, _ = biased("reference")
    inputs = draw(generator)
    compiled = torch.compile(lambda *x: attention(*x), fullgraph=True, backend="aot_eager")
    out = compiled(*inputs)
    assert_same([out], [attention(*inputs)])
    with pytest.raises(ca.errors.GradientUnsupported, match="streaming"):
        out.sum().backward()


def test_transposed_inputs_keep_their_promised_strides(generator: torch.Generator) -> None:
    base = [torch.randn(2, 50, 2, 16, generator=generator, requires_grad=True) for _ in range(3)]

    def forward(*x: torch.Tensor) -> Any:
        return ca.attention(*(t.transpose(1, 2) for t in x), mask_mod=CAUSAL, return_lse=True)

    assert_same(gradients(torch.compile(forward, fullgraph=True, backend="aot_eager"), base), gradients(forward, base))


CAUSAL = causal()


def test_lengths_and_plans_change_without_recompiling(generator: torch.Generator) -> None:
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def forward(attention: ca.Attention, *x: torch.Tensor) -> torch.Tensor:
        return attention(*x)

    for length in (50, 61, 72, 83, 94):
        documents = torch.randint(0, 3, (100,), generator=generator).sort().values
        attention = ca.Attention(mask_mod=lambda b, h, q, kv, d=documents: d[q] == d[kv])
        inputs = draw(generator, length)
        assert_same([forward(attention, *inputs)], [attention(*inputs)])
    assert counter.frame_count == 2  # the first, and one with lengths and plan left open


def test_ready_mods_work_inside_a_compiled_region(generator: torch.Generator) -> None:
    slopes = torch.rand(2, generator=generator, requires_grad=True)
    score = alibi(slopes)

    def forward(mask: ca.Mask, *x: torch.Tensor) -> Any:
        return ca.attention(*x, mask_mod=mask, score_mod=score, return_lse=True)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    inputs = draw(generator)
    for mask in (causal(), sliding_window(3), sliding_window(5), causal() & sliding_window(9), sliding_window(3)):
        found, wanted = (gradients(lambda *x, f=f: f(mask, *x), inputs, slopes) for f in (compiled, forward))  # noqa: B023
        assert_same(found, wanted)


def test_a_scalar_changes_without_recompiling_and_its_backward_sees_the_value_of_the_forward(
    generator: torch.Generator,
) -> None:
    counter = CompileCounter()
    cap = ca.scalar(2.0)
    attention = ca.Attention(score_mod=lambda s, b, h, q, kv: cap * torch.tanh(s / cap))
    for backend in (counter, "aot_eager"):
        compiled = torch.compile(lambda *x: attention(*x), fullgraph=True, backend=backend)
        for value in (2.0, 0.5):
            inputs = draw(generator)
            cap.value = value
            wanted = torch.autograd.grad(attention(*inputs).sin().sum(), inputs)
            loss = compiled(*inputs).sin().sum()
            cap.value = 17.0
            assert_same(list(torch.autograd.grad(loss, inputs)), list(wanted))
    assert counter.frame_count == 1


@pytest.mark.parametrize("compiler", BACKENDS[1:])
def test_the_backward_finds_an_attention_that_was_dropped(compiler: str, generator: torch.Generator) -> None:
    @torch.compile(fullgraph=True, backend=compiler)
    def forward(attention: ca.Attention, *x: torch.Tensor) -> Any:
        return attention(*x, return_lse=True)

    attention, table = biased()
    inputs = draw(generator)
    wanted = gradients(lambda *x, a=attention: a(*x, return_lse=True), inputs, table)
    out, lse = forward(attention, *inputs)
    del attention
    gc.collect()
    assert_same(list(torch.autograd.grad(out.sin().sum() + lse.cos().sum(), [*inputs, table])), wanted[2:])


def test_derived_tensors_follow_a_mask_changed_in_place(generator: torch.Generator) -> None:
    documents = torch.arange(50) // 10
    attention = ca.Attention(mask_mod=lambda b, h, q, kv: documents[q] == documents[kv])
    compiled = torch.compile(lambda *x: attention(*x), fullgraph=True, backend="aot_eager")
    inputs = draw(generator)
    for size in (10, 7, 23):
        documents.copy_(torch.arange(50) // size)
        assert_same([compiled(*inputs)], [attention(*inputs)])


@pytest.mark.parametrize("backend", ["streaming", "reference"])
def test_blocks_written_inside_a_compiled_region_are_seen_there(backend: str, generator: torch.Generator) -> None:
    picked = torch.zeros(1, 1, 2, 1, dtype=torch.int32)
    attention = ca.Attention(mask_mod=ca.BlockSparse.topk(picked, 32, 64, 64), backend=backend)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        picked.fill_(1)
        return attention(q, k, v)

    q, k, v = (t.detach() for t in draw(generator, 64))
    out = torch.compile(forward, fullgraph=True, backend="aot_eager")(q, k, v)
    assert_same([out], [ca.attention(q, k[:, :, 32:], v[:, :, 32:])])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpointing(reentrant: bool, compiled: bool, generator: torch.Generator) -> None:
    if reentrant and compiled:
        compiled = False  # torch.compile takes the other kind only
    attention, table = biased()

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention(q * 2.0, k, v, return_lse=True)

    def forward(*x: torch.Tensor) -> Any:
        return checkpoint(block, *x, use_reentrant=reentrant)

    inputs = draw(generator)
    wanted = gradients(block, inputs, table)
    if reentrant:  # gives no gradient by torch.autograd.grad
        out, lse = forward(*inputs)
        (out.sin().sum() + lse.cos().sum()).backward()
        assert_same([t.grad for t in (*inputs, table)], wanted[2:])
        return
    run = torch.compile(forward, fullgraph=True, backend="aot_eager") if compiled else forward
    assert_same(gradients(run, inputs, table), wanted)


def test_torch_func_grad_and_vjp(generator: torch.Generator) -> None:
    attention, _ = biased()
    inputs = [t.detach() for t in draw(generator)]

    def loss(*x: torch.Tensor) -> torch.Tensor:
        return attention(*x).sin().sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    leaves = [t.clone().requires_grad_() for t in inputs]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    assert_same(list(found), list(wanted))
    _, pull = torch.func.vjp(loss, *inputs)
    assert_same(list(pull(torch.ones(()))), list(wanted))


def test_double_backward_on_the_streaming_backend(generator: torch.Generator) -> None:
    inputs = [t.detach()[:1, :, :, :4].double().requires_grad_() for t in draw(generator, 7)]
    attention = ca.Attention(mask_mod=causal(), score_mod=softcap(2.0))
    assert torch.autograd.gradgradcheck(lambda *x: attention(*x), inputs)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_computes_in_its_type(compiled: bool, generator: torch.Generator) -> None:
    attention = ca.Attention(mask_mod=causal())

    def forward(*x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return attention(*x)

    inputs = draw(generator)
    run = torch.compile(forward, fullgraph=True, backend="aot_eager") if compiled else forward
    out = run(*inputs)
    assert out.dtype is torch.bfloat16
    assert_same([out], [attention(*(t.bfloat16() for t in inputs))])
    assert all(g.dtype is torch.float32 for g in torch.autograd.grad(out.sum(), inputs))
    doubles = [t.double() for t in inputs]
    assert run(*doubles).dtype is torch.float64


def test_fake_tensors_pass_and_wrong_ones_are_refused_by_name(generator: torch.Generator) -> None:
    attention, _ = biased()
    real = draw(generator)
    attention(*real)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, k, v = (mode.from_tensor(t) for t in real)
        out, lse = attention(q, k, v, return_lse=True)
        assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype is torch.float32
        with pytest.raises(ca.errors.ShapeMismatch):
            attention(q, k[:, :, :5], v)


def test_the_operators_keep_torchs_rules(generator: torch.Generator) -> None:
    attention, _ = biased()
    q, k, v = draw(generator)
    serialized = attention.serialized
    assert serialized is not None
    operator = torch.ops.composattn.attend.default
    for plan in (attention.number, -1):
        for with_max in (False, True):
            named = (serialized.form, plan, with_max)
            torch.library.opcheck(operator, (q, k, v, list(serialized.tensors), *Inputs(q, k, v).flatten(), *named))
    case = make_varlen_case(0, (9, 0, 4), heads=2, dim=8)
    packed = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    named = (serialized.form, attention.number, True)
    torch.library.opcheck(
        operator, (*packed, list(serialized.tensors), *Inputs(*packed, case.varlen).flatten(), *named)
    )


def test_a_scale_of_numpys_is_a_number_in_words_too() -> None:
    serialized = ca.Attention(scale=np.float64(0.25)).serialized
    assert serialized is not None
    _, options, _ = parse(serialized.form)
    assert options == (0.25, None, None, None)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_copies_are_attentions_of_their_own(duplicate: Callable[[Any], Any], generator: torch.Generator) -> None:
    inputs = draw(generator)
    documents = torch.arange(inputs[0].shape[2]) // 3
    attention = ca.Attention(mask_mod=causal() & document(documents), score_mod=softcap(2.0))
    attention(*inputs)
    other = duplicate(attention)
    assert other.number != attention.number
    assert_same([torch.compile(other, fullgraph=True, backend="aot_eager")(*inputs)], [attention(*inputs)])


# --- packed sequences and pages --------------------------------------------------------------------------------


def test_packed_sequences_compile_into_one_graph_with_their_gradients(generator: torch.Generator) -> None:
    attention, table = biased()
    case = make_varlen_case(0, (30, 0, 20), dim=16, heads=2, used_q=(30, 0, 17))
    inputs = [x.nan_to_num().requires_grad_() for x in (case.q, case.k, case.v)]

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention(q * 1.5, k, v, return_lse=True, varlen=case.varlen)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    assert_same(gradients(compiled, inputs, table), gradients(forward, inputs, table))


def test_new_lengths_do_not_recompile() -> None:
    counter = CompileCounter()
    attention = ca.Attention(mask_mod=causal())

    @torch.compile(fullgraph=True, backend=counter)
    def forward(q: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return attention(q, q, q, varlen=ca.Varlen(offsets))

    q = torch.randn(20, 2, 8)
    for cuts in ((0, 5, 20), (0, 0, 20), (0, 20, 20), (0, 19, 20)):
        offsets = torch.tensor(cuts, dtype=torch.int32)
        assert_same([forward(q, offsets)], [attention(q, q, q, varlen=ca.Varlen(offsets))])
    assert counter.frame_count == 1


def test_pages_compile_without_a_gradient() -> None:
    attention = ca.Attention(mask_mod=causal("bottom_right"))
    case = make_paged_case(0, (40, 3, 0), q_len=2)

    def forward(q: torch.Tensor, paged: ca.Paged) -> torch.Tensor:
        return attention(q, case.k, case.v, paged=paged)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    assert_same([compiled(case.q, case.paged)], [forward(case.q, case.paged)])
    with pytest.raises(ca.errors.GradientUnsupported, match="no_grad"):
        torch.compile(forward, backend="aot_eager")(case.q.requires_grad_(), case.paged)


def test_fake_tensors_get_the_shapes_of_packed_outputs() -> None:
    with FakeTensorMode():
        q, k = torch.randn(10, 4, 8), torch.randn(12, 2, 8)
        offsets = torch.zeros(3, dtype=torch.int32)
        out, lse = ca.attention(q, k, k[..., :6], varlen=ca.Varlen(offsets, offsets), return_lse=True)
    assert out.shape == (10, 4, 6) and lse.shape == (4, 10) and lse.dtype == torch.float32


def test_a_copy_keeps_its_schedule() -> None:
    schedule = ca.Schedule(split_kv=2)
    attention = ca.Attention(mask_mod=causal(), schedule=schedule)
    assert pickle.loads(pickle.dumps(attention)).schedule == copy.deepcopy(attention).schedule == schedule


# --- make_fx ------------------------------------------------------------------------------------------------------

TRACINGS: dict[str, Any] = {
    "as it is": {}, "fake": {"tracing_mode": "fake"}, "symbolic": {"tracing_mode": "symbolic"},
    "before dispatch": {"pre_dispatch": True},
}  # fmt: skip
BY_KEY = torch.randn(50)


class Named(ca.nn.Attention):
    """Reads a buffer by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by_key", BY_KEY)

    def score_mod(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + self.by_key[kv]


HELD = ca.Attention(score_mod=lambda s, b, h, q, kv: s + BY_KEY[kv])
PLAIN = ca.Attention(mask_mod=causal())
NAMED = Named()
BLOCKS = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 50, 50, device="cpu", BLOCK_SIZE=16)
WRITTEN: dict[str, tuple[Callable[..., torch.Tensor], bool, bool]] = {
    # name: (the call, whether it adds BY_KEY, whether it is causal)
    "attention": (lambda q, k, v: ca.attention(q, k, v), False, False),
    "Attention": (lambda q, k, v: PLAIN(q, k, v), False, True),
    "reference": (lambda q, k, v: ca.attention(q, k, v, mask_mod=causal(), backend="reference"), False, True),
    "attention with a captured tensor": (
        lambda q, k, v: ca.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + BY_KEY[j]), True, False
    ),
    "Attention with a captured tensor": (lambda q, k, v: HELD(q, k, v), True, False),
    "a module": (lambda q, k, v: NAMED(q, k, v), True, False),
    "flex_attention": (lambda q, k, v: ca.flex_attention(q, k, v, block_mask=BLOCKS), False, True),
}  # fmt: skip


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, adds: bool, is_causal: bool) -> torch.Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if adds:
        scores = scores + BY_KEY
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v


def options_of(tracing: str, name: str) -> dict[str, Any]:
    options: dict[str, Any] = TRACINGS[tracing]
    if "tracing_mode" in options and WRITTEN[name][1]:
        options = {**options, "_allow_non_fake_inputs": True}  # torch takes no other tensors that a function holds
    return options


def operators_in(graph: torch.fx.GraphModule) -> list[str]:
    names = (str(node.target) for node in graph.graph.nodes)
    return [name for name in names if name.startswith("composattn")]


@pytest.mark.parametrize("tracing", TRACINGS)
@pytest.mark.parametrize("name", WRITTEN)
def test_make_fx_writes_down_the_operator(name: str, tracing: str, generator: torch.Generator) -> None:
    call, *mods = WRITTEN[name]
    call(*draw(generator))  # what is known of an earlier call is not taken
    written = make_fx(call, **options_of(tracing, name))(*draw(generator))
    assert operators_in(written) == ["composattn.attend.default"]
    inputs = draw(generator)
    assert_same([written(*inputs)], [dense(*inputs, *mods)])


# before dispatch torch takes outputs that are saved for a backward for constants, those of its own softmax too
@pytest.mark.parametrize("tracing", [tracing for tracing in TRACINGS if tracing != "before dispatch"])
@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "reference"])  # which compiles forward only
def test_make_fx_writes_down_gradients(name: str, tracing: str, generator: torch.Generator) -> None:
    call, *mods = WRITTEN[name]

    def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(call(q, k, v).sin().sum(), [q, k, v])

    call(*draw(generator))  # of a BlockMask that nobody knows, lists would be inputs, which fake tensors refuse
    written = make_fx(gradients, **options_of(tracing, name))(*draw(generator))
    assert operators_in(written) == ["composattn.attend.default", "composattn.attend_backward.default"]
    inputs = draw(generator)
    wanted = torch.autograd.grad(dense(*inputs, *mods).sin().sum(), inputs)
    assert_same(list(written(*inputs)), list(wanted))


def test_make_fx_looks_at_no_list_of_a_block_mask_that_is_new(generator: torch.Generator) -> None:
    blocks = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 50, 50, device="cpu", BLOCK_SIZE=16)
    written = make_fx(lambda q, k, v: ca.flex_attention(q, k, v, block_mask=blocks))(*draw(generator))
    assert operators_in(written) == ["composattn.attend.default"]
    inputs = draw(generator)
    assert_same([written(*inputs)], [dense(*inputs, False, True)])


@pytest.mark.parametrize("tracing", TRACINGS)
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_make_fx_below_a_transform_is_refused_by_name(transform: Any, tracing: str) -> None:
    def call(q: torch.Tensor) -> torch.Tensor:
        return PLAIN(*[q.view(1, 1, 6, 8)] * 3).sum()

    with pytest.raises(ca.errors.UnsupportedTransform, match="make_fx"):
        make_fx(transform(call), **TRACINGS[tracing])(torch.randn(1, 6, 8))
