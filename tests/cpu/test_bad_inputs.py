"""Every bad input is refused by its own named error, and the message says what would work."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import composattn as ca
from composattn import errors
from composattn.call.checks import refuse_arguments
from composattn.call.inputs import Inputs
from composattn.mods import masks, scores


def qkv(
    q: tuple[int, ...] = (2, 4, 16, 32),
    k: tuple[int, ...] | None = None,
    v: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    return [torch.randn(s).to(dtype) for s in (q, k or q, v or k or q)]


def call(*tensors: object, **options: object) -> object:
    return ca.attention(*tensors, **options)  # type: ignore[arg-type]


def meta(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.to("meta") for t in tensors]


BLOCK_MASK = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 16, 16, device="cpu")
LAZY = torch.nn.UninitializedParameter()
TABLE = torch.randn(4, 16)
ON_META = TABLE.to("meta")
COMPLEX = TABLE.to(torch.complex64)

CASES: dict[str, tuple[type[errors.ComposattnError], Callable[[], object]]] = {
    # tensors
    "q-is-a-list": (errors.NotATensor, lambda: call([1.0], *qkv()[1:])),
    "q-has-three-dimensions": (errors.WrongRank, lambda: call(torch.randn(2, 4, 8), *qkv()[1:])),
    "v-has-five-dimensions": (errors.WrongRank, lambda: call(*qkv()[:2], torch.randn(1, 2, 4, 16, 32))),
    "batches-differ": (errors.ShapeMismatch, lambda: call(*qkv((2, 4, 16, 32), (3, 4, 16, 32)))),
    "k-and-v-heads-differ": (errors.ShapeMismatch, lambda: call(*qkv((2, 4, 16, 32), (2, 4, 16, 32), (2, 2, 16, 32)))),
    "k-v-lengths-differ": (errors.ShapeMismatch, lambda: call(*qkv((2, 4, 16, 32), (2, 4, 16, 32), (2, 4, 15, 32)))),
    "q-and-k-head-dims-differ": (errors.ShapeMismatch, lambda: call(*qkv((2, 4, 16, 32), (2, 4, 16, 64)))),
    "group-does-not-divide": (errors.GroupMismatch, lambda: call(*qkv((2, 6, 16, 32), (2, 4, 16, 32)))),
    "more-kv-heads-than-q-heads": (errors.GroupMismatch, lambda: call(*qkv((2, 2, 16, 32), (2, 4, 16, 32)))),
    "no-heads": (errors.EmptyDimension, lambda: call(*qkv((2, 0, 16, 32), (2, 1, 16, 32)))),
    "head-dim-zero": (errors.EmptyDimension, lambda: call(*qkv((2, 4, 16, 0)))),
    "dtypes-differ": (errors.DTypeMismatch, lambda: call(*qkv()[:2], qkv(dtype=torch.bfloat16)[2])),
    "integers": (errors.UnsupportedDType, lambda: call(*qkv(dtype=torch.int32))),
    "complex": (errors.UnsupportedDType, lambda: call(*qkv(dtype=torch.complex64))),
    "devices-differ": (errors.DeviceMismatch, lambda: call(*qkv()[:2], *meta(qkv()[2]))),
    "sparse": (errors.UnsupportedLayout, lambda: call(*[t.to_sparse() for t in qkv()])),
    # scale
    "scale-is-nan": (errors.InvalidScale, lambda: call(*qkv(), scale=math.nan)),
    "scale-is-infinite": (errors.InvalidScale, lambda: call(*qkv(), scale=math.inf)),
    "scale-is-a-tensor": (errors.InvalidScale, lambda: call(*qkv(), scale=torch.tensor(1.0))),
    "scale-is-beyond-all-floats": (errors.InvalidScale, lambda: call(*qkv(), scale=10**400)),
    "scale-is-text": (errors.InvalidScale, lambda: call(*qkv(), scale="0.1")),
    # mods
    "mask-is-not-callable": (errors.WrongSignature, lambda: call(*qkv(), mask_mod=3)),
    "mask-is-a-tensor": (errors.WrongComposition, lambda: call(*qkv(), mask_mod=torch.ones(16, 16).bool())),
    "score-is-a-tensor": (errors.WrongComposition, lambda: call(*qkv(), score_mod=torch.ones(16, 16))),
    "mask-takes-five-arguments": (errors.WrongSignature, lambda: call(*qkv(), mask_mod=lambda s, b, h, q, kv: q >= kv)),
    "score-takes-four-arguments": (errors.WrongSignature, lambda: call(*qkv(), score_mod=lambda b, h, q, kv: q >= kv)),
    "mask-returns-a-float": (errors.WrongReturn, lambda: call(*qkv(), mask_mod=lambda b, h, q, kv: q * 0.5)),
    "mask-returns-an-int": (errors.WrongReturn, lambda: call(*qkv(), mask_mod=lambda b, h, q, kv: q - kv)),
    "mask-returns-nothing": (errors.WrongReturn, lambda: call(*qkv(), mask_mod=lambda b, h, q, kv: None)),
    "score-returns-a-bool": (errors.WrongReturn, lambda: call(*qkv(), score_mod=lambda s, b, h, q, kv: s > 0)),
    "score-returns-nothing": (errors.WrongReturn, lambda: call(*qkv(), score_mod=lambda s, b, h, q, kv: None)),
    "mask-given-as-score": (errors.WrongComposition, lambda: call(*qkv(), score_mod=masks.causal())),
    "score-given-as-mask": (errors.WrongComposition, lambda: call(*qkv(), mask_mod=scores.softcap(20.0))),
    "masks-joined-with-and": (errors.WrongComposition, lambda: masks.causal() and masks.sliding_window(4)),
    "score-joined-with-a-mask": (errors.WrongComposition, lambda: scores.softcap(20.0) >> masks.causal()),
    "capture-on-another-device": (
        errors.DeviceMismatch,
        lambda: call(*qkv(), score_mod=lambda s, b, h, q, kv: s + ON_META[h, q]),
    ),
    "capture-used-whole": (errors.UnindexedTensor, lambda: call(*qkv(), score_mod=lambda s, b, h, q, kv: s + TABLE)),
    "capture-read-with-a-float": (
        errors.InvalidRead,
        lambda: call(*qkv(), score_mod=lambda s, b, h, q, kv: s + TABLE[h, q * 0.5]),
    ),
    "capture-read-out-of-range": (
        errors.ConstantIndexOutOfRange,
        lambda: call(*qkv(), score_mod=lambda s, b, h, q, kv: s + TABLE[9, q]),
    ),
    "capture-is-complex": (
        errors.TypeMismatch,
        lambda: call(*qkv(), score_mod=lambda s, b, h, q, kv: s + COMPLEX[h, q]),
    ),
    "scalar-from-text": (errors.UnsupportedCapture, lambda: ca.scalar("2")),  # type: ignore[arg-type]
    # backends
    "unknown-backend": (errors.UnknownBackend, lambda: call(*qkv(), backend="triton")),
    "backend-is-a-list": (errors.UnknownBackend, lambda: call(*qkv(), backend=["streaming"])),
    "deterministic-is-text": (errors.UnsupportedOption, lambda: call(*qkv(), deterministic="yes")),
    "everything-on-meta": (errors.BackendUnavailable, lambda: call(*meta(*qkv()))),
    "nested": (errors.UnsupportedLayout, lambda: call(*[torch.nested.as_nested_tensor([torch.ones(4, 9, 8)] * 2)] * 3)),
    # captured tensors shorter than the call
    "fewer-slopes-than-query-heads": (
        errors.CapturedIndexOutOfRange,
        lambda: call(*qkv(k=(2, 2, 16, 32)), score_mod=scores.alibi(torch.ones(2))),
    ),
    "lengths-of-fewer-sequences": (
        errors.CapturedIndexOutOfRange,
        lambda: call(*qkv(), mask_mod=masks.padding(torch.tensor([7]))),
    ),
    "windows-of-fewer-heads": (
        errors.CapturedIndexOutOfRange,
        lambda: call(*qkv(), mask_mod=masks.sliding_window(torch.tensor([7, 8]))),
    ),
    "documents-of-a-shorter-sequence": (
        errors.CapturedIndexOutOfRange,
        lambda: call(*qkv(), mask_mod=masks.document(torch.zeros(12).int())),
    ),
    "offsets-of-a-shorter-sequence": (
        errors.CapturedIndexOutOfRange,
        lambda: call(*qkv(), mask_mod=masks.document(offsets=torch.tensor([0, 12]))),
    ),
    "bias-of-fewer-keys": (
        errors.CapturedIndexOutOfRange,
        lambda: call(*qkv(), score_mod=scores.bias(torch.ones(4, 16, 12))),
    ),
    # arithmetic
    "division-by-zero": (errors.DivisionByZero, lambda: call(*qkv(), mask_mod=lambda b, h, q, kv: kv % q == 0)),
    "beyond-64-bits": (errors.TypeMismatch, lambda: call(*qkv(), mask_mod=lambda b, h, q, kv: q < 10**30)),
    "beyond-all-floats": (errors.TypeMismatch, lambda: call(*qkv(), mask_mod=lambda b, h, q, kv: q < 10**400)),
    "a-scalar-that-is-a-fraction": (errors.UnsupportedCapture, lambda: ca.scalar(Fraction(1, 2))),
    "a-block-mask-as-mask-mod": (errors.WrongComposition, lambda: call(*qkv(), mask_mod=BLOCK_MASK)),
    "a-lazy-parameter": (
        errors.UnsupportedCapture,
        lambda: call(*qkv(), score_mod=lambda s, b, h, q, kv: s * LAZY[h]),
    ),
    # looks at a mask
    "called-at-nothing": (errors.InvalidArgument, lambda: masks.causal()(None, 0, 0, 0)),
    "called-at-text": (errors.InvalidArgument, lambda: masks.causal()("a", 0, 0, 0)),
    "called-at-a-fraction": (errors.InvalidArgument, lambda: masks.causal()(0, 0, 1.5, 0)),
    "called-at-floats": (errors.InvalidArgument, lambda: masks.causal()(0, 0, torch.ones(2), 0)),
    "called-at-shapes-that-clash": (
        errors.ShapeMismatch,
        lambda: masks.causal()(0, 0, torch.arange(3), torch.arange(4)),
    ),
    "scores-that-are-text": (errors.InvalidArgument, lambda: scores.softcap(2.0)("a", 0, 0, 0, 0)),
    "dense-beyond-32-bits": (errors.InvalidArgument, lambda: masks.causal().dense(2**70, 2)),
    "tiles-beyond-32-bits": (errors.InvalidArgument, lambda: masks.causal().tiles(2**31, 2)),
    "dense-beyond-memory": (errors.InvalidArgument, lambda: masks.causal().dense(10**7, 10**7)),
    "dense-on-no-device": (errors.InvalidArgument, lambda: masks.causal().dense(4, 4, device="nonsense")),
    "tiles-on-no-device": (errors.InvalidArgument, lambda: masks.causal().tiles(4, 4, device="nonsense")),
    "tiles-on-a-number": (errors.InvalidArgument, lambda: masks.causal().tiles(4, 4, device=1.5)),  # type: ignore[arg-type]
    "checks-that-are-text": (errors.UnsupportedOption, lambda: ca.debug_checks("no")),  # type: ignore[arg-type]
    "a-keyword-of-sdpa": (errors.UnknownKeyword, lambda: refuse_arguments((), ["is_causal"])),
    "operator-with-short-lists": (errors.SequencesMismatch, lambda: Inputs.unflatten(*qkv(), [], [])),
    "jit-trace-of-a-call": (errors.UnsupportedTransform, lambda: torch.jit.trace(lambda q: call(q, q, q), (qkv()[0],))),
    "tile-is-a-number": (errors.InvalidArgument, lambda: masks.causal().tiles(16, 16, tile=16)),
    "dense-of-negative-length": (errors.InvalidArgument, lambda: masks.causal().dense(-1, 16)),
    "picture-of-nothing": (errors.InvalidArgument, lambda: masks.causal().picture("mask.svg", 0)),
    "picture-of-another-kind": (errors.InvalidArgument, lambda: masks.causal().picture("mask.png")),
    "alignment-is-a-list": (errors.InvalidModArgument, lambda: masks.causal(["top_left"])),
    "hopper-for-cpu-tensors": (errors.BackendUnavailable, lambda: call(*qkv(), backend="hopper")),
    "blackwell-for-cpu-tensors": (errors.BackendUnavailable, lambda: call(*qkv(), backend="blackwell")),
    # the drop-in
    "flex-gqa-not-enabled": (errors.GroupMismatch, lambda: ca.flex_attention(*qkv((2, 4, 16, 32), (2, 2, 16, 32)))),
    "flex-block-mask-is-a-function": (
        errors.BlockMaskMismatch,
        lambda: ca.flex_attention(*qkv(), block_mask=lambda b, h, q, kv: q >= kv),
    ),
}


def test_a_nested_tensor_is_refused_after_dense_ones() -> None:
    dense = qkv()
    nested = torch.nested.as_nested_tensor(list(dense[0]))
    attention = ca.Attention()
    attention(*dense)
    for n in range(3):
        with pytest.raises(errors.UnsupportedLayout, match="nested"):
            attention(*dense[:n], nested, *dense[n + 1 :])


@pytest.mark.parametrize("kind", CASES)
def test_bad_input_is_refused_by_name(kind: str) -> None:
    error, bad = CASES[kind]
    with pytest.raises(error) as refusal:
        bad()
    assert len(str(refusal.value)) > 30, "the message must say what would work"


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_a_mask_on_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(errors.InvalidArgument, match="cuda"):
        masks.causal().tiles(4, 4, device="cuda")


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_tensors_of_several_processes_are_refused_by_name() -> None:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(errors.UnsupportedTransform, match="local"):
        call(*(distribute_tensor(t, mesh) for t in qkv()))


def test_keywords_of_other_attention_functions_are_refused_with_what_to_write() -> None:
    instead = {"is_causal": "causal()", "block_mask": "flex_attention", "dropout_p": "dropout"}
    instead |= {"need_weights": "attention_weights", "key_padding_mask": "padding(real)"}
    instead |= {"block_table": "composattn.Paged(", "max_seqlen_q": "composattn.Varlen(", "learnable_sink": "sinks"}
    instead |= {"return_attn_probs": "return_lse=True"}
    for name, words in instead.items():
        with pytest.raises(TypeError, match=re.escape(words)):
            refuse_arguments((), [name])


def test_what_stands_behind_q_k_and_v_is_asked_for_by_its_name() -> None:
    for made in (ca.Attention, ca.nn.Attention):
        for call in (lambda: made(masks.causal()), lambda: made()(*qkv(), masks.causal())):  # noqa: B023
            with pytest.raises(errors.UnnamedArgument, match=r"of type Mask has no name here; .*mask_mod="):
                call()
    with pytest.raises(errors.UnnamedArgument, match=r"of type Mask has no name here; .*mask_mod="):
        ca.attention(*qkv(), masks.causal())  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'v'"):
        ca.attention(*qkv()[:2])  # type: ignore[call-overload]


def test_an_argument_at_the_wrong_place_or_nearly_named_is_told_where_it_belongs() -> None:
    with pytest.raises(errors.UnknownKeyword, match=r"an Attention is made with it: composattn.Attention\(mask_mod="):
        ca.Attention()(*qkv(), mask_mod=masks.causal())  # type: ignore[call-overload]
    with pytest.raises(errors.UnknownKeyword, match=r"it is called scale here"):
        ca.attention(*qkv(), sm_scale=1.0)  # type: ignore[call-overload]
    for name, instead in (("k_scale", r"Quantized\(k, k_scale\)"), ("context_parallel", "with cp:")):
        with pytest.raises(errors.UnknownKeyword, match=instead):
            ca.nn.Attention()(*qkv(), **{name: 1.0})
    with pytest.raises(errors.UnknownKeyword, match=r"torch\.manual_seed"):
        ca.nn.Attention(dropout_seed=1)
    with pytest.raises(errors.UnknownKeyword, match=r"it belongs to the call: .*\(q, k, v, varlen="):
        ca.Attention(varlen=None)
    with pytest.raises(errors.UnknownKeyword, match="was mask_mod meant"):
        ca.nn.Attention(mask=masks.causal())
    with pytest.raises(errors.UnknownKeyword, match=r"an Attention is made with it: composattn.Attention\(mask_mod="):
        ca.nn.Attention()(*qkv(), mask_mod=masks.causal())
    with pytest.raises(errors.UnknownKeyword, match="was mask_mod meant"):
        ca.attention(*qkv(), mask=masks.causal())  # type: ignore[call-overload]
    with pytest.raises(errors.UnknownKeyword, match=r"'nonsense' here; see help\(composattn.attention\)"):
        ca.attention(*qkv(), nonsense=1)  # type: ignore[call-overload]


def test_a_name_that_is_elsewhere_is_said_to_be_there() -> None:
    sought = {"score_mod": r"by composattn\.score\(fn\)", "mask_mod": r"by composattn\.mask\(fn\)"}
    sought |= {"causal": "it is composattn.mods.causal", "testing": "import composattn.testing", "nowhere": "nowhere'$"}
    for name, words in sought.items():
        with pytest.raises(AttributeError, match=words):
            ca.__getattr__(name)


def test_functions_of_numbers_and_lists_of_masks_are_told_what_to_write() -> None:
    with pytest.raises(errors.UnsupportedOperation, match=r"write torch's, as torch\.exp"):
        ca.score(lambda s, b, h, q, kv: s + np.exp(q - kv))
    with pytest.raises(errors.ScalarExtraction, match="functions of math"):
        ca.score(lambda s, b, h, q, kv: s + math.exp(q - kv))
    with pytest.raises(errors.DataDependentBranch, match="`in`"):
        ca.mask(lambda b, h, q, kv: kv in [1, 2])
    with pytest.raises(errors.WrongSignature, match="got list; join masks with & "):
        ca.mask([masks.causal(), masks.sliding_window(4)])  # type: ignore[arg-type]
    with pytest.raises(errors.UnsupportedOperation, match=r"bucketize is not .* read that by index; available .* add"):
        ca.score(lambda s, b, h, q, kv: s + TABLE[h, torch.bucketize(q - kv, TABLE[0])])
    with pytest.raises(errors.ReductionInMod, match=r"\(a\[q_idx\] \* b\[kv_idx\]\)\.sum\(-1\)"):
        ca.score(lambda s, b, h, q, kv: s + torch.einsum("d,d->", TABLE[h, q], TABLE[h, kv]))


def test_what_else_would_be_taken_is_said() -> None:
    table = torch.zeros(64, 64)
    with pytest.raises(errors.InvalidModArgument, match=r"how many heads\), or a float tensor \(H,\)"):
        scores.alibi([0.5, 0.25])  # type: ignore[arg-type]
    with pytest.raises(
        errors.InvalidModArgument, match=r"ca\.scalar, or a tensor of integers, \(\) or \(H,\), got 2\.5"
    ):
        masks.sliding_window(2.5)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidModArgument, match=r"window \(its left\) must be at least 0, got -3"):
        masks.sliding_window(-3)
    for window in ((1, 2, 3), [4, 0]):
        with pytest.raises(errors.InvalidModArgument, match=r"left, or a tuple \(left, right\), got [\(\[]"):
            masks.sliding_window(window)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidModArgument, match=r"or bools \(B, Skv\), True .*, got \(2, 4\)"):
        masks.padding(torch.ones(2, 4, dtype=torch.int64))  # a tokenizer's mask
    with pytest.raises(errors.UnindexedTensor, match=r"an index is missing: tensor\[q_idx, kv_idx\]"):
        ca.score(lambda s, b, h, q, kv: s + table[q])


def test_a_mask_and_a_score_are_made_of_functions_too() -> None:
    q, k, v = qkv()
    mask, score = ca.Mask(lambda b, h, q, kv: q >= kv), ca.Score(lambda s, b, h, q, kv: s * 2)
    wanted = ca.attention(q, k, v, mask_mod=masks.causal(), score_mod=score)
    assert torch.equal(ca.attention(q, k, v, mask_mod=mask, score_mod=lambda s, b, h, q, kv: s * 2), wanted)
    assert mask == masks.causal() and ca.Mask(mask) == mask and ca.Mask(mask, "mine").name == "mine"
    with pytest.raises(errors.WrongSignature):
        ca.Mask(lambda s, b, h, q, kv: s)


def test_capture_with_whole_tensor_operation_before_the_read_is_refused() -> None:
    with pytest.raises(errors.ComposattnError):
        ca.attention(*qkv(), score_mod=lambda s, b, h, q, kv: s + TABLE.exp()[h, q])


def test_refusals_are_the_built_in_errors_that_users_expect() -> None:
    assert issubclass(errors.InvalidArgument, ValueError)
    assert issubclass(errors.NotATensor, TypeError)
    assert issubclass(errors.WrongSignature, TypeError)
    assert issubclass(errors.CapturedIndexOutOfRange, IndexError)


def test_no_refusal_on_a_correct_call_after_a_refused_one() -> None:
    attend = ca.Attention(mask_mod=masks.causal())
    with pytest.raises(errors.ShapeMismatch):
        attend(*qkv((2, 4, 16, 32), (3, 4, 16, 32)))
    out = attend(*qkv())
    assert isinstance(out, torch.Tensor) and out.shape == (2, 4, 16, 32)


TO_WRITE = {
    "is_causal": "mask_mod=composattn.mods.causal()",
    "attn_mask": "mask_mod=lambda b, h, q, kv: mask[b, h, q, kv]",
    "block_mask": "mask_mod=composattn.BlockSparse.from_block_mask(...)",
    "mask_mode": "was mask_mod meant?",
    "nonsense": "see help(composattn.attention)",
}


@pytest.mark.parametrize("name", TO_WRITE)
def test_keywords_of_other_attentions_are_refused_with_what_to_write(name: str) -> None:
    q = torch.zeros(1, 1, 4, 8)
    words = f"no argument '{name}' here; .*{re.escape(TO_WRITE[name])}"
    for call in (ca.attention, ca.Attention()):
        with pytest.raises(errors.UnknownKeyword, match=words):
            call(q, q, q, **{name: True})
    with pytest.raises(errors.UnknownKeyword, match=words):
        ca.Attention(**{name: True})
