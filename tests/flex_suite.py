"""torch's own tests of FlexAttention, run on our backends: `python -m tests.flex_suite FOLDER [FILTER]`.

FOLDER has `test_flex_attention.py` and `test_flex_decoding.py`, as torch's repository has them in `test/inductor`. They
are read and changed in memory; nothing of them is kept here:

- what runs on a GPU there runs on the CPU, gradients too;
- what is compiled there calls `composattn.flex_attention`, in place of what torch compiles. A call that is not compiled
  is torch's own plain attention, so in fp64 it is the truth, as in torch's tests. A test that compiles no attention is
  run with ours in all places;
- errors are held to the classes that torch's tests ask for, not to their words;
- sequences are an eighth as long. A test that is not right so is run again at its own lengths;
- counts of torch's compilations are left out.

A test is right, wrong, or refused (an error of `composattn.errors` ended it). Not counted are those that call no
attention, those whose own decorators skip them, and those of `NOT_ASKED`. `EXPECTED` names what may end otherwise than
right, with the reason; another end of a test is a failure of this program.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import re
import sys
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.experimental._paged_attention as paged
import torch.nn.attention.flex_attention as flex
from torch._higher_order_ops.flex_attention import math_attention

import composattn as ca
from composattn import errors

FILES = ("test_flex_attention.py", "test_flex_decoding.py")
RIGHT, REFUSED, WRONG, NOT_COUNTED = "right", "refused", "wrong", "not counted"
LN_2 = 0.6931471805599453

# Names from the start, without the class.
NOT_ASKED = {
    "test_epilogue_fused": "looks into code that torch generates",
    "test_fw_bw_graph_correctness": "looks into graphs that torch makes",
    "test_symbol_closure_in_score_mod": "looks into graphs that torch makes",
    "test_subgraph_respect_decompostion": "looks into graphs that torch makes",
    "test_kernel_options_argument_is_respected": "looks into code that torch generates",
    "test_logsumexp_only_return": "looks into code that torch generates",
    "test_captured_wrong_device_error_message": "needs two devices",
    "test_mixed_device_error_message": "needs two devices",
}
ZERO = "a gradient that is 0 but for rounding: 8e-8 beside 0, and 7.6e-7 beside 4.6e-7 of another attention"
OF_HALVES = "its truth sums the gradient of a table of halves in halves, on a CPU: 0.19 off where ours is 6e-4"
EXPECTED = {
    "test_cant_lower_error_message": (REFUSED, "torch refuses it too, by another class"),
    "test_captured_score_mod_aot_eager_gradcheck": (REFUSED, "a table for 8 heads in a call of 2"),
    "test_builtin_score_mods_seqlen_lt_custom_sparse_block_size_float16_score_mod4": (WRONG, ZERO),
    "test_comparison_vs_sdpa_with_learnable_bias": (WRONG, ZERO),
    "test_indirect_bias": (WRONG, ZERO),
    **dict.fromkeys(("test_local_window_bias", "test_relative_1d_bias"), (WRONG, OF_HALVES)),
    "test_symmetric_bias": (WRONG, "two reads of a tensor that learns, which torch's kernels refuse, are taken"),
    "test_invalid_block_size": (WRONG, "blocks of 96, which torch's kernels refuse, are taken"),
    **{
        f"test_flex_attention_stride_ordering_mode_{mode}_permute_order2_shape0": (
            WRONG,
            "a dimension of 1 has no place",
        )
        for mode in ("eager", "inductor", "paged_attention")
    },
}

# In this order. Comparisons with "cpu" leave gradients and LSE out there; ours have both.
CHANGES = (
    (r"([=!]=) *\"cpu\"", r'\1 "no such device"'),
    (r"\"cuda(:0)?\"", '"cpu"'),
    (r"\.cuda\(\)", ".cpu()"),
    (r"\btorch\.compile\b", "compiled_by_us"),
    (r"(?m)^( *)self\.assert\w+\(\s*torch\._dynamo\.utils\.counters\[.*$", r"\1pass"),
)
SHORTER = (r"(?m)^S = 2048$", "S = 256")


@dataclass
class Calls:
    """Whose attention is called: ours in what torch would compile, or everywhere."""

    everywhere: bool = False
    depth: int = 0  # of compiled functions
    ours: int = 0  # calls so far

    def attention(self, *args: Any, **options: Any) -> Any:
        if not (self.everywhere or self.depth):
            return plain(*args, **options)
        self.ours += 1
        return ca.flex_attention(*args, **options)

    def compiled(self, function: Any = None, **_: Any) -> Any:
        """In place of torch.compile, called or as a decorator."""
        if function is None:
            return self.compiled

        @functools.wraps(function, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1

        return call


def plain(
    q: Any, k: Any, v: Any, score_mod: Any = None, block_mask: Any = None, scale: float | None = None, **options: Any
) -> Any:
    """What torch's flex_attention computes where it is not compiled; that call would start torch's compiler all the
    same."""
    block_mask = flex._create_empty_block_mask(q, k) if block_mask is None else block_mask
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse, top = math_attention(q, k, v, score_mod or flex._identity, block_mask.as_tuple(), scale, {})
    aux = options.get("return_aux")
    if aux is not None:
        return out, flex.AuxOutput(lse * LN_2 if aux.lse else None, top * LN_2 if aux.max_scores else None)
    return (out, lse * LN_2) if options.get("return_lse") else out


def block_mask_on_a_cpu(*args: Any, device: Any = "cpu", **options: Any) -> Any:
    options.pop("_compile", None)
    return flex.create_block_mask(*args, device=device, **options)


class Paged(paged.PagedAttention):
    """On a CPU; takes positions (S) that all batch entries share, which tests of torch 2.6 give."""

    def __init__(self, *args: Any, device: Any = "cpu", **options: Any) -> None:
        super().__init__(*args, device=device, **options)

    def assign(self, batch: torch.Tensor, position: torch.Tensor, *tensors: torch.Tensor) -> None:
        shared = position.ndim == 1
        super().assign(batch, position.expand(len(batch), -1) if shared else position, *tensors)


def asserts_raises(case: Any, kind: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
    return case.assertRaises(kind, *args, **kwargs)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """What torch's tests ask of the machine as they are loaded: an A100 is there."""
    from torch.testing._internal import common_cuda, common_device_type, inductor_utils

    def decorates(*_: Any) -> Callable[[Any], Any]:
        return lambda test: test

    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (8, 0)),
        mock.patch.object(torch.utils._triton, "has_triton", lambda: True),
        mock.patch.object(common_cuda, "PLATFORM_SUPPORTS_BF16", True),
        mock.patch.object(inductor_utils, "HAS_GPU", True),
        mock.patch.object(common_device_type, "flex_attention_supported_platform", lambda test: test, create=True),
        mock.patch.object(common_device_type, "skipCPUIf", decorates),
    ):
        yield


