"""The rooms of the package and which may import which, counted: `python tests/rooms.py [folder of a checkout]`.

An import counts wherever it stands, inside of functions too, once per importing file and imported module. Imports under
`if TYPE_CHECKING:` never run and are listed apart. Names that importlib is given at run time can't be followed, so they
are counted.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]

ROOMS = {
    "errors": "errors extras settings watched",
    "emulator": "emulator",
    "graph": "graph",
    "analysis": "analysis",
    "mods": "mods",
    "call": "call",
    "primitives": "primitives",
    "backends in PyTorch": "backends/gathered backends/reference backends/layouts backends/sinks"
    " backends/streaming backends/tiles",
    "backends/fused": "backends/fused",
    "backends/hopper": "backends/hopper",
    "backends/blackwell": "backends/blackwell",
    "backends/warp": "backends/warp",
    "backends, by name": "backends",
    "dispatch": "dispatch",
    "parallel": "parallel",
    "front door": "__init__ __main__ api nn flex explain weights shaped doctor tuning quantising",
    "testing": "testing",
    "integrations": "integrations",
}
"""From the ground up, each room with its folders and files: a room imports from rooms before it alone."""

ARCHITECTURES = ("hopper", "blackwell", "warp")
"""Modules named after one of them are what another architecture writes anew."""

VERSION_0_1_0 = {
    "call": "problem sequences schedule block_sparse checks strides autograd",
    "backends/fused": "target plan plan_backward work cut compile launch launch_backward toolchain disk_cache captured",
    "dispatch": "planned kept transforms operators",
}
"""The files that version 0.1.0 had beside its folders, each a room, by where they are now: to count that tree too."""

ROOM_OF = {path: room for room, paths in ROOMS.items() for path in paths.split()}
FLOOR_OF = {room: number for number, room in enumerate(ROOMS)}
FLOOR_OF |= {file: FLOOR_OF[room] for room, files in VERSION_0_1_0.items() for file in files.split()}


def room_of(name: str) -> str:
    """The room of a module or of a name in it: by the longest part of its path that is one, else by the first part."""
    path = name.split(".")[1:] or ["__init__"]
    inner_first = ("/".join(path[:depth]) for depth in range(len(path), 0, -1))
    return next((ROOM_OF[part] for part in inner_first if part in ROOM_OF), path[0])


@dataclass(frozen=True)
class File:
    """One source file: its dotted module name and its text."""

    module: str
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def lines(self) -> int:
        return self.source.count("\n")

    @property
    def room(self) -> str:
        return room_of(self.module)

    @property
    def architecture(self) -> str | None:
        """The one that it is written for, None where it serves all."""
        parts = self.module.split(".")
        return next((name for name in ARCHITECTURES if any(part.startswith(name) for part in parts)), None)

    def imports(self, *, for_types: bool | None = None) -> Iterator[str]:
        """Every module or name it imports, as absolute dotted names; `for_types` picks those under `if TYPE_CHECKING:`,
        or all others."""
        package = self.module if self.is_package else self.module.rpartition(".")[0]
        for node in ast.walk(self.tree):
            if for_types is not None and for_types != (node in self._for_types_alone):
                continue
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = package.split(".")
                    parents = parents[: len(parents) - node.level + 1]
                    base = ".".join([*parents, base] if base else parents)
                yield from (f"{base}.{alias.name}" for alias in node.names)

    @cached_property
    def _for_types_alone(self) -> frozenset[ast.AST]:
        guards = (n for n in ast.walk(self.tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))
        return frozenset(inner for guard in guards for node in guard.body for inner in ast.walk(node))

    def imports_by_name(self) -> int:
        """How often it asks importlib for a module of the package, or for one that is named at run time."""
        calls = (n for n in ast.walk(self.tree) if isinstance(n, ast.Call))
        names = (n.args[0] for n in calls if ast.unparse(n.func).endswith("import_module"))
        return sum(not isinstance(n, ast.Constant) or str(n.value).startswith("composattn") for n in names)

    def functions(self) -> Iterator[tuple[int, str]]:
        """The lines of each function, from `def` to its end, and its name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (node.end_lineno or node.lineno) - node.lineno + 1, f"{self.module}.{node.name}"


@dataclass(frozen=True)
class Import:
    """One file that imports one module."""

    by: File
    of: File

    @property
    def points_up(self) -> bool:
        return FLOOR_OF[self.of.room] > FLOOR_OF[self.by.room]

    def __str__(self) -> str:
        return f"{self.by.module} imports {self.of.module}"


