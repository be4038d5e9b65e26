"""Kernels against those recorded in golden.json: the comparison, and the tool that makes it and records again.

    python -m tests.compile.golden --check                     which kernels differ from the record, and in what
    python -m tests.compile.golden --check --keep before       also writes each PTX there, to diff two trees
    python -m tests.compile.golden --update forward combine    records again, here what has these words in its name

A kernel's PTX is compared as text. Only the name of its entry is replaced: it spells the kernel's Python names and the
types of its arguments, cut off at 180 characters. Making PTX is two thirds of the work, so what tracing makes is
recorded too: one language makes the same PTX of the same traced form.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import hashlib
import importlib.metadata
import json
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from composattn.backends.fused.compiling import disk_cache
from composattn.backends.fused.compiling.compile import content_hash, uncollected
from composattn.backends.fused.compiling.generated import kernel_of
from composattn.backends.fused.compiling.passes import switches
from composattn.backends.fused.planning.plan import Plan
from composattn.backends.fused.running.emulated import text_of
from tests.compared import bare
from tests.compile.golden_plans import PLANS

RECORD = Path(__file__).with_name("golden.json")
COUNTED = ("wgmma.mma_async", "ex2", "cp.async.bulk", "mbarrier", "bar", "red", "ld", "st", "shfl", "bra")
_INSTRUCTION = re.compile(r"^\s*(?:@!?%?\w+ +)?\{?\s*([a-z][\w.:]*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What is recorded of a kernel: its plan's key field by field, the hash of its PTX, and counts that people read."""

    key: list[str]
    sha256: str
    counts: dict[str, int]

    def differences(self, was: Kernel) -> Iterator[str]:
        """In what this kernel is another than `was`, in lines; none where its PTX and its plan's key are the same."""
        for line in difflib.ndiff(was.key, self.key):
            if line[0] in "-+":
                yield f"its plan: {line}"
        if self.sha256 != was.sha256:
            yield "its PTX is another" + (", with equal counts" if self.counts == was.counts else "")
        for name in dict.fromkeys((*was.counts, *self.counts)):
            before, now = was.counts.get(name, 0), self.counts.get(name, 0)
            if before != now:
                yield f"{name}: {now}, was {before}"


def ptx(name: str) -> str:
    """The PTX of a plan by name, its entry called `kernel`. Compiles, where the folder of kernels hasn't got it."""
    text = text_of(PLANS[name]())
    entry = re.search(r"\.entry\s+([\w$]+)", text)
    assert entry is not None
    return text.replace(entry[1], "kernel")


def is_kept(name: str) -> bool:
    """Whether the folder of kernels has the PTX of a plan."""
    return disk_cache.get(disk_cache.usable() / "offline", content_hash(PLANS[name]()), ".ptx") is not None


class _Traced(Exception):
    """Ends a compilation before its passes; holds the module and the passes, as text."""


def traced(name: str) -> str:
    """The traced form of a plan by its name, see `traced_form`."""
    return traced_form(PLANS[name]())


@uncollected()
def traced_form(plan: Plan) -> str:
    """What tracing makes of a plan, and the passes that would follow: all that its PTX is made from.

    Of the plan it sees what names the kernel: `AssertionError` where it reads a field that is not compared.
    """
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import Compiler, ExtraCompilerOpts

    def stop(self: object, module: Any, pipeline: str, *given: object, **named: object) -> None:
        raise _Traced(f"{pipeline}\n{module.operation.get_asm(enable_debug_info=False)}")

    whole = Compiler.compile
    function, arguments = kernel_of(bare(plan))
    function.kernel.set_name_prefix("")  # as its PTX is compared, whatever profilers call it
    Compiler.compile = stop
    try:
        options = cute.GPUArch(plan.target.arch), ExtraCompilerOpts(switches(plan))
        cute.compile[options](function, *arguments, no_jit_engine=True)
    except _Traced as reached:
        return str(reached)
    finally:
        Compiler.compile = whole
    raise AssertionError("the kernel language compiles another way: nothing was traced")


def seal(traced: str, kernel: Kernel) -> str:
    """Ties a traced form to the recorded PTX: with another one it no longer holds. Plans are compared beside it."""
    recorded = json.dumps([kernel.sha256, kernel.counts])
    return hashlib.sha256(f"{recorded}\n{traced}".encode()).hexdigest()[:32]


def key_of(plan: Plan) -> list[str]:
    """The plan's key, a field or a node of its graphs each."""
    return plan.key.splitlines()


