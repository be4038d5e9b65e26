"""Forms of arguments → what stands for them when a kernel is compiled. Imports the kernel language."""

from collections import defaultdict
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ....primitives.emit_ops import KIND
from ..planning.arguments import Form, NumberForm, TensorForm

ELEMENT = {
    torch.float32: Float32,
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.int64: Int64,
    torch.int32: Int32,
    torch.int16: cutlass.Int16,
    torch.int8: cutlass.Int8,
    torch.uint8: cutlass.Uint8,
    torch.bool: Boolean,
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
    torch.float8_e5m2: cutlass.Float8E5M2,
}


def fake_arguments(forms: tuple[Form, ...]) -> tuple[Any, ...]:
    """What to compile a host function with that takes a stream and arguments of these forms, one by one."""
    equal: defaultdict[str, Any] = defaultdict(cute.sym_int)
    return (make_fake_stream(use_tvm_ffi_env_stream=True), *(_fake(form, equal) for form in forms))


def _fake(form: Form, equal: defaultdict[str, Any]) -> Any:
    if isinstance(form, TensorForm):
        return _tensor(form, equal)
    if isinstance(form, NumberForm):
        return KIND[form.dtype](0)
    if form is None:
        return None
    parts = [_fake(part, equal) for part in form]
    return type(form)(*parts) if hasattr(form, "_fields") else tuple(parts)


def _tensor(form: TensorForm, equal: defaultdict[str, Any]) -> Any:
    any_size = cute.sym_int64 if form.long else cute.sym_int
    sizes = tuple(s if isinstance(s, int) else equal[s] if s else any_size() for s in form.sizes)
    return make_fake_tensor(ELEMENT[form.dtype], sizes, _strides(form), assumed_align=form.align)


def _strides(form: TensorForm) -> tuple[Any, ...]:
    if form.strides == "any":
        return tuple(cute.sym_int64() for _ in form.sizes)
    if form.strides == "dense":
        strides = [1]
        for size in reversed(form.sizes[1:]):
            assert isinstance(size, int), "strides that follow from sizes are known when compiling"
            strides.insert(0, size * strides[0])
        return tuple(strides)
    return (*(cute.sym_int64(divisibility=form.strides) for _ in form.sizes[1:]), 1)