@dataclass(frozen=True)
class House:
    """The package in a checkout, or another folder of it: its files by module name."""

    files: dict[str, File]

    @classmethod
    def at(cls, root: Path = ROOT, folder: str = "composattn") -> House:
        files = {}
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if is_package else parts)
            files[module] = File(module, path.read_text(), is_package)
        return cls(files)

    def imports(self, *, for_types: bool = False) -> list[Import]:
        """Imports from one room into another one, each once per pair of files."""
        known = [Import(self.files[by], self.files[of]) for by, of in self._pairs(for_types)]
        return [found for found in known if found.by.room != found.of.room]

    def _pairs(self, for_types: bool | None) -> list[tuple[str, str]]:
        """Every file with every file of the package that it imports, or takes a name from."""
        pairs = {
            (file.module, name if name in self.files else name.rpartition(".")[0])
            for file in self.files.values()
            for name in file.imports(for_types=for_types)
        }
        return sorted((by, of) for by, of in pairs if of in self.files and of != by)

    def circles(self, *, with_types: bool = False) -> list[list[str]]:
        """The groups of files that import each other, straight or through others; `with_types`: for types alone too."""
        imported: dict[str, set[str]] = {module: set() for module in self.files}
        for by, of in self._pairs(None if with_types else False):
            imported[by].add(of)
        reached = {module: _reached(module, imported) for module in self.files}
        circles = {tuple(sorted(m for m in reached[of] if of in reached[m])) for of in self.files if of in reached[of]}
        return [list(circle) for circle in sorted(circles)]

    def wings(self, package: str = "composattn.backends.fused") -> dict[str, set[str]]:
        """What lies in a package, folders and files, with what else there each imports when it runs."""
        inside = [module for module in self.files if module.startswith(f"{package}.")]
        wing = {module: module.removeprefix(f"{package}.").split(".")[0] for module in inside}
        found: dict[str, set[str]] = {name: set() for name in wing.values()}
        for by, of in self._pairs(False):
            if by in wing and of in wing and wing[by] != wing[of]:
                found[wing[by]].add(wing[of])
        return found

    def upward(self, *, for_types: bool = False) -> list[Import]:
        return [found for found in self.imports(for_types=for_types) if found.points_up]

    def lines_by_room(self) -> dict[str, int]:
        """From the ground up."""
        counted: Counter[str] = Counter()
        for file in self.files.values():
            counted[file.room] += file.lines
        return {room: counted[room] for room in sorted(counted, key=lambda room: (FLOOR_OF[room], room))}

    def shared_by_architectures(self) -> float:
        """The share of the lines on the floors of the backends that another architecture need not write.

        Measured at the one that has written most: what the others wrote is no part of what it runs with. What lies
        among what all share and only one architecture imports, straight or through others, was written for that one.
        """
        floors = range(FLOOR_OF["backends in PyTorch"], FLOOR_OF["backends, by name"] + 1)
        backends = {module: file for module, file in self.files.items() if FLOOR_OF[file.room] in floors}
        imported: dict[str, set[str]] = {module: set() for module in self.files}
        for by, of in self._pairs(False):
            imported[by].add(of)
        own = {name: self._of_one(name, imported) & backends.keys() for name in ARCHITECTURES}
        shared = backends.keys() - set().union(*own.values())
        lines = sum(backends[module].lines for module in shared)
        return lines / (lines + max(sum(backends[module].lines for module in one) for one in own.values()))

    def _of_one(self, architecture: str, imported: dict[str, set[str]]) -> set[str]:
        """The files of an architecture, and those that nobody would reach from the top without them."""
        top = {m for m, file in self.files.items() if FLOOR_OF[file.room] >= FLOOR_OF["backends, by name"]}
        folder = {module for module, file in self.files.items() if file.architecture == architecture}
        others = {module: set() if module in folder else of for module, of in imported.items()}
        return folder | _reached("top", {**imported, "top": top}) - _reached("top", {**others, "top": top})

    def longest_function(self) -> tuple[int, str]:
        return max(found for file in self.files.values() for found in file.functions())


def _reached(module: str, imported: dict[str, set[str]]) -> set[str]:
    """All that a file imports, straight or through others: itself too, if it stands in a circle."""
    found: set[str] = set()
    waiting = list(imported[module])
    while waiting:
        of = waiting.pop()
        if of not in found:
            found.add(of)
            waiting += imported[of]
    return found


def floors(imported: dict[str, set[str]]) -> list[set[str]]:
    """Who imports whom, from the ground up: each stands above all that it imports. Raises: `CycleError`."""
    order = TopologicalSorter(imported)
    order.prepare()
    found = []
    while order.is_active():
        ready = order.get_ready()
        found.append(set(ready))
        order.done(*ready)
    return found


def _floors_of(imported: dict[str, set[str]]) -> str:
    try:
        return str(len(floors(imported)))
    except CycleError:
        return "in a circle"


def table(house: House) -> str:
    """What the house is like, in Markdown."""
    imports, upward, typed = house.imports(), house.upward(), house.imports(for_types=True)
    arrows = {(found.by.room, found.of.room) for found in imports}
    longest, name = house.longest_function()
    wings, circles = house.wings(), f"{len(house.circles())}, {len(house.circles(with_types=True))}"
    rows = {
        "lines": f"{sum(file.lines for file in house.files.values()):,}",
        **{f"lines, {room}": f"{lines:,}" for room, lines in house.lines_by_room().items()},
        "rooms": f"{len(house.lines_by_room())}",
        "pairs of rooms where one imports from the other": f"{len(arrows)}",
        "imports between rooms": f"{len(imports)}",
        "imports that point upward": f"{len(upward)}",
        "imports for types alone: between rooms, upward": f"{len(typed)}, {sum(t.points_up for t in typed)}",
        "circles of files: when it runs, with imports for types": circles,
        "wings of backends/fused, floors": f"{len(wings)}, {_floors_of(wings)}",
        "imports by a name given at run time": f"{sum(file.imports_by_name() for file in house.files.values())}",
        "share of the backends that another architecture need not write": f"{house.shared_by_architectures():.0%}",
        "longest function": f"{longest} lines, `{name}`",
    }
    lines = ["| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows.items())]
    if upward:
        lines += ["", "Imports that point upward:", "", *(f"- {found}" for found in upward)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(House.at(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)))
