"""The rules of the cut (docs/design.md, section 2), read from the imports of every file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.rooms import FLOOR_OF, ROOT, File, House, floors, room_of, table


def within(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


# A rule takes a file and returns what is wrong with it, one line each.
Rule = Callable[[File], list[str]]


def imports_from_rooms_above(file: File) -> list[str]:
    here = FLOOR_OF[file.room]
    names = (name for name in file.imports(for_types=False) if within(name, "composattn"))
    return [f"{file.module} imports {name}" for name in names if FLOOR_OF[room_of(name)] > here]


def never_imports(layer: str, *forbidden: str, but: str | None = None) -> Rule:
    """`but`: modules whose name begins like this may."""

    def rule(file: File) -> list[str]:
        if not within(file.module, layer) or (but is not None and file.module.startswith(but)):
            return []
        return [f"{file.module} imports {name}" for name in file.imports() if within(name, *forbidden)]

    return rule


OF_ONE_ARCHITECTURE = re.compile(
    r"(?<![a-z0-9])sm_?[0-9]{2,3}[af]?(?![a-z0-9])|wgmma|warp_?group|tcgen05|tmem|setmaxnreg|named[ _]?barrier",
    re.IGNORECASE,
)
BELOW_THE_SEAM = (
    "composattn.backends.hopper",
    "composattn.backends.blackwell",
    "composattn.backends.warp",
    "composattn.backends.fused.tiles.target",  # facts of each GPU
    "composattn.emulator",  # runs what was generated for a target, by the names in its PTX
)


def words_of_one_architecture(file: File) -> list[str]:
    if within(file.module, *BELOW_THE_SEAM):
        return []
    return [
        f"{file.module}:{number} says {found.group()}"
        for number, line in enumerate(file.source.splitlines(), start=1)
        for found in OF_ONE_ARCHITECTURE.finditer(line)
    ]


def imports_of_an_architecture(file: File) -> list[str]:
    if file.module == "composattn.backends" or within(file.module, *ARCHITECTURES):
        return []
    return [f"{file.module} imports {name}" for name in file.imports() if within(name, *ARCHITECTURES)]


def imports_by_a_name_of_run_time(file: File) -> list[str]:
    """The rules above can't follow these."""
    if file.module == "composattn.__main__":
        return []
    return [f"{file.module} imports a module by a name"] * file.imports_by_name()


def says_what_it_owns(file: File) -> list[str]:
    tree = ast.parse(file.source)
    return (
        [] if ast.get_docstring(tree) or not tree.body else [f"{file.module} has no first line that says what it owns"]
    )


ARCHITECTURES = ("composattn.backends.hopper", "composattn.backends.blackwell", "composattn.backends.warp")
EXPRESSIONS = ("composattn.graph", "composattn.analysis")
KERNEL_LANGUAGE = ("cutlass", "triton", "cuda")

