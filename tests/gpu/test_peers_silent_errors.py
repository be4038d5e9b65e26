"""What peers get silently wrong, by the generated kernels of a GPU."""

from __future__ import annotations

import torch

from tests.silent_errors import Suite
from tests.support import gpu_backend


class TestGenerated(Suite):
    backend, length, dim, dtype, device = gpu_backend(), 700, 128, torch.bfloat16, "cuda"
