"""FlexAttention code with one import changed, inside of torch.compile(fullgraph=True): mods made there, new masks."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

import composattn as ca
from composattn import errors
from composattn.mods import alibi, causal, document, relative_bias, sliding_window, softcap


def but_slow(seldom: str) -> list[Any]:
    """Compilers, of which this one and the last run with the slow tests."""
    names = ("eager", "aot_eager", "inductor")
    return [pytest.param(n, marks=[pytest.mark.slow] if n in (seldom, "inductor") else []) for n in names]


LENGTH = 64


@pytest.fixture(autouse=True)
def forget_compiled_code() -> None:
    torch._dynamo.reset()


class Model(torch.nn.Module):
    """One layer that makes its mods as it runs."""

    def __init__(self, make: Callable[..., dict[str, Any]]) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, 2 * 128).view(2, 128))
        self.cap = 3
        self.make = make

    def squashed(self, score: Any) -> Any:
        return self.cap * torch.tanh(score / self.cap)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> Any:
        return ca.attention(q * 1.5, k, v, return_lse=True, **self.make(self, ids))


def _calls_a_mask(model: Model, ids: torch.Tensor) -> dict[str, Any]:
    near = causal() & sliding_window(9)
    return {"mask_mod": lambda b, h, q, kv: near(b, h, q, kv) | (ids[q] == ids[kv])}


MADE_INSIDE: dict[str, Callable[[Model, torch.Tensor], dict[str, Any]]] = {
    "a constant on the left": lambda m, ids: {"mask_mod": lambda b, h, q, kv: (q - kv >= 0) & (q - kv < 5)},
    "a ready mask": lambda m, ids: {"mask_mod": causal()},
    "a ready mask turned around": lambda m, ids: {"mask_mod": ~causal()},
    "a condition turned around": lambda m, ids: {"mask_mod": lambda b, h, q, kv: ~(q < kv) & ~(ids[q] != ids[kv])},
    "a ready mask of a tensor": lambda m, ids: {"mask_mod": causal() & document(ids)},
    "a ready mask of a tensor made there": lambda m, ids: {"mask_mod": document(ids // 2) | ~sliding_window((3, 2))},
    "ready score mods": lambda m, ids: {"score_mod": alibi(m.bias[:, 0].exp()) >> softcap(2.5)},
    "a relative bias": lambda m, ids: {"score_mod": relative_bias(m.bias[:, :-1]), "mask_mod": causal()},
    "a lambda over a parameter": lambda m, ids: {"score_mod": lambda s, b, h, q, kv: s + m.bias[h, q - kv + 63]},
    "a lambda that reads in two steps": lambda m, ids: {"score_mod": lambda s, b, h, q, kv: s + m.bias[h][q]},
    "a lambda over a tensor made there": lambda m, ids: {
        "score_mod": lambda s, b, h, q, kv: torch.where(ids[q] == ids[kv], s, -float("inf"))
    },
    "a lambda that calls a method": lambda m, ids: {"score_mod": lambda s, b, h, q, kv: m.squashed(s) + abs(q - kv)},
    "a lambda that calls a mask": _calls_a_mask,
    "both as lambdas": lambda m, ids: {
        "mask_mod": lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]),
        "score_mod": lambda s, b, h, q, kv: s * m.bias[h, 0] + 1.0,
    },
    "blocks": lambda m, ids: {
        "mask_mod": ca.BlockSparse.topk(ids.view(1, 1, 4, 16)[..., :2] % 4, 16, 64, 64) & causal()
    },
}


def results(model: Callable[..., Any], bias: torch.Tensor, inputs: list[torch.Tensor], ids: torch.Tensor) -> list[Any]:
    out, lse = model(*inputs, ids)
    loss = out.sin().sum() + lse.nan_to_num(neginf=0.0).cos().sum()
    return [out, lse, *torch.autograd.grad(loss, [*inputs, bias], allow_unused=True)]


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def draw(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(2, 2, LENGTH, 16, generator=generator, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("compiler", but_slow("eager"))  # the other does all that it does
@pytest.mark.parametrize("name", MADE_INSIDE)
def test_mods_made_inside_give_the_eager_gradients_in_one_graph(
    name: str, compiler: str, generator: torch.Generator
) -> None:
    model = Model(MADE_INSIDE[name])
    ids, inputs = torch.arange(LENGTH) // 7, draw(generator)
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    assert_same(results(compiled, model.bias, inputs, ids), results(model, model.bias, inputs, ids))


def _attended(q: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return ca.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + bias[h, i - j], mask_mod=causal()).sin().sum()


BROKEN: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a checkpoint": lambda q, bias: torch.autograd.grad(checkpoint(_attended, q, bias, use_reentrant=False), (q, bias)),
    "what Dynamo is told to leave": lambda q, bias: torch.autograd.grad(_untouched(q, bias), (q, bias)),
    "grad of a transform": lambda q, bias: torch.func.grad(_attended, argnums=(0, 1))(q, bias),
    "each of a batch's": lambda q, bias: torch.vmap(torch.func.grad(_attended, argnums=1), (0, None))(q[None], bias),
}
_untouched = torch._dynamo.disable(_attended)


@pytest.mark.parametrize("name", BROKEN)
def test_gradients_behind_a_break_are_those_of_eager_code(name: str, generator: torch.Generator) -> None:
    """There torch compiles each function of Python that it runs, gradients of what was not compiled too."""
    q, bias = draw(generator)[0], torch.randn(2, LENGTH, generator=generator, requires_grad=True)
    compiled = torch.compile(BROKEN[name], backend="eager")
    for n in range(2):
        found, wanted = compiled(q, bias * (n + 1)), BROKEN[name](q, bias * (n + 1))
        torch.testing.assert_close(found, wanted)


def test_what_dynamo_follows_calls_no_c_function_by_a_name_of_ours(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """Torch 2.13 looks through `_new = object.__new__`, 2.11 breaks the graph there."""
    followed: dict[types.CodeType, dict[str, Any]] = {}
    run = InliningInstructionTranslator.run

    def noted(self: Any) -> Any:
        followed[self.f_code] = self.f_globals
        return run(self)

    monkeypatch.setattr(InliningInstructionTranslator, "run", noted)
    ids, inputs = torch.arange(LENGTH) // 7, draw(generator)
    for make in MADE_INSIDE.values():
        torch._dynamo.reset()
        torch.compile(Model(make), fullgraph=True, backend="eager")(*inputs, ids)
    ours = {code: scope for code, scope in followed.items() if scope["__name__"].startswith("composattn.")}
    assert {"attention", "formed", "joined", "made"} <= {code.co_name for code in ours}
    written_in_c = (types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType)
    called = [(code.co_name, name, scope.get(name)) for code, scope in ours.items() for name in code.co_names]
    assert not [
        (where, name)
        for where, name, value in called
        if isinstance(value, written_in_c) and not str(value.__module__).startswith("torch")
    ]


def test_a_region_asks_at_each_call_for_state_and_not_for_what_the_package_is_made_of(
    generator: torch.Generator,
) -> None:
    q, ids = torch.randn(1, 2, LENGTH, 16, generator=generator), torch.arange(LENGTH) // 9

    def layer(q: torch.Tensor, ids: torch.Tensor) -> Any:
        return ca.attention(q, q, q, mask_mod=causal() & document(ids), score_mod=alibi(torch.ones(2)))

    for _ in range(2):  # the first region of a process may be followed before Dynamo knows
        torch._dynamo.reset()
        torch.compile(layer, backend="eager", fullgraph=True)(q, ids)
    (entry,) = _debug_get_cache_entry_list(layer.__code__)
    asked = str(entry.guard_manager)
    assert "forward_ad._current_level" in asked and ".context.entered" in asked
    assert not re.findall(r"ID_MATCH: .*\['__import_composattn\w*'\]\.(?:\w+\.__code__|torch\.[\w.]+),", asked)


def test_new_masks_of_the_same_form_do_not_recompile(generator: torch.Generator) -> None:
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def forward(mask: ca.Mask, *x: torch.Tensor) -> Any:
        return ca.attention(*x, mask_mod=mask)

    inputs = draw(generator)
    for step in range(12):  # Dynamo gives up after 8 recompilations
        mask = causal() & document(torch.randint(0, 4, (LENGTH,), generator=generator))
        torch.testing.assert_close(forward(mask, *inputs), ca.attention(*inputs, mask_mod=mask), msg=f"step {step}")
    assert counter.frame_count == 1


def test_masks_that_differ_in_form_recompile_and_are_told_apart(generator: torch.Generator) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def forward(mask: ca.Mask, *x: torch.Tensor) -> Any:
        return ca.attention(*x, mask_mod=mask)

    inputs = draw(generator)
    for mask in (causal(), sliding_window(3), sliding_window(5), causal() & sliding_window(9), sliding_window(3)):
        torch.testing.assert_close(forward(mask, *inputs), ca.attention(*inputs, mask_mod=mask))


def test_short_vectors_in_a_compiled_region(generator: torch.Generator) -> None:
    rows = torch.randn(LENGTH, 3, generator=generator).requires_grad_()
    picked = torch.randint(0, 4, (4, 2), generator=generator)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        near = lambda s, b, h, i, j: s - (rows[i] - rows[j]).pow(2).sum(-1) + torch.dot(rows[i], rows[j])  # noqa: E731
        among = lambda b, h, i, j: (picked[i // 16] == (j // 16)[..., None]).any(-1) | (i == j)  # noqa: E731
        return ca.attention(q, k, v, score_mod=near, mask_mod=among)

    compiled, inputs = torch.compile(layer, fullgraph=True, backend="aot_eager"), draw(generator)
    found, wanted = compiled(*inputs), layer(*inputs)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(out.sin().sum(), [*inputs, rows]) for out in (found, wanted)]
    assert_same(list(gradients[0]), list(gradients[1]))


@pytest.mark.parametrize("cut", ["no_grad", "detach"])
def test_a_gradient_that_a_mod_cuts_in_a_compiled_region_is_refused(cut: str, generator: torch.Generator) -> None:
    def below_no_grad(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        with torch.no_grad():
            part = torch.tanh(s)
        return s + part

    mod = below_no_grad if cut == "no_grad" else lambda s, b, h, q, kv: s + s.detach()
    compiled = torch.compile(lambda q, k, v: ca.attention(q, k, v, score_mod=mod), fullgraph=True, backend="aot_eager")
    with pytest.raises(errors.UnsupportedOperation, match="detach"):
        compiled(*draw(generator))


def test_a_number_that_a_mod_reads_is_guarded(generator: torch.Generator) -> None:
    model = Model(lambda m, ids: {"mask_mod": lambda b, h, q, kv: (q >= kv) & (q - kv < m.cap)})
    compiled, inputs = torch.compile(model, fullgraph=True, backend="aot_eager"), draw(generator)
    ids = torch.zeros(LENGTH, dtype=torch.int64)
    for width in (3, 4, 5, 3):
        model.cap = width
        torch.testing.assert_close(compiled(*inputs, ids)[0], model(*inputs, ids)[0])


def test_flex_attention_code_compiles_as_it_stands(generator: torch.Generator) -> None:
    counter = CompileCounter()
    bias = torch.randn(2, generator=generator, requires_grad=True)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: Any) -> torch.Tensor:
        return ca.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h] * (i - j), block_mask=block_mask)

    compiled, inputs = torch.compile(layer, fullgraph=True, backend=counter), draw(generator)
    for seed in range(10):  # a new mask a step
        ids = torch.randint(0, 3, (LENGTH,), generator=torch.Generator().manual_seed(seed))

        def visible(b: Any, h: Any, q: Any, kv: Any, ids: torch.Tensor = ids) -> Any:
            return (q >= kv) & (ids[q] == ids[kv])

        block_mask = create_block_mask(visible, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
        found, wanted = compiled(*inputs, block_mask), layer(*inputs, block_mask)
        torch.testing.assert_close(found, wanted)
        gradients = [torch.autograd.grad(out.sin().sum(), [*inputs, bias]) for out in (found, wanted)]
        assert_same(list(gradients[0]), list(gradients[1]))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_block_masks_of_other_lengths_compile_as_they_stand(dynamic: bool | None, generator: torch.Generator) -> None:
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter, dynamic=dynamic)
    def forward(q: torch.Tensor, block_mask: Any) -> Any:
        return ca.flex_attention(q, q, q, block_mask=block_mask)

    for length in (64, 96, 128, 160):
        ids = torch.arange(length) // 7
        block_mask = create_block_mask(
            lambda b, h, q, kv, ids=ids: ids[q] == ids[kv], None, None, length, length, device="cpu", BLOCK_SIZE=32
        )
        q = torch.randn(1, 2, length, 16, generator=generator)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=ids[:, None] == ids)
        torch.testing.assert_close(forward(q, block_mask), wanted)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_blocks_picked_in_a_step_may_be_of_other_lengths(dynamic: bool | None, generator: torch.Generator) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def forward(q: torch.Tensor, picked: torch.Tensor) -> Any:
        return ca.attention(q, q, q, mask_mod=ca.BlockSparse.topk(picked, 32, q.shape[2], q.shape[2]))

    for length in (64, 96, 128):
        rows = length // 32
        picked = torch.stack([torch.randperm(rows, generator=generator)[:2] for _ in range(rows)])[None, None]
        q = torch.randn(1, 2, length, 16, generator=generator)
        blocks = torch.zeros(rows, rows, dtype=torch.bool).scatter_(1, picked[0, 0], True)
        seen = blocks.repeat_interleave(32, 0).repeat_interleave(32, 1)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=seen)
        torch.testing.assert_close(forward(q, picked), wanted)


def test_scalars_change_without_recompiling(generator: torch.Generator) -> None:
    counter, width = CompileCounter(), ca.scalar(4)

    @torch.compile(fullgraph=True, backend=counter)
    def forward(*x: torch.Tensor) -> Any:
        return ca.attention(*x, mask_mod=lambda b, h, q, kv: (q >= kv) & (q - kv < width))

    inputs = draw(generator)
    for value in (4, 9, 1):
        width.value = value
        wanted = ca.attention(*inputs, mask_mod=causal() & sliding_window(value - 1))
        torch.testing.assert_close(forward(*inputs), wanted)
    assert counter.frame_count == 1


@pytest.mark.parametrize("made", [True, False])
def test_a_scalar_that_a_region_makes_or_sets_is_refused_in_one_graph_and_right_elsewhere(
    made: bool, generator: torch.Generator
) -> None:
    x, width = draw(generator), ca.scalar(4)

    def forward(value: int) -> Any:
        mine = ca.scalar(value) if made else width
        mine.value = value
        return ca.attention(*x, mask_mod=lambda b, h, q, kv: (q >= kv) & (q - kv < mine))

    with pytest.raises(Exception, match=r"UnsupportedCapture\('a ca.scalar is made or set in a compiled region"):
        torch.compile(forward, fullgraph=True, backend="eager")(3)
    torch._dynamo.reset()
    for value in (9, 2):
        wanted = ca.attention(*x, mask_mod=causal() & sliding_window(value - 1))
        torch.testing.assert_close(torch.compile(forward, backend="eager")(value), wanted)


def test_what_compiled_code_writes_to_a_captured_tensor_is_seen(generator: torch.Generator) -> None:
    ids = torch.zeros(LENGTH, dtype=torch.int64)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def forward(new: torch.Tensor, *x: torch.Tensor) -> Any:
        ids.copy_(new)
        return ca.attention(*x, mask_mod=document(ids))

    inputs = draw(generator)
    for size in (7, 20, 3):
        new = torch.arange(LENGTH) // size
        torch.testing.assert_close(forward(new, *inputs), ca.attention(*inputs, mask_mod=document(new)))


@pytest.mark.parametrize(
    ("mod", "says"),
    [
        (lambda s, b, h, q, kv: s if s > 0 else -s, "truth value"),
        (lambda s, b, h, q, kv: s + torch.rand(()), "random"),
    ],
)
def test_what_no_kernel_can_say_is_refused_by_name(mod: Any, says: str, generator: torch.Generator) -> None:
    compiled = torch.compile(lambda *x: ca.attention(*x, score_mod=mod), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=says):
        compiled(*draw(generator))


# --- integers that change ---------------------------------------------------------------------------------------


def _relative_to_the_end(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    length = q.shape[2]
    return ca.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + TABLE[h, i - j + length + 32])


BY_NUMBER: dict[str, Callable[..., Any]] = {
    "a comparison": lambda q, k, v, n: ca.attention(q, k, v, mask_mod=lambda b, h, i, j: (i >= j) & (i - j < n)),
    "a comparison turned around": lambda q, k, v, n: ca.attention(
        q, k, v, mask_mod=lambda b, h, i, j: (n > i - j) & (n != j + 1) & (i >= j)
    ),
    "arithmetic": lambda q, k, v, n: ca.attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s + (n - i) * 0.1 + (j // n) % (n // 2 + 1)
    ),
    "an argument": lambda q, k, v, n: ca.attention(
        q, k, v, score_mod=lambda s, b, h, i, j: torch.where(torch.minimum(i, j).clamp(max=n) > 2, s, n)
    ),
    "an index": lambda q, k, v, n: ca.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + TABLE[h, n]),
    "a ready mask": lambda q, k, v, n: ca.attention(q, k, v, mask_mod=causal() & sliding_window((n, None))),
    "a function of flex_attention": lambda q, k, v, n: ca.flex_attention(
        q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i - j <= n, s, -float("inf"))
    ),
    "a length": lambda q, k, v, n: _relative_to_the_end(q[:, :, :n], k, v),
}
TABLE = torch.linspace(-1, 1, 2 * 128).view(2, 128)


@pytest.mark.parametrize("backend", but_slow("aot_eager"))  # what is compiled is counted with the other
@pytest.mark.parametrize("name", BY_NUMBER)
def test_an_integer_that_changes_runs_the_code_compiled_before(name: str, backend: str) -> None:
    layer, counter = BY_NUMBER[name], CompileCounter()
    compiled = torch.compile(layer, backend=counter if backend == "eager" else backend, fullgraph=True)
    x = [torch.randn(1, 2, LENGTH, 8).requires_grad_() for _ in range(3)]
    for n in (5, 7, 12, 30, 3):
        found, wanted = ([out, *torch.autograd.grad(out.sin().sum(), x)] for out in (compiled(*x, n), layer(*x, n)))
        assert_same(found, wanted)
    assert counter.frame_count <= 2


def test_an_integer_that_outgrows_32_bits_is_followed() -> None:
    def layer(x: torch.Tensor, n: int) -> Any:
        return ca.attention(x, x, x, mask_mod=lambda b, h, i, j: (i >= j) & (j * 2**40 < n))

    compiled, x = torch.compile(layer, backend="eager", fullgraph=True), torch.randn(1, 2, LENGTH, 8)
    for n in (5, 7, 2**31 - 1, 2**43, -(2**45), 9):
        assert_same([compiled(x, n)], [layer(x, n)])


def test_threads_that_run_the_same_code_have_numbers_of_their_own() -> None:
    def layer(x: torch.Tensor, n: int) -> Any:
        return ca.attention(x, x, x, mask_mod=lambda b, h, i, j: (i >= j) & (i - j < n))

    compiled, x = torch.compile(layer, backend="eager", fullgraph=True), torch.randn(1, 2, LENGTH, 8)
    wanted = {n: layer(x, n) for n in range(2, 40)}
    for n in (2, 3):
        compiled(x, n)
    with ThreadPoolExecutor(4) as threads:
        for n, found in zip(wanted, threads.map(lambda n: compiled(x, n), wanted), strict=True):
            assert_same([found], [wanted[n]])


@pytest.mark.parametrize("name", ["scale", "dropout_p"])
def test_numbers_of_a_call_may_vary(name: str) -> None:
    q = torch.randn(1, 2, 16, 8)

    def call(number: float) -> torch.Tensor:
        options: dict[str, Any] = {name: number}
        return ca.attention(q, q, q, dropout_seed=3 if name == "dropout_p" else None, **options)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for number in (0.5, 0.25, 0.125, *((2, 3) if name == "scale" else ())):
        torch.testing.assert_close(compiled(number), call(number))
