"""Compiled kernels take what launches give them: with no GPU, up to the point where one is asked for.

The tensors lie on the CPU and say that they lie on a GPU. What decodes arguments (TVM FFI, compiled with each kernel)
looks at number, structure, dtypes, ranks, sizes, strides and addresses, and only then asks for the GPU.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import tvm_ffi

import composattn as ca
from composattn.backends.fused.compiling.compile import compile_plan
from composattn.backends.fused.running.quantise import rounded
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.eight_bits import Rounding
from composattn.mods import causal
from tests.cpu import test_arguments
from tests.cpu.test_arguments import CASES, inputs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="such a launch would run; tests/gpu has real ones")

CUDA = 2  # DLPack's number of the device type
DEVICE_TYPE = 8  # where it stands: behind the address of the data


class OnGpu:
    """A CPU tensor that says it lies on a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **asked: Any) -> Any:
        capsule = torch.utils.dlpack.to_dlpack(self.tensor.detach())
        place = ctypes.pythonapi.PyCapsule_GetPointer
        place.restype, place.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(place(capsule, b"dltensor") + DEVICE_TYPE).value = CUDA
        return capsule


def on_gpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tvm_ffi.from_dlpack(OnGpu(value))
    return tuple(map(on_gpu, value)) if isinstance(value, tuple) else value


class Decoded:
    """A compiled kernel whose launch ends where there is no GPU. `decoded` counts those that came so far."""

    def __init__(self, plan: Any) -> None:
        self.plan, self.kernel, self.decoded = plan, compile_plan(plan), 0

    def __call__(self, *arguments: Any) -> None:
        given = on_gpu(arguments)
        with pytest.raises(RuntimeError, match=r"cudaError(InsufficientDriver|NoDevice|InitializationError)"):
            self.kernel(*given)
        with pytest.raises(TypeError, match="Expects"):  # the check can fail: one argument less
            self.kernel(*given[:-1])
        self.decoded += 1


class Attention(test_arguments.Attention):
    """Kernels are compiled, and decode what launches give them."""

    def _kernel(self, plan: Any) -> Any:
        return self.kernels.setdefault(plan.step, Decoded(plan))  # type: ignore[arg-type]

    def check_decoded(self, *steps: str) -> None:
        assert set(steps) <= set(self.kernels)
        assert all(kernel.decoded for kernel in self.kernels.values())  # type: ignore[attr-defined]


BACKWARD = "preprocess", "backward", "postprocess"


@pytest.mark.parametrize(
    "name", ["documents and slopes", "a 0-d tensor and a run-time number", "lists", "a fixed order"]
)
def test_dense_launches_are_decoded(name: str) -> None:
    attention = Attention(**CASES[name]())
    q, k, v = inputs()
    out, lse = attention(q, k, v, return_lse=True)  # type: ignore[misc]
    (out.sum() + lse.sum()).backward()
    attention.check_decoded("forward", *BACKWARD)


def test_launches_of_wide_heads_and_cut_tiles_are_decoded() -> None:
    attention = Attention()
    attention(*inputs(1024, 256)).sum().backward()
    attention.check_decoded("forward", "preprocess", "backward_exchange", "postprocess", "backward_gather")


def test_packed_launches_are_decoded() -> None:
    attention = Attention(mask_mod=causal())
    packed = [t.detach()[0].transpose(0, 1).contiguous().requires_grad_() for t in inputs()]
    starts, used = torch.tensor([0, 100, 300], dtype=torch.int32), torch.tensor([90, 200], dtype=torch.int32)
    attention(*packed, varlen=ca.Varlen(starts, seqused_q=used)).sum().backward()
    attention.check_decoded("forward", *BACKWARD)


def test_launches_of_pages_in_parts_are_decoded() -> None:
    attention = Attention(schedule=ca.Schedule(split_kv=3))
    paged = ca.Paged(torch.arange(16, dtype=torch.int32)[None], 16, torch.tensor([250], dtype=torch.int32))
    pages = [torch.randn(16, 2, 16, 64, dtype=torch.bfloat16) for _ in range(2)]
    q = torch.randn((3, 4, 64), dtype=torch.bfloat16)
    varlen = ca.Varlen(torch.tensor([0, 3], dtype=torch.int32))
    attention(q, *pages, varlen=varlen, paged=paged, return_lse=True, return_max_scores=True)
    attention.check_decoded("forward", "combine")


@pytest.mark.parametrize("scale", ["head", "block", "token"])
def test_launches_of_quantize_are_decoded(scale: Any) -> None:
    kernels: list[Decoded] = []

    def kernel_of(plan: Any) -> Decoded:
        kernels.append(Decoded(plan))
        return kernels[-1]

    how = Rounding(scale, 64, hadamard=True, center=True, power_of_two=scale != "block", dtype=torch.float8_e4m3fn)
    q, k, v = (torch.randn(2, 100, 3, 96, dtype=torch.bfloat16).transpose(1, 2)[:, :h] for h in (3, 1, 1))
    for given in ((q, k, v), (q[:1], k[:1], v[:1, :, :1, :64])):
        mean = given[1].float().mean(-2, keepdim=True)
        rounded((given[0], given[1], given[2]), mean, how, HOPPER, kernel_of)
    assert kernels and all(kernel.decoded for kernel in kernels)
