"""Every refusal by name: what was got, what is taken, and the way out.

All classes derive from `ComposattnError` and from the built-in exceptions that Python users would expect
(`TypeError`, `ValueError`, ...) and torch's flex_attention raises, so `except ValueError` keeps working.
"""

from __future__ import annotations


class ComposattnError(Exception):
    """Base of everything that composattn raises on purpose."""


# --- tracing -----------------------------------------------------------------------------------------------


class TraceError(ComposattnError):
    """A callable can't become a graph. `line` is the user's own source line, quoted in the message."""

    def __init__(self, message: str, line: str | None = None) -> None:
        super().__init__(f"{message}\n  at {line}" if line else message)
        self.line = line


class DataDependentBranch(TraceError, TypeError):
    """`if`, `and`, `or`, `not`, `while` or `assert` on a traced value."""


class ScalarExtraction(TraceError, TypeError):
    """`.item()`, `float()`, `int()` or use as a Python index of a traced value."""


class InPlaceWrite(TraceError, TypeError):
    """A write into a traced value or a captured tensor."""


class RandomNumber(TraceError, TypeError):
    """A random number drawn inside a mod."""


class ReductionInMod(TraceError, TypeError):
    """A reduction, matrix product or other non-pointwise function inside a mod."""


class UnsupportedOperation(TraceError, TypeError):
    """A function that has no row in the table of operations."""


class DivisionByZero(ComposattnError, ZeroDivisionError):
    """Integers of a mod divided by a value that is zero at some pair."""


class InvalidRead(TraceError, IndexError):
    """A captured tensor read with slices, a non-integer index, too many or too few indices."""


class ConstantIndexOutOfRange(TraceError, IndexError):
    """A captured tensor read at a constant position that it does not have."""


class UnindexedTensor(TraceError, TypeError):
    """A captured tensor of rank above 0 used whole."""


class TypeMismatch(TraceError, TypeError):
    """An operation applied to value types that it does not take (`~` of a float, `-` of two bools, ...)."""


class WrongReturn(TraceError, TypeError):
    """A mask that returns something other than a bool, or a score mod that returns something other than a number."""


class WrongSignature(ComposattnError, TypeError):
    """A mod that can't be called as mask_mod(b, h, q, kv) or score_mod(score, b, h, q, kv)."""


class WrongComposition(ComposattnError, TypeError):
    """A score mod where a mask belongs, `and` for `&`, and the like."""


class InvalidModArgument(ComposattnError, ValueError):
    """An argument of a ready-made mask or score mod: a negative window, a table of the wrong rank, ..."""


class UnknownLength(ComposattnError, ValueError):
    """A mod that depends on the sequence lengths, called on positions alone."""


class CapturedIndexOutOfRange(ComposattnError, IndexError):
    """A captured tensor read outside of its shape at a position that the mask leaves visible."""


# --- the arguments of a call -------------------------------------------------------------------------------


class InvalidArgument(ComposattnError, ValueError):
    """An argument of attention() that no backend could take."""


class NotATensor(InvalidArgument, TypeError):
    """q, k, v or a tensor of sequence lengths is not a torch.Tensor."""


class WrongRank(InvalidArgument):
    """q, k or v does not have the dimensions (B, H, S, D), or (total, H, D) where packed; cu_seqlens is not 1-d, ..."""


class ShapeMismatch(InvalidArgument):
    """Batch, head dimension or length of q, k and v, or the number of sequences, disagree."""


class ModShapeMismatch(ShapeMismatch):
    """A mod made for another number of query heads or batch entries than the call has: a longer table, `alibi(8)`."""


class GroupMismatch(InvalidArgument):
    """The number of query heads is not a multiple of the number of key/value heads."""


class EmptyDimension(InvalidArgument):
    """Batch, heads, head dimension or length is zero where it can't be."""


class DTypeMismatch(InvalidArgument, TypeError):
    """q, k and v have different dtypes."""


class UnsupportedDType(InvalidArgument, TypeError):
    """A dtype that the backend does not compute with."""


class DeviceMismatch(InvalidArgument, RuntimeError):
    """q, k, v or a captured tensor lie on different devices."""


class UnsupportedIndexDType(InvalidArgument, TypeError):
    """cu_seqlens, seqused or a page table that is not int32."""


class InvalidLength(InvalidArgument):
    """A maximum of sequence lengths that is not an int of at least 0, or a size beyond what masks are analysed for."""


class SequencesMismatch(InvalidArgument):
    """A Varlen or Paged that does not belong to these q, k and v."""


class UnsupportedPageSize(InvalidArgument):
    """A page size that is not a power of two from 16 to 256."""


class OffsetsNotMonotone(InvalidArgument):
    """cu_seqlens in which a sequence ends before it begins; found by the PyTorch backends, and by `debug_checks`."""


class OffsetsOutOfRange(InvalidArgument):
    """cu_seqlens that does not begin with 0 and end with the total; found by `debug_checks`.

    Rows that are not there are found by the PyTorch backends too.
    """


class UsedOutOfRange(InvalidArgument):
    """seqused that is negative or beyond the sequence's length or pages; found as wrong offsets are."""


