"""No new function has more than 15 branches; those that have are listed, with how many, and the list only shrinks."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from tests.rooms import House

MOST = 15
WAYS = ast.If | ast.For | ast.While | ast.IfExp | ast.ExceptHandler | ast.match_case

BEFORE: dict[str, int] = {
    "api.__call__": 36, "api.attention": 27, "bound_call.__call__": 21, "bound_call.backward": 18,
    "cluster._advance": 20, "launch_backward.__call__": 17,
    "plan_cache._planned_by_form": 16, "plan_cache.planned_for": 24, "plan_cache.planned_of": 17,
    "planned.__call__": 21, "ready.made": 20, "work.__call__": 18,
}  # fmt: skip
BEFORE_WHOLE: dict[str, int] = {
    "access.atomic": 27, "api.__call__": 36, "api.attention": 27, "bound_backward._launching": 16,
    "bound_call.__call__": 21, "bound_call.backward": 18, "cluster._advance": 20,
    "gradient_operator.differentiable": 16, "launch_backward.__call__": 17,
    "matrix.multiply": 21, "plan_cache._planned_by_form": 16, "plan_cache.planned_for": 24,
    "plan_cache.planned_of": 17, "planned.__call__": 22, "ready.made": 20, "ready.ready": 21,
    "synchronise.registers": 17, "synchronise.run": 16, "synchronise.wait": 18, "tensor_mma.multiply": 20,
    "work.__call__": 18,
}  # fmt: skip
"""By file and function. A number that fell is written down here; a line that may go goes."""


def branches(function: ast.FunctionDef) -> int:
    """One, and one more for each condition and loop, those inside of expressions too; functions inside count apart."""
    count, waiting = 1, list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        count += isinstance(node, WAYS)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        count += 1 + len(node.ifs) if isinstance(node, ast.comprehension) else 0
        waiting += ast.iter_child_nodes(node)
    return count


def whole(function: ast.FunctionDef) -> int:
    """A count as of other tools: functions inside, assertions and an `else` of a loop or a `try` are branches too."""
    count = 0
    for node in ast.walk(function):
        count += branches(node) if isinstance(node, ast.FunctionDef) else 0
        count += isinstance(node, ast.Lambda | ast.Assert)
        count += isinstance(node, ast.For | ast.While | ast.Try) and bool(node.orelse)
    return count


def most(counts: Callable[[ast.FunctionDef], int]) -> dict[str, int]:
    """Functions of the package with more than `MOST`."""
    found: dict[str, int] = {}
    for module, file in House.at().files.items():
        for node in ast.walk(file.tree):
            if isinstance(node, ast.FunctionDef) and (count := counts(node)) > MOST:
                name = f"{module.rpartition('.')[2]}.{node.name}"
                found[name] = max(count, found.get(name, 0))
    return found


@pytest.mark.parametrize(("counts", "before"), [(branches, BEFORE), (whole, BEFORE_WHOLE)], ids=["own", "whole"])
def test_no_function_has_more_than_fifteen_branches_but_those_that_had_them(
    counts: Callable[[ast.FunctionDef], int], before: dict[str, int]
) -> None:
    found = most(counts)
    assert {name: count for name, count in found.items() if count > before.get(name, MOST)} == {}
    assert {name: found.get(name, MOST) for name in before if found.get(name, MOST) < before[name]} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("return 1", 1),
        ("if a and b or c:\n  pass\nelif d:\n  pass", 5),
        ("return [x for x in y if x] if z else [w for w in y]", 5),
        ("try:\n  pass\nexcept E:\n  pass\nwhile a:\n  pass", 3),
        ("def g():\n  if a:\n    pass", 1),
    ],
)
def test_conditions_and_loops_are_counted_inside_of_expressions_too(source: str, count: int) -> None:
    made = ast.parse("def f():\n" + "\n".join(f"  {line}" for line in source.split("\n"))).body[0]
    assert isinstance(made, ast.FunctionDef) and branches(made) == count


def test_what_stands_inside_of_a_function_is_counted_with_it_by_the_other_count() -> None:
    inner = "  def g():\n    assert a\n    return lambda: b if c else d\n"
    made = ast.parse(f"def f():\n{inner}  for e in h:\n    pass\n  else:\n    pass").body[0]
    assert isinstance(made, ast.FunctionDef) and (branches(made), whole(made)) == (2, 2 + 1 + 1 + 2 + 1)
