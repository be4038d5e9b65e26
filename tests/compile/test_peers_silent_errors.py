"""What peers get silently wrong, in the kernels for Hopper, emulated."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

from tests.silent_errors import Suite


class TestHopperEmulated(Suite):
    backend, heads, dim, dtype = "hopper-emulated", (2, 1), 64, torch.bfloat16
