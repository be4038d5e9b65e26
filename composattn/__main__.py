"""The command line: what a call would do (explain), its kernels (compile), those that are kept (cache), its fastest
form on this GPU (tune), speed (bench), what works here (doctor).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import composattn as ca
from composattn.backends.fused.tiles.target import TARGETS, Target
from composattn.call.inputs import Asked, Inputs
from composattn.doctor import doctor, full
from composattn.shaped import Shape, shaped
from composattn.watched import on_screen

if TYPE_CHECKING:
    from composattn.backends.fused.compiling.inspect import Artifact
    from composattn.backends.fused.planning.plan import Plan

TAKE_LONG = ("compile", "tune", "doctor")  # what they do is told on stderr as they begin it
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def shape_from(text: str) -> Shape:
    """`B,Hq,Hkv,Sq,Skv,D[,Dv]`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (6, 7):
        raise argparse.ArgumentTypeError(f"wanted the numbers B,Hq,Hkv,Sq,Skv,D or B,Hq,Hkv,Sq,Skv,D,Dv, got {text!r}")
    b, hq, hkv, sq, skv, d, *dv = numbers
    return b, hq, hkv, sq, skv, d, dv[0] if dv else d


def splits_from(text: str) -> Any:
    """`auto`, or a number."""
    return text if text == "auto" else count_from(text)


def days_from(text: str) -> float:
    days = float(text) if text.replace(".", "", 1).isdecimal() else -1.0
    if days < 0:
        raise argparse.ArgumentTypeError(f"wanted a number of days from 0, got {text!r}")
    return days


def count_from(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"wanted a number from 1, got {text!r}")
    return int(text)


def attention_from(options: argparse.Namespace) -> ca.Attention:
    score, mask = mod_from("--score", options.score), mod_from("--mask", options.mask)
    return ca.Attention(
        score_mod=score, mask_mod=mask, backend=options.backend, schedule=ca.Schedule(split_kv=options.split_kv)
    )


