"""The command line: what a call would do (explain), its kernels (compile), speed (bench), what works here (doctor)."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import composattn as ca
from composattn.backends.fused.target import TARGETS, Target

if TYPE_CHECKING:
    from composattn.backends.fused.inspect import Artifact

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PACKAGES = ("torch", "sympy", "numpy", "nvidia-cutlass-dsl", "apache-tvm-ffi", "flash-attn-4", "attn-gym")


def mod_from(option: str, text: str | None) -> Any:
    """A mod from the command line: `package.module:name`, or an expression over the ready mods and torch.

    The expression is Python and runs as such: it is the caller's own command line. Raises: `InvalidCommandLine`.
    """
    if text is None:
        return None
    names: dict[str, Any] = {"torch": torch, "ca": ca}
    for ready in ("composattn.mods.masks", "composattn.mods.scores"):
        names |= {key: value for key, value in vars(importlib.import_module(ready)).items() if not key.startswith("_")}
    module, colon, name = text.partition(":")
    try:
        if colon and module.replace(".", "").isidentifier() and name.isidentifier():
            sys.path.insert(0, "")
            return getattr(importlib.import_module(module), name)
        return eval(text, names)
    except ca.errors.ComposattnError:
        raise
    except Exception as error:
        what = str(error) if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: {error}"
        raise ca.errors.InvalidCommandLine(
            f"{option} {text!r} gives no mod: {what}; write package.module:name, or an expression with "
            f"{', '.join(ca.mods.__all__)}, torch and ca"
        ) from error


def shape_from(text: str) -> tuple[int, ...]:
    """`B,Hq,Hkv,Sq,Skv,D[,Dv]`."""
    numbers = tuple(int(part) for part in text.split(","))
    if len(numbers) not in (6, 7):
        raise argparse.ArgumentTypeError(f"wanted B,Hq,Hkv,Sq,Skv,D or B,Hq,Hkv,Sq,Skv,D,Dv, got {text!r}")
    return numbers if len(numbers) == 7 else (*numbers, numbers[5])


def attention_from(options: argparse.Namespace) -> ca.Attention:
    score, mask = mod_from("--score", options.score), mod_from("--mask", options.mask)
    return ca.Attention(score_mod=score, mask_mod=mask, backend=options.backend)


def empty_inputs(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors of the asked shapes; their memory is reserved, never touched. Raises: `InvalidCommandLine`."""
    batch, heads, kv_heads, q_len, kv_len, dim, v_dim = options.shape
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    where: dict[str, Any] = {"dtype": DTYPES[options.dtype], "device": device}
    try:
        return (
            torch.empty(batch, heads, q_len, dim, **where),
            torch.empty(batch, kv_heads, kv_len, dim, **where),
            torch.empty(batch, kv_heads, kv_len, v_dim, **where),
        )
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # no such device, or not so much memory
        raise ca.errors.InvalidCommandLine(
            f"no tensors of --shape {options.shape} on --device {device}: {str(error).splitlines()[0]}; "
            'take "cpu" and smaller sizes'
        ) from error


def explain(options: argparse.Namespace) -> int:
    """Print formula, dependence classes, loop bounds, tiles, FLOPs and the plan of one call."""
    print(attention_from(options).explain(*empty_inputs(options)))
    return 0


def target_from(options: argparse.Namespace) -> Target:
    """The GPU that is compiled for. Raises: `InvalidCommandLine` where --backend has no kernels for --target."""
    from composattn.backends.fused.architecture import planned_for

    if options.target is None:
        return planned_for(options.backend)
    target = next(target for target in TARGETS.values() if target.arch == options.target)
    if options.backend not in (None, target.backend, f"{target.backend}-emulated"):
        raise ca.errors.InvalidCommandLine(
            f'--target {target.arch} takes kernels of backend="{target.backend}", got --backend {options.backend}; '
            "leave --backend out"
        )
    return target


def compile_kernel(options: argparse.Namespace) -> int:
    """Compile the kernel of one call, GPU or not; print plan, resources, and where PTX and machine code lie."""
    from composattn.backends.fused.compile import compile_offline
    from composattn.backends.fused.plan import plan_forward
    from composattn.call.problem import Problem

    options.device = options.device or "cpu"
    problem = Problem.of(*empty_inputs(options))
    plan = plan_forward(problem, attention_from(options).program, target_from(options))
    start = time.perf_counter()
    made = compile_offline(plan, options.out)
    print(plan)
    print(f"  compiled   {time.perf_counter() - start:.1f} s (0 when kept from before)")
    registers, stack = (NO_CUOBJDUMP if n is None else n for n in (made.registers, made.stack))
    print(f"  resources  {made.threads} threads; registers {registers}; bytes of stack {stack}")
    print(f"  machine    {machine_words(made)}")
    print(f"  kept       {made.ptx_path}\n             {made.cubin_path}")
    return 0


