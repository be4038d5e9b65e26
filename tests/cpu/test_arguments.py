"""What launches give kernels is what the plans' descriptions say: the kernels were compiled for no other."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from benchmarks.host_work import Recorded
from composattn.backends.fused.planning.arguments import (
    CombineArguments,
    ForwardArguments,
    GatherArguments,
    MainArguments,
    NumberForm,
    PostprocessArguments,
    PreprocessArguments,
    TensorForm,
    UnitsArguments,
)
from composattn.backends.fused.running.backward_kernels import launches
from composattn.backends.fused.running.call import FusedCall
from composattn.backends.fused.running.launch import ForwardLauncher
from composattn.backends.fused.running.sums import FixedPointSums
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem, softmax_scale
from composattn.mods import alibi, causal, document, neighborhood

RECORDS: dict[str, Any] = {
    "forward": ForwardArguments,
    "combine": CombineArguments, "preprocess": PreprocessArguments,
    "backward": MainArguments, "backward_exchange": MainArguments,
    "postprocess": PostprocessArguments, "backward_gather": GatherArguments,
    "units": UnitsArguments,
}  # fmt: skip


def check(form: Any, given: Any, sizes: dict[str, int]) -> None:
    """`given` is of the form; `sizes` by name are those seen so far."""
    if isinstance(form, TensorForm):
        assert (given.dtype, given.ndim) == (form.dtype, len(form.sizes))
        for size, wanted in zip(given.shape, form.sizes, strict=True):
            expected = wanted if isinstance(wanted, int) else sizes.setdefault(wanted, size) if wanted else size
            assert size == expected
        assert given.data_ptr() % (form.align or given.element_size()) == 0
        if form.strides == "dense":
            assert given.is_contiguous()
        elif form.strides != "any":
            *others, last = given.stride()
            assert last == 1 and all(stride % form.strides == 0 for stride in others)
    elif isinstance(form, NumberForm):
        assert isinstance(given, (int, float))
    elif form is None:
        assert given is None
    else:
        for part, value in zip(form, given, strict=True):
            check(part, value, sizes)


CALLED: dict[str, tuple[Callable[..., Any], Any]] = {
    "launch": (ForwardLauncher.fill, ForwardArguments),
    "preprocess": (launches, PreprocessArguments),
    "main": (launches, MainArguments),
    "postprocess": (launches, PostprocessArguments),
    "gather": (launches, GatherArguments),
    "find_units": (FixedPointSums._find, UnitsArguments),
}


@pytest.mark.parametrize("kernel", CALLED)
def test_a_kernel_is_called_in_one_place_in_the_order_of_its_record(kernel: str) -> None:
    where, record = CALLED[kernel]
    calls = [n for n in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(where)))) if isinstance(n, ast.Call)]
    (found,) = [[ast.unparse(a) for a in call.args] for call in calls if ast.unparse(call.func) == kernel]
    assert found == list(record._fields)


class Attention(ca.Attention):
    """Kernels are only recorded."""

    def _plan(self, problem: Problem) -> Any:
        self.kernels: dict[str, Recorded] = {}
        return FusedCall(problem, self.program, softmax_scale(None, problem.head_dim), HOPPER, self._kernel)

    def _kernel(self, plan: Any) -> Recorded:
        return self.kernels.setdefault(plan.step, Recorded(plan))

    def check_arguments(self, *modules: str) -> None:
        """Checks the arguments of all kernels that were launched, `modules` among them."""
        assert set(modules) <= set(self.kernels)
        for module, kernel in self.kernels.items():
            record = RECORDS[module]
            given, forms = record(*kernel.arguments), record.of(kernel.plan)
            sizes: dict[str, int] = {}
            for name in record._fields:
                check(getattr(forms, name), getattr(given, name), sizes)


def inputs(length: int = 300, dim: int = 64, heads: tuple[int, int] = (4, 2)) -> list[torch.Tensor]:
    shapes = [(1, h, length, dim) for h in (heads[0], heads[1], heads[1])]
    return [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]


SLOPES, NUMBER = torch.linspace(0.1, 1.0, 4), torch.tensor(0.5)
IDS = torch.arange(300) // 70
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: {"mask_mod": causal()},
    "documents and slopes": lambda: {"mask_mod": causal() & document(IDS), "score_mod": alibi(SLOPES)},
    "a 0-d tensor and a run-time number": lambda: {
        "score_mod": lambda s, b, h, q, kv: s * NUMBER,
        "mask_mod": lambda b, h, q, kv: q - kv < ca.scalar(7),
    },
    "lists": lambda: {"mask_mod": lambda b, h, q, kv: IDS[q] != IDS[kv]},
    "a fixed order": lambda: {"mask_mod": causal(), "deterministic": True},
    "slopes that learn": lambda: {"score_mod": alibi(SLOPES.clone().requires_grad_())},
}
BACKWARD = "preprocess", "backward", "postprocess"


@pytest.mark.parametrize("name", CASES)
def test_dense_launches_are_as_described(name: str) -> None:
    attention = Attention(**CASES[name]())
    q, k, v = inputs()
    out, lse = attention(q, k, v, return_lse=True)  # type: ignore[misc]
    (out.sum() + lse.sum()).backward()
    attention.check_arguments("forward", *BACKWARD)


def test_wide_heads_and_cut_tiles_are_as_described() -> None:
    attention = Attention()
    attention(*inputs(1024, 256)).sum().backward()  # type: ignore[union-attr]
    attention.check_arguments("forward", "preprocess", "backward_exchange", "postprocess", "backward_gather")


def test_strips_of_an_image_are_as_described() -> None:
    attention = Attention(mask_mod=neighborhood((128, 128), 7))
    attention(*inputs(128 * 128)).sum().backward()  # type: ignore[union-attr]
    attention.check_arguments("forward", *BACKWARD)
    keys = PreprocessArguments(*attention.kernels["preprocess"].arguments).keys
    main = MainArguments(*attention.kernels["backward"].arguments)
    assert keys.shape == main.dk.shape


def test_packed_launches_are_as_described() -> None:
    attention = Attention(mask_mod=causal())
    packed = [t.detach()[0].transpose(0, 1).contiguous().requires_grad_() for t in inputs()]
    starts, used = torch.tensor([0, 100, 300], dtype=torch.int32), torch.tensor([90, 200], dtype=torch.int32)
    attention(*packed, varlen=ca.Varlen(starts, seqused_q=used)).sum().backward()  # type: ignore[union-attr]
    attention.check_arguments("forward", *BACKWARD)


@pytest.mark.parametrize("packed", [False, True])
def test_pages_in_parts_are_as_described(packed: bool) -> None:
    attention = Attention(schedule=ca.Schedule(split_kv=3))
    table = torch.arange(16, dtype=torch.int32)[None]
    pages = [torch.randn(16, 2, 16, 64, dtype=torch.bfloat16) for _ in range(2)]
    paged = ca.Paged(table, 16, torch.tensor([250], dtype=torch.int32))
    q = torch.randn((3, 4, 64) if packed else (1, 4, 3, 64), dtype=torch.bfloat16)
    varlen = ca.Varlen(torch.tensor([0, 3], dtype=torch.int32)) if packed else None
    attention(q, *pages, varlen=varlen, paged=paged, return_lse=True, return_max_scores=True)
    attention.check_arguments("forward", "combine")
