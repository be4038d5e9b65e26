"""The GPUs that kernels are generated for: one frozen record each, usable with no GPU present."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from composattn.errors import BackendUnavailable

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Target:
    """Facts of one GPU that planning and code generation need.

    `backend` names the folder of its kernels. `shared_memory` is what one block can get, in bytes; `registers` what
    one multiprocessor has; `l2` the bytes of second-level cache.
    """

    backend: str
    arch: str
    sms: int
    shared_memory: int
    registers: int
    l2: int

    @staticmethod
    def of(device: torch.device) -> Target:
        """The target of a CUDA device; raises `BackendUnavailable` where no kernel is generated for it."""
        import torch

        facts = torch.cuda.get_device_properties(device)
        family = _FAMILIES.get(facts.major)
        if family is None:
            raise BackendUnavailable(
                f"no generated kernel for {facts.name} (compute capability {facts.major}.{facts.minor}); "
                f'generated kernels take 9.0 (Hopper) and 10.x (Blackwell), backend="streaming" takes any device'
            )
        return dataclasses.replace(family, sms=facts.multi_processor_count, l2=facts.L2_cache_size)


HOPPER = Target("hopper", "sm_90a", sms=132, shared_memory=227 * 1024, registers=65536, l2=50 << 20)
BLACKWELL = Target("blackwell", "sm_100a", sms=148, shared_memory=227 * 1024, registers=65536, l2=126 << 20)

_FAMILIES = {9: HOPPER, 10: BLACKWELL}
