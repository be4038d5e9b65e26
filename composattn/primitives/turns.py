"""Numbers in device memory by which blocks say to others what is done, and wait for it."""

import cutlass.cute as cute
from cutlass import Boolean, Int32


@cute.jit
def say(turn: cute.Pointer, condition: Boolean):
    """One more has added, and what it added is there."""
    if condition:
        cute.arch.inline_ptx(
            "{\n\tfence.acq_rel.gpu;\n\tred.relaxed.gpu.global.add.s32 [{$r0}], {$r1};\n\t}",
            read_only_args=[turn, Int32(1)],
        )


@cute.jit
def wait_for(turn: cute.Pointer, wanted: Int32):
    """Until the number there is `wanted` or more; what was done before it was put there is seen from now on."""
    found = read(turn)
    while found < wanted:
        found = read(turn)


@cute.jit
def arrive_if(turn: cute.Pointer, condition: Boolean) -> Int32:
    """One more arrives; how many had before, where the condition holds. What these did is seen from now on."""
    found = Int32(0)
    if condition:
        found = cute.arch.inline_ptx(
            "{\n\tfence.acq_rel.gpu;\n\tatom.relaxed.gpu.global.add.s32 {$w0}, [{$r0}], 1;\n\tfence.acq_rel.gpu;\n\t}",
            write_only_types=[Int32],
            read_only_args=[turn],
        )
    return found


def read(turn: cute.Pointer) -> Int32:
    """The number there; what was done before it was put there is seen from now on."""
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[turn]
    )


@cute.jit
def publish_if(turn: cute.Pointer, value: Int32, condition: Boolean):
    """Puts a number there for those who see with it what was done before."""
    if condition:
        cute.arch.inline_ptx(
            "{\n\tfence.acq_rel.gpu;\n\tst.relaxed.gpu.global.s32 [{$r0}], {$r1};\n\t}",
            read_only_args=[turn, value],
        )


@cute.jit
def put_if(turn: cute.Pointer, value: Int32, condition: Boolean):
    """Puts a number there for the next kernel: with no fence, which a warp waits for."""
    if condition:
        cute.arch.inline_ptx("st.relaxed.gpu.global.s32 [{$r0}], {$r1};", read_only_args=[turn, value])
