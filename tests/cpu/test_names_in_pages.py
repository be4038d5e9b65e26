"""Every file, command, option and name of code that a page has in backticks is there."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import fnmatch
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.rooms import ROOT

PAGES = ("CONTRIBUTING.md", "benchmarks/findings.md", "docs/blackwell.md", "docs/design.md", "docs/emulator.md",
         "docs/how_it_works.md", "docs/parallel.md", "docs/tile_model.md")  # fmt: skip
FOLDERS = ("composattn", "tests", "benchmarks", "docs", "recipes")
# names of torch, of tools and of instructions, and the one that users give our package; shapes, and names of users
OTHERS = """ca sympy mypy autograd Function BlockMask AuxRequest make_fx create_graph init_process_group racecheck atol
    cutlass use_pdl tmem sm90 sm_90a setmaxnreg griddepcontrol mbarrier_init ld st red B D Dv H Hq Hkv S Sq Skv a b c h
    i j n q kv x t means limit tensor real_tensor proxy windowed cu_seqlens"""


@functools.cache
def sources() -> dict[Path, str]:
    found = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {path: path.read_text() for path in found if path != Path(__file__)}


@functools.cache
def paths() -> list[str]:
    """Paths of files and folders, whole and from each folder on: a page may leave out where they lie."""
    known = [*ROOT.glob("*"), *(path for folder in (*FOLDERS, ".ci") for path in (ROOT / folder).rglob("*"))]
    parts = [path.relative_to(ROOT).parts for path in known]
    return ["/".join(names[start:]) for names in parts for start in range(len(names))]


@dataclasses.dataclass
class Defined:
    """What the tree defines: all names, and by function and class what it can be called with; the bases of a class."""

    names: set[str]
    takes: dict[str, set[str]]
    bases: dict[str, set[str]]

    def called_with(self, callee: str, keyword: str) -> bool:
        """Whether what is called has an argument of a name, or inherits one; true of what the tree does not define."""
        line, waiting = set[str](), [callee]
        while waiting:
            line.add(waiting.pop())
            waiting += set().union(*(self.bases.get(name, set()) for name in line)) - line
        known = [self.takes[name] for name in line if name in self.takes]
        return not known or any(keyword in found for found in known)


def arguments(function: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]}


@functools.cache
def defined() -> Defined:
    found = Defined(
        {part for path in sources() for part in path.with_suffix("").parts}, defaultdict(set), defaultdict(set)
    )
    for node in (node for text in sources().values() for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.FunctionDef):
            found.takes[node.name] |= arguments(node)
        elif isinstance(node, ast.ClassDef):
            fields = [inner.target for inner in node.body if isinstance(inner, ast.AnnAssign)]
            own = [arguments(inner) for inner in node.body if isinstance(inner, ast.FunctionDef)]
            found.takes[node.name] |= {field.id for field in fields if isinstance(field, ast.Name)}.union(*own)
            found.bases[node.name] |= {ast.unparse(base).split("[")[0] for base in node.bases}
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
            found.names.add(str(node.value))  # of a kernel, or a form
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.names |= {target.id for target in targets if isinstance(target, ast.Name)}
            found.names |= {target.attr for target in targets if isinstance(target, ast.Attribute)}
    found.names |= set(found.takes).union(*found.takes.values())
    return found


def is_torchs(name: str) -> bool:
    return hasattr(torch, name) or hasattr(torch.Tensor, name)


def missing_names(code: ast.AST) -> Iterator[str]:
    """Names, attributes and arguments of an expression that neither the tree nor torch has."""
    names = defined().names | set(OTHERS.split())
    for node in ast.walk(code):
        if isinstance(node, ast.Name) and not hasattr(builtins, node.id) and node.id not in names:
            yield from [] if is_torchs(node.id) else [node.id]
        elif isinstance(node, ast.Attribute) and (dotted := ast.unparse(node)).startswith("torch."):
            found = functools.reduce(lambda of, part: getattr(of, part, None), dotted.split(".")[1:], torch)
            yield from [] if found is not None else [dotted]
        elif isinstance(node, ast.Attribute) and node.attr not in names and not is_torchs(node.attr):
            yield node.attr
        elif isinstance(node, ast.Call):
            callee = ast.unparse(node.func).rpartition(".")[2]
            words = [word.arg for word in node.keywords if word.arg]
            yield from (f"{callee}({word}=)" for word in words if not defined().called_with(callee, word))


def missing(quoted: str) -> list[str]:
    """What a text in backticks names that is not there; nothing of formulas, shapes and texts that are no code."""
    command, _, rest = quoted.partition(" ")
    if re.fullmatch(r"[0-9a-f]{7,12}", quoted):
        return []  # a commit
    if command.startswith("ARGS="):
        return []  # of make
    if command == "make" and rest:
        target = rest.split()[0]
        return [] if re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) else [quoted]
    if command == "python" and rest:
        module = rest.removeprefix("-m ").split()[0]
        path = module if module.endswith(".py") else module.replace(".", "/")
        return [] if {path, f"{path}.py"} & set(paths()) else [quoted]
    if re.fullmatch(r"--[a-z-]+", quoted) or re.match(r"COMPOSATTN_\w+", quoted):
        word = re.split(r"[= ]", quoted)[0]
        texts = [*sources().values(), *(p.read_text() for p in (ROOT / ".ci").iterdir())]
        return [] if any(word in text for text in texts) else [quoted]
    if re.fullmatch(r"[\w.*-]+(/[\w.*-]+)+/?|[\w*-]+\.(py|md|json|toml|yml)|\.?\w+/", quoted):
        return [] if fnmatch.filter(paths(), quoted.rstrip("/")) else [quoted]
    try:
        return list(missing_names(ast.parse(quoted)))
    except SyntaxError:
        return []


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    quoted = dict.fromkeys(re.findall(r"`([^`\n]+)`", text))
    assert {name: found for name in quoted if (found := missing(name))} == {}


@pytest.mark.parametrize(
    "claim",
    ["fused/nothing.py", "make nothing", "python -m benchmarks.nothing", "--no-such-option", "Band(left=4096, right=0)",
     'Op("tanh", torch.tanh, bounds=monotone)', "HopperTiling(nothing=3)", "torch.no_such_name", "no_such_function()"],
)  # fmt: skip
def test_a_claim_that_nothing_bears_out_is_found(claim: str) -> None:
    assert missing(claim) != []
