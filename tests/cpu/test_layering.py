"""The rules of the cut (docs/design.md, section 2), read from the imports of every file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "composattn"


@dataclass(frozen=True)
class File:
    """One source file: its dotted module name and its text."""

    module: str
    source: str
    is_package: bool = False

    def imports(self) -> Iterator[str]:
        """Every module or name this file imports, anywhere in it, as absolute dotted names."""
        package = self.module if self.is_package else self.module.rpartition(".")[0]
        for node in ast.walk(ast.parse(self.source)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = package.split(".")
                    parents = parents[: len(parents) - node.level + 1]
                    base = ".".join([*parents, base] if base else parents)
                yield from (f"{base}.{alias.name}" for alias in node.names)


def package_files() -> list[File]:
    files = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        files.append(File(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package))
    return files


def within(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def ours(file: File) -> list[str]:
    return [name for name in file.imports() if within(name, "composattn")]


# A rule takes a file and returns what is wrong with it, one line each.
Rule = Callable[[File], list[str]]


def may_import_only(layer: str, *allowed: str) -> Rule:
    def rule(file: File) -> list[str]:
        if not within(file.module, layer):
            return []
        return [f"{file.module} imports {name}" for name in ours(file) if not within(name, *allowed)]

    return rule


def never_imports(layer: str, *forbidden: str, but: str | None = None) -> Rule:
    """`but`: modules whose name begins like this may."""

    def rule(file: File) -> list[str]:
        if not within(file.module, layer) or (but is not None and file.module.startswith(but)):
            return []
        return [f"{file.module} imports {name}" for name in file.imports() if within(name, *forbidden)]

    return rule


ARCHITECTURE_WORD = re.compile(r"(?<![a-z0-9])sm_?[0-9]{2,3}[af]?(?![a-z0-9])", re.IGNORECASE)


def architecture_words(file: File) -> list[str]:
    # The emulator runs what was generated for a target and reads that name from the PTX.
    if within(file.module, "composattn.backends", "composattn.emulator"):
        return []
    return [
        f"{file.module}:{number} says {found.group()}"
        for number, line in enumerate(file.source.splitlines(), start=1)
        for found in ARCHITECTURE_WORD.finditer(line)
    ]


def says_what_it_owns(file: File) -> list[str]:
    tree = ast.parse(file.source)
    return (
        [] if ast.get_docstring(tree) or not tree.body else [f"{file.module} has no first line that says what it owns"]
    )


GRAPH = ("composattn.graph", "composattn.errors")
ANALYSIS = ("composattn.analysis", *GRAPH)
MODS = ("composattn.mods", *ANALYSIS)
CALL = ("composattn.call", *MODS)
KERNEL_LANGUAGE = ("cutlass", "triton", "cuda")

RULES: dict[str, tuple[Rule, File]] = {
    # rule: (check, a file that breaks it)
    "errors_import_nothing": (
        may_import_only("composattn.errors", "composattn.errors"),
        File("composattn.errors", "from composattn import graph"),
    ),
    "graph_imports_nothing_above_it": (
        may_import_only("composattn.graph", *GRAPH),
        File("composattn.graph.expr", "from ..analysis import solve"),
    ),
    "graph_knows_no_kernel_language": (
        never_imports("composattn.graph", *KERNEL_LANGUAGE),
        File("composattn.graph.expr", "def f():\n    import cutlass.cute as cute"),
    ),
    "analysis_stands_on_the_graph_alone": (
        may_import_only("composattn.analysis", *ANALYSIS),
        File("composattn.analysis.bands", "from ..call.problem import Problem"),
    ),
    "mods_stand_on_graph_and_analysis": (
        may_import_only("composattn.mods", *MODS),
        File("composattn.mods.masks", "from composattn.backends.fused.plan import Plan"),
    ),
    "a_call_knows_no_backend": (
        may_import_only("composattn.call", *CALL),
        File("composattn.call.problem", "from ..backends import choose"),
    ),
    "primitives_see_the_graph_only_in_emit": (
        never_imports("composattn.primitives", "composattn.graph", but="composattn.primitives.emit"),
        File("composattn.primitives.masking", "from ..graph.expr import Expr"),
    ),
    "primitives_do_not_know_the_backends": (
        never_imports("composattn.primitives", "composattn.backends"),
        File("composattn.primitives.delta", "from ..backends import hopper"),
    ),
    "hopper_never_imports_blackwell": (
        never_imports("composattn.backends.hopper", "composattn.backends.blackwell"),
        File("composattn.backends.hopper.forward", "from ..blackwell.forward import Forward"),
    ),
    "blackwell_never_imports_hopper": (
        never_imports("composattn.backends.blackwell", "composattn.backends.hopper"),
        File("composattn.backends.blackwell.forward", "import composattn.backends.hopper.forward"),
    ),
    "architecture_words_stay_in_target_and_backends": (
        architecture_words,
        File("composattn.call.problem", "tiles = {'sm_90a': 128}"),
    ),
    "every_file_says_what_it_owns": (says_what_it_owns, File("composattn.backends.fused.plan", "import torch")),
}


@pytest.mark.parametrize("rule", RULES)
def test_kept(rule: str) -> None:
    check, _ = RULES[rule]
    files = package_files()
    assert len(files) > 3, "the package was not found"
    assert [problem for file in files for problem in check(file)] == []


@pytest.mark.parametrize("rule", RULES)
def test_a_file_that_breaks_it_is_found(rule: str) -> None:
    check, broken = RULES[rule]
    assert check(broken) != []


def test_importing_the_package_imports_nothing_heavy() -> None:
    # the kernel language, the compiler of torch and algebra take seconds; who needs one waits for it then
    heavy = {"cutlass", "triton", "cuda", "matplotlib", "tvm_ffi", "sympy", "torch._dynamo", "torch._inductor"}
    code = (
        "import sys; import torch; before = set(sys.modules); import composattn;"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    new = done.stdout.split()
    assert "composattn.api" in new
    assert [name for name in new if within(name, *heavy)] == []
