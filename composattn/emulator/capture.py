"""What the host side of a kernel asks for: launch shape, parameter bytes, tensor maps, for given tensors.

The host function of a kernel is itself compiled code. It is traced a second time with the launch replaced by stores
of everything that the launch would have been given (grid, every kernel parameter, and for every tensor map the
layouts it was made from) into a table in host memory. That second function needs no GPU: it runs on CPU tensors, and
what it leaves in the table is exactly what the real one computes from the same arguments.
"""

from __future__ import annotations

import contextlib
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from composattn.emulator.findings import UnknownLaunch
from composattn.emulator.program import PtxProgram, load
from composattn.emulator.request import Launch
from composattn.emulator.tensormap import TensorMap
from composattn.emulator.text import compile_ptx

_SLOTS = 2048
_LOCK = threading.Lock()  # the trace hooks below are process-wide
_ELEMENT = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4, "f8E4M3FN": 1, "f8E5M2": 1, "i8": 1, "f64": 8, "i64": 8}


@dataclass(frozen=True)
class Leaf:
    """One number of a parameter: a constant, or a slot of the table; `width` in bytes."""

    width: int
    slot: int | None
    value: int = 0

    def read(self, table: Sequence[int]) -> int:
        return self.value if self.slot is None else int(table[self.slot])


@dataclass(frozen=True)
class Fields:
    """A parameter by value: numbers laid out as a C struct of structs."""

    groups: tuple[tuple[Leaf, ...], ...]

    def pack(self, table: Sequence[int]) -> bytes:
        out = bytearray()
        outer = 1
        for group in self.groups:
            if not group:
                continue
            align = max(leaf.width for leaf in group)
            outer = max(outer, align)
            out += bytes(-len(out) % align)
            for leaf in group:
                out += bytes(-len(out) % leaf.width)
                out += (leaf.read(table) & ((1 << 8 * leaf.width) - 1)).to_bytes(leaf.width, "little")
            out += bytes(-len(out) % align)
        return bytes(out + bytes(-len(out) % outer))


@dataclass(frozen=True)
class MapOf:
    """A tensor map parameter: which tensor, and how its modes became coordinates."""

    dtype: str
    address: Leaf
    shape: tuple[Leaf, ...]
    stride: tuple[Leaf, ...]
    steps: tuple[tuple[int, int] | None, ...]  # of each mode: (coefficient, dimension of the map)
    box: tuple[int, ...]
    swizzle: int

    def build(self, table: Sequence[int]) -> TensorMap:
        element = _ELEMENT[self.dtype]
        sizes, strides = [1] * len(self.box), [0] * len(self.box)
        for shape, stride, step in zip(self.shape, self.stride, self.steps, strict=True):
            if step is None:
                continue
            coefficient, dim = step
            sizes[dim] += coefficient * (shape.read(table) - 1)
            if coefficient == 1:
                strides[dim] = stride.read(table) * element
        for d in range(1, len(sizes)):
            if sizes[d] == 1:  # never stepped over: any stride says the same
                strides[d] = 16
        if sizes[0] == 1:
            strides[0] = element
        return TensorMap(
            self.address.read(table), self.dtype, element, tuple(sizes), tuple(strides), self.box, self.swizzle
        )


