"""What peers get silently wrong, on a Hopper GPU."""

from __future__ import annotations

import torch

from tests.silent_errors import Suite


class TestHopper(Suite):
    backend, length, dim, dtype, device = "hopper", 700, 128, torch.bfloat16, "cuda"