def measured(name: str, text: str) -> Kernel:
    """The kernel of the plan `name`, whose PTX is `text`."""
    plan = PLANS[name]()
    instructions = _INSTRUCTION.findall(text)
    counts = Counter(f for i in instructions for f in COUNTED if i.startswith(f"{f}."))
    return Kernel(
        key_of(plan),
        hashlib.sha256(text.encode()).hexdigest(),
        {"shared bytes": plan.shared_memory, "instructions": len(instructions), **{f: counts[f] for f in COUNTED}},
    )


def language() -> str:
    """Version of the kernel language that is installed."""
    return importlib.metadata.version("nvidia-cutlass-dsl")


def compiler(text: str) -> str:
    """Who made this PTX, as it says itself; the kernel language takes one by the CUDA version of the driver."""
    return " ".join(re.findall(r"^// (Cuda compilation tools, .*|Based on .*)$", text, re.MULTILINE))


@dataclasses.dataclass(frozen=True)
class Record:
    """The kernels by name, and what made them."""

    language: str
    compiler: str
    kernels: dict[str, Kernel]
    seals: dict[str, str]  # of the traced forms; one that is missing or old costs time, as its PTX is made and compared

    @functools.cached_property
    def refusal(self) -> str:
        """Why kernels made here can't be compared with these; empty where they can."""
        if self.language == language():
            return ""
        return (
            f"golden.json belongs to nvidia-cutlass-dsl {self.language}, here is {language()}: install that one, or "
            "record the kernels again (python -m tests.compile.golden --update) in a commit that changes nothing else"
        )

    @staticmethod
    def read() -> Record:
        found = json.loads(RECORD.read_text())
        kernels = {name: Kernel(**kernel) for name, kernel in found["kernels"].items()}
        return Record(found["language"], found["compiler"], kernels, found.get("seals", {}))

    def write(self) -> None:
        RECORD.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def is_traced_as_recorded(name: str, record: Record) -> bool:
    """Whether a plan is the recorded one and traces to the recorded form, so that its PTX is the recorded one too."""
    plan, was = PLANS[name](), record.kernels[name]
    same_plan = key_of(plan) == was.key and plan.shared_memory == was.counts["shared bytes"]
    return same_plan and name in record.seals and record.seals[name] == seal(traced(name), was)


def texts(names: list[str], jobs: int) -> Iterator[tuple[str, str]]:
    """(name, PTX) of the plans, by so many processes."""
    if jobs == 1:
        yield from ((name, ptx(name)) for name in names)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield from zip(names, pool.map(ptx, names), strict=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compile.golden", description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="compare with golden.json; exit status 1 where one differs")
    what.add_argument("--update", action="store_true", help="write golden.json")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write each PTX there, to diff with another tree's")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("words", nargs="*", help="only plans with one of these in their names")
    asked = parser.parse_args(arguments)
    names = [n for n in PLANS if not asked.words or any(word in n for word in asked.words)]
    found, made_by = {}, ""
    for name, text in texts(names, asked.jobs):
        found[name], made_by = measured(name, text), compiler(text)
        if asked.keep:
            asked.keep.mkdir(parents=True, exist_ok=True)
            (asked.keep / f"{name}.ptx").write_text(text)
    if asked.update:
        return update(found, made_by)
    return check(found, Record.read(), made_by)


def check(found: dict[str, Kernel], record: Record, made_by: str) -> int:
    """Prints what differs; 1 where anything does."""
    if record.refusal or record.compiler != made_by:
        print(record.refusal or f"golden.json belongs to {record.compiler}, here compiles {made_by}")
        return 1
    known = {name: record.kernels[name] for name in found if name in record.kernels}
    for name, kernel in found.items():
        lines = list(kernel.differences(known[name])) if name in known else ["is not in golden.json"]
        if lines:
            print("\n    ".join([name, *lines]))
    same_ptx, same_plan = (
        sum(getattr(found[n], field) == getattr(was, field) for n, was in known.items()) for field in ("sha256", "key")
    )
    print(f"of {len(found)} kernels {same_ptx} have the recorded PTX, {same_plan} the recorded plan")
    return int(known != found)


def update(found: dict[str, Kernel], made_by: str) -> int:
    """Writes the kernels found; others stay, but for plans that are gone."""
    kept: dict[str, Kernel] = {}
    seals: dict[str, str] = {}
    if len(found) < len(PLANS):
        before = Record.read()
        if before.refusal or before.compiler != made_by:
            print(before.refusal or f"golden.json belongs to {before.compiler}: record all kernels")
            return 1
        kept, seals = before.kernels, before.seals
    kernels = {n: found.get(n) or kept[n] for n in PLANS if n in found or n in kept}
    seals = seals | {n: seal(traced(n), kernel) for n, kernel in found.items()}
    Record(language(), made_by, kernels, {n: seals[n] for n in kernels if n in seals}).write()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
