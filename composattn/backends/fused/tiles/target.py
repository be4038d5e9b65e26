"""The GPUs that kernels are generated for: one frozen record each, usable with no GPU present."""

from __future__ import annotations

import dataclasses

import torch

from ....errors import BackendUnavailable

CHOOSES = {"why": "a tiling is chosen by it, whose fields say what came of it"}


@dataclasses.dataclass(frozen=True)
class Target:
    """Facts of one GPU that planning and code generation need.

    `gpu` is what people call it, `backend` names who generates its kernels, `arch` its machine code, which runs on no
    other: there is a row for each compute capability. `shared_memory` is what one block can get, in bytes; `registers`
    what one SM has, and `exp2_per_clock` results of exponentials (FlashAttention-4, 2026); `memory_rate`: of device
    memory, in GB/s. `maximum_by_load`: what loads the results of products also gives the largest of them.
    `copies_in_bulk`: one instruction brings a tile of a tensor to shared memory, and an mbarrier tells when.
    """

    gpu: str = dataclasses.field(compare=False, metadata={"why": "for people to read"})
    backend: str
    arch: str
    sms: int
    shared_memory: int
    registers: int
    exp2_per_clock: int
    maximum_by_load: bool = dataclasses.field(default=False, compare=False, metadata=CHOOSES)
    memory_rate: int = dataclasses.field(default=4800, compare=False, metadata=CHOOSES)
    copies_in_bulk: bool = True

    @staticmethod
    def of(device: torch.device) -> Target:
        """The target of a CUDA device; raises `BackendUnavailable` where no kernel is generated for it."""
        facts = torch.cuda.get_device_properties(device)
        target = TARGETS.get((facts.major, facts.minor))
        if target is None:
            known = ", ".join(f"{major}.{minor} ({t.arch})" for (major, minor), t in TARGETS.items())
            raise BackendUnavailable(
                f"no generated kernel for {facts.name} (compute capability {facts.major}.{facts.minor}); generated "
                f'kernels take {known}, backend="streaming" takes any device'
            )
        found = dataclasses.replace(target, gpu=facts.name, sms=facts.multi_processor_count)
        if not hasattr(facts, "memory_bus_width"):  # older versions of torch do not say
            return found
        # kHz, bits, two transfers a clock
        rate = 2 * facts.memory_clock_rate * facts.memory_bus_width // (8 * 10**6)
        return dataclasses.replace(found, memory_rate=rate)


HOPPER = Target(
    "H200", "hopper", "sm_90a", sms=132, shared_memory=227 * 1024, registers=65536, exp2_per_clock=16,
)  # fmt: skip
BLACKWELL = Target(
    "B200", "blackwell", "sm_100a", sms=148, shared_memory=227 * 1024, registers=65536, exp2_per_clock=16,
)  # fmt: skip

# Shared memory by the table "technical specifications per compute capability" of the CUDA C++ Programming Guide
AMPERE = Target(
    "A100", "warp", "sm_80", sms=108, shared_memory=163 * 1024, registers=65536, exp2_per_clock=16,
    memory_rate=2039, copies_in_bulk=False,
)  # fmt: skip
ADA = Target(
    "RTX 4090", "warp", "sm_89", sms=128, shared_memory=99 * 1024, registers=65536, exp2_per_clock=16,
    memory_rate=1008, copies_in_bulk=False,
)  # fmt: skip

TARGETS = {
    (8, 0): AMPERE,
    (8, 6): dataclasses.replace(ADA, gpu="RTX 3090", arch="sm_86", sms=82, memory_rate=936),
    (8, 7): dataclasses.replace(AMPERE, gpu="Jetson AGX Orin", arch="sm_87", sms=16, memory_rate=204),
    (8, 9): ADA,
    (9, 0): HOPPER,
    (10, 0): BLACKWELL,
    (10, 3): dataclasses.replace(BLACKWELL, gpu="B300", arch="sm_103a", exp2_per_clock=32, maximum_by_load=True),
    (12, 0): dataclasses.replace(ADA, gpu="RTX 5090", arch="sm_120a", sms=170, memory_rate=1792, copies_in_bulk=True),
    (12, 1): dataclasses.replace(ADA, gpu="GB10", arch="sm_121a", sms=48, memory_rate=273, copies_in_bulk=True),
}