def inputs_from(options: argparse.Namespace) -> Inputs:
    """What the call is given. Raises: `InvalidCommandLine`, `UnsupportedPageSize`."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.seqused and not options.varlen:
        raise ca.errors.InvalidCommandLine("--seqused says how many rows of packed sequences are used; add --varlen")
    layout = {"varlen": options.varlen, "seqused": options.seqused, "page_size": options.page_size}
    try:
        return shaped(options.shape, DTYPES[options.dtype], device, **layout)
    except ca.errors.ComposattnError:
        raise
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # no such device, or not so much memory
        raise ca.errors.InvalidCommandLine(
            f"no tensors of --shape {options.shape} on --device {device}: {str(error).splitlines()[0]}; "
            'take "cpu" and smaller sizes'
        ) from error


def explain(options: argparse.Namespace) -> int:
    """Print formula, dependence classes, loop bounds, tiles, FLOPs and the plan of one call."""
    q, k, v, varlen, paged = inputs_from(options)
    print(attention_from(options).explain(q, k, v, varlen=varlen, paged=paged))
    return 0


def target_from(options: argparse.Namespace) -> Target:
    """The GPU that is compiled for: as asked, else this machine's, else the first that is known.

    Raises: `InvalidCommandLine` where --backend has no kernels for it.
    """
    from composattn.backends.fused.tiles.architecture import ARCHITECTURES, planned_for

    here, backend = torch.device("cuda"), options.backend
    if backend is not None and backend.removesuffix("-emulated") not in ARCHITECTURES:
        raise ca.errors.InvalidCommandLine(
            f'backend="{backend}" is PyTorch and has no kernels to compile; take one of {", ".join(ARCHITECTURES)}'
        )
    if options.target is not None:
        target = next(target for target in TARGETS.values() if target.arch == options.target)
    elif backend is None and torch.cuda.is_available() and ca.backends.default_for(here) in ARCHITECTURES:
        target = Target.of(here)
    else:
        target = planned_for(backend)
    if backend not in (None, target.backend, f"{target.backend}-emulated"):
        raise ca.errors.InvalidCommandLine(
            f'--target {target.arch} takes kernels of backend="{target.backend}", got --backend {backend}; '
            "leave --backend out"
        )
    return target if options.sms is None else dataclasses.replace(target, sms=options.sms)


def folder_from(options: argparse.Namespace) -> Path:
    """Where kernels go. Raises: `InvalidCommandLine` where a process with that cache folder would not take them."""
    from composattn.backends.fused.compiling import disk_cache

    if options.out is None:
        return disk_cache.usable()
    why = disk_cache.unusable(options.out)
    if why is not None:
        raise ca.errors.InvalidCommandLine(f"--out {options.out} can't be a cache folder: {why}; name another one")
    return Path(options.out)


def compile_kernels(options: argparse.Namespace) -> int:
    """Compile the kernels of one call, GPU or not, and keep them as the call itself would; print what they cost."""
    from composattn.backends.fused.compiling import toolchain
    from composattn.backends.fused.compiling.compile import compile_ahead
    from composattn.backends.fused.rewrites import prepared
    from composattn.backends.fused.running.call import FusedCall
    from composattn.call.problem import softmax_scale
    from composattn.dispatch.captured import check_captures
    from composattn.dispatch.planned import refuse_gradient

    options.device = options.device or "cpu"
    target, folder, attention = target_from(options), folder_from(options), attention_from(options)
    inputs = inputs_from(options)
    if options.gradient and inputs.paged is not None:
        refuse_gradient(inputs.q.requires_grad_())
    problem, program = attention.problem(inputs), attention.program
    check_captures(program, problem)

    def compiled(plan: Plan) -> None:
        start = time.perf_counter()
        made = compile_ahead(plan, folder)
        print(plan)
        print(f"  compiled   {time.perf_counter() - start:.1f} s (0 when kept from before)")
        registers, stack = (NO_CUOBJDUMP if n is None else n for n in (made.registers, made.stack))
        print(f"  resources  {made.threads} threads; registers {registers}; bytes of stack {stack}")
        print(f"  machine    {machine_words(made)}")
        print(f"  kept       {made.ptx_path}\n             {made.cubin_path}")

    make = functools.partial(FusedCall, kernel_of=compiled)
    call = prepared(make, problem.rounded, program, softmax_scale(None, problem.head_dim), target)
    call.kernels(Asked(options.lse, options.max_scores), options.gradient)
    print(f"A first call on a GPU of {target.sms} SMs finds them where COMPOSATTN_CACHE_DIR={folder},")
    print(f"with these sources, a processor of this kind, and {toolchain.versions()}")
    return 0


def tune(options: argparse.Namespace) -> int:
    """Time every form of one call on this GPU, and keep the fastest for later calls of its sizes and class."""
    if not torch.cuda.is_available():
        raise ca.errors.BackendUnavailable(
            "composattn tune times kernels, and there is no GPU here; run it on the machine that will run the calls, "
            "with the same COMPOSATTN_CACHE_DIR"
        )
    from composattn import tuning
    from composattn.backends.fused.compiling import disk_cache, tuned

    inputs = inputs_from(options)
    for rows in inputs[:3]:
        rows.normal_()
    attention, gpu = functools.partial(attention_from, options), torch.cuda.get_device_name(inputs.q.device)
    for timed in tuning.tune(attention, inputs, options.gradient, tuning.gpu_stopwatch, gpu):
        print(timed, flush=True)
    print(f"in {disk_cache.usable() / tuned.FILE}; remove it to have the tables' forms again")
    return 0


NO_CUOBJDUMP = "unknown (pip install nvidia-cuda-cuobjdump)"
NO_NVDISASM = "unknown (pip install nvidia-cuda-nvdisasm)"


def machine_words(made: Artifact) -> str:
    """How many instructions there are, of which kinds, and how many of them spill registers."""
    if made.spills is None:
        return f"instructions and spills {NO_NVDISASM}"
    of_units = "HGMMA", "UTCHMMA", "HMMA", "UTMALDG", "LDGSTS"  # products of matrices, copies to shared memory
    units = [(name, made.mnemonics[name]) for name in of_units if made.mnemonics[name]]
    others = [(name, count) for name, count in made.mnemonics.most_common() if name not in of_units]
    frequent = ", ".join(f"{count} {name}" for name, count in [*units, *others[:6]])
    return f"{sum(made.mnemonics.values())} instructions, {made.spills} of them spills: {frequent}"


def cache(options: argparse.Namespace) -> int:
    """Print where compiled kernels are kept and how many there are; remove those not used for some days."""
    from composattn.backends.fused.compiling import disk_cache

    folder = disk_cache.folder()
    kept = disk_cache.entries(folder)
    print(f"{folder}: {len(kept)} kernels, {sum(size for size, _ in kept.values()) / 1e6:.1f} MB")
    if options.unused is not None:
        old = [entry for entry, (_, idle) in kept.items() if idle >= options.unused * 86400]
        for entry in old:
            disk_cache.remove(entry)
        print(f"removed {len(old)}, {sum(kept[entry][0] for entry in old) / 1e6:.1f} MB")
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
    usual = "1,8,8,4096,4096,128"
    shape = f"B,Hq,Hkv,Sq,Skv,D[,Dv]; default: {usual}"
    call.add_argument("--shape", type=shape_from, default=shape_from(usual), help=shape)
    call.add_argument("--dtype", choices=DTYPES, default="bf16", help="of q, k and v; default: bf16")
    call.add_argument("--device", help="default: the GPU where there is one")
    call.add_argument("--backend", choices=ca.backends.BACKENDS, help="default: what ca.attention picks for the device")
    call.add_argument("--varlen", action="store_true", help="B packed sequences of Sq queries and Skv keys each")
    call.add_argument("--seqused", action="store_true", help="packed, and only some first rows of each are used")
    call.add_argument("--page-size", type=count_from, help="keys and values in pages of so many rows")
    call.add_argument("--split-kv", type=splits_from, default="auto", help="parts of the keys, or auto")
    added = functools.partial(_added, commands, program)
    added(explain, "--mask 'causal() & sliding_window(256)' --shape 1,8,2,4096,4096,128", [call])
    kernel = added(compile_kernels, "--mask 'causal()' --gradient", [call], name="compile")
    arches = [target.arch for target in TARGETS.values()]
    kernel.add_argument("--target", choices=arches, help="machine code; default: this GPU's, else the backend's")
    kernel.add_argument("--sms", type=count_from, help="SMs of the GPU, as doctor prints them there")
    kernel.add_argument("--lse", action="store_true", help="for calls with return_lse")
    kernel.add_argument("--max-scores", action="store_true", help="for calls with return_max_scores")
    kernel.add_argument("--gradient", action="store_true", help="for calls that autograd records, backward too")
    kernel.add_argument("--out", type=Path, help="a cache folder to keep them in, to be copied; default: the cache")
    times = added(tune, "--mask 'causal()' --score 'softcap(30.0)' --gradient", [call])
    times.add_argument("--gradient", action="store_true", help="the backward too")
    keeping = added(cache, "--unused 30")
    keeping.add_argument("--unused", type=days_from, metavar="DAYS", help="remove kernels not used for so long; 0: all")
    checks = added(doctor, "--full")
    checks.add_argument("--full", action="store_true", help=full.__doc__)
    checks.set_defaults(run=lambda options: full() if options.full else doctor())
    commands.add_parser("bench", help=bench.__doc__, add_help=False)
    return made


def _added(
    commands: Any, program: str, run: Any, example: str, parents: Sequence[argparse.ArgumentParser] = (), name: str = ""
) -> argparse.ArgumentParser:
    """A command that says what it does, and an example of it."""
    name = name or run.__name__
    made: argparse.ArgumentParser = commands.add_parser(
        name, parents=parents, help=run.__doc__, description=run.__doc__, epilog=f"example: {program} {name} {example}"
    )
    made.set_defaults(run=run)
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
        with on_screen() if options.command in TAKE_LONG else contextlib.nullcontext():
            return int(options.run(options))
    except ca.errors.ComposattnError as refusal:
        print(f"{type(refusal).__name__}: {refusal}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # who reads has seen enough: `composattn explain ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
