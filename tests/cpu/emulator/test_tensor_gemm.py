"""Products in tensor memory, with operands that lie as the kernel compiler's own library lays them, against fp64."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from composattn.emulator.capture import Captured
from composattn.emulator.launch import run
from composattn.emulator.mode import EAGER, LATE, random_mode

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"
)

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
# M, N and K of a tile, what lies together in A and in B, how many blocks make it, if not one; the swizzle follows from
# how much of it a tile has
FORMS = [
    (128, 64, 64, "k", "k"), (128, 256, 32, "k", "k"), (128, 32, 16, "k", "k"), (64, 64, 64, "k", "k"),
    (128, 64, 32, "mn", "mn"), (128, 32, 32, "k", "mn"), (64, 16, 32, "mn", "k"),
    (256, 128, 64, "k", "k", 2), (256, 64, 32, "mn", "mn", 2), (128, 128, 64, "k", "k", 2), (128, 64, 32, "k", "mn", 2),
]  # fmt: skip


def captured(dtype: str, form: tuple[Any, ...]) -> Captured:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from tests.cpu.emulator.tensor_gemm_kernel import TensorGemm

    kind = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16}[dtype]

    def tensor(kind: Any, major: str) -> Any:
        far = cute.sym_int64(divisibility=8)
        stride = (far, 1) if major == "k" else (1, far)
        return make_fake_tensor(kind, (cute.sym_int(), cute.sym_int()), stride=stride, assumed_align=16)

    *_, a, b = form[:5]
    arguments = (tensor(kind, a), tensor(kind, b), tensor(cutlass.Float32, "k"), make_fake_stream())
    return Captured(TensorGemm(kind, *form), arguments, "sm_100a")


def laid(x: torch.Tensor, major: str) -> torch.Tensor:
    return x if major == "k" else x.T.contiguous().T


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gemm(form: tuple[Any, ...]) -> None:
    m, n, k, major_a, major_b = form[:5]
    dtype = "f16" if n == 32 else "bf16"
    kernel = captured(dtype, form)
    make = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 2 * k + 16, generator=make).to(DTYPES[dtype]) for rows in (2 * m, 2 * n))
    want = a.double() @ b.double().T
    a, b = laid(a, major_a), laid(b, major_b)
    results = []
    for mode in (EAGER, LATE, random_mode(1)):
        c = torch.full((2 * m, 2 * n), float("nan"))
        run(kernel.program, kernel.launch(a, b, c, dynamic_shared=100_000), mode)
        torch.testing.assert_close(c.double(), want, rtol=1e-5, atol=1e-4)
        results.append(c)
    assert all(torch.equal(c, results[0]) for c in results)