NO_CUOBJDUMP = "unknown (pip install nvidia-cuda-cuobjdump)"
NO_NVDISASM = "unknown (pip install nvidia-cuda-nvdisasm)"


def machine_words(made: Artifact) -> str:
    """How many instructions there are, of which kinds, and how many of them spill registers."""
    if made.spills is None:
        return f"instructions and spills {NO_NVDISASM}"
    products, copies = ("HGMMA", "UTCHMMA"), "UTMALDG"  # of matrices, bulk copies of tensors
    units = [(name, made.mnemonics[name]) for name in (*products, copies) if made.mnemonics[name] or name == copies]
    frequent = ", ".join(f"{count} {name}" for name, count in [*units, *made.mnemonics.most_common(6)])
    return f"{sum(made.mnemonics.values())} instructions, {made.spills} of them spills: {frequent}"


def serves(backend: str) -> str:
    """What a tiny call on this backend says: its error against fp64, or why it refuses."""
    generator = torch.Generator().manual_seed(0)
    eager = backend in ("reference", "streaming")
    gpu = torch.cuda.is_available() and not eager and not backend.endswith("-emulated")
    dtype = torch.float32 if eager else torch.bfloat16
    q, k, v = (torch.randn(1, 1, 128, 64, generator=generator).to("cuda" if gpu else "cpu", dtype) for _ in range(3))
    try:
        out, _ = ca.attention(q, k, v, return_lse=True, backend=backend)
    except ca.errors.ComposattnError as refusal:
        return f"no: {refusal}"
    except Exception as failure:  # a toolchain that is broken on this machine is what a doctor is asked about
        return f"broken: {type(failure).__name__}: {failure}"
    truth = torch.softmax(q.double() @ k.double().mT / 8.0, dim=-1) @ v.double()
    return f"yes (largest error of a tiny {str(dtype)[6:]} call: {(out - truth).abs().max().item():.1e})"


def doctor(options: argparse.Namespace) -> int:
    """Print versions, GPUs, and for each backend whether it serves here or why not."""
    print(f"composattn {ca.__version__}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in PACKAGES:
        try:
            print(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} not installed")
    if not torch.cuda.is_available():
        print("no GPU")
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        print(f"GPU {number}: {facts.name}, compute capability {facts.major}.{facts.minor}")
    for backend in ca.backends.BACKENDS:
        print(f"backend {backend}: {serves(backend)}")
    return 0


def bench(arguments: Sequence[str]) -> int:
    """Run the benchmark harness of the source tree."""
    root = Path(__file__).parents[1]
    if not (root / "benchmarks" / "run.py").exists():
        print("the benchmarks live in the source tree, not in the installed package: run them from a checkout")
        return 2
    sys.path.insert(0, str(root))
    return int(importlib.import_module("benchmarks.run").main(arguments))


def parser() -> argparse.ArgumentParser:
    program = "composattn" if Path(sys.argv[0]).name == "composattn" else "python -m composattn"
    made = argparse.ArgumentParser(prog=program, description=__doc__)
    made.add_argument("--version", action="version", version=f"composattn {ca.__version__}")
    commands = made.add_subparsers(dest="command")
    call = argparse.ArgumentParser(add_help=False)
    call.add_argument("--mask", help="'causal() & sliding_window(1024)', or package.module:name")
    call.add_argument("--score", help="'alibi(8) >> softcap(30.0)', or package.module:name")
    usual = shape_from("1,8,8,4096,4096,128")
    call.add_argument("--shape", type=shape_from, default=usual, help="B,Hq,Hkv,Sq,Skv,D[,Dv]")
    call.add_argument("--dtype", choices=DTYPES, default="bf16")
    call.add_argument("--device", help="default: the GPU where there is one")
    call.add_argument("--backend", choices=ca.backends.BACKENDS, help="default: what ca.attention picks for the device")
    commands.add_parser("explain", parents=[call], help=explain.__doc__).set_defaults(run=explain)
    kernel = commands.add_parser("compile", parents=[call], help=compile_kernel.__doc__)
    arches = [target.arch for target in TARGETS.values()]
    kernel.add_argument("--target", choices=arches, help="machine code; default: that of the backend")
    kernel.add_argument("--out", type=Path, help="folder to keep PTX and machine code in; default: the cache")
    kernel.set_defaults(run=compile_kernel)
    commands.add_parser("doctor", help=doctor.__doc__).set_defaults(run=doctor)
    commands.add_parser("bench", help=bench.__doc__, add_help=False)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["bench"]:
        return bench(given[1:])
    options = parser().parse_args(given)
    if options.command is None:
        parser().print_help()
        return 0
    try:
        return int(options.run(options))
    except ca.errors.ComposattnError as refusal:
        print(f"{type(refusal).__name__}: {refusal}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # who reads has seen enough: `composattn explain ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
