"""What the emulator can find wrong with a kernel: one class per kind of bug, each with its place in the PTX."""

from __future__ import annotations

from composattn.errors import ComposattnError, InvalidArgument


class Finding(ComposattnError):
    """A bug found while a kernel ran. `place` names block, warp, PTX line and source line where they are known."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(f"{message}\n  at {place}" if place else message)
        self.place = place


class Deadlock(Finding):
    """No warp can go on and no asynchronous operation is left that could wake one."""


class Livelock(Finding):
    """Warps go round without end: the step limit was reached, or pollers see nothing change."""


class LaunchRefused(Finding):
    """More blocks, threads or shared memory are asked for than any launch on the device gets."""


class OutOfBounds(Finding):
    """An access outside every tensor of the call, or outside the block's shared memory."""


class Misaligned(Finding):
    """An address that is not a multiple of what its instruction takes."""


class UninitialisedShared(Finding):
    """A read of shared memory that nothing has written."""


class UninitialisedGlobal(Finding):
    """A count in device memory is added to, or waited for, and nobody has set it: it is a NaN, as fresh memory is."""


class SharedRace(Finding):
    """Two accesses to the same shared memory, one a write, that no barrier orders. Includes data still in flight."""


class MissingProxyFence(Finding):
    """The async proxy (TMA, wgmma) reads shared memory that plain stores wrote, with no fence.proxy.async between.

    Or, where a mode looks for it, a copy writes over what plain loads have read, with none between.
    """


class MissingInitFence(Finding):
    """A copy completes on an mbarrier whose initialisation nothing has made visible to the async proxy."""


class MissingGridWait(Finding):
    """A kernel that starts early uses what the kernel before it writes, with no griddepcontrol.wait before."""


class RegisterInFlight(Finding):
    """A register of an unfinished wgmma is read or written before the wait that covers it."""


class MissingWgmmaFence(Finding):
    """A wgmma takes registers that other instructions used after the last wgmma.fence."""


class UninitialisedTensor(Finding):
    """A read of tensor memory, or a product added to it, where nothing has written."""


class TensorRace(Finding):
    """Two uses of the same tensor memory, one a write, that nothing orders."""


class MissingTensorWait(Finding):
    """What a tcgen05.ld or tcgen05.st moves is used before the tcgen05.wait::ld or tcgen05.wait::st that covers it."""


class MissingTensorFence(Finding):
    """Uses of tensor memory by two threads that synchronise with no tcgen05.fence before or after it."""


class TensorLanes(Finding):
    """A warp reaches for lanes of tensor memory that are not its own (32 for each warp of a warpgroup)."""


class TensorAllocation(Finding):
    """Columns that are not allocated or not freed, a count that can't be had, or no permit to allocate any more."""


class PairMismatch(Finding):
    """What two blocks of a pair must do together they do not: counts differ, or the wrong one of them starts it."""


class BarrierOverArrival(Finding):
    """More arrivals in one phase than the barrier was initialised for."""


class BarrierMisuse(Finding):
    """A barrier used before it was initialised, initialised or invalidated while in use, or used as plain memory."""


class NegativeTransactions(Finding):
    """All threads have arrived at a barrier and more bytes came than were expected."""


class CollectiveMismatch(Finding):
    """Threads that must execute an instruction together don't: masks, counts or instructions differ."""


class RegistersExhausted(Finding):
    """Warps ask for more registers together (setmaxnreg) than a block gets at its launch: one would wait forever."""


class AsyncAtExit(Finding):
    """A block ended while a copy or matrix multiply that uses its shared memory was not waited for."""


class BadDescriptor(Finding):
    """A matrix descriptor, an instruction descriptor or a tensor map that can't be what the hardware takes."""


class UnknownInstruction(ComposattnError, NotImplementedError):
    """The emulator has no row for this PTX instruction (or for this form of it). Add one under emulator/opcodes."""


class UnknownLaunch(ComposattnError, NotImplementedError):
    """The host side asked for something that the capture does not know: an argument kind, a tensor-map kind."""


class EmulationTooLarge(InvalidArgument):
    """A call whose emulation would take longer than the limit."""