def loaded(path: Path, calls: Calls, *, shorter: bool) -> types.ModuleType:
    """The file as a module, changed."""
    text = path.read_text()
    for pattern, by in (*CHANGES, *((SHORTER,) if shorter else ())):
        text = re.sub(pattern, by, text)
    module = types.ModuleType(path.stem)
    sys.modules[path.stem] = module
    module.__dict__.update(__file__=str(path), compiled_by_us=calls.compiled)
    with (
        as_on_a_gpu(),
        mock.patch.object(flex, "flex_attention", calls.attention),
        mock.patch.object(flex, "create_block_mask", block_mask_on_a_cpu),
        mock.patch.object(paged, "PagedAttention", Paged),
    ):
        exec(compile(text, str(path), "exec"), module.__dict__)
    return module


class Outcome(unittest.TestResult):
    """The end of one test, and why."""

    kind, reason = RIGHT, ""

    def addSkip(self, test: Any, reason: str) -> None:
        self.kind, self.reason = NOT_COUNTED, reason

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.reason = "torch expects to fail here"

    def addError(self, test: Any, err: Any) -> None:
        self.kind = REFUSED if isinstance(err[1], errors.ComposattnError) else WRONG
        self.reason = f"{err[0].__name__}: {str(err[1]).strip().partition(chr(10))[0]}"

    addFailure = addError


def run(case: Any, calls: Calls, *, everywhere: bool = False) -> Outcome:
    from torch.testing._internal.common_utils import TestCase

    outcome = Outcome()
    calls.everywhere, calls.depth, calls.ours = everywhere, 0, 0
    torch.manual_seed(0)
    with contextlib.ExitStack() as patched:
        for kind in (unittest.TestCase, TestCase):
            patched.enter_context(mock.patch.object(kind, "assertRaisesRegex", asserts_raises))
        case(outcome)
    return outcome


Module = tuple[types.ModuleType, Calls]


def outcome_of(kind: str, test: str, modules: tuple[Module, ...]) -> Outcome:
    """The end in the module with shorter sequences; where that is not right, in the one with the test's own lengths."""
    for pattern, reason in NOT_ASKED.items():
        if test.startswith(pattern):
            outcome = Outcome()
            outcome.addSkip(None, reason)
            return outcome
    for module, calls in modules:
        case = getattr(module, kind)
        outcome = run(case(test), calls)
        if outcome.kind == NOT_COUNTED:
            break
        if not calls.ours:
            outcome = run(case(test), calls, everywhere=True)
        if not calls.ours:
            outcome.addSkip(None, "calls no attention")
        elif outcome.kind == RIGHT:
            break
    return outcome


def cases_of(module: types.ModuleType) -> list[tuple[str, str]]:
    """(class, method) of all."""
    cases = {
        one.__name__: one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, unittest.TestCase) and one.__module__ == module.__name__
    }
    names = unittest.defaultTestLoader.getTestCaseNames
    return sorted((name, test) for name, one in cases.items() for test in names(one))


def expected_of(test: str) -> tuple[str, str]:
    return next((end for pattern, end in EXPECTED.items() if test.startswith(pattern)), (RIGHT, ""))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.flex_suite", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="test/inductor of a copy of torch's repository")
    parser.add_argument("filter", nargs="?", default="", help="a regular expression that names of tests must have")
    parser.add_argument("--json", type=Path, help="where to write the ends of all tests")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, unexpected = [], 0
    for file in FILES:
        modules = [
            (loaded(options.folder / file, calls, shorter=shorter), calls)
            for shorter, calls in ((True, Calls()), (False, Calls()))
        ]
        for kind, test in cases_of(modules[0][0]):
            if not re.search(options.filter, f"{kind}.{test}"):
                continue
            outcome = outcome_of(kind, test, tuple(modules))
            wanted, why = expected_of(test)
            row = {"test": f"{kind}.{test}", "outcome": outcome.kind, "reason": outcome.reason}
            rows.append(row)
            differs = outcome.kind not in (RIGHT, wanted, NOT_COUNTED)
            unexpected += differs
            if differs or outcome.kind != RIGHT:
                said = "UNEXPECTED: " if differs else ""
                print(f"{outcome.kind:11} {row['test']}: {said}{why or outcome.reason[:150]}", flush=True)
    counts = Counter(row["outcome"] for row in rows)
    counted = len(rows) - counts[NOT_COUNTED]
    print(
        f"torch {torch.__version__}: {counts[RIGHT]} of {counted} right, {unexpected} not as expected; {dict(counts)}"
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
