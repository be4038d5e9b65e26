"""Runs generated PTX (sm_80 to sm_121a) on a CPU, functionally, and finds deadlocks, races and other bugs in it.

The story, file by file:

    capture       what the host function asks for: grid, parameter bytes, tensor maps, for given CPU tensors
    text          a kernel's PTX, with no machine code made of it
    ptx           text to instructions; flow cuts them into nodes and finds where divergent lanes meet again
    opcodes/      what each instruction does: `alu` and `fp8` are tables of pure functions, the others handlers by name
    codegen       a node's arithmetic as one generated Python function over numpy rows (one lane per column)
    program       a kernel made ready to run; registers gives each operand its row
    gang          warps of a warpgroup that run in step, split where they part ways
    cluster       the scheduler (mode: its modes), and the operations under way; block is one thread block's state
    ledger        who wrote and read each cell of a memory, by vector clocks; barriers pass that knowledge on, so a
                  race is found in every schedule, not only where it does harm
    memory        global memory with its bounds, shared memory; tensor_memory with its allocations
    tensormap     boxes of tensors; findings: one class a kind of bug; counts: instructions

    from composattn.emulator.capture import Captured
    from composattn.emulator.launch import run
    kernel = Captured(host_function, compile_time_arguments)
    run(kernel.program, kernel.launch(*cpu_tensors), EAGER)          # or LATE, random_mode(seed), from mode

Known limits. No timing and no ptxas: register allocation, instruction order and stalls are not seen, and what ptxas
does to a wgmma with registers that it must move isn't either. Approximate functions (ex2, lg2, rcp, tanh, ...) are
numpy's, not the bits of the hardware's; subnormals are kept where .ftz would flush them; fma rounds twice (once to
float64). Products of a wgmma are summed in float64, and rounded where they are added to others; those of
8-bit numbers in steps of 32, cut to 14 bits, as the hardware does. Bulk copies with the same operands in all
lanes of a warp are made once, as the machine instruction is. Memory is sequentially consistent: a missing fence between
plain accesses to global memory is not found, nor a race on it. Launches run one after the other: of a kernel that
starts early, a use of what the one before it writes is found, a write over what that one reads is not. Barriers of
16-bit and 8-bit stores that share a word between warps are not checked for order. Blocks have tensor memory of their
own, whoever else is on the SM. Local memory, calls, textures, im2col and gathering tensor maps, tcgen05.cp and shift,
mma.sync of other shapes than 16 x 8 x 16, and products that are sparse, scaled by block, in other than fp32 or of 128
rows by a pair have no rows: using them is a named error.
"""

from __future__ import annotations