class PageOutOfRange(InvalidArgument, IndexError):
    """A page table that names a page which the cache does not have; found as wrong offsets are."""


class MaximumExceeded(InvalidArgument):
    """A sequence longer than max_seqlen says; found under `debug_checks`."""


class TooManyBlocks(InvalidArgument):
    """A call of more tiles than a generated kernel can be launched for at once."""


class InvalidSchedule(InvalidArgument):
    """A field of a Schedule with a value that it does not take."""


class InvalidScale(InvalidArgument):
    """The softmax scale is not a finite number, or a scale of 8-bit numbers is none that products take."""


class UnsupportedLayout(InvalidArgument, NotImplementedError):
    """Strides, or a layout, that the backend can't read without a copy."""


class UnsupportedHeadDim(InvalidArgument):
    """A head dimension beyond what the backend computes."""


class UnsupportedCapture(InvalidArgument):
    """A captured tensor of a dtype, layout or kind that the backend can't read."""


class CapturedTensorChanged(InvalidArgument):
    """A captured tensor no longer has the shape, type or device that a `ca.Attention` was planned for."""


class UnreadableProgram(InvalidArgument):
    """An operator of composattn called with a text that says no call, or with other tensors than it speaks of."""


class ScalarGone(ComposattnError, RuntimeError):
    """Compiled code reads a `ca.scalar` that no longer exists."""


class BlockMaskMismatch(InvalidArgument, RuntimeError):
    """A BlockMask or BlockSparse made for other lengths, batch, heads or device than those of the call."""


class BlocksOutOfRange(InvalidArgument):
    """Numbers of a BlockSparse that name no block."""


class UnsupportedBlockSize(InvalidArgument):
    """Blocks of a BlockSparse whose sizes are not multiples of 16 positions."""


class UnsupportedOption(InvalidArgument):
    """A value of an option, or an option of torch's flex_attention, that has no meaning here."""


class UnnamedArgument(InvalidArgument, TypeError):
    """An argument behind q, k and v that has to be passed by its name."""


class UnknownKeyword(InvalidArgument, TypeError):
    """A keyword argument of another attention function."""


class UnknownBackend(InvalidArgument):
    """A backend name that does not exist."""


class BackendUnavailable(ComposattnError, RuntimeError):
    """A backend that exists but can't serve this call on this machine."""


class GradientUnsupported(ComposattnError, RuntimeError):
    """A gradient that the backend does not compute."""


class GraphUnsupported(ComposattnError, RuntimeError):
    """A call that a CUDA graph can't record, or that a replay would repeat with what the host read once."""


class UnsupportedTransform(ComposattnError, RuntimeError):
    """A transform of torch (torch.func, torch.jit, DTensor) that a call does not support."""


class UnsupportedTorch(ComposattnError, RuntimeError):
    """A version of torch whose compiler composattn does not know."""


class MissingDependency(ComposattnError, ImportError):
    """An optional package that this feature needs is not installed."""


class InvalidCommandLine(ComposattnError, ValueError):
    """An argument of `python -m composattn` that names no mod, or sizes that no tensor can have."""


# --- context parallel --------------------------------------------------------------------------------------


class ParallelError(ComposattnError):
    """A sequence that several ranks share can't be computed as asked."""


class NoProcessGroup(ParallelError, RuntimeError):
    """torch.distributed is not initialised, or a mesh was expected and something else was given."""


class MeshMismatch(ParallelError, ValueError):
    """A mesh without the dimension that was named, of several dimensions of which none was, or without this process."""


class IndivisibleSequence(ParallelError, ValueError):
    """A sequence whose rows can't be shared evenly, in whole tiles."""


class InvalidParallelOption(ParallelError, ValueError):
    """An option of `ca.ContextParallel` or of its plan with a value that it does not take."""


class HeadsIndivisible(ParallelError, ValueError):
    """Heads asked to be shared by ranks that can't have as many each."""


class NotPlanned(ParallelError, RuntimeError):
    """An attention inside of a `ca.ContextParallel` that has divided no sequence yet."""


class OutsideContextParallel(ParallelError, RuntimeError):
    """An attention that a backward computes again outside of the `with cp:` that its forward ran in."""


class WrongShare(ParallelError, ValueError):
    """A tensor with another number of rows than the sequence, or than the share of a rank, has."""


class RanksDisagree(ParallelError, ValueError):
    """Ranks that share a sequence were given different masks, lengths, shapes or options."""


class CapturedTensorsDiffer(RanksDisagree):
    """Ranks whose mods read different tensors: other contents in a mask, another form, or none on some rank."""


class WrongDeviceForGroup(ParallelError, RuntimeError):
    """Tensors on a device that the mesh's process group does not move."""


class RankUnreachable(ParallelError, RuntimeError):
    """Another rank failed, left, or did not answer within the time-out."""


class UnsupportedInParallel(ParallelError, NotImplementedError):
    """A kind of call that context parallel does not serve."""


# --- warnings ----------------------------------------------------------------------------------------------


class NeverRanOnDevice(UserWarning):
    """Kernels that `backend=None` picked were checked with no device, and never ran on one."""