@dataclass
class Recorder:
    """Emits the stores while the host function is traced, and remembers what each slot means."""

    table: Any = field(default_factory=lambda: np.zeros(_SLOTS, np.int64))
    used: int = 0
    grid: tuple[Leaf, ...] = ()
    block: tuple[Leaf, ...] = ()
    cluster: tuple[Leaf, ...] = ()
    dynamic_shared: Leaf | None = None
    params: list[Fields | MapOf] = field(default_factory=list)
    launches: int = 0
    early: bool = False

    # --- numbers -------------------------------------------------------------------------------------------

    def leaf(self, number: Any, width: int | None = None) -> Leaf:
        """A Python number, a DSL number or an IR value, kept or stored."""
        import cutlass

        if isinstance(number, bool | int):
            return Leaf(width or 4, None, int(number))
        if isinstance(number, float):
            return Leaf(4, None, struct.unpack("<I", struct.pack("<f", number))[0])
        value = number.ir_value() if isinstance(number, cutlass.Numeric) or hasattr(number, "ir_value") else number
        return self._store(value, width)

    def _store(self, value: Any, width: int | None = None) -> Leaf:
        from cutlass._mlir import ir
        from cutlass._mlir.dialects import arith, llvm

        name = str(value.type)
        i64 = ir.IntegerType.get_signless(64)
        floats = {"f32": 32, "f16": 16, "bf16": 16, "f64": 64}
        if name in floats:
            value = arith.bitcast(ir.IntegerType.get_signless(floats[name]), value)
            name = f"i{floats[name]}"
        match = re.fullmatch(r"i(\d+)", name)
        if match is None:
            raise UnknownLaunch(f"a kernel parameter holds a value of type {name}")
        bits = int(match[1])
        if bits < 64:
            value = (arith.extui if bits == 1 else arith.extsi)(i64, value)
        slot = self.used
        self.used += 1
        if slot >= _SLOTS:
            raise UnknownLaunch(f"more than {_SLOTS} numbers in the parameters of one launch")
        address = arith.constant(i64, self.table.ctypes.data + 8 * slot)
        pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr"), address)
        llvm.store(value, pointer)
        return Leaf(width or max(1, bits // 8), slot)

    # --- parameters ----------------------------------------------------------------------------------------

    def parameter(self, value: Any) -> None:
        """One operand of the launch, by its type."""
        name = str(value.type)
        if ".non_exec_tiled_tma_" in name:
            self.params.append(self._tensor_map(value))
        elif ".non_exec" in name or "tensormap" in name:
            raise UnknownLaunch(f"tensor map of kind {name[:80]}")
        elif name.startswith("!cute.memref"):
            tensor = _tensor(value)
            head = self.leaf(tensor.iterator.toint(), 8)
            self._fields((head,), self._dynamic(tensor.shape), self._dynamic(tensor.stride))
        elif name.startswith("!cute.coord_tensor"):
            tensor = _tensor(value)
            self._fields((), self._dynamic(tensor.shape), self._dynamic(tensor.stride))
        elif name.startswith("!cute.ptr"):
            self._fields((self.leaf(_pointer(value).toint(), 8),))
        elif name.startswith(
            ("!cute.layout", "!cute.composed_layout", "!cute.shape", "!cute.int_tuple", "!cute.stride")
        ):
            if "?" in name:
                raise UnknownLaunch(f"a kernel parameter is a dynamic {name}")
        elif name.startswith("!cute.tiled_mma"):
            # Its fields, off until a kernel sets them: to accumulate; of tcgen05 two signs and a mask of lanes as well.
            flags, blocks = (Leaf(1, None, 0),), re.search(r"sm100\.mma<.*?num_cta = (\d)", name)
            self._fields(*((flags * 3, (Leaf(16 * int(blocks[1]), None, 0),)) if blocks else (flags,)))
        elif name.startswith("!cute.fast_divmod_divisor"):
            self._divisor(value)
        else:
            self._fields((self._store(value),))

    def _fields(self, *groups: tuple[Leaf, ...]) -> None:
        if any(groups):
            self.params.append(Fields(groups))

    def _dynamic(self, tree: Any) -> tuple[Leaf, ...]:
        return tuple(self.leaf(x) for x in _flat(tree) if not isinstance(x, int) and hasattr(x, "ir_value"))

    def _divisor(self, value: Any) -> None:
        from cutlass._mlir import ir
        from cutlass._mlir.dialects import cute as ops

        i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        number = ops.fast_divmod_get_divisor(value, results=[i32])
        multiplier, *shifts = ops.fast_divmod_get_aux(value, results=[i32, i8, i8])
        self._fields((self._store(number), self._store(multiplier), *(self._store(s) for s in shifts)))

    def _tensor_map(self, value: Any) -> MapOf:
        """From the operation that made the map: its operands are the tensor and the shared-memory layout."""
        op = value.owner
        made = re.search(r'tma_gbasis = <"(.*?)">', str(value.type))
        if "make_non_exec_tiled_tma" not in op.name or made is None:
            raise UnknownLaunch(f"a tensor map that comes from {op.name}, not from make_tiled_tma_atom")
        source = op.operands[0]
        tensor = _tensor(source)
        element = re.match(r"!cute\.memref<(\w+),", str(source.type))
        if element is None or element[1] not in _ELEMENT:
            raise UnknownLaunch(f"tensor map over {source.type}")
        swizzle = re.search(r"S<(\d+),(\d+),(\d+)>", str(op.operands[1].type))
        span = 0
        if swizzle is not None and swizzle[1] != "0":
            if (swizzle[2], swizzle[3]) != ("4", "3"):
                raise UnknownLaunch(f"tensor map with shared layout {op.operands[1].type}")
            span = 16 << int(swizzle[1])
        box = tuple(int(n) for n in re.findall(r"\d+", made[1].split(":")[0]))
        strides = re.search(r'"([^"]*)">$', str(op.results[1].type))
        if strides is None:
            raise UnknownLaunch(f"coordinates of type {op.results[1].type}")
        steps = tuple(_step(s) for s in re.split(r"[(),]+", strides[1].split(":", 1)[1].strip()) if s)
        shape = tuple(self.leaf(x) for x in _flat(tensor.shape))
        stride = tuple(self.leaf(x) for x in _flat(tensor.stride))
        if not len(shape) == len(stride) == len(steps):
            raise UnknownLaunch(f"a tensor of layout {tensor.layout} has coordinates {strides[1]}")
        address = self.leaf(tensor.iterator.toint(), 8)
        return MapOf(element[1], address, shape, stride, steps, box, span)


def _step(text: str) -> tuple[int, int] | None:
    """A basis stride: 4@1 is a step of 4 along dimension 1; 0 goes nowhere."""
    if text == "0":
        return None
    match = re.fullmatch(r"(\d+)@(\d+)", text)
    if match is None:
        raise UnknownLaunch(f"coordinate stride {text!r}")
    return int(match[1]), int(match[2])


def _flat(tree: Any) -> list[Any]:
    return [x for t in tree for x in _flat(t)] if isinstance(tree, tuple | list) else [tree]


def _tensor(value: Any) -> Any:
    from cutlass.cute.tensor import _Tensor

    return _Tensor(value)


def _pointer(value: Any) -> Any:
    from cutlass.cute.core import _Pointer

    return _Pointer(value)


# --- tracing the host function -----------------------------------------------------------------------------


def _record(recorder: Recorder, launcher: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Stands in for a kernel's .launch(...)."""
    launcher._launched = True
    recorder.launches += 1
    if recorder.launches > 1:
        raise UnknownLaunch("a host function that launches several kernels: capture them one by one")
    dsl = launcher.dsl
    dsl._preprocess_launch_config_args(args, kwargs)
    config = dsl.LaunchConfig(*args, **kwargs)
    recorder.grid = tuple(recorder.leaf(x) for x in config.grid)
    recorder.block = tuple(recorder.leaf(x) for x in config.block)
    if config.has_cluster:
        recorder.cluster = tuple(recorder.leaf(x) for x in config.cluster)
    if not isinstance(config.use_pdl, bool):
        raise UnknownLaunch("a programmatic dependent launch that is decided when it is made")
    recorder.early = config.use_pdl
    if config.smem is not None:
        recorder.dynamic_shared = recorder.leaf(config.smem)
    body, signature = launcher.funcBody, dsl._get_signature(launcher.funcBody)
    bound = dsl._get_function_bound_args(signature, "captured", *launcher.func_args, **launcher.func_kwargs)
    positional, named = dsl._canonicalize_args(bound)
    values, _, _ = dsl.generate_kernel_operands_and_types(body, "captured", signature, positional, named)
    for value in values:
        recorder.parameter(value)


@contextlib.contextmanager
def _hooks(recorder: Recorder) -> Iterator[None]:
    """Inside, launches are recorded, not made."""
    from cutlass.cutlass_dsl.cutlass import KernelLauncher

    launch = KernelLauncher.launch

    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        _record(recorder, self, args, kwargs)

    KernelLauncher.launch = record
    try:
        yield
    finally:
        KernelLauncher.launch = launch


class Captured:
    """A host function and its kernel, ready to be asked for launches."""

    def __init__(self, function: Any, arguments: Sequence[Any], arch: str = "sm_90a", ptx: str | None = None) -> None:
        import cutlass.cute as cute
        from cutlass.cute.runtime import _FakeStream, make_fake_stream

        # The stream of the environment is a GPU's; here a number stands for it.
        plain = [make_fake_stream() if isinstance(a, _FakeStream) else a for a in arguments]
        self._declared = plain
        self.recorder = Recorder()
        with _LOCK, _hooks(self.recorder):
            self._host = cute.compile(function, *plain, options=f"--gpu-arch {arch}")
        if self.recorder.launches != 1:
            raise UnknownLaunch("the host function launches no kernel")
        self.text = ptx if ptx is not None else compile_ptx(function, arguments, arch)

    @property
    def program(self) -> PtxProgram:
        """The kernel, ready to run: of those used last, else read again, as it is ten times the rest."""
        return load(self.text)

    def launch(self, *arguments: Any, dynamic_shared: int = 0, sms: int = 132) -> Launch:
        """The launch for CPU tensors and numbers, in the order of the host function (streams left out)."""
        recorder = self.recorder
        given = iter(arguments)
        packed = [_Packed(d, None if _is_stream(d) else next(given)) for d in self._declared]
        with _LOCK:
            self._host(*packed)
            table = recorder.table.tolist()
        launch = Launch(
            grid=_three(recorder.grid, table),
            block=_three(recorder.block, table),
            cluster=_three(recorder.cluster, table),
            params=[p.pack(table) if isinstance(p, Fields) else b"" for p in recorder.params],
            dynamic_shared=recorder.dynamic_shared.read(table) if recorder.dynamic_shared else dynamic_shared,
            maps={i: p.build(table) for i, p in enumerate(recorder.params) if isinstance(p, MapOf)},
            sms=sms,
            early=recorder.early,
        )
        for i, tensor in enumerate(_tensors(arguments)):
            start, nbytes = _extent(tensor)
            if nbytes:
                launch.memory.add(start, _bytes_at(start, nbytes), f"tensor {i} {tuple(tensor.shape)}")
        return launch


def _is_stream(declared: Any) -> bool:
    return type(declared).__name__ == "_FakeStream"


class _Packed:
    """An argument of the host function in memory, as its declared form says: the DSL takes pointers to these.

    A tensor is a struct of its address, its dynamic sizes and its dynamic strides, in the widths that they were
    declared with, as in the header that the DSL exports for a compiled function.
    """

    def __init__(self, declared: Any, given: Any) -> None:
        self._buffers: list[Any] = []
        self._pack(declared, given)

    def __c_pointers__(self) -> list[int]:
        import ctypes

        return [ctypes.addressof(b) for b in self._buffers]

    def _pack(self, declared: Any, given: Any) -> None:
        if declared is None:
            return
        if isinstance(declared, tuple | list):
            if given is None or len(given) != len(declared):
                raise ValueError(f"the host function was made for {len(declared)} values here, got {given}")
            for d, g in zip(declared, given, strict=True):
                self._pack(d, g)
        elif _is_stream(declared):
            self._add(Fields(((Leaf(8, None, 0),),)))
        elif hasattr(declared, "stride") and hasattr(declared, "shape"):
            self._tensor(declared, given)
        elif hasattr(type(declared), "width"):
            self._add(Fields(((_number(type(declared), given),),)))
        else:
            raise UnknownLaunch(f"a host argument declared as {type(declared).__name__}")

    def _tensor(self, declared: Any, given: Any) -> None:
        if given is None or tuple(given.shape) != tuple(
            g if hasattr(d, "width") else d for d, g in zip(_flat(declared.shape), given.shape, strict=True)
        ):
            raise ValueError(f"a tensor declared with shape {declared.shape} was given as {given}")
        groups: list[tuple[Leaf, ...]] = [(Leaf(8, None, given.data_ptr()),)]
        for tree, numbers in ((declared.shape, given.shape), (declared.stride, given.stride())):
            pairs = zip(_flat(tree), numbers, strict=True)
            groups.append(tuple(Leaf(d.width // 8, None, int(n)) for d, n in pairs if hasattr(d, "width")))
        self._add(Fields(tuple(groups)))

    def _add(self, fields: Fields) -> None:
        import ctypes

        self._buffers.append(ctypes.create_string_buffer(fields.pack([])))


def _number(kind: Any, value: Any) -> Leaf:
    if kind.__name__.startswith("Float"):
        code = {16: "e", 32: "f", 64: "d"}[kind.width]
        return Leaf(kind.width // 8, None, int.from_bytes(struct.pack("<" + code, value), "little"))
    return Leaf(max(1, kind.width // 8), None, int(value))


def _three(leaves: tuple[Leaf, ...], table: Sequence[int]) -> tuple[int, int, int]:
    numbers = [leaf.read(table) for leaf in leaves] + [1, 1, 1]
    return numbers[0], numbers[1], numbers[2]


def _tensors(arguments: Any) -> list[Any]:
    if isinstance(arguments, tuple | list):
        return [t for a in arguments for t in _tensors(a)]
    return [arguments] if hasattr(arguments, "data_ptr") else []


def _extent(tensor: Any) -> tuple[int, int]:
    """Address and bytes of what a torch tensor can reach; strides are never negative in torch."""
    if not tensor.numel():
        return tensor.data_ptr(), 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _bytes_at(start: int, nbytes: int) -> Any:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start))
