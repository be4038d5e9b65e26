"""Code that chooses shrinks: who adds a case takes one away, or writes it as a row of a table."""

from __future__ import annotations

import ast

from tests.choosing import Count, branches, counted, summed

MOST = Count(lines=2483, branches=237)


def test_no_more_code_chooses_than_before() -> None:
    found = summed(counted())
    assert found.lines <= MOST.lines and found.branches <= MOST.branches, found


def test_what_was_saved_is_not_spent_again() -> None:
    found = summed(counted())
    assert MOST.lines - found.lines < 150 and MOST.branches - found.branches < 30, f"write {found} into MOST"


def test_branch_points_are_all_places_where_code_may_go_two_ways() -> None:
    text = """
if a and b or c:                                  # 3
    x = 1 if d else 2                             # 1
elif e:                                           # 1
    y = [n for n in m if n if not n]              # 3
for n in m:                                       # 1
    while n:                                      # 1
        try:
            z = 1
        except ValueError:                        # 1
            z = {"a": 1}["a"]
match z:
    case 1:                                       # 1
        pass
    case _:                                       # 1
        pass
"""
    assert branches(ast.parse(text)) == 13
