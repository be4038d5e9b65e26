"""ca.nn.Attention reads its tensors by name at each call: what stands there then is read, and gets the gradient."""

from __future__ import annotations

import copy
import functools
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

import composattn as ca
from composattn import errors
from composattn.analysis.refreshed import version
from composattn.mods import alibi, causal, document, sliding_window

LENGTH = 24


class Biased(ca.nn.Attention):
    """Mods as methods, over a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, 2 * 2 * LENGTH).view(2, 2 * LENGTH))
        self.register_buffer("ids", torch.arange(LENGTH) // 7)

    def score_mod(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + self.bias[h, q - kv + LENGTH]

    def mask_mod(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (self.ids[q] == self.ids[kv])


class Given(ca.nn.Attention):
    """Ready mods, whose tensors the module owns."""

    def __init__(self) -> None:
        super().__init__(
            score_mod=alibi(torch.nn.Parameter(torch.tensor([0.25, 0.5]))),
            mask_mod=causal() & document(torch.arange(LENGTH) // 5),
        )


def inputs(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, LENGTH, 8, generator=generator, dtype=dtype) for _ in range(3)]


def assert_follows(module: ca.nn.Attention, gradient: bool = True) -> None:
    """That a call reads the tensors which the module has now: as a fresh module that was given copies of them."""
    fresh = type(module)()
    state = {
        name: t.detach().clone()
        for name, t in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items()
    }
    fresh.load_state_dict(state)
    x = inputs(1)
    torch.testing.assert_close(module(*x), fresh(*x))
    if gradient:
        for m in (module, fresh):
            m.zero_grad()
            m(*x).sin().sum().backward()
        for (name, p), q in zip(module.named_parameters(), fresh.parameters(), strict=True):
            assert p.grad is not None, name
            torch.testing.assert_close(p.grad, q.grad)


@pytest.fixture(params=[Biased, Given])
def module(request: pytest.FixtureRequest) -> ca.nn.Attention:
    made: ca.nn.Attention = request.param()
    made(*inputs())  # planned, with the tensors of now
    return made


def test_a_module_trains_what_its_mods_read(module: ca.nn.Attention) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        assert_follows(module)
        optimizer.step()


def test_ready_mods_give_their_tensors_to_the_module() -> None:
    names = dict(Given().named_parameters()).keys() | dict(Given().named_buffers()).keys()
    assert names == {"score_mod_0", "mask_mod_0"}


def test_load_state_dict_by_assignment_is_followed(module: ca.nn.Attention) -> None:
    state = {
        name: torch.nn.Parameter(t + 1.0) if t.is_floating_point() else t // 2
        for name, t in module.state_dict().items()
    }
    module.load_state_dict(state, assign=True)
    assert_follows(module)


def test_functional_call_reads_the_given_parameters(module: ca.nn.Attention) -> None:
    x = inputs(2)
    given = {name: (p * 3.0).detach().requires_grad_() for name, p in module.named_parameters()}
    out = torch.func.functional_call(module, given, tuple(x))
    other = copy.deepcopy(module)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3.0)
    torch.testing.assert_close(out, other(*x))
    out.sum().backward()
    assert all(t.grad is not None for t in given.values())
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("is_known", [True, False])
def test_parametrizations_are_followed(is_known: bool) -> None:
    """The mod may be traced for the first time when its parameter is already computed."""

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2.0 * x

    class Own(Biased):
        def score_mod(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return score + self.bias[h, q - kv + LENGTH]

    module, plain, x = Own(), Own(), inputs(3)
    if is_known:
        module(*x)
    parametrize.register_parametrization(module, "bias", Double())
    with torch.no_grad():
        plain.bias.mul_(2.0)
    torch.testing.assert_close(module(*x), plain(*x))
    module(*x).sum().backward()
    assert module.parametrizations.bias.original.grad is not None


@pytest.mark.parametrize("fullgraph", [True, False])
def test_parametrizations_are_followed_in_compiled_code(fullgraph: bool) -> None:
    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2.0 * x

    class Own(Biased):
        def score_mod(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return score + self.bias[h, q - kv + LENGTH] * self.bias[h, 0]

    torch._dynamo.reset()
    module, x = Own(), [t.requires_grad_() for t in inputs(3)]
    parametrize.register_parametrization(module, "bias", Double())
    compiled, learned = torch.compile(module, fullgraph=fullgraph, backend="aot_eager"), module.parametrizations.bias
    for _ in range(2):
        found, wanted = compiled(*x), module(*x)
        torch.testing.assert_close(found, wanted)
        gradients = [torch.autograd.grad(out.sin().sum(), [*x, learned.original]) for out in (found, wanted)]
        torch.testing.assert_close(gradients[0], gradients[1])
        with torch.no_grad():
            learned.original.add_(0.5)


def test_meta_modules_are_followed_once_they_have_memory() -> None:
    with torch.device("meta"):
        module = Biased()
    module.to_empty(device="cpu")
    module.load_state_dict(Biased().state_dict())
    assert_follows(module)


@pytest.mark.parametrize("swap", [False, True])
def test_moves_are_followed(module: ca.nn.Attention, swap: bool) -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        module.to(torch.float64)
        x = inputs(4, torch.float64)
        assert module(*x).dtype is torch.float64
        module(*x).sum().backward()
        assert all(p.grad is not None and p.grad.dtype is torch.float64 for p in module.parameters())
        module.zero_grad()
        module.to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert_follows(module)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: _loaded(m)], ids=["copied", "saved and loaded"])
def test_copies_have_tensors_of_their_own(module: ca.nn.Attention, duplicate: Callable[[Any], Any]) -> None:
    other = duplicate(module)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    x = inputs(5)
    assert not torch.equal(module(*x), other(*x))
    assert_follows(other)


def _loaded(module: torch.nn.Module) -> Any:
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    return torch.load(saved, weights_only=False)


@pytest.fixture
def one_process_group() -> Iterator[None]:
    if not torch.distributed.is_available():
        pytest.fail("torch is built without torch.distributed")
    with tempfile.NamedTemporaryFile() as file:
        torch.distributed.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def test_fully_sharded_modules_are_trained(one_process_group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Biased()

        def forward(self, *x: torch.Tensor) -> Any:
            return self.attention(*x)

    sharded, plain = Block(), Block()
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    fully_shard(sharded, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (sharded, plain)]
    for seed in range(3):
        losses = []
        for m, optimizer in zip((sharded, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = m(*inputs(seed)).sin().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1])
    bias: Any
    (bias,) = sharded.parameters()
    assert bias.grad is not None
    torch.testing.assert_close(bias.full_tensor(), plain.attention.bias.data)


@pytest.mark.parametrize("through", [lambda w: w, torch.Tensor.detach], ids=["parameter", "view"])
def test_a_mask_follows_a_parameter_that_is_gathered_again_into_the_same_memory(
    one_process_group: None, through: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    from torch.distributed.fsdp import fully_shard

    x = [torch.randn(1, 1, 256, 64).bfloat16() for _ in range(3)]

    def near(reach: torch.Tensor, backend: str) -> Any:
        mask = ca.mask(lambda b, h, q, kv: (q >= kv) & ((q - kv) * 1.0 < reach[h, q]))
        return ca.attention(*x, mask_mod=mask, backend=backend)

    class Near(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reach = torch.nn.Parameter(torch.ones(1, 1 << 20))

        def forward(self) -> Any:
            assert version(through(self.reach)) is None, "FSDP2 preserves the version"
            return near(through(self.reach), "hopper-emulated")

    module: Any = Near()
    fully_shard(module, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    with torch.no_grad():
        for reach in (8.0, 200.0, 30.0):
            module.reach.to_local().fill_(reach)
            found = module()
            module.reshard()
            true = near(torch.full((1, 256), reach), "reference")
            torch.testing.assert_close(found, true, atol=3e-2, rtol=3e-2)


def test_beside_fully_sharded_modules_other_tensors_count_their_writes() -> None:
    import torch.distributed.fsdp

    alone, lengths = torch.nn.Parameter(torch.ones(4)), torch.arange(9)[2:5]
    assert version(alone) == version(alone) is not None
    assert version(lengths) == version(lengths) is not None


class OverACaptured(torch.nn.Module):
    """An `Attention` made once, over a parameter of the module."""

    def __init__(self) -> None:
        super().__init__()
        bias = self.bias = torch.nn.Parameter(torch.zeros(2, 2 * LENGTH))
        self.attention = ca.Attention(score_mod=lambda s, b, h, q, kv: s + bias[h, q - kv + LENGTH])

    def forward(self, *x: torch.Tensor) -> Any:
        return self.attention(*x)


class OverAClosure(OverACaptured):
    """The parameter of `OverACaptured`, in a mod that is looked at in each call."""

    def __init__(self) -> None:
        super().__init__()
        bias = self.bias
        self.mod = lambda s, b, h, q, kv: s + bias[h, q - kv + LENGTH]

    def forward(self, *x: torch.Tensor) -> Any:
        return ca.attention(*x, score_mod=self.mod)


def flattened(module: torch.nn.Module, as_they_were: bool) -> torch.nn.Module:
    """In one flat parameter; `as_they_were`: which optimizers see as the parameters of before."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process, and that there is a newer way
        return FullyShardedDataParallel(module, use_orig_params=as_they_were, device_id=torch.device("cpu"))