RULES: dict[str, tuple[Rule, File]] = {
    # rule: (check, a file that breaks it)
    "no_room_imports_from_one_above_it": (
        imports_from_rooms_above,
        File("composattn.graph.expr", "def f():\n    from ..analysis import solve"),
    ),
    "graph_knows_no_kernel_language": (
        never_imports("composattn.graph", *KERNEL_LANGUAGE),
        File("composattn.graph.expr", "def f():\n    import cutlass.cute as cute"),
    ),
    "primitives_see_the_graph_only_in_emit": (
        never_imports("composattn.primitives", *EXPRESSIONS, but="composattn.primitives.emit"),
        File("composattn.primitives.masking", "from ..graph.expr import Expr"),
    ),
    "primitives_know_no_call": (
        never_imports("composattn.primitives", "composattn.mods", "composattn.call"),
        File("composattn.primitives.values", "from ..call.problem import Problem"),
    ),
    "the_registry_alone_knows_the_architectures": (
        imports_of_an_architecture,
        File("composattn.explain", "def f():\n    from .backends.hopper.forward_choice import forward_tiling"),
    ),
    "hopper_never_imports_blackwell": (
        never_imports("composattn.backends.hopper", "composattn.backends.blackwell"),
        File("composattn.backends.hopper.forward", "from ..blackwell.forward import Forward"),
    ),
    "warp_never_imports_hopper": (
        never_imports("composattn.backends.warp", "composattn.backends.hopper"),
        File("composattn.backends.warp.forward", "from ..hopper.wgmma import fragment_shape"),
    ),
    "warp_never_imports_blackwell": (
        never_imports("composattn.backends.warp", "composattn.backends.blackwell"),
        File("composattn.backends.warp.forward", "import composattn.backends.blackwell.forward"),
    ),
    "blackwell_never_imports_hopper": (
        never_imports("composattn.backends.blackwell", "composattn.backends.hopper"),
        File("composattn.backends.blackwell.forward", "import composattn.backends.hopper.forward"),
    ),
    "words_of_one_architecture_stay_below_the_seam": (
        words_of_one_architecture,
        File("composattn.primitives.pipelines", "# waits for wgmma"),
    ),
    "modules_named_at_run_time_are_those_of_the_command_line": (
        imports_by_a_name_of_run_time,
        File(
            "composattn.backends.fused.planning.plan", "importlib.import_module(f'composattn.backends.{name}.tiling')"
        ),
    ),
    "every_file_says_what_it_owns": (
        says_what_it_owns,
        File("composattn.backends.fused.planning.plan", "import torch"),
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_kept(rule: str) -> None:
    check, _ = RULES[rule]
    files = House.at(ROOT).files
    assert len(files) > 100, "the package was not found"
    found = {module: problems for module, file in files.items() if (problems := check(file))}
    assert [problem for problems in found.values() for problem in problems] == []


@pytest.mark.parametrize("rule", RULES)
def test_a_file_that_breaks_it_is_found(rule: str) -> None:
    check, broken = RULES[rule]
    assert check(broken) != []


def test_rooms_are_counted_by_who_imports_whom_when_it_runs() -> None:
    files = (
        File("composattn.graph", "", is_package=True),
        File("composattn.graph.expr", "def f():\n    from ..mods import mask\n    return mask\n"),
        File("composattn.mods.mask", "if TYPE_CHECKING:\n    from ..api import attention\nfrom ..graph import expr\n"),
        File("composattn.api", "from importlib import import_module\nimport_module(f'composattn.{1}')\n"),
        File("composattn.backends.hopper.forward", "a = 1\n"),
        File("composattn.backends.blackwell.forward", "a = 1\n"),
        File("composattn.backends.streaming", "a = 1\nb = 2\nc = 3\n"),
    )
    house = House({file.module: file for file in files})
    assert [str(found) for found in house.imports()] == [
        "composattn.graph.expr imports composattn.mods.mask",
        "composattn.mods.mask imports composattn.graph.expr",
    ]
    assert [str(found) for found in house.upward()] == ["composattn.graph.expr imports composattn.mods.mask"]
    assert [str(found) for found in house.upward(for_types=True)] == ["composattn.mods.mask imports composattn.api"]
    assert house.lines_by_room()["graph"] == 3
    assert house.shared_by_architectures() == 0.75
    assert house.longest_function() == (3, "composattn.graph.expr.f")
    assert "| imports by a name given at run time | 1 |" in table(house)


def test_circles_are_found_in_functions_and_through_other_files() -> None:
    files = (
        File("composattn.a", "def f():\n    from .b import g\n    return g\n"),
        File("composattn.b", "from . import c\n"),
        File("composattn.c", "from .a import f\n"),
        File("composattn.d", "from .a import f\nif TYPE_CHECKING:\n    from .e import h\n"),
        File("composattn.e", "from .d import f\n"),
    )
    house = House({file.module: file for file in files})
    assert house.circles() == [["composattn.a", "composattn.b", "composattn.c"]]
    assert house.circles(with_types=True)[1:] == [["composattn.d", "composattn.e"]]


@pytest.mark.parametrize("folder", ["composattn", "benchmarks"])
def test_no_files_import_each_other_when_they_run(folder: str) -> None:
    assert House.at(ROOT, folder).circles() == []


def test_no_files_know_each_other_for_types_either() -> None:
    assert House.at(ROOT).circles(with_types=True) == []


def test_wings_stand_above_what_they_import() -> None:
    files = (
        File("composattn.backends.fused", "from .top import x\n", is_package=True),
        File("composattn.backends.fused.top.x", "from ..middle.y import g\n"),
        File("composattn.backends.fused.middle.y", "def f():\n    from ..ground import z\n    return z\n"),
        File("composattn.backends.fused.ground.z", "a = 1\n"),
        File("composattn.backends.fused.apart", "a = 1\n"),
    )
    assert floors(House({file.module: file for file in files}).wings()) == [{"ground", "apart"}, {"middle"}, {"top"}]


def test_what_generated_kernels_share_has_few_wings_and_floors() -> None:
    wings = House.at(ROOT).wings()
    assert len(wings) <= 6
    assert len(floors(wings)) <= 5


def test_what_only_one_architecture_imports_is_its_own() -> None:
    files = (
        File("composattn.backends", "from .hopper import forward\nfrom .blackwell import forward\n", is_package=True),
        File("composattn.backends.hopper.forward", "from ..fused import its_own\nfrom ..fused import all_have\n"),
        File("composattn.backends.blackwell.forward", "from ..fused import all_have\n"),
        File("composattn.backends.fused.its_own", "from . import behind\n"),
        File("composattn.backends.fused.behind", "from . import all_have\n"),
        File("composattn.backends.fused.all_have", "a = 1\n"),
    )
    house = House({file.module: file for file in files})
    assert house.shared_by_architectures() == 3 / (3 + 4), "the package and what all have; Hopper's two files"


def test_most_of_the_backends_serves_another_architecture() -> None:
    assert House.at(ROOT).shared_by_architectures() >= 0.7


def test_an_architecture_of_its_own_is_small() -> None:
    assert House.at(ROOT).lines_by_room()["backends/blackwell"] <= 3000
    # the forward: all but what the backward alone has
    folder = ROOT / "composattn" / "backends" / "blackwell"
    backward = (*folder.glob("backward*.py"), folder / "key_tile.py", folder / "rounding.py")
    forward = set(folder.glob("*.py")) - set(backward)
    assert sum(len(path.read_text().splitlines()) for path in forward) <= 2000


def test_what_tests_of_a_gpu_share_with_others_lies_beside_their_folders() -> None:
    # they run from a copy of no other folder of tests, where one that imports another is not collected
    asks = re.compile(r"^\s*from tests\.(?:cpu|compile|serving)\b.*", re.MULTILINE)
    files = [*(ROOT / "tests" / "gpu").glob("*.py"), *(ROOT / "tests").glob("*.py")]
    assert [line for path in files for line in asks.findall(path.read_text())] == []


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