@pytest.mark.parametrize("as_they_were", [True, False])
def test_modules_of_one_flat_parameter_are_trained(one_process_group: None, as_they_were: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    plain = Biased()
    sharded = flattened(copy.deepcopy(plain), as_they_were)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (sharded, plain)]
    for seed in range(3):
        losses = []
        for m, optimizer in zip((sharded, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = m(*inputs(seed)).sin().sum()
            loss.backward()
            losses.append(loss.detach())
        gradients = [next(m.parameters()).grad for m in (sharded, plain)]
        assert all(g is not None for g in gradients)
        torch.testing.assert_close(gradients[0].flatten(), gradients[1].flatten())  # type: ignore[union-attr]
        torch.testing.assert_close(losses[0], losses[1])
        for optimizer in optimizers:
            optimizer.step()
    with FullyShardedDataParallel.summon_full_params(sharded):
        torch.testing.assert_close(next(sharded.parameters()).flatten(), plain.bias.flatten())


@pytest.mark.parametrize("kind", [OverACaptured, OverAClosure])
def test_a_captured_parameter_that_became_a_part_of_a_flat_one_is_refused_by_name(
    one_process_group: None, kind: type[torch.nn.Module]
) -> None:
    module = kind()
    module(*inputs())
    sharded = flattened(module, as_they_were=True)  # else torch says nowhere what became of it
    with pytest.raises(errors.CapturedTensorChanged, match=r"ca.nn.Attention"):
        sharded(*inputs())


def test_a_module_compiles_into_one_graph(module: ca.nn.Attention) -> None:
    torch._dynamo.reset()
    compiled, x = torch.compile(module, fullgraph=True, backend="aot_eager"), inputs(6)
    torch.testing.assert_close(compiled(*x), module(*x))
    (wanted,) = torch.autograd.grad(module(*x).sin().sum(), list(module.parameters()))
    (found,) = torch.autograd.grad(compiled(*x).sin().sum(), list(module.parameters()))
    torch.testing.assert_close(found, wanted)


def test_options_and_functions_are_taken_as_attention_takes_them() -> None:
    module = ca.nn.Attention(mask_mod=lambda b, h, q, kv: q - kv < 3, scale=0.5, backend="reference")
    x = inputs(7)
    torch.testing.assert_close(module(*x), ca.attention(*x, mask_mod=sliding_window((2, None)), scale=0.5))
    assert "scale=0.5" in repr(module)
    out, lse = module(*x, return_lse=True)
    assert lse.shape == out.shape[:3]


class Elsewhere(ca.nn.Attention):
    """Its mask comes from where torch does not look."""

    def __getattr__(self, name: str) -> Any:
        return sliding_window(2) if name == "mask_mod" else super().__getattr__(name)


class Called(torch.nn.Module):
    def forward(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv <= 2) & (q >= 0)


def test_a_mod_is_found_wherever_an_attribute_may_be() -> None:
    x = inputs()
    wanted = ca.attention(*x, mask_mod=sliding_window(2))
    assert not torch.equal(wanted, ca.attention(*x))
    module: Any = ca.nn.Attention()
    plain: Any = ca.nn.Attention()
    instance = Elsewhere()
    module.mask_mod = Called()
    plain.mask_mod = sliding_window(2)
    for layer in (module, plain, instance):
        torch.testing.assert_close(layer(*x), wanted)
    for refused in (ca.nn.Attention(), ca.nn.Attention()):
        refused.mask_mod = torch.nn.Parameter(torch.zeros(2))
        with pytest.raises(errors.WrongComposition):
            refused(*x)
    buffered = ca.nn.Attention()
    buffered.register_buffer("score_mod", torch.zeros(2))
    with pytest.raises(errors.WrongComposition):
        buffered(*x)


class Printed(ca.nn.Attention):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.bias = torch.nn.Parameter(torch.zeros(8))
        self.again = ca.nn.Attention(score_mod=functools.partial(self.moved, by=2.0), mask_mod=Seeing())

    def score_mod(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + self.bias[h]

    def moved(self, score: Any, b: Any, h: Any, q: Any, kv: Any, by: float) -> Any:
        return score + self.bias[h] * by


class Seeing(torch.nn.Module):
    def forward(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv


def test_a_module_is_printed_by_the_names_of_its_mods() -> None:
    shown = repr(Printed(mask_mod=causal(), scale=0.5))
    assert "score_mod=Printed.score_mod, mask_mod=causal, scale=0.5" in shown
    assert "score_mod=partial(Printed.moved)" in shown
    shown = repr(ca.nn.Attention(score_mod=lambda score, b, h, q, kv: score, sinks=torch.zeros(4)))
    assert "score_mod=<lambda>, sinks=(4,)" in shown
